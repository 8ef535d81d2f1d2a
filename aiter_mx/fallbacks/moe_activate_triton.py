"""The activation of a first GEMM's sums and its quantisation, as one Triton launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aiter_mx.fallbacks.quantize_triton import ABOVE, encode_blocks
from aiter_mx.fallbacks.triton_target import OPTIONS
from aiter_mx.kernels.moe_gemm.problem import MoeGemmProblem

_BLOCKS = 32  # of 32 activated features, of a program


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
    SILU: tl.constexpr,
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
    if SILU:
        values = gate * tl.sigmoid(gate) * up
    else:  # NaN is not above or below a limit, and stays
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        values = (up + beta) * (gate * tl.sigmoid(alpha * gate))
    payload, scale = encode_blocks(values, ABOVE)
    tl.store(payload_ptr + row * features + feature, payload, mask=inside)
    tl.store(scale_ptr + block, scale, mask=block < blocks)


def moe_activate_triton(
    problem: MoeGemmProblem, sums: Tensor, payload: Tensor, scale: Tensor
) -> None:
    """Activate and quantise every row, as ``aiter_mx.kernels.moe_gemm.problem`` defines it.

    Args:
        problem: has an activation.
        sums: fp32 ``[routed, N]``: gate and up.
        payload: float8_e4m3fn ``[routed, N / 2]``, written.
        scale: uint8 ``[routed, N / 64]``, written.
    """
    blocks = scale.numel()
    with torch.cuda.device_of(sums):
        activate_kernel[(triton.cdiv(blocks, _BLOCKS),)](
            sums,
            payload.view(torch.uint8),
            scale,
            blocks,
            problem.out_features,
            problem.alpha,
            problem.beta,
            problem.limit,
            SILU=problem.activation == "silu",
            INTERLEAVED=problem.layout == "interleaved",
            ABOVE=ABOVE["rceil"],
            BLOCKS=_BLOCKS,
            **OPTIONS,
        )
