// Decode linear for up to 64 rows of x on Hopper: y = dequantised(x) * dequantised(w)^T + bias.
//
//   xq [M, K], wq [N, K]        e4m3 payload
//   xs [M, K/32], ws [N, K/32]  e8m0 scale of each 32 consecutive k
//   y  [M, N]                   fp32, bf16 or fp16
//   bias [N]                    any of these, or none
//
// A cluster takes a share of the rows of w, kPassRows at a time. Its kSplit workgroups have a part
// of K each, and the warps of a workgroup take turns with the part's chunks of 128 k:
//
//                   k -> | workgroup 0               | workgroup 1         | ... of the cluster
//   16 kRowTiles rows    | warp 0 | 1 | .. | 0 | ..  | warp 0 | 1 | ..
//   the next ones        | warp kKWarps | ..         |                        if kRowWarps > 1
//
// Each warp copies its own pieces of w and x into its own ring in shared memory, kDepth chunks
// ahead, and waits for nobody. Both become fp16 as they are used: w's payload as it is, x's with
// its block scale. The products of a block of 32 k are summed by two mma and added, times w's
// scale, to sums in fp32. Where fp16 does not hold all scales of x in a chunk, or a scale of w is
// near the ends of e8m0, both are applied in fp32.
//
// Sums are added over the warps of a workgroup, then over the cluster, each in a fixed order.

#define MX_CLUSTER MX_SPLIT

#include "common/epilogue.h"
#include "common/scale.h"
#include "common/target.h"
#include "rows_sm90.h"
#include "sm90/cluster.h"
#include "sm90/mma.h"
#include "sm90/tma.h"

using namespace mx;

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

// A turn exchanges kTurnTiles tiles of sums.
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
static_assert(
    kEnd == MX_SHARED_BYTES,
    "the host lays shared memory out differently: aiter_mx/kernels/linear/mma_ring_sm90.py");
static_assert(kOneTurn || kTurnTiles >= kSplit, "who owns a tile waits for the whole cluster");

using Sums = float[kRowTiles][kTilesM][4];

struct Scales {
    unsigned w[kRowTiles][2]; // of the lane's rows of each tile, g and g + 8
    unsigned x[kTilesM];      // of row g
};

// True if a block of x that fp16 takes for zero is not. x: the lane's first bytes.
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

// Stores a tile of outputs.
struct Store {
    const void* bias;
    Out* y;
    int bias_kind, M;
    long N, end;
    int lane;

    // first: row of w of the pass. tile: of a turn.
    MX_MEMBER void operator()(float4 sums, long first, int turn, int tile) const {
        const int m = (turn * kTurnTilesM + tile % kTurnTilesM) * 8 + lane % 4 * 2;
        const long n = first + tile / kTurnTilesM * 16 + lane / 4;
        const float values[2][2] = {{sums.x, sums.y}, {sums.z, sums.w}};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (n + 8 * i >= end)
                continue;
            const float added = load_bias(bias, bias_kind, n + 8 * i);
#pragma unroll
            for (int j = 0; j < 2; ++j)
                if (m + j < M)
                    store(y + (m + j) * N + n + 8 * i, values[i][j] + added);
        }
    }
};

// What other workgroups of the cluster sent to this one, to be added and stored.
struct Inbox {
    const Store& store;
    unsigned boxes, full; // addresses: of memory, and of the barriers that tell when all is there
    int warp, rank, owned;
    int next = 0, pending = 0; // how many turns were begun, and are not finished
    long first;                // of the last one begun
    int turn;

    MX_MEMBER void finish(bool last) {
        if (owned > 0)
            barrier_wait(full + (next - 1) % kInboxes * 8, (next - 1) / kInboxes & 1);
        if (last)
            cluster_arrive_relaxed();
        else if (threadIdx.x == 0)
            barrier_arrive_expect(full + (next - 1) % kInboxes * 8, owned * kSplit * kTileBytes);
        const unsigned box = boxes + (next - 1) % kInboxes * kInboxBytes + store.lane * 16;
        for (int i = warp; i < owned; i += kWarps) {
            float4 sum = load_tile(box + i * kSplit * kTileBytes);
#pragma unroll
            for (int s = 1; s < kSplit; ++s)
                sum = add(sum, load_tile(box + (i * kSplit + s) * kTileBytes));
            store(sum, first, turn, i * kSplit + rank);
        }
    }
    // The turn before must be finished.
    MX_MEMBER void begin(long first_row, int its_turn) {
        first = first_row;
        turn = its_turn;
        ++next;
    }
    MX_MEMBER void send(int tile, float4 sum) const {
        const int box = (next - 1) % kInboxes, to = tile % kSplit;
        const unsigned place =
            boxes + box * kInboxBytes + (tile / kSplit * kSplit + rank) * kTileBytes;
        store_async(address_in_cluster(place + store.lane * 16, to), sum,
                    address_in_cluster(full + box * 8, to));
    }
};

extern "C" __global__ void MX_CLUSTER_DIMS __launch_bounds__(kThreads, kPerSm)
    aiter_mx_linear_mma_ring(const unsigned char* xq, const unsigned char* xs,
                             const unsigned char* wq, const unsigned char* ws, const void* bias,
                             Out* y, long M, long N, long K, int bias_kind, long cluster_rows,
                             int clusters_with_one_more, int part_chunks, int parts_with_one_more,
                             int overlaps) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    __shared__ unsigned long long full_barriers[kInboxes];
    const unsigned shared = shared_address(dynamic);
    const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
    const int k_warp = warp % kKWarps, row_warp = warp / kKWarps;
    const int cluster = blockIdx.x / kSplit, rank = blockIdx.x % kSplit;
    const unsigned full = shared_address(full_barriers);
    const int owned = (kTurnTiles - rank + kSplit - 1) / kSplit;
    if constexpr (kSplit > 1) {
        if (threadIdx.x < kInboxes) {
            barrier_init(full + 8 * threadIdx.x, 1);
            fence_barrier_init();
            barrier_arrive_expect(full + 8 * threadIdx.x, owned * kSplit * kTileBytes);
        }
        cluster_arrive_relaxed();
    }

    const Tensors t{xq, xs, wq, ws, static_cast<int>(M), N, K};
    const long first_row = cluster * cluster_rows + min(cluster, clusters_with_one_more);
    const long end_row = first_row + cluster_rows + (cluster < clusters_with_one_more);
    const int first_chunk = rank * part_chunks + min(rank, parts_with_one_more);
    const int chunks = part_chunks + (rank < parts_with_one_more);
    const int steps = (chunks + kKWarps - 1 - k_warp) / kKWarps; // of this warp in a pass
    const int passes = kOnePass ? 1 : (end_row - first_row + kPassRows - 1) / kPassRows;
    const bool plain = t.aligned(ws) && t.aligned(xs);
    const long warp_row = first_row + row_warp * kWarpRows;
    const int warp_chunk = first_chunk + k_warp;

    // Copies run kDepth steps ahead, into the next pass too.
    const unsigned ring = shared + kRing + warp * kDepth * kStageBytes;
    Copier<kWarpRows, kKWarps> copier_w;
    Copier<kRowsM, kKWarps> copier_x;
    copier_w.open(wq, ws, t, warp_row, end_row, warp_chunk, lane);
    copier_x.open(xq, xs, t, 0, M, warp_chunk, lane);
    const auto left_from = [&](int chunk) { return K - chunk * static_cast<long>(kChunk); };
    int pass_w = steps > 0 ? 0 : passes, step_w = 0, step_x = 0; // to copy next
    const auto copy_w = [&](unsigned slot) {
        const unsigned stage = ring + slot * kStageBytes;
        copier_w.copy(stage, stage + kScales, t, left_from(warp_chunk + step_w * kKWarps), plain,
                      lane);
        if (++step_w == steps) {
            step_w = 0;
            ++pass_w;
            copier_w.open(wq, ws, t, warp_row + pass_w * static_cast<long>(kPassRows), end_row,
                          warp_chunk, lane);
        }
    };
    const auto copy_x = [&](unsigned slot) {
        const unsigned stage = ring + slot * kStageBytes;
        copier_x.copy(stage + kWarpRows * kChunk, stage + kScales + kWarpRows * kScaleBytes, t,
                      left_from(warp_chunk + step_x * kKWarps), plain, lane);
        if (++step_x == steps) {
            step_x = 0;
            copier_x.open(xq, xs, t, 0, M, warp_chunk, lane);
        }
    };
    // A launch that overlaps the one ahead of it in the stream may not read x, or write, before
    // that has ended.
    const int filled = min(kDepth, passes * steps);
    if (overlaps) {
#pragma unroll 1
        for (int d = 0; d < filled; ++d)
            copy_w(d);
        launch_dependents();
        wait_for_grid_ahead();
    }
#pragma unroll 1
    for (int d = 0; d < kDepth; ++d) {
        if (d < filled) {
            copy_x(d);
            if (!overlaps)
                copy_w(d);
        }
        copy_commit();
    }
    if (!overlaps)
        launch_dependents();

    const Store store_outputs{bias, y, bias_kind, t.M, N, end_row, lane};
    Inbox inbox{store_outputs, shared, full, warp, rank, owned};
    const int g = lane / 4;
    const unsigned in_stage = swizzled_block_for_mma(0, lane);
    unsigned slot = 0;
    for (int pass = 0; pass < passes; ++pass) {
        const long pass_first = first_row + pass * static_cast<long>(kPassRows);
        Sums sums = {};
        for (int step = 0; step < steps; ++step) {
            copy_wait<kDepth - 1>();
            __syncwarp();
            const unsigned stage = ring + slot * kStageBytes, scales_at = stage + kScales;
            const int chunk = warp_chunk + step * kKWarps;
            const unsigned blocks = t.blocks();
            Scales scales;
#pragma unroll
            for (int i = 0; i < kRowTiles * 2; ++i) {
                const unsigned n = min(pass_first + row_warp * kWarpRows + 8 * i + g, end_row - 1);
                scales.w[i / 2][i % 2] =
                    load_scales(scales_at + (8 * i + g) * kScaleBytes, plain,
                                reinterpret_cast<unsigned long>(ws) + n * blocks, left_from(chunk));
            }
#pragma unroll
            for (int j = 0; j < kTilesM; ++j)
                scales.x[j] = load_scales(scales_at + (kWarpRows + 8 * j + g) * kScaleBytes, plain,
                                          reinterpret_cast<unsigned long>(xs) +
                                              min(8 * j + g, t.M - 1) * blocks,
                                          left_from(chunk));
            add_chunk(sums, stage + in_stage, stage + kWarpRows * kChunk + in_stage, scales, lane);
            __syncwarp();
            if (pass_w < passes) {
                copy_x(slot);
                copy_w(slot);
            }
            copy_commit();
            slot = slot + 1 == kDepth ? 0 : slot + 1;
        }

        if (kSplit > 1 && pass == 0)
            cluster_wait(); // all of the cluster's workgroups have started
        const auto give = [&](float4 sum, int turn, int tile) {
            if constexpr (kSplit > 1)
                inbox.send(tile, sum);
            else
                store_outputs(sum, pass_first, turn, tile);
        };
#pragma unroll
        for (int turn = 0; turn < kTurns; ++turn) {
            const auto tile_sum = [&](int i) {
                const float (&v)[4] = sums[i / kTurnTilesM][turn * kTurnTilesM + i % kTurnTilesM];
                return float4{v[0], v[1], v[2], v[3]};
            };
            constexpr int own = kRowTiles * kTurnTilesM; // tiles of a warp
            if constexpr (kKWarps > 1) {
                group_barrier(); // what the partial sums overwrite is no longer read
                const unsigned partials = shared + kPartials + lane * 16;
#pragma unroll
                for (int i = 0; i < own; ++i)
                    store_tile(partials + (k_warp * kTurnTiles + row_warp * own + i) * kTileBytes,
                               tile_sum(i));
            }
            if constexpr (kSplit > 1) {
                if (pass + turn > 0)
                    inbox.finish(false);
                inbox.begin(pass_first, turn);
            }
            // Partial sums are there, and an inbox is read before this workgroup sends more.
            group_barrier();
            if constexpr (kKWarps > 1) {
                const unsigned partials = shared + kPartials + lane * 16;
                for (int tile = warp; tile < kTurnTiles; tile += kWarps) {
                    float4 sum = load_tile(partials + tile * kTileBytes);
#pragma unroll
                    for (int i = 1; i < kKWarps; ++i)
                        sum = add(sum, load_tile(partials + (i * kTurnTiles + tile) * kTileBytes));
                    give(sum, turn, tile);
                }
            } else {
#pragma unroll
                for (int i = 0; i < own; ++i)
                    give(tile_sum(i), turn, row_warp * own + i);
            }
        }
    }
    if constexpr (kSplit > 1) {
        inbox.finish(true);
        cluster_wait(); // what was sent to the workgroups of the cluster has arrived
    }
}
