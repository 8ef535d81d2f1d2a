"""The decode GEMV against float64: in the gfx950 simulator, and with ``-m gpu`` on a GPU."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import aiter_mx
from aiter_mx.dispatch.tables import format_config
from aiter_mx.kernels.linear import KERNELS, LinearProblem
from aiter_mx.kernels.linear import gemv as registry
from aiter_mx.kernels.linear.gemv import MAX_M as GEMV_MAX_M
from aiter_mx.ops.linear import _plans
from aiter_mx.target import hardware, target_of
from op_tests.linear.cases import DTYPES, assert_repeats_on_two_streams, launch_linear, operands
from op_tests.mx_reference import (
    assert_close_to_reference,
    linear_reference64,
    random_mx,
    round_once,
)

GEMV = KERNELS[0]
SCHEDULES = ("random", "round-robin", "run-to-barrier")

# A wave's step is 1024 k on gfx950 and 512 on sm_90a; the last of these K take several rounds of
# every configuration below, and most leave lanes, waves or both without work at the end.
SHAPES = [
    (1, 32),
    (3, 96),
    (5, 160),
    (17, 416),
    (2, 1024),
    (33, 1056),
    (7, 2080),
    (64, 512),
    (31, 3104),
    (4, 9248),
    (130, 64),
    (19, 4096),
]


@pytest.fixture(params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    if request.param == "cuda":
        yield torch.device("cuda")
    else:
        with aiter_mx.simulate("gfx950"):
            yield torch.device("cpu")


launch = partial(launch_linear, GEMV)


def config_of(M: int) -> dict[str, int]:
    """Configurations that between them take every small value of every parameter."""
    return {
        "rows": (1, 2, 3)[M % 3] if M > 14 else (4, 1, 2, 3)[M % 4],
        "waves": (1, 2, 3, 4, 6)[M % 5],
        "unroll": {1: 3, 2: 2, 3: 4, 4: 2, 5: 2}.get(M, 1),
    }


@pytest.mark.parametrize("M", range(1, GEMV_MAX_M + 1))
def test_every_m_and_any_shape_match_float64(
    device: torch.device, M: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedules = random.Random(M)
    for seed, (N, K) in enumerate(SHAPES):
        monkeypatch.setenv("AITER_MX_SIM_SCHEDULE", schedules.choice(SCHEDULES))
        monkeypatch.setenv("AITER_MX_SIM_SEED", str(seed))
        exponents = (-20, 20) if seed % 2 else (-6, 6)
        drawn = operands(M, N, K, 100 * M + seed, scale_exponents=exponents)
        assert_close_to_reference(launch(device, config_of(M), drawn), *drawn)


@pytest.mark.parametrize(
    "config",
    [
        {"rows": 8, "waves": 12, "unroll": 1},
        {"rows": 6, "waves": 1, "unroll": 2},
        {"rows": 3, "waves": 8, "unroll": 4},
    ],
    ids=str,
)
def test_extreme_configurations_match_float64(device: torch.device, config: dict[str, int]) -> None:
    for seed, (N, K) in enumerate([(25, 8224), (5, 37920)]):
        drawn = operands(1, N, K, seed)
        assert_close_to_reference(launch(device, config, drawn, dtype=torch.float32), *drawn)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_outputs_and_biases_of_every_dtype_match_float64(
    device: torch.device, dtype: torch.dtype
) -> None:
    M, N, K = 3, 37, 1120
    exponents = (-12, -6) if dtype is torch.float16 else (-6, 6)
    drawn = operands(M, N, K, 5, scale_exponents=exponents)
    size = linear_reference64(*drawn).abs().mean()
    for bias_dtype in DTYPES.values():
        generator = torch.Generator().manual_seed(6)
        bias = (torch.randn(N, generator=generator, dtype=torch.float64) * size).to(bias_dtype)
        out = launch(device, config_of(M), drawn, bias, dtype)
        assert_close_to_reference(out, *drawn, bias)
    assert_close_to_reference(launch(device, config_of(M), drawn, None, dtype), *drawn)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_sum_is_rounded_to_nearest_with_ties_to_even(
    device: torch.device, dtype: torch.dtype
) -> None:
    # One product and one bias whose fp32 sum is exact: the result must be the rounded sum itself.
    xq, xs, wq, ws = operands(3, 37, 32, 8, scale_exponents=(-3, 3))
    xq.view(torch.uint8)[:, 1:] = 0
    generator = torch.Generator().manual_seed(9)
    bias = torch.randint(-(2**11), 2**11, (37,), generator=generator) / 2**3
    out = launch(device, config_of(3), (xq, xs, wq, ws), bias.float(), dtype)
    exact = linear_reference64(xq, xs, wq, ws, bias.float())
    representable = exact.float().double() == exact
    assert representable.float().mean() > 0.5
    expected = round_once(exact, dtype)
    assert torch.equal(out[representable], expected[representable])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("x_exponents", "w_exponents"),
    [
        ((-127, 127), (-127, 127)),
        ((90, 127), (-127, -90)),
        ((-127, -90), (90, 127)),
        ((-80, -50), (-80, -50)),
        ((40, 70), (20, 40)),
        ((119, 127), (-25, -10)),
        ((-25, -10), (119, 127)),
    ],
    ids=["any", "huge x", "huge w", "near underflow", "near overflow", "top of x", "top of w"],
)
def test_scales_over_their_whole_range_are_exact(
    device: torch.device,
    x_exponents: tuple[int, int],
    w_exponents: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    for N, K in [(37, 32), (9, 416)]:
        generator = torch.Generator().manual_seed(N)
        drawn = (
            *random_mx(3, K, generator, scale_exponents=x_exponents),
            *random_mx(N, K, generator, scale_exponents=w_exponents),
        )
        for rows in (
            1,
            4,
        ):  # the kernel holds the fewer of x's and w's rows, and scales by the rest
            out = launch(device, config_of(3) | {"rows": rows}, drawn, dtype=dtype)
            assert_close_to_reference(out, *drawn, underflow=2.0**-149)


@pytest.mark.parametrize("M", [1, 3, 10])
def test_nan_payloads_and_nan_scales_reach_their_outputs_alone(
    device: torch.device, M: int
) -> None:
    N, K = 67, 1312
    for seed, options in enumerate([{"nan_payload": 2e-4}, {"nan_scale": 5e-3}]):
        drawn = operands(M, N, K, seed, **options)
        out = launch(device, config_of(M), drawn)
        share = out.isnan().float().mean()
        assert 0 < share < 1, "the draw must show both outcomes"
        assert_close_to_reference(out, *drawn)


def test_a_nan_scale_counts_even_where_the_payload_is_zero(device: torch.device) -> None:
    xq, xs, wq, ws = operands(3, 9, 96, 0)
    wq.view(torch.uint8)[4, 32:64] = 0
    ws[4, 1] = 255
    out = launch(device, config_of(3), (xq, xs, wq, ws))
    assert out[:, 4].isnan().all() and out.isnan().sum() == 3


@pytest.mark.parametrize("M", [2, 5])
def test_results_are_bitwise_the_same_whatever_the_order_of_waves(
    device: torch.device, M: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = operands(M, 41, 9248, 3)
    runs = []
    for schedule, seed in [
        ("random", 0),
        ("random", 1),
        ("random", 2),
        ("round-robin", 0),
        ("run-to-barrier", 0),
    ]:
        monkeypatch.setenv("AITER_MX_SIM_SCHEDULE", schedule)
        monkeypatch.setenv("AITER_MX_SIM_SEED", str(seed))
        runs.append(launch(device, config_of(M) | {"waves": 6}, drawn, dtype=torch.float32))
    assert_close_to_reference(runs[0], *drawn)
    assert all(torch.equal(runs[0].view(torch.int32), run.view(torch.int32)) for run in runs)


def test_more_workgroups_than_a_grid_row_holds(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "MAX_GRID_X", 4)
    drawn = operands(2, 53, 96, 4)
    config = {"rows": 3, "waves": 1, "unroll": 1}
    grid = GEMV.module.geometry(target_of(device), LinearProblem(2, 53, 96), config).grid
    assert grid == (4, 5, 1)
    assert_close_to_reference(launch(device, config, drawn), *drawn)


@pytest.mark.parametrize(("M", "N", "K"), [(1, 2304, 6144), (16, 384, 1536), (5, 1536, 384)])
def test_the_op_takes_the_gemv_where_a_table_names_it(
    device: torch.device, M: int, N: int, K: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = operands(M, N, K, N)
    arguments = [t.to(device) for t in drawn]
    target = target_of(device)
    config = GEMV.configure(target, LinearProblem(M, N, K))
    columns = ("gfx", "op", "M", "N", "K", "out_dtype", "backend", "kernel", "cu_num", "config")
    choice = ("hip", "gemv", target.cu_num, format_config(config))
    row = (target.arch, "linear", M, N, K, "bf16", *choice)
    table = tmp_path / "linear.csv"
    table.write_text("".join(",".join(map(str, line)) + "\n" for line in (columns, row)))
    monkeypatch.setenv("AITER_MX_CONFIG", str(table))
    monkeypatch.setattr(_plans, "by_call", {})
    assert aiter_mx.explain("linear", M=M, N=N, K=K, arch=target.arch).kernel == "gemv"
    aiter_mx.linear(*arguments)
    start = time.perf_counter()
    out = aiter_mx.linear(*arguments).cpu()
    seconds = time.perf_counter() - start
    assert_close_to_reference(out, *drawn)
    assert seconds < 1, f"a decode shape took {seconds:.2f} s after its translation"


def test_each_weight_is_read_once_in_pieces_of_16_bytes() -> None:
    from aiter_mx.runtimes.sim import last_report

    M, N, K, config = 2, 96, 6144, {"rows": 3, "waves": 2, "unroll": 2}
    with aiter_mx.simulate("gfx950"):
        launch(torch.device("cpu"), config, operands(M, N, K, 0))
    report = last_report()
    rows_read = N + M * N // config["rows"]
    assert report.bytes_read == rows_read * (K + K // 16)  # a lane's 16 bytes and their scale
    assert report.bytes_written == 2 * M * N
    pieces = rows_read * K // (16 * 64)
    loads = {name: n for name, n in report.mnemonics.items() if "load" in name and name[0] != "s"}
    assert loads == {"global_load_dwordx4": pieces, "global_load_ubyte": pieces}
    assert report.scratch_bytes == 0


@pytest.mark.gpu
def test_weights_above_4_gib_match_float64() -> None:
    N, K, last = (1 << 20) + 5, 4128, 64
    xq, xs, *small = operands(2, last, K, 1)
    wq = torch.zeros((N, K), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    ws = torch.zeros((N, K // 32), dtype=torch.uint8, device="cuda")
    wq[-last:], ws[-last:] = small[0].cuda(), small[1].cuda()
    out = aiter_mx.linear(xq.cuda(), xs.cuda(), wq, ws)
    assert not out[:, :-last].any()
    assert_close_to_reference(out[:, -last:].cpu(), xq, xs, *small)


@pytest.mark.gpu
def test_more_workgroups_than_a_grid_row_holds_at_full_size() -> None:
    N, K = 6 * (1 << 20) + 7, 32
    drawn = operands(1, N, K, 2)
    out = aiter_mx.linear(*(t.cuda() for t in drawn), out_dtype=torch.float32)
    assert_close_to_reference(out.cpu(), *drawn)


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 3, 16])
@pytest.mark.parametrize("pdl", [False, True])
def test_a_thousand_launches_on_each_of_two_streams_are_bitwise_equal(M: int, pdl: bool) -> None:
    assert_repeats_on_two_streams(GEMV, LinearProblem(M, 2304, 6144, pdl=pdl))


@pytest.mark.parametrize("arch", ["gfx950", "sm_90a"])
def test_refusals_say_what_is_covered(arch: str) -> None:
    target = hardware(arch)
    assert GEMV.refusal(target, LinearProblem(16, 3, 32)) is None
    assert (
        GEMV.refusal(target, LinearProblem(17, 3, 32))
        == "M=17 is above 16, the most rows gemv holds in registers"
    )
    assert (
        GEMV.refusal(replace(target, arch="sm_89"), LinearProblem(1, 3, 32))
        == "no gemv kernel for sm_89, only for gfx950 and sm_90a"
    )


@pytest.mark.parametrize("arch", ["gfx950", "sm_90a"])
@pytest.mark.parametrize("M", range(1, GEMV_MAX_M + 1))
def test_what_is_configured_is_a_candidate_and_legal(arch: str, M: int) -> None:
    target = hardware(arch)
    for N, K in [*SHAPES, (2304, 6144), (9216, 6144), (6144, 384), (1 << 22, 32)]:
        problem = LinearProblem(M, N, K)
        config = GEMV.configure(target, problem)
        GEMV.check_config(config)
        assert config in GEMV.candidates(target, problem)


@pytest.mark.parametrize(
    ("N", "K", "config"),
    [(1536, 6144, (6, 6, 2)), (2304, 6144, (3, 4, 1)), (6144, 1536, (6, 3, 1))],
)
def test_hopper_takes_what_was_fastest_there_and_yields_where_it_lost(
    N: int, K: int, config: tuple[int, int, int]
) -> None:
    target = hardware("sm_90a")
    assert GEMV.yields is not None
    for M, pdl in product((1, 4), (False, True)):
        problem = LinearProblem(M, N, K, pdl=pdl)
        assert GEMV.yields(target, problem)  # to mma_registers
        assert bool(GEMV.yields(target, replace(problem, x_dtype="bf16"))) is (M == 4)
        if M == 1:
            assert tuple(GEMV.configure(target, problem).values()) == config
    assert GEMV.yields(target, LinearProblem(2, 9216, 6144))
    assert not GEMV.yields(target, LinearProblem(16, 384, 384))


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"K": 100}, "K must be a multiple of 32, got K=100"),
        ({"M": -1}, "M must not be negative, got M=-1"),
        ({"out_dtype": "fp8"}, "out_dtype must be one of bf16, fp16, fp32, got 'fp8'"),
        ({"bias": "int8"}, "bias must be one of none, bf16, fp16, fp32, got 'int8'"),
    ],
    ids=str,
)
def test_impossible_problems_are_refused_with_the_value(
    field: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LinearProblem(**{"M": 1, "N": 8, "K": 64, **field})
