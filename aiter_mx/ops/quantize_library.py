"""The quantisations in ``torch.library``, through which calls go that torch traces."""

from __future__ import annotations

import torch
from torch import Tensor

from aiter_mx.ops.quantize_call import Options, check, empty_outputs, quantized


def _fake(x: Tensor, offsets: Tensor | None, options: Options) -> list[Tensor]:
    outputs = empty_outputs(x, offsets, check(x, offsets, options)[1], options)
    return [tensor for tensor in outputs if tensor is not None]


@torch.library.custom_op("aiter_mx::quantize", mutates_args=())
def quantize(
    x: Tensor,
    mode: str,
    axis: int = -1,
    square: bool = False,
    format: str = "e4m3",
    layout: str = "row_major",
) -> tuple[Tensor, Tensor]:
    to = "rows" if axis == -1 else "columns"
    payload, scale = quantized(x, None, Options(to, mode, square, format, layout))
    return payload, scale


@quantize.register_fake
def _(
    x: Tensor,
    mode: str,
    axis: int = -1,
    square: bool = False,
    format: str = "e4m3",
    layout: str = "row_major",
) -> tuple[Tensor, Tensor]:
    to = "rows" if axis == -1 else "columns"
    payload, scale = _fake(x, None, Options(to, mode, square, format, layout))
    return payload, scale


@torch.library.custom_op("aiter_mx::quantize_dual", mutates_args=())
def quantize_dual(
    x: Tensor, mode: str, square: bool, format: str, layout: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a, b, c, d = quantized(x, None, Options("both", mode, square, format, layout))
    return a, b, c, d


@quantize_dual.register_fake
def _(
    x: Tensor, mode: str, square: bool, format: str, layout: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a, b, c, d = _fake(x, None, Options("both", mode, square, format, layout))
    return a, b, c, d


@torch.library.custom_op("aiter_mx::quantize_grouped", mutates_args=())
def quantize_grouped(
    x: Tensor, group_offs: Tensor, mode: str, format: str, layout: str
) -> tuple[Tensor, Tensor, Tensor]:
    a, b, c = quantized(x, group_offs, Options("rows", mode, False, format, layout))
    return a, b, c


@quantize_grouped.register_fake
def _(
    x: Tensor, group_offs: Tensor, mode: str, format: str, layout: str
) -> tuple[Tensor, Tensor, Tensor]:
    a, b, c = _fake(x, group_offs, Options("rows", mode, False, format, layout))
    return a, b, c


@torch.library.custom_op("aiter_mx::quantize_dual_grouped", mutates_args=())
def quantize_dual_grouped(
    x: Tensor, group_offs: Tensor, mode: str, format: str, layout: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    a, b, c, d, e = quantized(x, group_offs, Options("both", mode, False, format, layout))
    return a, b, c, d, e


@quantize_dual_grouped.register_fake
def _(
    x: Tensor, group_offs: Tensor, mode: str, format: str, layout: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    a, b, c, d, e = _fake(x, group_offs, Options("both", mode, False, format, layout))
    return a, b, c, d, e
