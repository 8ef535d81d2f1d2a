"""Scale layouts against their definitions, one scale at a time."""

from __future__ import annotations

import pytest
import torch

import aiter_mx
from aiter_mx.layouts import LAYOUTS, padded_shape

SHAPES = ((1, 1), (16, 4), (37, 11), (128, 8), (300, 20))


def offset(layout: str, row: int, column: int, columns: int) -> int:
    """Where a scale is stored, in a matrix of so many columns after padding."""
    if layout == "row_major":
        return row * columns + column
    if layout == "16x4":  # Primus-Turbo: lane 16 * (column % 4) + row % 16 of a tile
        return (row // 16 * (columns // 4) + column // 4) * 64 + column % 4 * 16 + row % 16
    if layout == "32_4_4":  # cuBLAS: 128 rows as 32 lines of four groups of four
        tile = row // 128 * (columns // 4) + column // 4
        return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
    # aiter: digits of row (32, 2, 16) and column (8, 2, 4), as (row 32, column 8, 4, 16, 2, 2)
    tile = row // 32 * (columns // 8) + column // 8
    inside = ((column % 4 * 16 + row % 16) * 2 + column % 8 // 4) * 2 + row % 32 // 16
    return tile * 256 + inside


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_scale_is_where_the_definition_has_it(layout: str) -> None:
    draw = torch.Generator().manual_seed(1)
    for rows, columns in SHAPES:
        scales = torch.randint(1, 256, (rows, columns), generator=draw).to(torch.uint8)
        shuffled = aiter_mx.shuffle_scales(scales, layout)
        assert shuffled.shape == padded_shape(rows, columns, layout)
        expected = torch.zeros(shuffled.numel(), dtype=torch.uint8)
        for row in range(rows):
            for column in range(columns):
                at = offset(layout, row, column, shuffled.shape[1])
                expected[at] = scales[row, column]
        assert torch.equal(shuffled.flatten(), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_come_back(layout: str, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(2)
    for rows, columns in SHAPES:
        scales = torch.randint(0, 256, (2, 3, rows, columns), generator=draw).to(torch.uint8)
        shuffled = aiter_mx.shuffle_scales(scales.view(dtype), layout)
        assert shuffled.dtype == dtype and shuffled.is_contiguous()
        for stored in (shuffled, shuffled.flatten(-2)):
            back = aiter_mx.unshuffle_scales(stored, layout, rows, columns)
            assert back.dtype == dtype
            assert torch.equal(back.view(torch.uint8), scales)


def test_layouts_refuse_what_they_cannot_hold() -> None:
    scales = torch.zeros(16, 4, dtype=torch.uint8)
    with pytest.raises(ValueError, match="one of row_major, 16x4, 32_8, 256x8, 32_4_4, got '8x8'"):
        aiter_mx.shuffle_scales(scales, "8x8")
    with pytest.raises(TypeError, match=r"got torch\.int32"):
        aiter_mx.shuffle_scales(scales.int(), "16x4")
    with pytest.raises(TypeError, match="scales must be a tensor, got list"):
        aiter_mx.shuffle_scales(scales.tolist(), "16x4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\[\.\.\., rows, columns\], got \[4\]"):
        aiter_mx.shuffle_scales(scales[0], "16x4")
    with pytest.raises(ValueError, match=r"17x4 scales in layout '16x4' are \[32, 4\]"):
        aiter_mx.unshuffle_scales(scales, "16x4", 17, 4)
