// A list of routed rows in blocks of another size, for GEMMs that divide these blocks among
// workgroups: aiter_mx/kernels/moe_gemm/reblock_sm90.py says when.
//
//   ids [max_blocks, block_m], experts [max_blocks], padded [1]    as moe_gemm takes them
//   weights        as sorted as the ids are, with MX_WEIGHTS
//   to_...         the same in blocks of to_block: a run of blocks of one expert becomes its valid
//                  ids, in their order, and padding up to whole blocks
//
// One workgroup does it. A warp counts the valid ids of every 32nd piece of 32, which it asks for
// before it is known how many are in use. Sums over the pieces, of which a thread has one, number
// the runs and their ids, sums over the runs say where these go. Code that is short is fast here,
// as it runs once: ids are loaded again, from the L1, and not held in registers.

#include "common/scan.h"
#include "common/target.h"

using namespace mx;

constexpr bool kPacked = MX_PACKED;   // aiter's ids
constexpr bool kWeights = MX_WEIGHTS; // whether there are any
constexpr int kPiece = kLanes, kWarps = 32, kThreads = kWarps * kLanes;
constexpr int kAtOnce = 10;   // pieces of a warp: of most lists all
constexpr int kPadding = -1;  // invalid in either encoding
constexpr int kRun = 1 << 16; // counts of ids are below it, and runs above

// Whether an id is valid: of vLLM's `most` are, of aiter's so many slots of as many tokens.
MX_DEVICE bool is_valid(int id, unsigned most, unsigned slots) {
    const unsigned bits = id;
    return kPacked ? bits >> 24 < slots && (bits & 0xffffff) < most : bits < most;
}

// A lane's ids of some of a warp's pieces, from one on and below an id.
MX_DEVICE void load_pieces(int (&id)[kAtOnce], const int* ids, int base, int end) {
    const int lane = thread_in_group() % kLanes;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
        const int from = (base + i * kWarps) * kPiece;
        id[i] = from < end ? ids[from + lane] : kPadding;
    }
}

// Sum of x over the threads before this one, and over all.
struct Before {
    int here, all;
};
MX_DEVICE Before sum_before(int x, int (&of_warps)[kWarps]) {
    const int lane = thread_in_group() % kLanes, warp = wave_in_group();
    const int so_far = sum_so_far(x, lane);
    if (lane == kLanes - 1)
        of_warps[warp] = so_far;
    group_barrier();
    const int warps = sum_so_far(of_warps[lane], lane);
    const int ahead = of_lane(warp - 1, warps); // anything in the first warp
    return {(warp > 0 ? ahead : 0) + so_far - x, static_cast<int>(of_lane(kWarps - 1, warps))};
}

MX_KERNEL(kThreads)
aiter_mx_moe_reblock(const int* ids, const int* experts, const int* padded, const float* weights,
                     int* to_ids, int* to_experts, int* to_padded, float* to_weights, int most,
                     int slots, int max_blocks, int block_m, int to_block) {
    MX_LDS int of_piece[kThreads], of_warps[2][kWarps];
    // Of runs: valid ids ahead, blocks ahead, the expert.
    MX_LDS int first[kThreads + 1], start[kThreads + 1], of_run[kThreads];
    const int thread = thread_in_group(), lane = thread % kLanes, warp = wave_in_group();
    launch_dependents();
    wait_for_grid_ahead();
    const int room = max_blocks * block_m;
    const int at = thread * kPiece, block = at / block_m; // of the thread's piece
    const bool exists = at < room;
    const int expert = exists ? experts[block] : 0;
    const int before = exists && block > 0 ? experts[block - 1] : 0;
#pragma unroll 1
    for (int base = warp; base * kPiece < room; base += kAtOnce * kWarps) {
        int id[kAtOnce];
        load_pieces(id, ids, base, room);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int count = lanes_of(lanes_where(is_valid(id[i], most, slots)));
            if (lane == 0 && (base + i * kWarps) * kPiece < room)
                of_piece[base + i * kWarps] = count;
        }
    }
    const unsigned used = (static_cast<unsigned>(*padded) + block_m - 1) / block_m;
    const int in_use = min(used, static_cast<unsigned>(max_blocks)) * block_m;
    group_barrier();

    const bool is_used = at < in_use;
    const bool begins = is_used && at % block_m == 0 && (block == 0 || expert != before);
    const int count = is_used ? of_piece[thread] : 0;
    const Before piece = sum_before(count + (begins ? kRun : 0), of_warps[0]);
    const int ahead = piece.here % kRun, runs = piece.all / kRun;
    const int run = piece.here / kRun + begins - 1;
    if (begins) {
        first[run] = ahead;
        of_run[run] = expert;
    }
    if (thread == 0)
        first[runs] = piece.all % kRun;
    group_barrier();

    const int valid = thread < runs ? first[thread + 1] - first[thread] : 0;
    const Before to =
        sum_before(static_cast<unsigned>(valid + to_block - 1) / to_block, of_warps[1]);
    if (thread < runs)
        start[thread] = to.here;
    if (thread == 0) {
        start[runs] = to.all;
        *to_padded = to.all * to_block;
    }
    group_barrier();

    if (is_used) // where its first id goes
        of_piece[thread] = start[run] * to_block + ahead - first[run];
#pragma unroll 1
    for (int r = warp; r < runs; r += kWarps) {
        const int begin = start[r], end = start[r + 1];
#pragma unroll 1
        for (int i = begin + lane; i < end; i += kLanes)
            to_experts[i] = of_run[r];
        const int filled = begin * to_block + first[r + 1] - first[r];
#pragma unroll 1
        for (int i = filled + lane; i < end * to_block; i += kLanes)
            to_ids[i] = kPadding;
    }
    group_barrier();
#pragma unroll 1
    for (int base = warp; base * kPiece < in_use; base += kAtOnce * kWarps) {
        int id[kAtOnce];
        load_pieces(id, ids, base, in_use);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int from = base + i * kWarps;
            const bool is_some = is_valid(id[i], most, slots);
            const LaneMask some = lanes_where(is_some);
            if (!is_some)
                continue;
            const int place = of_piece[from] + lanes_before(some, lane);
            to_ids[place] = id[i];
            if constexpr (kWeights)
                to_weights[place] = weights[from * kPiece + lane];
        }
    }
}
