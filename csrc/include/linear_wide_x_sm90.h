// How x becomes what the wide linear of Hopper, linear_wide_sm90.cu, multiplies.
#pragma once

#include "linear_wide_sm90.h"
#include "mx_target.h"
#include "sm90_async.h"
#include "sm90_copy.h"
#include "sm90_expand.h"
#include "sm90_f16_factors.h"
#include "sm90_mma.h"

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
    static constexpr int kRounds = (kChunks + kXSubs - 1) / kXSubs;
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
    MX_MEMBER void expand(int chunk, unsigned source) const {
        unsigned factors = tops[0];
#pragma unroll
        for (int n = 1; n < kTops; ++n)
            factors = select_bits(chunk / kStep == n ? ~0u : 0, tops[n], factors);
        factors = __shfl_sync(~0u, factors, threadIdx.x % kEight + chunk % kStep * kEight);
        const unsigned b = piece() / 2, factor = __byte_perm(factors, 0, 0x0404 | b << 4 | b << 12);
        const u32x4 v = load_shared_vector(source);
        if (__builtin_expect(factor == 0 && (v[0] | v[1] | v[2] | v[3]) & 0x7f7f7f7f, false)) {
            shared.x_outside[m()] = 1;
            shared.any_x[0] = 1;
        }
        unsigned low[4], high[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            e4m3x4_to_f16(v[j], low[j], high[j]);
            low[j] = multiply_f16x2(low[j], factor);
            high[j] = multiply_f16x2(high[j], factor);
        }
        const unsigned place = to + (chunk * kPieces + piece()) * kStepBytes + m() * kPiece;
        store_shared_16(place, low);
        store_shared_16(place + kTileM * kPiece, high);
    }
    // By all warps. Calls ask(chunk) where there is room for chunks from this one on, and
    // after_round with the number of each round.
    template <class Ask, class AfterRound>
    MX_MEMBER void run(const Ask& ask, const AfterRound& after_round) {
        const bool works = sub() < kXSubs; // else there are more threads than pieces
        if (works)
            find_factors();
        const unsigned source =
            held(from + sub() * kSlotBytes + m() * kChunk + (piece() ^ m() % kEight) * kPiece);
        int round = 0;
#pragma unroll 1
        for (int batch = 0; batch < kChunks; batch += kSlots) {
            if (kSlots < kChunks && batch > 0) {
                group_barrier();
                ask(batch);
            }
#pragma unroll 1
            for (int slot = 0; slot < kSlots && batch + slot < kChunks; slot += kXSubs) {
                const int chunk = batch + slot + sub();
                if (works && chunk < part.chunks) {
                    barrier_wait(shared_address(shared.x_full + chunk), 0);
                    expand(chunk, source + slot * kSlotBytes);
                }
                after_round(round++);
            }
        }
        fence_async();
    }
};

} // namespace mx
