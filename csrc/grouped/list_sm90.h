// Ahead of persistent_sm90.cu: the list of tiles of tokens, and nothing of x expanded yet.
// tiles_sm90.h draws the workspace. One workgroup, so that it takes a few microseconds. It gets
// the arguments of the product, and names those that it needs.

#pragma once

#include "tiles_sm90.h"

namespace mx::listing {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kLanes;
constexpr int kMostMore = 16; // tiles that come of cutting, for which the host leaves room
constexpr float kMore = 2.4f; // slabs' time that a tile takes beyond that of its own

// Groups need slabs, and tiles of 1, 2, .. slabs, from index 1.
struct Need {
    int of[1 + kMostSlabs];

    template <typename Each>
    MX_MEMBER void change(Each each) {
#pragma unroll
        for (int i = 0; i <= kMostSlabs; ++i)
            of[i] = each(i);
    }
};

MX_DEVICE Need need_of(const RowRange& range) {
    const int slabs = (range.end - range.begin + kSlabRows - 1) / kSlabRows;
    Need need;
    need.change([&](int i) {
        return i == 0 ? slabs : i == kMostSlabs ? slabs / kMostSlabs : slabs % kMostSlabs == i;
    });
    return need;
}

struct Place {
    RowRange range;
    Need before; // of the ranges before
};

// Places the ranges, `count` in all, whose numbers begin with base, one for each thread. Adds what
// they need to that of those before.
MX_DEVICE void place_ranges(const RowGroups& groups, int count, long base, Need& before,
                            Place (&places)[kThreads]) {
    __shared__ Need totals[kWarps];
    const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
    const long own_range = base + threadIdx.x;
    const RowRange range = own_range < count ? groups.range(own_range) : RowRange{0, 0};
    const Need own = need_of(range);
    Need sum = own;
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2)
        sum.change([&](int i) {
            const int other = __shfl_up_sync(0xffffffff, sum.of[i], distance);
            return sum.of[i] + (lane >= distance ? other : 0);
        });
    __syncthreads(); // all have read what was here
    if (lane == kLanes - 1)
        totals[warp] = sum;
    __syncthreads();
    Need here;
    here.change([&](int i) { return before.of[i] + sum.of[i] - own.of[i]; });
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
        here.change([&](int i) { return here.of[i] + (w < warp ? totals[w].of[i] : 0); });
        before.change([&](int i) { return before.of[i] + totals[w].of[i]; });
    }
    places[threadIdx.x] = {range, here};
    __syncthreads();
}

// The last full tiles are cut so that all clusters finish at about the same time.
struct Cut {
    int tiles = 0, slabs = 1; // so many, into tiles of so many slabs

    MX_MEMBER int pieces() const { return tiles * (kMostSlabs / slabs); }
};

// Clusters take the longest tiles first. Those where consumers have s slabs take about s + 2.4, as
// measured when all of the GPU has such; another kind of tiles fills the gaps that those before
// leave, but for about a third of one.
MX_DEVICE float time_of_all(const int (&tiles)[kMostSlabs + 1], const Columns& columns,
                            int clusters) {
    const float each = 1.0f / clusters;
    float busy = 0, last = 0; // sum of all in a cluster; when the last is done
#pragma unroll
    for (int slabs = kMostSlabs; slabs > 0; --slabs) {
        const auto add = [&](int count, float time) {
            if (count == 0)
                return;
            // Rounded up: a half keeps errors of the product away from whole numbers.
            const int rounds = (count + clusters - 0.5f) * each;
            const float alone = rounds * time;
            last = busy == 0 ? alone : max(last, busy + count * time * each + 0.3f * time);
            busy += count * time * each;
        };
        add(tiles[slabs] * columns.panels, slabs + kMore);
        add(Tails(columns, slabs, tiles).count, slabs + kMore);
    }
    return last;
}

MX_DEVICE Cut best_cut(const int (&tiles)[kMostSlabs + 1], const Columns& columns, int clusters) {
    // A lane for each way; all of a warp learn which is the best.
    int best = threadIdx.x % kLanes;
    const auto cut = [](int way) { return way ? Cut{(way + 1) / 2, 2 - way % 2} : Cut{}; };
    const Cut own = cut(best);
    int after[kMostSlabs + 1] = {0, tiles[1], tiles[2], tiles[3], tiles[4] - own.tiles};
    after[1] += own.slabs == 1 ? own.pieces() : 0;
    after[2] += own.slabs == 2 ? own.pieces() : 0;
    const bool possible = own.tiles <= tiles[kMostSlabs] && own.pieces() - own.tiles <= kMostMore;
    float least = possible ? time_of_all(after, columns, clusters) : 1e30f;
#pragma unroll
    for (int distance = kLanes / 2; distance; distance /= 2) {
        const float time = __shfl_xor_sync(0xffffffff, least, distance);
        const int way = __shfl_xor_sync(0xffffffff, best, distance);
        if (time < least || (time == least && way < best)) {
            least = time;
            best = way;
        }
    }
    return cut(best);
}

// Writes the list of tiles. Only groups that overlap have more than there is room for; their
// results are of no use, but nothing outside the workspace is named.
MX_DEVICE void list_tiles(const RowGroups& groups, const Workspace& to, int most_tiles,
                          int most_slabs, const Columns& columns, int clusters) {
    __shared__ Place places[kThreads];
    const int ranges = groups.ranges();
    Need all{};
    for (long base = 0; base < ranges; base += kThreads)
        place_ranges(groups, ranges, base, all, places);
    const Cut cut = best_cut(all.of, columns, clusters);
    const int uncut = all.of[kMostSlabs] - cut.tiles, pieces = kMostSlabs / cut.slabs;
    // Tiles that come of cutting are listed ahead of others of their kind.
    const int first_cut = uncut + all.of[3] + (cut.slabs == 1 ? all.of[2] : 0);
    int first[1 + kMostSlabs], end = 0; // where tiles of each kind begin
#pragma unroll
    for (int kind = kMostSlabs; kind > 0; --kind) {
        const int own = kind == kMostSlabs ? uncut : all.of[kind];
        const int of_cutting = kind == cut.slabs ? cut.pieces() : 0;
        first[kind] = end + of_cutting;
        const int listed = min(own + of_cutting, most_tiles - end);
        end += listed;
        if (threadIdx.x == 0)
            to.tiles()[kind] = listed;
    }
    // Threads share ranges where there are fewer of these.
    const int count = min(ranges, kThreads);
    int sharing = kThreads;
    while (sharing * count > kThreads)
        sharing /= 2;
    Need before{};
    for (long base = 0; base < ranges; base += kThreads) {
        if (ranges > kThreads)
            place_ranges(groups, ranges, base, before, places);
        const int in_base = threadIdx.x / sharing;
        if (base + in_base >= ranges)
            continue;
        const Place& place = places[in_base];
        const Need own = need_of(place.range);
        const int group = groups.group_of(base + in_base);
        const auto put = [&](int at, int skipped, int slabs) {
            const long row = place.range.begin + static_cast<long>(skipped) * kSlabRows;
            const long rows = min(place.range.end - row, static_cast<long>(slabs * kSlabRows));
            if (at < most_tiles)
                to.tile()[at] = {row,
                                 static_cast<short>(rows),
                                 skipped == 0,
                                 group,
                                 min(place.before.of[0] + skipped, most_slabs - slabs),
                                 at};
        };
        const int full = own.of[kMostSlabs];
        for (int i = threadIdx.x % sharing; i < full; i += sharing) {
            const int at = place.before.of[kMostSlabs] + i, skipped = i * kMostSlabs;
            if (at < uncut)
                put(first[kMostSlabs] + at, skipped, kMostSlabs);
            else
                for (int part = 0; part < pieces; ++part)
                    put(first_cut + (at - uncut) * pieces + part, skipped + part * cut.slabs,
                        cut.slabs);
        }
#pragma unroll
        for (int kind = 1; kind < kMostSlabs; ++kind)
            if (own.of[kind] && threadIdx.x % sharing == 0)
                put(first[kind] + place.before.of[kind], full * kMostSlabs, kind);
    }
}

#if MX_ROUTED
// The rows of each expert, from where it changes from one block to the next; 0 and 0 where it has
// no block.
MX_DEVICE void find_ranges(const Routing& routing, const Workspace& to, int experts) {
    const int* const ids = routing.expert_ids;
    const int blocks = routing.blocks();
    for (int e = threadIdx.x; e < experts; e += kThreads)
        to.starts()[e] = to.ends()[e] = 0;
    __syncthreads();
    for (int b = threadIdx.x; b < blocks; b += kThreads) {
        if (routing.is_absent(b, experts))
            continue;
        if (b == 0 || ids[b - 1] != ids[b])
            to.starts()[ids[b]] = b * routing.block_m;
        if (b == blocks - 1 || ids[b + 1] != ids[b])
            to.ends()[ids[b]] = (b + 1) * routing.block_m;
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    aiter_mx_grouped_gemm_list(MX_ROUTED_PARAMETERS) {
    launch_dependents();
    wait_for_grid_ahead();
    const Workspace to{static_cast<unsigned char*>(workspace_memory), most_tiles, K, G * N, 0, G};
    const Routing routing{sorted_ids, expert_ids,   post_padded, more,   valid_tokens,
                          a_div,      packed_top_k, max_blocks,  block_m};
    to.clear<kThreads>(clusters);
    find_ranges(routing, to, G);
    list_tiles({to.starts(), to.ends(), M, G, 0, sizeof(int)}, to, most_tiles, most_slabs,
               Columns(N), clusters);
}
#else
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    aiter_mx_grouped_gemm_list(const unsigned char*, const unsigned char*, const unsigned char*,
                               const unsigned char*, const void*, void*, const void* starts,
                               const void* ends, void* workspace, long M, long N, long K, long G,
                               int layout, int index_bytes, int, long most_tiles, long most_slabs,
                               long, int clusters) {
    launch_dependents();
    wait_for_grid_ahead();
    const Workspace to{static_cast<unsigned char*>(workspace), most_tiles, K, G * N, 0, 0};
    to.clear<kThreads>(clusters);
    list_tiles({starts, ends, M, G, layout, index_bytes}, to, most_tiles, most_slabs, Columns(N),
               clusters);
}
#endif

} // namespace mx::listing
