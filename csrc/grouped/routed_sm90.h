// Groups of routed rows, for the grouped GEMM on Hopper with MX_ROUTED: an expert's rows are the
// sorted ids of its blocks, and row p of them is row t / a_div of x, t being sorted id p.
// aiter_mx/kernels/moe_gemm/problem.py defines the lists.
//
// Results lie as the sorted ids do, and the place of each routed row is noted. With MX_ACTIVATION
// they are activated and quantised, and go to their routed rows.
#pragma once

#include "../moe/moe.h"
#include "common/target.h"
#include "row_groups_sm90.h"

#ifndef MX_ROUTED
#define MX_ROUTED 0
#endif
#ifndef MX_ACTIVATION
#define MX_ACTIVATION 0
#endif
#ifndef MX_INTERLEAVED
#define MX_INTERLEAVED 0
#endif

namespace mx {

constexpr bool kRouted = MX_ROUTED;
constexpr int kActivation = MX_ACTIVATION;
constexpr bool kInterleaved = MX_INTERLEAVED; // gate and up rows of w alternate; else halves

struct Routing {
    const int *sorted_ids, *expert_ids, *post_padded;
    void* more; // places of routed rows, or null; or scales of results
    int valid_tokens, a_div, packed_top_k, max_blocks, block_m;

    MX_MEMBER int blocks() const {
        const int in_use = (*post_padded + block_m - 1) / block_m;
        return min(in_use, max_blocks);
    }
    // The routed row of a place, or -1.
    MX_MEMBER int routed(long place) const {
        return routed_row(sorted_ids[place], valid_tokens, packed_top_k);
    }
    // Its row of x, or -1.
    MX_MEMBER int source(int routed) const {
        const unsigned row = static_cast<unsigned>(routed) / static_cast<unsigned>(a_div);
        return routed < 0 ? -1 : static_cast<int>(row);
    }
    // Whether a block has rows of none of the experts here.
    MX_MEMBER bool is_absent(int block, int experts) const {
        const int expert = expert_ids[block];
        return expert < 0 || expert >= experts;
    }
    MX_MEMBER int* places() const { return static_cast<int*>(more); }
    MX_MEMBER unsigned char* scales() const { return static_cast<unsigned char*>(more); }
};

// The parameters of both launches.
#define MX_ROUTED_PARAMETERS                                                                       \
    const unsigned char *xq, const unsigned char *xs, const unsigned char *wq,                     \
        const unsigned char *ws, const int *sorted_ids, const int *expert_ids,                     \
        const int *post_padded, const float *, const void *bias, void *out, void *more,            \
        void *workspace_memory, long M, long N, long K, long G, int valid_tokens, int a_div,       \
        int packed_top_k, int max_blocks, int block_m, int bias_kind, long most_tiles,             \
        long most_slabs, long pairs, int clusters, float alpha, float beta, float limit

} // namespace mx
