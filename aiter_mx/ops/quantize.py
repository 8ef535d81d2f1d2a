"""Row-wise quantisation to MX-FP8, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from aiter_mx.numerics import (
    BLOCK,
    E4M3_MAX,
    NAN_SCALE,
    as_scale_bytes,
    dequantize_block_scaled,
)

MODES = ("rceil", "floor")
INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OUTPUT_DTYPES = (*INPUT_DTYPES, torch.float64)

_E4M3_MAX_EXPONENT = 8
_E4M3_NAN = 0x7F
_MANTISSA_BITS = 23
_SIGN_CLEARED = 0x7FFFFFFF
_INFINITY_BITS = 0x7F800000
# Carries into the exponent exactly when a mantissa is above that of 448 = 1.75 * 2^8.
_ROUND_ABOVE_448 = 0x7FFFFF - 0x600000


def _check(x: Tensor, mode: str) -> None:
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(f"x must be bfloat16, float16 or float32, got {x.dtype}")
    if x.dim() == 0 or x.shape[-1] % BLOCK:
        raise ValueError(
            f"the last dimension of x must be a multiple of {BLOCK}, got x of shape {list(x.shape)}"
        )


@torch.library.custom_op("aiter_mx::quantize", mutates_args=())
def _quantize(x: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    _check(x, mode)
    blocks = x.contiguous().to(torch.float32).unflatten(-1, (x.shape[-1] // BLOCK, BLOCK))
    # Bits of magnitudes order as the magnitudes do, subnormals too, with Inf and NaN on top.
    amax = (blocks.view(torch.int32) & _SIGN_CLEARED).amax(-1)
    above = _ROUND_ABOVE_448 if mode == "rceil" else 0
    byte = (((amax + above) >> _MANTISSA_BITS) - _E4M3_MAX_EXPONENT).clamp_(min=0)
    not_finite = amax >= _INFINITY_BITS
    # The byte is at most 247, so that 2^(127 - byte) is a normal float32.
    inverse = ((254 - byte) << _MANTISSA_BITS).view(torch.float32)
    scaled = (blocks * inverse.unsqueeze(-1)).clamp_(-E4M3_MAX, E4M3_MAX)
    payload = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    payload.masked_fill_(not_finite.unsqueeze(-1), _E4M3_NAN)
    scale = byte.masked_fill_(not_finite, NAN_SCALE).to(torch.uint8)
    return payload.view(torch.float8_e4m3fn).flatten(-2), scale


@_quantize.register_fake
def _(x: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    _check(x, mode)
    payload = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    return payload, x.new_empty((*x.shape[:-1], x.shape[-1] // BLOCK), dtype=torch.uint8)


def quantize(x: Tensor, *, mode: str = "rceil") -> tuple[Tensor, Tensor]:
    """Quantise to MX-FP8 along the last dimension, 32 elements a scale.

    The scale of a block with largest magnitude ``amax`` is

    - ``"rceil"``: the smallest power of two for which amax / scale <= 448, so nothing saturates;
    - ``"floor"``: 2^(floor(log2(amax)) - 8), as the OCP MX specification v1.0, section 6.3, has
      it; elements above 448 * scale saturate.

    Either is kept within 2^-127 (also the scale of a block of zeros) and 2^127. Elements are
    rounded to nearest even, and their signs kept, also of zeros. A block that holds a NaN or an
    infinity becomes NaN as a whole, scale byte 255 and every payload NaN: the specification leaves
    this to the implementation, torchao's scales are the same, and an infinity that became 448
    would hide what went wrong. Results are equal bit for bit on every device. There is no
    gradient.

    Args:
        x: ``[..., K]``, bfloat16, float16 or float32, any strides; K a multiple of 32.
        mode: ``"rceil"`` or ``"floor"``.

    Returns:
        payload float8_e4m3fn ``[..., K]`` and scale uint8 ``[..., K // 32]``, both contiguous.

    Raises:
        TypeError: x is of another dtype.
        ValueError: K is not a multiple of 32, or there is no such mode.

    Example:
        >>> payload, scale = quantize(torch.randn(4, 64))
        >>> payload.shape, scale.shape
        (torch.Size([4, 64]), torch.Size([4, 2]))
    """
    payload, scale = _quantize(x, mode)
    return payload, scale


def dequantize(payload: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of an MX-FP8 tensor.

    Args:
        payload: ``[..., K]``, float8_e4m3fn; K a multiple of 32.
        scale: ``[..., K // 32]``, uint8 or float8_e8m0fnu; byte 255 makes its block NaN.
        dtype: float32, float64, bfloat16 or float16.

    Returns:
        ``[..., K]`` of ``dtype``, exact where ``dtype`` holds the value, else rounded once to
        nearest even.

    Raises:
        TypeError: a dtype that is none of the above.
        ValueError: the shapes do not fit each other.
    """
    if payload.dtype != torch.float8_e4m3fn:
        raise TypeError(f"payload must be float8_e4m3fn, got {payload.dtype}")
    if dtype not in OUTPUT_DTYPES:
        raise TypeError(f"dtype must be float32, float64, bfloat16 or float16, got {dtype}")
    scale_bytes = as_scale_bytes(scale)
    if (
        payload.dim() == 0
        or payload.shape[-1] % BLOCK
        or scale.shape != (*payload.shape[:-1], payload.shape[-1] // BLOCK)
    ):
        raise ValueError(
            f"payload must be [..., K], K a multiple of {BLOCK}, and scale [..., K // {BLOCK}]; "
            f"got payload {list(payload.shape)} and scale {list(scale.shape)}"
        )
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return dequantize_block_scaled(payload, scale_bytes, wide).to(dtype)
