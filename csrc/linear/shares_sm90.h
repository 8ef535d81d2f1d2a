// Work on tiles that persistent clusters share evenly, or CTAs: so many whole tiles each, one in
// each round of all, and then an even share of the chunks of K of the tiles that are left. The part
// of a tile that ends last adds up the others' sums from memory, in the order of K: none waits for
// another, and results repeat bit for bit.
#pragma once

#include "common/target.h"

namespace mx {

struct Segment {
    int tile, first_chunk, chunks; // of K
};

struct Shares {
    int cluster, clusters, chunks, rounds;
    int part, parts_with_one_more; // chunks of a cluster's share

    MX_MEMBER int share_begin(int cluster) const {
        return cluster * part + min(cluster, parts_with_one_more);
    }
    // The cluster whose share has this chunk.
    MX_MEMBER int sharer(int chunk) const {
        const int longer = parts_with_one_more * (part + 1);
        return chunk < longer ? chunk / (part + 1) : parts_with_one_more + (chunk - longer) / part;
    }
    // What the cluster computes as the i-th, if it does.
    MX_MEMBER bool shared_segment(int i, Segment& s) const {
        if (i < rounds) {
            s = {i * clusters + cluster, 0, chunks};
            return true;
        }
        const int begin = share_begin(cluster), end = share_begin(cluster + 1);
        const int at = i == rounds ? begin : (begin / chunks + i - rounds) * chunks;
        if (at >= end)
            return false;
        s = {rounds * clusters + at / chunks, at % chunks, 0};
        s.chunks = min(end - at, chunks - s.first_chunk);
        return true;
    }
    // Of the tiles that are left, which is a segment's, and the first of its chunks among theirs.
    MX_MEMBER int shared_tile(const Segment& s) const { return s.tile - rounds * clusters; }
    MX_MEMBER int begin_of(const Segment& s) const { return shared_tile(s) * chunks; }
    // Which of a cluster's two places has its part of the tile that begins there: the first if the
    // cluster began within the tile, as it may end within another.
    MX_MEMBER int place(int cluster, int tile_begin) const {
        return 2 * cluster + (share_begin(cluster) > tile_begin ? 0 : 1);
    }
};

// What other CTAs wrote.
MX_DEVICE float4 load_cached(const unsigned char* from) {
    float4 v;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

MX_DEVICE void add_four(float* sums, const float4& part) {
    sums[0] += part.x;
    sums[1] += part.y;
    sums[2] += part.z;
    sums[3] += part.w;
}

// Adds the parts of other clusters, first to last, in the order of K: the sum of all before the own
// one, that one, those after it. place(cluster) is where a thread finds the first 16 bytes of a
// part, of which others follow `pitch` bytes apart. Batch: how many at a time; ManyBefore: whether
// there are two parts before the own one, or more.
template <int Batch, bool ManyBefore, int Count, class Place>
MX_DEVICE void add_parts(float (&sums)[Count], int first, int last, int own, int pitch,
                         const Place& place) {
    constexpr int fours = Count / 4;
#pragma unroll
    for (int j = 0; j < fours; j += Batch) {
        const auto load_part = [&](float4(&part)[Batch], int cluster) {
            const unsigned char* const from = place(cluster) + j * pitch;
#pragma unroll
            for (int i = 0; i < Batch && j + i < fours; ++i)
                part[i] = load_cached(from + i * pitch);
        };
        // Loaded ahead of the loop: what a loop's first round alone would set has its registers
        // from the kernel's start on.
        float4 before[Batch];
        if constexpr (ManyBefore)
            load_part(before, first);
        for (int cluster = first + ManyBefore; cluster <= last; ++cluster) {
            if (cluster == own) {
                if constexpr (ManyBefore)
#pragma unroll
                    for (int i = 0; i < Batch && j + i < fours; ++i)
                        add_four(&sums[4 * (j + i)], before[i]);
                continue;
            }
            float4 part[Batch];
            load_part(part, cluster);
#pragma unroll
            for (int i = 0; i < Batch && j + i < fours; ++i)
                if (!ManyBefore || cluster > own)
                    add_four(&sums[4 * (j + i)], part[i]);
                else
                    add_four(&before[i].x, part[i]);
        }
    }
}

// Leaves a thread's sums where others find them.
template <int Count>
MX_DEVICE void leave_part(const float (&sums)[Count], unsigned char* to, int pitch) {
#pragma unroll
    for (int j = 0; j < Count / 4; ++j)
        store_vector(to + j * pitch,
                     u32x4{float_to_bits(sums[4 * j]), float_to_bits(sums[4 * j + 1]),
                           float_to_bits(sums[4 * j + 2]), float_to_bits(sums[4 * j + 3])});
}

} // namespace mx
