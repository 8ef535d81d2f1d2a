// direct for 5 to 16 rows of x, by mma.m16n8k16 over fp16 that has block scales in it.
//
// Lane 4g + t loads 16 bytes of row g of 8, of w and of x, at k = 16t of 64. fp16 has room for 22
// octaves of scales beside an e4m3. So each block of a chunk is multiplied, exactly, with its scale
// over the largest one of the wave's rows there, their top, of w as of x: mma then adds up a whole
// chunk, and its sums count in fp32, times both tops. Chunks whose scales leave that range are
// computed block by block, see mma_registers_far_sm90.h.
//
// Up to 8 rows, 16 rows of w are mma's A and x is B; above, 16 rows of x are A and 8 of w are B:
//
//   M to 8    A: rows g and g + 8 of w   B: token g      D: rows g and g + 8, tokens 2t and 2t + 1
//   M to 16   A: tokens g and g + 8      B: row g of w   D: tokens g and g + 8, rows 2t and 2t + 1
#pragma once

#include "mma_registers_sm90.h"

namespace mx {

constexpr int kTokenTiles = MX_TOKENS / 8; // of 8 rows of x
constexpr bool kXIsA = kTokenTiles == 2;
constexpr int kTileHalves = kXIsA ? 1 : 2; // of w, that mma takes
constexpr int kTiles = (kHalves + kTileHalves - 1) / kTileHalves;
constexpr int kLaneTokens = 2, kLaneRows = kXIsA ? 2 : 1; // of a half, whose sums a lane has
constexpr int kLaneSums = kLaneTokens * kLaneRows;
// Where each chunk is asked for while the one before is used, x of a step becomes fp16 as the step
// begins, which takes fewer registers.
constexpr bool kLateX = kInTurn && kXIsA;

using Sums = float[kHalves][kLaneSums];

// A lane's tokens and rows.
MX_DEVICE int token_at(int lane, int i) { return kXIsA ? 8 * i + lane / 4 : lane % 4 * 2 + i; }
MX_DEVICE int row_at(int lane, int i) { return kXIsA ? lane % 4 * 2 + i : lane / 4; }
// Those of sum i of a half.
MX_DEVICE int token_of(int lane, int i) { return token_at(lane, i / kLaneRows); }
MX_DEVICE int row_of(int lane, int i) { return row_at(lane, i % kLaneRows); }

MX_DEVICE int place_of(int t) { return t * kPiece; }

struct Chunk {
    Weights w;
    u32x4 x[kTokenTiles][kSteps];
    unsigned x_scales; // of token `lane`, modulo those of all tiles
};

// Where a lane reads x. Tokens past the last are computed from it and not stored.
struct XReader {
    const unsigned char *payload[kTokenTiles], *scales;
    int place;

    MX_MEMBER void open(const unsigned char* xq, const unsigned char* xs, unsigned M,
                        unsigned chunk, int lane) {
        place = place_of(lane % 4);
#pragma unroll
        for (int i = 0; i < kTokenTiles; ++i)
            payload[i] = xq + static_cast<unsigned long>(min(lane / 4 + 8u * i, M - 1)) * kDepth +
                         (chunk * kChunk + place);
        scales =
            xs +
            static_cast<unsigned long>(min(lane % (8u * kTokenTiles), M - 1)) * (kDepth / kBlock) +
            chunk * kBlocks;
    }
    MX_MEMBER void advance(int chunks) {
#pragma unroll
        for (int i = 0; i < kTokenTiles; ++i)
            advance_pointer(payload[i], chunks * kChunk);
        advance_pointer(scales, chunks * kBlocks);
    }
    MX_MEMBER void load_payload(Chunk& chunk, int ahead, int c) const {
#pragma unroll
        for (int s = 0; s < kSteps; ++s)
            load_step(chunk, s, ahead, c);
    }
    MX_MEMBER void load_step(Chunk& chunk, int s, int ahead, int c) const {
#pragma unroll
        for (int i = 0; i < kTokenTiles; ++i)
            if (within(c, s * kStep + place))
                chunk.x[i][s] = load(payload[i] + ahead * kChunk + s * kStep);
    }
    template <bool Aligned>
    MX_MEMBER void load_scales(Chunk& chunk, int ahead, int c) const {
        chunk.x_scales = scales_at<Aligned>(scales + ahead * kBlocks, blocks_left(c));
    }
};

// Four scales of each lane's row as factors in fp16 relative to the top of all lanes, which becomes
// 2^7. Bytes are upper ones of fp16.
struct Relative {
    static constexpr unsigned kLeastTop = 72, kMostTop = 190;

    unsigned factors[kScaleWords], top;
    unsigned far; // the top bit of a byte is set unless all that is in range

    // of_zeros: bytes of ones for scales that do not count, as their blocks are of zeros.
    template <int Words>
    MX_MEMBER Relative(const unsigned (&scales)[Words], const unsigned (&of_zeros)[Words]) {
        unsigned counted[Words];
#pragma unroll
        for (int i = 0; i < Words; ++i)
            counted[i] = scales[i] & ~of_zeros[i];
        top = __reduce_max_sync(0xffffffff, largest_byte(counted));
        const unsigned above = top - kLeastTop;
        far = above | (above + (127 - (kMostTop - kLeastTop)));
#pragma unroll
        for (int i = 0; i < Words; ++i) {
            const unsigned below = (top * 0x01010101 - counted[i]) & ~of_zeros[i];
            factors[i] = 4 * (0x01010101 * kF16Scales) - 4 * below;
            far |= below | (below + 0x01010101 * (128 - kF16Scales));
        }
    }
    // 2^(top - 127), over the 2^7 that factors have.
    MX_MEMBER float scale() const { return bits_to_float((top - 7) << 23); }
};

// The factor of the block that a lane has in a step, as both fp16 of a word.
MX_DEVICE unsigned factor_of(unsigned factors, int lane, int s) {
    return __byte_perm(factors, 0, 0x0404 + 0x1010 * (lane % 4 / 2 + 2 * s));
}

MX_DEVICE void e4m3x4_to_f16_times(unsigned word, unsigned factor, unsigned& low, unsigned& high) {
    e4m3x4_to_f16(word, low, high);
    low = multiply_f16x2(low, factor);
    high = multiply_f16x2(high, factor);
}

// What mma takes of x and of a tile of w in a step: 16 bytes of each of a lane's rows, in fp16.
using XWords = unsigned[kTokenTiles][4][2];
using TileWords = unsigned[kTileHalves][4][2];

// Which scales of a lane's rows are of blocks of zeros, as bytes of ones.
struct Zeros {
    unsigned of_w[kScaleWords] = {}, of_x[1] = {};
};

// What is made of x and of scales before the weights are there.
struct Ready {
    XWords x[kSteps];
    unsigned w_factors[kHalves], x_factors[kTokenTiles];
    float scale;

    MX_MEMBER void expand_x(const Chunk& chunk, int s, int lane) {
#pragma unroll
        for (int i = 0; i < kTokenTiles; ++i) {
            const unsigned factor = factor_of(x_factors[i], lane, s);
#pragma unroll
            for (int j = 0; j < 4; ++j)
                e4m3x4_to_f16_times(chunk.x[i][s][j], factor, x[s][i][j][0], x[s][i][j][1]);
        }
    }
    // Returns whether scales are far from each other, or from 1.
    MX_MEMBER bool make(const Chunk& chunk, const Zeros& zeros, int lane) {
        const unsigned x_scales[1] = {chunk.x_scales};
        const Relative x(x_scales, zeros.of_x);
#pragma unroll
        for (int i = 0; i < kTokenTiles; ++i)
            x_factors[i] = of_lane(8 * i + lane / 4, x.factors[0]);
        if constexpr (!kLateX)
#pragma unroll
            for (int s = 0; s < kSteps; ++s)
                expand_x(chunk, s, lane);
        const Relative w(chunk.w.scales, zeros.of_w);
#pragma unroll
        for (int h = 0; h < kHalves; ++h)
            w_factors[h] = of_lane(h % 4 * 8 + lane / 4, w.factors[h / 4]);
        scale = x.scale() * w.scale();
        return any_far(x.far | w.far);
    }
};

MX_DEVICE void add_tile(float (&products)[4], const TileWords& w, const XWords& x) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
        if constexpr (kXIsA)
            mma(products, x[0][j][0], x[1][j][0], x[0][j][1], x[1][j][1], w[0][j][0], w[0][j][1]);
        else
            mma(products, w[0][j][0], w[1][j][0], w[0][j][1], w[1][j][1], x[0][j][0], x[0][j][1]);
}

// Of a tile's products, that of sum i of half h.
MX_DEVICE float product_of(const float (&products)[4], int h, int i) {
    return products[h % kTileHalves * 2 + i];
}

// Adds to products those of a tile of w in a step.
template <class RefillW>
MX_DEVICE void add_step(float (&products)[4], const Chunk& chunk, const Ready& ready, int tile,
                        int s, int lane, RefillW refill_w) {
    TileWords words = {};
#pragma unroll
    for (int h = kTileHalves * tile; h < kHalves && h < kTileHalves * (tile + 1); ++h) {
        u32x4 w = chunk.w.payload[h][s];
        unlike_the_other_way(w);
        const unsigned factor = factor_of(ready.w_factors[h], lane, s);
#pragma unroll
        for (int j = 0; j < 4; ++j)
            e4m3x4_to_f16_times(w[j], factor, words[h % kTileHalves][j][0],
                                words[h % kTileHalves][j][1]);
        refill_w(h, s);
    }
    add_tile(products, words, ready.x[s]);
}

MX_DEVICE void add_scaled_products(Sums& sums, const float (&products)[4], float scale, int tile) {
#pragma unroll
    for (int h = kTileHalves * tile; h < kHalves && h < kTileHalves * (tile + 1); ++h)
#pragma unroll
        for (int i = 0; i < kLaneSums; ++i)
            sums[h][i] = mx::fma(product_of(products, h, i), scale, sums[h][i]);
}

template <class RefillW, class RefillX>
MX_DEVICE void add_products(Sums& sums, const Chunk& chunk, Ready& ready, int lane,
                            RefillW refill_w, RefillX refill_x) {
    if constexpr (kLateX) {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            ready.expand_x(chunk, s, lane);
            refill_x(s);
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                float products[4] = {};
                add_step(products, chunk, ready, tile, s, lane, refill_w);
                add_scaled_products(sums, products, ready.scale, tile);
            }
        }
    } else {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            float products[4] = {};
#pragma unroll
            for (int s = 0; s < kSteps; ++s)
                add_step(products, chunk, ready, tile, s, lane, refill_w);
            add_scaled_products(sums, products, ready.scale, tile);
        }
    }
}

} // namespace mx
