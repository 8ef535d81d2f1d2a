"""Linears and grouped linears drawn at random, and what their gradients must be."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

import aiter_mx
from op_tests.mx_reference import assert_close_to_reference, assert_rounded

OFFSETS = (0, 1, 1, 32, 65, 192, 229)
"""Groups of 1, 0, 31, 33, 127 and 37 rows."""
T, N, K = OFFSETS[-1], 96, 64


def draw(dtype: torch.dtype, groups: bool, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, w, bias that want gradients, and dy."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    leading = (len(OFFSETS) - 1,) if groups else ()
    drawn = (randn(T, K), randn(*leading, N, K) * K**-0.5, randn(*leading, N))
    x, w, bias = (each.to(dtype).requires_grad_() for each in drawn)
    return x, w, bias, randn(T, N).to(dtype)


def forward(x: Tensor, w: Tensor, bias: Tensor | None = None, **options: Tensor | str) -> Tensor:
    if w.ndim == 2:
        return aiter_mx.linear_autograd(x, w, bias, **options)  # type: ignore[arg-type]
    offs = torch.tensor(OFFSETS)
    return aiter_mx.grouped_linear(x, w, offs, bias, **options)  # type: ignore[arg-type]


def parts(w: Tensor) -> list[tuple[Tensor, slice]]:
    """The weights of each group and its rows; one group for a linear."""
    if w.ndim == 2:
        return [(w, slice(0, T))]
    return [(w[g], slice(*bounds)) for g, bounds in enumerate(pairwise(OFFSETS))]


def columns_of(x: Tensor, format: str = "e4m3") -> tuple[Tensor, Tensor]:
    """A group's rows quantised along columns, padded with zeros."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % 32))
    return aiter_mx.quantize(padded, axis=-2, format=format)


def assert_products(
    y: Tensor, dy: Tensor, x: Tensor, w: Tensor, bias: Tensor, format: str = "e4m3"
) -> None:
    """Assert that y and the gradients of x, w and bias are right in every element."""
    y, dy, x_grad, w_grad, bias_grad = (
        t.detach().cpu() for t in (y, dy, x.grad, w.grad, bias.grad)
    )
    x, w, bias = (each.detach().cpu() for each in (x, w, bias))
    for g, (of_w, rows) in enumerate(parts(w)):
        xg, dyg = x[rows], dy[rows]
        own_bias, dw, db = (t[g] if w.ndim == 3 else t for t in (bias, w_grad, bias_grad))
        if not len(xg):
            assert not dw.any() and not db.any()
            continue
        assert_close_to_reference(
            y[rows], *aiter_mx.quantize(xg), *aiter_mx.quantize(of_w), own_bias
        )
        assert_close_to_reference(
            x_grad[rows], *aiter_mx.quantize(dyg, format=format), *aiter_mx.quantize(of_w, axis=-2)
        )
        assert_close_to_reference(dw, *columns_of(dyg, format), *columns_of(xg))
        total = dyg.double().abs().sum(0, keepdim=True)
        assert_rounded(db[None], dyg.double().sum(0, keepdim=True), total * 2.0**-18, total)
