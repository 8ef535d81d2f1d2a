// What the grouped GEMM on Hopper computes without the matrix unit: outputs that NaN in w reaches,
// and those of scales that bf16 does not cover.
#pragma once

#include "common/epilogue.h"
#include "common/exact.h"
#include "rows.h"
#include "sm90/expand.h"
#include "stage_sm90.h"

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
// tells whether bf16 does not cover a scale of row g, or of row g + 8 where t is odd.
MX_DEVICE void compute_again(const Operands& t, const TokenTile& tokens, long n, int lane,
                             bool scale_outside, bool x_outside) {
    x_outside = __any_sync(0xffffffff, x_outside);
    const unsigned scales_outside = __ballot_sync(0xffffffff, scale_outside);
#pragma unroll 1
    for (int row = 0; row < 16; ++row) {
        const long in_group = n + row;
        if (in_group >= t.N)
            break;
        const int lanes = row % 8 * 4, half = row / 8; // those that hold this row
        const bool outside_row = scales_outside >> lanes & (half ? 0xa : 0x5);
        if (!outside_row && !x_outside)
            continue;
        const long w = tokens.group * t.N + in_group;
        const float added = load_bias(t.bias, t.bias_kind, w);
#pragma unroll 1
        for (int m = lane; m < tokens.rows; m += kLanes) {
            const long x = tokens.row + m;
            if (!outside_row && !token_outside(t, x))
                continue;
            const float sum = exact_output(t.xq + x * t.K, t.xs + x * t.blocks(), t.wq + w * t.K,
                                           t.ws + w * t.blocks(), t.K);
            store(t.y + x * t.N + in_group, sum + added);
        }
    }
}

// Notes which of a warp's 16 rows of w, from row, have NaN. Lane 4g + t tells whether it saw one
// in row g, and in row g + 8.
MX_DEVICE void note_nans(const Workspace& workspace, long row, int lane, bool low, bool high) {
    const unsigned seen[2] = {__ballot_sync(0xffffffff, low), __ballot_sync(0xffffffff, high)};
    if (lane != 0 || !(seen[0] | seen[1]))
        return;
    unsigned rows = 0;
#pragma unroll 1
    for (int i = 0; i < 16; ++i)
        if (seen[i / 8] >> i % 8 * 4 & 0xf)
            rows |= 1u << i;
    atomicOr(workspace.nans() + row / 32, rows << row % 32);
    atomicOr(workspace.finished(), kSomeNan);
}

// Makes NaN of all outputs of the rows that were noted. For the consumer that finishes last.
MX_DEVICE void spread_nans(const Operands& t, const Workspace& workspace, const RowGroups& groups,
                           int thread) {
    const int lane = thread % kLanes;
    const long words = groups.count * t.N / 32;
#pragma unroll 1
    for (long base = thread - lane; base < words; base += 128) {
        const unsigned own = base + lane < words ? load_relaxed(workspace.nans() + base + lane) : 0;
        unsigned some = __ballot_sync(0xffffffff, own);
#pragma unroll 1
        for (; some; some &= some - 1) {
            const int at = __ffs(some) - 1;
            const bool mine = __shfl_sync(0xffffffff, own, at) >> lane & 1;
            const long row = (base + at) * 32 + lane, group = row / t.N;
            const RowRange range = groups.range(group);
            if (mine)
#pragma unroll 1
                for (long m = range.begin; m < range.end; ++m)
                    store(t.y + m * t.N + row % t.N, bits_to_float(kNanBits));
        }
    }
}

} // namespace mx
