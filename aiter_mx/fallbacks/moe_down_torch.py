"""The second half of an expert layer of few tokens in plain torch: float64 inside, no host sync."""

from __future__ import annotations

import torch

from aiter_mx.codec import round_once
from aiter_mx.fallbacks.moe_up_torch import dequantised, experts_here, of_expert
from aiter_mx.kernels.moe_down import MoeDownProblem
from aiter_mx.kernels.spec import Config
from aiter_mx.launch import Tensors


def run(problem: MoeDownProblem, tensors: Tensors, config: Config) -> None:
    """Compute what ``aiter_mx.kernels.moe_down`` defines."""
    h, topk_ids, topk_weights, expert_map, num_tokens, wq, ws, bias, out = tensors
    p = problem
    values = dequantised(h.view(p.M * p.slots, p.K), None)
    experts = experts_here(p, topk_ids, expert_map, num_tokens)
    ones = topk_weights.new_ones((p.M, p.shared))
    weights = torch.cat((topk_weights, ones), 1).to(torch.float64)
    for m in range(p.M):
        total = torch.zeros((1, p.N), dtype=torch.float64, device=out.device)
        for slot in range(p.slots):
            expert, row = experts[m, slot : slot + 1], m * p.slots + slot
            y = of_expert(values[row : row + 1], wq, ws, bias, expert.clamp(0))
            total += torch.where(expert.unsqueeze(1) >= 0, y * weights[m, slot], 0.0)
        if num_tokens is not None:  # rows past them stay as they are
            total = torch.where(m < num_tokens.unsqueeze(1), total, out[m : m + 1])
        out[m : m + 1] = round_once(total, out.dtype)
