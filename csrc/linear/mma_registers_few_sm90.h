// direct for up to 4 rows of x, by mma.m16n8k16.
//
// Lane 4g + t loads 16 bytes of row g of 8, at k = 16t of 64: one scale lasts for t = 0 and 1,
// another for t = 2 and 3. As mma adds over t, x has a column for each token and block of 32 k,
// which is zero in the other block's lanes. So half of the matrix unit's work is for nothing, and a
// lane finds the sums of both blocks of a row of w and token t side by side:
//
//   B, 64 k of x          t = 0, 1       t = 2, 3
//   column 2m             x[m, 0..31]    0
//   column 2m + 1         0              x[m, 32..63]
#pragma once

#include "mma_registers_sm90.h"

namespace mx {

constexpr int kTiles = (kHalves + 1) / 2; // of 16 rows of w, as mma takes them
constexpr int kLaneSums = 1;              // of a half, that a lane has
constexpr bool kLateX = false;

using Sums = float[kHalves][kLaneSums]; // of row g of each half by token t

MX_DEVICE int row_of(int lane, int) { return lane / 4; }
MX_DEVICE int token_of(int lane, int) { return lane % 4; }

MX_DEVICE int place_of(int t) { return t * kPiece; }

// Four scales of w times four of x by one addition, of words: right where each byte of w is in 64
// to 191 and each of x in 64 to 190, as then their sums less 127 are in 1 to 254.
MX_DEVICE unsigned multiply_scales(unsigned w, unsigned x) { return w + (x - kUnitScales); }
// The top bit of a byte is set unless all bytes are in that range.
MX_DEVICE unsigned far_w(unsigned scales) { return scales - 0x40404040; }
MX_DEVICE unsigned far_x(unsigned scales) { return (scales - 0x40404040) | (scales - 0x3f3f3f3f); }

// Adds a block's products, times its scales of four of a row of w and of x.
// Far: scales may be so far from 1 that they are to be applied in turn.
template <bool Far>
MX_DEVICE void add_scaled_block(float& sum, float product, unsigned of_w, unsigned of_x,
                                int block) {
    if constexpr (Far)
        sum = add_scaled(sum, product, e8m0_split(byte_of(of_w, block)),
                         e8m0_to_f32(byte_of(of_x, block)));
    else
        sum = mx::fma(product, usual_scale(multiply_scales(of_w, of_x), block), sum);
}

struct Chunk {
    Weights w;
    u32x4 x[kSteps];
    unsigned x_scales; // of token t

    MX_MEMBER unsigned far() const {
        unsigned bits = far_x(x_scales);
#pragma unroll
        for (int i = 0; i < kScaleWords; ++i)
            bits |= far_w(w.scales[i]);
        return bits;
    }
};

// Where a lane reads x.
struct XReader {
    const unsigned char *payload, *scales;
    int place;
    bool has_payload, has_scales;

    MX_MEMBER void open(const unsigned char* xq, const unsigned char* xs, unsigned M,
                        unsigned chunk, int lane) {
        const unsigned g = lane / 4, t = lane % 4;
        place = place_of(t);
        payload = xq + static_cast<unsigned long>(g / 2) * kDepth + (chunk * kChunk + place);
        scales = xs + static_cast<unsigned long>(t) * (kDepth / kBlock) + chunk * kBlocks;
        has_payload = g / 2 < M && t / 2 == g % 2;
        has_scales = t < M;
    }
    MX_MEMBER void advance(int chunks) {
        advance_pointer(payload, chunks * kChunk);
        advance_pointer(scales, chunks * kBlocks);
    }
    MX_MEMBER void load_payload(Chunk& chunk, int ahead, int c) const {
#pragma unroll
        for (int s = 0; s < kSteps; ++s)
            if (has_payload && within(c, s * kStep + place))
                chunk.x[s] = load(payload + ahead * kChunk + s * kStep);
    }
    MX_MEMBER void load_step(Chunk&, int, int, int) const {} // x is not expanded late
    template <bool Aligned>
    MX_MEMBER void load_scales(Chunk& chunk, int ahead, int c) const {
        chunk.x_scales = kUnitScales;
        if (has_scales)
            chunk.x_scales = scales_at<Aligned>(scales + ahead * kBlocks, blocks_left(c));
    }
};

// What is made of x and of scales before the weights are there.
struct Ready {
    unsigned columns[kSteps][4][2];
    unsigned w_scales[kHalves], x_scales;
};

// Whether scales are far from 1.
MX_DEVICE bool make_ready(Ready& ready, const Chunk& chunk, const Here& here) {
    const bool far = any_far(chunk.far());
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            e4m3x4_to_f16(chunk.x[s][i], ready.columns[s][i][0], ready.columns[s][i][1]);
#pragma unroll
    for (int h = 0; h < kHalves; ++h)
        ready.w_scales[h] = chunk.w.scales_of(h, row_of(here.lane, 0));
    ready.x_scales = chunk.x_scales;
    return far;
}

// Far: as of add_scaled_block.
// refill_w(h, s) is called when the weights of half h, step s are no longer needed.
template <bool Far, class RefillW>
MX_DEVICE void add_products(Sums& sums, const Chunk& chunk, const Ready& ready, RefillW refill_w) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            unsigned rows[2][4][2] = {};
#pragma unroll
            for (int h = 0; h < 2; ++h)
                if (2 * tile + h < kHalves) {
                    u32x4 w = chunk.w.payload[2 * tile + h][s];
                    if constexpr (Far)
                        unlike_the_other_way(w);
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        e4m3x4_to_f16(w[i], rows[h][i][0], rows[h][i][1]);
                    refill_w(2 * tile + h, s);
                }
            float products[4] = {};
#pragma unroll
            for (int i = 0; i < 4; ++i)
                mma(products, rows[0][i][0], rows[1][i][0], rows[0][i][1], rows[1][i][1],
                    ready.columns[s][i][0], ready.columns[s][i][1]);
#pragma unroll
            for (int h = 2 * tile; h < kHalves && h < 2 * tile + 2; ++h)
#pragma unroll
                for (int b = 0; b < 2; ++b)
                    add_scaled_block<Far>(sums[h][0], products[2 * (h % 2) + b], ready.w_scales[h],
                                          ready.x_scales, 2 * s + b);
        }
}

template <class RefillW, class RefillX>
MX_DEVICE void add_chunk(Sums& sums, const Chunk& chunk, const Ready& ready, bool far, const Here&,
                         RefillW refill_w, RefillX) {
    if (far)
        add_products<true>(sums, chunk, ready, refill_w);
    else
        add_products<false>(sums, chunk, ready, refill_w);
}

} // namespace mx
