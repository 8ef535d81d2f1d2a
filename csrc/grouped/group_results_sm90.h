// Stores sums of rescaled products of 64 rows of a group's as results: with an activation these are
// activated and quantised, and go to their routed rows.
#pragma once

#include "../linear/rescaled_results_sm90.h"
#include "common/epilogue.h"
#include "common/quantize.h"
#include "common/target.h"
#include "groups_sm90.h"
#include "sm90/convert.h"

namespace mx {

// Of one warp's 16 rows, of which a lane has two.
template <class Out>
struct GroupResults {
    GroupSizes of;
    void* y;
    const void* bias;
    int bias_kind;
#if MX_ROUTED
    Routing routing;
    ActivationArgs activation;
#endif

    using Sums = RescaledStep::Values;

    // Of a group and one of its tiles of w. The first row is of y, or a place; so many exist.
    MX_MEMBER void store(Sums& sums, int group, int of_w, long row, int rows, int lane) const {
        if (bias_kind != kNone)
            add_bias(sums, group, of_w, lane);
#if MX_ACTIVATION
        activate_rows(sums, of_w, row, rows, lane);
#else
        const long first = of_w * static_cast<long>(kTileRows);
        Out* const to = static_cast<Out*>(y) + (row + lane / 4) * of.N + first;
        const int columns = min(of.N - first, static_cast<long>(kTileRows));
        RescaledResults<Out>{to, of.N, rows - lane / 4, columns, lane}.store(sums,
                                                                             are_whole(y, of.N));
#endif
    }

  private:
    static constexpr int kValues = RescaledStep::kValues;

    MX_MEMBER void add_bias(Sums& sums, int group, int of_w, int lane) const {
#pragma unroll
        for (int piece = 0; piece < kTileRows / 8; ++piece)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const long row = of.w_row(of_w, 8 * piece + lane % 4 * 2 + i);
                const float own = row < 0 ? 0 : load_bias(bias, bias_kind, group * of.N + row);
                sums[RescaledStep::place(4 * piece + i)] += own;
                sums[RescaledStep::place(4 * piece + 2 + i)] += own;
            }
    }

#if MX_ACTIVATION
    // A lane has values of two rows: of each its own of 64 features. Where gate and up alternate
    // these are the (lane % 4)-th of each four, else two of each eight.
    static constexpr int kBlock = 32, kOwn = kTileFeatures / 4, kOfBlock = kBlock / 4;

    MX_MEMBER void activate_rows(const Sums& sums, int of_w, long place, int rows, int lane) const {
        const long features = of.features();
        const long first = of_w * static_cast<long>(kTileFeatures);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = lane / 4 + 8 * i;
            const int routed = row < rows ? routing.routed(place + row) : -1;
            float values[kOwn];
#pragma unroll
            for (int j = 0; j < kOwn; ++j) {
                const int gate = kInterleaved ? 4 * j + 2 * i : j / 2 * 4 + 2 * i + j % 2;
                const int up = kInterleaved ? gate + 1 : gate + kValues / 2;
                values[j] = activate<kActivation>(sums[RescaledStep::place(gate)],
                                                  sums[RescaledStep::place(up)], activation);
            }
#pragma unroll
            for (int b = 0; b < kTileFeatures / kBlock; ++b) {
                const float (&own)[kOfBlock] =
                    reinterpret_cast<const float (&)[kOfBlock]>(values[b * kOfBlock]);
                unsigned amax = 0;
#pragma unroll
                for (int j = 0; j < kOfBlock; ++j)
                    amax = max(amax, magnitude_bits(own[j]));
                const BlockScale scale = block_scale<E4M3, kRoundUp>(max_of_lanes<4>(amax));
                unsigned bytes[2];
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    bytes[half] = to_e4m3x4<kRoundUp>(own[4 * half], own[4 * half + 1],
                                                      own[4 * half + 2], own[4 * half + 3], scale);
                const uint2 eight = side_by_side(bytes, lane);
                const long feature = first + b * kBlock;
                if (routed < 0 || feature >= features)
                    continue;
                const long at = routed * features + feature;
                asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(
                                 static_cast<unsigned char*>(y) + at + lane % 4 * 8),
                             "r"(eight.x), "r"(eight.y)
                             : "memory");
                if (lane % 4 == 0)
                    routing.scales()[at / kBlock] = scale.byte;
            }
        }
    }
    // Of a block's 32 features eight bytes: the (lane % 4)-th eight, which are of four lanes. Each
    // has of each eight two bytes: where gate and up alternate one of each half.
    MX_MEMBER static uint2 side_by_side(const unsigned (&bytes)[2], int lane) {
        const int own = lane % 4;
        unsigned low = 0, high = 0;
#pragma unroll
        for (int distance = 0; distance < 4; ++distance) {
            const int other = own ^ distance;
            const unsigned two = bytes[0] >> 16 * (other % 2),
                           or_two = bytes[1] >> 16 * (other % 2);
            const unsigned got =
                __shfl_xor_sync(~0u, (other < 2 ? two : or_two) & 0xffff, distance);
            if constexpr (kInterleaved) {
                low |= (got & 0xff) << 8 * other;
                high |= got >> 8 << 8 * other;
            } else {
                low |= other < 2 ? got << 16 * other : 0;
                high |= other < 2 ? 0 : got << 16 * (other - 2);
            }
        }
        return {low, high};
    }
#endif
};

// Of a launch's arguments, whose workspace is `of`.
#if MX_ROUTED
#define MX_GROUP_RESULTS                                                                           \
    {                                                                                              \
        of,                                                                                        \
        out,                                                                                       \
        bias,                                                                                      \
        bias_kind,                                                                                 \
        {sorted_ids, expert_ids, post_padded, more, valid_tokens, a_div, packed_top_k, max_blocks, \
         block_m},                                                                                 \
        {alpha, beta, limit},                                                                      \
    }
#else
#define MX_GROUP_RESULTS {of, out, bias, bias_kind}
#endif

} // namespace mx
