// The launch ahead of wgmma_f16_tiled: x as fp16, relative to each token's largest scale, as wgmma
// takes its B. With MX_X x is bf16 or fp16, quantised first, and what it is quantised to is kept
// too.
//
// A CTA has eight tokens and one of kParts parts of K. Scales that are there it reads all itself;
// of those that are yet to be made the CTAs of a cluster tell each other their part's largest. A
// warp takes a unit of 64 k after another, a lane 16 k of a token: the two halves of a block are
// neighbours, lane / 2 % 8 is the token, so that a warp writes whole KiB. Tokens past the end are
// zeros.
#pragma once

#include "common/scale.h"
#include "common/target.h"
#include "incoming_sm90.h"
#define MX_CLUSTER (MX_X ? 8 : 1)
#include "sm90/cluster.h"
#include "sm90/f16_relative.h"
#include "sm90/memory.h"
#include "sm90/tma.h"
#include "wgmma_bf16_x_sm90.h"

namespace mx::f16_x {

using XWorkspace = XWorkspaceOf<true>;
constexpr int kParts = XWorkspace::kParts, kWarps = 8, kTokens = 8, kAtOnce = 4, kBlock = 32;
constexpr bool kQuantises = !kIsQuantised<MX_X>;
constexpr unsigned kNanFactors = 0x7fff7fff;
static_assert(!kQuantises || kParts == MX_CLUSTER);

// What a lane has: 16 k of a token, of each unit of its warp.
struct Lane {
    const XWorkspace& to;
    const unsigned char *x, *xs;
    long row, M, K; // row: of x, or past its end
    int step;       // of 16 k
    int first, end; // units of its warp, every kWarps-th

    MX_MEMBER long at(int unit) const { return row * K + k(unit); }
    MX_MEMBER long k(int unit) const {
        return unit * static_cast<long>(XWorkspace::kUnit) + step * 16;
    }
    MX_MEMBER bool exists(int unit) const { return unit < end && k(unit) < K && row < M; }

    MX_MEMBER QuantisedHalf load_quantised(int unit) const {
        if (!exists(unit))
            return {{}, 127};
        if constexpr (kQuantises) // what this lane has stored
            return {load(to.payload() + at(unit)), load_byte(to.scales() + at(unit) / kBlock)};
        else
            return {load(x + at(unit)), load_byte(xs + at(unit) / kBlock)};
    }

    // Quantises what it has, and returns the largest scale.
    MX_MEMBER unsigned quantise() const {
        unsigned largest = 0;
#pragma unroll 1
        for (int unit = first; unit < end; unit += kAtOnce * kWarps) {
            Incoming<MX_X> incoming[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                if (const int of = unit + i * kWarps; exists(of))
                    incoming[i].load_from(x, xs, at(of));
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const auto [payload, scale] = incoming[i].result();
                largest = max(largest, sample_of(scale));
                if (const int of = unit + i * kWarps; exists(of)) {
                    store_vector(to.payload() + at(of), payload);
                    to.scales()[at(of) / kBlock] = scale; // by both lanes of a block
                }
            }
        }
        return largest;
    }
};

// The largest scale of a row, by a warp.
MX_DEVICE unsigned largest_of_row(const unsigned char* scales, long blocks, int lane) {
    unsigned largest = 0;
#pragma unroll 8
    for (long b = lane; b < blocks; b += kLanes)
        largest = max(largest, sample_of(load_byte(scales + b)));
    return __reduce_max_sync(0xffffffff, largest);
}
// Four lanes have a token.
MX_DEVICE unsigned largest_of_token(unsigned v) {
    v = max(v, __shfl_xor_sync(0xffffffff, v, 1));
    return max(v, __shfl_xor_sync(0xffffffff, v, 16));
}

extern "C" __global__ void MX_CLUSTER_DIMS __maxnreg__(kQuantises ? 96 : 64)
    aiter_mx_linear_wgmma_f16_x(const unsigned char* x, const unsigned char* xs,
                                const unsigned char*, const unsigned char*, const void*, void*,
                                unsigned char* memory, long M, long K, int tile_tokens) {
    __shared__ unsigned of_warps[kWarps][kTokens], of_parts[kParts][kTokens], of_tokens[kTokens];
    __shared__ unsigned long long told; // of the parts' largest scales
    if constexpr (kQuantises) {
        if (threadIdx.x == 0) {
            barrier_init(shared_address(&told), 1);
            fence_barrier_init();
            barrier_arrive_expect(shared_address(&told), sizeof of_parts);
        }
        __syncwarp();
        cluster_arrive_relaxed();
    }
    launch_dependents();
    wait_for_grid_ahead();
    const XWorkspace to{memory, M, K, tile_tokens, kQuantises};
    for (unsigned i = blockIdx.x * kWarps * kLanes + threadIdx.x; i < XWorkspace::kCounters;
         i += gridDim.x * kWarps * kLanes)
        to.ended()[i] = 0;
    const int rank = blockIdx.x % kParts, lane = threadIdx.x % kLanes;
    const int warp = threadIdx.x / kLanes;
    const int token = lane / 2 % 8, step = lane / 16 * 2 + lane % 2;
    const long first_token = blockIdx.x / kParts * kTokens, own = first_token + token;
    const long tile = first_token / tile_tokens;
    const int units = to.units(), part = (units + kParts - 1) / kParts;
    const Lane of{to, x, xs, own, M, K, step, rank * part + warp, min((rank + 1) * part, units)};

    QuantisedHalf some[kAtOnce];
    const auto load_some = [&](int unit) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
            some[i] = of.load_quantised(unit + i * kWarps);
    };
    unsigned largest = 0;
    if constexpr (kQuantises) {
        const unsigned own_largest = largest_of_token(of.quantise());
        if (step == 0)
            of_warps[warp][token] = own_largest;
        group_barrier();
        cluster_wait(); // the others' barriers are there
        if (threadIdx.x < kParts * kTokens) {
            const int to_rank = threadIdx.x / kTokens, of_token = threadIdx.x % kTokens;
            unsigned of_part = 0;
            for (int i = 0; i < kWarps; ++i)
                of_part = max(of_part, of_warps[i][of_token]);
            store_async(address_in_cluster(shared_address(&of_parts[rank][of_token]), to_rank),
                        of_part, address_in_cluster(shared_address(&told), to_rank));
        }
        __syncwarp();
        load_some(of.first);
        barrier_wait_cluster(shared_address(&told), 0);
        for (int i = 0; i < kParts; ++i)
            largest = max(largest, of_parts[i][token]);
    } else {
        load_some(of.first);
        const unsigned of_row =
            largest_of_row(xs + min(first_token + warp, M - 1) * (K / kBlock), K / kBlock, lane);
        if (lane == 0)
            of_tokens[warp] = of_row;
        group_barrier();
        largest = of_tokens[token];
    }
    const unsigned reference = reference_from(largest);
    if (rank == 0 && warp == 0 && step == 0)
        to.references()[own] = reference;

    const F16Factors factors_of(reference, kOfLargest);
    bool outside = false;
#pragma unroll 1
    for (int unit = of.first; unit < of.end; load_some(unit)) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i, unit += kWarps) {
            if (unit >= of.end)
                break;
            const auto& [payload, scale] = some[i];
            const bool is_nan = scale == kNanScale;
            outside |= !is_covered(scale, reference, kOfLargest) && !is_nan && has_values(payload);
            const unsigned factors = is_nan ? kNanFactors : factors_of(scale);
            u32x4 one, other;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                e4m3x4_to_f16<0>(payload[j], factors, one.words[j], other.words[j]);
            unsigned char* const place =
                to.unit(tile, unit) + first_token % tile_tokens * 128 + step * 256 + token * 16;
            store_vector(place, one);
            store_vector(place + 128, other);
        }
    }
    outside = named_barrier_or(1, kWarps * kLanes, outside);
    if (threadIdx.x == 0)
        to.outside()[blockIdx.x] = outside;
}

} // namespace mx::f16_x
