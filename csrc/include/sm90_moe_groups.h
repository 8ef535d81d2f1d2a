// What the Hopper kernels of moe_gemm over wgmma share: the size of a warpgroup, and which columns of
// x a lane has sums of.
#pragma once

#include "mx_target.h"

namespace mx {

constexpr int kGroupWarps = 4, kGroupThreads = kGroupWarps * kLanes;

// Of pair p of values of a lane, those of one row of w: columns of x.
MX_DEVICE int column_of(int tile, int c, int lane) { return tile * 8 + lane % 4 * 2 + c; }

} // namespace mx
