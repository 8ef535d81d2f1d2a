// Ahead of grouped_gemm_sm90.cu: the groups' rows of x as bf16 in the order that wgmma takes, and
// the list of tiles of tokens. grouped_sm90.h draws the workspace.
//
// A workgroup expands some units of one slab, which it finds in the groups' bounds by itself; the
// first instead writes the list.

#include "grouped_rows.h"
#include "grouped_sm90.h"
#include "sm90_expand.h"

using namespace mx;

constexpr int kThreads = MX_THREADS;
constexpr int kWarps = kThreads / kLanes;
constexpr int kUnroll = MX_UNROLL; // units whose loads are issued together
constexpr int kBlock = 32;         // k of one scale
constexpr int kMostCut = 4;        // tiles; the list has room for them: see the host
static_assert(kWarps == kSlabRows / 8, "a warp has 8 rows of the slab");

struct Slab {
    long row;
    int rows;
};

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

// Rows of the slab of this index, 0 where there is none.
MX_DEVICE Slab find_slab(const RowGroups& groups, long index) {
    __shared__ int totals[kWarps];
    __shared__ Slab found;
    if (threadIdx.x == 0)
        found.rows = 0;
    long earlier = 0;
    for (long base = 0; base < groups.count && earlier <= index; base += kThreads) {
        RowRange range;
        const int slabs = slabs_of(groups, base + threadIdx.x, range);
        int before, all;
        scan(slabs, before, all, totals);
        const long inside = index - earlier - before;
        if (0 <= inside && inside < slabs) {
            const long row = range.begin + inside * kSlabRows;
            found = {row, static_cast<int>(min(range.end - row, static_cast<long>(kSlabRows)))};
        }
        earlier += all;
    }
    __syncthreads();
    return found;
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
    Cut best;
    float least = last(0, 1);
    for (int tiles = 1; tiles <= min(full, kMostCut); ++tiles)
        for (int slabs = 1; slabs <= 2; ++slabs) {
            const float time = last(tiles, slabs);
            if (time < least) {
                least = time;
                best = {tiles, slabs};
            }
        }
    return best;
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
            to.tile[at] = {row, static_cast<int>(rows), static_cast<int>(group),
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
            to.tiles[kind] = listed;
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    aiter_mx_grouped_expand(const unsigned char* xq, const unsigned char* xs,
                            const unsigned char* wq, const unsigned char* ws, const void* bias,
                            void* y, const void* starts, const void* ends, void* workspace, long M,
                            long N, long K, long G, int layout, int index_bytes, int bias_kind,
                            long most_tiles, long most_slabs, long pairs, int clusters) {
    const Workspace to(workspace, most_tiles, most_slabs);
    const RowGroups groups{starts, ends, M, G, layout, index_bytes};
    if (blockIdx.x == 0) {
        if (blockIdx.y == 0)
            list_tiles(groups, to, most_tiles, most_slabs, pairs, clusters);
        return;
    }
    const long index = blockIdx.x - 1;
    const int part = blockIdx.y;
    const Slab slab = find_slab(groups, index);
    if (slab.rows == 0)
        return;

    const int lane = threadIdx.x % kLanes, octet = threadIdx.x / kLanes;
    const int step = lane % 4, in_octet = lane / 4;
    const int in_slab = octet * 8 + in_octet;
    const long row = slab.row + min(in_slab, slab.rows - 1);
    const int units = (K + kUnitK - 1) / kUnitK;
    const int first = units * part / gridDim.y, end = units * (part + 1) / gridDim.y;
    const unsigned char* payload = xq + row * K + step * 16;
    const unsigned char* scales = xs + row * (K / kBlock) + step / 2;
    unsigned char* out =
        to.x + (index * units) * kSlabUnitBytes + octet * 1024 + step * 256 + in_octet * 16;
    bool outside = false;
    for (int unit = first; unit < end; unit += kUnroll) {
        u32x4 words[kUnroll];
        unsigned scale[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            const long k = (unit + i) * static_cast<long>(kUnitK);
            words[i] = u32x4{};
            scale[i] = 127;
            if (unit + i < end && k + step * 16 < K) {
                words[i] = load(payload + k);
                scale[i] = load_byte(scales + k / kBlock);
            }
        }
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            const bool is_nan = scale[i] == kNanScale, over = scale[i] > kLastXScale && !is_nan;
            outside |= over;
            const float factor = bits_to_float(is_nan ? kNanBits
                                               : over ? 0
                                                      : (scale[i] + 60) << 23);
            u32x4 even, odd;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                e4m3x4_to_bf16(words[i][j], factor, even.words[j], odd.words[j]);
            if (unit + i < end) {
                unsigned char* at = out + (unit + i) * static_cast<long>(kSlabUnitBytes);
                store_vector(at, even);
                store_vector(at + 128, odd);
            }
        }
    }
    const bool any = __syncthreads_or(outside && in_slab < slab.rows);
    // The first part also clears the flags that are no part's.
    const int flag = threadIdx.x == 0 ? part : threadIdx.x;
    if (threadIdx.x == 0 || (part == 0 && gridDim.y <= flag && flag < kFlagsOfSlab))
        to.outside[index * kFlagsOfSlab + flag] = threadIdx.x == 0 && any;
}
