// Quantisation along rows, columns, or both in one read of x; also in 32 x 32 blocks, of groups of
// rows, and with scales in any layout.
//
//   x        [matrices, M, N]                fp32, bf16 or fp16
//   rows     [matrices, M, N]                payload with a scale for each 32 n
//   columns  [matrices, N, M]                payload with a scale for each 32 m, transposed
//   scales   [matrices, M, N/32] and [matrices, N, M/32], padded as their layout demands
//
// With groups there is one matrix; the rows of each group of x are followed in the outputs by zeros
// up to a multiple of kGroupRows, and M counts the rows of the outputs. With MX_ROWS_AS_READ that
// is so of the columns alone, and rows are where they are in x.
//
// A workgroup works on a strip of tiles side by side (tile.h), the next one under way
// meanwhile. Hopper's kernel of this name is tiles_sm90.cu.

#include "groups.h"
#include "tile.h"

using namespace mx;

static_assert(!kGrouped || kTileRows == kGroupRows);

// Scales of so many tiles side by side are kept and stored as whole sectors of 32 bytes.
constexpr int kSpan = kLayout == kRowMajor ? kBlock / kScaleColumns : 1;
constexpr int kRowPitch = kSpan * kScaleColumns + 4; // in other banks

struct Shared {
    alignas(16) unsigned char columns[kColumnsBytes];
    alignas(16) unsigned char row_scales[kTileRows][kRowPitch];
    alignas(16) unsigned char column_scales[kTileColumns][kScaleRows];
};

MX_KERNEL_RESIDENT(kThreads, kResident)
aiter_mx_quantize_tiles(const unsigned char* x, const void* offsets, unsigned char* rows,
                        unsigned char* row_scales, unsigned char* columns,
                        unsigned char* column_scales, void* padded_offsets, unsigned M, unsigned N,
                        unsigned matrices, unsigned x_rows, unsigned tiles_down,
                        unsigned tiles_across, unsigned scale_rows, unsigned scale_columns,
                        unsigned column_scale_rows, unsigned column_scale_columns, unsigned steps,
                        unsigned groups, int wide) {
    // Which strip of which matrix, and which of its tiles.
    const unsigned runs = (tiles_across + steps - 1) / steps;
    const Offset id = group_y() * kMaxGridX + group_x();
    if (id >= static_cast<Offset>(runs) * tiles_down * matrices)
        return;
    const unsigned number = static_cast<unsigned>(id) / runs;
    const unsigned first = (static_cast<unsigned>(id) - number * runs) * steps;
    const unsigned end = first + bytes_left(tiles_across, first, steps);
    const unsigned matrix = number / tiles_down, down = number - matrix * tiles_down;

    const unsigned row = down * kTileRows;
    Tile tile{M, N};
    tile.rows_out = tile.rows_in = bytes_left(M, row, kTileRows);
    const Offset out_row = static_cast<Offset>(matrix) * M + row;
    Offset from_row = out_row;
    if constexpr (kGrouped) {
        const TileRows found = rows_of_tile({offsets, wide != 0, groups, x_rows}, down,
                                            id == 0 ? padded_offsets : nullptr);
        from_row = found.first;
        tile.rows_in = found.count;
    }
    x += from_row * N * sizeof(In);
    rows += (kRowsAsRead ? from_row : out_row) * N * MX_BITS / 8;
    row_scales += static_cast<Offset>(matrix) * scale_rows * scale_columns;
    columns += (static_cast<Offset>(matrix) * N * M + row) * MX_BITS / 8;
    column_scales += static_cast<Offset>(matrix) * column_scale_rows * column_scale_columns;

    MX_LDS Shared shared;
    const auto columns_of = [&](unsigned across) {
        return bytes_left(N, static_cast<Offset>(across) * kTileColumns, kTileColumns);
    };
    Ahead ahead;
    tile.columns = columns_of(first);
    ask_for(x + static_cast<Offset>(first) * kTileColumns * sizeof(In), tile, ahead);
    unsigned kept_from = first; // the first tile whose rows' scales are only in LDS
    for (unsigned across = first; across < end; ++across) {
        const Offset column = static_cast<Offset>(across) * kTileColumns;
        u32x4 pieces[kRows];
        ahead.take(pieces);
        if (across + 1 < end) {
            tile.columns = columns_of(across + 1);
            ask_for(x + (column + kTileColumns) * sizeof(In), tile, ahead);
        }
        tile.columns = columns_of(across);

        BlockScale square{};
        if constexpr (kSquare)
            square = scale_of_square(pieces);
        unsigned char* rows_at = rows + column * MX_BITS / 8;
        unsigned char* scales_at = &shared.row_scales[0][across % kSpan * kScaleColumns];
        unsigned char* column_scales_at = &shared.column_scales[0][0];
        if constexpr (kToRows)
            to_rows<true, false, kRowPitch>(pieces, square, rows_at, tile, scales_at, {});
        if constexpr (kToColumns)
            to_columns<false, kScaleRows>(pieces, square, shared.columns, column_scales_at);
        group_barrier();

        if constexpr (kToColumns) {
            unsigned char* at = columns + column * M * MX_BITS / 8;
            store_columns<true>(at, tile, shared.columns);
            const unsigned block = row / kBlock;
            store_scales<kScaleRows>(shared.column_scales, 0, column_scales, column, block,
                                     block + kScaleRows, column_scale_rows, column_scale_columns);
        }
        if constexpr (kToRows) {
            const unsigned next = across + 1;
            if (next == end || next % kSpan == 0) {
                store_scales<kSpan * kScaleColumns>(
                    shared.row_scales, kept_from % kSpan * kScaleColumns, row_scales,
                    kRowsAsRead ? from_row : row, kept_from * kScaleColumns, next * kScaleColumns,
                    kRowsAsRead ? from_row + tile.rows_in : scale_rows, scale_columns);
                kept_from = next;
            }
        }
        if (across + 1 < end)
            group_barrier(); // before LDS is written again
    }
}
