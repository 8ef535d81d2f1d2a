// Decode linear for up to four rows of x: y = dequantised(x) * dequantised(w)^T + bias.
// The example of docs/add_a_kernel.md; csrc/linear/gemv.h is its faster relative.
//
//   xq [M, K], wq [N, K]        e4m3 payload
//   xs [M, K/32], ws [N, K/32]  e8m0 scale of each 32 consecutive k
//   y  [M, N]                   fp32, bf16 or fp16
//   bias [N]                    any of these, or none
//
// A wave computes y[:, n] of one n. In a step each of its lanes reads 16 bytes of row n:
//
//   k ->    |lane 0|lane 1|...|lane 63|lane 0|lane 1|...
//   row n   |<-------- step 0 ------->|<--- step 1 ---
//
// Two lanes share a block of 32 k, and each scales its half of the block's sum.

#include "common/epilogue.h"
#include "common/scale.h"
#include "common/target.h"

using namespace mx;

constexpr int kM = MX_M;         // rows of x
constexpr int kWaves = MX_WAVES; // waves of a workgroup, each with an n of its own
using Out = DType<MX_OUT>;
using Offset = unsigned long; // elements and bytes: tensors may exceed 4 GiB

constexpr int kBlock = 32; // k of one scale
constexpr int kPiece = 16; // k of a lane in one step
constexpr int kPairs = kPiece / 2;
constexpr int kThreads = kLanes * kWaves;

MX_DEVICE void piece_to_f32(u32x4 payload, f32x2 (&values)[kPairs]) {
#pragma unroll
    for (int i = 0; i < kPairs / 2; ++i)
        e4m3x4_to_f32(payload[i], values[2 * i], values[2 * i + 1]);
}

// x added over all lanes, in an order that is always the same.
template <int Distance = kLanes / 2>
MX_DEVICE float sum_lanes(float x) {
    if constexpr (Distance == 0)
        return x;
    else
        return sum_lanes<Distance / 2>(fold<Distance>(x, x));
}

MX_KERNEL(kThreads)
aiter_mx_linear_dot(const unsigned char* xq, const unsigned char* xs, const unsigned char* wq,
                    const unsigned char* ws, const void* bias, Out* y, Offset N, Offset K,
                    int bias_kind) {
    const Offset n = group_x() * kWaves + wave_in_group();
    if (n >= N) // the whole wave leaves, so that no lane is missing from the sum below
        return;
    const int lane = thread_in_group() % kLanes;
    const Offset blocks = K / kBlock;

    float sums[kM] = {};
    for (Offset k = lane * kPiece; k < K; k += kLanes * kPiece) {
        f32x2 w[kPairs];
        piece_to_f32(load_once(wq + n * K + k), w);
        const float w_scale = e8m0_to_f32(load_byte(ws + n * blocks + k / kBlock));
#pragma unroll
        for (int m = 0; m < kM; ++m) {
            f32x2 x[kPairs];
            piece_to_f32(load(xq + m * K + k), x);
            const SplitScale x_scale = e8m0_split(load_byte(xs + m * blocks + k / kBlock));
            sums[m] = add_scaled(sums[m], dot(x, w), x_scale, w_scale);
        }
    }

#pragma unroll
    for (int m = 0; m < kM; ++m) {
        const float sum = sum_lanes(sums[m]);
        if (lane == 0)
            store(y + m * N + n, sum + load_bias(bias, bias_kind, n));
    }
}
