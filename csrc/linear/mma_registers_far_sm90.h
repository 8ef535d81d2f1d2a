// direct for 5 to 16 rows of x where scales leave fp16's range: those of blocks of zeros, which may
// be anything, are left out, and other chunks computed block by block, times both scales in turn
// (common/scale.h), which is exact whatever they are.
#pragma once

#include "mma_registers_many_sm90.h"

namespace mx {

// Four lanes have 16 bytes each of both of a row's blocks in a step. Adds, to what a lane that has
// the scales of row lane % 8 knows of it, which of them are of zeros.
MX_DEVICE void note_zero_blocks(unsigned& of_zeros, const u32x4& bytes, int s, bool has_scales,
                                int lane) {
    const unsigned any = (bytes[0] | bytes[1] | bytes[2] | bytes[3]) & 0x7f7f7f7f;
    const unsigned zero = lanes_where(any == 0) >> 4 * (lane % 8);
    const unsigned blocks = ((zero & 3) == 3 ? 0xffu : 0) | ((zero & 12) == 12 ? 0xff00u : 0);
    if (has_scales)
        of_zeros |= blocks << 16 * s;
}

// Blocks of zeros, but for those whose scale is NaN.
MX_DEVICE Zeros zero_blocks(const Chunk& chunk, int lane) {
    Zeros zeros;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int i = 0; i < kTokenTiles; ++i)
            note_zero_blocks(zeros.of_x[0], chunk.x[i][s], s, lane / 8 % kTokenTiles == i, lane);
#pragma unroll
        for (int h = 0; h < kHalves; ++h)
            note_zero_blocks(zeros.of_w[h / 4], chunk.w.payload[h][s], s, lane / 8 == h % 4, lane);
    }
    zeros.of_x[0] &= ~__vcmpeq4(chunk.x_scales, ~0u);
#pragma unroll
    for (int i = 0; i < kScaleWords; ++i)
        zeros.of_w[i] = kLanes * i + lane < 8 * kHalves
                            ? zeros.of_w[i] & ~__vcmpeq4(chunk.w.scales[i], ~0u)
                            : ~0u; // of another lane's row, the last
    return zeros;
}

// Whether the chunk is far.
MX_DEVICE bool make_ready(Ready& ready, Chunk& chunk, const Here& here) {
    bool far = ready.make(chunk, {}, here.lane);
    if (far) {
        // Kept until here, x would take registers.
        here.x.load_payload(chunk, here.ahead, here.chunk);
        far = ready.make(chunk, zero_blocks(chunk, here.lane), here.lane);
    }
    return far;
}

// Weights are not read again, as ptxas would then ask for them after the branch.
MX_DEVICE void add_far_chunk(Sums& sums, const u32x4 (&payload)[kHalves][kSteps],
                             const Here& here) {
    const int lane = here.lane;
    Chunk chunk = {};
    here.w.load_scales<false>(chunk.w, here.ahead, here.chunk);
    here.x.load_scales<false>(chunk, here.ahead, here.chunk);
    here.x.load_payload(chunk, here.ahead, here.chunk);
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll 1
        for (int b = 2 * s; b < 2 * s + 2; ++b) {
            const bool mine = lane % 4 / 2 == b % 2;
            XWords x_words;
            float x_scales[kLaneTokens];
#pragma unroll
            for (int i = 0; i < kTokenTiles; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    e4m3x4_to_f16(mine ? chunk.x[i][s][j] : 0, x_words[i][j][0], x_words[i][j][1]);
#pragma unroll
            for (int i = 0; i < kLaneTokens; ++i)
                x_scales[i] = e8m0_to_f32(byte_of(of_lane(token_at(lane, i), chunk.x_scales), b));
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                const int first = kTileHalves * tile;
                TileWords words = {};
#pragma unroll
                for (int h = first; h < kHalves && h < first + kTileHalves; ++h)
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        e4m3x4_to_f16(mine ? payload[h][s][j] : 0, words[h - first][j][0],
                                      words[h - first][j][1]);
                float products[4] = {};
                add_tile(products, words, x_words);
#pragma unroll
                for (int h = first; h < kHalves && h < first + kTileHalves; ++h)
#pragma unroll
                    for (int i = 0; i < kLaneSums; ++i) {
                        const unsigned scales = chunk.w.scales_of(h, row_of(lane, i));
                        sums[h][i] =
                            add_scaled(sums[h][i], product_of(products, h, i),
                                       e8m0_split(byte_of(scales, b)), x_scales[i / kLaneRows]);
                    }
            }
        }
}

// refill_w(h, s) is called when the weights of half h, step s are no longer needed, refill_x(s) if
// x is expanded late and that of a step is not.
template <class RefillW, class RefillX>
MX_DEVICE void add_chunk(Sums& sums, const Chunk& chunk, Ready& ready, bool far, const Here& here,
                         RefillW refill_w, RefillX refill_x) {
    if (!far) {
        add_products(sums, chunk, ready, here.lane, refill_w, refill_x);
        return;
    }
    add_far_chunk(sums, chunk.w.payload, here);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
        refill_x(s);
#pragma unroll
        for (int h = 0; h < kHalves; ++h)
            refill_w(h, s);
    }
}

} // namespace mx
