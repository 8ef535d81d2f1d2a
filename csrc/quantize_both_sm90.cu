// Quantisation along rows and columns in one read of x, on Hopper; what it computes, and its
// arguments, are those of quantize_tiles.cu.
//
// There is one workgroup on an SM, with two teams, and it stays. It works on one block of tiles
// after another:
//
//               kAcross tiles
//              |tile|tile|
//    kDown     |tile|tile|
//
// of which the teams take every other one, the next one under way meanwhile. Scales of a block stay
// in shared memory until all are there, so that they leave in larger pieces; the team that is last
// to end a block stores them, while the other is on the next one.
//
// A launch may begin before the one ahead of it in the stream ends.

#include "mx_quantize_tile.h"
#include "sm90_async.h"
#include "sm90_global.h"

using namespace mx;

constexpr int kAcross = MX_ACROSS, kDown = MX_DOWN;
constexpr unsigned kTiles = kAcross * kDown;
static_assert(kToRows && kToColumns && !kGrouped && kTiles >= kTeams);

struct BlockScales {
    alignas(16) unsigned char rows[kDown * kTileRows][kAcross * kScaleColumns];
    alignas(
        16) unsigned char columns[kAcross * kTileColumns][kDown * kScaleRows + 4]; // other banks
};
struct Shared {
    alignas(16) unsigned char columns[kTeams][kColumnsBytes];
    BlockScales scales[2]; // of every other block
    unsigned ended[2];     // teams that have
    unsigned last[kTeams]; // whether the team was last to end a block
    unsigned stored[2];    // blocks up to this one, of every other block
};
static_assert(Ahead::kSharedBytes + sizeof(Shared) == MX_SHARED_BYTES);

MX_DEVICE bool all_finite(const u32x4 (&pieces)[kRows]) {
    return !any_not_finite(packed_amax_of_pieces(pieces));
}

MX_DEVICE void team_barrier() { named_barrier(1 + team_in_group(), kThreads); }

// Where a block begins.
struct Place {
    unsigned matrix, row;
    Offset column;
};

extern "C" __global__ void __launch_bounds__(kTeams* kThreads, kResident)
    aiter_mx_quantize_both(const unsigned char* x, const void*, unsigned char* rows,
                           unsigned char* row_scales, unsigned char* columns,
                           unsigned char* column_scales, void*, unsigned M, unsigned N,
                           unsigned matrices, unsigned, unsigned tiles_down, unsigned tiles_across,
                           unsigned scale_rows, unsigned scale_columns, unsigned column_scale_rows,
                           unsigned column_scale_columns) {
    extern __shared__ uint4 incoming[];
    Shared& shared = *reinterpret_cast<Shared*>(incoming + Ahead::kSharedBytes / sizeof(uint4));
    const unsigned team = team_in_group(), thread = thread_in_group();
    if (team == 0 && thread < 2)
        shared.ended[thread] = shared.stored[thread] = 0;
    group_barrier();
    launch_dependents();
    wait_for_grid_ahead();

    const unsigned strips = (tiles_down + kDown - 1) / kDown;
    const unsigned runs = (tiles_across + kAcross - 1) / kAcross;
    const unsigned blocks = strips * runs * matrices, stride = gridDim.x;
    const auto place_of = [&](unsigned block) {
        const unsigned number = block / runs, matrix = number / strips;
        return Place{matrix, (number - matrix * strips) * kDown * kTileRows,
                     static_cast<Offset>(block - number * runs) * kAcross * kTileColumns};
    };
    Tile tile{M, N, 0, 0, 0};
    Ahead ahead;
    const auto ask_for_tile = [&](unsigned block, unsigned t) {
        const Place place = place_of(block);
        const unsigned row = place.row + t / kAcross * kTileRows;
        const Offset column = place.column + t % kAcross * kTileColumns;
        tile.rows_in = bytes_left(M, row, kTileRows);
        tile.columns = bytes_left(N, column, kTileColumns);
        ask_for(x + ((static_cast<Offset>(place.matrix) * M + row) * N + column) * sizeof(In), tile,
                ahead);
    };

    unsigned block = group_x(), t = team;
    if (block < blocks)
        ask_for_tile(block, t);
    for (unsigned number = 0; block < blocks; ++number, block += stride) {
        BlockScales& kept = shared.scales[number % 2];
        if (number >= 2) // until the scales of the block before last are stored
            while (load_shared(shared_address(&shared.stored[number % 2])) < number - 1)
                sleep(20);
        __threadfence_block();
        const Place place = place_of(block);
        for (; t < kTiles; t += kTeams) {
            u32x4 pieces[kRows];
            ahead.take(pieces);
            const unsigned next = t + kTeams;
            if (next < kTiles)
                ask_for_tile(block, next);
            else if (block + stride < blocks)
                ask_for_tile(block + stride, next - kTiles);

            const unsigned down = t / kAcross, beside = t % kAcross;
            const unsigned row = place.row + down * kTileRows;
            const Offset column = place.column + beside * kTileColumns;
            tile.rows_out = bytes_left(M, row, kTileRows);
            tile.columns = bytes_left(N, column, kTileColumns);
            unsigned char* rows_at =
                rows + ((static_cast<Offset>(place.matrix) * M + row) * N + column) * MX_BITS / 8;
            unsigned char* columns_at =
                columns +
                ((static_cast<Offset>(place.matrix) * N + column) * M + row) * MX_BITS / 8;
            unsigned char* kept_columns = shared.columns[team];
            unsigned char* row_scales_at = &kept.rows[down * kTileRows][beside * kScaleColumns];
            unsigned char* column_scales_at =
                &kept.columns[beside * kTileColumns][down * kScaleRows];
            constexpr int row_pitch = sizeof(kept.rows[0]), pitch = sizeof(kept.columns[0]);

            BlockScale square{};
            if constexpr (kSquare)
                square = scale_of_square(pieces);
            constexpr bool in_pairs = kScalesInPairs<In>;
            // A path of its own for tiles without bounds and NaN saves instructions.
            const bool simple = tile.is_whole() && (!in_pairs || all_finite(pieces));
            if (simple)
                to_rows<false, in_pairs, row_pitch>(pieces, square, rows_at, tile, row_scales_at);
            else
                to_rows<true, false, row_pitch>(pieces, square, rows_at, tile, row_scales_at);
            team_barrier(); // the columns before have left
            if (simple)
                to_columns<in_pairs, pitch>(pieces, square, kept_columns, column_scales_at);
            else
                to_columns<false, pitch>(pieces, square, kept_columns, column_scales_at);
            team_barrier();
            if (tile.is_whole())
                store_columns<false>(columns_at, tile, kept_columns);
            else
                store_columns<true>(columns_at, tile, kept_columns);
        }
        t -= kTiles;

        if (thread == 0) {
            __threadfence_block();
            shared.last[team] = atomicAdd(&shared.ended[number % 2], 1) == kTeams - 1;
            __threadfence_block();
        }
        team_barrier();
        if (shared.last[team]) {
            const unsigned first = place.column / kBlock, first_block = place.row / kBlock;
            store_scales<kAcross * kScaleColumns>(
                kept.rows, 0,
                row_scales + static_cast<Offset>(place.matrix) * scale_rows * scale_columns,
                place.row, first, first + kAcross * kScaleColumns, scale_rows, scale_columns);
            store_scales<kDown * kScaleRows>(
                kept.columns, 0,
                column_scales +
                    static_cast<Offset>(place.matrix) * column_scale_rows * column_scale_columns,
                place.column, first_block, first_block + kDown * kScaleRows, column_scale_rows,
                column_scale_columns);
            team_barrier();
            if (thread == 0) {
                shared.ended[number % 2] = 0;
                __threadfence_block();
                store_shared(shared_address(&shared.stored[number % 2]), number + 1);
            }
        }
    }
}
