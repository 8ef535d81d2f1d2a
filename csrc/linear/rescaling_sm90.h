// Puts the four blocks of 32 k of a step of 128 under one scale, the largest of a row of x, or of
// 128 rows of w. What a block's elements lose is at most 2^-11 of its largest. If some block of w
// would lose more, that is, if its largest came below 2, each row of these has a scale of its own;
// and if one would then still lose more, or one of x, all blocks of the step keep theirs.
//
// A CTA has a step of 128 rows. Eight neighbouring lanes have a row, two of them a block.

#pragma once

#include "common/scale.h"
#include "common/target.h"
#include "incoming_sm90.h"
#include "rescaled_sm90.h"

namespace mx::rescaling {

constexpr int kThreads = 256, kWarps = kThreads / kLanes;
constexpr int kLanesOfRow = 8, kRowsOfWarp = kLanes / kLanesOfRow;
constexpr int kTurns = RescaledOperands::kRows / (kWarps * kRowsOfWarp);
constexpr unsigned kTwo = 8;                              // exponent field of 2.0 in e4m3
constexpr unsigned kLeastCommon = 77, kLastCommon = 177;  // products of two are far inside of fp32
constexpr unsigned kOne = 127, kNanPayloads = 0x7f7f7f7f; // of scales, and of e4m3

// The largest of the words' bytes without their signs.
MX_DEVICE unsigned largest_magnitude(const u32x4& words) {
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        most = __vmaxu4(most, words[i] & 0x7f7f7f7f);
    most = __vmaxu4(most, most >> 16);
    return max(most & 0xff, most >> 8 & 0xff);
}

// Four e4m3 times a power of two not above 1, given as two of fp16, rounded to nearest even.
MX_DEVICE unsigned rescaled(unsigned word, unsigned factors) {
    unsigned low, high, result;
    asm("{\n"
        ".reg .b16 a, b;\n"
        "mov.b32 {a, b}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, a;\n"
        "cvt.rn.f16x2.e4m3x2 %1, b;\n"
        "}"
        : "=r"(low), "=r"(high)
        : "r"(word));
    asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(low) : "r"(factors));
    asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(high) : "r"(factors));
    asm("{\n"
        ".reg .b16 a, b;\n"
        "cvt.rn.satfinite.e4m3x2.f16x2 a, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f16x2 b, %2;\n"
        "mov.b32 %0, {a, b};\n"
        "}"
        : "=r"(result)
        : "r"(low), "r"(high));
    return result;
}

MX_DEVICE bool is_far(unsigned scale) { return scale < kLeastCommon || scale > kLastCommon; }

// Whether a block of this largest magnitude, in e4m3, loses too much under another scale.
MX_DEVICE bool loses(unsigned most, unsigned own, unsigned scale) {
    const unsigned down = scale - own;
    return is_far(scale) || (most != 0 && down != 0 && most >> 3 < kTwo + down);
}

// A step of 128 rows of an operand, to RescaledOperands or their like: source(i) is the i-th, or
// below 0 where there is none.
template <int Code, bool OfW, class Operands, class Source>
MX_DEVICE void rescale(const Operands& to, const unsigned char* q, const unsigned char* s,
                       const Source& source, long to_row, int step) {
    const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
    const int first = warp * kRowsOfWarp + lane / kLanesOfRow;
    const long k = step * static_cast<long>(to.kStepK) + lane % kLanesOfRow * 16;
    Incoming<Code> incoming[kTurns];
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
        const long row = source(first + i * kWarps * kRowsOfWarp);
        if (row >= 0 && k < to.K)
            incoming[i].load_from(q, s, row * to.K + k);
    }
    QuantisedHalf own[kTurns];
    unsigned most[kTurns], top[kTurns]; // of a block's magnitudes, and of scales, each plus 1
    unsigned top_of_all = 0;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
        own[i] = incoming[i].result();
        most[i] = max_of_lanes<2>(largest_magnitude(own[i].payload));
        if (own[i].scale == kNanScale) {
            own[i].payload = {kNanPayloads, kNanPayloads, kNanPayloads, kNanPayloads};
            most[i] = 0;
        }
        if (most[i] == 0) // any scale will do
            own[i].scale = kOne;
        top[i] = max_of_lanes<kLanesOfRow>(most[i] == 0 ? 0 : own[i].scale + 1);
        top_of_all = max(top_of_all, top[i]);
    }
    if constexpr (OfW) {
        __shared__ unsigned tops[kWarps];
        top_of_all = max(top_of_all, __shfl_xor_sync(~0u, top_of_all, 8));
        top_of_all = max(top_of_all, __shfl_xor_sync(~0u, top_of_all, 16));
        if (lane == 0)
            tops[warp] = top_of_all;
        group_barrier();
#pragma unroll
        for (int i = 0; i < kWarps; ++i)
            top_of_all = max(top_of_all, tops[i]);
    }
    // Whether blocks would lose too much under their row's scale, and under that of all rows.
    bool apart = false, rows_apart = false, far = false;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
        const unsigned of_row = top[i] == 0 ? kOne : top[i] - 1;
        apart |= loses(most[i], own[i].scale, of_row);
        rows_apart |= OfW && top_of_all != 0 && loses(most[i], own[i].scale, top_of_all - 1);
        far |= is_far(own[i].scale);
        top[i] = of_row;
    }
    apart = __syncthreads_or(apart);
    far = apart && __syncthreads_or(far);
    rows_apart = OfW && __syncthreads_or(rows_apart);
    if (OfW && !rows_apart)
#pragma unroll
        for (int i = 0; i < kTurns; ++i)
            top[i] = top_of_all == 0 ? kOne : top_of_all - 1;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
        const long row = to_row + first + i * kWarps * kRowsOfWarp;
        unsigned scales = top[i] * 0x01010101;
        if (apart) {
            scales = own[i].scale << lane % kLanesOfRow / 2 * 8;
            scales |= __shfl_xor_sync(~0u, scales, 2);
            scales |= __shfl_xor_sync(~0u, scales, 4);
        } else {
            const unsigned down = most[i] == 0 ? 0 : top[i] - own[i].scale;
            const unsigned factors = (15 - down << 10) * 0x00010001u;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                own[i].payload.words[j] = rescaled(own[i].payload[j], factors);
        }
        if (k < to.K)
            store_vector(to.payload() + row * to.K + k, own[i].payload);
        if (lane % kLanesOfRow == 0)
            *to.word(step, row) = scales;
    }
    if (threadIdx.x == 0)
        to.tell(step, to_row,
                apart        ? 0
                : rows_apart ? -1
                : OfW        ? e8m0_to_f32(top[0])
                             : 1,
                far     ? kFarApart
                : apart ? kBlocksApart
                        : kRowsApart);
}

} // namespace mx::rescaling
