"""Operands that reveal mistakes in any op over MX-FP8: ranges of scales, zeros, NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from op_tests.mx_reference import NAN_SCALE

Exponents = tuple[int, int]
"""The least and the largest power of two of scales."""

SPREADS: dict[str, tuple[Exponents, Exponents]] = {
    "any": ((-127, 127), (-127, 127)),
    "huge x": ((90, 127), (-127, -90)),
    "huge w": ((-127, -90), (90, 127)),
    "small": ((-127, -40), (-127, -40)),
    "large": ((40, 127), (40, 127)),
    "least": ((-127, -120), (-127, -120)),
    "least x": ((-127, -127), (117, 127)),
    "near underflow": ((-80, -50), (-80, -50)),
    "near overflow": ((40, 70), (20, 40)),
    "top of x": ((119, 127), (-25, -10)),
    "top of w": ((-25, -10), (119, 127)),
    "half": ((-63, 63), (-63, 63)),
    "nearly half": ((-62, 62), (-62, 62)),
    "about 2^-63": ((-66, -60), (-66, -60)),
    "about 2^63": ((58, 68), (58, 68)),
}
"""Exponents of x's and of w's scales: the whole range of e8m0, and its corners."""

NANS: tuple[dict[str, float], ...] = (
    {"nan_payload": 2e-4},
    {"nan_scale": 5e-3},
    {"nan_payload": 2e-4, "nan_scale": 1e-3},
)
"""Shares of NaN with which some results are NaN and others are not."""


def zero_blocks(payload: Tensor, scale: Tensor, generator: torch.Generator) -> None:
    """Make a fifth of all blocks zero, of either sign, with any scale but NaN."""
    blocks = payload.view(torch.uint8).view(*scale.shape, 32)
    empty = torch.rand(scale.shape, generator=generator) < 0.2
    blocks[empty] &= 0x80
    anything = torch.randint(0, 255, scale.shape, generator=generator, dtype=torch.uint8)
    scale[empty] = anything[empty]


def scale_zeros(payload: Tensor, scale: Tensor, by: int) -> None:
    """Give all blocks of zeros this scale."""
    blocks = payload.view(torch.uint8).view(*scale.shape, 32)
    scale[(blocks & 0x7F).amax(-1) == 0] = by


def nan_scale_of_zeros(payload: Tensor, scale: Tensor, *at: int) -> None:
    """Make one block zero and its scale NaN."""
    payload.view(torch.uint8).view(*scale.shape, 32)[at] = 0
    scale[at] = NAN_SCALE
