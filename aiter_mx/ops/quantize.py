"""Quantisation to MX formats along rows, columns or both, of groups too; and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aiter_mx.checks import as_whole_number, check_tensor, refuse_no_tensor
from aiter_mx.codec import FORMATS, as_scale_bytes, dequantize_block_scaled, format_of
from aiter_mx.layouts import layout_of, unshuffle_scales
from aiter_mx.numerics import BLOCK
from aiter_mx.ops.quantize_call import INPUT_DTYPES, Options, check, empty_outputs, quantized
from aiter_mx.registration import in_clear, is_traced, register

OUTPUT_DTYPES = (*INPUT_DTYPES, torch.float64)
Block = int | tuple[int, int]
_ONE = 127  # 2^0 as an e8m0 byte
_WIDE = 128


class Dual(NamedTuple):
    """Both quantisations of a tensor.

    Attributes:
        rows: payload ``[..., M, N]``, blocks along N.
        row_scales: ``[..., M, N // 32]``.
        columns: payload ``[..., N, M]``, blocks along M: transposed.
        column_scales: ``[..., N, M // 32]``.
    """

    rows: Tensor
    row_scales: Tensor
    columns: Tensor
    column_scales: Tensor


class Grouped(NamedTuple):
    """A quantisation whose groups of rows are padded to multiples of 128.

    Attributes:
        rows: payload ``[P, N]``; along columns ``[N, P]``, transposed.
        row_scales: ``[P, N // 32]``, or ``[N, P // 32]``.
        group_offs: where each padded group begins, and the end of the last: ``[groups + 1]``.
    """

    rows: Tensor
    row_scales: Tensor
    group_offs: Tensor


class DualGrouped(NamedTuple):
    """Both quantisations, of groups padded to multiples of 128.

    Attributes:
        rows: payload ``[P, N]``, blocks along N; ``[T, N]`` where rows were not padded.
        row_scales: ``[P, N // 32]``, likewise.
        columns: payload ``[N, P]``, blocks along P.
        column_scales: ``[N, P // 32]``.
        group_offs: where each padded group begins, and the end of the last: ``[groups + 1]``.
    """

    rows: Tensor
    row_scales: Tensor
    columns: Tensor
    column_scales: Tensor
    group_offs: Tensor


@in_clear
def quantize(
    x: Tensor,
    axis: int = -1,
    *,
    mode: str = "rceil",
    block: Block = BLOCK,
    format: str = "e4m3",
    scale_layout: str = "row_major",
    zero_scale: int = 0,
    multiple: int = BLOCK,
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantise to an MX format along one dimension, 32 elements a scale.

    The scale of a block with largest magnitude ``amax`` is

    - ``"rceil"``: the smallest power of two for which amax / scale is at most the format's largest
      number (448 for e4m3, 6 for e2m1, 57344 for e5m2), so nothing saturates;
    - ``"floor"``: 2^(floor(log2(amax)) - 8), for e2m1 - 2, for e5m2 - 15, as the OCP MX
      specification v1.0, section 6.3, has it; elements above the largest number times the scale
      saturate;
    - ``"even"``: as floor, but the next power of two where amax is 1.75 times one or more, as aiter
      has it: for e4m3 as rceil, but that an amax of exactly 448 times a power of two goes up.

    Either is kept within 2^-127 (also the scale of a block of zeros) and 2^127. Elements are
    rounded to nearest even, and their signs kept, also of zeros. A block that holds a NaN or an
    infinity becomes NaN as a whole, scale byte 255 and every e4m3 payload NaN (e2m1 has none, its
    payload is 0): the specification leaves this to the implementation, torchao's scales are the
    same, and an infinity that became 448 would hide what went wrong. Results are equal bit for bit
    on every device. There is no gradient. The call does not synchronise and can be captured.

    Args:
        x: ``[..., K]``, bfloat16, float16 or float32, any strides; K a multiple of 32.
        axis: -1, or -2 for blocks along the last dimension but one, of ``[..., K, N]``. Blocks
            are always along the last dimension of the result, which is then transposed.
        mode: ``"rceil"``, ``"floor"`` or ``"even"``.
        block: 32, or (32, 32) for one scale for 32 rows by 32 columns, both multiples of 32. It is
            stored for each of its rows, so that every GEMM takes it.
        format: ``"e4m3"``; ``"e2m1"``, two a byte, the first one in the low bits; or ``"e5m2"``,
            which torch computes.
        scale_layout: ``"row_major"``, or another that ``aiter_mx.layouts`` describes.
        zero_scale: scale byte of a block of zeros: 0, or 127 (2^0) as newer engines have it, which
            takes a pass more, over row-major scales.
        multiple: 32, or 128 for a dimension of blocks that is padded with zeros to a multiple.
        out: where to write the payload; it may not overlap x.
        out_scale: where to write the scales, likewise.

    Returns:
        payload float8_e4m3fn ``[..., K]`` (e2m1: uint8 ``[..., K // 2]``) and scale uint8
        ``[..., K // 32]``, padded if the layout demands it; both contiguous.

    Raises:
        TypeError: x is no tensor, or of another dtype.
        ValueError: a dimension that is not a multiple of 32, or an option that there is not.

    Example:
        >>> payload, scale = quantize(torch.randn(4, 64))
        >>> payload.shape, scale.shape
        (torch.Size([4, 64]), torch.Size([4, 2]))
    """
    refuse_no_tensor(x=x)
    along_rows = axis in (-1, x.dim() - 1)
    if not along_rows and axis not in (-2, x.dim() - 2):
        raise ValueError(f"axis must be the last dimension (-1) or the one before, got {axis!r}")
    if multiple != BLOCK:
        x = _padded(x, -1 if along_rows else -2, multiple)
    options = Options("rows" if along_rows else "columns", mode, _is_square(block), format,
                      scale_layout)  # fmt: skip
    if zero_scale not in (0, _ONE) or (zero_scale and scale_layout != "row_major"):
        raise ValueError(
            f"zero_scale must be 0, or {_ONE} with row-major scales, got {zero_scale!r} with "
            f"{scale_layout}"
        )
    if not is_traced((x, out, out_scale)):
        payload, scale = quantized(x, None, options, out, out_scale)
    else:
        payload, scale = _quantize(
            x, mode, -1 if along_rows else -2, options.square, format, scale_layout
        )
        for name, given, made in (("out", out, payload), ("out_scale", out_scale, scale)):
            if given is not None:
                check_tensor(name, given, (made.dtype,), tuple(made.shape), x.device)
        payload = payload if out is None else out.copy_(payload)
        scale = scale if out_scale is None else out_scale.copy_(scale)
    if zero_scale:
        bits = payload.view(torch.uint8) & (0x77 if format == "e2m1" else 0x7F)
        blocks = (scale.shape[-1], BLOCK // FORMATS[format].per_byte)
        is_zero = (bits.unflatten(-1, blocks) == 0).all(-1)
        scale.masked_fill_(is_zero & (scale == 0), zero_scale)
    return payload, scale


@in_clear
def quantize_dual(
    x: Tensor,
    *,
    mode: str = "rceil",
    block: Block = BLOCK,
    format: str = "e4m3",
    scale_layout: str = "row_major",
) -> Dual:
    """Quantise along the last dimension and along the one before, in one read of x.

    Training wants both: the forward GEMM reduces over one dimension of a tensor, a backward GEMM
    over the other. With ``block=(32, 32)`` both have the same elements, each under the same scale.

    Args:
        x: ``[..., M, N]``, both multiples of 32; otherwise and for the options see ``quantize``.
        mode: ``"rceil"``, ``"floor"`` or ``"even"``.
        block: 32 or (32, 32).
        format: ``"e4m3"``, ``"e2m1"`` or ``"e5m2"``.
        scale_layout: of both scales.

    Returns:
        what ``quantize(x)`` and ``quantize(x, axis=-2)`` return.

    Raises:
        TypeError, ValueError: as ``quantize`` does.
    """
    refuse_no_tensor(x=x)
    options = Options("both", mode, _is_square(block), format, scale_layout)
    if not is_traced((x,)):
        return Dual(*quantized(x, None, options))
    return Dual(*_quantize_dual(x, mode, options.square, format, scale_layout))


@in_clear
def quantize_dual_batched(
    x: Tensor,
    *,
    mode: str = "rceil",
    block: Block = BLOCK,
    format: str = "e4m3",
    scale_layout: str = "row_major",
) -> Dual:
    """``quantize_dual`` of each of G matrices, such as the weights of experts, in one launch.

    Args:
        x: ``[G, M, N]``, M and N multiples of 32; for the options see ``quantize``.
        mode: ``"rceil"``, ``"floor"`` or ``"even"``.
        block: 32 or (32, 32).
        format: ``"e4m3"``, ``"e2m1"`` or ``"e5m2"``.
        scale_layout: of both scales, of each matrix.

    Returns:
        rows ``[G, M, N]`` and columns ``[G, N, M]``, with their scales.

    Raises:
        TypeError, ValueError: as ``quantize`` does, or x has not three dimensions.
    """
    refuse_no_tensor(x=x)
    if x.dim() != 3:
        raise ValueError(f"x must have three dimensions, [G, M, N], got {list(x.shape)}")
    return quantize_dual(x, mode=mode, block=block, format=format, scale_layout=scale_layout)


@in_clear
def quantize_grouped(
    x: Tensor,
    group_offs: Tensor,
    axis: int = -1,
    *,
    mode: str = "rceil",
    format: str = "e4m3",
    scale_layout: str = "row_major",
) -> Grouped:
    """Quantise groups of rows, each padded with zeros to a multiple of 128 rows.

    Padded offsets are computed on the GPU: the host reads nothing, so the outputs have as many
    rows as padding could make of ``T`` rows in ``G`` groups, P = (T + 127 G) // 128 * 128. Rows
    after the last group are zeros as well. A captured call follows offsets that change.

    Args:
        x: ``[T, N]``, N a multiple of 32.
        group_offs: group g is rows ``group_offs[g]`` to ``group_offs[g + 1] - 1``: int32 or int64
            ``[G + 1]`` on x's device, not decreasing, within 0 and T. Wrong ones read nothing
            outside x; what they give is not defined.
        axis: -1, or -2 for blocks along the rows of a group, as ``grouped_gemm_wgrad`` has them.
        mode: ``"rceil"``, ``"floor"`` or ``"even"``.
        format: ``"e4m3"``, ``"e2m1"`` or ``"e5m2"``.
        scale_layout: as in ``quantize``.

    Returns:
        payload, scales, and the padded groups' offsets, of group_offs's dtype.

    Raises:
        TypeError, ValueError: as ``quantize`` does; group_offs of another dtype, shape or device.
    """
    refuse_no_tensor(x=x, group_offs=group_offs)
    if axis not in (-1, -2):
        raise ValueError(f"axis must be -1 or -2, got {axis}")
    options = Options(_ALONG[axis], mode, False, format, scale_layout)
    if not is_traced((x, group_offs)):
        return Grouped(*quantized(x, group_offs, options))
    return Grouped(*_quantize_grouped(x, group_offs, mode, format, scale_layout, axis))


@in_clear
def quantize_dual_grouped(
    x: Tensor,
    group_offs: Tensor,
    *,
    mode: str = "rceil",
    format: str = "e4m3",
    scale_layout: str = "row_major",
    pad_rows: bool = True,
) -> DualGrouped:
    """``quantize_grouped`` along rows and along columns, in one read of x.

    Args:
        x: ``[T, N]``.
        group_offs: ``[G + 1]``.
        mode: ``"rceil"``, ``"floor"`` or ``"even"``.
        format: ``"e4m3"``, ``"e2m1"`` or ``"e5m2"``.
        scale_layout: of both scales.
        pad_rows: False: rows stay where they are in x, as products over rows take them, and the
            columns alone are padded. Then scales are row-major, and what rows of no group become
            is not defined.

    Returns:
        rows ``[P, N]`` (``[T, N]`` without ``pad_rows``), columns ``[N, P]``, their scales, and the
        padded groups' offsets. A block of a column lies within one group, as groups begin at
        multiples of 128.

    Raises:
        TypeError, ValueError: as ``quantize_grouped`` does.
    """
    refuse_no_tensor(x=x, group_offs=group_offs)
    if not pad_rows and scale_layout != "row_major":
        raise ValueError(f"pad_rows=False takes row-major scales, not {scale_layout!r}")
    padded = "both" if pad_rows else "columns"
    options = Options("both", mode, False, format, scale_layout, padded)
    if not is_traced((x, group_offs)):
        return DualGrouped(*quantized(x, group_offs, options))
    return DualGrouped(*_quantize_dual_grouped(x, group_offs, mode, format, scale_layout, padded))


def dequantize(
    payload: Tensor,
    scale: Tensor,
    dtype: torch.dtype = torch.float32,
    *,
    scale_layout: str = "row_major",
) -> Tensor:
    """The values of an MX tensor.

    Args:
        payload: ``[..., K]``, float8_e4m3fn or float8_e5m2, K a multiple of 32; or e2m1, uint8
            ``[..., K // 2]``.
        scale: ``[..., K // 32]``, uint8 or float8_e8m0fnu; byte 255 makes its block NaN.
        dtype: float32, float64, bfloat16 or float16.
        scale_layout: of the scales, which then are as ``quantize`` returns them.

    Returns:
        ``[..., K]`` of ``dtype``, exact where ``dtype`` holds the value, else rounded once to
        nearest even; finite values beyond its largest number become that.

    Raises:
        TypeError: an argument that is no tensor, or a dtype that is none of the above.
        ValueError: the shapes do not fit each other, nor the devices, or there is no such layout.
    """
    refuse_no_tensor(payload=payload, scale=scale)
    per_byte = format_of(payload).per_byte
    if dtype not in OUTPUT_DTYPES:
        raise TypeError(f"dtype must be float32, float64, bfloat16 or float16, got {dtype}")
    scale_bytes = as_scale_bytes(scale)
    if scale.device != payload.device:
        raise ValueError(f"scale is on {scale.device}, but payload is on {payload.device}")
    layout_of(scale_layout, "scale_layout")
    K = payload.shape[-1] * per_byte if payload.dim() else 0
    if scale_layout != "row_major" and payload.dim():
        rows = payload.shape[-2] if payload.dim() > 1 else 1
        scale_bytes = unshuffle_scales(scale_bytes, scale_layout, rows, K // BLOCK)
        if payload.dim() == 1:
            scale_bytes = scale_bytes[0]
    if payload.dim() == 0 or K % BLOCK or scale_bytes.shape != (*payload.shape[:-1], K // BLOCK):
        raise ValueError(
            f"payload must be [..., K], K a multiple of {BLOCK}, and scale [..., K // {BLOCK}]; "
            f"got payload {list(payload.shape)} and scale {list(scale.shape)}"
        )
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = dequantize_block_scaled(payload, scale_bytes, wide)
    most = torch.finfo(dtype).max
    if payload.dtype != torch.float8_e5m2:
        return values.clamp_(-most, most).to(dtype)
    is_infinite = payload.float().isinf()  # and stays so, where the scale is no NaN
    return torch.where(is_infinite, values, values.clamp(-most, most)).to(dtype)


def _padded(x: Tensor, dim: int, multiple: int) -> Tensor:
    """x with zeros behind it along a dimension."""
    if multiple != _WIDE:
        raise ValueError(f"multiple must be {BLOCK} or {_WIDE}, got {multiple!r}")
    if x.dim() < -dim:
        raise ValueError(f"x must have {-dim} dimensions, got {list(x.shape)}")
    missing = -x.shape[dim] % multiple
    return torch.nn.functional.pad(x, (0, missing) if dim == -1 else (0, 0, 0, missing))


def _is_square(block: Block) -> bool:
    block = as_whole_number(block)
    if block not in (BLOCK, (1, BLOCK), (BLOCK, BLOCK)):
        raise ValueError(f"block must be {BLOCK} or ({BLOCK}, {BLOCK}), got {block!r}")
    return block == (BLOCK, BLOCK)


Call = tuple[Tensor, Tensor | None, Options]
_ALONG = {-1: "rows", -2: "columns"}


def _register(name: str, schema: str, call_of: Callable[..., Call]) -> Callable[..., Any]:
    """torch's op of a quantisation, of whose arguments ``call_of`` makes those of ``quantized``."""

    def run(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(quantized(*call_of(*arguments)))

    def fake(*arguments: Any) -> tuple[Tensor, ...]:
        x, offsets, options = call_of(*arguments)
        outputs = empty_outputs(x, offsets, check(x, offsets, options)[1], options)
        return tuple(tensor for tensor in outputs if tensor is not None)

    return register(name, schema, run, fake)


def _one(
    x: Tensor,
    mode: str,
    axis: int = -1,
    square: bool = False,
    format: str = "e4m3",
    layout: str = "row_major",
) -> Call:
    return x, None, Options(_ALONG[axis], mode, square, format, layout)


_quantize = _register(
    "quantize",
    "(Tensor x, str mode, SymInt axis=-1, bool square=False, str format='e4m3', "
    "str layout='row_major') -> (Tensor, Tensor)",
    _one,
)
_quantize_dual = _register(
    "quantize_dual",
    "(Tensor x, str mode, bool square, str format, str layout) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda x, *options: (x, None, Options("both", *options)),
)
_quantize_grouped = _register(
    "quantize_grouped",
    "(Tensor x, Tensor group_offs, str mode, str format, str layout, SymInt axis=-1) "
    "-> (Tensor, Tensor, Tensor)",
    lambda x, offsets, mode, format, layout, axis=-1: (
        x,
        offsets,
        Options(_ALONG[axis], mode, False, format, layout),
    ),
)
_quantize_dual_grouped = _register(
    "quantize_dual_grouped",
    "(Tensor x, Tensor group_offs, str mode, str format, str layout, str padded='both') "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda x, offsets, mode, *names: (x, offsets, Options("both", mode, False, *names)),
)
