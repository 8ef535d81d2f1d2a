"""Operands of the gradient of weights, drawn at random with padding that must not count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from op_tests.mx_reference import BLOCK, assert_close_to_reference, random_mx

START = 128  # groups begin at multiples of this
NAN = 0x7F


@dataclass(frozen=True)
class Case:
    """Operands on the CPU.

    Attributes:
        grad: e4m3 ``[N, P]``.
        grad_scale: ``[N, P // 32]``.
        x: ``[K, P]``.
        x_scale: ``[K, P // 32]``.
        offs: ``[G + 1]``, where padded groups begin.
        lens: columns of each group.
    """

    grad: Tensor
    grad_scale: Tensor
    x: Tensor
    x_scale: Tensor
    offs: Tensor
    lens: Tensor

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """What ``grouped_gemm_wgrad`` takes, in its order."""
        return self.grad, self.grad_scale, self.x, self.x_scale, self.offs, self.lens

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the result."""
        return len(self.lens), len(self.grad), len(self.x)

    def columns(self, g: int) -> slice:
        """Those of a group, to the end of its last block."""
        begin, count = int(self.offs[g]), int(self.lens[g])
        return slice(begin, begin + -(-count // BLOCK) * BLOCK)

    def of_group(self, g: int) -> tuple[Tensor, ...]:
        """A group's operands, with zeros after its last column."""
        columns = self.columns(g)
        blocks = slice(columns.start // BLOCK, columns.stop // BLOCK)
        parts = []
        for payload, scale in ((self.grad, self.grad_scale), (self.x, self.x_scale)):
            own = payload.view(torch.uint8)[:, columns].clone()
            own[:, int(self.lens[g]) :] = 0
            parts += [own.view(payload.dtype), scale[:, blocks].contiguous()]
        return tuple(parts)

    def with_other_padding(self, payload: int, scale: int) -> Case:
        """The same, but for what stands in padding, and in the scales of blocks of it alone."""
        out = replace(self, **{name: getattr(self, name).clone() for name in OPERANDS})
        padding = torch.ones(self.grad.shape[1], dtype=torch.bool)
        blocks = padding[::BLOCK].clone()
        for g, count in enumerate(self.lens.tolist()):
            begin = int(self.offs[g])
            padding[begin : begin + count] = False
            blocks[begin // BLOCK : -(-(begin + count) // BLOCK)] = False
        for values, scales in ((out.grad, out.grad_scale), (out.x, out.x_scale)):
            values.view(torch.uint8)[:, padding] = payload
            scales[:, blocks] = scale
        return out


OPERANDS = ("grad", "grad_scale", "x", "x_scale")


def draw_case(
    N: int,
    K: int,
    lens: Sequence[int],
    seed: int = 0,
    exponents: tuple[int, int] = (-6, 6),
    index: torch.dtype = torch.int32,
    room: int = 0,
    x_exponents: tuple[int, int] | None = None,
    **nans: float,
) -> Case:
    """A case whose groups have these lengths, with NaN in all padding.

    Args:
        N: rows of grad.
        K: rows of x.
        lens: columns of each group.
        seed: of all that is drawn.
        exponents: first and last power of two of grad's scales.
        index: dtype of offsets and lengths.
        room: columns after the last group.
        x_exponents: of x's scales, or None where they are grad's.
        nans: shares of NaN, as ``random_mx`` takes them.
    """
    generator = torch.Generator().manual_seed(seed)
    offs = [0, *accumulate(-(-length // START) * START for length in lens)]
    P = offs[-1] + room
    grad = random_mx(N, P, generator, scale_exponents=exponents, **nans)
    x = random_mx(K, P, generator, scale_exponents=x_exponents or exponents, **nans)
    bounds = (torch.tensor(offs, dtype=index), torch.tensor(list(lens), dtype=index))
    return Case(*grad, *x, *bounds).with_other_padding(NAN, 255)


def check(out: Tensor, case: Case, old: Tensor | None = None, underflow: float = 2.0**-126) -> None:
    """Assert that every group's gradient is right, on top of ``old`` if there is one."""
    assert out.shape == case.shape
    for g in range(len(case.lens)):
        before = None if old is None else old[g]
        if case.lens[g] == 0:
            expected = torch.zeros_like(out[g]) if before is None else before
            assert torch.equal(out[g], expected), f"group {g} has no rows"
        else:
            assert_close_to_reference(out[g], *case.of_group(g), before, underflow=underflow)
