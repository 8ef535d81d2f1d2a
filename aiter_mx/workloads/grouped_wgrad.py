"""The gradient of a grouped GEMM's weights, tried out: groups of uneven sizes, padded."""

from __future__ import annotations

from functools import partial

import torch

from aiter_mx.codec import DTYPES, INDICES, as_scale_bytes, dequantize_block_scaled
from aiter_mx.kernels.grouped_wgrad import GroupedWgradProblem
from aiter_mx.kernels.grouped_wgrad.problem import START_COLUMNS
from aiter_mx.launch import Tensors
from aiter_mx.numerics import BLOCK
from aiter_mx.timing import random_mx
from aiter_mx.workloads.grouped_gemm import in_format, problems_like, two_groups
from aiter_mx.workloads.workload import Judge, Operands, Verdict, Workload, compare, worst_of


def _operands(problem: GroupedWgradProblem, device: torch.device) -> Operands:
    M, N, K, G = problem.M, problem.N, problem.K, problem.G
    index = INDICES[problem.index]
    shares = torch.rand(G) + 0.5
    ends = (shares.cumsum(0) / shares.sum() * (M // START_COLUMNS)).long() * START_COLUMNS
    offs = torch.cat([torch.zeros(1), ends]).to(index)
    counts = ((offs[1:] - offs[:-1]) * (torch.rand(G) * 0.1 + 0.9)).to(index)
    out = torch.zeros(G, N, K, dtype=DTYPES[problem.out_dtype], device=device)
    return [*_drawn(problem, device), None, out, offs.to(device), counts.to(device)]


def _drawn(problem: GroupedWgradProblem, device: torch.device) -> list[torch.Tensor]:
    (grad, grad_scale), of_x = (random_mx(n, problem.M, device) for n in (problem.N, problem.K))
    return [in_format(grad, problem.grad_format), grad_scale, *of_x]


def _another(problem: GroupedWgradProblem, operands: Operands) -> Operands:
    out = operands[5]
    assert out is not None
    return [*_drawn(problem, out.device), operands[4], torch.zeros_like(out), *operands[6:]]


def _read_bytes(problem: GroupedWgradProblem, operands: Operands | None) -> float:
    return (problem.N + problem.K) * problem.M * (BLOCK + 1) / BLOCK


def _judge(problem: GroupedWgradProblem, tensors: Tensors) -> Judge:
    grad, grad_scale, x, x_scale, _, _, starts, counts = tensors
    groups = []
    for g, (begin, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=False)):
        end = begin + -(-count // BLOCK) * BLOCK
        parts = []
        for payload, scale in ((grad, grad_scale), (x, x_scale)):
            scales = as_scale_bytes(scale)[:, begin // BLOCK : end // BLOCK].contiguous()
            values = payload[:, begin:end].contiguous()
            parts.append(dequantize_block_scaled(values, scales, torch.float64)[:, :count])
        # float32 is far closer to the product than what is judged, and takes half the memory.
        reference = (parts[0] @ parts[1].T).float()
        groups.append((g, reference, parts[0].norm(dim=1), parts[1].norm(dim=1)))

    def judge(results: Tensors) -> Verdict:
        return worst_of(
            [
                compare(
                    results[5][g],
                    reference.double(),
                    torch.outer(grad_norm, x_norm),
                    problem.out_dtype,
                )
                for g, reference, grad_norm, x_norm in groups
            ]
        )

    return judge


WORKLOAD = Workload(
    op="grouped_wgrad",
    draw=_operands,
    redraw=_another,
    read_bytes=_read_bytes,
    results=(5,),
    judge=_judge,
    sample=partial(two_groups, of_m=START_COLUMNS, of_n=BLOCK),
    problems=partial(problems_like, GroupedWgradProblem),
)
