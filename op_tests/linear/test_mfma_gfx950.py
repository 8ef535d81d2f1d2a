"""The CDNA4 decode kernel against float64: in the simulator, and with ``-m gpu`` on an MI350X."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import aiter_mx
from aiter_mx.code_object import parse_code_object
from aiter_mx.jit.build import build_all
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear import mfma_gfx950 as registry
from aiter_mx.kernels.linear.mfma_gfx950 import MAX_K, MAX_M, MFMA, PARAMS
from aiter_mx.kernels.spec import Config, Geometry, KernelSpec, combinations
from aiter_mx.launch import build_request
from aiter_mx.runtimes.sim import last_report
from aiter_mx.target import hardware, target_of
from op_tests.linear.cases import DTYPES, Operands, launch_linear, operands
from op_tests.mx_reference import (
    assert_close_to_reference,
    linear_reference64,
    random_mx,
    round_once,
)

GFX950 = hardware("gfx950")
SCHEDULES = ("random", "round-robin", "run-to-barrier")
DECODE_SHAPES = [(2304, 6144), (1536, 6144), (6144, 2048), (6144, 1536), (9216, 6144), (768, 6144)]


@pytest.fixture(params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    if request.param == "cuda":
        if target_of(torch.device("cuda")).arch != "gfx950":
            pytest.skip("the kernel is for another GPU")
        yield torch.device("cuda")
    else:
        with aiter_mx.simulate("gfx950"):
            yield torch.device("cpu")


def config_of(row_tiles: int, fold: int, waves: int, unroll: int) -> dict[str, int]:
    return {"row_tiles": row_tiles, "fold": fold, "waves": waves, "unroll": unroll}


def launch(
    device: torch.device,
    config: Config,
    arguments: Operands,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    kernel: KernelSpec = MFMA,
    cu_num: int = 1,
) -> torch.Tensor:
    """For one compute unit, workgroups have as many rows as they may."""
    return launch_linear(kernel, device, config, arguments, bias, dtype, cu_num)


# Between them these take every value of every parameter and every number of tiles of x. An odd
# number of blocks in K is a variant of its own.
SWEPT = [
    (config_of(1, 1, 1, 1), 1, True, "bf16"),
    (config_of(1, 1, 12, 2), 1, False, "fp32"),
    (config_of(2, 1, 3, 2), 2, False, "bf16"),
    (config_of(1, 1, 8, 1), 3, True, "fp16"),
    (config_of(3, 1, 4, 1), 4, False, "fp32"),
    (config_of(4, 1, 2, 1), 2, True, "bf16"),
    (config_of(2, 2, 6, 1), 1, True, "fp32"),
    (config_of(1, 2, 2, 3), 2, False, "bf16"),
    (config_of(3, 2, 1, 1), 4, True, "bf16"),
    (config_of(1, 4, 4, 4), 1, False, "fp16"),
    (config_of(4, 4, 3, 1), 1, True, "bf16"),
    (config_of(3, 4, 16, 1), 3, False, "fp32"),
]
CASES_EACH = 14


@pytest.mark.parametrize(("config", "col_tiles", "odd_blocks", "dtype"), SWEPT, ids=str)
def test_random_shapes_match_float64(
    device: torch.device,
    config: dict[str, int],
    col_tiles: int,
    odd_blocks: bool,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = random.Random(f"{config} {col_tiles}")
    tile_rows = 16 // config["fold"]
    most_k = 3 * 256 * config["fold"] * config["waves"] * config["unroll"]  # three rounds
    for seed in range(CASES_EACH):
        monkeypatch.setenv("AITER_MX_SIM_SCHEDULE", draw.choice(SCHEDULES))
        monkeypatch.setenv("AITER_MX_SIM_SEED", str(seed))
        M = draw.randint((col_tiles - 1) * tile_rows + 1, col_tiles * tile_rows)
        most_n = config["row_tiles"] * tile_rows * draw.randint(1, 2)
        N = draw.choice([1, draw.randint(2, 15), draw.randint(16, 70), most_n])
        K = 32 * max(1, draw.randint(1, min(most_k, 5_000) // 64) * 2 - odd_blocks)
        exponents = (-12, -6) if dtype == "fp16" else draw.choice([(-20, 20), (-6, 6)])
        drawn = operands(M, N, K, seed, scale_exponents=exponents)
        bias = None
        if bias_dtype := draw.choice([None, *DTYPES.values()]):
            size = linear_reference64(*drawn).abs().mean()
            bias = (torch.randn(N, dtype=torch.float64) * size).to(bias_dtype)
            if not bias.isfinite().all():
                bias = None
        cu_num = draw.choice([1, 1, 3, 7, 256])
        out = launch(device, config, drawn, bias, DTYPES[dtype], cu_num=cu_num)
        assert_close_to_reference(out, *drawn, bias)


@pytest.mark.parametrize("first", [1, 17, 33, 49])
def test_every_m_matches_float64(device: torch.device, first: int) -> None:
    for M in range(first, first + 16):
        drawn = operands(M, 19, 416, M, scale_exponents=(-6, 6))
        assert_close_to_reference(launch(device, config_of(1, 1, 2, 1), drawn), *drawn)


FOLDS = [config_of(1, 1, 2, 1), config_of(2, 2, 2, 1), config_of(1, 4, 1, 1)]
folded = pytest.mark.parametrize("config", FOLDS, ids=["fold 1", "fold 2", "fold 4"])


@folded
@pytest.mark.parametrize(
    ("x_exponents", "w_exponents"),
    [
        ((-127, 127), (-127, 127)),
        ((90, 127), (-127, -90)),
        ((-127, -90), (90, 127)),
        ((-80, -50), (-80, -50)),
        ((40, 70), (20, 40)),
        ((-127, -127), (117, 127)),
    ],
    ids=["any", "huge x", "huge w", "near underflow", "near overflow", "least x"],
)
def test_scales_over_their_whole_range_are_exact(
    device: torch.device,
    config: dict[str, int],
    x_exponents: tuple[int, int],
    w_exponents: tuple[int, int],
) -> None:
    for M, N, K in [(3, 37, 64), (4, 9, 1344)]:
        generator = torch.Generator().manual_seed(N)
        drawn = (
            *random_mx(M, K, generator, scale_exponents=x_exponents),
            *random_mx(N, K, generator, scale_exponents=w_exponents),
        )
        out = launch(device, config, drawn, dtype=torch.float32)
        assert_close_to_reference(out, *drawn, underflow=2.0**-149)


@folded
def test_nan_payloads_and_nan_scales_reach_their_outputs_alone(
    device: torch.device, config: dict[str, int]
) -> None:
    for seed, options in enumerate([{"nan_payload": 2e-4}, {"nan_scale": 5e-3}]):
        drawn = operands(4, 67, 1344, seed, **options)
        out = launch(device, config, drawn)
        assert 0 < out.isnan().float().mean() < 1, "the draw must show both outcomes"
        assert_close_to_reference(out, *drawn)


@folded
@pytest.mark.parametrize("K", [32, 96, 1312])
def test_nan_payloads_at_the_ends_of_a_row_do_not_reach_its_neighbours(
    device: torch.device, config: dict[str, int], K: int
) -> None:
    for column in (0, K - 1):
        xq, xs, wq, ws = operands(4, 21, K, column)
        wq.view(torch.uint8)[18, column] = 0x7F
        xq.view(torch.uint8)[2, column] = 0xFF
        nans = launch(device, config, (xq, xs, wq, ws)).isnan()
        assert nans[:, 18].all() and nans[2].all() and nans.sum() == 4 + 21 - 1


@folded
def test_a_nan_scale_counts_even_where_the_payload_is_zero(
    device: torch.device, config: dict[str, int]
) -> None:
    for block in range(42):
        xq, xs, wq, ws = operands(4, 21, 1344, block)
        wq.view(torch.uint8)[18, 32 * block : 32 * block + 32] = 0
        ws[18, block] = 255
        xq.view(torch.uint8)[2, 32 * block : 32 * block + 32] = 0
        xs[2, 41 - block] = 255
        nans = launch(device, config, (xq, xs, wq, ws)).isnan()
        assert nans[:, 18].all() and nans[2].all() and nans.sum() == 4 + 21 - 1


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_sum_is_rounded_to_nearest_with_ties_to_even(
    device: torch.device, dtype: torch.dtype
) -> None:
    # One product and one bias whose fp32 sum is exact: the result must be the rounded sum itself.
    xq, xs, wq, ws = operands(3, 37, 64, 8, scale_exponents=(-3, 3))
    xq.view(torch.uint8)[:, 1:] = 0
    generator = torch.Generator().manual_seed(9)
    bias = torch.randint(-(2**11), 2**11, (37,), generator=generator) / 2**3
    out = launch(device, FOLDS[0], (xq, xs, wq, ws), bias.float(), dtype)
    exact = linear_reference64(xq, xs, wq, ws, bias.float())
    representable = exact.float().double() == exact
    assert representable.float().mean() > 0.5
    assert torch.equal(out[representable], round_once(exact, dtype)[representable])


def test_results_are_bitwise_the_same_whatever_the_order_of_waves(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = operands(13, 41, 9280, 3)
    runs = []
    for schedule, seed in [("random", 0), ("random", 1), *((name, 0) for name in SCHEDULES[1:])]:
        monkeypatch.setenv("AITER_MX_SIM_SCHEDULE", schedule)
        monkeypatch.setenv("AITER_MX_SIM_SEED", str(seed))
        runs.append(launch(device, config_of(2, 1, 3, 2), drawn, dtype=torch.float32))
    assert_close_to_reference(runs[0], *drawn)
    assert all(torch.equal(runs[0].view(torch.int32), run.view(torch.int32)) for run in runs)


def test_results_are_bitwise_the_same_however_rows_are_divided(device: torch.device) -> None:
    drawn, config = operands(13, 75, 1312, 5), config_of(2, 1, 3, 2)
    runs = [
        launch(device, config, drawn, dtype=torch.float32, cu_num=cu_num)
        for cu_num in (1, 2, 4, 5, 20, 256)
    ]
    assert_close_to_reference(runs[0], *drawn)
    assert all(torch.equal(runs[0].view(torch.int32), run.view(torch.int32)) for run in runs)


@pytest.mark.parametrize("cu_num", [1, 6, 64, 256])
def test_compute_units_have_as_many_rows_each(cu_num: int) -> None:
    assert MFMA.module is not None
    target = replace(GFX950, cu_num=cu_num)
    for N in (1, 5, 63, 64, 100, 255, 256, 2304, 6144, 5000):
        problem = LinearProblem(16, N, 6144)
        for config in MFMA.candidates(target, problem)[:12]:
            grid = MFMA.module.geometry(target, problem, config).grid
            *_, each, longer = MFMA.module.scalars(target, problem, config)
            groups = grid[0] * grid[1]
            assert groups % cu_num == 0 or groups == N
            assert groups * each + longer == N
            assert each + (longer > 0) <= config["row_tiles"] * 16 // config["fold"]


def test_more_workgroups_than_a_grid_row_holds(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "MAX_GRID_X", 2)
    drawn, config = operands(2, 53, 96, 4), config_of(1, 2, 1, 1)
    assert MFMA.module is not None
    one = replace(GFX950, cu_num=1)
    assert MFMA.module.geometry(one, LinearProblem(2, 53, 96), config).grid == (2, 4, 1)
    assert_close_to_reference(launch(device, config, drawn), *drawn)


def test_weights_above_4_gib_match_float64() -> None:
    # Of a grid that covers all of N, only its first workgroup in each row of the grid is launched.
    K, config = 320, config_of(1, 1, 2, 1)
    far = registry.MAX_GRID_X * 16
    N = far + 16
    assert far * K > 1 << 32 and MFMA.module is not None
    wq = torch.empty((N, K), dtype=torch.float8_e4m3fn)  # memory that is never touched is free
    ws = torch.empty((N, K // 32), dtype=torch.uint8)
    xq, xs, *near = operands(2, 16, K, 1)
    _, _, *last = operands(2, 16, K, 2)
    wq[:16], ws[:16], wq[far:], ws[far:] = *near, *last
    block = MFMA.module.geometry(GFX950, LinearProblem(2, N, K), config).block
    module = replace(MFMA.module, geometry=lambda *_: Geometry((1, 2, 1), block))
    with aiter_mx.simulate("gfx950"):
        kernel = replace(MFMA, module=module)
        out = launch(torch.device("cpu"), config, (xq, xs, wq, ws), kernel=kernel)
    assert_close_to_reference(out[:, :16], xq, xs, *near)
    assert_close_to_reference(out[:, far:], xq, xs, *last)


@pytest.mark.parametrize(("M", "N", "K"), [(3, 2304, 6144), (16, 6144, 1536), (64, 1536, 6144)])
def test_the_op_takes_mfma_for_decode_shapes_and_reads_each_weight_once(
    M: int, N: int, K: int
) -> None:
    drawn = operands(M, N, K, N)
    with aiter_mx.simulate("gfx950"):
        assert aiter_mx.explain("linear", M=M, N=N, K=K).kernel == "mfma"
        assert_close_to_reference(aiter_mx.linear(*drawn), *drawn)
        config = MFMA.configure(GFX950, LinearProblem(M, N, K))
    report = last_report()
    assert report is not None
    groups = registry._work(GFX950, LinearProblem(M, N, K), config).groups
    assert groups % GFX950.cu_num == 0
    assert report.bytes_read == (N + groups * M) * (K + K // 32)
    assert report.bytes_written == 2 * M * N
    assert report.scratch_bytes == 0


@pytest.mark.parametrize(
    ("config", "M"),
    [(config_of(2, 2, 12, 1), 16), (config_of(1, 4, 4, 1), 13), (config_of(4, 1, 2, 1), 32)],
    ids=str,
)
def test_lanes_that_lds_serves_together_are_in_different_banks(
    config: dict[str, int], M: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AITER_MX_SIM_CONFLICTS", "1")
    drawn = operands(M, 70, 3104, 7)
    with aiter_mx.simulate("gfx950"):
        assert_close_to_reference(launch(torch.device("cpu"), config, drawn), *drawn)
    report = last_report()
    assert report is not None and report.lds_bytes_read > 0
    assert report.lds_conflicts == 0


def waves_a_simd(registers: int) -> int:
    return 512 // (-(-registers // 8) * 8)


def test_no_variant_that_may_be_chosen_spills() -> None:
    """Each number of tiles and waves with the most steps of loads that its registers admit."""
    most: dict[tuple[int, ...], tuple[LinearProblem, Config]] = {}
    for config in combinations(PARAMS):
        if config["fold"] != 2 or config["waves"] not in (8, 12, 16):
            continue  # fewer waves have the registers of 8; folds and an odd block take a few more
        for col_tiles in range(1, 5):
            problem = LinearProblem(8 * col_tiles, 2304, (1 << 17) + 32)
            if registry._resident(config, registry._work(GFX950, problem, config)):
                key = (config["row_tiles"], col_tiles, config["waves"])
                most[key] = max(
                    most.get(key, (problem, config)),
                    (problem, config),
                    key=lambda e: e[1]["unroll"],
                )
    assert len(most) > 30
    requests = {build_request(MFMA, GFX950, *entry): entry for entry in most.values()}
    for (request, entry), built in zip(requests.items(), build_all([*requests]), strict=True):
        for kernel in parse_code_object(built.image).kernels.values():
            spilled = (kernel.vgpr_spills, kernel.sgpr_spills, kernel.agprs, kernel.scratch_bytes)
            assert spilled == (0, 0, 0, 0), f"{request}: {kernel}"
            expected = registry._registers(entry[1], registry._work(GFX950, *entry).col_tiles)
            assert waves_a_simd(kernel.vgprs) >= waves_a_simd(expected), f"{request}: {kernel}"


@pytest.mark.parametrize("M", [1, 2, 5, 8, 9, 16, 17, 32, 33, 48, 64])
def test_what_is_configured_is_a_candidate_and_legal(M: int) -> None:
    for N, K in [*DECODE_SHAPES, (1, 32), (384, 384), (1 << 22, 32), (3, MAX_K - 32)]:
        problem = LinearProblem(M, N, K)
        config = MFMA.configure(GFX950, problem)
        MFMA.check_config(config)
        candidates = MFMA.candidates(GFX950, problem)
        assert config in candidates
        assert len(candidates) <= 48


@pytest.mark.parametrize(("N", "K"), DECODE_SHAPES)
@pytest.mark.parametrize("M", [3, 8, 16, 32])  # more are limited by loads of x, not by memory
def test_enough_bytes_of_weights_are_under_way(M: int, N: int, K: int) -> None:
    """A latency's worth at full speed on each busy compute unit, or else all of its weights."""
    problem = LinearProblem(M, N, K)
    config = MFMA.configure(GFX950, problem)
    work = registry._work(GFX950, problem, config)
    at_once = min(registry._resident(config, work), -(-work.groups // GFX950.cu_num))
    steps = min(work.steps, config["waves"] * config["unroll"])
    under_way = at_once * steps * work.rows * config["fold"] * 256
    busy = min(work.groups, GFX950.cu_num)
    latency_bytes = registry._LATENCY_CYCLES * registry._BYTES_A_CYCLE * GFX950.cu_num / busy
    assert under_way >= min(latency_bytes, N * K / busy)


def test_refusals_say_what_is_covered() -> None:
    def refusal(M: int, K: int, arch: str = "gfx950") -> str | None:
        return MFMA.refusal(replace(GFX950, arch=arch), LinearProblem(M, 3, K))

    assert refusal(MAX_M, MAX_K - 32) is None
    assert refusal(65, 32) == "M=65 is above 64, the most rows of mfma"
    assert refusal(1, MAX_K) == (
        f"K={MAX_K} is not below {MAX_K}, as the 32-bit offsets of mfma demand"
    )
    assert refusal(1, 32, "sm_90a") == "no scaled-MFMA kernel for sm_90a, only for gfx950"
