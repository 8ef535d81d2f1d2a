// Routed rows of x side by side, and the ranges of each expert, for the grouped GEMM:
// aiter_mx/kernels/moe_gemm/problem.py defines the lists.
//
//   gathered [max_blocks * block_m, K]   row p is row t / a_div of x, t being sorted id p;
//                                        payloads of padding are left as they are, its scales are 1
//   starts, ends [E]                     rows of gathered that are an expert's, all of its blocks;
//                                        0 and 0 where it has none
//   places [routed rows]                 where each is among the gathered, or -1 where its expert
//                                        is not here; may be null
//
// Workgroup 0 finds the ranges, from where the expert changes from one block to the next. In the
// others each wave takes one row.

#include "common/target.h"
#include "moe.h"

using namespace mx;

constexpr int kWaves = MX_WAVES;
constexpr int kExperts = MX_EXPERTS; // room for experts in LDS
constexpr int kThreads = kWaves * kLanes;
constexpr int kPiece = 16; // bytes of a lane
constexpr unsigned char kScaleOne = 127;
using Offset = unsigned long;

struct alignas(kPiece) Piece {
    unsigned words[4];
};

MX_DEVICE void find_ranges(const int* expert_ids, int* starts, int* ends, int blocks, int experts,
                           int block_m) {
    MX_LDS int first[kExperts], last[kExperts];
    for (int e = thread_in_group(); e < kExperts; e += kThreads)
        first[e] = last[e] = 0;
    group_barrier();
    for (int b = thread_in_group(); b < blocks; b += kThreads) {
        const int expert = expert_ids[b];
        if (expert < 0 || expert >= experts)
            continue;
        if (b == 0 || expert_ids[b - 1] != expert)
            first[expert] = b * block_m;
        if (b == blocks - 1 || expert_ids[b + 1] != expert)
            last[expert] = (b + 1) * block_m;
    }
    group_barrier();
    for (int e = thread_in_group(); e < experts; e += kThreads) {
        starts[e] = first[e];
        ends[e] = last[e];
    }
}

MX_KERNEL(kThreads)
aiter_mx_moe_gather(const unsigned char* xq, const unsigned char* xs, const int* sorted_ids,
                    const int* expert_ids, const int* post_padded, unsigned char* gathered,
                    unsigned char* scales, int* starts, int* ends, int* places, Offset K,
                    int experts, int valid_tokens, int a_div, int packed_top_k, int max_blocks,
                    int block_m) {
    const int in_use = (*post_padded + block_m - 1) / block_m;
    const int blocks = in_use < max_blocks ? in_use : max_blocks;
    if (group_x() == 0) {
        find_ranges(expert_ids, starts, ends, blocks, experts, block_m);
        return;
    }
    const long place = static_cast<long>(group_x() - 1) * kWaves + wave_in_group();
    if (place >= static_cast<long>(blocks) * block_m)
        return;
    const int t = routed_row(sorted_ids[place], valid_tokens, packed_top_k);
    const int lane = thread_in_group() % kLanes;
    const Offset blocks_of_row = K / 32;
    if (t < 0) {
        // What memory held before may be scales that the grouped GEMM cannot multiply by its matrix
        // unit: it would compute rows again, one product at a time, that nobody reads.
        for (Offset b = lane; b < blocks_of_row; b += kLanes)
            scales[place * blocks_of_row + b] = kScaleOne;
        return;
    }
    if (places && lane == 0) {
        const int expert = expert_ids[place / block_m];
        places[t] = expert >= 0 && expert < experts ? static_cast<int>(place) : -1;
    }
    const Offset row = static_cast<unsigned>(t) / static_cast<unsigned>(a_div);
    for (Offset k = lane * kPiece; k < K; k += kLanes * kPiece)
        *reinterpret_cast<Piece*>(gathered + place * K + k) =
            *reinterpret_cast<const Piece*>(xq + row * K + k);
    for (Offset b = lane; b < blocks_of_row; b += kLanes)
        scales[place * blocks_of_row + b] = xs[row * blocks_of_row + b];
}
