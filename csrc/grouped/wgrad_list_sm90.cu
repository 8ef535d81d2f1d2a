// Ahead of persistent_sm90.cu with MX_WGRAD: the list of tiles of x, those of long groups first,
// and nothing of x expanded yet. tiles_sm90.h draws the workspace. One workgroup, so that it takes
// a few microseconds. It gets the arguments of the product, and names those that it needs.

#include "tiles_sm90.h"

using namespace mx;

constexpr int kThreads = MX_THREADS;
constexpr int kWarps = kThreads / kLanes;
constexpr int kStart = 128; // groups begin at multiples of so many k
#ifndef MX_PIECES
#define MX_PIECES 1
#endif
constexpr long kPieces = MX_PIECES; // of a group's k, each of which is a group

// The k of each group, cut to those that there are.
struct GroupDepths {
    const void *starts, *through, *before; // before: null, or what is subtracted from through
    long K, count;
    int index_bytes;

    MX_MEMBER Depth of(long piece) const {
        if (piece >= count)
            return {0, 0};
        const long group = piece / kPieces;
        const long start = min(max(at(starts, group), 0l), K) / kStart * kStart;
        const long columns = at(through, group) - (before ? at(before, group) : 0);
        const long all = min(max(columns, 0l), K - start);
        if constexpr (kPieces == 1)
            return {start, all};
        const long room = (all + kPieces * kStart - 1) / (kPieces * kStart) * kStart;
        const long passed = piece % kPieces * room;
        return {start + passed, min(max(all - passed, 0l), room)};
    }

  private:
    MX_MEMBER long at(const void* bounds, long group) const {
        return index_bytes == 4 ? static_cast<const int*>(bounds)[group]
                                : static_cast<const long*>(bounds)[group];
    }
};

// The sum of x over the threads before this one. Adds that over all to `all`.
MX_DEVICE int sum_before(int x, int& all) {
    __shared__ int totals[kWarps];
    const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
    int sum = x;
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
        const int other = __shfl_up_sync(0xffffffff, sum, distance);
        sum += lane >= distance ? other : 0;
    }
    __syncthreads(); // all have read what was here
    if (lane == kLanes - 1)
        totals[warp] = sum;
    __syncthreads();
    sum += all - x;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
        sum += w < warp ? totals[w] : 0;
        all += totals[w];
    }
    return sum;
}

// A group's place among those that have k, and in the workspace: its first unit of each slab, and
// its first word of each tile, if all those of a group followed one another.
struct Place {
    Depth depth;
    int ordinal, units, words;
};

MX_DEVICE void list_tiles(const GroupDepths& groups, const Workspace& to, int M, int band) {
    __shared__ Place places[kThreads];
    const int tiles = (M + kMostRows - 1) / kMostRows, slabs = (M + kSlabRows - 1) / kSlabRows;
    const int last_slabs = slabs - (tiles - 1) * kMostSlabs; // of a group's last tile
    const int widest = tiles - (last_slabs < kMostSlabs);    // tiles of so many as there can be
    int filled = 0;                                          // groups that have k
    for (long base = 0; base < groups.count; base += kThreads)
        filled += __syncthreads_count(groups.of(base + threadIdx.x).columns > 0);
    int filled_before = 0, chunks_before = 0, words_before = 0;
    for (long base = 0; base < groups.count; base += kThreads) {
        const long group = base + threadIdx.x;
        const Depth depth = groups.of(group);
        const int chunks = chunks_of(depth.columns), words = words_of(chunks);
        const int ahead = sum_before(depth.columns > 0, filled_before);
        // Groups that overlap have more than there is room for; their results are of no use, but
        // nothing outside the workspace is named.
        const int chunk =
            min(sum_before(chunks, chunks_before), static_cast<int>(groups.K / kStart) - chunks);
        const int word =
            min(sum_before(words, words_before), static_cast<int>(to.most_words / tiles) - words);
        places[threadIdx.x] = {depth, ahead, chunk * kChunkUnits * slabs, word * tiles};
        __syncthreads();
        if (group < groups.count && depth.columns == 0)
            to.empty_group()[group - ahead] = group;
        if (groups.count <= kThreads) { // those of most k first
            int longer = 0;
            for (int other = 0; other < groups.count; ++other) {
                const long columns = places[other].depth.columns;
                longer += columns > depth.columns ||
                          (columns == depth.columns && other < static_cast<int>(threadIdx.x));
            }
            places[threadIdx.x].ordinal = longer;
            __syncthreads();
        }
        const int here = min(groups.count - base, static_cast<long>(kThreads));
        for (int i = threadIdx.x; i < here * tiles; i += kThreads) {
            const Place& place = places[i / tiles];
            const int tile = i % tiles, row = tile * kMostRows;
            if (place.depth.columns == 0)
                continue;
            const int of_group = chunks_of(place.depth.columns);
            const int at =
                tile < widest ? place.ordinal * widest + tile : filled * widest + place.ordinal;
            to.tile()[at] = {row,
                             static_cast<short>(min(M - row, kMostRows)),
                             tile == 0,
                             static_cast<int>(base) + i / tiles,
                             place.units + tile * kMostSlabs * kChunkUnits * of_group,
                             at,
                             static_cast<int>(place.depth.start),
                             static_cast<int>(place.depth.columns),
                             place.words + tile * words_of(of_group),
                             0};
        }
        __syncthreads();
    }
    const int all = filled * tiles;
    int claims = 0;
    for (int base = 0; base * band < all; base += kThreads) {
        const int first = (base + threadIdx.x) * band, height = max(min(band, all - first), 0);
        int deepest = 0;
        for (int tile = 0; tile < height; ++tile)
            deepest = max(deepest, chunks_of(to.tile()[first + tile].columns));
        const int before = sum_before(height * deepest * kChunkParts, claims);
        if (height > 0)
            to.bands()[base + threadIdx.x] = before;
    }
    if (threadIdx.x == 0) {
        to.bands()[(all + band - 1) / band] = claims;
        if (all == 0)
            to.bands()[1] = 0;
        *to.empty() = groups.count - filled;
        for (int kind = 1; kind <= kMostSlabs; ++kind)
            to.tiles()[kind] = (kind == kMostSlabs ? filled * widest : 0) +
                               (kind == last_slabs && widest < tiles ? filled : 0);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    aiter_mx_grouped_wgrad_list(const unsigned char*, const unsigned char*, const unsigned char*,
                                const unsigned char*, const void* before, void*, const void* starts,
                                const void* through, void* workspace, long M, long N, long K,
                                long G, int, int index_bytes, int, long most_tiles, long most_words,
                                long pairs, int clusters) {
    launch_dependents();
    wait_for_grid_ahead();
    const Workspace to{static_cast<unsigned char*>(workspace), most_tiles, K, G * N, most_words, G};
    to.clear<kThreads>(clusters);
    list_tiles({starts, through, before, K, G, index_bytes}, to, M,
               tiles_of_band(MX_ORDER, pairs, clusters));
}
