"""MX formats in torch operations: exact on every device, and without a host sync.

An element is an e4m3 or e2m1 payload times a power of two that 32 consecutive elements of a row
share (OCP MX specification v1.0, sections 5.3, 5.4.1, 6.1 and 6.3). A scale byte ``b`` below 255
means 2^(b - 127); 255 means NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aiter_mx.numerics import BLOCK, NAN_SCALE

SCALE_DTYPES = (torch.uint8, torch.float8_e8m0fnu)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Dtypes of activations, results and biases, by their names in problems."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDICES = {"i32": torch.int32, "i64": torch.int64}
"""Dtypes of bounds of groups and of experts' ids, likewise."""
INDEX_NAMES = {dtype: name for name, dtype in INDICES.items()}

_SIGN_CLEARED = 0x7FFFFFFF
_MANTISSA_BITS = 23
_INFINITY_BITS = 0x7F800000
_FLOAT32_NAN_BITS = 0x7FC00000
_TWO_TO_MINUS_127_BITS = 0x00400000  # subnormal in float32


@dataclass(frozen=True)
class PayloadFormat:
    """A format of payload elements.

    Attributes:
        dtype: of payload tensors.
        per_byte: elements of a byte; the first one has the lowest bits.
        largest: the largest magnitude.
        max_exponent: its exponent.
        max_mantissa: its mantissa as float32 has it.
        nan: the payload of elements of a NaN block.
    """

    dtype: torch.dtype
    per_byte: int
    largest: float
    max_exponent: int
    max_mantissa: int
    nan: int


FORMATS = {
    "e4m3": PayloadFormat(torch.float8_e4m3fn, 1, 448.0, 8, 0x600000, 0x7F),
    "e2m1": PayloadFormat(torch.uint8, 2, 6.0, 2, 0x400000, 0),
    "e5m2": PayloadFormat(torch.float8_e5m2, 1, 57344.0, 15, 0x600000, 0x7F),
}
FLOAT8_NAMES = {FORMATS[name].dtype: name for name in ("e4m3", "e5m2")}
"""Formats of one element a byte, by their dtypes."""
_EVEN = 0x200000
ROUNDING: dict[str, Callable[[PayloadFormat], int]] = {
    "rceil": lambda payload_format: 0x7FFFFF - payload_format.max_mantissa,
    "floor": lambda payload_format: 0,
    "even": lambda payload_format: _EVEN,
}
"""What is added to the bits of a block's largest magnitude before its exponent makes the scale; by
mode. It carries into the exponent above the format's largest mantissa, never, or from 1.75 on."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def format_of(payload: Tensor) -> PayloadFormat:
    """The format of a payload tensor by its dtype; of uint8 it is two e2m1 a byte.

    Raises:
        TypeError: any other dtype.
    """
    for known in FORMATS.values():
        if payload.dtype == known.dtype:
            return known
    raise TypeError(
        f"payload must be float8_e4m3fn, float8_e5m2, or uint8 for e2m1, got {payload.dtype}"
    )


def amax_bits(blocks: Tensor) -> Tensor:
    """Float32 bits, as int32, of the largest magnitude of the last dimension.

    Bits of magnitudes order as the magnitudes do, subnormals too, with infinity and NaN on top.
    """
    return (blocks.view(torch.int32) & _SIGN_CLEARED).amax(-1)


def encode_blocks(
    blocks: Tensor, amax: Tensor, payload_format: PayloadFormat, mode: str
) -> tuple[Tensor, Tensor]:
    """Elements and scales of float32 blocks.

    Args:
        blocks: float32 ``[..., 32]``.
        amax: ``amax_bits`` of each block, or of more than it, int32 ``[...]``.
        payload_format: of the elements.
        mode: ``rceil``, ``floor`` or ``even``, as ``aiter_mx.quantize`` has them.

    Returns:
        one element a byte, uint8 ``[..., 32]``, and scale bytes, uint8 ``[...]``.
    """
    above = ROUNDING[mode](payload_format)
    byte = (((amax + above) >> _MANTISSA_BITS) - payload_format.max_exponent).clamp_(min=0)
    not_finite = amax >= _INFINITY_BITS
    # The byte is at most 253, so that 2^(127 - byte) is a normal float32.
    inverse = ((254 - byte) << _MANTISSA_BITS).view(torch.float32)
    largest = payload_format.largest
    scaled = (blocks * inverse.unsqueeze(-1)).clamp_(-largest, largest)
    if payload_format.per_byte == 1:
        elements = scaled.to(payload_format.dtype).view(torch.uint8)
    else:
        elements = _to_e2m1(scaled)
    elements.masked_fill_(not_finite.unsqueeze(-1), payload_format.nan)
    return elements, byte.masked_fill_(not_finite, NAN_SCALE).to(torch.uint8)


def _to_e2m1(scaled: Tensor) -> Tensor:
    """Bytes of e2m1 numbers, to nearest even, of float32 magnitudes up to 6."""
    magnitude = scaled.abs()
    unit = 0.5 + 0.5 * (magnitude >= 2) + (magnitude >= 4)
    rounded = (magnitude / unit).round_() * unit  # exact but for the rounding to units
    code = torch.where(rounded < 2, rounded * 2, rounded.clamp(max=5) + 2)
    return code.nan_to_num_().to(torch.uint8) | (scaled.signbit().to(torch.uint8) << 3)


def pack_elements(elements: Tensor, payload_format: PayloadFormat) -> Tensor:
    """A payload ``[..., K // per_byte]`` of its format's dtype, from one element a byte."""
    if payload_format.per_byte == 2:
        elements = elements[..., 0::2] | elements[..., 1::2] << 4
    return elements.view(payload_format.dtype)


def element_values(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """A payload's elements without their scales, ``[..., K]`` of ``dtype``."""
    if payload.dtype != torch.uint8:
        return payload.to(dtype)
    codes = torch.stack((payload & 15, payload >> 4), dim=-1).flatten(-2).int()
    values = torch.tensor((*_E2M1, *(-v for v in _E2M1)), dtype=dtype, device=payload.device)
    return values[codes]


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
    bits = (byte << 23).masked_fill_(byte == 0, _TWO_TO_MINUS_127_BITS)
    return bits.masked_fill_(byte == NAN_SCALE, _FLOAT32_NAN_BITS).view(torch.float32)


def dequantize_block_scaled(payload: Tensor, scale_bytes: Tensor, dtype: torch.dtype) -> Tensor:
    """``payload`` times its scales in ``dtype`` (float32 or float64), ``[..., K]``.

    float64 holds every value; float32 does up to its overflow, and rounds nothing below it.
    """
    blocks = element_values(payload, dtype).unflatten(-1, (scale_bytes.shape[-1], BLOCK))
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
