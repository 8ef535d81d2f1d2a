// Ahead of rescaled_sm90.cu and in_place_sm90.cu, whose workspace is included before: a workgroup
// lists the blocks of x, and the groups that have any; then x is put under one scale for 128 k
// where it can be, as rescaling_sm90.h does it.

#pragma once

#include "../linear/rescaling_sm90.h"
#include "groups_sm90.h"

namespace mx {

constexpr int kListThreads = 256, kListWarps = kListThreads / kLanes;

// Sums of all threads up to each and with it, and of all.
MX_DEVICE int sum_of_threads_through(int own, int& all) {
    __shared__ int totals[kListWarps];
    const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
    int sum = own;
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
        const int other = __shfl_up_sync(~0u, sum, distance);
        sum += lane >= distance ? other : 0;
    }
    __syncthreads(); // all have read what was here
    if (lane == kLanes - 1)
        totals[warp] = sum;
    __syncthreads();
    all = 0;
#pragma unroll
    for (int w = 0; w < kListWarps; ++w) {
        sum += w < warp ? totals[w] : 0;
        all += totals[w];
    }
    return sum;
}

#if MX_ROUTED
// The places of each expert, from where it changes from one block to the next; 0 and 0 where it has
// no block.
MX_DEVICE void find_ranges(const Routing& routing, const GroupLists& to) {
    const int* const ids = routing.expert_ids;
    const int blocks = routing.blocks();
    for (int e = threadIdx.x; e < to.groups; e += kListThreads)
        to.starts()[e] = to.ends()[e] = 0;
    __syncthreads();
    for (int b = threadIdx.x; b < blocks; b += kListThreads) {
        if (routing.is_absent(b, to.groups))
            continue;
        if (b == 0 || ids[b - 1] != ids[b])
            to.starts()[ids[b]] = b * routing.block_m;
        if (b == blocks - 1 || ids[b + 1] != ids[b])
            to.ends()[ids[b]] = (b + 1) * routing.block_m;
    }
    __syncthreads();
}
#endif

// Lists blocks, no more than there is room for, which only groups that overlap have.
MX_DEVICE void list_blocks(const RowGroups& groups, const GroupLists& to) {
    int before = 0, pairs_before = 0, busy_before = 0;
    for (int base = 0; base < to.groups; base += kListThreads) {
        const int own = base + threadIdx.x;
        int blocks = 0;
        if (own < to.groups) {
            const RowRange range = groups.range(own);
            blocks = static_cast<int>((range.end - range.begin + kTileRows - 1) / kTileRows);
        }
        int all;
        const int end = before + sum_of_threads_through(blocks, all);
        const int cut = min(end, to.most_blocks), begin = min(end - blocks, to.most_blocks);
        before += all;
        const int pairs_end = pairs_before + sum_of_threads_through((cut - begin + 1) / 2, all);
        pairs_before += all;
        if (own < to.groups) {
            to.block_ends()[own] = cut;
            to.pair_ends()[own] = pairs_end;
        }
        const bool is_busy = cut > begin;
        const int place = busy_before + sum_of_threads_through(is_busy, all);
        if (is_busy)
            to.busy()[place] = own;
        busy_before += all;
    }
    if (threadIdx.x == 0)
        to.busy()[0] = busy_before;
    __syncthreads();
    const int* const ends = to.block_ends();
    for (int block = threadIdx.x; block < ends[to.groups - 1]; block += kListThreads) {
        const int group = to.group_of(ends, block);
        const RowRange range = groups.range(group);
        const int skipped = block - to.before(ends, group);
        const long row = range.begin + static_cast<long>(skipped) * kTileRows;
        const long rows = min(range.end - row, static_cast<long>(kTileRows));
        to.blocks()[block] = {static_cast<int>(row), static_cast<int>(rows)};
    }
}

extern "C" __global__ void __launch_bounds__(kListThreads, 1)
    aiter_mx_grouped_rescale_list(MX_PARAMETERS) {
    launch_dependents();
    wait_for_grid_ahead();
    const GroupLists to = GroupWorkspace MX_WORKSPACE.lists();
#if MX_ROUTED
    const Routing routing{sorted_ids, expert_ids,   post_padded, more,   valid_tokens,
                          a_div,      packed_top_k, max_blocks,  block_m};
    find_ranges(routing, to);
    list_blocks({to.starts(), to.ends(), M, G, 0, sizeof(int)}, to);
#else
    list_blocks({starts, ends, M, G, layout, index_bytes}, to);
#endif
}

#if MX_ROUTED
// Notes the places of routed rows, -1 where the expert is not here, or writes zeros there: of this
// thread's place. All lanes of a warp take part.
MX_DEVICE void settle(const Routing& routing, long place, int experts, unsigned char* out,
                      long features) {
    const bool exists = place < routing.blocks() * static_cast<long>(routing.block_m);
    const int routed = exists ? routing.routed(place) : -1;
    const bool absent = routed >= 0 && routing.is_absent(place / routing.block_m, experts);
    if constexpr (kActivation == kNoActivation) {
        if (routed >= 0 && routing.more != nullptr)
            routing.places()[routed] = absent ? -1 : static_cast<int>(place);
        return;
    }
    const int lane = threadIdx.x % kLanes;
#pragma unroll 1
    for (unsigned some = __ballot_sync(~0u, absent); some != 0; some &= some - 1) {
        const long row = __shfl_sync(~0u, routed, __ffs(some) - 1);
        for (long n = lane * 16; n < features; n += kLanes * 16)
            store_vector(out + row * features + n, u32x4{});
        for (long b = lane; b < features / 32; b += kLanes)
            routing.scales()[row * (features / 32) + b] = 0;
    }
}
#endif

extern "C" __global__ void __launch_bounds__(rescaling::kThreads)
    aiter_mx_grouped_rescale(MX_PARAMETERS) {
    const GroupWorkspace of MX_WORKSPACE;
    const auto to = of.operands();
    const GroupLists lists = of.lists();
    const int block = blockIdx.x / to.steps(), step = blockIdx.x % to.steps();
    launch_dependents();
    wait_for_grid_ahead();
    for (long i = blockIdx.x * static_cast<long>(rescaling::kThreads) + threadIdx.x;
         i < of.counters(); i += gridDim.x * static_cast<long>(rescaling::kThreads))
        of.claimed()[i] = 0;
#if MX_ROUTED
    const Routing routing{sorted_ids, expert_ids,   post_padded, more,   valid_tokens,
                          a_div,      packed_top_k, max_blocks,  block_m};
    // There are as many threads as places, as each block of x has a CTA at least.
    if (const long place = blockIdx.x * static_cast<long>(rescaling::kThreads); place < M)
        settle(routing, place + threadIdx.x, of.groups, static_cast<unsigned char*>(out),
               of.features());
#endif
    if (block >= lists.block_ends()[of.groups - 1])
        return;
    const BlockOfX rows = lists.blocks()[block];
    const long to_row = static_cast<long>(block) * kTileRows;
#if MX_ROUTED
    const auto source = [&](int i) -> long {
        return i < rows.rows ? routing.source(routing.routed(rows.row + i)) : -1;
    };
#else
    const auto source = [&](int i) -> long { return i < rows.rows ? rows.row + i : -1; };
#endif
    rescaling::rescale<kNone, false>(to, xq, xs, source, to_row, step);
}

} // namespace mx
