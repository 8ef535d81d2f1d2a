"""The grouped GEMM over routed tokens in plain torch: float64 inside, and no host sync."""

from __future__ import annotations

import torch
from torch import Tensor

from aiter_mx.codec import as_scale_bytes, dequantize_block_scaled, round_once
from aiter_mx.fallbacks import quantize_torch
from aiter_mx.fallbacks.linear_torch import product_of_rows
from aiter_mx.kernels.moe_gemm.problem import MoeGemmProblem
from aiter_mx.kernels.moe_up import MoeUpProblem
from aiter_mx.kernels.quantize.problem import QuantizeProblem
from aiter_mx.kernels.spec import Config
from aiter_mx.launch import Tensors
from aiter_mx.numerics import BLOCK

_CHUNK_ELEMENTS = 2**24  # of w that are float64 at a time


def run(problem: MoeGemmProblem, tensors: Tensors, config: Config) -> None:
    """Compute what ``aiter_mx.kernels.moe_gemm.problem`` defines.

    Products and sums are float64 and rounded once; an activation is float64 too, rounded to fp32
    and quantised.
    """
    xq, xs, wq, ws, sorted_token_ids, expert_ids, num_tokens_post_padded, *others = tensors
    topk_weights, bias, out, out_scales = others
    p = problem
    blocks, rows = p.blocks, p.blocks * p.block_m
    t, valid = _routed_rows(p, sorted_token_ids[:rows])
    used = -(-num_tokens_post_padded[0] // p.block_m) * p.block_m
    valid &= torch.arange(rows, device=t.device) < used
    t = to = torch.where(valid, t, p.routed)
    if p.sorted_out:
        place = torch.arange(rows, device=t.device)
        to = torch.where(valid, place, rows)
        expert = expert_ids[place // p.block_m]
        place = torch.where((expert >= 0) & (expert < p.E), place, -1)
        noted = torch.cat((out_scales, out_scales[:1])).index_copy(0, t, place.to(torch.int32))
        out_scales.copy_(noted[:-1])
        out_scales = None
    # One row more than there are takes what must not be written.
    result = torch.cat((out.view(torch.uint8), out[:1].view(torch.uint8)))
    scales = None if out_scales is None else torch.cat((out_scales, out_scales[:1]))
    if topk_weights is not None:
        by_row = topk_weights.flatten() if p.weights == "by_t" else topk_weights[:rows]
    for block in range(blocks):
        places = slice(block * p.block_m, (block + 1) * p.block_m)
        row = t[places]
        expert = expert_ids[block : block + 1].to(torch.int64)
        is_here = (expert >= 0) & (expert < p.E)
        expert = expert.clamp(0, p.E - 1)
        x_row = (row // p.a_div).clamp(max=xq.shape[0] - 1)
        x = dequantize_block_scaled(xq[x_row], as_scale_bytes(xs)[x_row], torch.float64)
        y = product_of_expert(x, wq, as_scale_bytes(ws), expert)
        if bias is not None:
            y += bias[expert]
        if topk_weights is not None:
            weight = by_row[row.clamp(max=p.routed - 1)] if p.weights == "by_t" else by_row[places]
            y *= weight.unsqueeze(1)
        y = torch.where(is_here, y, 0.0)
        if p.activation == "none":
            result[to[places]] = round_once(y, out.dtype).view(torch.uint8)
        else:
            payload, scale = quantised(activate(p, y).to(torch.float32))
            result[row] = payload.view(torch.uint8)
            assert scales is not None
            scales[row] = scale
    out.view(torch.uint8).copy_(result[:-1])
    if out_scales is not None and scales is not None:
        out_scales.copy_(scales[:-1])


def activate(problem: MoeGemmProblem | MoeUpProblem, y: Tensor) -> Tensor:
    """Gate and up values ``[rows, N]`` to activated ones ``[rows, N / 2]``."""
    if problem.layout == "interleaved":
        gate, up = y[:, ::2], y[:, 1::2]
    else:
        gate, up = y.chunk(2, dim=1)
    if problem.activation == "silu":
        return gate * torch.sigmoid(gate) * up
    if problem.activation in ("gelu", "gelu_tanh"):
        kind = "tanh" if problem.activation == "gelu_tanh" else "none"
        return torch.nn.functional.gelu(gate, approximate=kind) * up
    if problem.activation == "relu2":
        return torch.relu(gate).square() * up
    gate = gate.clamp(max=problem.limit)
    up = up.clamp(-problem.limit, problem.limit)
    return (up + problem.beta) * (gate * torch.sigmoid(problem.alpha * gate))


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 rows as e4m3 payload and e8m0 scales."""
    problem = QuantizeProblem(x.shape[0], x.shape[1], dtype="fp32")
    payload = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = x.new_empty((problem.M, problem.N // BLOCK), dtype=torch.uint8)
    quantize_torch.run(problem, (x, None, payload, scale, None, None, None), {})
    return payload, scale


def product_of_expert(x: Tensor, wq: Tensor, ws: Tensor, expert: Tensor) -> Tensor:
    """``x @ w[expert].T`` in float64."""
    step = max(1, _CHUNK_ELEMENTS // wq.shape[2])
    parts = []
    for first in range(0, wq.shape[1], step):
        features = slice(first, first + step)
        payload = wq[:, features].view(torch.uint8).index_select(0, expert)[0]
        scale = ws[:, features].index_select(0, expert)[0]
        w = dequantize_block_scaled(payload.view(wq.dtype), scale, torch.float64)
        parts.append(product_of_rows(x, w))
    return torch.cat(parts, 1)


def _routed_rows(problem: MoeGemmProblem, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The routed row of each id, and where ids are valid."""
    ids = ids.to(torch.int64)
    if problem.ids == "vllm":
        return ids, (ids >= 0) & (ids < problem.routed)
    ids &= 0xFFFFFFFF
    token, slot = ids & 0xFFFFFF, ids >> 24
    return token * problem.top_k + slot, (slot < problem.top_k) & (token < problem.M)
