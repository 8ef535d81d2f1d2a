"""The first half of an expert layer of few tokens in plain torch: float64 inside, no host sync."""

from __future__ import annotations

import torch
from torch import Tensor

from aiter_mx.codec import as_scale_bytes, dequantize_block_scaled
from aiter_mx.fallbacks import quantize_torch
from aiter_mx.fallbacks.moe_gemm_torch import activate, product_of_expert
from aiter_mx.kernels.moe_down import MoeDownProblem
from aiter_mx.kernels.moe_up import MoeUpProblem
from aiter_mx.kernels.quantize.problem import QuantizeProblem
from aiter_mx.kernels.spec import Config
from aiter_mx.launch import Tensors
from aiter_mx.numerics import BLOCK


def run(problem: MoeUpProblem, tensors: Tensors, config: Config) -> None:
    """Compute what ``aiter_mx.kernels.moe_up`` defines."""
    topk_ids, expert_map, num_tokens, x, xs, wq, ws, bias, h = tensors
    p = problem
    values = dequantised(x, xs)
    experts = experts_here(p, topk_ids, expert_map, num_tokens)
    for t in range(p.M * p.slots):
        token = t // p.slots
        row = slice(t, t + 1)
        expert = experts.view(-1)[row]
        y = of_expert(values[token : token + 1], wq, ws, bias, expert.clamp(0))
        activated = activate(p, y).to(torch.float32)
        h[row] = torch.where(expert.unsqueeze(1) >= 0, activated, h[row])


def experts_here(
    problem: MoeUpProblem | MoeDownProblem,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    num_tokens: Tensor | None,
) -> Tensor:
    """``[M, slots]``: the number here of each slot's expert, or -1."""
    p = problem
    ids = topk_ids.to(torch.int64)
    is_known = (ids >= 0) & (ids < p.num_experts)
    ids = ids.clamp(0, p.num_experts - 1)
    if expert_map is not None:
        ids = expert_map[ids].to(torch.int64)
    ids = torch.where(is_known & (ids >= 0) & (ids < p.E), ids, -1)
    shared = torch.arange(p.E - p.shared, p.E, device=ids.device).expand(p.M, p.shared)
    ids = torch.cat((ids, shared), 1)
    if num_tokens is not None:
        counts = torch.arange(p.M, device=ids.device) < num_tokens
        ids = torch.where(counts.unsqueeze(1), ids, -1)
    return ids


def dequantised(x: Tensor, xs: Tensor | None) -> Tensor:
    """Rows that are quantised, with scales, or are to be, as they are then, in float64."""
    if xs is None:
        kinds = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
        problem = QuantizeProblem(x.shape[0], x.shape[1], dtype=kinds[x.dtype])
        payload = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        xs = torch.empty(x.shape[0], x.shape[1] // BLOCK, dtype=torch.uint8, device=x.device)
        quantize_torch.run(problem, (x, None, payload, xs, None, None, None), {})
        x = payload
    return dequantize_block_scaled(x, as_scale_bytes(xs), torch.float64)


def of_expert(x: Tensor, wq: Tensor, ws: Tensor, bias: Tensor | None, expert: Tensor) -> Tensor:
    """``x @ w[expert].T + bias[expert]`` in float64."""
    y = product_of_expert(x, wq, as_scale_bytes(ws), expert)
    return y if bias is None else y + bias[expert]
