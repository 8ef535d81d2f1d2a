"""Quantisation kernels against the torch reference, bit for bit: in the simulator and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from quantize_cases import (
    BOTH,
    BOTH_VARIANTS,
    DTYPES,
    GROUPED_VARIANTS,
    OFFSETS,
    ROWS,
    ROWS_VARIANTS,
    TILES,
    TILES_VARIANTS,
    assert_as_reference,
    draw,
    name_of,
    resized,
)

import aiter_mx
from aiter_mx.code_object import parse_code_object
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.jit.build import build_all
from aiter_mx.kernels.quantize import QuantizeProblem
from aiter_mx.kernels.spec import KernelSpec
from aiter_mx.launch import build_request
from aiter_mx.runtimes import sim
from aiter_mx.target import hardware

ROWS_SHAPES = ((1, 32), (3, 96), (7, 992), (64, 64), (5, 4160), (33, 1056), (130, 288))
TILES_SHAPES = ((1, 32, 32), (1, 96, 160), (3, 64, 96), (1, 288, 416), (2, 160, 32), (1, 32, 1120))
CONFIGS = ({"waves": 1, "steps": 16, "resident": 1}, {"waves": 2, "steps": 2, "resident": 4})


@pytest.fixture(params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    if request.param == "cuda":
        yield torch.device("cuda")
    else:
        with aiter_mx.simulate("gfx950"):
            yield torch.device("cpu")


@pytest.mark.parametrize("variant", ROWS_VARIANTS, ids=name_of)
def test_rows_of_any_shape_are_as_the_reference(
    device: torch.device, variant: QuantizeProblem
) -> None:
    generator = torch.Generator().manual_seed(1)
    for M, N in ROWS_SHAPES:
        x = draw((M, N), DTYPES[variant.dtype], generator)
        assert_as_reference(ROWS, resized(variant, M=M, N=N), x, None, device)


@pytest.mark.parametrize("variant", TILES_VARIANTS, ids=name_of)
def test_tiles_of_any_shape_are_as_the_reference(
    device: torch.device, variant: QuantizeProblem
) -> None:
    generator = torch.Generator().manual_seed(2)
    for matrices, M, N in TILES_SHAPES:
        finite = (M, N) == (288, 416)  # whole tiles without NaN have a path of their own
        x = draw((matrices, M, N), DTYPES[variant.dtype], generator, finite)
        problem = resized(variant, matrices=matrices, M=M, N=N)
        assert_as_reference(TILES, problem, x, None, device)


def test_rows_that_are_no_multiple_of_a_tile_have_shuffled_scales(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    for M, N in ((1, 32), (37, 160), (300, 96)):
        x = draw((M, N), torch.bfloat16, generator)
        assert_as_reference(TILES, QuantizeProblem(M, N, layout="16x4"), x, None, device)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_other_configurations_are_as_the_reference(
    device: torch.device, config: dict[str, int]
) -> None:
    generator = torch.Generator().manual_seed(4)
    for M, N in ((1, 96), (129, 1312)):
        x = draw((M, N), torch.bfloat16, generator)
        assert_as_reference(ROWS, QuantizeProblem(M, N), x, None, device, config)


@pytest.mark.parametrize("block", ["1x32", "32x32"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_strips_and_clusters_are_as_the_reference(
    device: torch.device, block: str, dtype: str
) -> None:
    generator = torch.Generator().manual_seed(10)
    on_gpu = [(1, 8), (2, 2), (8, 1), (8, 8)]
    for steps, cluster in on_gpu if device.type == "cuda" else [(2, 1), (8, 1)]:
        config = {"rows": 128, "resident": 2, "steps": steps, "cluster": cluster}
        for matrices, M, N in ((1, 1440, 96), (2, 160, 1184), (1, 1056, 1056)):
            x = draw((matrices, M, N), DTYPES[dtype], generator, finite=M == N)
            problem = QuantizeProblem(M, N, dtype, "both", matrices, block=block)
            assert_as_reference(TILES, problem, x, None, device, config)


@pytest.mark.parametrize(
    ("problem", "kernel"),
    [
        (QuantizeProblem(2944, 2944, "bf16", "both"), "both"),  # 529 tiles of 128 x 128
        (QuantizeProblem(2048, 2048, "bf16", "both"), "tiles"),
        (QuantizeProblem(2048, 2112, "fp32", "both"), "both"),  # of 128 x 64: 528
        (QuantizeProblem(8192, 8192, "bf16", "both"), "both"),
        (QuantizeProblem(8192, 8448, "bf16", "both"), "tiles"),
        (QuantizeProblem(1024, 1024, "bf16", "both", matrices=9), "both"),
        (QuantizeProblem(4096, 4096, "bf16", "both", layout="16x4"), "tiles"),
        (QuantizeProblem(4096, 4096, "bf16", "both", groups=3), "tiles"),
        (QuantizeProblem(4096, 4096, "bf16", "columns"), "tiles"),
        (QuantizeProblem(4096, 4096, "bf16", "rows"), "rows"),
    ],
    ids=str,
)
def test_both_runs_on_hopper_where_it_is_faster(problem: QuantizeProblem, kernel: str) -> None:
    assert route("quantize", hardware("sm_90a"), problem).kernel == kernel
    assert route("quantize", hardware("gfx950"), problem).kernel != "both"


@pytest.mark.parametrize("variant", BOTH_VARIANTS, ids=name_of)
def test_every_configuration_of_both_has_room(variant: QuantizeProblem) -> None:
    target = hardware("sm_90a")
    assert BOTH.module is not None
    for M, N in ((32, 32), (2944, 2944), (8192, 8192)):
        problem = resized(variant, M=M, N=N)
        candidates = BOTH.candidates(target, problem)
        assert BOTH.configure(target, problem) in candidates
        for config in candidates:
            BOTH.check_config(config)
            launch = BOTH.module.geometry(target, problem, config)
            assert 1 <= launch.grid[0] <= target.cu_num
            assert launch.shared_bytes <= 227 * 1024


@pytest.mark.gpu
@pytest.mark.parametrize("variant", BOTH_VARIANTS, ids=name_of)
def test_blocks_of_tiles_are_as_the_reference(variant: QuantizeProblem) -> None:
    generator = torch.Generator().manual_seed(11)
    for across, down in ((2, 2), (1, 4), (4, 1)):
        for matrices, M, N in ((1, 32, 32), (3, 288, 416), (1, 1440, 96), (2, 160, 1184)):
            finite = (M, N) == (288, 416)  # whole tiles without NaN have a path of their own
            x = draw((matrices, M, N), DTYPES[variant.dtype], generator, finite)
            problem = resized(variant, matrices=matrices, M=M, N=N)
            config = {"across": across, "down": down}
            assert_as_reference(BOTH, problem, x, None, torch.device("cuda"), config)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["e4m3", "e2m1"])
def test_workgroups_that_stay_are_as_the_reference(format: str) -> None:
    generator = torch.Generator().manual_seed(12)
    problem = QuantizeProblem(2080, 4480, "bf16", "both", format=format)
    x = draw((problem.M, problem.N), torch.bfloat16, generator, finite=True)
    config = {"across": 1, "down": 2}  # more than two blocks for each of an H200's SMs
    for _ in range(3):
        assert_as_reference(BOTH, problem, x, None, torch.device("cuda"), config)


def offsets_of(sizes: list[int], first: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([first, *sizes], dtype=torch.int64).cumsum(0).to(dtype)


@pytest.mark.parametrize(
    ("kernel", "variant"), GROUPED_VARIANTS, ids=[kernel.name for kernel, _ in GROUPED_VARIANTS]
)
def test_groups_of_any_sizes_are_padded(
    device: torch.device, kernel: KernelSpec, variant: QuantizeProblem
) -> None:
    generator = torch.Generator().manual_seed(5)
    cases = [[0, 3], [1], [128], [129, 127], [0, 0, 5, 128, 0, 131, 36, 0], [256, 0, 0]]
    cases += [torch.randint(0, 3, (700,), generator=generator).tolist()]  # rounds of the scan
    cases += [[900, 0, 1, 300]]  # strips of several tiles, and some of padding alone
    for number, sizes in enumerate(cases):
        kind = "int32" if number % 2 else "int64"
        first, after = (number % 3) * 7, number % 4  # rows of no group before and after
        M, N = first + sum(sizes) + after, (32, 96, 160)[number % 3] if len(sizes) < 99 else 32
        problem = resized(variant, M=M, N=N, groups=len(sizes), offsets=kind)
        x = draw((M, N), torch.bfloat16, generator)
        assert_as_reference(kernel, problem, x, offsets_of(sizes, first, OFFSETS[kind]), device)


@pytest.mark.parametrize(
    ("kernel", "variant"), GROUPED_VARIANTS, ids=[kernel.name for kernel, _ in GROUPED_VARIANTS]
)
def test_wrong_offsets_read_and_write_nothing_outside(
    device: torch.device, kernel: KernelSpec, variant: QuantizeProblem
) -> None:
    generator = torch.Generator().manual_seed(6)
    x = draw((150, 64), torch.bfloat16, generator)
    for wrong in ([0, 100, 50, 150], [-5, 20, 2**40, 150], [2**40, -(2**40), 150, 3]):
        problem = resized(variant, M=150, N=64, groups=3)
        assert_as_reference(kernel, problem, x, torch.tensor(wrong), device)


@pytest.mark.parametrize("mode", ["rceil", "floor"])
@pytest.mark.parametrize("format", ["e4m3", "e2m1"])
def test_every_bf16_value_is_as_the_reference(device: torch.device, format: str, mode: str) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    by_magnitude = every[every.isfinite()].sort().values
    generator = torch.Generator().manual_seed(7)
    for x in (by_magnitude.view(-1, 32), every[torch.randperm(2**16, generator=generator)]):
        x = x.reshape(-1, 32)
        problem = QuantizeProblem(*x.shape, "bf16", format=format, mode=mode)
        assert_as_reference(ROWS, problem, x, None, device)


@pytest.mark.parametrize("schedule", ["random", "round-robin", "run-to-barrier"])
def test_no_interleaving_of_waves_changes_a_result(
    monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    monkeypatch.setenv("AITER_MX_SIM_SCHEDULE", schedule)
    generator = torch.Generator().manual_seed(8)
    x = draw((300, 160), torch.bfloat16, generator)
    kernel, variant = GROUPED_VARIANTS[1]
    problem = resized(variant, M=300, N=160, groups=3)
    with aiter_mx.simulate("gfx950"):
        for seed in range(6 if schedule == "random" else 1):
            monkeypatch.setenv("AITER_MX_SIM_SEED", str(seed))
            monkeypatch.setenv("AITER_MX_SIM_DELAY", str(seed % 2))
            offsets = offsets_of([100, 0, 200], 0, torch.int64)
            assert_as_reference(kernel, problem, x, offsets, torch.device("cpu"))


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        (ROWS, QuantizeProblem(96, 1056)),
        (ROWS, QuantizeProblem(96, 1056, "fp32", mode="floor")),
        (TILES, QuantizeProblem(288, 416, "bf16", "both")),
        (TILES, QuantizeProblem(256, 512, "fp16", "both", mode="floor", layout="16x4")),
        (ROWS, QuantizeProblem(256, 512, "bf16", groups=2)),
    ],
    ids=lambda value: getattr(value, "name", "") or name_of(value),
)
def test_each_byte_is_moved_once(
    monkeypatch: pytest.MonkeyPatch, kernel: KernelSpec, problem: QuantizeProblem
) -> None:
    monkeypatch.setenv("AITER_MX_SIM_UNIQUE", "1")
    generator = torch.Generator().manual_seed(9)
    x = draw((problem.M, problem.N), DTYPES[problem.dtype], generator)
    offsets = torch.tensor([0, 128, 256]) if problem.groups else None
    with aiter_mx.simulate("gfx950"):
        assert_as_reference(kernel, problem, x, offsets, torch.device("cpu"))
    report = sim.last_report()
    assert report is not None
    written = problem.out_rows * problem.N * (1 if problem.to == "rows" else 2) * 33 // 32
    small = 0 if offsets is None else 2 * offsets.nbytes
    unique = report.unique_bytes_read + report.unique_bytes_written
    assert unique <= 1.02 * (x.nbytes + written) + small + 256  # 256: kernel arguments
    assert report.bytes_written <= 1.02 * written + small
    assert report.bytes_read <= 1.02 * x.nbytes + 64 * small


def test_no_variant_spills_or_has_scratch() -> None:
    target = hardware("gfx950")
    variants = [(ROWS, problem) for problem in ROWS_VARIANTS]
    variants += [(TILES, problem) for problem in TILES_VARIANTS]
    variants += list(GROUPED_VARIANTS)
    requests = [
        build_request(kernel, target, problem, kernel.configure(target, problem))
        for kernel, problem in variants
    ]
    for request, built in zip(requests, build_all(requests), strict=True):
        for kernel in parse_code_object(built.image).kernels.values():
            spilled = (kernel.vgpr_spills, kernel.sgpr_spills, kernel.agprs, kernel.scratch_bytes)
            assert spilled == (0, 0, 0, 0), f"{request}: {kernel}"
