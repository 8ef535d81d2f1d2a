// Quantisation along rows and columns in one read of x, on Hopper, with row-major scales; what it
// computes, and what its arguments are, tiles.cu says.
//
// A tile has 4 scales (fp32: 2) of each of its rows and 4 of each of its columns, and writing a
// piece of a sector costs as much as writing the sector. So every tile leaves its scales in the
// workspace, where they lie together,
//
//     of rows     [matrices][tiles down][tiles across][kTileRows][kScaleColumns]
//     of columns  [matrices][tiles across][tiles down][kTileColumns][kScaleRows]
//
// and the next launch, scales_sm90.cu, brings them to their places out of the L2. With
// MX_ROWS_AS_READ there are behind them, for each of the tiles down, the rows of x that it holds.
//
// A workgroup takes one tile. As there are three on an SM, one waits for memory while another
// computes. A launch may begin before the one ahead of it in the stream ends.

#include "groups.h"
#include "tile_sm90.h"

using namespace mx;

static_assert(kToRows && kToColumns && kTileRows == kGroupRows && kLayout == kRowMajor);

struct Shared {
    alignas(16) unsigned char columns[kColumnsBytes];
    alignas(16) unsigned char scales[kRowScales + kColumnScales];
};

extern "C" __global__ void __launch_bounds__(kThreads, kResident)
    aiter_mx_quantize_staged(const unsigned char* x, const void* offsets, unsigned char* rows,
                             unsigned char*, unsigned char* columns, unsigned char*,
                             void* padded_offsets, unsigned char* staged, unsigned M, unsigned N,
                             unsigned x_rows, unsigned groups, int wide) {
    const unsigned tiles_across = gridDim.x, tiles_down = gridDim.y, matrices = gridDim.z;
    const unsigned across = blockIdx.x, down = blockIdx.y, matrix = blockIdx.z;
    const unsigned row = down * kTileRows;
    const Offset column = static_cast<Offset>(across) * kTileColumns;
    MX_LDS Shared shared;
    launch_dependents();
    wait_for_grid_ahead();

    Tile tile{M, N, 0, bytes_left(M, row, kTileRows), bytes_left(N, column, kTileColumns)};
    tile.rows_in = tile.rows_out;
    const Offset out_row = static_cast<Offset>(matrix) * M + row;
    Offset from_row = out_row;
    if constexpr (kGrouped) {
        const bool reports = across + down == 0 && wave_in_group() == 0;
        const TileRows found = rows_of_tile({offsets, wide != 0, groups, x_rows}, down,
                                            reports ? padded_offsets : nullptr);
        from_row = found.first;
        tile.rows_in = found.count;
    }
    const bool whole = tile.is_whole();
    if (kRowsAsRead && across == 0 && thread_in_group() == 0)
        *reinterpret_cast<TileRows*>(
            staged + static_cast<Offset>(tiles_down) * tiles_across * (kRowScales + kColumnScales) +
            down * sizeof(TileRows)) = {from_row, tile.rows_in};
    x += (from_row * N + column) * sizeof(In);
    rows += ((kRowsAsRead ? from_row : out_row) * N + column) * MX_BITS / 8;
    columns += ((static_cast<Offset>(matrix) * N + column) * M + row) * MX_BITS / 8;

    if (kGrouped && tile.rows_in == 0) { // padding alone
        for (int i = thread_in_group(); i < (kRowScales + kColumnScales) / 4; i += kThreads)
            reinterpret_cast<unsigned*>(shared.scales)[i] = 0;
        if constexpr (!kRowsAsRead)
            store_zeros<kTileColumns * MX_BITS / 128>(
                rows, kTileRows, static_cast<Offset>(N) * MX_BITS / 8, tile.columns * MX_BITS / 8);
        store_zeros<kChunks>(columns, tile.columns, static_cast<Offset>(M) * MX_BITS / 8,
                             kColumnBytes);
    } else {
        Ahead ahead;
        if (whole && (!kGrouped || tile.rows_in == kTileRows))
            ask_for_whole(x, tile, ahead);
        else
            ask_for(x, tile, ahead);
        u32x4 pieces[kRows];
        ahead.take(pieces);
        rows = afresh(rows); // which saves e2m1 the only spill
        convert<kScaleRows>(pieces, tile, whole, rows, shared.scales, shared.columns,
                            shared.scales + kRowScales);
    }
    group_barrier();

    if (const unsigned at = thread_in_group() * 16; at < kRowScales + kColumnScales) {
        const Offset row_tile =
            (static_cast<Offset>(matrix) * tiles_down + down) * tiles_across + across;
        const Offset column_tile =
            (static_cast<Offset>(matrix) * tiles_across + across) * tiles_down + down;
        const Offset of_rows =
            static_cast<Offset>(matrices) * tiles_down * tiles_across * kRowScales;
        const Offset to = at < kRowScales ? row_tile * kRowScales
                                          : of_rows + column_tile * kColumnScales - kRowScales;
        *reinterpret_cast<Words<4>*>(staged + to + at) =
            *reinterpret_cast<const Words<4>*>(shared.scales + at);
    }
    if (kGrouped && tile.rows_in == 0)
        return;
    if (whole)
        store_columns<false>(columns, tile, shared.columns);
    else
        store_columns<true>(columns, tile, shared.columns);
}
