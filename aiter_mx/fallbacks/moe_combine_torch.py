"""The sum over a token's routed rows in plain torch, on any device, without a host sync."""

from __future__ import annotations

import torch

from aiter_mx.kernels.moe_combine import MoeCombineProblem
from aiter_mx.kernels.spec import Config
from aiter_mx.launch import Tensors


def run(problem: MoeCombineProblem, tensors: Tensors, config: Config) -> None:
    """Add up ``weight * y[m * slots + slot]`` over the slots of a token whose experts are here.

    Sums are fp32 and in the order of slots, as csrc/moe/combine_gfx950.cu has them. A slot with an
    id outside 0 to E - 1 is left out, and shared slots weigh 1.
    """
    y, places, topk_ids, topk_weights, expert_map, num_tokens, out = tensors
    p = problem
    is_here = (topk_ids >= 0) & (topk_ids < p.E)
    if expert_map is not None:
        is_here &= expert_map[topk_ids.clamp(0, p.E - 1).to(torch.int64)] >= 0
    shared = torch.ones((p.M, p.shared), dtype=torch.bool, device=y.device)
    is_here = torch.cat((is_here, shared), 1).unsqueeze(2)
    weights = torch.cat((topk_weights, shared.to(topk_weights.dtype)), 1).unsqueeze(2)
    if p.sorted_y:
        is_here &= (places >= 0).view(is_here.shape)
        y = y[places.clamp(0, len(y) - 1).long()]
    rows = y.view(p.M, p.top_k + p.shared, p.N).to(torch.float32)
    total = torch.zeros((p.M, p.N), dtype=torch.float32, device=y.device)
    for slot in range(rows.shape[1]):  # in the order of the kernel
        total += torch.where(is_here[:, slot], rows[:, slot] * weights[:, slot], 0.0)
    if num_tokens is not None:  # rows past them stay as they are
        counts = torch.arange(p.M, device=y.device) < num_tokens
        total = torch.where(counts.unsqueeze(1), total.to(out.dtype), out)
    out.copy_(total)
