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

#include "common/epilogue.h"
#include "common/scale.h"
#include "common/target.h"
#include "fused.h"

using namespace mx;

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

constexpr int kM = MX_M;                // rows of x
constexpr int kRows = MX_ROWS;          // outputs n of a workgroup
constexpr int kWaves = MX_WAVES;        // waves of a workgroup
constexpr int kUnroll = MX_UNROLL;      // steps of a wave whose loads precede all use
constexpr bool kOverlaps = MX_OVERLAPS; // may begin before the grid ahead of it ends
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

struct Operands {
    const unsigned char *xq, *xs, *wq, *ws;
    Offset rows[kRows]; // of w
    Offset K;
    int lane;

    // first: of the step's k, a multiple of kBlock that all lanes of the wave share.
    MX_MEMBER Piece x(int m, Offset first) const {
        return {load(xq + m * K + first + lane * kPiece),
                load_byte(xs + (m * K + first) / kBlock + lane * kPiece / kBlock)};
    }
    MX_MEMBER HalfBlock<MX_X> unquantised_x(int m, Offset first) const {
        const unsigned char* from = xq + 2 * (m * K + first + lane * kPiece);
        return {load(from), load(from + 16)};
    }
    MX_MEMBER Piece w(int r, Offset first) const {
        return {load_once_in_lines(wq + rows[r] * K + first + lane * kPiece),
                load_byte(ws + (rows[r] * K + first) / kBlock + lane * kPiece / kBlock)};
    }
};

// sums[i * StrideI + j * StrideJ] += a[i] . b[j]. All of b is held in fp32, a's pieces pass by.
template <int StrideI, int StrideJ, int CountI, int CountJ>
MX_DEVICE void accumulate(float* sums, const Piece (&a)[CountI], const Piece (&b)[CountJ]) {
    f32x2 b_values[CountJ][kPairs];
    float b_scales[CountJ];
#pragma unroll
    for (int j = 0; j < CountJ; ++j) {
        b[j].to_f32(b_values[j]);
        b_scales[j] = e8m0_to_f32(b[j].scale);
    }
#pragma unroll
    for (int i = 0; i < CountI; ++i) {
        f32x2 a_values[kPairs];
        a[i].to_f32(a_values);
        const SplitScale a_scale = e8m0_split(a[i].scale);
#pragma unroll
        for (int j = 0; j < CountJ; ++j) {
            float& sum = sums[i * StrideI + j * StrideJ];
            sum = add_scaled(sum, dot(a_values, b_values[j]), a_scale, b_scales[j]);
        }
        if constexpr (kValues > 16)
            finish_before_next(); // converting all of a at once would not fit into registers
    }
}

MX_KERNEL(kThreads)
aiter_mx_linear_gemv(const unsigned char* xq, const unsigned char* xs, const unsigned char* wq,
                     const unsigned char* ws, const void* bias, Out* y, Offset N, Offset K,
                     int bias_kind) {
    const Offset first_row = (group_y() * kMaxGridX + group_x()) * kRows;
    if (first_row >= N)
        return;
    const int lane = thread_in_group() % kLanes;
    const int wave = wave_in_group();

    Operands operands{xq, xs, wq, ws, {}, K, lane};
#pragma unroll
    for (int r = 0; r < kRows; ++r) // rows past the last are computed from it and not stored
        operands.rows[r] = first_row + r < N ? first_row + r : N - 1;

    float sums[kValues] = {};
    // All lanes take part in quantising, also those whose k are past the end.
    const int lane_k = kQuantises ? 0 : lane * kPiece;
    for (Offset first = wave * kStep; first + lane_k < K; first += kUnroll * kStride) {
        Piece x[kUnroll][kM] = {}, w[kUnroll][kRows] = {}; // zeros add nothing
        HalfBlock<MX_X> unquantised[kUnroll][kQuantises ? kM : 1] = {};
        const auto load_w = [&](int i) {
#pragma unroll
            for (int r = 0; r < kRows; ++r)
                w[i][r] = operands.w(r, first + i * kStride);
        };
        const auto load_x = [&](int i) {
#pragma unroll
            for (int m = 0; m < kM; ++m)
                if constexpr (kQuantises)
                    unquantised[i][m] = operands.unquantised_x(m, first + i * kStride);
                else
                    x[i][m] = operands.x(m, first + i * kStride);
        };
        const auto exists = [&](int i) {
            return (i == 0 && !kQuantises) || first + i * kStride + lane * kPiece < K;
        };
        if constexpr (kOverlaps) {
#pragma unroll
            for (int i = 0; i < kUnroll; ++i)
                if (exists(i))
                    load_w(i);
            if (first == wave * kStep) { // what is stored later comes after this as well
                launch_dependents();
                wait_for_grid_ahead();
            }
#pragma unroll
            for (int i = 0; i < kUnroll; ++i)
                if (exists(i))
                    load_x(i);
        } else {
#pragma unroll
            for (int i = 0; i < kUnroll; ++i)
                if (exists(i)) {
                    load_w(i);
                    load_x(i);
                }
        }
        if constexpr (kQuantises) {
#pragma unroll
            for (int i = 0; i < kUnroll; ++i)
#pragma unroll
                for (int m = 0; m < kM; ++m) {
                    const QuantisedHalf half = quantised(unquantised[i][m]);
                    x[i][m] = {half.payload, half.scale};
                }
        }
#pragma unroll
        for (int i = 0; i < kUnroll; ++i)
            if constexpr (kM <= kRows)
                accumulate<1, kRows>(sums, w[i], x[i]);
            else
                accumulate<kRows, 1>(sums, x[i], w[i]);
    }

    MX_LDS float partial[kWaves][kValues];
    sum_lanes(sums, partial[wave], lane);
    group_barrier();
    for (int i = thread_in_group(); i < kValues; i += kThreads) {
        const int m = i / kRows;
        const Offset n = first_row + i % kRows;
        if (n < N) {
            float sum = 0.0f;
#pragma unroll
            for (int v = 0; v < kWaves; ++v)
                sum += partial[v][i];
            store(y + m * N + n, sum + load_bias(bias, bias_kind, n));
        }
    }
}
