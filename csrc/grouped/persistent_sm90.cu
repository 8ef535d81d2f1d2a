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
//   producer, a thread: 128 k of w as a box, and 64 k of x by copies of 8 KiB a slab, into a ring
//     each: stage_sm90.h
//   expander, three warps: x to bf16, for all workgroups: expand_sm90.h
//   consumer, two warpgroups, 64 rows of w each: w to bf16, multiply; then store the tile:
//     consume_sm90.h
//
// Clusters stay and claim the tiles of all groups, long ones first, kOrder tiles of tokens with the
// same w after one another: walk_sm90.h. What bf16 does not cover is put right after a tile
// is stored. NaN in w is looked for in the first tile of each group alone, and put right by the
// consumer that finishes last: again_sm90.h.

#include "consume_sm90.h"
#include "expand_sm90.h"
#include "grouped_sm90.h"
#include "sm90/async.h"
#include "sm90/copy.h"
#include "sm90/tensor_map.h"
#include "stage_sm90.h"
#include "walk_sm90.h"

using namespace mx;

constexpr int kThreads = (1 + kConsumers) * kGroupThreads;
constexpr int kExpanderThreads = kGroupThreads - kLanes; // of the first warpgroup
// The register file, 168 for each thread at first. The consumers take no more than these.
constexpr int kHelperRegisters = 104, kConsumerRegisters = 200;
constexpr int kExpanderBarrier = kConsumersBarrier + 1;

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    aiter_mx_grouped_gemm_persistent(const unsigned char* xq, const unsigned char* xs,
                                     const unsigned char* wq, const unsigned char* ws,
                                     const void* bias, Out* y, const void* starts, const void* ends,
                                     void* workspace_memory, long M, long N, long K, long G,
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
            barrier_init(barriers + kEmpty + 8 * i, kCluster * kConsumers * kWarps);
        }
        for (int i = 0; i < kWStages; ++i) {
            barrier_init(barriers + kWFull + 8 * i, 1);
            barrier_init(barriers + kWEmpty + 8 * i, kConsumers * kWarps);
        }
        fence_barrier_init();
    }
    group_barrier();
    cluster_arrive();
    cluster_wait();
    wait_for_grid_ahead();

    const Operands t{xq, xs, wq, ws, bias, y, N, K, bias_kind};
    const Workspace workspace{static_cast<unsigned char*>(workspace_memory), most_tiles, K, G * N};
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
        consumer.leave({starts, ends, M, G, layout, index_bytes});
    }
    cluster_arrive();
    cluster_wait(); // what the other workgroup sends has arrived
}
