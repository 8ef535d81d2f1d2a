// How the outer linear's sums of all parts of K come together where a warp has a tile for each
// part, or more: it keeps its share of them in registers, sends the others, and adds to its own
// what comes from the warps of the same rows in the other parts.
#pragma once

#include "wgmma_fp8_sm90.h"

namespace mx {

// Calls f(Int<0>), ... f(Int<Count - 1>).
template <int Count, class F>
MX_DEVICE void for_each_int(const F& f) {
    if constexpr (Count > 0) {
        for_each_int<Count - 1>(f);
        f(Int<Count - 1>{});
    }
}

// Of 8 by 8 values of 16 bits: lane 4i + j gives values 2j and 2j + 1 of row i, and gets those of
// column i.
MX_DEVICE unsigned transposed(unsigned v) {
    unsigned t;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(v));
    return t;
}

struct Kept {
    const Store& store;
    unsigned boxes, full;
    int row_warp, own; // of the warps with rows; of the parts

    MX_MEMBER static float4 tile_of(const Sums& sums, int j) {
        return {sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]};
    }
    // For what part `from` has of a tile that part `to`, another one, keeps.
    MX_MEMBER unsigned box(int to, int tile, int from) const {
        const int warp = to % kKGroups * kRowWarps + row_warp;
        return boxes + store.lane * 16 +
               ((warp * kMostKept + tile) * (kParts - 1) + from - (from > to)) * kTileBytes;
    }
    MX_MEMBER void send(const Sums& sums) const {
        for_each_int<kTilesB>([&](auto tile) {
            constexpr int j = decltype(tile)::value, to = j * kParts / kTilesB;
            if (to == own)
                return;
            const unsigned at = box(to, j - first_kept(to), own);
            if constexpr (kSplit > 1)
                store_async(address_in_cluster(at, to / kKGroups), tile_of(sums, j),
                            address_in_cluster(full, to / kKGroups));
            else
                store_tile(at, tile_of(sums, j));
        });
    }
    // Adds in the order of the parts, whoever does it.
    MX_MEMBER void receive(const Sums& sums) const {
        for_each_int<kParts>([&](auto part) {
            constexpr int p = decltype(part)::value, first = first_kept(p);
            constexpr int count = first_kept(p + 1) - first;
            if constexpr (count > 0)
                if (p == own) {
                    float4 tiles[count];
#pragma unroll
                    for (int i = 0; i < count; ++i)
                        tiles[i] = whole<p>(tile_of(sums, first + i), i);
                    store_tiles(tiles, first);
                }
        });
    }

  private:
    template <int Part>
    MX_MEMBER float4 whole(float4 own_sums, int tile) const {
        float4 of[kParts];
#pragma unroll
        for (int s = 0; s < kParts; ++s)
            of[s] = s == Part ? own_sums : load_tile(box(Part, tile, s));
#pragma unroll
        for (int s = 1; s < kParts; ++s)
            of[0] = add(of[0], of[s]);
        return of[0];
    }
    template <int Count>
    MX_MEMBER void store_tiles(const float4 (&tiles)[Count], int first) const {
        // Code that has not run yet comes from memory: so little of it, where no output is special.
        if (store.bias_kind == kNone && store.paired && store.first + kRowsW <= store.N) {
#pragma unroll
            for (int i = 0; i < Count; ++i)
                store_plain(tiles[i], first + i);
        } else {
#pragma unroll
            for (int i = 0; i < Count; ++i)
                store(tiles[i], row_warp * kTilesB + first + i);
        }
    }
    // Two neighbours along N at a time.
    MX_MEMBER void store_plain(float4 tile, int j) const {
        const int i = store.lane / 4, a = row_warp % kActive * 16, pair = store.lane % 4 * 2;
        unsigned low = pack<Out>(tile.x, tile.y), high = pack<Out>(tile.z, tile.w);
        if constexpr (!kTurned) {
            low = transposed(low);
            high = transposed(high);
        }
        const int m = kTurned ? a + i : 8 * j + i,
                  row = kTurned ? row_warp / kActive * kColumns + 8 * j + pair : a + pair;
        constexpr int next_m = kTurned ? 8 : 0, next_row = 8 - next_m;
        unsigned* to = reinterpret_cast<unsigned*>(store.y + m * store.N + store.first + row);
        if (m < store.M && row < kRowsW)
            *to = low;
        if (m + next_m < store.M && row + next_row < kRowsW)
            to[(next_m * store.N + next_row) / 2] = high;
    }
};

} // namespace mx
