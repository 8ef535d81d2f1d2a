// Ahead of grouped_gemm_sm90.cu: the list of tiles of tokens, and nothing of x expanded yet.
// grouped_sm90.h draws the workspace. One workgroup, so that it takes a few microseconds.

#include "grouped_rows.h"
#include "grouped_walk_sm90.h"

using namespace mx;

constexpr int kThreads = MX_THREADS;
constexpr int kWarps = kThreads / kLanes;
constexpr int kMostMore = 16; // tiles that come of cutting, for which the host leaves room
constexpr float kMore = 2.4f; // slabs' time that a tile takes beyond that of its own

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
            const int rounds = (count + clusters - 1) / clusters;
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
    const Cut cut = best_cut(count, columns, clusters);
    const int uncut = count[kMostSlabs] - cut.tiles;
    // Where those that come of cutting are, ahead of others of their kind.
    const int first_cut = uncut + count[3] + (cut.slabs == 1 ? count[2] : 0);
    const auto put = [&](int at, const RowRange& range, long group, int group_slab, int skipped,
                         int slabs) {
        const long row = range.begin + static_cast<long>(skipped) * kSlabRows;
        const long rows = min(range.end - row, static_cast<long>(slabs * kSlabRows));
        if (at < most_tiles)
            to.tile()[at] = {row, static_cast<int>(rows), static_cast<int>(group),
                             min(group_slab + skipped, most_slabs - slabs), at};
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
                    put(first + (kind == cut.slabs ? cut.pieces() : 0) + at, range, group,
                        slabs_before + slab, skipped, kind);
                else
                    for (int part = 0; part < kMostSlabs / cut.slabs; ++part)
                        put(first_cut + (at - uncut) * (kMostSlabs / cut.slabs) + part, range,
                            group, slabs_before + slab, skipped + part * cut.slabs, cut.slabs);
            }
            slabs_before += all_slabs;
            tiles_before += all_tiles;
        }
        int listed = kind == kMostSlabs ? uncut : count[kind];
        if (kind == cut.slabs)
            listed += cut.pieces();
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
    if (threadIdx.x == 0) {
        *to.claimed() = 0;
        *to.begun() = clusters; // each begins with the tile of its own number
    }
    for (long i = threadIdx.x; i < most_tiles * to.words(); i += kThreads)
        to.expanded(0)[i] = 0;
    list_tiles({starts, ends, M, G, layout, index_bytes}, to, most_tiles, most_slabs, Columns(N),
               clusters);
}
