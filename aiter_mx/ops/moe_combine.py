"""The last launch of an expert layer: adds up the routed rows of each token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aiter_mx.kernels.moe_combine import MoeCombineProblem
from aiter_mx.kernels.spec import Config
from aiter_mx.launch import Tensors
from aiter_mx.ops.plan import bind
from aiter_mx.target import target_of


def fallbacks(problem: MoeCombineProblem) -> dict[str, Any]:
    """What runs each backend other than ours."""

    def run_torch(tensors: Tensors, config: Config) -> None:
        combine_torch(problem, *tensors)

    return {"torch": run_torch}


def combine_torch(
    problem: MoeCombineProblem,
    y: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    expert_map: Tensor | None,
    out: Tensor,
) -> None:
    """``out[m] = sum over slots of weight * y[m * slots + slot]``, of experts that are here."""
    p = problem
    is_here = (topk_ids >= 0) & (topk_ids < p.E)
    if expert_map is not None:
        is_here &= expert_map[topk_ids.clamp(0, p.E - 1).to(torch.int64)] >= 0
    shared = torch.ones((p.M, p.shared), dtype=torch.bool, device=y.device)
    is_here = torch.cat((is_here, shared), 1).unsqueeze(2)
    weights = torch.cat((topk_weights, shared.to(topk_weights.dtype)), 1).unsqueeze(2)
    rows = y.view(p.M, p.top_k + p.shared, p.N).to(torch.float32)
    total = torch.zeros((p.M, p.N), device=y.device)
    for slot in range(rows.shape[1]):  # in the order of the kernel
        total += torch.where(is_here[:, slot], rows[:, slot] * weights[:, slot], 0.0)
    out.copy_(total)


def warm(problem: MoeCombineProblem, device: torch.device) -> None:
    """Load what computes ``problem`` on ``device``, so that its next call builds nothing."""
    bind("moe_combine", target_of(device), problem, device, fallbacks(problem))
