// The launch ahead of wgmma_fp8_rescaled. With MX_X x is bf16 or fp16, and quantised first.
//
// Of w's `features` a slice is rescaled, up to N of them from `first_feature` on. Only with the
// first slice is x rescaled: with others `first_block` is the first of w.

#pragma once

#include "rescaling_sm90.h"

namespace mx::rescaling {

// Rows one after another, of so many in all.
MX_DEVICE auto rows_of(long first, long rows) {
    return [=](int i) { return first + i < rows ? first + i : -1; };
}

extern "C" __global__ void __launch_bounds__(kThreads)
    aiter_mx_linear_rescale(const unsigned char* xq, const unsigned char* xs,
                            const unsigned char* wq, const unsigned char* ws, const void*, void*,
                            unsigned char* memory, long M, long N, long K, long features,
                            long first_feature, long first_block) {
    const RescaledOperands to{memory, M, N, K};
    const long block = first_block + blockIdx.x / to.steps();
    const int step = blockIdx.x % to.steps();
    launch_dependents();
    wait_for_grid_ahead();
    if (blockIdx.x == 0)
        for (int i = threadIdx.x; i < to.kCounters; i += kThreads)
            to.ended()[i] = 0;
    const long to_row = block * to.kRows;
    if (to_row < to.first_w())
        rescale<MX_X, false>(to, xq, xs, rows_of(to_row, M), to_row, step);
    else {
        const long blocks = K / 32;
        rescale<kNone, true>(
            to, wq + first_feature * K, ws + first_feature * blocks,
            rows_of(to_row - to.first_w(), slice_features(N, features, first_feature)), to_row,
            step);
    }
}

} // namespace mx::rescaling
