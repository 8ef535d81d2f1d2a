"""What ``wgmma_fp8_rescaled`` multiplies in place of operands, by torch's casts on the CPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from op_tests.linear.operands import Operands
from op_tests.mx_reference import BLOCK, NAN_SCALE

ROWS = 128  # that keep scales of their own together, and of w have one together
STEP = 4  # blocks of 32 k
LEAST_FIELD = 8  # exponent field of 2.0 in e4m3
LEAST_SCALE, LAST_SCALE = 77, 177  # that operands may have in common
ONE, NAN = 127, 0x7F  # a scale, and a payload


class Rescaled(NamedTuple):
    """An operand as it is multiplied.

    Attributes:
        payload: e4m3 ``[rows, K]``.
        scale: uint8 ``[rows, K // 32]``.
        apart: ``[blocks of 128 rows, steps]``, where blocks of 32 k keep scales of their own.
    """

    payload: Tensor
    scale: Tensor
    apart: Tensor


def rescaled(payload: Tensor, scale: Tensor, of_w: bool) -> Rescaled:
    """The four blocks of a step under the largest scale of theirs, in all of w's 128 rows."""
    rows, blocks = scale.shape
    more = (0, -blocks % STEP, 0, -rows % ROWS)
    codes = payload.view(torch.uint8).view(rows, blocks, BLOCK).clone()
    nan = scale == NAN_SCALE
    codes[nan] = NAN
    codes = pad(codes, (0, 0, *more))
    own = pad(torch.where(nan, ONE, scale.int()), more, value=ONE)
    largest = (codes & 0x7F).amax(-1).int().masked_fill(pad(nan, more), 0)

    # [blocks of rows, rows, steps, blocks of k]
    shape = (own.shape[0] // ROWS, ROWS, own.shape[1] // STEP, STEP)
    counted = torch.where(largest == 0, -1, own).view(shape)
    top = counted.amax((1, 3) if of_w else 3, keepdim=True)
    top = torch.where(top < 0, ONE, top).expand(shape)
    down = torch.where(largest.view(shape) == 0, 0, top - own.view(shape))
    loses = (down > 0) & (largest.view(shape) // 8 < LEAST_FIELD + down)
    apart = ((top < LEAST_SCALE) | (top > LAST_SCALE) | loses).any(3).any(1)

    kept = apart[:, None, :, None].expand(shape)
    values = codes.view(torch.float8_e4m3fn).float()
    shrunk = torch.ldexp(values, -down.reshape(own.shape)[..., None]).to(torch.float8_e4m3fn)
    here = kept.reshape(own.shape)
    codes = torch.where(here[..., None], codes, shrunk.view(torch.uint8))
    scales = torch.where(here, own, top.reshape(own.shape)).to(torch.uint8)
    codes, scales = codes[:rows, :blocks], scales[:rows, :blocks]
    return Rescaled(codes.reshape(payload.shape).view(payload.dtype), scales.contiguous(), apart)


def both_rescaled(drawn: Operands) -> Operands:
    """What is multiplied in place of operands."""
    xq, xs, wq, ws = drawn
    x, w = rescaled(xq, xs, False), rescaled(wq, ws, True)
    return x.payload, x.scale, w.payload, w.scale


def steps_apart(drawn: Operands) -> Tensor:
    """``[blocks of x, blocks of w, steps]``: where products are scaled 32 k at a time."""
    xq, xs, wq, ws = drawn
    of_x, of_w = rescaled(xq, xs, False).apart, rescaled(wq, ws, True).apart
    return of_x[:, None] | of_w[None]
