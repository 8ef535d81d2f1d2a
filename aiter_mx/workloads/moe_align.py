"""The routing of tokens to experts, tried out: each token's experts differ, and some are absent."""

from __future__ import annotations

from dataclasses import replace

import torch

from aiter_mx.codec import DTYPES, INDICES
from aiter_mx.fallbacks import moe_align_torch
from aiter_mx.kernels.moe_align import MoeAlignProblem
from aiter_mx.launch import Tensors
from aiter_mx.numerics import BLOCK
from aiter_mx.workloads.workload import Judge, Operands, Workload, judge_bytes

_RESULTS = (5, 6, 7, 8, 9, 10)
_TOKENS = 3  # position of how many tokens count
_HERE = 0.7  # share of experts


def _operands(problem: MoeAlignProblem, device: torch.device) -> Operands:
    p = problem
    tokens = torch.full((1,), p.M, dtype=torch.int32).to(device)
    x = None
    if p.x_dtype != "none":
        x = torch.rand(p.M, p.K, device=device).to(DTYPES[p.x_dtype])
    return [*_routing(p, device), tokens, x, *_results(p, device)]


def _routing(p: MoeAlignProblem, device: torch.device) -> Operands:
    """Experts of tokens, their weights, and which experts are here."""
    if p.masked:
        counts = torch.randint(p.M // p.E + 1, (p.E,)).to(INDICES[p.id_dtype])
        return [counts.to(device), None, None]
    ids = torch.randint(p.E, (p.M, p.top_k)).to(INDICES[p.id_dtype])
    weights = torch.rand(p.M, p.top_k).to(device) if p.ids == "aiter" else None
    here = torch.rand(p.E) < _HERE
    numbers = torch.where(here, here.cumsum(0) - 1, -1) if p.expert_map == "numbers" else here
    of_experts = None if p.expert_map == "none" else numbers.to(torch.int32).to(device)
    return [ids.to(device), weights, of_experts]


def _results(p: MoeAlignProblem, device: torch.device) -> Operands:
    def new(*shape: int, of: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device=device)

    is_packed, quantizes = p.ids == "aiter", p.x_dtype != "none"
    return [
        new(p.max_ids),
        new(p.max_ids, of=torch.float32) if is_packed else None,
        new(p.max_ids // p.block_m),
        new(2 if is_packed else 1),
        new(p.M, p.K, of=torch.float8_e4m3fn) if quantizes else None,
        new(p.M, p.K // BLOCK, of=torch.uint8) if quantizes else None,
    ]


def _another(problem: MoeAlignProblem, operands: Operands) -> Operands:
    ids = operands[0]
    assert ids is not None
    return [*_routing(problem, ids.device), *operands[3:5], *_results(problem, ids.device)]


def _read_bytes(problem: MoeAlignProblem, operands: Operands | None) -> float:
    p = problem
    width = DTYPES[p.x_dtype].itemsize if p.x_dtype != "none" else 0
    of_slot = INDICES[p.id_dtype].itemsize + 4 * (p.ids == "aiter")
    return p.M * (p.top_k * of_slot + p.K * width)


def _judge(problem: MoeAlignProblem, tensors: Tensors) -> Judge:
    expected = _results(problem, tensors[0].device)
    moe_align_torch.run(problem, (*tensors[:5], *expected), {})
    return judge_bytes(expected, 5)


def _sample(problem: MoeAlignProblem, share: float) -> MoeAlignProblem:
    least = problem.E if problem.masked else 1
    return replace(problem, M=max(1, round(problem.M / least * share)) * least)


WORKLOAD = Workload(
    op="moe_align",
    draw=_operands,
    redraw=_another,
    read_bytes=_read_bytes,
    results=_RESULTS,
    judge=_judge,
    sample=_sample,
    optional=(_TOKENS,),
)
