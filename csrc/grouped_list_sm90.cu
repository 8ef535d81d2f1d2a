// Ahead of grouped_gemm_sm90.cu: the list of tiles of tokens, and nothing of x expanded yet.
// grouped_sm90.h draws the workspace. One workgroup, so that it takes a few microseconds.

#include "grouped_rows.h"
#include "grouped_sm90.h"

using namespace mx;

constexpr int kThreads = MX_THREADS;
constexpr int kWarps = kThreads / kLanes;
constexpr int kMostCut = 4; // tiles; the list has room for them: see the host

// Adds up what the threads of the workgroup have: the sum before each, and of all.
MX_DEVICE void scan(const int own, int& before, int& all, int (&totals)[kWarps]) {
    const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
    int sum = own;
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
        const int other = __shfl_up_sync(0xffffffff, sum, distance);
        sum += lane >= distance ? other : 0;
    }
    __syncthreads();
    if (lane == kLanes - 1)
        totals[warp] = sum;
    __syncthreads();
    before = sum - own;
    all = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
        before += w < warp ? totals[w] : 0;
        all += totals[w];
    }
}

MX_DEVICE int slabs_of(const RowGroups& groups, long group, RowRange& range) {
    range = group < groups.count ? groups.range(group) : RowRange{0, 0};
    return (range.end - range.begin + kSlabRows - 1) / kSlabRows;
}

// How the last full tiles are cut so that all clusters finish at about the same time.
struct Cut {
    int tiles = 0, slabs = 1; // so many, into tiles of so many slabs
};

// Clusters take tiles in turn, full ones first. The time of a tile of s slabs is taken as s + 0.3.
MX_DEVICE Cut best_cut(int full, int pairs, int clusters) {
    const auto last = [&](int tiles, int slabs) { // when the last cluster is done
        const int first = (full - tiles) * pairs, then = tiles * (kMostSlabs / slabs) * pairs;
        const int rounds = first / clusters, more = first % clusters; // busy for a round more
        const float full_time = kMostSlabs + 0.3f, time = slabs + 0.3f;
        const int waiting = (then + clusters - 1) / clusters;
        const int behind = max((then - (clusters - more) + clusters - 1) / clusters, 0);
        return rounds * full_time + max(waiting * time, more ? full_time + behind * time : 0.0f);
    };
    // A lane for each way; all of a warp learn which is the best.
    int best = threadIdx.x % kLanes;
    const auto cut = [&](int way) {
        return way && way <= 2 * min(full, kMostCut) ? Cut{(way + 1) / 2, 2 - way % 2} : Cut{};
    };
    float least = last(cut(best).tiles, cut(best).slabs);
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
                          int most_slabs, int pairs, int clusters) {
    __shared__ int totals[kWarps];
    int count[kMostSlabs + 1] = {};
    for (long base = 0; base < groups.count; base += kThreads) {
        RowRange range;
        const int slabs = slabs_of(groups, base + threadIdx.x, range);
#pragma unroll
        for (int kind = 1; kind <= kMostSlabs; ++kind) {
            const int own = kind == kMostSlabs ? slabs / kMostSlabs : slabs % kMostSlabs == kind;
            int before, all;
            scan(own, before, all, totals);
            count[kind] += all;
        }
    }
    // Tiles that are not full fill the gaps as well.
    const bool only_full = count[1] + count[2] + count[3] == 0;
    const Cut cut = only_full ? best_cut(count[kMostSlabs], pairs, clusters) : Cut{};
    const int uncut = count[kMostSlabs] - cut.tiles;
    const auto put = [&](int at, const RowRange& range, long group, int group_slab, int skipped,
                         int slabs) {
        const long row = range.begin + static_cast<long>(skipped) * kSlabRows;
        const long rows = min(range.end - row, static_cast<long>(slabs * kSlabRows));
        if (at < most_tiles)
            to.tile()[at] = {row, static_cast<int>(rows), static_cast<int>(group),
                             min(group_slab + skipped, most_slabs - slabs), 0};
    };
    int first = 0; // tile of the kind
#pragma unroll
    for (int kind = kMostSlabs; kind > 0; --kind) {
        int slabs_before = 0, tiles_before = 0;
        for (long base = 0; base < groups.count && count[kind]; base += kThreads) {
            const long group = base + threadIdx.x;
            RowRange range;
            const int slabs = slabs_of(groups, group, range);
            const int full = slabs / kMostSlabs;
            const int own = kind == kMostSlabs ? full : slabs % kMostSlabs == kind;
            int slab, all_slabs, tile, all_tiles;
            scan(slabs, slab, all_slabs, totals);
            scan(own, tile, all_tiles, totals);
            for (int i = 0; i < own; ++i) {
                const int at = tiles_before + tile + i;
                const int skipped = (kind == kMostSlabs ? i : full) * kMostSlabs;
                if (kind < kMostSlabs || at < uncut)
                    put(first + at, range, group, slabs_before + slab, skipped, kind);
                else
                    for (int part = 0; part < kMostSlabs / cut.slabs; ++part)
                        put(uncut + (at - uncut) * (kMostSlabs / cut.slabs) + part, range, group,
                            slabs_before + slab, skipped + part * cut.slabs, cut.slabs);
            }
            slabs_before += all_slabs;
            tiles_before += all_tiles;
        }
        int listed = kind == kMostSlabs ? uncut : count[kind];
        if (kind == cut.slabs)
            listed += cut.tiles * (kMostSlabs / cut.slabs);
        listed = min(listed, most_tiles - first);
        first += listed;
        if (threadIdx.x == 0)
            to.tiles()[kind] = listed;
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    aiter_mx_grouped_list(const unsigned char* xq, const unsigned char* xs, const unsigned char* wq,
                          const unsigned char* ws, const void* bias, void* y, const void* starts,
                          const void* ends, void* workspace, long M, long N, long K, long G,
                          int layout, int index_bytes, int bias_kind, long most_tiles,
                          long most_slabs, long pairs, int clusters) {
    launch_dependents();
    wait_for_grid_ahead();
    const Workspace to{static_cast<unsigned char*>(workspace), most_tiles, K};
    if (threadIdx.x == 0)
        *to.claimed() = 0;
    for (long i = threadIdx.x; i < most_tiles * to.words(); i += kThreads)
        to.expanded(0)[i] = 0;
    list_tiles({starts, ends, M, G, layout, index_bytes}, to, most_tiles, most_slabs, pairs,
               clusters);
}
