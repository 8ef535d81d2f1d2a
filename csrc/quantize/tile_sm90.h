// What Hopper's kernels over tiles have alike beyond tile.h: how they convert a tile, and the sizes
// of its scales.
#pragma once

#include "tile.h"

namespace mx {

constexpr int kRowScales = kTileRows * kScaleColumns, kColumnScales = kTileColumns * kScaleRows;

// Lines of zeros, of at most Chunks times 16 bytes each.
template <int Chunks>
MX_DEVICE void store_zeros(unsigned char* to, unsigned lines, Offset pitch, unsigned line_bytes) {
    for (unsigned i = thread_in_group(); i < lines * Chunks; i += kThreads)
        if (i % Chunks * 16 < line_bytes)
            *reinterpret_cast<Words<4>*>(to + i / Chunks * pitch + i % Chunks * 16) = {};
}

// Payload of rows to memory, where it begins with the tile; that of columns and all scales to LDS,
// where those of columns are Pitch apart. whole: whether the tile is.
template <int Pitch>
MX_DEVICE void convert(const u32x4 (&pieces)[kRows], const Tile& tile, bool whole,
                       unsigned char* rows, unsigned char* row_scales, unsigned char* columns,
                       unsigned char* column_scales) {
    BlockScale square{};
    if constexpr (kSquare)
        square = scale_of_square(pieces);
    // A path of its own for tiles without bounds and NaN saves instructions.
    constexpr bool in_pairs = kScalesInPairs<In>;
    RowMaxima maxima;
    bool simple = whole;
    if constexpr (in_pairs) {
        maxima = row_maxima(pieces);
        simple = is_whole_and_finite(tile, maxima);
    }
    if (simple) {
        if constexpr (kToRows)
            to_rows<false, in_pairs, kScaleColumns>(pieces, square, rows, tile, row_scales, maxima);
        if constexpr (kToColumns)
            to_columns<in_pairs, Pitch>(pieces, square, columns, column_scales);
    } else {
        if constexpr (kToRows)
            to_rows<true, false, kScaleColumns>(pieces, square, rows, tile, row_scales, maxima);
        if constexpr (kToColumns)
            to_columns<false, Pitch>(pieces, square, columns, column_scales);
    }
}

} // namespace mx
