// How x becomes what the wide linear of Hopper, wide_sm90.cu, multiplies.
#pragma once

#include "common/target.h"
#include "sm90/f16_factors.h"
#include "sm90/mma.h"
#include "sm90/tma.h"
#include "wide_sm90.h"

namespace mx {

// Makes x of the part fp16, in the order in which wgmma takes it: 8x16-byte pieces of 8 rows by the
// lower, then the upper halves of the words of 16 k. A thread has 16 k of a row in every so many
// chunks. A loop, as code that runs once waits for its fetching.
struct XExpander {
    const Tensors& t;
    const Part& part;
    Shared& shared;
    const unsigned from, to; // e4m3, fp16

    static constexpr int kPieces = kChunk / kPiece, kEight = 8;
    static constexpr int kStep = kLanes / kEight;               // lanes of a row
    static constexpr int kTops = (kChunks + kStep - 1) / kStep; // a lane's words of scales
    unsigned tops[kTops];                                       // scales, then factors

    // Lanes 8i to 8i + 7 have the same piece of 8 rows.
    MX_MEMBER int sub() const { return threadIdx.x / (kTileM * kPieces); }
    MX_MEMBER int m() const {
        return threadIdx.x / (kEight * kPieces) % kTilesM * kEight + threadIdx.x % kEight;
    }
    MX_MEMBER int piece() const { return threadIdx.x / kEight % kPieces; }
    MX_MEMBER int first_top() const { return threadIdx.x / kEight % kStep; }

    // What is needed first.
    MX_MEMBER void open() {
        if (sub() < kXSubs)
            read_scales<kStep>(tops, t.xs + min(m(), t.M - 1) * t.blocks(), first_top(), part, t,
                               t.aligned(t.xs));
    }
    MX_MEMBER void find_factors() {
        const unsigned top = top_of<8 | 16>(tops);
#pragma unroll
        for (int n = 0; n < kTops; ++n) // what does not exist is not far
            if (first_top() + n * kStep >= part.chunks)
                tops[n] = top * 0x01010101;
        make_factors(tops, top);
        if (sub() == 0 && piece() == 0) {
            const int exponent = exponent_of(top);
            shared.x_exponent[m()] = exponent;
            shared.x_power[m()] = power(exponent);
            if (is_far(exponent))
                shared.any_x[1] = 1;
        }
    }
    // One piece: from source to place, with the factor of its block.
    MX_MEMBER void expand(unsigned source, unsigned place, unsigned factor) const {
        const u32x4 v = load_shared_vector(source);
        unsigned low[4], high[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            e4m3x4_to_f16(v[j], low[j], high[j]);
            low[j] = multiply_f16x2(low[j], factor);
            high[j] = multiply_f16x2(high[j], factor);
        }
        store_shared_16(place, low);
        store_shared_16(place + kTileM * kPiece, high);
    }
    // Notes a row of which a block is taken for zero, though it is not.
    MX_MEMBER void look_for_lost(int batch, unsigned source, unsigned pick) const {
#pragma unroll 1
        for (int slot = 0; slot < kSlots && batch + slot < kChunks; slot += kXSubs) {
            const int chunk = batch + slot + sub();
            unsigned factors = tops[0];
#pragma unroll
            for (int n = 1; n < kTops; ++n)
                factors = chunk >= n * kStep ? tops[n] : factors;
            factors = __shfl_sync(~0u, factors, threadIdx.x % kEight + chunk * kEight);
            if (chunk < part.chunks && zero_bytes(factors) != 0) {
                barrier_wait(shared_address(shared.x_full + chunk), 0);
                const u32x4 v = load_shared_vector(source + slot * kSlotBytes);
                if (__byte_perm(factors, 0, pick) == 0 &&
                    (v[0] | v[1] | v[2] | v[3]) & 0x7f7f7f7f) {
                    shared.x_outside[m()] = 1;
                    shared.any_x[0] = 1;
                }
            }
        }
    }
    // By all warps. Calls ask(chunk) where there is room for chunks from this one on, and
    // after_round behind each round. Each instruction of the loop counts, as four warps share a
    // scheduler: so what it needs is worked out before, or follows from the round before.
    template <class Ask, class AfterRound>
    MX_MEMBER void run(const Ask& ask, const AfterRound& after_round) {
        constexpr bool all_work = kThreads == kXSubs * kTileM * kPieces;
        const bool works = all_work || sub() < kXSubs; // else there are more threads than pieces
        bool careful = false;
        if (works) {
            find_factors();
#pragma unroll
            for (int n = 0; n < kTops; ++n)
                careful |= zero_bytes(tops[n]) != 0;
            careful = __any_sync(~0u, careful);
        }
        const unsigned b = piece() / 2, pick = 0x0404 | b << 4 | b << 12;
        const unsigned begin =
            from + sub() * kSlotBytes + m() * kChunk + (piece() ^ m() % kEight) * kPiece;
        unsigned place = to + (sub() * kPieces + piece()) * kStepBytes + m() * kPiece;
        unsigned barrier = shared_address(shared.x_full + sub());
        unsigned lane_of = threadIdx.x % kEight + sub() * kEight; // of those 32 that count
        int chunk = sub();
#pragma unroll 1
        for (int batch = 0; batch < kChunks; batch += kSlots) {
            if (kSlots < kChunks && batch > 0) {
                group_barrier();
                ask(batch);
            }
            unsigned source = held(begin);
#pragma unroll 1
            for (int slot = 0; slot < kSlots && batch + slot < kChunks; slot += kXSubs) {
                if (works && (kWhole && kChunks % kXSubs == 0 || chunk < part.chunks)) {
                    unsigned factors = tops[0];
#pragma unroll
                    for (int n = 1; n < kTops; ++n)
                        factors = chunk >= n * kStep ? tops[n] : factors;
                    factors = __shfl_sync(~0u, factors, lane_of);
                    barrier_wait(barrier, 0);
                    expand(source, place, __byte_perm(factors, 0, pick));
                }
                source += kXSubs * kSlotBytes;
                place += kXSubs * kPieces * kStepBytes;
                barrier += kXSubs * 8;
                lane_of += kXSubs * kEight;
                chunk += kXSubs;
                after_round();
            }
            if (__builtin_expect(careful, false)) // what they came from is still there
                look_for_lost(batch, begin, pick);
        }
        fence_async();
    }
};

} // namespace mx
