"""Grouped GEMMs with scales for 128 k, tried out: groups of the sizes that a router makes."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from aiter_mx.codec import DTYPES
from aiter_mx.kernels.promoted_gemm import PromotedGemmProblem
from aiter_mx.kernels.promoted_gemm.problem import COARSE
from aiter_mx.launch import Tensors
from aiter_mx.numerics import BLOCK
from aiter_mx.timing import random_mx
from aiter_mx.workloads.grouped_gemm import bounds, problems_like, ranges_of, two_groups
from aiter_mx.workloads.workload import (
    ACCUMULATION,
    Judge,
    Operands,
    Verdict,
    Workload,
    compare,
    worst_of,
)

_SUMS_ERROR = 2.0**-9  # of the sum of magnitudes: Hopper's fp8 matrix unit adds with 14 bits


def _scales(shape: tuple[int, ...], strides: tuple[int, ...], device: torch.device) -> Tensor:
    """Random ones, no powers of two, in memory as a problem says."""
    length = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return (torch.rand(length, device=device) + 0.5).as_strided(shape, strides)


def _weights(problem: PromotedGemmProblem, device: torch.device) -> list[Tensor]:
    block, step, group = problem.b_strides
    payload, _ = random_mx(problem.G * problem.N, problem.K, device)
    shape = (problem.G, -(-problem.N // COARSE), -(-problem.K // COARSE))
    scale = _scales(shape, (group, block, step), device)
    return [payload.view(problem.G, problem.N, problem.K), scale]


def _operands(problem: PromotedGemmProblem, device: torch.device) -> Operands:
    M, N = problem.M, problem.N
    out = torch.empty(M, N, dtype=DTYPES[problem.out_dtype], device=device)
    starts, ends = bounds(problem.groups, device)
    row, step, group = problem.a_strides
    apart = problem.G if problem.layout == "masked" else 1
    shape = (apart, M // apart, -(-problem.K // COARSE))
    scale = _scales(shape, (group, row, step), device)
    payload, _ = random_mx(M, problem.K, device)
    return [payload, scale, *_weights(problem, device), out, starts, ends]


def _another(problem: PromotedGemmProblem, operands: Operands) -> Operands:
    out = operands[4]
    assert out is not None
    weights = _weights(problem, out.device)
    return [*operands[:2], *weights, torch.empty_like(out), *operands[5:]]


def _read_bytes(problem: PromotedGemmProblem, operands: Operands | None) -> float:
    return problem.G * problem.N * problem.K * (1 + 4 / COARSE**2)


def _values(payload: Tensor, scale: Tensor, each: int) -> Tensor:
    """What a payload ``[rows, K]`` stands for, with scales for ``each`` rows of 128 k."""
    rows, K = payload.shape
    every = scale.double().repeat_interleave(each, 0)[:rows].repeat_interleave(COARSE, 1)
    return payload.double() * every[:, :K]


def _judge(problem: PromotedGemmProblem, tensors: Tensors) -> Judge:
    a, a_scale, b, b_scale, _, starts, ends = tensors
    a_scale = a_scale.reshape(problem.M, -1)
    on_hopper = a.is_cuda and torch.version.hip is None
    groups = []
    for g, first, last in ranges_of(problem.groups, starts, ends):
        rows = slice(first, last)
        x, w = _values(a[rows], a_scale[rows], 1), _values(b[g], b_scale[g], COARSE)
        if on_hopper:
            allowed = (x.abs() @ w.abs().T) * (_SUMS_ERROR / ACCUMULATION)
        else:
            allowed = torch.outer(x.norm(dim=1), w.norm(dim=1))
        groups.append((rows, (x @ w.T).float(), allowed.float()))

    def judge(results: Tensors) -> Verdict:
        return worst_of(
            [
                compare(results[4][rows], reference.double(), allowed.double(), problem.out_dtype)
                for rows, reference, allowed in groups
                if reference.numel()
            ]
        )

    return judge


WORKLOAD = Workload(
    op="promoted_gemm",
    draw=_operands,
    redraw=_another,
    read_bytes=_read_bytes,
    results=(4,),
    judge=_judge,
    sample=partial(two_groups, of_n=BLOCK),
    problems=partial(problems_like, PromotedGemmProblem),
)
