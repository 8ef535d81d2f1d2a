"""Quantisation kernels against the torch reference, bit for bit: in the simulator and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import aiter_mx
from aiter_mx.code_object import parse_code_object
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.fallbacks import quantize_torch
from aiter_mx.jit.build import build_all
from aiter_mx.kernels.quantize import QuantizeProblem
from aiter_mx.kernels.spec import KernelSpec
from aiter_mx.launch import bind, build_request
from aiter_mx.runtimes import sim
from aiter_mx.target import hardware
from op_tests.quantize.cases import (
    DTYPES,
    GROUPED_VARIANTS,
    OFFSETS,
    ROWS,
    ROWS_VARIANTS,
    STAGED,
    STAGED_VARIANTS,
    TILES,
    TILES_VARIANTS,
    assert_as_reference,
    draw,
    name_of,
    output_shapes,
    resized,
)

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


ROUTES = (
    (QuantizeProblem(8192, 8192, "bf16", "both"), "staged"),
    (QuantizeProblem(8160, 4064, "bf16", "both"), "staged"),
    (QuantizeProblem(1024, 1024, "bf16", "both"), "tiles"),
    (QuantizeProblem(1024, 1024, "bf16", "both", matrices=32), "staged"),
    (QuantizeProblem(8192, 4096, "bf16", "both", layout="16x4"), "tiles"),
    (QuantizeProblem(8192, 4096, "bf16", "both", groups=3), "staged"),
    (QuantizeProblem(65536 * 128, 32, "bf16", "both"), "tiles"),  # more than a grid is high
    (QuantizeProblem(128, 128, "bf16", "both", matrices=65536), "tiles"),
    (QuantizeProblem(8192, 4096, "bf16", "columns"), "tiles"),
    (QuantizeProblem(8192, 4096, "bf16", "rows"), "rows"),
)


@pytest.mark.parametrize(("problem", "kernel"), ROUTES, ids=str)
def test_staged_runs_on_hopper_where_it_is_faster(problem: QuantizeProblem, kernel: str) -> None:
    assert route("quantize", hardware("sm_90a"), problem).kernel == kernel
    assert route("quantize", hardware("gfx950"), problem).kernel != "staged"


@pytest.mark.parametrize("variant", STAGED_VARIANTS, ids=name_of)
def test_staged_scales_have_room_and_a_lane_each(variant: QuantizeProblem) -> None:
    target, module = hardware("sm_90a"), STAGED.module
    assert module is not None
    for M, N, matrices in ((32, 32, 1), (288, 4192, 3), (8192, 4096, 1)):
        problem = resized(variant, M=M, N=N, matrices=matrices)
        for config in STAGED.candidates(target, problem):
            STAGED.check_config(config)
            launches = [each.geometry(target, problem, config) for each in STAGED.modules]
            across, down, deep = launches[0].grid
            # Every scale of a tile, also of parts that the matrix does not have.
            tiles, columns = across * down * deep, 64 if variant.dtype == "fp32" else 128
            size = tiles * (128 * columns // 32 + columns * 4)
            assert STAGED.workspace_bytes(target, problem, config) == size
            assert across * columns >= N and down * 128 >= M and deep == matrices
            # A lane stores 4 bytes of each of its lines.
            words = matrices * (down * 128 * -(-N // 128) + across * columns * -(-M // 128))
            assert launches[1].grid[0] * 256 * config["lines"] >= words


@pytest.mark.gpu
@pytest.mark.parametrize("variant", STAGED_VARIANTS, ids=name_of)
def test_staged_scales_are_as_the_reference(variant: QuantizeProblem) -> None:
    generator = torch.Generator().manual_seed(11)
    shapes = ((1, 32, 32), (3, 288, 416), (1, 1440, 96), (2, 160, 1184), (2, 256, 384))
    # Lines of scales of several waves, and of bytes that are no whole words.
    shapes += ((1, 4256, 96), (1, 64, 4192))
    for lines in (4, 8):
        for matrices, M, N in shapes:
            finite = M in (288, 256)  # whole tiles without NaN have a path of their own
            x = draw((matrices, M, N), DTYPES[variant.dtype], generator, finite)
            problem = resized(variant, matrices=matrices, M=M, N=N)
            config = {"resident": 3, "lines": lines}
            assert_as_reference(STAGED, problem, x, None, torch.device("cuda"), config)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["e4m3", "e2m1"])
def test_staged_groups_are_as_the_reference(format: str) -> None:
    generator = torch.Generator().manual_seed(12)
    problem = QuantizeProblem(1, 32, "bf16", "both", groups=1, format=format)
    groups_are_padded(STAGED, problem, torch.device("cuda"), generator)
    wrong_offsets_stay_inside(STAGED, problem, torch.device("cuda"), generator)


@pytest.mark.gpu
def test_staged_calls_behind_each_other_do_not_mix() -> None:
    """They share a workspace, and the next one begins before the last one ends."""
    target, device = hardware("sm_90a"), torch.device("cuda")
    problem = QuantizeProblem(1024, 1024, "bf16", "both")
    run = bind(STAGED, target, problem, STAGED.configure(target, problem), 0)
    generator = torch.Generator().manual_seed(13)
    calls = []
    for _ in range(8):
        x = draw((1, 1024, 1024), torch.bfloat16, generator)
        outs = [None if s is None else torch.empty(s, dtype=d) for s, d in output_shapes(problem)]
        quantize_torch.run(problem, (x, None, *outs), {})
        here = [None if t is None else torch.zeros_like(t, device=device) for t in outs]
        calls.append(((x.to(device), None, *here), outs))
    for tensors, _ in calls:
        run(tensors, [0 if tensor is None else tensor.data_ptr() for tensor in tensors])
    for tensors, outs in calls:
        for got, want in zip(tensors[2:6], outs[:4], strict=True):
            assert got is not None and want is not None
            assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8))


def offsets_of(sizes: list[int], first: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([first, *sizes], dtype=torch.int64).cumsum(0).to(dtype)


def groups_are_padded(
    kernel: KernelSpec,
    variant: QuantizeProblem,
    device: torch.device,
    generator: torch.Generator,
) -> None:
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


def wrong_offsets_stay_inside(
    kernel: KernelSpec,
    variant: QuantizeProblem,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    x = draw((150, 64), torch.bfloat16, generator)
    for wrong in ([0, 100, 50, 150], [-5, 20, 2**40, 150], [2**40, -(2**40), 150, 3]):
        problem = resized(variant, M=150, N=64, groups=3)
        assert_as_reference(kernel, problem, x, torch.tensor(wrong), device)


@pytest.mark.parametrize(
    ("kernel", "variant"), GROUPED_VARIANTS, ids=[kernel.name for kernel, _ in GROUPED_VARIANTS]
)
def test_groups_of_any_sizes_are_padded(
    device: torch.device, kernel: KernelSpec, variant: QuantizeProblem
) -> None:
    groups_are_padded(kernel, variant, device, torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    ("kernel", "variant"), GROUPED_VARIANTS, ids=[kernel.name for kernel, _ in GROUPED_VARIANTS]
)
def test_wrong_offsets_read_and_write_nothing_outside(
    device: torch.device, kernel: KernelSpec, variant: QuantizeProblem
) -> None:
    wrong_offsets_stay_inside(kernel, variant, device, torch.Generator().manual_seed(6))


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
