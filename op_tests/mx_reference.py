"""What every op test compares with: MX-FP8 data drawn at random, and products in float64.

Nothing here uses ``aiter_mx``: the decoding follows the OCP MX specification v1.0 (section 5.3.1
for E4M3, section 5.4.1 for E8M0) by its formulas, so that a mistake in the package cannot hide.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK = 32
NAN_SCALE = 255
FLOAT32_MAX = torch.finfo(torch.float32).max


def _e4m3_value(byte: int) -> float:
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    if (exponent, mantissa) == (15, 7):
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def _e5m2_value(byte: int) -> float:
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 2) & 31, byte & 3
    if exponent == 31:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * mantissa * 2.0**-16
    return sign * (4 + mantissa) * 2.0 ** (exponent - 17)


E5M2_VALUES = torch.tensor([_e5m2_value(byte) for byte in range(256)], dtype=torch.float64)
E4M3_VALUES = torch.tensor([_e4m3_value(byte) for byte in range(256)], dtype=torch.float64)
E8M0_VALUES = torch.tensor(
    [2.0 ** (byte - 127) for byte in range(255)] + [math.nan], dtype=torch.float64
)


def random_mx(
    rows: int,
    K: int,
    generator: torch.Generator,
    *,
    scale_exponents: tuple[int, int] = (-20, 20),
    nan_payload: float = 0.0,
    nan_scale: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Random MX-FP8 data on the CPU: every payload byte equally likely, a random scale a block.

    Payload exponents are as uniform as payload bytes, so values over the whole e4m3 range occur.
    The default scales test the range, but let a few blocks drown the others; (-6, 6) makes every
    block count, so use both. fp16 outputs overflow with either: (-12, -6) suits them.

    Args:
        rows: number of rows.
        K: elements of a row, a multiple of 32.
        generator: a CPU generator.
        scale_exponents: first and last power of two of the scales, within -127 to 127.
        nan_payload: share of payload elements that are NaN.
        nan_scale: share of scales that are 255 (NaN).

    Returns:
        payload float8_e4m3fn ``[rows, K]`` and scale uint8 ``[rows, K // 32]``.
    """
    low, high = scale_exponents
    if K % BLOCK or not -127 <= low <= high <= 127:
        raise ValueError(f"K={K} must be a multiple of 32, {scale_exponents} within -127 to 127")

    def draw(first: int, last: int, shape: tuple[int, int]) -> Tensor:
        return torch.randint(first, last + 1, shape, generator=generator, dtype=torch.uint8)

    def chosen(share: float, shape: tuple[int, int]) -> Tensor:
        return torch.rand(shape, generator=generator) < share

    sign = draw(0, 1, (rows, K)) << 7
    payload = draw(0, 0x7E, (rows, K))
    if nan_payload:
        payload[chosen(nan_payload, (rows, K))] = 0x7F
    scale = draw(127 + low, 127 + high, (rows, K // BLOCK))
    if nan_scale:
        scale[chosen(nan_scale, (rows, K // BLOCK))] = NAN_SCALE
    return (payload | sign).view(torch.float8_e4m3fn), scale


def random_mx_groups(
    M: int, G: int, N: int, K: int, seed: int = 0, exponents: tuple[int, int] = (-6, 6)
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Operands of a grouped GEMM by ``random_mx``: a ``[M, K]``, b ``[G, N, K]`` and their scales.

    Returns:
        a, a_scale, b, b_scale.
    """
    generator = torch.Generator().manual_seed(seed)
    a = random_mx(M, K, generator, scale_exponents=exponents)
    b, b_scale = random_mx(G * N, K, generator, scale_exponents=exponents)
    return (*a, b.view(G, N, K), b_scale.view(G, N, K // 32))


def in_e5m2(payload: Tensor, infinite: bool = False) -> Tensor:
    """The bytes of a random e4m3 payload as e5m2: every number of it, NaN where NaN was, and, if
    wanted, infinity."""
    codes = payload.view(torch.uint8)
    magnitude = codes & 0x7F
    beyond = (magnitude > (0x7C if infinite else 0x7B)) & (magnitude < 0x7F)
    return torch.where(beyond, codes & 0xFB, codes).view(torch.float8_e5m2)


def dequantize64(payload: Tensor, scale: Tensor) -> Tensor:
    """Exact float64 values ``[rows, K]`` of a payload and its uint8 or e8m0 scales."""
    of_format = E5M2_VALUES if payload.dtype == torch.float8_e5m2 else E4M3_VALUES
    values = _looked_up(of_format, payload).view(*scale.shape, BLOCK)
    blocks = values * _looked_up(E8M0_VALUES, scale).unsqueeze(-1)
    return blocks.view(payload.shape)


def _looked_up(table: Tensor, codes: Tensor) -> Tensor:
    flat = codes.contiguous().view(torch.uint8).flatten().int()
    return table.to(codes.device).index_select(0, flat).view(codes.shape)


def round_once(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 to ``dtype`` with one rounding, to nearest with ties to even.

    torch converts float64 to a 16-bit format through float32 and so rounds twice. Rounding to
    odd on the way makes the second rounding right: a float32 has more than two bits to spare.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return values.to(dtype)
    nearest = values.to(torch.float32)
    inexact = nearest.double() != values
    away_from_zero = nearest.double().abs() > values.abs()
    toward_zero = nearest.view(torch.int32) - away_from_zero.int()
    odd = (toward_zero | inexact.int()).view(torch.float32)
    return torch.where(values.isfinite(), odd, nearest).to(dtype)


def linear_reference64(
    xq: Tensor, xs: Tensor, wq: Tensor, ws: Tensor, bias: Tensor | None = None
) -> Tensor:
    """``dequantised(xq) @ dequantised(wq).T + bias`` in float64, ``[M, N]``."""
    product = dequantize64(xq, xs) @ dequantize64(wq, ws).T
    return product if bias is None else product + bias.double()


def linear_reference(
    xq: Tensor,
    xs: Tensor,
    wq: Tensor,
    ws: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The reference of a linear: float64, then one rounding to ``out_dtype``."""
    return round_once(linear_reference64(xq, xs, wq, ws, bias), out_dtype)


def assert_close_to_reference(
    out: Tensor,
    xq: Tensor,
    xs: Tensor,
    wq: Tensor,
    ws: Tensor,
    bias: Tensor | None = None,
    *,
    accumulation_error: float | None = None,
    underflow: float = 2.0**-126,
    rescaling_error: float = 0.0,
) -> None:
    """Assert that ``out`` is the linear with fp32 accumulation and one rounding to its dtype.

    With S = sum |x||w| + |bias| of an element, e = accumulation_error * S + underflow * K / 32
    bounds the error before rounding, and half a unit in the last place of ``out`` at |ref| + e
    bounds the rounding.

    - Products of two e4m3 values and a power of two are exact in fp32, so that only the K
      additions (and the bias) round, each to 2^-24 relative, or 2^-23 in matrix units that
      truncate. Every partial sum is at most S, hence at most K * 2^-23 * S; rounding errors are
      not aligned, which makes the sum grow as sqrt(K) (Higham and Mary, 2019). The default is
      (8 + sqrt(K)) * 2^-23.
    - A kernel whose matrix unit keeps fewer bits states its own ``accumulation_error``.
    - One that puts blocks under other scales states its ``rescaling_error``, which is what an
      element changes by at most, of the largest of its block: e has what that makes of products.
    - NaN must be exactly where the reference has it, infinity where the reference overflows
      ``out``'s dtype, either one allowed within e of the threshold. Where S alone overflows fp32,
      infinity and NaN are allowed as well, because partial sums may overflow.

    Raises:
        AssertionError: names the worst element and how many are wrong.
    """
    x, w = dequantize64(xq, xs), dequantize64(wq, ws)
    M, N, K = x.shape[0], w.shape[0], x.shape[1]
    assert out.shape == (M, N), f"out is {tuple(out.shape)}, expected {(M, N)}"
    ref, total = x @ w.T, x.abs() @ w.abs().T
    if bias is not None:
        ref, total = ref + bias.double(), total + bias.double().abs()
    if accumulation_error is None:
        accumulation_error = (8 + math.sqrt(K)) * 2.0**-23
    error = accumulation_error * total + underflow * K / BLOCK
    if rescaling_error:
        error += lost_by_rescaling(x, w, rescaling_error)
    assert_rounded(out, ref, error, total, f"K={K}")


def lost_by_rescaling(x: Tensor, w: Tensor, error: float) -> Tensor:
    """What ``x @ w.T`` changes by at most where elements of both change by so much at most, of the
    largest magnitude of their block."""
    (x_sums, x_lost), (w_sums, w_lost) = (_of_blocks(t, error) for t in (x, w))
    return x_sums @ w_lost.T + x_lost @ (w_sums + BLOCK * w_lost).T


def _of_blocks(values: Tensor, error: float) -> tuple[Tensor, Tensor]:
    """The sum of magnitudes of each block, and what each of its elements may change by."""
    blocks = values.abs().view(len(values), -1, BLOCK)
    return blocks.sum(-1), error * blocks.amax(-1)


def assert_rounded(out: Tensor, ref: Tensor, error: Tensor, total: Tensor, note: str = "") -> None:
    """Assert that ``out`` is a value within ``error`` of ``ref``, rounded once to its dtype.

    Infinity and NaN are allowed where ``total``, the sum of magnitudes, overflows fp32.

    Raises:
        AssertionError: names the worst element and how many are wrong.
    """
    M, N = ref.shape
    assert out.shape == (M, N), f"out is {tuple(out.shape)}, expected {(M, N)}"
    info = torch.finfo(out.dtype)
    _, exponent = torch.frexp((ref.abs() + error).clamp(min=info.tiny, max=info.max))
    half_ulp = torch.ldexp(torch.full_like(ref, info.eps / 4), exponent)
    overflow = info.max * (1 + info.eps / (2 * (2 - info.eps)))  # max and half a unit

    got = out.double()
    finite = got.isfinite() & (ref.abs() - error < overflow)
    right = finite & ((got - ref).abs() <= error + half_ulp)
    right |= got.isinf() & (ref.abs() + error >= overflow) & (got.sign() == ref.sign())
    right |= ~got.isfinite() & (total >= FLOAT32_MAX)
    right |= ref.isinf() & (got == ref)
    right = torch.where(ref.isnan(), got.isnan(), right)
    if right.all():
        return
    excess = torch.where(right, 0.0, ((got - ref).abs() / (error + half_ulp)).nan_to_num(math.inf))
    m, n = divmod(int((excess + (~right)).argmax()), N)
    raise AssertionError(
        f"{int((~right).sum())} of {M * N} elements are wrong (M={M}, N={N}, {note}, {out.dtype}); "
        f"worst at [{m}, {n}]: got {got[m, n].item():.9g}, float64 says {ref[m, n].item():.9g}, "
        f"allowed error {(error + half_ulp)[m, n].item():.3g}"
    )
