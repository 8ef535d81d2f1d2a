// Quantisation along rows, columns, or both in one read of x; also in 32 x 32 blocks, of groups of
// rows, and with scales in any layout.
//
//   x        [matrices, M, N]                fp32, bf16 or fp16
//   rows     [matrices, M, N]                payload with a scale for each 32 n
//   columns  [matrices, N, M]                payload with a scale for each 32 m, transposed
//   scales   [matrices, M, N/32] and [matrices, N, M/32], padded as their layout demands
//
// With groups there is one matrix; the rows of each group of x are followed in the outputs by zeros
// up to a multiple of kGroupRows, and M counts the rows of the outputs.
//
// A workgroup takes kTileRows x kTileColumns; each lane of it 8 rows by 16 bytes, kColumnLanes
// lanes side by side, kRowLanes below each other:
//
//            16 bytes each
//   rows 0-7   |lane 0|lane 1|...|lane 7|
//   rows 8-15  |lane 8|lane 9|...
//
// so that loads take whole lines, a row's block is kBlockLanes neighbours, a column's four lanes
// that are kColumnLanes apart, and each lane has 8 consecutive bytes of each of its columns. These
// go through LDS, to leave it as lines of 128 rows.

#include "mx_groups.h"
#include "mx_piece.h"
#include "mx_scale_layout.h"

using namespace mx;

using In = DType<MX_IN>;
using Format = FormatOfBits<MX_BITS>::type;
using Offset = unsigned long;
constexpr ScaleMode kMode = static_cast<ScaleMode>(MX_MODE);
constexpr bool kToRows = MX_TO_ROWS, kToColumns = MX_TO_COLUMNS;
constexpr bool kSquare = MX_SQUARE; // one scale for 32 x 32
constexpr bool kGrouped = MX_GROUPED;
constexpr ScaleLayout kLayout = static_cast<ScaleLayout>(MX_LAYOUT);
constexpr Offset kMaxGridX = MX_MAX_GRID_X; // tiles beyond it continue in the grid's y

constexpr int kBlock = 32, kThreads = 256;
constexpr int kResident = MX_RESIDENT;                // workgroups of a compute unit
constexpr int kColumns = kPieceValues<In>, kRows = 8; // of a lane
constexpr int kColumnLanes = 8, kRowLanes = kLanes / kColumnLanes;
constexpr int kBlockLanes = kBlock / kColumns;
constexpr int kWaveRows = kRows * kRowLanes, kWaveColumns = kColumns * kColumnLanes;
constexpr int kTileRows = kGroupRows, kWavesDown = kTileRows / kWaveRows;
constexpr int kTileColumns = kThreads / kLanes / kWavesDown * kWaveColumns;
constexpr int kScaleRows = kTileRows / kBlock, kScaleColumns = kTileColumns / kBlock;

// A column of the tile in LDS: chunks of 16 bytes, displaced so that lanes that write or read
// together do not meet in a bank.
constexpr int kColumnBytes = kTileRows * MX_BITS / 8, kChunks = kColumnBytes / 16;
MX_DEVICE unsigned column_at(unsigned column, unsigned byte) {
    const unsigned chunk = (byte / 16 + column / kColumns * (kRowLanes / 2)) % kChunks;
    return column * kColumnBytes + chunk * 16 + byte % 16;
}

struct Shared {
    alignas(16) unsigned char columns[kToColumns ? kTileColumns * kColumnBytes : 16];
    unsigned char row_scales[kTileRows][kScaleColumns];
    unsigned char column_scales[kTileColumns][kScaleRows];
};

// Packed maxima over the lanes that share a block of rows.
MX_DEVICE unsigned max_of_block_rows(unsigned x) {
    x = packed_max_across<In, kColumnLanes>(x);
    return packed_max_across<In, 2 * kColumnLanes>(x);
}

// The part of a matrix that a workgroup works on.
struct Tile {
    Offset from_row; // of x
    unsigned rows_in, rows_out, columns;
};

// Reads the tile's x, writes its rows, and leaves columns and scales in LDS. x and rows begin at
// the tile.
template <bool Bounded>
MX_DEVICE void quantize_tile(const unsigned char* x, unsigned char* rows, Offset N,
                             const Tile& tile, Shared& shared) {
    const int lane = thread_in_group() % kLanes, wave = wave_in_group();
    const unsigned row = wave % kWavesDown * kWaveRows + lane / kColumnLanes * kRows;
    const unsigned column = wave / kWavesDown * kWaveColumns + lane % kColumnLanes * kColumns;
    const unsigned row_bytes = N * sizeof(In), out_row_bytes = N * MX_BITS / 8;
    const unsigned rows_in = !Bounded || column < tile.columns ? tile.rows_in : 0;
    const unsigned rows_out = !Bounded || column < tile.columns ? tile.rows_out : 0;

    const Slice<Bounded> in(x, kBeyond - 1);
    u32x4 pieces[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const unsigned at = (row + i) * row_bytes + column * sizeof(In);
        pieces[i] = in.load_once(!Bounded || row + i < rows_in ? at : kBeyond);
    }

    BlockScale square_scale;
    if constexpr (kSquare) {
        unsigned largest = packed_amax_of_piece<In>(pieces[0]);
#pragma unroll
        for (int i = 1; i < kRows; ++i)
            largest = packed_max<In>(largest, packed_amax_of_piece<In>(pieces[i]));
        largest = largest_magnitude<In>(max_of_block_rows(largest));
        square_scale = block_scale<Format, kMode>(max_of_lanes<kBlockLanes>(largest));
    }

    if constexpr (kToRows) {
        const Slice<Bounded> out(rows, kBeyond - 1);
#pragma unroll
        for (int pair = 0; pair < kRows; pair += 2) {
            unsigned amax[2] = {};
            if constexpr (!kSquare)
                amax_of_blocks<In, kBlockLanes>(pieces[pair], pieces[pair + 1], amax[0], amax[1]);
#pragma unroll
            for (int i = pair; i < pair + 2; ++i) {
                const BlockScale scale =
                    kSquare ? square_scale : block_scale<Format, kMode>(amax[i - pair]);
                const unsigned at = (row + i) * out_row_bytes + column * MX_BITS / 8;
                out.store(!Bounded || row + i < rows_out ? at : kBeyond,
                          piece_to_payload<Format, kMode, In>(pieces[i], scale));
                if (lane % kBlockLanes == 0)
                    shared.row_scales[row + i][column / kBlock] = scale.byte;
                finish_before_next(); // side by side they would take too many registers
            }
        }
    }

    if constexpr (kToColumns) {
        unsigned char* to = shared.columns + column_at(column, row * MX_BITS / 8);
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            BlockScale scales[2] = {square_scale, square_scale};
            if constexpr (!kSquare) {
                unsigned largest = packed_magnitude<In>(pieces[0][word]);
#pragma unroll
                for (int i = 1; i < kRows; ++i)
                    largest = packed_max<In>(largest, packed_magnitude<In>(pieces[i][word]));
                largest = max_of_block_rows(largest);
                scales[0] = block_scale<Format, kMode>(unpacked_magnitude<In, 0>(largest));
                scales[1] = block_scale<Format, kMode>(unpacked_magnitude<In, 1>(largest));
            }
            const int first = word * kColumns / 4;
            Words<MX_BITS / 4> payload[kColumns / 4];
            columns_to_payload<Format, kMode, In>(pieces, word, scales, payload);
#pragma unroll
            for (int i = 0; i < kColumns / 4; ++i)
                *reinterpret_cast<Words<MX_BITS / 4>*>(to + (first + i) * kColumnBytes) =
                    payload[i];
            if (row % kBlock == 0) {
#pragma unroll
                for (int half = 0; half < kColumns / 4; ++half)
                    shared.column_scales[column + first + half][row / kBlock] = scales[half].byte;
            }
            finish_before_next();
        }
    }
}

// The tile's columns from LDS, where columns begin at the tile.
template <bool Bounded>
MX_DEVICE void store_columns(unsigned char* columns, Offset M, const Tile& tile,
                             const Shared& shared) {
    constexpr unsigned chunk_rows = 16 * 8 / MX_BITS, step = kThreads / kChunks;
    const unsigned chunk = thread_in_group() % kChunks, first = thread_in_group() / kChunks;
    const Offset column_bytes = M * MX_BITS / 8;
    if (Bounded && chunk * chunk_rows >= tile.rows_out)
        return;
    unsigned char* to = columns + first * column_bytes + chunk * 16;
#pragma unroll
    for (unsigned n = first; n < kTileColumns; n += step) {
        if (!Bounded || n < tile.columns)
            *reinterpret_cast<Words<4>*>(to) =
                *reinterpret_cast<const Words<4>*>(shared.columns + column_at(n, chunk * 16));
        to += step * column_bytes;
    }
}

// A tile's scales to a matrix of scales, [rows, columns] as padded, of which the tile begins at
// (first_row, first_column).
template <int Rows, int Columns>
MX_DEVICE void store_scales(const unsigned char (&from)[Rows][Columns], unsigned char* to,
                            Offset first_row, Offset first_column, Offset rows, Offset columns) {
    constexpr bool along_columns = kLayout == k16x4 || kLayout == k32x8; // neighbours in memory
#pragma unroll
    for (int i = thread_in_group(); i < Rows * Columns; i += kThreads) {
        const unsigned r = along_columns ? i % Rows : i / Columns;
        const unsigned c = along_columns ? i / Rows : i % Columns;
        if (first_row + r < rows && first_column + c < columns)
            to[scale_offset<kLayout>(first_row + r, first_column + c, columns)] = from[r][c];
    }
}

MX_KERNEL_RESIDENT(kThreads, kResident)
aiter_mx_quantize_tiles(const unsigned char* x, const void* offsets, unsigned char* rows,
                        unsigned char* row_scales, unsigned char* columns,
                        unsigned char* column_scales, void* padded_offsets, Offset M, Offset N,
                        Offset matrices, Offset x_rows, Offset tiles_down, Offset tiles_across,
                        Offset scale_rows, Offset scale_columns, Offset column_scale_rows,
                        Offset column_scale_columns, int groups, int wide) {
    const Offset id = group_y() * kMaxGridX + group_x();
    if (id >= tiles_down * tiles_across * matrices)
        return;
    const unsigned strip = static_cast<unsigned>(id) / static_cast<unsigned>(tiles_across);
    const unsigned across = id - strip * tiles_across;
    const unsigned matrix = strip / static_cast<unsigned>(tiles_down);
    const unsigned down = strip - matrix * static_cast<unsigned>(tiles_down);
    const Offset first_row = static_cast<Offset>(down) * kTileRows;
    const Offset first_column = static_cast<Offset>(across) * kTileColumns;

    Tile tile;
    tile.rows_out = tile.rows_in = bytes_left(M, first_row, kTileRows);
    tile.columns = bytes_left(N, first_column, kTileColumns);
    tile.from_row = matrix * M + first_row;
    if constexpr (kGrouped) {
        const TileRows found =
            rows_of_tile<kThreads>({offsets, wide != 0, static_cast<unsigned>(groups), x_rows},
                                   down, id == 0 ? padded_offsets : nullptr);
        tile.from_row = found.first;
        tile.rows_in = found.count;
    }

    MX_LDS Shared shared;
    x += (tile.from_row * N + first_column) * sizeof(In);
    rows += ((matrix * M + first_row) * N + first_column) * MX_BITS / 8;
    columns += ((matrix * N + first_column) * M + first_row) * MX_BITS / 8;
    const bool whole = tile.rows_in == kTileRows && tile.columns == kTileColumns;
    if (!kBoundsCostNothing && whole)
        quantize_tile<false>(x, rows, N, tile, shared);
    else
        quantize_tile<true>(x, rows, N, tile, shared);
    group_barrier();
    if constexpr (kToColumns) {
        if (whole)
            store_columns<false>(columns, M, tile, shared);
        else
            store_columns<true>(columns, M, tile, shared);
        store_scales(shared.column_scales,
                     column_scales + matrix * column_scale_rows * column_scale_columns,
                     first_column, first_row / kBlock, column_scale_rows, column_scale_columns);
    }
    if constexpr (kToRows)
        store_scales(shared.row_scales, row_scales + matrix * scale_rows * scale_columns, first_row,
                     first_column / kBlock, scale_rows, scale_columns);
}
