// Sums over the lanes of a wave, of many values at once.
#pragma once

#include "common/target.h"

namespace mx {

MX_DEVICE constexpr int round_up_to_power_of_two(int n) {
    int power = 1;
    while (power < n)
        power *= 2;
    return power;
}

// Each step halves the values that a lane still carries, so that n of them cost about n exchanges
// instead of n * log2(kLanes).
template <int Count, int Span, int Distance>
MX_DEVICE void fold_values(float* values) {
    if constexpr (Distance > 0) {
        constexpr int half = Span > 1 ? Span / 2 : 1;
        constexpr int kept = Count < half ? Count : half;
#pragma unroll
        for (int i = 0; i < kept; ++i)
            values[i] = fold<Distance>(values[i], values[i + half < Count ? i + half : i]);
        fold_values<kept, half, Distance / 2>(values);
    }
}

// sums[i] over all lanes to out[i], which is memory; sums is left spoilt.
template <int Count>
MX_DEVICE void sum_lanes(float (&sums)[Count], float* out, int lane) {
    constexpr int span = round_up_to_power_of_two(Count);
    constexpr int owned = span > kLanes ? span / kLanes : 1;  // values that a lane ends up with
    constexpr int owners = span > kLanes ? 1 : kLanes / span; // lanes that end up with a value
    fold_values<Count, span, kLanes / 2>(sums);
#pragma unroll
    for (int i = 0; i < owned; ++i) {
        const int index = lane / owners * owned + i;
        if (lane % owners == 0 && index < Count)
            out[index] = sums[i];
    }
}

} // namespace mx
