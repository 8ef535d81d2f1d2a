// Brings what the grouped GEMM made of gathered rows to where routed rows belong: what the epilogue
// of moe_gemm does. aiter_mx/kernels/moe_gemm/problem.py defines it.
//
//   sums [max_blocks * block_m, N]   row p is that of sorted id p
//   out [routed rows, N]             row t, times its routing weight if there is one; zeros where
//   the
//                                    expert is not here
//   or, with an activation, e4m3 [routed rows, N / 2] and scales [.., N / 64]
//
// A wave takes one row, a lane 4 features of it at a time; 8 lanes have a block of 32.

#include "common/quantize.h"
#include "common/target.h"
#include "moe.h"

using namespace mx;

constexpr int kWaves = MX_WAVES;
constexpr int kActivation = MX_ACTIVATION;
constexpr bool kInterleaved = MX_INTERLEAVED; // gate and up columns alternate; else halves
using Sum = DType<MX_SUM>;
using Out = DType<MX_OUT>; // without an activation
using Offset = unsigned long;

constexpr int kThreads = kWaves * kLanes;
constexpr int kWidth = 4;
constexpr int kBlock = 32;

struct alignas(kWidth * sizeof(Sum)) Four {
    Sum values[kWidth];
};

MX_DEVICE float to_f32(float x) { return x; }

MX_DEVICE void load_four(const Sum* from, float (&values)[kWidth]) {
    const Four four = *reinterpret_cast<const Four*>(from);
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
        values[i] = to_f32(four.values[i]);
}

template <int Activation>
MX_DEVICE void quantize_row(const Sum* row, unsigned char* out, unsigned char* scales,
                            Offset features, bool is_here, const ActivationArgs& args, int lane) {
    for (Offset first = 0; first < features; first += kLanes * kWidth) { // all lanes of the wave
        const Offset n = first + lane * kWidth;
        float values[kWidth] = {};
        if (is_here && n < features) {
            float low[kWidth], high[kWidth];
            load_four(row + (kInterleaved ? 2 * n : n), low);
            load_four(row + (kInterleaved ? 2 * n + kWidth : features + n), high);
#pragma unroll
            for (int i = 0; i < kWidth; ++i) {
                const auto both = [&](int at) { return at < 4 ? low[at] : high[at - 4]; };
                values[i] = activate<Activation>(both(kInterleaved ? 2 * i : i),
                                                 both(kInterleaved ? 2 * i + 1 : 4 + i), args);
            }
        }
        const unsigned amax = max_of_lanes<kBlock / kWidth>(amax_bits(values));
        const BlockScale scale = block_scale<E4M3, kRoundUp>(amax);
        if (n >= features)
            continue;
        *reinterpret_cast<unsigned*>(out + n) =
            to_e4m3x4<kRoundUp>(values[0], values[1], values[2], values[3], scale);
        if (n % kBlock == 0)
            scales[n / kBlock] = scale.byte;
    }
}

MX_KERNEL(kThreads)
aiter_mx_moe_scatter(const Sum* sums, const int* sorted_ids, const int* expert_ids,
                     const int* post_padded, const float* weights, void* out,
                     unsigned char* out_scales, Offset N, int experts, int valid_tokens,
                     int packed_top_k, int weights_by_place, int max_blocks, int block_m,
                     float alpha, float beta, float limit) {
    const long place = static_cast<long>(group_x()) * kWaves + wave_in_group();
    const int in_use = (*post_padded + block_m - 1) / block_m;
    const int blocks = in_use < max_blocks ? in_use : max_blocks;
    if (place >= static_cast<long>(blocks) * block_m)
        return;
    const long t = routed_row(sorted_ids[place], valid_tokens, packed_top_k);
    if (t < 0)
        return;
    const int expert = expert_ids[place / block_m];
    const bool is_here = expert >= 0 && expert < experts;
    const int lane = thread_in_group() % kLanes;
    const Sum* row = sums + place * N;
    if constexpr (kActivation != kNoActivation) {
        const Offset features = N / 2;
        quantize_row<kActivation>(row, static_cast<unsigned char*>(out) + t * features,
                                  out_scales + t * (features / kBlock), features, is_here,
                                  {alpha, beta, limit}, lane);
    } else {
        const float weight = weights ? weights[weights_by_place ? place : t] : 1.0f;
        Out* to = static_cast<Out*>(out) + t * N;
        for (Offset n = lane * kWidth; n < N; n += kLanes * kWidth) {
            float values[kWidth] = {};
            if (is_here)
                load_four(row + n, values);
#pragma unroll
            for (int i = 0; i < kWidth; ++i)
                store(to + n + i, is_here ? values[i] * weight : 0.0f);
        }
    }
}
