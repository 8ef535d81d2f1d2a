"""The linear, tried out: weights are cold, activations come from the kernel before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from aiter_mx.codec import DTYPES, as_scale_bytes, dequantize_block_scaled
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.launch import Tensors
from aiter_mx.numerics import BLOCK
from aiter_mx.sim.timing.constants import CUS
from aiter_mx.timing import random_mx
from aiter_mx.workloads.models import Model
from aiter_mx.workloads.workload import Judge, Operands, Verdict, Workload, compare, normal_mx

ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Rows of x that tables have: the others up to 64 take those of the next power of two."""
_MOST_OVERLAPPING = 8
"""Rows of x up to which tables have launches that overlap too: beyond, products outlast reading,
and starting to read early gains little."""
_MOST_QUANTISED_IN_PLACE = 2
"""Rows of x up to which tables have x that is yet to be quantised: with more, a launch of its own
pays but at small shapes, and rows of quantised x name the kernel that either way takes."""
_SAMPLE_ROWS = 192
"""Of w that the simulator needs at least: a few workgroups of any kernel."""


def _drawn(rows: int, problem: LinearProblem, device: torch.device) -> Operands:
    """An operand in MX. On a GPU, and of more rows than tables have, it is what normal values are
    quantised to: a kernel of these takes longer where neighbouring scales are far apart."""
    if problem.M in range(ROWS[-1] + 1) or device.type != "cuda":
        return [*random_mx(rows, problem.K, device)]
    return [*normal_mx(rows, problem.K, device)]


def _operands(problem: LinearProblem, device: torch.device) -> Operands:
    M, N, K = problem.M, problem.N, problem.K
    bias = None
    if problem.bias != "none":
        bias = torch.randn(N, dtype=DTYPES[problem.bias], device=device)
    out = torch.empty(M, N, dtype=DTYPES[problem.out_dtype], device=device)
    x = _drawn(M, problem, device)
    if problem.x_dtype != "e4m3":
        x = [torch.randn(M, K, device=device).to(DTYPES[problem.x_dtype]), None]
    return [*x, *_drawn(N, problem, device), bias, out]


def _another(problem: LinearProblem, operands: Operands) -> Operands:
    xq, xs, wq, _, bias, out = operands
    assert wq is not None and out is not None
    return [xq, xs, *_drawn(problem.N, problem, wq.device), bias, torch.empty_like(out)]


def _read_bytes(problem: LinearProblem, operands: Operands | None) -> float:
    return problem.N * problem.K * (BLOCK + 1) / BLOCK


def _judge(problem: LinearProblem, tensors: Tensors) -> Judge:
    from aiter_mx.ops.quantize import quantize

    xq, xs, wq, ws, bias, _ = tensors
    if xs is None:
        xq, xs = quantize(xq)
    x = dequantize_block_scaled(xq, as_scale_bytes(xs), torch.float64)
    w = dequantize_block_scaled(wq, as_scale_bytes(ws), torch.float64)
    reference = x @ w.T
    bound = torch.outer(x.norm(dim=1), w.norm(dim=1))
    if bias is not None:
        reference += bias.double()
        bound += bias.double().abs()

    def judge(results: Tensors) -> Verdict:
        return compare(results[5], reference, bound, problem.out_dtype)

    return judge


def _sample(problem: LinearProblem, share: float) -> LinearProblem:
    """The rows of w that so many whole compute units have."""
    rows = min(problem.N, max(_SAMPLE_ROWS, round(problem.N * share)))
    return replace(problem, N=-(-CUS * rows // problem.N) * problem.N // CUS)


def _problems(model: Model, gpus: int, arch: str) -> list[LinearProblem]:
    return [
        LinearProblem(M=M, N=N, K=K, **kind)
        for N, K in model.linears(gpus)
        if K % BLOCK == 0  # an engine pads the others, each in its own way
        for M in ROWS
        for kind in _kinds(M, arch)
    ]


def _kinds(M: int, arch: str) -> list[dict[str, Any]]:
    """The ways in which a linear is called; without such a GPU only the plain one is modelled."""
    kinds: list[dict[str, Any]] = [{}]
    if arch == "sm_90a" and M <= _MOST_OVERLAPPING:
        kinds.append({"pdl": True})
    if arch == "sm_90a" and M <= _MOST_QUANTISED_IN_PLACE:
        kinds.append({"x_dtype": "bf16"})
    return kinds


WORKLOAD = Workload(
    op="linear",
    draw=_operands,
    redraw=_another,
    read_bytes=_read_bytes,
    results=(5,),
    judge=_judge,
    sample=_sample,
    problems=_problems,
)
