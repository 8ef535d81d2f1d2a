"""The weighted sum of a token's routed rows, tried out: some of them are of experts elsewhere."""

from __future__ import annotations

import torch

from aiter_mx.codec import DTYPES, INDICES
from aiter_mx.kernels.moe_combine import MoeCombineProblem
from aiter_mx.launch import Tensors
from aiter_mx.workloads.workload import Judge, Operands, Verdict, Workload, compare, fewer_rows

_PLACES, _MAP, _TOKENS, _OUT = 1, 4, 5, 6  # positions
_HERE = 0.7  # share of experts
_PADDING = 5  # rows of a sorted y beside those of tokens


def _operands(problem: MoeCombineProblem, device: torch.device) -> Operands:
    p = problem
    tokens = torch.full((1,), p.M, dtype=torch.int32).to(device)
    return [*_rows(p, device), *_routing(p, device), tokens, _result(p, device)]


def _rows(p: MoeCombineProblem, device: torch.device) -> list[torch.Tensor | None]:
    """Routed rows, and where they are if they are sorted."""
    routed = p.M * (p.top_k + p.shared)
    places = None
    if p.sorted_y:
        places = torch.randperm(routed + _PADDING)[:routed].to(torch.int32).to(device)
    rows = torch.rand((routed + _PADDING * p.sorted_y, p.N), device=device) - 0.5
    return [rows.to(DTYPES[p.y_dtype]), places]


def _routing(p: MoeCombineProblem, device: torch.device) -> list[torch.Tensor]:
    """Experts of tokens, their weights, and the numbers of experts here."""
    ids = torch.randint(p.E, (p.M, p.top_k)).to(INDICES[p.id_dtype])
    weights = torch.rand(p.M, p.top_k) + 0.1
    numbers = torch.where(torch.rand(p.E) < _HERE, 0, -1).to(torch.int32)
    return [tensor.to(device) for tensor in (ids, weights, numbers)]


def _result(p: MoeCombineProblem, device: torch.device) -> torch.Tensor:
    return torch.empty(p.M, p.N, dtype=DTYPES[p.out_dtype], device=device)


def _another(problem: MoeCombineProblem, operands: Operands) -> Operands:
    y = operands[0]
    assert y is not None
    device = y.device
    routing = _routing(problem, device)
    return [*_rows(problem, device), *routing, operands[_TOKENS], _result(problem, device)]


def _read_bytes(problem: MoeCombineProblem, operands: Operands | None) -> float:
    p = problem
    return p.M * (p.top_k + p.shared) * p.N * DTYPES[p.y_dtype].itemsize


def _judge(problem: MoeCombineProblem, tensors: Tensors) -> Judge:
    p = problem
    y, places, ids, weights, numbers, tokens, *_ = tensors
    is_expert = (ids >= 0) & (ids < p.E)
    absent = ~is_expert | (numbers[ids.long().clamp(0, p.E - 1)] < 0)
    of_slots = torch.cat((weights, weights.new_ones(p.M, p.shared)), 1).double()
    of_slots[:, : p.top_k][absent] = 0.0
    if places is not None:
        y = y[places.long().clamp(min=0)]
        of_slots[places.view(p.M, -1) < 0] = 0.0
    rows = y.view(p.M, -1, p.N).double() * of_slots.unsqueeze(2)
    reference, bound = rows.sum(1), rows.abs().sum(1)
    count = int(tokens)

    def judge(results: Tensors) -> Verdict:
        return compare(results[_OUT][:count], reference[:count], bound[:count], p.out_dtype)

    return judge


WORKLOAD = Workload(
    op="moe_combine",
    draw=_operands,
    redraw=_another,
    read_bytes=_read_bytes,
    results=(_OUT,),
    judge=_judge,
    sample=fewer_rows,
    optional=(_MAP, _TOKENS),
)
