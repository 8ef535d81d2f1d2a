// Outputs of rows whose scales are applied one after the other (common/scale.h), some at a time.
#pragma once

#include "common/scale.h"
#include "common/target.h"

namespace mx {

struct ScaledRow {
    const unsigned char *payload, *scales;
};

// Sums over a warp's lanes, in all of them.
template <int Count>
MX_DEVICE void add_up_lanes(float (&sums)[Count]) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < Count; ++i)
#pragma unroll
        for (int distance = kLanes / 2; distance; distance /= 2)
            sums[i] += __shfl_xor_sync(0xffffffff, sums[i], distance);
}

// The sums over K of one row's products with each of some others. Lanes take 16 k in turn, AtOnce
// times at once, as nothing else hides latency, and all have the sums, whose bits depend neither
// on that nor on which is the one row.
template <int AtOnce = 2, int Count>
MX_DEVICE void exact_outputs_of_warp(float (&sums)[Count], const ScaledRow& one,
                                     const ScaledRow (&others)[Count], long K, int lane) {
    constexpr int block = 32, piece = 16, at_once = AtOnce, step = kLanes * piece;
#pragma unroll
    for (int i = 0; i < Count; ++i)
        sums[i] = 0;
#pragma unroll 1
    for (long first = lane * piece; first < K; first += at_once * step) {
        u32x4 own_words[at_once], words[at_once][Count];
        unsigned own_scale[at_once], scale[at_once][Count];
#pragma unroll
        for (int j = 0; j < at_once; ++j) {
            const long k = min(first + j * step, K - piece);
            own_words[j] = load(one.payload + k);
            own_scale[j] = load_byte(one.scales + k / block);
#pragma unroll
            for (int i = 0; i < Count; ++i) {
                words[j][i] = load(others[i].payload + k);
                scale[j][i] = load_byte(others[i].scales + k / block);
            }
        }
#pragma unroll
        for (int j = 0; j < at_once; ++j) {
            if (first + j * step >= K)
                break;
            const SplitScale split = e8m0_split(own_scale[j]);
            f32x2 own[8];
#pragma unroll
            for (int w = 0; w < 4; ++w)
                e4m3x4_to_f32(own_words[j][w], own[2 * w], own[2 * w + 1]);
#pragma unroll
            for (int i = 0; i < Count; ++i) {
                f32x2 other[8];
#pragma unroll
                for (int w = 0; w < 4; ++w)
                    e4m3x4_to_f32(words[j][i][w], other[2 * w], other[2 * w + 1]);
                sums[i] = add_scaled(sums[i], dot(own, other), split, e8m0_to_f32(scale[j][i]));
            }
        }
    }
    add_up_lanes(sums);
}

// One of some values, by an index that is not known before.
template <int Count>
MX_DEVICE float one_of(const float (&values)[Count], int which) {
    float found = values[0];
#pragma unroll
    for (int i = 1; i < Count; ++i)
        found = which == i ? values[i] : found;
    return found;
}

} // namespace mx
