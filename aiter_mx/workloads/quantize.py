"""Quantisation, tried out: on matrices whose blocks differ in magnitude, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import torch

from aiter_mx.codec import DTYPES, FORMATS
from aiter_mx.fallbacks import quantize_torch
from aiter_mx.kernels.quantize import QuantizeProblem
from aiter_mx.launch import Tensors
from aiter_mx.layouts import padded_shape
from aiter_mx.numerics import BLOCK
from aiter_mx.workloads.workload import Judge, Operands, Workload, judge_bytes

_OFFSETS = {"int32": torch.int32, "int64": torch.int64}
_RESULTS = (2, 3, 4, 5, 6)
_SAMPLE_ROWS = 256


def _operands(problem: QuantizeProblem, device: torch.device) -> Operands:
    shape = (problem.matrices, problem.M, problem.N)
    exponents = torch.randint(-12, 12, (*shape[:2], problem.N // BLOCK), device=device)
    x = torch.randn(shape, device=device) * 2.0 ** exponents.repeat_interleave(BLOCK, dim=-1)
    offsets = None
    if problem.groups:
        cuts = torch.randint(0, problem.M + 1, (problem.groups + 1,)).sort().values
        cuts[0], cuts[-1] = 0, problem.M
        offsets = cuts.to(_OFFSETS[problem.offsets]).to(device)
    x = x.to(DTYPES[problem.dtype])
    return [x, offsets, *_results(problem, device)]


def _results(problem: QuantizeProblem, device: torch.device) -> Operands:
    payload, M, N = FORMATS[problem.format], problem.out_rows, problem.N
    results: Operands = []
    along = problem.rows_along
    for wanted, rows, columns in (
        (problem.to != "columns", along, N),
        (problem.to != "rows", N, M),
    ):
        if not wanted:
            results += [None, None]
            continue
        scales = padded_shape(rows, columns // BLOCK, problem.layout)
        shape = (problem.matrices, rows, columns // payload.per_byte)
        results.append(torch.empty(shape, dtype=payload.dtype, device=device))
        results.append(torch.empty(problem.matrices, *scales, dtype=torch.uint8, device=device))
    ends = torch.empty(problem.groups + 1, dtype=_OFFSETS[problem.offsets], device=device)
    return [*results, ends if problem.groups else None]


def _another(problem: QuantizeProblem, operands: Operands) -> Operands:
    x, offsets, *_ = operands
    assert x is not None
    return [torch.roll(x, 1, dims=1), offsets, *_results(problem, x.device)]


def _read_bytes(problem: QuantizeProblem, operands: Operands | None) -> float:
    return problem.matrices * problem.M * problem.N * DTYPES[problem.dtype].itemsize


def _judge(problem: QuantizeProblem, tensors: Tensors) -> Judge:
    expected = list(_results(problem, tensors[0].device))
    quantize_torch.run(problem, (*tensors[:2], *expected), {})
    return judge_bytes(expected, 2)


def _sample(problem: QuantizeProblem, share: float) -> QuantizeProblem:
    rows = max(int(problem.M * share) // _SAMPLE_ROWS, 1) * _SAMPLE_ROWS
    return replace(problem, M=min(rows, problem.M))


WORKLOAD = Workload(
    op="quantize",
    draw=_operands,
    redraw=_another,
    read_bytes=_read_bytes,
    results=_RESULTS,
    judge=_judge,
    sample=_sample,
)
