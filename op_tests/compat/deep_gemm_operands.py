"""Operands with DeepGEMM's kinds of scale, and how far from them a result may be."""

from __future__ import annotations

import torch

import aiter_mx

Pair = tuple[torch.Tensor, torch.Tensor]


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """DeepGEMM's measure: 1 - 2 <x, y> / (<x, x> + <y, y>)."""
    x, y = x.double(), y.double()
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


def quantize_coarse(x: torch.Tensor, rows: int) -> Pair:
    """e4m3 with a fp32 power of two for each 128 k of ``rows`` rows, rounded up to be one."""
    *outer, M, K = x.shape
    padded = x.new_zeros(*outer, -(-M // rows) * rows, -(-K // 128) * 128)
    padded[..., :M, :K] = x
    tiles = padded.unflatten(-1, (-1, 128)).unflatten(-3, (-1, rows))  # [.., m, rows, k, 128]
    amax = tiles.abs().amax((-3, -1)).clamp(min=1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    payload = (tiles / scale[..., :, None, :, None]).flatten(-2).flatten(-3, -2)
    return payload[..., :M, :K].contiguous().to(torch.float8_e4m3fn), scale


def to_uint8(pair: Pair) -> Pair:
    return pair[0], (torch.log2(pair[1]) + 127).to(torch.uint8)


def both(kind: str, x: torch.Tensor, w: torch.Tensor) -> tuple[Pair, Pair]:
    """Activations and weights in one of the three kinds of scale."""
    if kind == "1x32":
        return aiter_mx.quantize(x), aiter_mx.quantize(w)
    a, b = quantize_coarse(x, 1), quantize_coarse(w, 128)
    return (a, b) if kind == "fp32 at 128" else (to_uint8(a), to_uint8(b))


def coarse(rows: int, K: int, each: int, seed: int, *outer: int, low: float = 1e-3) -> Pair:
    """A random payload over the whole e4m3 range, and fp32 scales that are no powers of two."""
    generator = torch.Generator().manual_seed(seed)
    payload = torch.randint(0, 256, (*outer, rows, K), generator=generator, dtype=torch.uint8)
    payload[(payload & 127) == 127] = 0x42  # a NaN is of another test
    shape = (*outer, -(-rows // each), -(-K // 128))
    scale = (torch.rand(shape, generator=generator) + 0.1) * low
    return payload.view(torch.float8_e4m3fn), scale


def exact(pair: Pair, each: int) -> tuple[torch.Tensor, torch.Tensor]:
    payload, scale = pair
    *_, rows, K = payload.shape
    whole = scale.double().repeat_interleave(each, -2)[..., :rows, :].repeat_interleave(128, -1)
    values = payload.double() * whole[..., :K]
    return values, values.abs()


def assert_within(found: torch.Tensor, x: Pair, w: Pair, device: torch.device) -> None:
    """Against float64 of the exact operands: fp32 sums, and a rounding of the result.

    Hopper's fp8 matrix unit, which makes 16-bit results, adds 128 products with about 14 bits.
    """
    sums = 2.0**-9 if device.type == "cuda" and found.dtype != torch.float32 else 2.0**-18
    (x64, x_abs), (w64, w_abs) = exact(x, 1), exact(w, 128)
    wanted, most = x64 @ w64.T, x_abs @ w_abs.T
    finite = most < 3e38
    ulp = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-23}[found.dtype]
    error = (found.double() - wanted).abs()
    assert (error <= sums * most + ulp * wanted.abs())[finite].all()


def operands(kind: str, M: int, N: int, K: int, G: int, seed: int) -> tuple[Pair, Pair]:
    """Rows, and the weights of groups: of any scales, or of one for each 32 values."""
    if kind == "any":
        return coarse(M, K, 1, seed), coarse(N, K, 128, seed + 1, G)
    return aiter_mx.quantize(torch.randn(M, K)), aiter_mx.quantize(torch.randn(G, N, K))
