// Grouped GEMM over routed tokens on Hopper, for few tokens an expert: a stream of weights.
// aiter_mx/kernels/moe_gemm/problem.py defines what it computes and its arguments.
//
// A workgroup takes a tile of kRows rows of an expert's w and the valid rows of a block of ids,
// kCols of them at a time. Its warps share K, kChunk at a time in turn, and each brings what it
// needs into a ring of its own, kDepth chunks ahead, across the ends of tiles:
//
//   k ->          | warp 0 | warp 1 | ... | warp 0 | warp 1 | ...
//   w, kRows rows | chunk  | chunk  |     | chunk  |        |
//   x, kCols rows | chunk  | chunk  |     | chunk  |        |
//
// So nothing but the sum over warps, once a tile, makes a warp wait for another one. Both operands
// become fp16, which is exact; a 32-block is two matrix instructions, whose fp32 sums are then
// scaled and added to those of the tile. Of one or two rows of x, four blocks of each are columns
// of one matrix, so that the sums of a chunk are scaled once (add_few_blocks).
//
// With an activation, a block of 32 features is one tile's, or shared by the tiles of a cluster of
// two or four workgroups, which tell each other their largest magnitudes.
//
// What is open, and which rows of x that takes, is looked up ahead by the part that fills the ring
// (Filler); each warp keeps a queue of it for the part that empties the ring.

#include "common/epilogue.h"
#include "common/quantize.h"
#include "common/target.h"
#include "mma_ring_sm90.h"
#include "mma_ring_sums_sm90.h"
#include "moe.h"
#include "moe_sm90.h"
#include "sm90/tma.h"

using namespace mx;

// Four consecutive values of row m of x, summed over warps.
MX_DEVICE void sum_of_warps(float (&sums)[4], const float* partials, int m, int r) {
    const float4* from = reinterpret_cast<const float4*>(partials + m * kPitch + r);
#pragma unroll
    for (int v = 0; v < kWarps; ++v) {
        const float4 part = from[v * (kPartials / 4)];
        sums[0] = v ? sums[0] + part.x : part.x;
        sums[1] = v ? sums[1] + part.y : part.y;
        sums[2] = v ? sums[2] + part.z : part.z;
        sums[3] = v ? sums[3] + part.w : part.w;
    }
}

MX_DEVICE void store_plain(const MoeArgs& a, const Entry& entry, const float* partials,
                           int thread) {
    constexpr int quads = kRows / 4;
    const bool aligned = a.N % 4 == 0;
#pragma unroll 1
    for (int i = thread; i < entry.rows * quads; i += kThreads) {
        const int m = i / quads, r = i % quads * 4;
        const long n = entry.tile * static_cast<long>(kRows) + r, t = entry.t[m];
        if (t < 0 || n >= a.N)
            continue;
        float sums[4];
        sum_of_warps(sums, partials, m, r);
        const float weight = a.weights == nullptr ? 1.0f : entry.weights[m];
        Out* const to = static_cast<Out*>(a.out) + t * a.N + n;
        struct alignas(4 * sizeof(Out)) Quad {
            Out values[4];
        } quad;
        if (a.bias_kind != kNone)
#pragma unroll
            for (int v = 0; v < 4; ++v)
                if (n + v < a.N)
                    sums[v] += load_bias(a.bias, a.bias_kind, entry.expert * a.N + n + v);
#pragma unroll
        for (int v = 0; v < 4; ++v)
            store(quad.values + v, sums[v] * weight);
        if (aligned) {
            *reinterpret_cast<Quad*>(to) = quad;
        } else {
#pragma unroll
            for (int v = 0; v < 4; ++v)
                if (n + v < a.N)
                    to[v] = quad.values[v];
        }
    }
}

// The largest magnitude of a block of row m of x, of which this thread has four features: from all
// fours of the block, which each workgroup of the cluster sends to each one.
[[maybe_unused]] MX_DEVICE unsigned largest_of_block(unsigned own, Maxima& maxima,
                                                     const Entry& entry, int done, int m, int quad,
                                                     bool is_inside) {
    const int turn = done % 2;
    const unsigned barrier = shared_address(maxima.barriers + turn);
    if (threadIdx.x == 0)
        barrier_arrive_expect(barrier, entry.rows * kBlockQuads * 4);
    if (is_inside) {
        const unsigned to =
            shared_address(&maxima.of_quad[turn][m][rank_in_cluster() * kQuads + quad]);
#pragma unroll
        for (int rank = 0; rank < kCluster; ++rank)
            store_async(address_in_cluster(to, rank), own, address_in_cluster(barrier, rank));
    }
    barrier_wait_cluster(barrier, done / 2 % 2);
    if (is_inside)
#pragma unroll
        for (unsigned of_quad : maxima.of_quad[turn][m])
            own = max(own, of_quad);
    return own;
}

// Four features of a routed row to a lane. Eight lanes have a block of 32 of them, in this
// workgroup or in the cluster.
template <int Activation>
MX_DEVICE void store_activated(const MoeArgs& a, const Entry& entry, const float* partials,
                               Maxima& maxima, int done, int thread) {
    constexpr int features = Rows::kFeatures;
    static_assert(kCluster == 1 || kCols * kQuads <= kThreads, "all send before one waits");
    const int count = entry.rows * kQuads;
    for (int i = thread; i < (count + kLanes - 1) / kLanes * kLanes; i += kThreads) {
        const bool is_inside = i < count;
        const int m = i / kQuads, first = i % kQuads * 4;
        const long t = is_inside ? entry.t[m] : -1;
        float gate[4] = {}, up[4] = {};
        if (t >= 0) {
            sum_of_warps(gate, partials, m, first);
            sum_of_warps(up, partials, m, first + features);
        }
#pragma unroll
        for (int v = 0; v < 4; ++v) {
            if (a.bias_kind != kNone) {
                const Offset expert = entry.expert * static_cast<Offset>(a.N);
                gate[v] +=
                    load_bias(a.bias, a.bias_kind, expert + Rows::row(a, entry.tile, first + v));
                up[v] += load_bias(a.bias, a.bias_kind,
                                   expert + Rows::row(a, entry.tile, first + v + features));
            }
            gate[v] = activate<Activation>(gate[v], up[v], a.activation);
        }
        unsigned largest = amax_bits(gate);
        if constexpr (kCluster > 1)
            largest = largest_of_block(largest, maxima, entry, done, m, i % kQuads, is_inside);
        else
            largest = max_of_lanes<kQuads>(largest);
        const BlockScale scale = block_scale<E4M3, kRoundUp>(largest);
        const unsigned word = to_e4m3x4<kRoundUp>(gate[0], gate[1], gate[2], gate[3], scale);
        const long n = t * (a.N / 2) + entry.tile * static_cast<long>(features) + first;
        if (t < 0)
            continue;
        *reinterpret_cast<unsigned*>(static_cast<unsigned char*>(a.out) + n) = word;
        if (n % kBlock == 0)
            a.out_scales[n / kBlock] = scale.byte;
    }
}

#if MX_ACTIVATION && MX_ROW_TILES < 4 // a cluster of one is a launch in clusters, too
#define CLUSTER __cluster_dims__(kCluster, 1, 1)
#else
#define CLUSTER
#endif

extern "C" __global__ void CLUSTER __launch_bounds__(kThreads, kGroups)
    aiter_mx_moe_gemm_mma_ring(MX_MOE_PARAMETERS) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    const MoeArgs a = MX_MOE_ARGS;
    const int thread = threadIdx.x, lane = thread % kLanes, warp = thread / kLanes;
    const unsigned ring = shared_address(dynamic) + warp * kRingBytes;
    float* const partials = reinterpret_cast<float*>(dynamic + kWarps * kRingBytes);
    Entry* const queue = reinterpret_cast<Entry*>(partials + kWarps * kPartials) + warp * kEntries;
    Maxima& maxima = *reinterpret_cast<Maxima*>(dynamic + MX_SHARED_BYTES - kMaximaBytes);

    if constexpr (kCluster > 1) {
        if (thread == 0) {
            for (unsigned long& barrier : maxima.barriers)
                barrier_init(shared_address(&barrier), 1);
            fence_barrier_init();
        }
        __syncwarp();
        cluster_arrive_relaxed();
    }
    Walk walk(a, Rows::count(a), lane, false);
    Filler filler(a, walk, ring, queue, lane, warp);
    if constexpr (kEarlyRouting) {
        walk.begin();
        Walk early_walk = walk;
        Filler early(a, early_walk, ring, queue, lane, warp);
        for (int d = 0; d < kDepth - 1; ++d)
            early.fill(true, false);
        wait_for_grid_ahead(); // which made x
    } else {
        if (warp == 0 && walk.next_tile == 0) // one workgroup for each block of ids
            walk.ask_for_lists();
        wait_for_grid_ahead();
        walk.begin();
        filler.ask_for_first();
    }
    Sums sums;
    const Entry* entry = queue;
    int done = 0, slot = 0, chunk = warp;
    for (int step = 0;; ++step) {
        __syncwarp(); // the slot to be filled is no longer read
        filler.fill(!kEarlyRouting || step >= kDepth - 1, true);
        if (step < kDepth - 1)
            continue;
        if (done == filler.opened)
            break;
        if (chunk == warp)
            for (auto& rows : sums)
                for (auto& tile : rows)
                    for (float& sum : tile)
                        sum = 0.0f;
        copy_wait<kDepth - 1>();
        __syncwarp();
        const unsigned at = ring + slot * kSlotBytes;
        if (entry->rows <= kFewRows)
            add_few(sums, a, *entry, at, lane);
        else if (entry->col_tiles() == 1)
            add_chunk<1>(sums, a, *entry, at, chunk, lane);
        else
            add_chunk<kColTiles>(sums, a, *entry, at, chunk, lane);
        slot = slot + 1 == kDepth ? 0 : slot + 1;
        chunk += kWarps;
        if (chunk < a.chunks())
            continue;

        if (done > 0)
            group_barrier(); // the partial sums of the entry before have been read
        store_partials(partials + warp * kPartials, sums, *entry, lane);
        group_barrier();
        if constexpr (kActivation == kNoActivation) {
            store_plain(a, *entry, partials, thread);
        } else {
            if (kCluster > 1 && done == 0)
                cluster_wait(); // all have set up their barriers
            store_activated<kActivation>(a, *entry, partials, maxima, done, thread);
        }
        entry = entry + 1 == queue + kEntries ? queue : entry + 1;
        chunk = warp;
        if (++done == filler.opened && filler.is_over)
            break;
    }
}
