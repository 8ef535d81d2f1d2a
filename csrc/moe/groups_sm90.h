// What the Hopper kernels of moe_gemm over wgmma share: the size of a warpgroup, which columns of
// x a lane has sums of, and what activated sums are quantised by.
#pragma once

#include "common/quantize.h"
#include "common/target.h"
#include "moe_sm90.h"

namespace mx {

constexpr int kGroupWarps = 4, kGroupThreads = kGroupWarps * kLanes;

// Of pair p of values of a lane, those of one row of w: columns of x.
MX_DEVICE int column_of(int tile, int c, int lane) { return tile * 8 + lane % 4 * 2 + c; }

// A warpgroup has a block of 32 activated features, and a lane one of them in some columns of x.
// First each warp notes the largest magnitude of its 8 features of a column; after a barrier that
// of all is found.
template <int Columns>
MX_DEVICE void note_largest(unsigned (&amaxes)[kGroupWarps][Columns], float value, int column,
                            int warp, int lane) {
    unsigned amax = magnitude_bits(value);
#pragma unroll
    for (int distance = 4; distance < kLanes; distance *= 2)
        amax = max(amax, __shfl_xor_sync(~0u, amax, distance));
    if (lane < 4)
        amaxes[warp][column] = amax;
}

template <int Columns>
MX_DEVICE unsigned largest_of(const unsigned (&amaxes)[kGroupWarps][Columns], int column) {
    unsigned amax = amaxes[0][column];
#pragma unroll
    for (int v = 1; v < kGroupWarps; ++v)
        amax = max(amax, amaxes[v][column]);
    return amax;
}

} // namespace mx
