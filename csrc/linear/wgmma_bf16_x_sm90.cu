// The launch ahead of wgmma_bf16: x as bf16 with its scales applied, as wgmma takes its B. With
// MX_X x is bf16 or fp16, quantised first, and what it is quantised to is kept too. Where
// swapped, it is w that takes the place of x.
//
// A CTA expands a unit of 64 k of a tile of tokens. A lane takes 16 k of a token at a time: the two
// halves of a block are neighbours, lane / 2 % 8 is the token of an octet, so that a warp writes
// whole KiB. All of its loads are under way at once.

#include "common/scale.h"
#include "common/target.h"
#include "incoming_sm90.h"
#include "rescale_sm90.h" // a launch of its own, of the same code object
#include "sm90/convert.h"
#include "sm90/expand.h"
#include "sm90/memory.h"
#include "sm90/tma.h"
#include "wgmma_bf16_x_sm90.h"
#include "wgmma_f16_x_sm90.h" // likewise

using namespace mx;

// Eight warps have four octets of tokens each; of tiles of more, each further warp has one.
constexpr int kWarps = 8, kOfWarp = 4, kBlock = 32;
using XWorkspace = XWorkspaceOf<false>;
constexpr bool kQuantises = !kIsQuantised<MX_X>;

extern "C" __global__ void __maxnreg__(kQuantises ? 64 : 48)
    aiter_mx_linear_wgmma_bf16_x(const unsigned char* xq, const unsigned char* x_scales,
                                 const unsigned char* wq, const unsigned char* w_scales,
                                 const void*, void*, unsigned char* memory, long M, long K,
                                 int tile_tokens, int swapped) {
    const unsigned char *const x = swapped ? wq : xq, *const xs = swapped ? w_scales : x_scales;
    if (!swapped)
        launch_dependents();
    wait_for_grid_ahead();
    if (swapped) // the dependent reads the real x at once
        launch_dependents();
    const XWorkspace to{memory, M, K, tile_tokens, kQuantises};
    for (unsigned i = blockIdx.x * kWarps * kLanes + threadIdx.x; i < XWorkspace::kCounters;
         i += gridDim.x * kWarps * kLanes)
        to.ended()[i] = 0;
    const long tile = blockIdx.x / to.units(), unit = blockIdx.x % to.units();
    const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
    const int token = lane / 2 % 8, step = lane / 16 * 2 + lane % 2;
    const long k = unit * XWorkspace::kUnit + step * 16;
    const int first = warp < kWarps ? warp : warp + (kOfWarp - 1) * kWarps; // octet
    const int left = tile_tokens / 8 - first;
    const long first_row = tile * tile_tokens + first * 8 + token;
    Incoming<MX_X> incoming[kOfWarp];
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i) {
        const long row = min(first_row + i * kWarps * 8, M - 1);
        if (k < K && i * kWarps < left)
            incoming[i].load_from(x, xs, row * K + k);
    }
    bool outside = false;
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i) {
        if (i * kWarps >= left)
            break;
        const auto [payload, scale] = incoming[i].result();
        const long row = first_row + i * kWarps * 8;
        if (kQuantises && k < K && row < M) {
            store_vector(to.payload() + row * K + k, payload);
            if (lane % 2 == 0)
                to.scales()[(row * K + k) / kBlock] = scale;
        }
        const bool is_nan = scale == kNanScale, over = scale > kLastXScale && !is_nan;
        outside |= over;
        const float factor = bits_to_float(is_nan ? kNanBits : over ? 0 : (scale + 60) << 23);
        u32x4 even, odd;
#pragma unroll
        for (int j = 0; j < 4; ++j)
            e4m3x4_to_bf16(payload[j], factor, even.words[j], odd.words[j]);
        unsigned char* const place =
            to.unit(tile, unit) + (first + i * kWarps) * 1024 + step * 256 + token * 16;
        store_vector(place, even);
        store_vector(place + 128, odd);
    }
    outside = __syncthreads_or(outside);
    if (threadIdx.x == 0)
        to.outside()[blockIdx.x] = outside;
}
