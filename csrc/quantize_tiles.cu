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
#include "mx_incoming.h"
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
constexpr int kTileRows = MX_TILE_ROWS, kWavesDown = kTileRows / kWaveRows;
static_assert(!kGrouped || kTileRows == kGroupRows);
constexpr int kTileColumns = kThreads / kLanes / kWavesDown * kWaveColumns;
constexpr int kScaleRows = kTileRows / kBlock, kScaleColumns = kTileColumns / kBlock;

// Scales of so many tiles side by side are kept and stored as whole sectors of 32 bytes.
constexpr int kSpan = kLayout == kRowMajor ? kBlock / kScaleColumns : 1;

// A column of the tile in LDS: chunks of 16 bytes, displaced so that lanes that write or read
// together do not meet in a bank.
constexpr int kColumnBytes = kTileRows * MX_BITS / 8, kChunks = kColumnBytes / 16;
MX_DEVICE unsigned column_at(unsigned column, unsigned byte) {
    const unsigned chunk = (byte / 16 + column / kColumns) % kChunks;
    return column * kColumnBytes + chunk * 16 + byte % 16;
}

struct Shared {
    alignas(16) unsigned char columns[kToColumns ? kTileColumns * kColumnBytes : 16];
    alignas(16) unsigned char row_scales[kTileRows][kSpan * kScaleColumns + 4]; // in other banks
    alignas(16) unsigned char column_scales[kTileColumns][kScaleRows];
};

// Tiles side by side, on which a workgroup works one after the other.
struct Strip {
    unsigned M, N; // of the matrix
    unsigned row;  // the strip's first
    unsigned rows_in, rows_out;
    const unsigned char* x; // the strip's first row

    MX_MEMBER unsigned columns(unsigned across) const {
        return bytes_left(N, static_cast<Offset>(across) * kTileColumns, kTileColumns);
    }
    MX_MEMBER bool is_whole(unsigned across) const {
        return rows_out == kTileRows && columns(across) == kTileColumns;
    }
};

// A lane's part of a tile.
struct Part {
    unsigned row, column;
};
MX_DEVICE Part own_part() {
    const unsigned lane = thread_in_group() % kLanes, wave = wave_in_group();
    return {wave % kWavesDown * kWaveRows + lane / kColumnLanes * kRows,
            wave / kWavesDown * kWaveColumns + lane % kColumnLanes * kColumns};
}

using Ahead = Incoming<kRows, kThreads>;
MX_DEVICE void ask_for(const Strip& strip, unsigned across, Ahead& ahead) {
    const Part part = own_part();
    const unsigned row_bytes = afresh(strip.N) * sizeof(In);
    const unsigned rows = part.column < strip.columns(across) ? strip.rows_in : 0;
    const Slice<true> in(strip.x + static_cast<Offset>(across) * kTileColumns * sizeof(In),
                         kBeyond - 1);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const unsigned at = (part.row + i) * row_bytes + part.column * sizeof(In);
        ahead.ask(i, in, part.row + i < rows ? at : kBeyond);
    }
    ahead.asked();
}

// Packed maxima over the lanes that share a block of rows.
MX_DEVICE unsigned max_of_block_rows(unsigned x) {
    x = packed_max_across<In, kColumnLanes>(x);
    return packed_max_across<In, 2 * kColumnLanes>(x);
}

MX_DEVICE BlockScale scale_of_square(const u32x4 (&pieces)[kRows]) {
    unsigned largest = packed_amax_of_piece<In>(pieces[0]);
#pragma unroll
    for (int i = 1; i < kRows; ++i)
        largest = packed_max<In>(largest, packed_amax_of_piece<In>(pieces[i]));
    largest = largest_magnitude<In>(max_of_block_rows(largest));
    return block_scale<Format, kMode>(max_of_lanes<kBlockLanes>(largest));
}

// A path of its own for tiles without bounds and NaN, where it saves instructions.
constexpr bool kHasFastPath = !kBoundsCostNothing;
MX_DEVICE bool all_finite(const u32x4 (&pieces)[kRows]) {
    if constexpr (!kHasFastPath || !kScalesInPairs<In>)
        return true; // as far as the path is concerned
    unsigned largest = packed_amax_of_piece<In>(pieces[0]);
#pragma unroll
    for (int i = 1; i < kRows; ++i)
        largest = packed_max<In>(largest, packed_amax_of_piece<In>(pieces[i]));
    return !any_not_finite(largest);
}

// Payload to memory, where rows begin at the tile, and scales to LDS. With Finite there is no NaN
// or infinity.
template <bool Bounded, bool Finite>
MX_DEVICE void to_rows(const u32x4 (&pieces)[kRows], BlockScale square, unsigned char* rows,
                       const Strip& strip, unsigned across, Shared& shared) {
    const Part part = own_part();
    const unsigned row_bytes = afresh(strip.N) * MX_BITS / 8;
    const unsigned there = !Bounded || part.column < strip.columns(across) ? strip.rows_out : 0;
    const unsigned scale_column = across % kSpan * kScaleColumns + part.column / kBlock;
    const Slice<Bounded> out(rows, kBeyond - 1);
#pragma unroll
    for (int pair = 0; pair < kRows; pair += 2) {
        BlockScale scales[2] = {square, square};
        if constexpr (!kSquare && Finite) {
            finite_block_scales<Format, kMode>(
                packed_amax_of_blocks<In, kBlockLanes>(pieces[pair], pieces[pair + 1]), scales);
        } else if constexpr (!kSquare) {
            unsigned amax[2];
            amax_of_blocks<In, kBlockLanes>(pieces[pair], pieces[pair + 1], amax[0], amax[1]);
            scales[0] = block_scale<Format, kMode>(amax[0]);
            scales[1] = block_scale<Format, kMode>(amax[1]);
        }
#pragma unroll
        for (int i = pair; i < pair + 2; ++i) {
            const BlockScale scale = scales[i - pair];
            const unsigned at = (part.row + i) * row_bytes + part.column * MX_BITS / 8;
            out.store(!Bounded || part.row + i < there ? at : kBeyond,
                      piece_to_payload<Format, kMode, In>(pieces[i], scale));
            if (part.column % kBlock == 0)
                shared.row_scales[part.row + i][scale_column] = scale.byte;
            finish_before_next(); // side by side they would take too many registers
        }
    }
}

// Payload and scales to LDS.
template <bool Finite>
MX_DEVICE void to_columns(const u32x4 (&pieces)[kRows], BlockScale square, Shared& shared) {
    const Part part = own_part();
    unsigned char* to = shared.columns + column_at(part.column, part.row * MX_BITS / 8);
#pragma unroll
    for (int word = 0; word < 4; ++word) {
        BlockScale scales[2] = {square, square};
        if constexpr (!kSquare) {
            unsigned largest = packed_magnitude<In>(pieces[0][word]);
#pragma unroll
            for (int i = 1; i < kRows; ++i)
                largest = packed_max<In>(largest, packed_magnitude<In>(pieces[i][word]));
            largest = max_of_block_rows(largest);
            if constexpr (Finite) {
                finite_block_scales<Format, kMode>(largest, scales);
            } else {
                scales[0] = block_scale<Format, kMode>(unpacked_magnitude<In, 0>(largest));
                scales[1] = block_scale<Format, kMode>(unpacked_magnitude<In, 1>(largest));
            }
        }
        const int first = word * kColumns / 4;
        Words<MX_BITS / 4> payload[kColumns / 4];
        columns_to_payload<Format, kMode, In>(pieces, word, scales, payload);
#pragma unroll
        for (int i = 0; i < kColumns / 4; ++i) {
            *reinterpret_cast<Words<MX_BITS / 4>*>(to + (first + i) * kColumnBytes) = payload[i];
            if (part.row % kBlock == 0)
                shared.column_scales[part.column + first + i][part.row / kBlock] = scales[i].byte;
        }
        finish_before_next();
    }
}

// The tile's columns from LDS to memory, where columns begin at the tile.
template <bool Bounded>
MX_DEVICE void store_columns(unsigned char* columns, const Strip& strip, unsigned across,
                             const Shared& shared) {
    constexpr unsigned chunk_rows = 16 * 8 / MX_BITS, step = kThreads / kChunks;
    const unsigned chunk = thread_in_group() % kChunks, first = thread_in_group() / kChunks;
    const Offset column_bytes = static_cast<Offset>(afresh(strip.M)) * MX_BITS / 8;
    if (Bounded && chunk * chunk_rows >= strip.rows_out)
        return;
    unsigned char* to = columns + first * column_bytes + chunk * 16;
#pragma unroll
    for (unsigned n = first; n < kTileColumns; n += step) {
        if (!Bounded || n < strip.columns(across))
            *reinterpret_cast<Words<4>*>(to) =
                *reinterpret_cast<const Words<4>*>(shared.columns + column_at(n, chunk * 16));
        to += step * column_bytes;
    }
}

// Scales from LDS to a matrix of them, [rows, columns] as padded; first to end - 1 are the columns
// of the matrix that are in LDS, the first of them at column `skipped` there.
template <int Columns, int Rows, int Pitch>
MX_DEVICE void store_scales(const unsigned char (&from)[Rows][Pitch], unsigned skipped,
                            unsigned char* to, unsigned first_row, unsigned first, unsigned end,
                            unsigned rows, unsigned columns) {
    const unsigned thread = thread_in_group();
    const unsigned count = bytes_left(end < columns ? end : columns, first, Columns);
    const unsigned rows_left = bytes_left(rows, first_row, Rows);
    if constexpr (kLayout == kRowMajor) {
        constexpr unsigned words = Columns / 4;
        if ((columns | count | skipped) % 4 == 0) {
            to += static_cast<Offset>(first_row) * columns + first;
#pragma unroll
            for (unsigned i = thread; i < Rows * words; i += kThreads) {
                const unsigned r = i / words, c = i % words * 4;
                if (r < rows_left && c < count)
                    *reinterpret_cast<Words<1>*>(to + static_cast<Offset>(r) * columns + c) =
                        *reinterpret_cast<const Words<1>*>(&from[r][skipped + c]);
            }
            return;
        }
    }
    constexpr bool along_columns = kLayout == k16x4 || kLayout == k32x8; // neighbours in memory
    for (unsigned i = thread; i < Rows * Columns; i += kThreads) {
        const unsigned r = along_columns ? i % Rows : i / Columns;
        const unsigned c = along_columns ? i / Rows : i % Columns;
        if (r < rows_left && c < count)
            to[scale_offset<kLayout>(first_row + r, first + c, columns)] = from[r][skipped + c];
    }
}

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

    Strip strip{M, N, down * kTileRows};
    strip.rows_out = strip.rows_in = bytes_left(M, strip.row, kTileRows);
    const Offset out_row = static_cast<Offset>(matrix) * M + strip.row;
    Offset from_row = out_row;
    if constexpr (kGrouped) {
        const TileRows found = rows_of_tile<kThreads>({offsets, wide != 0, groups, x_rows}, down,
                                                      id == 0 ? padded_offsets : nullptr);
        from_row = found.first;
        strip.rows_in = found.count;
    }
    strip.x = x + from_row * N * sizeof(In);
    rows += out_row * N * MX_BITS / 8;
    row_scales += static_cast<Offset>(matrix) * scale_rows * scale_columns;
    columns += (static_cast<Offset>(matrix) * N * M + strip.row) * MX_BITS / 8;
    column_scales += static_cast<Offset>(matrix) * column_scale_rows * column_scale_columns;

    MX_LDS Shared shared;
    Ahead ahead;
    ask_for(strip, first, ahead);
    unsigned kept_from = first; // the first tile whose rows' scales are only in LDS
    for (unsigned across = first; across < end; ++across) {
        const Offset column = static_cast<Offset>(across) * kTileColumns;
        u32x4 pieces[kRows];
        ahead.take(pieces);
        if (across + 1 < end)
            ask_for(strip, across + 1, ahead);

        BlockScale square{};
        if constexpr (kSquare)
            square = scale_of_square(pieces);
        unsigned char* rows_at = rows + column * MX_BITS / 8;
        const bool fast = strip.is_whole(across) && all_finite(pieces);
        if (kHasFastPath && fast) {
            if constexpr (kToRows)
                to_rows<false, kScalesInPairs<In>>(pieces, square, rows_at, strip, across, shared);
            if constexpr (kToColumns)
                to_columns<kScalesInPairs<In>>(pieces, square, shared);
        } else {
            if constexpr (kToRows)
                to_rows<true, false>(pieces, square, rows_at, strip, across, shared);
            if constexpr (kToColumns)
                to_columns<false>(pieces, square, shared);
        }
        group_barrier();

        if constexpr (kToColumns) {
            unsigned char* at = columns + column * M * MX_BITS / 8;
            if (strip.is_whole(across))
                store_columns<false>(at, strip, across, shared);
            else
                store_columns<true>(at, strip, across, shared);
            const unsigned block = strip.row / kBlock;
            store_scales<kScaleRows>(shared.column_scales, 0, column_scales, column, block,
                                     block + kScaleRows, column_scale_rows, column_scale_columns);
        }
        if constexpr (kToRows) {
            const unsigned next = across + 1;
            if (next == end || next % kSpan == 0) {
                store_scales<kSpan * kScaleColumns>(
                    shared.row_scales, kept_from % kSpan * kScaleColumns, row_scales, strip.row,
                    kept_from * kScaleColumns, next * kScaleColumns, scale_rows, scale_columns);
                kept_from = next;
            }
        }
        if (across + 1 < end)
            group_barrier(); // before LDS is written again
    }
}
