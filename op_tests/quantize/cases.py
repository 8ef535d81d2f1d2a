"""Inputs of quantisation that reveal mistakes, and launches that reveal writes outside outputs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from aiter_mx.codec import FORMATS
from aiter_mx.fallbacks import quantize_torch
from aiter_mx.kernels.quantize import QuantizeProblem
from aiter_mx.kernels.spec import Config, KernelSpec
from aiter_mx.layouts import padded_shape
from aiter_mx.numerics import BLOCK
from op_tests.launches import Out, launch, poisoned

OFFSETS = {"int32": torch.int32, "int64": torch.int64}


def draw(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, finite: bool = False
) -> Tensor:
    """Of each run of some blocks, at random: any bits, also NaN; finite bits; like magnitudes."""
    count = 1
    for size in shape:
        count *= size
    kind = torch.randint(int(finite), 4, (-(-count // 96),), generator=generator)
    kind = kind.repeat_interleave(96)[:count]
    if dtype == torch.float32:
        bits = torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32)
    else:
        bits = torch.randint(0, 2**16, (count,), generator=generator).to(torch.uint16)
    values = bits.view(dtype)
    exponents = torch.randint(-140, 120, (-(-count // 32),), generator=generator)
    if dtype == torch.float16:
        exponents = exponents // 9
    normal = torch.randn(count, generator=generator, dtype=torch.float64)
    like = (normal * 2.0 ** exponents.repeat_interleave(32)[:count]).to(dtype)
    finite = torch.where(values.isfinite(), values, torch.zeros((), dtype=dtype))
    return torch.where(kind == 0, values, torch.where(kind == 1, finite, like)).view(shape)


def output_shapes(problem: QuantizeProblem) -> list[tuple[tuple[int, ...] | None, torch.dtype]]:
    """Shapes and dtypes of a kernel's outputs, worked out apart from the package's own."""
    M, N, matrices = problem.out_rows, problem.N, problem.matrices
    payload = FORMATS[problem.format]
    found: list[tuple[tuple[int, ...] | None, torch.dtype]] = []
    for wanted, rows, columns in (
        (problem.to != "columns", M if problem.padded == "both" else problem.M, N),
        (problem.to != "rows", N, M),
    ):
        scales = padded_shape(rows, columns // BLOCK, problem.layout)
        shapes = [(matrices, rows, columns // payload.per_byte), (matrices, *scales)]
        dtypes = (payload.dtype, torch.uint8)
        found += [(s if wanted else None, d) for s, d in zip(shapes, dtypes, strict=True)]
    offsets = (problem.groups + 1,) if problem.groups else None
    return [*found, (offsets, OFFSETS[problem.offsets])]


def assert_as_reference(
    kernel: KernelSpec,
    problem: QuantizeProblem,
    x: Tensor,
    offsets: Tensor | None,
    device: torch.device,
    config: Config | None = None,
) -> None:
    """Launch a kernel, and compare every byte that it wrote, and left alone, with the reference."""
    shapes = output_shapes(problem)
    expected = [None if shape is None else poisoned(shape, dtype) for shape, dtype in shapes]
    quantize_torch.run(problem, (x, offsets, *expected), {})
    outs = [None if shape is None else Out(shape, dtype) for shape, dtype in shapes]
    results = iter(launch(kernel, device, problem, config, (x, offsets, *outs)))
    names = ("rows", "row scales", "columns", "column scales", "padded offsets")
    for name, want in zip(names, expected, strict=True):
        if want is not None:
            wrong = (next(results).view(torch.uint8) != want.view(torch.uint8)).nonzero()
            assert not len(wrong), f"{name} of {problem}: {len(wrong)} bytes, {wrong[0]} first"


def offsets_of(sizes: list[int], first: int, dtype: torch.dtype) -> Tensor:
    """Where groups of these sizes begin, the first at row ``first``."""
    return torch.tensor([first, *sizes], dtype=torch.int64).cumsum(0).to(dtype)


def resized(problem: QuantizeProblem, **sizes: object) -> QuantizeProblem:
    """The same variant for another shape."""
    return replace(problem, **sizes)
