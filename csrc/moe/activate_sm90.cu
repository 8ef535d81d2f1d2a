// What is left of an activated grouped GEMM whose sums are in memory: the activation of gate and up
// and its quantisation, as a launch after mma_ring_sm90.cu. That one then needs no block of
// 32 features in one workgroup, nor clusters, and shares few rows evenly among the SMs.
// aiter_mx/kernels/moe_gemm/problem.py defines what is computed.
//
//   workspace [num_valid_tokens, N]   fp32 sums, bias included: of each valid id's row, and zeros
//                                     for one whose expert is not here
//
// A warp has 128 features of an id. Ids are older than the launch ahead, which waited for them
// before it let this one begin, so they are looked up before that has ended.

#include "common/quantize.h"
#include "common/target.h"
#include "moe.h"
#include "moe_sm90.h"

using namespace mx;

constexpr int kActivation = MX_ACTIVATION;
constexpr bool kInterleaved = MX_INTERLEAVED;
constexpr int kThreads = MX_THREADS; // of a workgroup
constexpr int kOfWarp = kLanes * 4;  // features

extern "C" __global__ void __launch_bounds__(kThreads) aiter_mx_moe_activate(MX_MOE_PARAMETERS) {
    const MoeArgs a = MX_MOE_ARGS;
    const int lane = threadIdx.x % kLanes;
    const unsigned features = a.N / 2, parts = (features + kOfWarp - 1) / kOfWarp;
    const unsigned warp = blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes;
    const unsigned place = warp / parts, first = warp % parts * kOfWarp + lane * 4;
    const unsigned blocks = min((*a.padded + a.block_m - 1) / a.block_m, a.max_blocks);
    long t = -1;
    if (place < blocks * a.block_m)
        t = routed_row(a.ids[place], a.num_valid, a.packed_top_k);
    launch_dependents();
    wait_for_grid_ahead();
    if (t < 0)
        return;
    const bool is_inside = first < features;
    float values[4] = {};
    if (is_inside) {
        const float* row = workspace + t * a.N;
        float4 halves[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) // not by the L1, which may be older
            halves[h] = __ldcg(reinterpret_cast<const float4*>(
                kInterleaved ? row + 2 * first + 4 * h : row + first + h * features));
        const auto [low, high] = halves;
        const float gate[4] = {low.x, kInterleaved ? low.z : low.y, kInterleaved ? high.x : low.z,
                               kInterleaved ? high.z : low.w};
        const float up[4] = {kInterleaved ? low.y : high.x, kInterleaved ? low.w : high.y,
                             kInterleaved ? high.y : high.z, high.w};
#pragma unroll
        for (int v = 0; v < 4; ++v)
            values[v] = activate<kActivation>(gate[v], up[v], a.activation);
    }
    const BlockScale scale = block_scale<E4M3, kRoundUp>(max_of_lanes<8>(amax_bits(values)));
    if (!is_inside)
        return;
    const long n = t * features + first;
    reinterpret_cast<unsigned*>(out)[n / 4] =
        to_e4m3x4<kRoundUp>(values[0], values[1], values[2], values[3], scale);
    if (n % kBlock == 0)
        out_scales[n / kBlock] = scale.byte;
}
