"""What ``wgmma_fp8_rescaled`` multiplies in place of operands, by torch's casts on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from aiter_mx.kernels.linear import wgmma_fp8_rescaled_sm90
from op_tests.linear.operands import Operands
from op_tests.mx_reference import BLOCK, NAN_SCALE

ROWS = 128  # that keep scales of their own together
QUARTER = 32  # of w, where it is rescaled as it is multiplied
STEP = 4  # blocks of 32 k
LEAST_FIELD = 8  # exponent field of 2.0 in e4m3
LEAST_SCALE, LAST_SCALE = 77, 177  # that operands may have in common
ONE, NAN = 127, 0x7F  # a scale, and a payload
TOGETHER, BY_ROWS, BY_BLOCKS = range(3)
"""What a step's scales are of: 128 rows (of x, a row), a row of w, or 32 k of a row."""


class Rescaled(NamedTuple):
    """An operand as it is multiplied.

    Attributes:
        payload: e4m3 ``[rows, K]``.
        scale: uint8 ``[rows, K // 32]``.
        form: ``[blocks of so many rows, steps]``: what scales are of.
    """

    payload: Tensor
    scale: Tensor
    form: Tensor


def rescaled(payload: Tensor, scale: Tensor, of_w: bool, together: int = ROWS) -> Rescaled:
    """The four blocks of a step under the largest scale of theirs, in so many of w's rows."""
    rows, blocks = scale.shape
    more = (0, -blocks % STEP, 0, -rows % together)
    codes = payload.view(torch.uint8).view(rows, blocks, BLOCK).clone()
    nan = scale == NAN_SCALE
    codes[nan] = NAN
    codes = pad(codes, (0, 0, *more))
    padded = pad(torch.where(nan, ONE, scale.int()), more, value=ONE)
    # [blocks of rows, rows, steps, blocks of k]
    shape = (padded.shape[0] // together, together, padded.shape[1] // STEP, STEP)
    own = padded.view(shape)
    largest = (codes & 0x7F).amax(-1).int().masked_fill(pad(nan, more), 0).view(shape)
    own = torch.where(largest == 0, ONE, own)
    padded = own.view(padded.shape)

    def lose(scales: Tensor) -> Tensor:
        down = scales - own
        less = (largest > 0) & (down > 0) & (largest // 8 < LEAST_FIELD + down)
        outside = (scales < LEAST_SCALE) | (scales > LAST_SCALE)
        return (outside | less).any(3, keepdim=True).any(1, keepdim=True)

    of_row = torch.where(largest == 0, -1, own).amax(3, keepdim=True)
    of_all = of_row.amax(1, keepdim=True)
    top, of_all = (torch.where(each < 0, ONE, each).expand(shape) for each in (of_row, of_all))
    by_blocks = lose(top)
    by_rows = lose(of_all) & of_w
    top = torch.where(by_rows, top, of_all) if of_w else top
    down = torch.where(largest == 0, 0, top - own).view(padded.shape)
    kept = by_blocks.expand(shape).reshape(padded.shape)
    values = codes.view(torch.float8_e4m3fn).float()
    shrunk = torch.ldexp(values, -down[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = torch.where(kept[..., None], codes, shrunk)[:rows, :blocks]
    scales = torch.where(kept, padded, top.reshape(padded.shape))[:rows, :blocks]
    form = torch.where(by_blocks, BY_BLOCKS, torch.where(by_rows, BY_ROWS, TOGETHER))
    codes = codes.reshape(payload.shape).view(payload.dtype)
    return Rescaled(codes, scales.to(torch.uint8).contiguous(), form[:, 0, :, 0])


def both_rescaled(drawn: Operands, rows_of_w: int = ROWS) -> Operands:
    """What is multiplied in place of operands."""
    xq, xs, wq, ws = drawn
    x, w = rescaled(xq, xs, False), rescaled(wq, ws, True, rows_of_w)
    return x.payload, x.scale, w.payload, w.scale


rescaled_in_place = partial(both_rescaled, rows_of_w=QUARTER)


def forms_of(drawn: Operands, rows_of_w: int = ROWS) -> Tensor:
    """``[blocks of x, blocks of 128 rows of w, steps]``: how products are scaled."""
    xq, xs, wq, ws = drawn
    of_x, of_w = rescaled(xq, xs, False).form, rescaled(wq, ws, True, rows_of_w).form
    more = pad(of_w, (0, 0, 0, -len(of_w) % (ROWS // rows_of_w)))
    of_w = more.unflatten(0, (-1, ROWS // rows_of_w)).amax(1)
    return torch.maximum(of_x[:, None], of_w[None])


@contextmanager
def in_slices_of(blocks: int) -> Iterator[None]:
    """As where a workspace had room for so many blocks of w."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wgmma_fp8_rescaled_sm90, "_most_blocks", lambda M, K: blocks)
        wgmma_fp8_rescaled_sm90.slices.cache_clear()
        yield
    wgmma_fp8_rescaled_sm90.slices.cache_clear()
