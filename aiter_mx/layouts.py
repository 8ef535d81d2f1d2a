"""Layouts of e8m0 scales, row-major and those that peers' GEMMs read, and the ways between them.

A matrix of scales has one row for each row of its payload and one column for each block of 32. A
layout other than ``row_major`` pads it with zeros to whole tiles, stores the tiles row by row, and
reorders each of them:

========== ====== ========= ============================================= ======================
layout     tile   padded to order in a tile, the last varies fastest      read by
========== ====== ========= ============================================= ======================
``16x4``   16x4   16x4      column, row                                   Primus-Turbo
``256x8``  32x8   256x8     column % 4, row % 16, column // 4, row // 16  aiter, e8m0_shuffle
``32_8``   32x8   32x8      the same                                      torch, SWIZZLE_32_8
``32_4_4`` 128x4  128x4     row % 32, row // 32, column                   torch, SWIZZLE_32_4_4
========== ====== ========= ============================================= ======================

``16x4`` gives lane ``16 g + r`` of a scaled matrix instruction the scale that it needs at its own
number; Primus-Turbo widens each to 32 bits, ``.to(torch.int32)``. A layout is always an argument: a
tensor that remembered its own would lose it on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ScaleLayout:
    """A layout of scales.

    Attributes:
        code: its number in csrc/include/common/scale.h.
        pad_rows: rows are padded to a multiple of this.
        pad_columns: columns likewise.
        split: a tile as row and column factors, slowest first: (rows, ..., columns, ...).
        row_factors: how many of them are of the rows.
        order: the factors as stored, slowest first.
    """

    code: int
    pad_rows: int
    pad_columns: int
    split: tuple[int, ...] = (1, 1)
    row_factors: int = 1
    order: tuple[int, ...] = (0, 1)


LAYOUTS = {
    "row_major": ScaleLayout(0, 1, 1),
    "16x4": ScaleLayout(1, 16, 4, (16, 4), 1, (1, 0)),
    "32_8": ScaleLayout(2, 32, 8, (2, 16, 2, 4), 2, (3, 1, 2, 0)),
    "256x8": ScaleLayout(2, 256, 8, (2, 16, 2, 4), 2, (3, 1, 2, 0)),
    "32_4_4": ScaleLayout(3, 128, 4, (4, 32, 4), 2, (1, 0, 2)),
}


def layout_of(name: str, argument: str = "the layout") -> ScaleLayout:
    """The layout called ``name``.

    Args:
        name: one of ``LAYOUTS``.
        argument: what named it, for the message.

    Raises:
        ValueError: there is none of that name.
    """
    if not isinstance(name, str) or name not in LAYOUTS:
        raise ValueError(f"{argument} must be one of {', '.join(LAYOUTS)}, got {name!r}")
    return LAYOUTS[name]


def padded_shape(rows: int, columns: int, layout: str) -> tuple[int, int]:
    """Rows and columns of a matrix of scales once it is padded for a layout."""
    found = layout_of(layout)
    return (
        -(-rows // found.pad_rows) * found.pad_rows,
        -(-columns // found.pad_columns) * found.pad_columns,
    )


def shuffle_scales(scales: Tensor, layout: str) -> Tensor:
    """Row-major scales in another layout.

    Args:
        scales: ``[..., rows, columns]``, uint8 or float8_e8m0fnu.
        layout: one of ``LAYOUTS``.

    Returns:
        ``[..., padded rows, padded columns]`` of the same dtype, contiguous, zeros where padded.
        Its memory is in the layout's order; peers that want a flat tensor take its ``flatten()``.

    Raises:
        TypeError: no tensor, or of another dtype.
        ValueError: no such layout, or fewer than two dimensions.

    Example:
        >>> shuffle_scales(torch.zeros(100, 6, dtype=torch.uint8), "256x8").shape
        torch.Size([256, 8])
    """
    import torch

    _check(scales)
    found = layout_of(layout)
    rows, columns = scales.shape[-2:]
    shape = (*scales.shape[:-2], *padded_shape(rows, columns, layout))
    padded = scales.new_zeros(shape, dtype=torch.uint8)
    padded[..., :rows, :columns] = scales.view(torch.uint8)
    return _reorder(padded, found, back=False).view(shape).view(scales.dtype)


def unshuffle_scales(scales: Tensor, layout: str, rows: int, columns: int) -> Tensor:
    """Scales of a layout, row-major again and without the padding.

    Args:
        scales: as ``shuffle_scales`` returns them, or with the two last dimensions flattened.
        layout: the one that they are in.
        rows: rows of the matrix before it was padded.
        columns: columns likewise.

    Returns:
        ``[..., rows, columns]`` of the same dtype, contiguous.

    Raises:
        TypeError: no tensor, or of another dtype.
        ValueError: no such layout, or another number of scales.
    """
    import torch

    _check(scales, at_least=1)
    found = layout_of(layout)
    shape = padded_shape(rows, columns, layout)
    if tuple(scales.shape[-2:]) == shape:
        leading = scales.shape[:-2]
    elif scales.shape[-1] == shape[0] * shape[1]:
        leading = scales.shape[:-1]
    else:
        raise ValueError(
            f"{rows}x{columns} scales in layout {layout!r} are {list(shape)}, flattened or not, "
            f"in the last dimensions; got {list(scales.shape)}"
        )
    stored = scales.contiguous().view(torch.uint8).view(*leading, *shape)
    matrix = _reorder(stored, found, back=True).view(*leading, *shape)
    return matrix[..., :rows, :columns].contiguous().view(scales.dtype)


def _reorder(matrix: Tensor, layout: ScaleLayout, back: bool) -> Tensor:
    """The matrix with each tile in the layout's order, or back; contiguous, of another shape."""
    split, count = layout.split, layout.row_factors
    tile_rows, tile_columns = _product(split[:count]), _product(split[count:])
    leading = matrix.dim() - 2
    down, across = matrix.shape[-2] // tile_rows, matrix.shape[-1] // tile_columns
    # Dimensions of the matrix: tiles down, row factors, tiles across, column factors.
    factors = [1 + i for i in range(count)] + [2 + i for i in range(count, len(split))]
    stored = [0, count + 1, *(factors[i] for i in layout.order)]
    sizes = (down, *split[:count], across, *split[count:])
    order = [*range(leading), *(leading + i for i in stored)]
    if not back:
        return matrix.reshape(*matrix.shape[:-2], *sizes).permute(order).contiguous()
    in_storage = matrix.reshape(*matrix.shape[:-2], *(sizes[i] for i in stored))
    inverse = [order.index(i) for i in range(len(order))]
    return in_storage.permute(inverse).contiguous()


def _product(factors: tuple[int, ...]) -> int:
    product = 1
    for factor in factors:
        product *= factor
    return product


def _check(scales: Tensor, at_least: int = 2) -> None:
    from torch import Tensor

    from aiter_mx.codec import SCALE_DTYPES

    if not isinstance(scales, Tensor):
        raise TypeError(f"scales must be a tensor, got {type(scales).__name__}")
    if scales.dtype not in SCALE_DTYPES:
        raise TypeError(f"scales must be uint8 or float8_e8m0fnu, got {scales.dtype}")
    if scales.dim() < at_least:
        raise ValueError(f"scales must be [..., rows, columns], got {list(scales.shape)}")
