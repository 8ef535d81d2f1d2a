"""The second half of an expert layer of few tokens, tried out."""

from __future__ import annotations

from dataclasses import replace

import torch

from aiter_mx.codec import DTYPES, as_scale_bytes, dequantize_block_scaled
from aiter_mx.kernels.moe_down import MoeDownProblem
from aiter_mx.launch import Tensors
from aiter_mx.numerics import BLOCK
from aiter_mx.workloads.moe_up import no_problems, read_bytes, routing_of, weights_of
from aiter_mx.workloads.workload import Judge, Operands, Verdict, Workload, compare

_OUT = 8  # position


def _operands(problem: MoeDownProblem, device: torch.device) -> Operands:
    p = problem
    h = torch.rand(p.M * p.slots, p.K, device=device) - 0.5
    return _around(p, h)


def _around(p: MoeDownProblem, h: torch.Tensor) -> Operands:
    ids, numbers, tokens = routing_of(p, h.device)
    shares = (torch.rand(p.M, p.top_k) + 0.1).to(h.device)
    out = torch.empty(p.M, p.N, dtype=DTYPES[p.out_dtype], device=h.device)
    return [h, ids, shares, numbers, tokens, *weights_of(p, h.device), out]


def _another(problem: MoeDownProblem, operands: Operands) -> Operands:
    h = operands[0]
    assert h is not None
    return _around(problem, h)


def _judge(problem: MoeDownProblem, tensors: Tensors) -> Judge:
    from aiter_mx.fallbacks.moe_up_torch import dequantised, experts_here

    p = problem
    h, ids, shares, numbers, tokens, wq, ws, bias, out = tensors
    values = dequantised(h, None)
    experts = experts_here(p, ids, numbers, tokens)
    weights = torch.cat((shares, shares.new_ones(p.M, p.shared)), 1).double().view(-1)
    reference = torch.zeros(out.shape, dtype=torch.float64, device=out.device)
    bound = torch.zeros_like(reference)
    for t, expert in enumerate(experts.view(-1).tolist()):
        if expert < 0:
            continue
        w = dequantize_block_scaled(wq[expert], as_scale_bytes(ws)[expert], torch.float64)
        y, size = values[t] @ w.T, values[t].norm() * w.norm(dim=1)
        if bias is not None:
            y, size = y + bias[expert].double(), size + bias[expert].double().abs()
        reference[t // p.slots] += y * weights[t]
        bound[t // p.slots] += size * weights[t].abs()

    counted = p.M if tokens is None else int(tokens)  # rows of tokens past them stay as they are

    def judge(results: Tensors) -> Verdict:
        written = results[_OUT][:counted]
        return compare(written, reference[:counted], bound[:counted], p.out_dtype)

    return judge


def _sample(problem: MoeDownProblem, share: float) -> MoeDownProblem:
    return replace(problem, N=min(problem.N, max(BLOCK, round(problem.N * share) // 8 * 8)))


WORKLOAD = Workload(
    op="moe_down",
    draw=_operands,
    redraw=_another,
    read_bytes=read_bytes,
    results=(_OUT,),
    judge=_judge,
    sample=_sample,
    problems=no_problems,
    optional=(4,),
)
