// How a warp of mma_ring_sm90.cu adds up the chunks in its ring, and hands its sums to the
// others.
#pragma once

#include "common/scale.h"
#include "common/target.h"
#include "mma_ring_sm90.h"
#include "moe_sm90.h"
#include "sm90/mma.h"

namespace mx {

using Sums = float[kRowTiles][kColTiles][4];

constexpr int kFewRows = 2; // of x, whose blocks fit into the columns of one matrix

// Of four scales those whose bit 7 is 0 are not within 2^-63 .. 2^64.
MX_DEVICE unsigned usual_scales(unsigned word) { return word ^ word << 1; }
constexpr unsigned kAllUsual = 0x80808080;

MX_DEVICE float plain_scale(unsigned word, int b) {
    return bits_to_float((b == 3 ? word >> 1 : word << (23 - 8 * b)) & 0x7f800000);
}

// Adds a chunk of the first ColTiles tiles of x. Unless Any, scales are 2^-63 .. 2^64, which
// take fewer instructions.
template <int ColTiles, bool Any>
MX_DEVICE void add_blocks(Sums& sums, unsigned slot, const unsigned (&w_scales)[kRowTiles][2],
                          const unsigned (&x_scales)[ColTiles][2], int blocks, int lane) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
        if (!kWhole && b >= blocks)
            break;
        const unsigned in_row = slot + swizzled_block(b, lane);
        f16x8 x[ColTiles];
        SplitScale x_scale[ColTiles][2];
#pragma unroll
        for (int j = 0; j < ColTiles; ++j) {
            x[j] = e4m3x8_to_f16(load_shared_8(in_row + kXAt + j * 8 * kChunk));
#pragma unroll
            for (int c = 0; c < 2; ++c)
                x_scale[j][c] = Any ? e8m0_split(x_scales[j][c] >> 8 * b & 255)
                                    : SplitScale{plain_scale(x_scales[j][c], b), 1.0f};
        }
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            const f16x8 w = e4m3x8_to_f16(load_shared_8(in_row + i * 16 * kChunk));
            const f16x8 w_8 = e4m3x8_to_f16(load_shared_8(in_row + (i * 16 + 8) * kChunk));
            float w_scale[2];
#pragma unroll
            for (int r = 0; r < 2; ++r)
                w_scale[r] = Any ? e8m0_to_f32(w_scales[i][r] >> 8 * b & 255)
                                 : plain_scale(w_scales[i][r], b);
#pragma unroll
            for (int j = 0; j < ColTiles; ++j) {
                float dots[4];
                mma_block(dots, w, w_8, x[j]);
#pragma unroll
                for (int d = 0; d < 4; ++d)
                    sums[i][j][d] =
                        Any ? add_scaled(sums[i][j][d], dots[d], x_scale[j][d % 2], w_scale[d / 2])
                            : mx::fma(dots[d] * x_scale[j][d % 2].first, w_scale[d / 2],
                                      sums[i][j][d]);
            }
        }
    }
}

// Adds a chunk of one or two rows of x in fewer instructions. Columns of the matrix are blocks of
// 32 k here: column 4 m + b of B has block b of row m, and zeros where w's blocks are others, so
// that one sum over the whole chunk keeps blocks apart. What a lane has of it takes scales once.
template <bool Any>
MX_DEVICE void add_few_blocks(Sums& sums, unsigned slot, const unsigned (&w_scales)[kRowTiles][2],
                              unsigned x_scales, int lane) {
    const int column = lane / 4, m = column / 4, own = column % 4;
    const f16x8 x =
        e4m3x8_to_f16(load_shared_8(slot + kXAt + m * kChunk + (own ^ m) * kBlock + lane % 4 * 8));
    float dots[kRowTiles][4] = {};
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
        const unsigned in_row = slot + swizzled_block(b, lane);
        f16x8 of_block;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            of_block.words[i] = own == b ? x.words[i] : 0;
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
            add_block(dots[i], e4m3x8_to_f16(load_shared_8(in_row + i * 16 * kChunk)),
                      e4m3x8_to_f16(load_shared_8(in_row + (i * 16 + 8) * kChunk)), of_block);
    }
    const int shift = lane % 2 * 16; // of the scales of this lane's columns, 2 t and 2 t + 1
    SplitScale x_scale[2];
#pragma unroll
    for (int c = 0; c < 2; ++c)
        x_scale[c] = Any ? e8m0_split(x_scales >> shift >> 8 * c & 255)
                         : SplitScale{plain_scale(x_scales >> shift, c), 1.0f};
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int d = 0; d < 4; ++d) {
            const unsigned scales = w_scales[i][d / 2] >> shift;
            const float w_scale =
                Any ? e8m0_to_f32(scales >> 8 * (d % 2) & 255) : plain_scale(scales, d % 2);
            sums[i][0][d] =
                Any ? add_scaled(sums[i][0][d], dots[i][d], x_scale[d % 2], w_scale)
                    : mx::fma(dots[i][d] * x_scale[d % 2].first, w_scale, sums[i][0][d]);
        }
}

// The scales of a chunk of w that this lane takes, and which are usual in all of its rows.
MX_DEVICE unsigned load_w_scales(unsigned (&w_scales)[kRowTiles][2], const MoeArgs& a,
                                 const Entry& entry, unsigned slot, int lane) {
    unsigned usual = kAllUsual;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = i * 16 + r * 8 + lane / 4;
            const Offset first =
                kWhole ? 0
                       : (entry.expert * static_cast<Offset>(a.N) + Rows::row(a, entry.tile, row)) *
                             a.blocks();
            const unsigned word =
                load_scales(slot + kWScalesAt + row * kScaleWords * 4, a.ws, first);
            w_scales[i][r] = word;
            usual &= usual_scales(word);
        }
    return usual;
}

// The same of one row of x.
MX_DEVICE unsigned load_x_scales(unsigned& word, const MoeArgs& a, const Entry& entry,
                                 unsigned slot, int col) {
    const int t = kWhole ? 0 : entry.t[col];
    const Offset first = kWhole || t < 0 ? 0 : t / a.a_div * a.blocks();
    word = load_scales(slot + kXScalesAt + col * kScaleWords * 4, a.xs, first);
    return usual_scales(word);
}

MX_DEVICE void add_few(Sums& sums, const MoeArgs& a, const Entry& entry, unsigned slot, int lane) {
    unsigned w_scales[kRowTiles][2], x_scales;
    const unsigned usual = load_w_scales(w_scales, a, entry, slot, lane) &
                           load_x_scales(x_scales, a, entry, slot, lane % 4 / 2);
    if (__all_sync(~0u, usual == kAllUsual))
        add_few_blocks<false>(sums, slot, w_scales, x_scales, lane);
    else
        add_few_blocks<true>(sums, slot, w_scales, x_scales, lane);
}

template <int ColTiles>
MX_DEVICE void add_chunk(Sums& sums, const MoeArgs& a, const Entry& entry, unsigned slot, int chunk,
                         int lane) {
    unsigned w_scales[kRowTiles][2], x_scales[ColTiles][2];
    unsigned usual = load_w_scales(w_scales, a, entry, slot, lane);
#pragma unroll
    for (int j = 0; j < ColTiles; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c)
            usual &= load_x_scales(x_scales[j][c], a, entry, slot, j * 8 + lane % 4 * 2 + c);
    const int blocks = blocks_of(a, chunk);
    if (__all_sync(~0u, usual == kAllUsual))
        add_blocks<ColTiles, false>(sums, slot, w_scales, x_scales, blocks, lane);
    else
        add_blocks<ColTiles, true>(sums, slot, w_scales, x_scales, blocks, lane);
}

// Puts what this warp has of an entry to where the others find it.
MX_DEVICE void store_partials(float* to, const Sums& sums, const Entry& entry, int lane) {
    if (entry.rows <= kFewRows) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float sum = sums[i][0][2 * r] + sums[i][0][2 * r + 1];
                sum += __shfl_xor_sync(~0u, sum, 1);
                if (lane % 2 == 0)
                    to[lane % 4 / 2 * kPitch + i * 16 + r * 8 + lane / 4] = sum;
            }
        return;
    }
#pragma unroll
    for (int j = 0; j < kColTiles; ++j)
        if (j < entry.col_tiles())
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
                for (int d = 0; d < 4; ++d)
                    to[(j * 8 + lane % 4 * 2 + d % 2) * kPitch + i * 16 + d / 2 * 8 + lane / 4] =
                        sums[i][j][d];
}

} // namespace mx
