"""The routing of a mixture of experts in plain torch, on any device, without a host sync."""

from __future__ import annotations

import torch
from torch import Tensor

from aiter_mx.fallbacks import quantize_torch
from aiter_mx.kernels.moe_align import MoeAlignProblem
from aiter_mx.kernels.moe_gemm.problem import packed_padding
from aiter_mx.kernels.quantize import QuantizeProblem
from aiter_mx.kernels.spec import Config
from aiter_mx.launch import Tensors


def run(problem: MoeAlignProblem, tensors: Tensors, config: Config) -> None:
    """Write the lists that csrc/moe/align.cu writes, the same to the last id."""
    topk_ids, topk_weights, expert_map, num_tokens, x, *outputs = tensors
    sorted_ids, sorted_weights, expert_ids, post_padded, xq, xs = outputs
    if problem.x_dtype != "none":
        quantisation = QuantizeProblem(problem.M, problem.K, problem.x_dtype)
        quantize_torch.run(quantisation, (x, None, xq, xs, None, None, None), {})  # of all rows
    p, device = problem, topk_ids.device
    if p.masked:
        topk_ids = ids_of_rows(p, topk_ids)
    experts = p.E + p.shared
    numbers = _numbers(p, expert_map, device)
    tokens = torch.full((1,), p.M, device=device, dtype=torch.int64)
    if num_tokens is not None:
        tokens = num_tokens.to(torch.int64).clamp(0, p.M)

    ids = topk_ids.to(torch.int64)
    kept = (ids >= 0) & (ids < p.E)
    if p.drop_absent and expert_map is not None:
        kept &= numbers[ids.clamp(0, p.E - 1)] >= 0
    chosen = torch.where(kept, ids, experts)
    of_shared = torch.arange(p.E, experts, device=device).expand(p.M, p.shared)
    chosen = torch.cat((chosen, of_shared), 1)
    token = torch.arange(p.M, device=device).unsqueeze(1).expand_as(chosen)
    chosen = torch.where(token < tokens, chosen, experts).flatten()

    counts = torch.zeros(experts + 1, device=device, dtype=torch.int64)
    counts.scatter_add_(0, chosen, torch.ones_like(chosen))
    padded = (counts[:experts] + p.block_m - 1) // p.block_m * p.block_m
    ends = padded.cumsum(0)
    order = chosen.argsort(stable=True)
    expert = chosen[order]
    rank = torch.arange(p.routed, device=device) - (counts.cumsum(0) - counts)[expert]
    firsts = torch.cat((ends - padded, ends.new_full((1,), p.max_ids)))
    place = (firsts[expert] + rank).clamp(max=p.max_ids)  # the last is for what is left out

    slot = order % p.slots
    packed = p.ids == "aiter"
    t = slot << 24 | order // p.slots if packed else order
    padding = packed_padding(p.M, p.slots) if packed else p.routed
    listed = sorted_ids.new_full((p.max_ids + 1,), padding)
    sorted_ids.copy_(listed.scatter_(0, place, t.to(torch.int32))[:-1])
    if sorted_weights is not None and topk_weights is not None:
        ones = topk_weights.new_ones((p.M, p.shared))
        weights = torch.cat((topk_weights, ones), 1).flatten()[order]
        listed = sorted_weights.new_zeros(p.max_ids + 1)
        sorted_weights.copy_(listed.scatter_(0, place, weights)[:-1])
    starts = torch.arange(0, p.max_ids, p.block_m, device=device)
    owner = torch.searchsorted(ends, starts, right=True)
    expert_ids.copy_(torch.cat((numbers, numbers.new_full((1,), -1)))[owner])
    post_padded[:1].copy_(ends[-1:])
    if packed:
        post_padded[1:].copy_(tokens)


def ids_of_rows(problem: MoeAlignProblem, counts: Tensor) -> Tensor:
    """The expert of each row ``[M, 1]``, -1 for one that does not count, of a masked layer."""
    row = torch.arange(problem.M // problem.E, device=counts.device)
    expert = torch.arange(problem.E, dtype=counts.dtype, device=counts.device).unsqueeze(1)
    return torch.where(row < counts.unsqueeze(1), expert, -1).view(problem.M, 1)


def _numbers(problem: MoeAlignProblem, expert_map: Tensor | None, device: torch.device) -> Tensor:
    """The number here of every expert, shared ones last, or -1."""
    if expert_map is None:
        own = torch.arange(problem.E, device=device)
    elif problem.expert_map == "mask":
        present = expert_map != 0
        own = torch.where(present, present.cumsum(0) - 1, -1)
    else:
        own = expert_map.to(torch.int64)
    shared = torch.arange(problem.shared, device=device) + problem.first_shared
    return torch.cat((own, shared))
