// A tile of quantisation, for kernels that work on tiles: its loads, its conversion along rows and
// columns, its stores. The kernel's compile-time parameters, MX_..., are the includer's.
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
// go through LDS, to leave it as lines of kTileRows rows.
#pragma once

#include "common/packed.h"
#include "common/scale.h"

namespace mx {

// Pieces of 16 bytes that a lane has asked for and will take later: what is under way while a
// workgroup works on something else. On Hopper they wait in shared memory, each lane's where no
// other lane looks, so that no barrier is needed; on CDNA4, which has the registers, there.

template <int Count, int Threads>
class Incoming {
  public:
#if defined(__AMDGCN__)
    static constexpr int kSharedBytes = 0;

    // Asks for piece i: of a slice at an offset, zeros beyond it.
    MX_MEMBER void ask(int i, const Slice<true>& from, unsigned offset) {
        pieces[i] = from.load_once(offset);
    }
    MX_MEMBER void ask_there(int i, const unsigned char* from) {
        pieces[i] = *reinterpret_cast<const u32x4*>(from);
    }
    MX_MEMBER void asked() {}
    // All pieces, after which the next ones may be asked for.
    MX_MEMBER void take(u32x4 (&taken)[Count]) {
#pragma unroll
        for (int i = 0; i < Count; ++i)
            taken[i] = pieces[i];
    }

  private:
    u32x4 pieces[Count];
#else
    static constexpr int kSharedBytes = Count * Threads * 16; // of dynamic shared memory

    MX_MEMBER void ask(int i, const Slice<true>& from, unsigned offset) {
        const unsigned size = offset < kBeyond ? 16 : 0; // of what is read, the rest is zeros
        asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(place(i)),
                     "l"(from.address(size ? offset : 0)), "r"(size)
                     : "memory");
    }
    // Asks for 16 bytes that are there.
    MX_MEMBER void ask_there(int i, const unsigned char* from) {
        asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(place(i)), "l"(from)
                     : "memory");
    }
    MX_MEMBER void asked() { asm volatile("cp.async.commit_group;" ::: "memory"); }
    MX_MEMBER void take(u32x4 (&taken)[Count]) {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
#pragma unroll
        for (int i = 0; i < Count; ++i)
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(taken[i].words[0]), "=r"(taken[i].words[1]),
                           "=r"(taken[i].words[2]), "=r"(taken[i].words[3])
                         : "r"(place(i))
                         : "memory");
    }

  private:
    static MX_MEMBER unsigned place(int i) {
        extern __shared__ uint4 incoming[];
        return static_cast<unsigned>(
            __cvta_generic_to_shared(incoming + i * Threads + thread_in_group()));
    }
#endif
};

using In = DType<MX_IN>;
using Format = FormatOfBits<MX_BITS>::type;
using Offset = unsigned long;
constexpr ScaleMode kMode = static_cast<ScaleMode>(MX_MODE);
constexpr bool kToRows = MX_TO_ROWS, kToColumns = MX_TO_COLUMNS;
constexpr bool kSquare = MX_SQUARE; // one scale for 32 x 32
constexpr bool kGrouped = MX_GROUPED;
#ifndef MX_ROWS_AS_READ
#define MX_ROWS_AS_READ 0
#endif
constexpr bool kRowsAsRead = MX_ROWS_AS_READ; // with groups: rows go where they are in x, unpadded
constexpr ScaleLayout kLayout = static_cast<ScaleLayout>(MX_LAYOUT);
constexpr Offset kMaxGridX = MX_MAX_GRID_X; // tiles beyond it continue in the grid's y

constexpr int kBlock = 32, kThreads = 256;
constexpr int kResident = MX_RESIDENT;                // workgroups of a compute unit
constexpr int kColumns = kPieceValues<In>, kRows = 8; // of a lane
constexpr int kColumnLanes = 8, kRowLanes = kLanes / kColumnLanes;
constexpr int kBlockLanes = kBlock / kColumns;
constexpr int kWaveRows = kRows * kRowLanes, kWaveColumns = kColumns * kColumnLanes;
constexpr int kTileRows = MX_TILE_ROWS, kWavesDown = kTileRows / kWaveRows;
constexpr int kTileColumns = kThreads / kLanes / kWavesDown * kWaveColumns;
constexpr int kScaleRows = kTileRows / kBlock, kScaleColumns = kTileColumns / kBlock;

// A column of the tile in LDS: chunks of 16 bytes, displaced so that lanes that write or read
// together do not meet in a bank.
constexpr int kColumnBytes = kTileRows * MX_BITS / 8, kChunks = kColumnBytes / 16;
MX_DEVICE unsigned column_at(unsigned column, unsigned byte) {
    const unsigned chunk = (byte / 16 + column / kColumns) % kChunks;
    return column * kColumnBytes + chunk * 16 + byte % 16;
}
constexpr int kColumnsBytes = kToColumns ? kTileColumns * kColumnBytes : 16;

// How much there is of one tile of a matrix of M x N: fewer rows of the input than of the outputs
// where a group is padded.
struct Tile {
    unsigned M, N;
    unsigned rows_in, rows_out, columns;

    // Those that there are along rows.
    MX_MEMBER unsigned rows_stored() const { return kRowsAsRead ? rows_in : rows_out; }
    MX_MEMBER bool is_whole() const {
        return rows_out == kTileRows && rows_stored() == kTileRows && columns == kTileColumns;
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

// Asks for a tile that begins at x.
using Ahead = Incoming<kRows, kThreads>;
MX_DEVICE void ask_for(const unsigned char* x, const Tile& tile, Ahead& ahead) {
    const Part part = own_part();
    const unsigned row_bytes = afresh(tile.N) * sizeof(In);
    const unsigned rows = part.column < tile.columns ? tile.rows_in : 0;
    const Slice<true> in(x, kBeyond - 1);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const unsigned at = (part.row + i) * row_bytes + part.column * sizeof(In);
        ahead.ask(i, in, part.row + i < rows ? at : kBeyond);
    }
    ahead.asked();
}

// Asks for a tile all of which is there.
MX_DEVICE void ask_for_whole(const unsigned char* x, const Tile& tile, Ahead& ahead) {
    const Part part = own_part();
    const Offset row_bytes = static_cast<Offset>(afresh(tile.N)) * sizeof(In);
    x += part.row * row_bytes + part.column * sizeof(In);
#pragma unroll
    for (int i = 0; i < kRows; ++i)
        ahead.ask_there(i, x + i * row_bytes);
    ahead.asked();
}

// Packed maxima over the lanes that share a block of rows.
MX_DEVICE unsigned max_of_block_rows(unsigned x) {
    x = packed_max_across<In, kColumnLanes>(x);
    return packed_max_across<In, 2 * kColumnLanes>(x);
}

MX_DEVICE unsigned packed_amax_of_pieces(const u32x4 (&pieces)[kRows]) {
    unsigned largest = packed_amax_of_piece<In>(pieces[0]);
#pragma unroll
    for (int i = 1; i < kRows; ++i)
        largest = packed_max<In>(largest, packed_amax_of_piece<In>(pieces[i]));
    return largest;
}

// The largest magnitudes of a lane's rows in bf16, two rows a word.
struct RowMaxima {
    unsigned pairs[kRows / 2] = {};
};
MX_DEVICE RowMaxima row_maxima(const u32x4 (&pieces)[kRows]) {
    RowMaxima maxima;
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i)
        maxima.pairs[i] = packed_amax_of_two<In>(pieces[2 * i], pieces[2 * i + 1]);
    return maxima;
}
// True if a tile is whole and has no NaN or infinity where this wave is.
MX_DEVICE bool is_whole_and_finite(const Tile& tile, const RowMaxima& maxima) {
    const unsigned (&pairs)[kRows / 2] = maxima.pairs;
    const unsigned largest =
        max_halves(max_halves(pairs[0], pairs[1]), max_halves(pairs[2], pairs[3]));
    return !any_lane(!tile.is_whole() || has_not_finite(largest));
}

MX_DEVICE BlockScale scale_of_square(const u32x4 (&pieces)[kRows]) {
    const unsigned amax = max_of_block_rows(packed_amax_of_pieces(pieces));
    return block_scale<Format, kMode>(max_of_lanes<kBlockLanes>(largest_magnitude<In>(amax)));
}

// Payload to memory, where it begins with the tile, and scales to LDS, where rows of them are Pitch
// apart. With Finite there is no NaN or infinity, and the rows' maxima are known.
template <bool Bounded, bool Finite, int Pitch>
MX_DEVICE void to_rows(const u32x4 (&pieces)[kRows], BlockScale square, unsigned char* rows,
                       const Tile& tile, unsigned char* row_scales, const RowMaxima& maxima) {
    const Part part = own_part();
    const unsigned row_bytes = afresh(tile.N) * MX_BITS / 8;
    const unsigned there = !Bounded || part.column < tile.columns ? tile.rows_stored() : 0;
    row_scales += part.row * Pitch + part.column / kBlock;
    const Slice<Bounded> out(rows, kBeyond - 1);
#pragma unroll
    for (int pair = 0; pair < kRows; pair += 2) {
        BlockScale scales[2] = {square, square};
        if constexpr (!kSquare && Finite) {
            finite_block_scales<Format, kMode>(
                packed_max_of_lanes<In, kBlockLanes>(maxima.pairs[pair / 2]), scales);
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
                      piece_to_payload<Format, kMode, In, Finite>(pieces[i], scale));
            if (part.column % kBlock == 0)
                row_scales[i * Pitch] = scale.byte;
            finish_before_next(); // side by side they would take too many registers
        }
    }
}

// Payload and scales to LDS, where columns of scales are Pitch apart.
template <bool Finite, int Pitch>
MX_DEVICE void to_columns(const u32x4 (&pieces)[kRows], BlockScale square, unsigned char* columns,
                          unsigned char* column_scales) {
    const Part part = own_part();
    columns += column_at(part.column, part.row * MX_BITS / 8);
    column_scales += part.column * Pitch + part.row / kBlock;
#pragma unroll
    for (int word = 0; word < 4; ++word) {
        BlockScale scales[2] = {square, square};
        if constexpr (!kSquare) {
            PackedAmax<In> amax(pieces[0][word]);
#pragma unroll
            for (int i = 1; i < kRows; ++i)
                amax.add(pieces[i][word]);
            const unsigned largest = max_of_block_rows(amax.found());
            if constexpr (Finite) {
                finite_block_scales<Format, kMode>(largest, scales);
            } else {
                scales[0] = block_scale<Format, kMode>(unpacked_magnitude<In, 0>(largest));
                scales[1] = block_scale<Format, kMode>(unpacked_magnitude<In, 1>(largest));
            }
        }
        const int first = word * kColumns / 4;
        Words<MX_BITS / 4> payload[kColumns / 4];
        columns_to_payload<Format, kMode, In, Finite>(pieces, word, scales, payload);
#pragma unroll
        for (int i = 0; i < kColumns / 4; ++i) {
            *reinterpret_cast<Words<MX_BITS / 4>*>(columns + (first + i) * kColumnBytes) =
                payload[i];
            if (part.row % kBlock == 0)
                column_scales[(first + i) * Pitch] = scales[i].byte;
        }
        finish_before_next();
    }
}

// The tile's columns from LDS to memory, where they begin with the tile.
template <bool Bounded>
MX_DEVICE void store_columns(unsigned char* to, const Tile& tile, const unsigned char* columns) {
    constexpr unsigned chunk_rows = 16 * 8 / MX_BITS, step = kThreads / kChunks;
    const unsigned chunk = thread_in_group() % kChunks, first = thread_in_group() / kChunks;
    const Offset column_bytes = static_cast<Offset>(afresh(tile.M)) * MX_BITS / 8;
    if (Bounded && chunk * chunk_rows >= tile.rows_out)
        return;
    to += first * column_bytes + chunk * 16;
#pragma unroll
    for (unsigned n = first; n < kTileColumns; n += step) {
        if (!Bounded || n < tile.columns)
            *reinterpret_cast<Words<4>*>(to) =
                *reinterpret_cast<const Words<4>*>(columns + column_at(n, chunk * 16));
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
    if constexpr (kLayout == kRowMajor && Columns % 4 == 0 && Pitch % 4 == 0) {
        constexpr unsigned words = Columns / 4;
        if ((columns | first | count | skipped) % 4 == 0) {
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

} // namespace mx
