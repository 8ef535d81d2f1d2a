"""Gradients of every kind that a backward pass may be given, by each kernel that takes them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import aiter_mx
from op_tests.places import device_in
from op_tests.training.products import OFFSETS, N, T, assert_products, draw

device = device_in("sim", "torch", "cuda")
here = device_in("torch", "cuda")


def of_kind(kind: str, dy: Tensor) -> Tensor:
    """A gradient drawn at random, made one of this kind."""
    generator = torch.Generator().manual_seed(1)
    match kind:
        case "heavy-tailed":  # a token's scale
            exponents = torch.randint(-20, 21, (T, 1), generator=generator)
            return (dy.float() * torch.exp2(exponents.float())).to(dy.dtype)
        case "sparse":
            return dy * (torch.rand(dy.shape, generator=generator) < 0.02)
        case "scaled":  # with the loss
            return dy * 2.0**8
        case "strided":
            return torch.stack([dy.flip(0), dy], 2)[..., 1]
        case "expanded":
            return dy[3].expand(T, N)
        case "not finite":
            dy = dy.clone()
            dy[0, 3], dy[40, 5], dy[200, 7] = torch.inf, torch.nan, -torch.inf
            return dy
        case _:
            raise ValueError(kind)


def check(device: torch.device, kind: str, dtype: torch.dtype, format: str) -> None:
    """Assert that a step by such a gradient is right in every element."""
    *drawn, drawn_dy = draw(dtype, True)
    x, w, bias = (each.detach().to(device).requires_grad_() for each in drawn)
    dy = of_kind(kind, drawn_dy)
    offs = torch.tensor(OFFSETS, device=device)
    y = aiter_mx.grouped_linear(x, w, offs, bias, grad_format=format)
    y.backward(dy.to(device))
    assert_products(y, dy, x, w, bias, format)


@pytest.mark.parametrize("kind", ["heavy-tailed", "sparse", "strided", "expanded", "not finite"])
def test_gradients_of_every_kind_match_float64(device: torch.device, kind: str) -> None:
    check(device, kind, torch.bfloat16, "e4m3")


@pytest.mark.parametrize(
    ("kind", "dtype", "format"),
    [
        ("scaled", torch.float16, "e4m3"),
        ("scaled", torch.float16, "e5m2"),
        ("not finite", torch.bfloat16, "e5m2"),
        ("heavy-tailed", torch.bfloat16, "e5m2"),
    ],
)
def test_gradients_of_other_types_match_float64(
    here: torch.device, kind: str, dtype: torch.dtype, format: str
) -> None:
    check(here, kind, dtype, format)
