// The launch ahead of wgmma_bf16: x as bf16 with its scales applied, as wgmma takes its B.
//
// A CTA expands a unit of 64 k of a tile of tokens. A lane takes 16 k of a token at a time: lane %
// 8 is the token of an octet, lane / 8 the step of the unit, so that a warp writes whole KiB. All
// of its loads are under way at once.

#include "common/scale.h"
#include "common/target.h"
#include "sm90/convert.h"
#include "sm90/expand.h"
#include "sm90/memory.h"
#include "sm90/tma.h"
#include "wgmma_bf16_x_sm90.h"

using namespace mx;

constexpr int kThreads = 256, kWarps = kThreads / kLanes, kBlock = 32;
constexpr int kMostTokens = 256, kOfWarp = kMostTokens / 8 / kWarps; // octets

extern "C" __global__ void __launch_bounds__(kThreads)
    aiter_mx_linear_wgmma_bf16_x(const unsigned char* xq, const unsigned char* xs,
                                 const unsigned char*, const unsigned char*, const void*, void*,
                                 unsigned char* memory, long M, long K, int tile_tokens) {
    launch_dependents();
    wait_for_grid_ahead();
    const XWorkspace x{memory, M, K, tile_tokens};
    for (unsigned i = blockIdx.x * kThreads + threadIdx.x; i < XWorkspace::kCounters;
         i += gridDim.x * kThreads)
        x.ended()[i] = 0;
    const long tile = blockIdx.x / x.units(), unit = blockIdx.x % x.units();
    const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
    const long k = unit * XWorkspace::kUnit + lane / 8 * 16;
    u32x4 words[kOfWarp];
    unsigned scales[kOfWarp];
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i) {
        const int octet = warp + i * kWarps;
        const long row = min(tile * tile_tokens + octet * 8 + lane % 8, M - 1);
        words[i] = u32x4{};
        scales[i] = 127;
        if (k < K && octet * 8 < tile_tokens) {
            words[i] = load(xq + row * K + k);
            scales[i] = load_byte(xs + row * (K / kBlock) + k / kBlock);
        }
    }
    bool outside = false;
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i) {
        const int octet = warp + i * kWarps;
        if (octet * 8 >= tile_tokens)
            break;
        const bool is_nan = scales[i] == kNanScale, over = scales[i] > kLastXScale && !is_nan;
        outside |= over;
        const float factor = bits_to_float(is_nan ? kNanBits : over ? 0 : (scales[i] + 60) << 23);
        u32x4 even, odd;
#pragma unroll
        for (int j = 0; j < 4; ++j)
            e4m3x4_to_bf16(words[i][j], factor, even.words[j], odd.words[j]);
        unsigned char* const to =
            x.unit(tile, unit) + octet * 1024 + lane / 8 * 256 + lane % 8 * 16;
        store_vector(to, even);
        store_vector(to + 128, odd);
    }
    outside = __syncthreads_or(outside);
    if (threadIdx.x == 0)
        x.outside()[blockIdx.x] = outside;
}
