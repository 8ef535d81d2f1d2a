// direct for up to 8 rows of x, by mma.sp.m16n8k32, whose A has two of each four k.
//
// Lane 4g + t loads 16 bytes of row g of 8 of w, of block t % 2 of two: so of four k as mma.sp
// counts them, two are held by a lane with block 0 and two by its neighbour, with block 1. x is A,
// with a row for each token and block, which takes the two of its block and leaves the others out.
// Nothing is multiplied in vain, and no lane gives another a part of what it has loaded:
//
//   A, 64 k of x    B: k of lanes t = 0, 2    t = 1, 3
//   row m           x[m, 0..31]               left out
//   row m + 8       left out                  x[m, 32..63]
//
// The PTX ISA manual says which k are whose. Lane t of B has words 0 to 3 of its 16 bytes, at
// 16 (t / 2) of the block. Two mma take them: the first words 0 and 2, the second 1 and 3, each
// word being two registers of B: one for k 0 to 7 or 8 to 15 (words 2 and 3) of 16, one for those
// of the other 16. Of A lane t then has the k of lanes 2 (t % 2) and 2 (t % 2) + 1 of B, of words 0
// and 1 where t < 2, else of words 2 and 3: 8 bytes of a block, at 16 (t % 2) + 8 (t / 2).
#pragma once

#include "linear_direct_sm90.h"

namespace mx {

constexpr int kLaneRows = 2; // of a half, whose sums a lane has

using Sums = float[kHalves][kLaneRows]; // of rows 2t and 2t + 1 of each half by token g

// Of each four k of A, rows 0 to 7 have the first two, rows 8 to 15 the last.
constexpr unsigned kPairs = 0xeeee4444;

MX_DEVICE int row_of(int lane) { return lane % 4 * 2; }
MX_DEVICE int token_of(int lane) { return lane / 4; }

// 8 bytes, like load of mx_sm90.h.
MX_DEVICE uint2 load_8(const void* p) {
    uint2 v;
    asm volatile("ld.relaxed.cta.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}

MX_DEVICE int place_of(int t) { return t % 2 * kBlock + t / 2 * kPiece; }

struct Chunk {
    Weights w;
    uint2 x[kSteps][2]; // of token g, in both blocks of a step
    unsigned x_scales;

    MX_MEMBER unsigned far() const { return w.far() | far_x(x_scales); }
};

// Where a lane reads x.
struct XReader {
    const unsigned char *payload, *scales;
    int depth;
    bool exists;

    MX_MEMBER void open(const unsigned char* xq, const unsigned char* xs, unsigned M, unsigned K,
                        unsigned chunk, int lane) {
        const unsigned g = lane / 4, t = lane % 4;
        depth = K;
        payload = xq + static_cast<unsigned long>(g) * K +
                  (chunk * kChunk + t % 2 * kPiece + t / 2 * (kPiece / 2));
        scales = xs + static_cast<unsigned long>(g) * (K / kBlock) + chunk * kBlocks;
        exists = g < M;
    }
    MX_MEMBER void advance(int chunks) {
        payload += chunks * kChunk;
        scales += chunks * kBlocks;
    }
    MX_MEMBER void load_payload(Chunk& chunk, int ahead, int c) const {
#pragma unroll
        for (int s = 0; s < kSteps; ++s)
#pragma unroll
            for (int b = 0; b < 2; ++b)
                if (exists && within(depth, c, s * kStep + b * kBlock))
                    chunk.x[s][b] = load_8(payload + ahead * kChunk + s * kStep + b * kBlock);
    }
    template <bool Aligned>
    MX_MEMBER void load_scales(Chunk& chunk, int ahead, int c) const {
        chunk.x_scales = kUnitScales;
        if (exists)
            chunk.x_scales = scales_at<Aligned>(scales + ahead * kBlocks, blocks_left(depth, c));
    }
};

// What is made of x and of scales before the weights are there.
struct Ready {
    unsigned rows[kSteps][2][4];
    unsigned w_scales[kHalves][kLaneRows], x_scales;
};

MX_DEVICE void make_ready(Ready& ready, const Chunk& chunk, int lane) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            const uint2 x = chunk.x[s][b];
            e4m3x4_to_f16(x.x, ready.rows[s][0][b], ready.rows[s][0][2 + b]);
            e4m3x4_to_f16(x.y, ready.rows[s][1][b], ready.rows[s][1][2 + b]);
        }
#pragma unroll
    for (int h = 0; h < kHalves; ++h)
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i)
            ready.w_scales[h][i] = chunk.w.scales_of(h, row_of(lane) + i);
    ready.x_scales = chunk.x_scales;
}

MX_DEVICE void mma_of_pairs(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                            unsigned b2, unsigned b3) {
    asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, 0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(b2), "r"(b3),
          "r"(kPairs));
}

// Far: as of add_scaled_block.
// refill(h, s) is called when the weights of half h, step s are no longer needed.
template <bool Far, class Refill>
MX_DEVICE void add_products(Sums& sums, const Chunk& chunk, const Ready& ready, Refill refill) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
            u32x4 w = chunk.w.payload[h][s];
            if constexpr (Far)
                unlike_the_other_way(w);
            unsigned columns[4][2];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                e4m3x4_to_f16(w[i], columns[i][0], columns[i][1]);
            refill(h, s);
            float products[4] = {}; // of block 0 by rows 2t and 2t + 1 of w, then of block 1
#pragma unroll
            for (int i = 0; i < 2; ++i)
                mma_of_pairs(products, ready.rows[s][i], columns[i][0], columns[i + 2][0],
                             columns[i][1], columns[i + 2][1]);
#pragma unroll
            for (int i = 0; i < kLaneRows; ++i)
#pragma unroll
                for (int b = 0; b < 2; ++b)
                    add_scaled_block<Far>(sums[h][i], products[2 * b + i], ready.w_scales[h][i],
                                          ready.x_scales, 2 * s + b);
        }
}

} // namespace mx
