"""The MX-FP8 format in torch operations: exact on every device, and without a host sync.

An element is an e4m3 payload times a power of two that 32 consecutive elements of a row share
(OCP MX specification v1.0, sections 5.3.1, 5.4.1 and 6.1). A scale byte ``b`` below 255 means
2^(b - 127); 255 means NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
E4M3_MAX = 448.0
NAN_SCALE = 255
SCALE_DTYPES = (torch.uint8, torch.float8_e8m0fnu)

_FLOAT32_NAN_BITS = 0x7FC00000
_TWO_TO_MINUS_127_BITS = 0x00400000  # subnormal in float32


def as_scale_bytes(scale: Tensor) -> Tensor:
    """``scale`` viewed as uint8, whether it is uint8 or float8_e8m0fnu.

    Raises:
        TypeError: any other dtype.
    """
    if scale.dtype not in SCALE_DTYPES:
        raise TypeError(f"scales must be uint8 or float8_e8m0fnu, got {scale.dtype}")
    return scale.view(torch.uint8)


def decode_e8m0(scale_bytes: Tensor) -> Tensor:
    """float32 values of uint8 scale bytes, exact: from 2^-127, which is subnormal, to 2^127."""
    byte = scale_bytes.to(torch.int32)
    bits = torch.where(byte == 0, _TWO_TO_MINUS_127_BITS, byte << 23)
    return torch.where(byte == NAN_SCALE, _FLOAT32_NAN_BITS, bits).view(torch.float32)


def dequantize_block_scaled(payload: Tensor, scale_bytes: Tensor, dtype: torch.dtype) -> Tensor:
    """``payload`` times its scales in ``dtype`` (float32 or float64), of payload's shape.

    float64 holds every value; float32 does up to its overflow, and rounds nothing below it.
    """
    blocks = payload.to(dtype).unflatten(-1, (scale_bytes.shape[-1], BLOCK))
    blocks.mul_(decode_e8m0(scale_bytes).to(dtype).unsqueeze(-1))
    values: Tensor = blocks.flatten(-2)
    return values


def round_once(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 to ``dtype``, to nearest even, with one rounding.

    torch's own conversion to a 16-bit format goes through float32 and rounds there first. Rounded
    to odd instead, the float32 keeps what the second rounding needs to know.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return values.to(dtype)
    nearest = values.to(torch.float32)
    widened = nearest.double()
    below = nearest.view(torch.int32) - (widened.abs() > values.abs()).int()
    odd = (below | (widened != values).int()).view(torch.float32)
    return torch.where(values.isfinite(), odd, nearest).to(dtype)
