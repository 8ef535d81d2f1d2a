// What the grouped GEMM on Hopper computes without the matrix unit: outputs that NaN reaches, and
// those of scales that bf16 does not cover.
#pragma once

#include "grouped_stage_sm90.h"
#include "mx_epilogue.h"
#include "mx_exact.h"
#include "sm90_expand.h"

namespace mx {

// Whether bf16 does not cover a scale of this row of x.
MX_DEVICE bool token_outside(const Operands& t, long row) {
    bool outside = false;
    for (long i = 0; i < t.blocks(); ++i) {
        const unsigned scale = load_byte(t.xs + row * t.blocks() + i);
        outside |= scale > kLastXScale && scale != kNanScale;
    }
    return outside;
}

// Computes the outputs of a warp's 16 rows of w, from n, that the matrix unit cannot. Lane 4g + t
// tells whether it saw NaN in row g, and in row g + 8, and whether bf16 does not cover a scale of
// row g, or of row g + 8 where t is odd.
MX_DEVICE void compute_again(const Operands& t, const TokenTile& tokens, long n, int lane,
                             const unsigned (&is_nan)[2], bool scale_outside, bool x_outside) {
    x_outside = __any_sync(0xffffffff, x_outside);
    const unsigned nans_low = __ballot_sync(0xffffffff, is_nan[0]);
    const unsigned nans_high = __ballot_sync(0xffffffff, is_nan[1]);
    const unsigned scales_outside = __ballot_sync(0xffffffff, scale_outside);
#pragma unroll 1
    for (int row = 0; row < 16; ++row) {
        const long in_group = n + row;
        if (in_group >= t.N)
            break;
        const int lanes = row % 8 * 4, half = row / 8; // those that hold this row
        const bool nan_row = (half ? nans_high : nans_low) >> lanes & 0xf;
        const bool outside_row = scales_outside >> lanes & (half ? 0xa : 0x5);
        if (!nan_row && !outside_row && !x_outside)
            continue;
        const long w = tokens.group * t.N + in_group;
        const float added = load_bias(t.bias, t.bias_kind, w);
#pragma unroll 1
        for (int m = lane; m < tokens.rows; m += kLanes) {
            const long x = tokens.row + m;
            float sum = bits_to_float(kNanBits);
            if (!nan_row) {
                if (!outside_row && !token_outside(t, x))
                    continue;
                sum = exact_output(t.xq + x * t.K, t.xs + x * t.blocks(), t.wq + w * t.K,
                                   t.ws + w * t.blocks(), t.K);
            }
            store(t.y + x * t.N + in_group, sum + added);
        }
    }
}

} // namespace mx
