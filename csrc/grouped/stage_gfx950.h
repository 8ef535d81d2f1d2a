// What the grouped kernel holds in LDS: two stages of copied operands, and results on their way.
// Its compile-time parameters, the copies into a stage and the reads from it.
#pragma once

#include "common/scale_layout.h"
#include "common/target.h"
#include "gfx950/copy.h"
#include "gfx950/mfma.h"
#include "groups_gfx950.h"

namespace mx {

constexpr int kTileM = MX_TILE_M;           // rows of x in a tile: 32, 64, 128 or 256
constexpr int kTileN = MX_TILE_N;           // rows of w
constexpr int kScaleBytes = MX_SCALE_BYTES; // of one copy: what K / 32 is a multiple of, at most 4
constexpr bool kShuffledX = MX_X_SCALES == k16x4, kShuffledW = MX_W_SCALES == k16x4; // or row-major
constexpr bool kWholeSteps = MX_WHOLE_STEPS; // K is a multiple of 128
constexpr unsigned kSwath = MX_SWATH;        // rows of tiles that a group's tiles are ordered by
constexpr unsigned kXcds = MX_XCDS;          // dies that workgroups go to in turn; 1 to ignore them
using Out = DType<MX_OUT>;

constexpr int kWaves = 4;
constexpr int kWavesM = kTileM > 32 ? 2 : 1, kWavesN = kWaves / kWavesM;
constexpr int kThreads = kWaves * kLanes;
constexpr unsigned kBlock = 32; // k of one scale
constexpr unsigned kPiece = 16; // bytes of one copy or read of payload
constexpr unsigned kRowPieces = kDepth / kPiece;
constexpr int kFragsX = kTileM / kWavesM / kSide, kFragsW = kTileN / kWavesN / kSide;
constexpr int kHalfX = kFragsX / 2, kHalfW = kFragsW / 2;

// What a wave copies.
constexpr int kRowsX = kTileM / kWaves, kRowsW = kTileN / kWaves;
constexpr int kCopyRows = kLanes / kRowPieces;
constexpr int kCopiesX = kRowsX / kCopyRows, kCopiesW = kRowsW / kCopyRows;
constexpr int kScalePieces = kDepth / kBlock / kScaleBytes; // of one row, each a dword of LDS
constexpr int kScaleCopyRows = kLanes / kScalePieces;
// Rows with as many more, whose scales are never read, as let each wave make as many copies.
constexpr int whole_copies(int rows) {
    constexpr int at_once = kWaves * kScaleCopyRows;
    return (rows + at_once - 1) / at_once * at_once;
}
// Shuffled, those of 16 rows and a step are a block of four pieces. Waves copy as many whole blocks
// each. A tile of x may begin within a block, and then is in one more.
constexpr unsigned kScaleBlock = kSide * kDepth / kBlock;
constexpr int kBlockPieces = kScaleBlock / kPiece;
constexpr int of_all_waves(int blocks) { return (blocks + kWaves - 1) / kWaves * kWaves; }
constexpr int kBlocksX = of_all_waves(kTileM / kSide + 1), kBlocksW = of_all_waves(kTileN / kSide);

// What LDS has of an operand's scales, and how many copies of a wave bring them.
constexpr int kScaleRow = 4 * kScalePieces;
constexpr int scales_size(bool is_shuffled, int rows, int blocks) {
    return is_shuffled ? blocks * kScaleBlock : whole_copies(rows) * kScaleRow;
}
constexpr int scale_copies(bool is_shuffled, int rows) {
    return is_shuffled ? 1 : whole_copies(rows) / kScaleCopyRows / kWaves;
}
constexpr int kScalesSizeX = scales_size(kShuffledX, kTileM, kBlocksX);
constexpr int kScalesSizeW = scales_size(kShuffledW, kTileN, kBlocksW);
constexpr int kAllCopiesX = kCopiesX + scale_copies(kShuffledX, kTileM);
constexpr int kAllCopiesW = kCopiesW + scale_copies(kShuffledW, kTileN);

// LDS, in bytes.
constexpr int kPart = (kRowsX + kRowsW) * kDepth;
constexpr int kScalesAtX = kWaves * kPart, kScalesAtW = kScalesAtX + kScalesSizeX;
constexpr int kStage = kScalesAtW + kScalesSizeW;
constexpr int kFeatures = kTileN / kWavesN; // of a wave
constexpr int kPassFeatures = kFeatures * sizeof(Out) > 256 ? 256 / sizeof(Out) : kFeatures;
constexpr int kPassRow = kPassFeatures * sizeof(Out);
constexpr int kPass = kSide * kPassRow; // of results of a wave that are on their way at a time
constexpr int kPassesAt = 2 * kStage;
constexpr int kLdsBytes = kPassesAt + kWaves * kPass;
static_assert(kHalfX >= 1 && kHalfW >= 1 && kLdsBytes <= 160 * 1024);

// The row of w, of 32, at a row of LDS. Fragments are pairs of which lanes hold eight features side
// by side: the first of a pair has features 0 to 3 of each eight, the second has 4 to 7.
constexpr int kPairRows = 2 * kSide;
static_assert(kRowsW % kPairRows == 0);
MX_DEVICE constexpr int paired_row(int at) {
    return at / kPairRows * kPairRows + at % kSide / 4 * 8 + at % kPairRows / kSide * 4 + at % 4;
}

template <int Value>
struct Constant {
    static constexpr int value = Value;
};
template <class T, T... I>
struct Sequence {};
template <class Do, int... I>
MX_DEVICE void each_of(Do work, Sequence<int, I...>) {
    (work(Constant<I>{}), ...);
}
// work(Constant<0>), ..., work(Constant<Count - 1>): LLVM unrolls loops too late to see that arrays
// are indexed by constants alone, and puts them into memory.
template <int Count, class Do>
MX_DEVICE void each(Do work) {
    each_of(work, __make_integer_seq<Sequence, int, Count>{});
}

MX_DEVICE unsigned char* lds() {
    MX_LDS u32x4 all[kLdsBytes / 16];
    return reinterpret_cast<unsigned char*>(all);
}

// Copies step after step of tile after tile to LDS.
class Copier {
  public:
    MX_MEMBER Copier(unsigned N, unsigned K, int wave, int lane) : N(N), K(K), wave(wave) {
        const int row = lane / kRowPieces, place = lane % kRowPieces;
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const int x = wave * kRowsX + row + odd * kCopyRows;
            const int w = wave * kRowsW + row + odd * kCopyRows;
            k_x[odd] = (place ^ x / 2 % 8) * kPiece;
            k_w[odd] = (place ^ w / 2 % 8) * kPiece;
            x_at[odd] = x * K + k_x[odd];
            w_at[odd] = (wave * kRowsW + paired_row(row + odd * kCopyRows)) * K + k_w[odd];
        }
        block = lane % kScalePieces * kScaleBytes;
        scale_at = lane / kScalePieces * (K / kBlock) + block;
        const int of_share = lane / kBlockPieces, piece_at = lane % kBlockPieces * kPiece;
        blocks_x_at = (wave * (kBlocksX / kWaves) + of_share) * block_row() + piece_at;
        blocks_w_at = (wave * (kBlocksW / kWaves) + of_share) * block_row() + piece_at;
    }

    // From here on it is this tile's turn; nothing but zeros if there is none.
    MX_MEMBER void start(Tile tile, bool is_any) {
        // Worked out here, not kept in registers since the tile is known.
        asm volatile("" : "+s"(tile.first), "+s"(tile.rows), "+s"(tile.group), "+s"(tile.feature));
        const ArgumentsPointer args = arguments();
        const unsigned blocks = K / kBlock;
        const Offset w_row = static_cast<Offset>(tile.group) * N + tile.feature;
        const Offset x_row = tile.first;
        const unsigned left = N - tile.feature;
        const unsigned x_rows = is_any ? tile.rows : 0;
        const unsigned w_rows = is_any ? left < kTileN ? left : kTileN : 0;
        x = resource(args->xq + x_row * K, x_rows * K);
        w = resource(args->wq + w_row * K, w_rows * K);
        if constexpr (kShuffledX) {
            // Groups of one size each begin with a block.
            const Offset more = args->is_masked ? -args->rows_each % kSide : 0;
            const Offset row = x_row + more * tile.group;
            skew = row % kSide;
            x_scales = resource(args->xs + row / kSide * block_row(),
                                is_any ? (skew + tile.rows + kSide - 1) / kSide * block_row() : 0);
        } else {
            x_scales = resource(args->xs + x_row * blocks, x_rows * blocks);
        }
        if constexpr (kShuffledW)
            w_scales =
                resource(args->ws + w_row / kSide * block_row(), w_rows / kSide * block_row());
        else
            w_scales = resource(args->ws + w_row * blocks, w_rows * blocks);
        k = 0;
    }

    // To be called before a step's copies.
    MX_MEMBER void aim() {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const bool x_in = kWholeSteps || k + k_x[odd] < K;
            const bool w_in = kWholeSteps || k + k_w[odd] < K;
            x_now[odd] = x_in ? x_at[odd] + k : kNowhere;
            w_now[odd] = w_in ? w_at[odd] + k : kNowhere;
        }
        const bool in = kWholeSteps || k / kBlock + block < K / kBlock;
        scale_now = in ? scale_at + k / kBlock : kNowhere;
        const bool is_any = kWholeSteps || k < K;
        const unsigned step_at = k / kDepth * kScaleBlock;
        blocks_x_now = is_any ? blocks_x_at + step_at : kNowhere;
        blocks_w_now = is_any ? blocks_w_at + step_at : kNowhere;
    }

    // One of the step's copies of x, into a stage.
    template <int I>
    MX_MEMBER void copy_x(unsigned stage) const {
        if constexpr (I < kCopiesX)
            copy_16_bytes(x, x_now[I % 2], I / 2 * 2 * kCopyRows * K, stage + wave * kPart,
                          I * kCopyRows * kDepth);
        else if constexpr (kShuffledX)
            copy_blocks<kBlocksX>(x_scales, blocks_x_now, stage, kScalesAtX);
        else
            copy_scales(x_scales, I - kCopiesX, stage, kScalesAtX);
    }
    template <int I>
    MX_MEMBER void copy_w(unsigned stage) const {
        if constexpr (I < kCopiesW)
            copy_16_bytes(w, w_now[I % 2], paired_row(I / 2 * 2 * kCopyRows) * K,
                          stage + wave * kPart, (kRowsX + I * kCopyRows) * kDepth);
        else if constexpr (kShuffledW)
            copy_blocks<kBlocksW>(w_scales, blocks_w_now, stage, kScalesAtW);
        else
            copy_scales(w_scales, I - kCopiesW, stage, kScalesAtW);
    }

    // After a step's copies.
    MX_MEMBER void advance() { k += kDepth; }
    MX_MEMBER bool is_done(unsigned steps) const { return k >= steps * kDepth; }
    // Whether the step that comes after the present one's products is a tile's first.
    MX_MEMBER bool has_begun() const { return k == kDepth; }

    unsigned skew; // the tile's first row within a block of shuffled scales

  private:
    // Copy i of row-major scales.
    MX_MEMBER void copy_scales(Resource from, int i, unsigned stage, int at) const {
        constexpr int rows = kWaves * kScaleCopyRows;
        copy_piece<kScaleBytes>(from, scale_now, (i * rows + wave * kScaleCopyRows) * (K / kBlock),
                                stage + wave * kScaleCopyRows * kScaleRow,
                                at + i * rows * kScaleRow);
    }
    // The wave's share of so many blocks of shuffled ones.
    template <int Blocks>
    MX_MEMBER void copy_blocks(Resource from, unsigned offset, unsigned stage, int at) const {
        constexpr int share = Blocks / kWaves;
        copy_16_bytes_of<share * kBlockPieces>(from, offset, 0, stage + wave * share * kScaleBlock,
                                               at);
    }
    // Bytes of the shuffled scales of 16 rows, K padded to whole steps.
    MX_MEMBER unsigned block_row() const { return (K + kDepth - 1) / kDepth * kScaleBlock; }

    unsigned N, K, wave, block, scale_at, blocks_x_at, blocks_w_at, k;
    unsigned k_x[2], k_w[2], x_at[2], w_at[2]; // of copies of even and odd number
    unsigned x_now[2], w_now[2], scale_now, blocks_x_now, blocks_w_now;
    Resource x, w, x_scales, w_scales;
};

// One half of the fragments of an operand, of a wave.
template <int Count>
struct Half {
    u32x8 rows[Count];
    unsigned scales[Count]; // byte 0

    // From here on these are words. Left alone, LLVM takes bytes to the next step, and clears the
    // rest of their registers there, just before a product takes them.
    MX_MEMBER void widen() {
#pragma unroll
        for (int i = 0; i < Count; ++i)
            asm volatile("" : "+v"(scales[i]));
    }
};

// Where a lane reads the fragments of an operand in a stage. Rows are those of a part, At is where
// they begin in it, ScalesAt where the operand's scales begin in the stage. IsShuffled says how
// these lie, IsPaired whether rows are in the order of paired_row.
template <int Rows, int At, int ScalesAt, bool IsShuffled, bool IsPaired>
class Place {
  public:
    static constexpr int kReads = 3; // of one fragment

    MX_MEMBER Place(int first, int lane) {
        const int row = first + lane % kSide, g = lane / kSide;
        const unsigned begin = row / Rows * kPart + At + row % Rows * kDepth;
        low = begin + (g ^ row / 2 % 8) * kPiece;
        high = begin + ((g + 4) ^ row / 2 % 8) * kPiece;
        const int own = IsPaired ? paired_row(lane % kSide) : lane % kSide;
        row_in_block = own % kSide;
        block = ScalesAt + (first + own) / kSide * kScaleBlock + g * kSide;
        scale = IsShuffled
                    ? block + row_in_block
                    : ScalesAt + (first + own) * kScaleRow + g / kScaleBytes * 4 + g % kScaleBytes;
    }

    // From here on it is a tile's turn whose first row is row `skew` of a block of scales.
    MX_MEMBER void start(unsigned skew) {
        const unsigned row = row_in_block + skew;
        scale = block + row + row / kSide * (kScaleBlock - kSide);
    }

    // Read `which`, of 3 Count, of a half: scales first, since all are looked at before the first
    // product.
    template <int Which, int Count>
    MX_MEMBER void read_half(Half<Count>& to, bool is_upper, unsigned stage) const {
        const unsigned char* at = lds() + stage;
        const int first = is_upper ? Count : 0;
        if constexpr (Which < Count)
            to.scales[Which] = at[scale + scale_of_fragment(first + Which)];
        else
            read_rows<(Which - Count) % 2>(to.rows[(Which - Count) / 2],
                                           kSide * (first + (Which - Count) / 2), at);
    }

  private:
    template <bool IsHigh>
    MX_MEMBER void read_rows(u32x8& to, int row, const unsigned char* stage) const {
        const int further = row / Rows * kPart + row % Rows * kDepth;
        const u32x4 half = *reinterpret_cast<const u32x4*>(stage + (IsHigh ? high : low) + further);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            to[IsHigh * 4 + i] = half[i];
    }
    // From the scale of a lane's first fragment to that of another.
    MX_MEMBER static constexpr int scale_of_fragment(int i) {
        const int rows = IsPaired ? paired_row(i * kSide) : i * kSide;
        return IsShuffled ? rows / kSide * kScaleBlock + rows % kSide : rows * kScaleRow;
    }
    unsigned low, high, scale;
    unsigned row_in_block, block; // of shuffled scales
};
using PlaceX = Place<kRowsX, 0, kScalesAtX, kShuffledX, false>;
using PlaceW = Place<kRowsW, kRowsX * kDepth, kScalesAtW, kShuffledW, true>;

} // namespace mx
