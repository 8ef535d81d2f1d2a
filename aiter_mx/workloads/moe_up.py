"""The first half of an expert layer of few tokens, tried out: each call routes to other experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from aiter_mx.codec import DTYPES, INDICES, as_scale_bytes, dequantize_block_scaled
from aiter_mx.kernels.moe_down import MoeDownProblem
from aiter_mx.kernels.moe_up import MoeUpProblem
from aiter_mx.launch import Tensors
from aiter_mx.numerics import BLOCK
from aiter_mx.timing import random_mx
from aiter_mx.workloads.moe_gemm import activated
from aiter_mx.workloads.workload import ACCUMULATION, Judge, Operands, Verdict, Workload

_X, _WQ, _BIAS, _H = 3, 5, 7, 8  # positions
_ROUNDING = 2.0**-22
_FLOAT64 = 2.0**-50  # what float64 loses in a difference of like numbers
_SMALLEST = 2.0**-120  # what an exponential loses where it is flushed to zero


def _operands(problem: MoeUpProblem, device: torch.device) -> Operands:
    p = problem
    x: list[torch.Tensor | None]
    if p.x_dtype == "mxfp8":
        x = [*random_mx(p.M, p.K, device)]
    else:
        x = [(torch.rand(p.M, p.K, device=device) - 0.5).to(DTYPES[p.x_dtype]), None]
    ids, numbers, tokens = routing_of(p, device)
    return [ids, numbers, tokens, *x, *weights_of(p, device), _result(p, device)]


def routing_of(problem: MoeUpProblem | MoeDownProblem, device: torch.device) -> Operands:
    """Experts of each token's slots, the numbers of experts here, and how many tokens count."""
    p = problem
    ids = torch.rand(p.M, p.num_experts).argsort(1)[:, : p.top_k]
    ids = ids.repeat(1, -(-p.top_k // max(1, ids.shape[1])))[:, : p.top_k].contiguous()
    numbers = torch.full((p.num_experts,), -1, dtype=torch.int32)
    routed = min(p.E - p.shared, p.num_experts)
    numbers[torch.randperm(p.num_experts)[:routed]] = torch.arange(routed, dtype=torch.int32)
    tokens = torch.full((1,), p.M, dtype=torch.int32)
    kept = numbers.to(device) if p.has_map else None
    return [ids.to(INDICES[p.id_dtype]).to(device), kept, tokens.to(device)]


def weights_of(problem: MoeUpProblem | MoeDownProblem, device: torch.device) -> Operands:
    """Every expert's payload, scales and bias."""
    p = problem
    payload, scale = random_mx(p.E * p.N, p.K, device)
    scale -= 6  # sums near one, where activations are curved, and not all saturated
    bias = None
    if p.bias != "none":
        bias = torch.randn(p.E, p.N, device=device).to(DTYPES[p.bias])
    return [payload.view(p.E, p.N, p.K), scale.view(p.E, p.N, p.K // BLOCK), bias]


def _result(p: MoeUpProblem, device: torch.device) -> torch.Tensor:
    return torch.empty(p.M * p.slots, p.N // 2, dtype=torch.float32, device=device)


def _another(problem: MoeUpProblem, operands: Operands) -> Operands:
    x, wq = operands[_X], operands[_WQ]
    assert x is not None and wq is not None
    ids, numbers, tokens = routing_of(problem, x.device)
    weights = weights_of(problem, x.device)
    return [ids, numbers, tokens, *operands[_X:_WQ], *weights, _result(problem, x.device)]


def read_bytes(problem: MoeUpProblem | MoeDownProblem, operands: Operands | None) -> float:
    """Of the weights of the experts that slots choose at random."""
    p = problem
    routed = p.E - p.shared
    touched = routed * (1 - (1 - 1 / p.num_experts) ** (p.M * p.top_k)) + p.shared
    return touched * p.N * p.K * (BLOCK + 1) / BLOCK


def _judge(problem: MoeUpProblem, tensors: Tensors) -> Judge:
    from aiter_mx.fallbacks.moe_up_torch import dequantised, experts_here

    p = problem
    ids, numbers, tokens, x, xs, wq, ws, bias, h = tensors
    values = dequantised(x, xs)
    experts = experts_here(p, ids, numbers, tokens).view(-1).tolist()
    reference = torch.zeros(h.shape, dtype=torch.float64, device=h.device)
    bound = torch.zeros_like(reference)
    for t, expert in enumerate(experts):
        if expert < 0:
            continue
        w = dequantize_block_scaled(wq[expert], as_scale_bytes(ws)[expert], torch.float64)
        row = values[t // p.slots : t // p.slots + 1]
        y, size = row @ w.T, torch.outer(row.norm(dim=1), w.norm(dim=1))
        if bias is not None:
            y, size = y + bias[expert].double(), size + bias[expert].double().abs()
        reference[t : t + 1], bound[t : t + 1] = activated(p, y, size * ACCUMULATION)
        bound[t] += reference[t].abs() * (8 + _raised_to(p, y[0])) * _ROUNDING
        gate, up = (part.abs() for part in _parts(p, y[0]))
        bound[t] += up * 2 * _SMALLEST  # of an activation that vanishes
        bound[t] += gate * up * _FLOAT64  # of 1 + erf in the reference
    listed = [t for t, expert in enumerate(experts) if expert >= 0]

    def judge(results: Tensors) -> Verdict:
        error = (results[_H].double() - reference)[listed].abs()
        allowed = bound[listed].clamp(min=_SMALLEST)
        worst = float((error / allowed).max()) if error.numel() else 0.0
        norm = float(reference[listed].norm()) or 1.0
        return Verdict(float(error.norm()) / norm, worst)

    return judge


def _parts(problem: MoeUpProblem, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up."""
    if problem.layout == "interleaved":
        return y[::2], y[1::2]
    return y[: len(y) // 2], y[len(y) // 2 :]


def _raised_to(problem: MoeUpProblem, y: torch.Tensor) -> torch.Tensor:
    """What an activation has in an exponent: its rounding counts as often as it is large."""
    gate = _parts(problem, y)[0].abs()
    kinds = {
        "swiglu_oai": problem.alpha * gate,
        "gelu": gate**2,
        "gelu_tanh": 1.6 * (gate + 0.044715 * gate**3),
    }
    return kinds.get(problem.activation, gate)


def _sample(problem: MoeUpProblem, share: float) -> MoeUpProblem:
    rows = max(2 * BLOCK, round(problem.N * share) // (2 * BLOCK) * 2 * BLOCK)
    return replace(problem, N=min(problem.N, rows))


def no_problems(model: Any, gpus: int, arch: str) -> list[Any]:
    """None: these kernels are chosen by rule."""
    return []


WORKLOAD = Workload(
    op="moe_up",
    draw=_operands,
    redraw=_another,
    read_bytes=read_bytes,
    results=(_H,),
    judge=_judge,
    sample=_sample,
    problems=no_problems,
    optional=(2,),
)
