"""Quantisation along rows to e4m3 in Triton, bit for bit as torch's.

Payloads are made by integer arithmetic, as Triton's versions and targets differ in what their
conversions do beyond the largest number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aiter_mx.codec import FORMATS, ROUNDING
from aiter_mx.kernels.quantize import QuantizeProblem
from aiter_mx.kernels.spec import Config
from aiter_mx.kernels.triton import OPTIONS
from aiter_mx.launch import Tensors

_BLOCKS = 64  # of 32 elements, of a program
ABOVE = {mode: above(FORMATS["e4m3"]) for mode, above in ROUNDING.items()}
"""What may make a scale the next one; by mode."""


@triton.jit
def encode_blocks(values, ABOVE: tl.constexpr):
    """Payloads ``[blocks, 32]`` and scale bytes ``[blocks]``, both uint8, of float32 values.

    ABOVE is added to the bits of a block's largest magnitude, and may carry into the exponent.
    """
    amax = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    is_nan = amax >= 0x7F800000
    byte = tl.maximum(((amax + ABOVE) >> 23) - 8, 0)
    inverse = ((254 - byte) << 23).to(tl.float32, bitcast=True)
    scaled = (values * inverse[:, None]).to(tl.int32, bitcast=True)
    sign = (scaled >> 24) & 0x80
    bits = tl.minimum(scaled & 0x7FFFFFFF, 0x43E00000)  # 448
    # From 2^-6 on, 20 bits of the mantissa are rounded away; below, one of 2^14 ends in 2^-9.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (bits.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 0xF
    payload = sign | tl.where(bits < 0x3C800000, small, normal)
    payload = tl.where(is_nan[:, None], 0x7F, payload)
    return payload.to(tl.uint8), tl.where(is_nan, 255, byte).to(tl.uint8)


@triton.jit(do_not_specialize=["blocks"])
def quantize_rows_kernel(
    x_ptr, payload_ptr, scale_ptr, blocks, ABOVE: tl.constexpr, BLOCKS: tl.constexpr
):
    """BLOCKS blocks of what is one sequence of them."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < blocks
    at = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    values = tl.load(x_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
    payload, scale = encode_blocks(values, ABOVE)
    tl.store(payload_ptr + at, payload, mask=inside[:, None])
    tl.store(scale_ptr + block, scale, mask=inside)


def run(problem: QuantizeProblem, tensors: Tensors, config: Config) -> None:
    """Compute a quantisation along rows."""
    x, _, payload, scale, *_ = tensors
    quantize_triton(x, payload, scale, problem.mode)


def quantize_triton(x: Tensor, payload: Tensor, scale: Tensor, mode: str = "rceil") -> None:
    """Quantise contiguous rows, without a host sync.

    Args:
        x: bf16, fp16 or fp32 ``[..., K]``, K a multiple of 32.
        payload: float8_e4m3fn ``[..., K]``, written.
        scale: uint8 ``[..., K / 32]``, written.
        mode: ``rceil``, ``floor`` or ``even``, as ``aiter_mx.quantize`` has them.
    """
    blocks = scale.numel()
    with torch.cuda.device_of(x):
        quantize_rows_kernel[(triton.cdiv(blocks, _BLOCKS),)](
            x,
            payload.view(torch.uint8),
            scale,
            blocks,
            ABOVE=ABOVE[mode],
            BLOCKS=_BLOCKS,
            **OPTIONS,
        )
