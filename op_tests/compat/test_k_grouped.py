"""DeepGEMM's products over groups of k, against float64 of the exact operands."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aiter_mx.compat.deep_gemm import (
    k_grouped_fp8_gemm_nt_contiguous,
    k_grouped_fp8_gemm_tn_contiguous,
)

KS, M, N = [256, 0, 128, 384], 64, 96
Pair = tuple[Tensor, Tensor]


def drawn(rows: int, kind: str, seed: int) -> Pair:
    """A payload [K, rows] over the whole e4m3 range but NaN, and its scales."""
    generator = torch.Generator().manual_seed(seed)
    K = sum(KS)
    payload = torch.randint(0, 0x7F, (K, rows), generator=generator, dtype=torch.uint8)
    payload |= torch.randint(0, 2, (K, rows), generator=generator, dtype=torch.uint8) << 7
    shape = (K // (32 if kind == "1x32" else 128), rows)
    if kind == "fp32":
        scale = torch.rand(shape, generator=generator) * 0.01 + 1e-4
    else:
        scale = torch.randint(115, 125, shape, generator=generator, dtype=torch.uint8)
    return payload.view(torch.float8_e4m3fn), scale


def exact(pair: Pair) -> Tensor:
    payload, scale = pair
    values = scale.double() if scale.dtype == torch.float32 else torch.exp2(scale.double() - 127)
    return payload.double() * values.repeat_interleave(len(payload) // len(values), 0)


def wanted(a: Pair, b: Pair, c: Tensor | None) -> tuple[Tensor, Tensor]:
    """The products, and the sums of their magnitudes."""
    x, w = exact(a), exact(b)
    products, most, begin = [], [], 0
    for k in KS:
        rows = slice(begin, begin + k)
        products.append(x[rows].T @ w[rows])
        most.append(x[rows].T.abs() @ w[rows].abs())
        begin += k
    product = torch.stack(products)
    return product if c is None else product + c.double(), torch.stack(most)


def apart(pair: Pair) -> Pair:
    """Each group as [rows, k], flat, and scales [rows, K / 128]."""
    parts = pair[0].view(torch.uint8).split(KS)
    flat = torch.cat([part.t().flatten() for part in parts])
    return flat.view(torch.float8_e4m3fn), pair[1].t().contiguous()


@pytest.mark.parametrize("kinds", [("fp32", "fp32"), ("1x128", "1x32"), ("fp32", "1x128")])
@pytest.mark.parametrize("adds", [False, True])
def test_groups_of_k_match_float64(
    device: torch.device, kinds: tuple[str, str], adds: bool
) -> None:
    a, b = drawn(M, kinds[0], 1), drawn(N, kinds[1], 2)
    c = torch.randn(len(KS), M, N, generator=torch.Generator().manual_seed(3)) if adds else None
    product, most = wanted(a, b, c)
    ks = torch.tensor(KS, dtype=torch.int32, device=device)
    on = [tuple(t.to(device) for t in pair) for pair in (a, b)]
    split = [tuple(t.to(device) for t in apart(pair)) for pair in (a, b)]
    for call, operands, lengths in (
        (k_grouped_fp8_gemm_tn_contiguous, on, KS),
        (k_grouped_fp8_gemm_nt_contiguous, split, KS),
        (k_grouped_fp8_gemm_tn_contiguous, on, None),
    ):
        d = torch.full((len(KS), M, N), 7.0, device=device)
        if c is not None:
            d.copy_(c)
        call(*operands, d, lengths, ks, d if adds else None)
        error = (d.cpu().double() - product).abs()
        assert (error <= 2.0**-18 * most + 2.0**-22 * product.abs()).all()


def test_what_cannot_be_is_refused() -> None:
    a, b = drawn(M, "fp32", 1), drawn(N, "1x32", 2)
    d, ks = torch.empty(len(KS), M, N), torch.tensor(KS, dtype=torch.int32)
    fine = drawn(N, "fp32", 2)
    for arguments, error, message in [
        ((a, b, d, KS, ks), ValueError, "scales of b must be for 128 k each"),
        ((a, fine, d[:, :, 1:], KS, ks), ValueError, "d must be .4, 64, 96."),
        ((a, fine, d, [100, 0, 28, 640], ks), ValueError, "ks must be 4 multiples of 128"),
        ((a, fine, d, 128, ks), TypeError, "ks must be a list .*, or None, got 128"),
        ((a, fine, d, KS, ks[:3]), ValueError, "d must be"),
        (((a[0][1:], a[1]), fine, d, KS, ks), ValueError, "a must be .* K a multiple of 128"),
        (((a[0], a[1].half()), fine, d, KS, ks), TypeError, "scales of a must be torch.float32"),
    ]:
        with pytest.raises(error, match=message):
            k_grouped_fp8_gemm_tn_contiguous(*arguments)
