// Quantisation along rows, columns, or both in one read of x, on Hopper; what it computes, and its
// arguments, are those of tiles.cu.
//
// Scales that leave in pieces smaller than a sector of 32 bytes cost far more than their size. So a
// workgroup goes down a strip of kSteps tiles and keeps the scales of their columns, and a cluster
// of kCluster workgroups takes strips side by side and gathers the scales of rows:
//
//              strip 0  strip 1  ...  strip kCluster - 1
//   step 0     |tile   |tile   |     |tile   |  each workgroup gets the scales that all found for
//   step 1     |tile   |tile   |     |tile   |  kOwnRows of the rows, and stores them a step later
//
// A launch may begin before the one ahead of it in the stream ends.
//
// Scales travel through distributed shared memory to where a barrier counts their bytes. A place is
// written once, so that no workgroup waits for another before it sends; and none ends before all
// that is sent to it has come.

#include "groups.h"
#include "sm90/tma.h"
#include "tile_sm90.h"

using namespace mx;

constexpr int kSteps = MX_STEPS; // tiles of a strip
constexpr int kCluster = MX_CLUSTER;
constexpr int kOwnRows = kTileRows / kCluster;
constexpr int kOwnBytes = kOwnRows * kScaleColumns; // of their scales, from one workgroup
constexpr int kGatheredColumns = kCluster * kScaleColumns;
static_assert(!kGrouped || kTileRows == kGroupRows);

struct Shared {
    alignas(16) unsigned char columns[2][kColumnsBytes]; // of every other step
    alignas(16) unsigned char row_scales[2][kTileRows][kScaleColumns];
    alignas(16) unsigned char gathered[kSteps][kCluster][kOwnRows][kScaleColumns];
    alignas(16) unsigned char column_scales[kTileColumns][kSteps * kScaleRows + 4]; // other banks
    alignas(8) unsigned long barriers[kSteps];
    TileRows groups_rows[kSteps];
};

MX_DEVICE unsigned barrier_of(const Shared& shared, int step) {
    return shared_address(&shared.barriers[step]);
}

// The scales of a row in one tile.
template <int Bytes>
struct RowScales;
template <>
struct RowScales<4> {
    using Word = unsigned;
};
template <>
struct RowScales<2> {
    using Word = unsigned short;
};
template <>
struct RowScales<1> {
    using Word = unsigned char;
};

// Sends the scales of a step's rows to the workgroups of the cluster that store them.
MX_DEVICE void send_row_scales(const Shared& shared, int step) {
    constexpr int words = kOwnBytes / 4;
    for (int i = thread_in_group(); i < kCluster * words; i += kThreads) {
        const unsigned char* from = shared.row_scales[step % 2][0] + i * 4;
        const unsigned to = shared_address(shared.gathered[step][rank_in_cluster()][0]);
        store_async(address_in_cluster(to + i % words * 4, i / words),
                    *reinterpret_cast<const unsigned*>(from),
                    address_in_cluster(barrier_of(shared, step), i / words));
    }
}

// Stores the scales that a step has gathered: rows from first_row, columns from `first`.
MX_DEVICE void store_gathered(const Shared& shared, int step, unsigned char* to, unsigned first_row,
                              unsigned first, unsigned rows, unsigned columns) {
    using Word = RowScales<kScaleColumns>::Word;
    barrier_wait(barrier_of(shared, step), 0);
    const bool in_words = columns % kScaleColumns == 0;
    for (int i = thread_in_group(); i < kOwnRows * kCluster; i += kThreads) {
        const int r = i / kCluster, rank = i % kCluster;
        const unsigned row = first_row + r, column = first + rank * kScaleColumns;
        const unsigned char* from = shared.gathered[step][rank][r];
        unsigned char* at = to + static_cast<Offset>(row) * columns + column;
        if (row >= rows)
            continue;
        if (in_words && column < columns)
            *reinterpret_cast<Word*>(at) = *reinterpret_cast<const Word*>(from);
        for (int c = 0; !in_words && c < kScaleColumns && column + c < columns; ++c)
            at[c] = from[c];
    }
}

// One beyond the last row that a step's scales are stored for.
MX_DEVICE unsigned end_of_rows(const Shared& shared, int step, unsigned rows) {
    if constexpr (!kRowsAsRead)
        return rows;
    const TileRows& found = shared.groups_rows[step];
    return found.first + found.count;
}

// The rows of a strip's tiles, each of which a wave finds.
MX_DEVICE void find_rows(const Groups& groups, unsigned first, void* padded, Shared& shared) {
    static_assert(kSteps <= kThreads / kLanes);
    const int wave = wave_in_group();
    if (wave < kSteps) {
        const TileRows found = rows_of_tile(groups, first + wave, wave == 0 ? padded : nullptr);
        if (thread_in_group() % kLanes == 0)
            shared.groups_rows[wave] = found;
    }
    group_barrier();
}

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, kResident)
    aiter_mx_quantize_tiles(const unsigned char* x, const void* offsets, unsigned char* rows,
                            unsigned char* row_scales, unsigned char* columns,
                            unsigned char* column_scales, void* padded_offsets, unsigned M,
                            unsigned N, unsigned matrices, unsigned x_rows, unsigned tiles_down,
                            unsigned tiles_across, unsigned scale_rows, unsigned scale_columns,
                            unsigned column_scale_rows, unsigned column_scale_columns, unsigned,
                            unsigned groups, int wide) {
    // Which strip of which matrix, and which of its tiles.
    const unsigned strips = (tiles_down + kSteps - 1) / kSteps;
    const unsigned runs = (tiles_across + kCluster - 1) / kCluster;
    const Offset id = group_y() * kMaxGridX + group_x();
    if (id / kCluster >= static_cast<Offset>(runs) * strips * matrices)
        return; // with all of its cluster
    const unsigned number = static_cast<unsigned>(id / kCluster) / runs;
    const unsigned run = static_cast<unsigned>(id / kCluster) - number * runs;
    const unsigned across = run * kCluster + static_cast<unsigned>(id % kCluster);
    const unsigned matrix = number / strips, first = (number - matrix * strips) * kSteps;
    const int steps = bytes_left(tiles_down, first, kSteps);

    MX_LDS Shared shared;
    if (kCluster > 1) {
        if (thread_in_group() == 0) {
            for (int step = 0; step < kSteps; ++step) {
                barrier_init(barrier_of(shared, step), 1);
                barrier_arrive_expect(barrier_of(shared, step), kCluster * kOwnBytes);
            }
            fence_barrier_init();
        }
        cluster_arrive_relaxed();
    }
    launch_dependents();
    wait_for_grid_ahead();
    if constexpr (kGrouped)
        find_rows({offsets, wide != 0, groups, x_rows}, first, id == 0 ? padded_offsets : nullptr,
                  shared);

    const Offset column = static_cast<Offset>(across) * kTileColumns;
    x += column * sizeof(In);
    rows += (static_cast<Offset>(matrix) * M * N + column) * MX_BITS / 8;
    columns += (static_cast<Offset>(matrix) * N + column) * M * MX_BITS / 8;
    row_scales += static_cast<Offset>(matrix) * scale_rows * scale_columns;
    column_scales += static_cast<Offset>(matrix) * column_scale_rows * column_scale_columns;

    Tile tile{M, N, 0, 0, bytes_left(N, column, kTileColumns)};
    Ahead ahead;
    const auto ask_for_step = [&](int step) {
        const unsigned row = (first + step) * kTileRows;
        Offset from_row = static_cast<Offset>(matrix) * M + row;
        tile.rows_in = bytes_left(M, row, kTileRows);
        if constexpr (kGrouped) {
            from_row = shared.groups_rows[step].first;
            tile.rows_in = shared.groups_rows[step].count;
        }
        ask_for(x + from_row * N * sizeof(In), tile, ahead);
    };
    ask_for_step(0);
    for (int step = 0; step < steps; ++step) {
        const unsigned row = (first + step) * kTileRows;
        u32x4 pieces[kRows];
        ahead.take(pieces);
        if (step + 1 < steps)
            ask_for_step(step + 1);

        tile.rows_out = bytes_left(M, row, kTileRows);
        if constexpr (kRowsAsRead)
            tile.rows_in = shared.groups_rows[step].count;
        const unsigned to_row = kRowsAsRead ? shared.groups_rows[step].first : row;
        unsigned char* rows_at = rows + static_cast<Offset>(to_row) * N * MX_BITS / 8;
        unsigned char* columns_at = columns + static_cast<Offset>(row) * MX_BITS / 8;
        unsigned char* kept_columns = shared.columns[step % 2];
        unsigned char* kept_row_scales = shared.row_scales[step % 2][0];
        unsigned char* kept_column_scales = &shared.column_scales[0][step * kScaleRows];
        constexpr int pitch = sizeof(shared.column_scales[0]);
        const bool padding = kGrouped && shared.groups_rows[step].count == 0;
        if (padding) {
            for (int i = thread_in_group(); i < kTileRows * kScaleColumns; i += kThreads)
                kept_row_scales[i] = 0;
            for (int i = thread_in_group(); i < kTileColumns * kScaleRows; i += kThreads)
                kept_column_scales[i / kScaleRows * pitch + i % kScaleRows] = 0;
            if constexpr (kToRows && !kRowsAsRead)
                store_zeros<kTileColumns * MX_BITS / 128>(rows_at, tile.rows_out,
                                                          static_cast<Offset>(N) * MX_BITS / 8,
                                                          tile.columns * MX_BITS / 8);
            if constexpr (kToColumns)
                store_zeros<kChunks>(columns_at, tile.columns, static_cast<Offset>(M) * MX_BITS / 8,
                                     kColumnBytes);
        } else {
            convert<pitch>(pieces, tile, tile.is_whole(), rows_at, kept_row_scales, kept_columns,
                           kept_column_scales);
        }
        if (kCluster > 1 && step == 0)
            cluster_wait(); // barriers of the others are there
        group_barrier();    // the only one of a step: what it wrote rests for the next one

        const unsigned first_scale = run * kGatheredColumns;
        if constexpr (kCluster > 1) {
            send_row_scales(shared, step);
        } else if constexpr (kToRows) {
            store_scales<kScaleColumns>(shared.row_scales[step % 2], 0, row_scales, to_row,
                                        first_scale, first_scale + kScaleColumns,
                                        end_of_rows(shared, step, scale_rows), scale_columns);
        }
        if (kToColumns && !padding) {
            if (tile.is_whole())
                store_columns<false>(columns_at, tile, kept_columns);
            else
                store_columns<true>(columns_at, tile, kept_columns);
        }
        // A step later, and at last at once.
        if constexpr (kCluster > 1) {
            for (int sent = step - 1; sent <= step; ++sent)
                if (sent >= 0 && (sent < step || step + 1 == steps))
                    store_gathered(shared, sent, row_scales,
                                   (kRowsAsRead ? shared.groups_rows[sent].first
                                                : (first + sent) * kTileRows) +
                                       rank_in_cluster() * kOwnRows,
                                   first_scale, end_of_rows(shared, sent, scale_rows),
                                   scale_columns);
        }
    }
    if constexpr (kToColumns) {
        const unsigned block = first * kScaleRows;
        store_scales<kSteps * kScaleRows>(shared.column_scales, 0, column_scales, column, block,
                                          block + steps * kScaleRows, column_scale_rows,
                                          column_scale_columns);
    }
}
