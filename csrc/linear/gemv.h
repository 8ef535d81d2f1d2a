// Decode linear for 1 to 16 rows of x: y = dequantised(x) * dequantised(w)^T + bias.
//
//   xq [M, K], wq [N, K]        e4m3 payload
//   xs [M, K/32], ws [N, K/32]  e8m0 scale of each 32 consecutive k
//                               or xq is bf16 or fp16, there is no xs, and x is quantised here
//   y  [M, N]                   fp32, bf16 or fp16
//   bias [N]                    any of these, or none
//
// A workgroup computes kRows consecutive outputs n for all m. Its waves split K: in one step a
// wave reads 16 bytes a lane, so kLanes * 16 consecutive k, of each of its rows of w.
//
//   k ->     |lane 0|lane 1|...      |lane 0|lane 1|...      |lane 0|...
//   row n    |<-- wave 0, step 0 --->|<-- wave 1, step 0 --->|<-- wave 0, step 1
//   row n+1  |<-- wave 0, step 0 --->|<-- wave 1, step 0 --->|<-- wave 0, step 1
//
// Two lanes share a 32-block; each scales its half of the block's sum. Weights are converted to
// fp32 once for all m, and x once for all rows of the workgroup. Sums are fp32 and added in an
// order that depends on nothing but the configuration: over a lane's k, lanes, then waves.

#pragma once

#include "common/scale.h"
#include "common/target.h"
#include "fused.h"

namespace mx {

// Sums over the lanes of a wave, of many values at once.

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

constexpr int kM = MX_M;           // rows of x
constexpr int kRows = MX_ROWS;     // outputs n of a workgroup
constexpr int kWaves = MX_WAVES;   // waves of a workgroup
constexpr int kUnroll = MX_UNROLL; // steps of a wave whose loads precede all use
constexpr bool kQuantises = !kIsQuantised<MX_X>;
using Out = DType<MX_OUT>;
using Offset = unsigned long; // elements and bytes: tensors may exceed 4 GiB

constexpr int kBlock = 32; // k of one scale
constexpr int kPiece = 16; // k of a lane in one step
constexpr int kPairs = kPiece / 2;
constexpr int kStep = kLanes * kPiece;
constexpr Offset kStride = kWaves * kStep;
constexpr int kThreads = kLanes * kWaves;
constexpr int kValues = kM * kRows;
constexpr Offset kMaxGridX = MX_MAX_GRID_X; // groups beyond it continue in the grid's y

struct Piece {
    u32x4 payload;
    unsigned scale;

    MX_MEMBER void to_f32(f32x2 (&values)[kPairs]) const {
#pragma unroll
        for (int i = 0; i < kPairs / 2; ++i)
            e4m3x4_to_f32(payload[i], values[2 * i], values[2 * i + 1]);
    }
};

// sums[i * StrideI + j * StrideJ] += a[i] . b[j]. All of b is held in fp32, a's pieces pass by.
// After taken_a(i) and taken_b(j) the pieces hold what the calls left there, and are read no more.
template <int StrideI, int StrideJ, int CountI, int CountJ, class TakenA, class TakenB>
MX_DEVICE void accumulate(float* sums, const Piece (&a)[CountI], const Piece (&b)[CountJ],
                          TakenA taken_a, TakenB taken_b) {
    f32x2 b_values[CountJ][kPairs];
    float b_scales[CountJ];
#pragma unroll
    for (int j = 0; j < CountJ; ++j) {
        b[j].to_f32(b_values[j]);
        b_scales[j] = e8m0_to_f32(b[j].scale);
        taken_b(j);
    }
#pragma unroll
    for (int i = 0; i < CountI; ++i) {
        f32x2 a_values[kPairs];
        a[i].to_f32(a_values);
        const SplitScale a_scale = e8m0_split(a[i].scale);
        taken_a(i);
#pragma unroll
        for (int j = 0; j < CountJ; ++j) {
            float& sum = sums[i * StrideI + j * StrideJ];
            sum = add_scaled(sum, dot(a_values, b_values[j]), a_scale, b_scales[j]);
        }
        if constexpr (kValues > 16)
            finish_before_next(); // converting all of a at once would not fit into registers
    }
}

// Adds a step's products of all rows of w and x.
template <class TakenW, class TakenX>
MX_DEVICE void accumulate_step(float* sums, const Piece (&w)[kRows], const Piece (&x)[kM],
                               TakenW taken_w, TakenX taken_x) {
    if constexpr (kM <= kRows)
        accumulate<1, kRows>(sums, w, x, taken_w, taken_x);
    else
        accumulate<kRows, 1>(sums, x, w, taken_x, taken_w);
}

} // namespace mx
