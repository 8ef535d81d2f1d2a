// Grouped GEMM on Hopper, for many rows: y[m] = dequantised(x[m]) * dequantised(w[g])^T + bias[g]
// for each group g and each row m of it.
//
//   xq [M, K], wq [G, N, K]        e4m3 payload
//   xs [M, K/32], ws [G, N, K/32]  e8m0 scale of each 32 consecutive k
//   y  [M, N]                      fp32, bf16 or fp16
//   bias [G, N]                    any of these, or none
//
// Both operands are made bf16 with their scales applied, which is exact, so that sums over all of
// K stay in the matrix unit. x becomes so in memory, in the order of the tiles and just ahead of
// them; w in registers, as wgmma's A, while the matrix unit works on the k before.
//
// Two workgroups, a cluster, compute a tile of 256 rows of w by up to 256 tokens, 128 rows of w
// each; both need all of the tile's x, and each brings half of it to both.
//
//   producer, a thread: 64 k of w as a box, and of x by copies of 8 KiB a slab, into a ring:
//     grouped_stage_sm90.h
//   expander, three warps: x to bf16, for all workgroups: grouped_expand_sm90.h
//   consumer, two warpgroups, 64 rows of w each: w to bf16, multiply; then store the tile
//
// Clusters stay and claim the tiles of all groups, long ones first, kOrder tiles of tokens with the
// same w after one another: grouped_walk_sm90.h. What bf16 does not cover, and NaN in w, is put
// right after a tile is stored: grouped_again_sm90.h.

#include "grouped_again_sm90.h"
#include "grouped_expand_sm90.h"
#include "grouped_sm90.h"
#include "grouped_stage_sm90.h"
#include "grouped_store_sm90.h"
#include "grouped_walk_sm90.h"
#include "mx_epilogue.h"
#include "sm90_async.h"
#include "sm90_copy.h"
#include "sm90_expand.h"
#include "sm90_global.h"
#include "sm90_tensor_map.h"
#include "sm90_wgmma_wide.h"

using namespace mx;

constexpr int kWarps = kGroupThreads / kLanes;
constexpr int kThreads = (1 + kConsumers) * kGroupThreads;
constexpr int kExpanderThreads = kGroupThreads - kLanes; // of the first warpgroup
// The register file, 168 for each thread at first. The consumers take no more than these.
constexpr int kHelperRegisters = 104, kConsumerRegisters = 200;
constexpr int kExpanderBarrier = kConsumersBarrier + 1;
constexpr int kStepBytes = 256; // of 8 tokens' x, for one wgmma

struct Consumer {
    const Operands& t;
    const Workspace& workspace;
    const TensorMap& results;
    unsigned shared, barriers;
    int index, rank, thread, lane, warp;
    unsigned turn = 0;
    TokenTile tokens;   // this consumer's part of the tile
    int n;              // its first row of w
    int slabs;          // of tokens; of the next tile once that is awaited
    int x_slab;         // of a stage
    Ring ring, fetched; // where the next unit to expand is, and the one before
    // Stage of the unit before that, or of the tile before, where results may be on their way out;
    // none at first.
    int used = -1;
    // Scales of the next two units: of row lane / 4 of the warp's 16, or that + 8 for odd lanes,
    // and of the first 32 k or the other for lanes 2 and 3 of four.
    unsigned scale[2];
    const unsigned char* scales;
    int scale_units; // that this lane has
    unsigned least, most, nan[2];
    const unsigned magnitude = held(kMagnitude);
    unsigned words[2][4], factor[2][2]; // of the unit to expand: [row], [half of k][row]

    MX_MEMBER Consumer(const Operands& t, const Workspace& workspace, const TensorMap& results,
                       unsigned shared, unsigned barriers, int index, int rank, int thread)
        : t(t), workspace(workspace), results(results), shared(shared), barriers(barriers),
          index(index), rank(rank), thread(thread) {
        lane = thread % kLanes;
        warp = thread / kLanes;
    }

    MX_MEMBER unsigned load_scale() {
        const unsigned char* from = scales;
        scales += 2;
        return scale_units-- > 0 ? load_byte(from) : 127;
    }
    MX_MEMBER int first_row(const Work& work, int tail) const {
        return work.n + (tail ? 0 : rank * kRows) + index * kGroupRows;
    }
    // Waits for the next tile, and loads what it needs first.
    MX_MEMBER void await() {
        const Work work = receive(barriers, turn);
        // Told so, ptxas knows that these are the same for all lanes of a warp.
        slabs = __shfl_sync(0xffffffff, work.slabs, 0);
        const long row = first_row(work, work.tail) + warp * 16 + lane / 4 + lane % 2 * 8;
        const int half = lane / 2 % 2;
        scales = t.ws + (work.tokens.group * t.N + min(row, t.N - 1)) * t.blocks() + half;
        scale_units = (t.blocks() - half + 1) / 2;
        scale[0] = load_scale();
        scale[1] = load_scale();
    }
    // Takes the tile of a turn.
    MX_MEMBER void open(unsigned turn) {
        const Work work = told(barriers, turn);
        const int tail = __shfl_sync(0xffffffff, work.tail, 0);
        x_slab = tail ? rank * slabs : 0;
        tokens = work.tokens;
        tokens.row += x_slab * kSlabRows;
        tokens.rows = min(tokens.rows - x_slab * kSlabRows, slabs * kSlabRows);
        n = first_row(work, tail);
    }

    MX_MEMBER void release(int stage) const {
        if (lane < kCluster)
            barrier_arrive_read(address_in_cluster(barriers + kEmpty + 8 * stage, lane));
    }

    // Gives back the stage that was last used by the tile before.
    MX_MEMBER void release_results() {
        if (used < 0)
            return;
        if (thread == 0)
            store_wait_read<0>();
        __syncwarp();
        release(used);
    }

    // The payload of a unit, once it is there, and its scales as factors.
    MX_MEMBER void fetch(int buffer, unsigned w_place) {
        barrier_wait(barriers + kWFull + 8 * ring.stage, ring.parity);
        load_matrices(words[0], w_place + ring.stage * kStageW);
        load_matrices(words[1], w_place + ring.stage * kStageW + 8 * kUnitK);
        least = min(least, scale[buffer]);
        most = max(most, scale[buffer]);
        const unsigned own = w_factor(scale[buffer]);
        scale[buffer] = load_scale();
#pragma unroll
        for (int i = 0; i < 4; ++i)
            factor[i / 2][i % 2] = __shfl_sync(0xffffffff, own, i, 4);
        fetched = ring;
        ring.advance();
    }
    // What wgmma j of the unit needs.
    MX_MEMBER void expand(unsigned (&a)[4], int j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            e4m3x4_to_bf16(words[i][j], factor[j / 2][i], magnitude, a[i], a[2 + i]);
            // The top bit of a byte changes if it is NaN, or if one below is.
            nan[i] |= (words[i][j] + 0x01010101) ^ words[i][j];
        }
    }

    // Multiplies a unit, which is in registers as a[Buffer], while the next becomes a[1 - Buffer].
    template <int Buffer, bool Last, int Slabs>
    MX_MEMBER void multiply(float (&sums)[Slabs * 32], unsigned (&a)[2][4][4], int unit,
                            unsigned w_place, unsigned x_place) {
        const int stage = fetched.stage;
        barrier_wait(barriers + kXFull + 8 * stage, fetched.parity);
        const MatrixDescriptor b(x_place + stage * kStageX, kStepBytes / 2, 4 * kStepBytes);
        wgmma_fence();
        wgmma(sums, a[Buffer][0], b.at(0));
        wgmma(sums, a[Buffer][1], b.at(kStepBytes));
        wgmma_commit();
        if constexpr (!Last)
            fetch(1 - Buffer, w_place);
        wgmma_wait<1>();
        if (unit > 0)
            release(used);
        used = stage;
        if constexpr (!Last) {
            expand(a[1 - Buffer][0], 0);
            expand(a[1 - Buffer][1], 1);
        }
        wgmma_fence();
        wgmma(sums, a[Buffer][2], b.at(2 * kStepBytes));
        wgmma(sums, a[Buffer][3], b.at(3 * kStepBytes));
        wgmma_commit();
        if constexpr (!Last) {
            expand(a[1 - Buffer][2], 2);
            expand(a[1 - Buffer][3], 3);
        }
    }

    // Lets the ring pass where no output is this consumer's.
    MX_MEMBER void skip() {
        release_results();
        used = -1;
        for (int unit = 0; unit < t.units(); ++unit) {
            barrier_wait(barriers + kXFull + 8 * ring.stage, ring.parity);
            barrier_wait(barriers + kWFull + 8 * ring.stage, ring.parity);
            release(ring.stage);
            ring.advance();
        }
        await();
    }

    template <int Slabs>
    MX_MEMBER void tile() {
        open(turn++);
        least = 127;
        most = 127;
        nan[0] = nan[1] = 0;
        if (n >= t.N || tokens.rows <= 0)
            return skip();
        float sums[Slabs * 32];
#pragma unroll
        for (int i = 0; i < Slabs * 32; ++i)
            sums[i] = 0;
        const unsigned w_place = shared + kAtW + (index * kGroupRows + warp * 16) * kUnitK +
                                 lane % 8 * kUnitK + (lane / 8 ^ (lane / 2 & 3)) * 16;
        // Of tails a consumer has two slabs at most.
        const unsigned x_place = shared + (Slabs > 2 ? 0 : x_slab * kSlabUnitBytes);
        unsigned a[2][4][4];
        const int units = t.units();
        fetch(0, w_place);
#pragma unroll
        for (int j = 0; j < 4; ++j)
            expand(a[0][j], j);
        release_results();
        int unit = 0;
        for (; unit + 2 < units; unit += 2) {
            multiply<0, false, Slabs>(sums, a, unit, w_place, x_place);
            multiply<1, false, Slabs>(sums, a, unit + 1, w_place, x_place);
        }
        if (unit + 1 < units) {
            multiply<0, false, Slabs>(sums, a, unit, w_place, x_place);
            multiply<1, true, Slabs>(sums, a, unit + 1, w_place, x_place);
        } else {
            multiply<0, true, Slabs>(sums, a, unit, w_place, x_place);
        }
        open(turn - 1); // again, so that it takes no registers in the loop
        finish<Slabs>(sums);
    }

    template <int Slabs>
    MX_MEMBER void finish(float (&sums)[Slabs * 32]) {
        // Whether a row of w has NaN, or a scale that bf16 does not cover.
        const unsigned is_nan[2] = {nan[0] & 0x80808080, nan[1] & 0x80808080};
        const bool scale_outside = least < kFirstWScale || most > kLastWScale;
        const bool x_outside = tile_outside(tokens.index);
        const bool again = is_nan[0] || is_nan[1] || scale_outside || x_outside;
        float added[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
            added[i] =
                load_bias(t.bias, t.bias_kind,
                          tokens.group * t.N +
                              min(static_cast<long>(n) + warp * 16 + lane / 4 + i * 8, t.N - 1));
        await();
        wgmma_wait<0>();
        keep_in_order(sums);
        const Results out{t,
                          results,
                          tokens,
                          n,
                          index,
                          thread,
                          shared + kAtStaging + index * kStagingBytes,
                          shared + used * kStageX + index * (kStageX / kConsumers),
                          shared + kAtW + used * kStageW + index * (kStageW / kConsumers)};
        if (out.template store<Slabs>(sums, added, again)) {
            if (thread == 0)
                store_wait();
            named_barrier(1 + index, kGroupThreads);
            if (__any_sync(0xffffffff, again))
                compute_again(t, tokens, n + warp * 16, lane, is_nan, scale_outside, x_outside);
        }
    }

    MX_MEMBER bool tile_outside(int tile) const {
        unsigned long long bits = 0;
        for (int i = lane; i < workspace.words(); i += kLanes)
            bits |= load_relaxed(workspace.expanded(tile) + i);
        return bits >> 32;
    }
};

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    aiter_mx_grouped_gemm(const unsigned char* xq, const unsigned char* xs, const unsigned char* wq,
                          const unsigned char* ws, const void* bias, Out* y, const void* starts,
                          const void* ends, void* workspace_memory, long M, long N, long K, long G,
                          int layout, int index_bytes, int bias_kind, long most_tiles,
                          long most_slabs, long pairs, int clusters,
                          const __grid_constant__ TensorMap weights,
                          const __grid_constant__ TensorMap results) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    // One object for all: with two, ptxas holds barriers' addresses in vector registers, and the
    // loop over k has more instructions.
    __shared__ __align__(16) unsigned long long barrier_memory[kBarrierBytes / 8];
    const unsigned shared = held(shared_address(dynamic));
    const unsigned barriers = held(shared_address(barrier_memory));
    if (threadIdx.x == 0) {
        barrier_memory[kTold / 8] = 0; // what expander and producer tell each other
        for (int i = 0; i < kWorkPlaces; ++i)
            barrier_init(barriers + kWorkFull + 8 * i, 1);
        for (int i = 0; i < kStages; ++i) {
            barrier_init(barriers + kXFull + 8 * i, 1);
            barrier_init(barriers + kWFull + 8 * i, 1);
            barrier_init(barriers + kEmpty + 8 * i, kCluster * kConsumers * kWarps);
        }
        fence_barrier_init();
    }
    group_barrier();
    cluster_arrive();
    cluster_wait();
    wait_for_grid_ahead();

    const Operands t{xq, xs, wq, ws, bias, y, N, K, bias_kind};
    const Workspace workspace{static_cast<unsigned char*>(workspace_memory), most_tiles, K};
    const int rank = rank_in_cluster();
    // Told so, ptxas knows that it is the same for all lanes of a warp.
    const int group = __shfl_sync(0xffffffff, threadIdx.x / kGroupThreads, 0);
    const int thread = threadIdx.x % kGroupThreads;
    const unsigned turn = barriers + kTold, now = turn + 4;
    if (group == 0) {
        decrease_registers<kHelperRegisters>();
        if (thread == 0) {
            Producer producer{t, weights, workspace, shared, barriers, now, rank};
            producer.run();
        } else if (thread >= kLanes) {
            const Expander<kExpanderThreads, kExpanderBarrier> expander{
                workspace, xq, xs, K, thread - kLanes, turn, now};
            expander.run(tiles_of_band(kOrder, pairs));
        }
        __syncwarp();
    } else {
        increase_registers<kConsumerRegisters>();
        Consumer consumer(t, workspace, results, shared, barriers, group - 1, rank, thread);
        consumer.await();
        // Apart, since ptxas keeps wgmmas in flight only where one kind of them is in a loop.
        while (consumer.slabs == 4)
            consumer.tile<4>();
        while (consumer.slabs == 3)
            consumer.tile<3>();
        while (consumer.slabs == 2)
            consumer.tile<2>();
        while (consumer.slabs == 1)
            consumer.tile<1>();
        if (thread == 0)
            store_wait();
    }
    cluster_arrive();
    cluster_wait(); // what the other workgroup sends has arrived
}
