// Where a scale is stored: row-major, or in tiles whose order suits matrix instructions. The same
// layouts as in aiter_mx/layouts.py; their tiles follow each other row by row.
#pragma once

#include "common/target.h"

namespace mx {

enum ScaleLayout { kRowMajor = 0, k16x4 = 1, k32x8 = 2, k128x4 = 3 };

template <ScaleLayout Layout>
struct ScaleTile {
    static constexpr unsigned kRows = Layout == k16x4 ? 16 : Layout == k32x8 ? 32 : 128;
    static constexpr unsigned kColumns = Layout == k32x8 ? 8 : 4;
};

// Offset of a scale within a matrix of so many columns, both as padded to whole tiles.
template <ScaleLayout Layout>
MX_DEVICE unsigned long scale_offset(unsigned long row, unsigned long column,
                                     unsigned long columns) {
    if constexpr (Layout == kRowMajor)
        return row * columns + column;
    using Tile = ScaleTile<Layout>;
    const unsigned long tile =
        row / Tile::kRows * (columns / Tile::kColumns) + column / Tile::kColumns;
    const unsigned r = row % Tile::kRows, c = column % Tile::kColumns;
    const unsigned inside = Layout == k16x4   ? c * 16 + r
                            : Layout == k32x8 ? c % 4 * 64 + r % 16 * 4 + c / 4 * 2 + r / 16
                                              : r % 32 * 16 + r / 32 * 4 + c;
    return tile * (Tile::kRows * Tile::kColumns) + inside;
}

} // namespace mx
