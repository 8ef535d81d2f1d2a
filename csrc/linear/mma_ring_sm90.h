// What the linear over mma is made of: sizes, and how the products of a chunk are added.
// The kernel and a drawing are in mma_ring_sm90.cu.
#pragma once

#include "common/scale.h"
#include "common/target.h"
#include "sm90/mma.h"
#include "sm90/rows.h"

namespace mx {

constexpr int kTilesM = MX_TILES_M;     // of 8 rows of x
constexpr int kRowTiles = MX_ROW_TILES; // of 16 rows of w, of a warp
constexpr int kRowWarps = MX_ROW_WARPS; // warps side by side along w's rows
constexpr int kKWarps = MX_K_WARPS;     // warps that take turns along K
constexpr int kSplit = MX_SPLIT;        // workgroups of a cluster
constexpr int kDepth = MX_DEPTH;        // chunks of a warp that are under way
constexpr int kPerSm = MX_PER_SM;       // workgroups that an SM is to hold
constexpr int kTurns = MX_TURNS;        // in which the sums of a pass are exchanged
constexpr bool kOnePass = MX_ONE_PASS;  // no cluster has more rows than a pass
using Out = DType<MX_OUT>;

constexpr int kWarps = kRowWarps * kKWarps;
constexpr int kThreads = kWarps * kLanes;
constexpr int kWarpRows = 16 * kRowTiles;
constexpr int kPassRows = kRowWarps * kWarpRows;

// A tile of sums is 16 rows of w by 8 of x, 4 values a lane. A turn exchanges kTurnTiles of them.
constexpr int kTileBytes = kLanes * 16;
constexpr int kTurnTilesM = kTilesM / kTurns;
constexpr int kTurnTiles = kRowWarps * kRowTiles * kTurnTilesM;
constexpr int kOwnedTiles = (kTurnTiles + kSplit - 1) / kSplit; // workgroup t % kSplit owns tile t
static_assert(kTilesM % kTurns == 0, "turns are alike");

// A stage of a ring: rows of w and of x, then their scales.
constexpr int kRowsM = 8 * kTilesM;
constexpr int kStageRows = kWarpRows + kRowsM;
constexpr int kStageBytes = (kStageRows * (kChunk + kScaleBytes) + 127) / 128 * 128;
constexpr int kScales = kStageRows * kChunk; // in a stage

// Shared memory: inboxes for other workgroups' sums; rings; this workgroup's partial sums.
constexpr bool kOneTurn = kOnePass && kTurns == 1;
constexpr int kInboxes = kOneTurn ? 1 : 2;
constexpr int kInboxBytes = kSplit == 1 ? 0 : kOwnedTiles * kSplit * kTileBytes;
constexpr int kRing = kInboxes * kInboxBytes;
constexpr int kRingEnd = kRing + kWarps * kDepth * kStageBytes;
constexpr int kPartialBytes = kKWarps == 1 ? 0 : kKWarps * kTurnTiles * kTileBytes;
constexpr int kPartials = kOnePass ? kRing : kRingEnd; // in place of rings after the only pass
constexpr int kEnd = kRingEnd > kPartials + kPartialBytes ? kRingEnd : kPartials + kPartialBytes;
static_assert(kEnd == MX_SHARED_BYTES,
              "the host lays shared memory out differently: aiter_mx/kernels/linear/mma_sm90.py");
static_assert(kOneTurn || kTurnTiles >= kSplit, "who owns a tile waits for the whole cluster");

using Sums = float[kRowTiles][kTilesM][4];

struct Scales {
    unsigned w[kRowTiles][2]; // of the lane's rows of each tile, g and g + 8
    unsigned x[kTilesM];      // of row g
};

// Whether a block of x that fp16 takes for zero is not. x: the lane's first bytes.
MX_DEVICE bool loses_x(unsigned x, const Scales& scales, unsigned lowest) {
    bool loses = false;
#pragma unroll 1
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int j = 0; j < kTilesM; ++j) {
            const uint2 payload = load_shared_8((x ^ (b * kBlock)) + 8 * j * kChunk);
            loses |=
                byte_of(scales.x[j], b) <= lowest && ((payload.x | payload.y) & 0x7f7f7f7f) != 0;
        }
    return __any_sync(0xffffffff, loses);
}

// Adds a chunk's products, in fp32 alone.
MX_DEVICE void add_any_chunk(Sums& sums, unsigned w, unsigned x, const Scales& scales, int lane) {
#pragma unroll 1
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int j = 0; j < kTilesM; ++j) {
            const f16x8 column = e4m3x8_to_f16(load_shared_8((x ^ (b * kBlock)) + 8 * j * kChunk));
            const float own = e8m0_to_f32(byte_of(scales.x[j], b));
            float scale_m[2];
#pragma unroll
            for (int v = 0; v < 2; ++v)
                scale_m[v] = __shfl_sync(0xffffffff, own, (lane % 4 * 2 + v) * 4);
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
                f16x8 rows[2];
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    rows[h] = e4m3x8_to_f16(
                        load_shared_8((w ^ (b * kBlock)) + (16 * i + 8 * h) * kChunk));
                float products[4];
                mma_block(products, rows[0], rows[1], column);
#pragma unroll
                for (int v = 0; v < 4; ++v)
                    sums[i][j][v] =
                        add_scaled(sums[i][j][v], products[v],
                                   e8m0_split(byte_of(scales.w[i][v / 2], b)), scale_m[v % 2]);
            }
        }
    }
}

// Adds a chunk's products. w and x: the lane's first bytes of the first tile.
MX_DEVICE void add_chunk(Sums& sums, unsigned w, unsigned x, const Scales& scales, int lane) {
    constexpr int unroll = kRowTiles * kTilesM > 8 ? 1 : kBlocks; // what registers allow
    // x is taken times the power of two that puts its largest scale at the end of what fp16 holds,
    // w's scale times the inverse of it.
    constexpr unsigned most = 30; // so far is w's scale from the ends of fp32
    const unsigned top = __reduce_max_sync(0xffffffff, largest_byte(scales.x));
    const unsigned lowest =
        max(min(top, kUsualLowest + most + kF16Scales), kUsualLowest - most + kF16Scales) -
        kF16Scales;
    constexpr unsigned each = 0x01010101;
    unsigned far = top > lowest + kF16Scales, low = 0;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
        far |= unusual(scales.w[i][0]) | unusual(scales.w[i][1]);
    unsigned x_scales[kTilesM]; // from the first that fp16 holds on
#pragma unroll
    for (int j = 0; j < kTilesM; ++j) {
        x_scales[j] = scales.x[j] - (lowest + 1) * each;
        low |= x_scales[j] & 0xe0 * each; // of a byte below it
    }
    if (__any_sync(0xffffffff, far | low)) {
        if (__any_sync(0xffffffff, far) || loses_x(x, scales, lowest)) {
            add_any_chunk(sums, w, x, scales, lane);
            return;
        }
#pragma unroll
        for (int j = 0; j < kTilesM; ++j) // what is below belongs to zeros
            x_scales[j] = __vsubus4(scales.x[j], (lowest + 1) * each);
    }
    unsigned w_scales[kRowTiles][2];
#pragma unroll
    for (int i = 0; i < kRowTiles * 2; ++i)
        w_scales[i / 2][i % 2] = scales.w[i / 2][i % 2] + (lowest - kUsualLowest) * each;
#pragma unroll unroll
    for (int b = 0; b < kBlocks; ++b) {
        f16x8 columns[kTilesM];
#pragma unroll
        for (int j = 0; j < kTilesM; ++j)
            columns[j] = multiply(e4m3x8_to_f16(load_shared_8((x ^ (b * kBlock)) + 8 * j * kChunk)),
                                  (byte_of(x_scales[j], b) + 1) * kF16x2Exponent);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            f16x8 rows[2];
            float scale[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                rows[h] =
                    e4m3x8_to_f16(load_shared_8((w ^ (b * kBlock)) + (16 * i + 8 * h) * kChunk));
                scale[h] = usual_scale(w_scales[i][h], b);
            }
#pragma unroll
            for (int j = 0; j < kTilesM; ++j) {
                float products[4];
                mma_block(products, rows[0], rows[1], columns[j]);
#pragma unroll
                for (int v = 0; v < 4; ++v)
                    sums[i][j][v] = mx::fma(products[v], scale[v / 2], sums[i][j][v]);
            }
        }
    }
}

} // namespace mx
