"""Quantisation kernels: routes, workspaces, what they ask memory for, registers."""

from __future__ import annotations

import pytest
import torch

import aiter_mx
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels.quantize import KERNELS, QuantizeProblem
from aiter_mx.kernels.spec import KernelSpec
from aiter_mx.launch import build_request
from aiter_mx.runtimes import sim
from aiter_mx.target import hardware
from op_tests.conformance import DTYPES
from op_tests.quantize import subjects
from op_tests.quantize.cases import assert_as_reference, draw, resized
from op_tests.quantize.subjects import STAGED_VARIANTS, name_of
from op_tests.spills import assert_no_spills

ROWS, STAGED, TILES = KERNELS[:3]

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
    variants = [
        (kernel, problem)
        for kernel, subject in ((ROWS, subjects.ROWS), (TILES, subjects.TILES))
        for problem in (*subject.variants, *subject.grouped)
    ]
    assert_no_spills(
        build_request(kernel, target, problem, kernel.configure(target, problem))
        for kernel, problem in variants
    )
