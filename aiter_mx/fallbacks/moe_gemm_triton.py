"""The grouped GEMM over routed tokens in Triton. What fallbacks/linear_triton.py says of
``tl.dot_scaled`` holds here too. An activation is a second launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aiter_mx.codec import as_scale_bytes
from aiter_mx.fallbacks.quantize_triton import ABOVE, encode_blocks
from aiter_mx.fallbacks.triton_step import add_step
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.kernels.spec import Config
from aiter_mx.kernels.triton import OPTIONS
from aiter_mx.launch import Tensors

_ACTIVATED_BLOCKS = 32  # of 32 activated features, of a program


@triton.jit(do_not_specialize=["M", "num_experts", "a_div"])
def moe_tile_kernel(
    x_ptr,
    xs_ptr,
    w_ptr,
    ws_ptr,
    ids_ptr,
    experts_ptr,
    used_ptr,
    weights_ptr,
    bias_ptr,
    out_ptr,
    places_ptr,
    M,
    N,
    K,
    num_experts,
    a_div,
    TOP_K: tl.constexpr,
    ROUTING_BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    BY_PLACE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SORTED_OUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    WHOLE_STEPS: tl.constexpr,
):
    """One tile of an expert's w with BLOCK_M ids of a block."""
    SCALES: tl.constexpr = BLOCK_K // 32
    CHUNKS: tl.constexpr = (ROUTING_BLOCK + BLOCK_M - 1) // BLOCK_M
    tile_n = tl.program_id(0)
    block = tl.program_id(1) // CHUNKS
    in_block = tl.program_id(1) % CHUNKS * BLOCK_M + tl.arange(0, BLOCK_M)
    if block * ROUTING_BLOCK >= tl.load(used_ptr):
        return

    place = block * ROUTING_BLOCK + in_block
    id = tl.load(ids_ptr + place, mask=in_block < ROUTING_BLOCK, other=-1)
    if PACKED:
        token = id & 0xFFFFFF
        slot = (id >> 24) & 0xFF
        t = token * TOP_K + slot
        valid = (token < M) & (slot < TOP_K) & (in_block < ROUTING_BLOCK)
    else:
        t = id
        valid = (t >= 0) & (t < M * TOP_K)
    t = tl.where(valid, t, 0).to(tl.int64)
    expert = tl.load(experts_ptr + block).to(tl.int64)
    is_here = (expert >= 0) & (expert < num_experts)
    first_row = tl.where(is_here, expert, 0) * N

    # Rows past the end read the last row instead, and are not stored.
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_n = first_row + tl.minimum(n, N - 1)
    row_x = t // a_div
    k = tl.arange(0, BLOCK_K)
    s = tl.arange(0, SCALES)
    x_ptrs = x_ptr + row_x[:, None] * K + k[None, :]
    w_ptrs = w_ptr + row_n[:, None] * K + k[None, :]
    xs_ptrs = xs_ptr + row_x[:, None] * (K // 32) + s[None, :]
    ws_ptrs = ws_ptr + row_n[:, None] * (K // 32) + s[None, :]

    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # A tile of padding alone reads no weights.
    steps = tl.where(is_here & (tl.max(valid.to(tl.int32)) > 0), tl.cdiv(K, BLOCK_K), 0)
    for step in range(steps):
        left = K - step * BLOCK_K
        acc = add_step(acc, x_ptrs, w_ptrs, xs_ptrs, ws_ptrs, k, s, left, "e4m3", SWAP, WHOLE_STEPS)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
        xs_ptrs += SCALES
        ws_ptrs += SCALES

    if SWAP:
        acc = acc.T
    if HAS_BIAS:
        acc += tl.load(bias_ptr + row_n).to(tl.float32)[None, :]
    if HAS_WEIGHTS:
        if BY_PLACE:
            weight = tl.load(weights_ptr + place, mask=valid, other=0.0)
        else:
            weight = tl.load(weights_ptr + t, mask=valid, other=0.0)
        acc *= weight[:, None]
    acc = tl.where(is_here, acc, 0.0)
    inside = valid[:, None] & (n[None, :] < N)
    row_out = t
    if SORTED_OUT:
        row_out = place.to(tl.int64)
        tl.store(places_ptr + t, tl.where(is_here, place, -1), mask=valid & (tile_n == 0))
    out_ptrs = out_ptr + row_out[:, None] * N + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["blocks"])
def activate_kernel(
    sums_ptr,
    payload_ptr,
    scale_ptr,
    blocks,
    features,
    alpha,
    beta,
    limit,
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ABOVE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """BLOCKS blocks of all rows' activated features."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = (block < blocks)[:, None]
    row = (block // (features // 32))[:, None]
    feature = (block % (features // 32))[:, None] * 32 + tl.arange(0, 32)[None, :]
    if INTERLEAVED:
        gate_at = row * 2 * features + 2 * feature
        up_at = gate_at + 1
    else:
        gate_at = row * 2 * features + feature
        up_at = gate_at + features
    gate = tl.load(sums_ptr + gate_at, mask=inside, other=0.0)
    up = tl.load(sums_ptr + up_at, mask=inside, other=0.0)
    if ACTIVATION == "silu":
        values = gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "gelu":
        values = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif ACTIVATION == "gelu_tanh":
        y = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        values = gate * tl.sigmoid(y) * up
    elif ACTIVATION == "relu2":
        gate = tl.where(gate < 0.0, 0.0, gate)
        values = gate * gate * up
    else:  # NaN is not above or below a limit, and stays
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        values = (up + beta) * (gate * tl.sigmoid(alpha * gate))
    payload, scale = encode_blocks(values, ABOVE)
    tl.store(payload_ptr + row * features + feature, payload, mask=inside)
    tl.store(scale_ptr + block, scale, mask=block < blocks)


def run(problem: MoeGemmProblem, tensors: Tensors, config: Config) -> None:
    """Compute what ``aiter_mx.kernels.moe_gemm.problem`` defines, accumulated in fp32.

    The first call with a configuration compiles it; later ones neither synchronise nor compile.
    """
    xq, xs, wq, ws, sorted_token_ids, expert_ids, num_tokens_post_padded, *others = tensors
    topk_weights, bias, out, out_scales = others
    p = problem
    sums = out
    if p.activation != "none":
        sums = torch.empty((p.routed, p.N), dtype=torch.float32, device=out.device)
    chunks = triton.cdiv(p.block_m, config["BLOCK_M"])
    grid = (triton.cdiv(p.N, config["BLOCK_N"]), p.blocks * chunks)
    with torch.cuda.device_of(out):
        moe_tile_kernel[grid](
            xq,
            as_scale_bytes(xs),
            wq,
            as_scale_bytes(ws),
            sorted_token_ids,
            expert_ids,
            num_tokens_post_padded,
            topk_weights,
            bias,
            sums,
            out_scales,
            p.M,
            p.N,
            p.K,
            p.E,
            p.a_div,
            TOP_K=p.top_k,
            ROUTING_BLOCK=p.block_m,
            PACKED=p.ids == "aiter",
            HAS_WEIGHTS=topk_weights is not None,
            BY_PLACE=p.weights == "by_place",
            HAS_BIAS=bias is not None,
            SORTED_OUT=p.sorted_out,
            WHOLE_STEPS=p.K % config["BLOCK_K"] == 0,
            **config,
            **OPTIONS,
        )
    if p.activation != "none":  # rows that no id names may be anything then, as the op says
        _activate(p, sums, out, out_scales)


def _activate(problem: MoeGemmProblem, sums: Tensor, payload: Tensor, scale: Tensor) -> None:
    """Activate fp32 sums ``[routed, N]`` of gate and up, and quantise every row."""
    blocks = scale.numel()
    with torch.cuda.device_of(sums):
        activate_kernel[(triton.cdiv(blocks, _ACTIVATED_BLOCKS),)](
            sums,
            payload.view(torch.uint8),
            scale,
            blocks,
            problem.out_features,
            problem.alpha,
            problem.beta,
            problem.limit,
            ACTIVATION=problem.activation,
            INTERLEAVED=problem.layout == "interleaved",
            ABOVE=ABOVE["rceil"],
            BLOCKS=_ACTIVATED_BLOCKS,
            **OPTIONS,
        )
