// Sums over lanes.
#pragma once

#include "common/target.h"

namespace mx {

// Sum of x over this lane and those before it.
MX_DEVICE int sum_so_far(int x, int lane) {
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
        const int before = of_lane(lane - distance, x);
        x += lane >= distance ? before : 0;
    }
    return x;
}

} // namespace mx
