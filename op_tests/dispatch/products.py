"""Rows of payloads whose products a matrix unit adds with more and with less error."""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("random", "positive", "cancelling", "outlier", "worst")


def draws(kind: str, count: int, length: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(len(kind))
    magnitudes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()

    def some(low: int, high: int) -> Tensor:
        picked = torch.randint(low, high, (count, length), generator=generator)
        signs = torch.randint(0, 2, picked.shape, generator=generator) * 2 - 1
        return magnitudes[picked] * signs

    a, b = some(1, 127), some(1, 127)
    if kind == "positive":
        return a.abs(), b.abs()
    if kind == "cancelling":
        half = length // 2
        a[:, half:], b[:, half:] = a[:, :half], -b[:, :half]
        b[:, -1] = 0
        return a, b
    if kind == "outlier":  # as small as still matters beside one product that is a power of two
        exponent = torch.randint(7, 9, (count, 2), generator=generator)
        low = 8 * torch.randint(3, 6, (1,), generator=generator).item()
        a, b = some(int(low), int(low) + 16).abs(), some(8, 40).abs()
        a[:, 0], b[:, 0] = 2.0 ** exponent[:, 0], 2.0 ** exponent[:, 1]
        return a, b
    if kind == "worst":  # products just under 2^-13 of the first one, all of one sign
        a, b = torch.full((2, count, length), 1.375 / 8, dtype=torch.float64)
        a[:, 0] = b[:, 0] = 16.0
        power = 2.0 ** torch.randint(-2, 4, (count, 1), generator=generator)
        return a * power, b / power
    return a, b


def hopper_sums(a: Tensor, b: Tensor) -> Tensor:
    """Sums of products of e4m3 numbers as Hopper's fp8 ``wgmma`` adds them, 32 at a time.

    Products are shifted to the exponent of the largest, which is the sum of its operands', or of
    the sum so far, and cut 13 bits below it; so is their sum.
    """
    total = torch.zeros_like(a[:, :1])
    for x, w in zip(a.split(32, -1), b.split(32, -1), strict=True):
        exponents = (x.frexp().exponent - 1) + (w.frexp().exponent - 1)
        terms = torch.cat((x * w, total), -1)
        exponents = torch.cat((exponents, total.frexp().exponent - 1), -1)
        largest = exponents.masked_fill(terms == 0, -99).amax(-1, keepdim=True)
        step = torch.ldexp(torch.ones_like(total), largest - 13)
        total = ((terms / step).trunc() * step).sum(-1, keepdim=True)
        step = torch.ldexp(torch.ones_like(total), total.frexp().exponent - 1 - 13)
        total = (total / step).trunc() * step
    return total.squeeze(-1)
