// How a warpgroup of wgmma_f16_sm90.cu adds two tiles of 64 rows of w, for 40 to 96 tokens an
// expert where x does not stay: x, which both read, is brought and made fp16 for 256 rows at a
// time. By count the memory pipe of an SM has the most to do for each 128 k, beside the copies of
// tensor maps. So scales are copied 16 bytes at a time; and ahead of their use, as what waits for
// them keeps all that add waiting.
#pragma once

#include "boxes_finish_sm90.h"
#include "boxes_roles_sm90.h"
#include "boxes_sm90.h"
#include "moe_sm90.h"
#include "sm90/mma.h"
#include "sm90/tma.h"
#include "sm90/wgmma.h"
#include "wgmma_f16_fill_sm90.h"

namespace mx {

// Adds tiles and stores what they come to.
struct Adder {
    using Sums = float[kTiles][kCols / 2];
    const MoeArgs& a;
    Shared& shared;
    const int group, warp, lane; // warp: of the group
    const unsigned base;         // of its ring
    unsigned place; // in a stage: of what the lane gives ldmatrix the address of, for row 0 of two
    Turn<kDepth> ring;
    Turn<kSlots> from;
    unsigned words[2][2][4], scale[2], next_scale[2];
    unsigned powers;  // of two of a lane's rows of w: a byte of each, its exponent
    unsigned outside; // a bit of each: whether scales are too far apart, as far as the lane sees it

    MX_MEMBER Adder(const MoeArgs& a, Shared& shared, int group, int warp, int lane)
        : a(a), shared(shared), group(group), warp(warp), lane(lane),
          base(held(shared_address(shared.ring[group][0]))) {
        const int row = row_of(warp, lane % 8 * 4, 0);
        place = held(row * kChunk + (lane / 8 ^ row % 8) * 16);
    }
    // Half of a stage, 64 k.
    MX_MEMBER void fetch(int stage, int half) {
        // Row 1 is that with another last bit, or lies a box away.
        constexpr unsigned other = kHalves ? kBoxRows * kChunk : kChunk | 16;
#pragma unroll
        for (int i = 0; i < 2; ++i)
            load_matrices(words[half][i],
                          base + stage * kStageBytes + (place ^ half * 64 ^ i * other));
    }
    // Notes rows of blocks that fp16 takes for zero, though they are not.
    MX_MEMBER void look_for_lost(int stage, int t) {
#pragma unroll 1
        for (int at = 0; at < 4; ++at) {
            const int row = row_of(warp, lane, at % 2), piece = lane % 4 * 2 + at / 2;
            const u32x4 v = load_shared_vector(base + stage * kStageBytes + row * kChunk +
                                               (piece ^ row % 8) * 16);
            const unsigned byte = (at % 2 ? scale[1] : scale[0]) >> lane % 4 * 8 & 255;
            const bool lost = byte == 0 && (v[0] | v[1] | v[2] | v[3]) & 0x7f7f7f7f;
            outside |= (lost ? 1u : 0u) << (t * 2 + at % 2);
        }
    }
    // Loads the scales and the first half of the next stage, which is part t's.
    MX_MEMBER void open(int t) {
        barrier_wait(shared_address(shared.full[group] + ring.at), ring.parity);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint2 both = load_shared_8(
                shared_address(&shared.factors[group][ring.at][row_of(warp, lane, i)]));
            next_scale[i] = both.x;
            powers = __byte_perm(powers, both.y, 0x3210 ^ (t * 2 + i ^ 4) << (t * 2 + i) * 4);
        }
        fetch(ring.at, 0);
    }
    MX_MEMBER void close(int stage) const {
        __syncwarp();
        if (lane == 0)
            barrier_arrive(shared_address(shared.empty[group] + stage));
    }
    // Step j of 16 k of the chunk.
    MX_MEMBER void expand(unsigned (&to)[4], int j) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int b = j / 2;
            const unsigned factor = __byte_perm(scale[i], 0, 0x0404 | b << 4 | b << 12);
            e4m3x4_to_f16(words[j / 4][i][j % 4], to[i], to[2 + i]);
            to[i] = multiply_f16x2(to[i], factor);
            to[2 + i] = multiply_f16x2(to[2 + i], factor);
        }
    }
    MX_MEMBER void take(int slot) const {
        if (lane == 0)
            barrier_arrive(shared_address(shared.taken + slot));
    }
    static constexpr int kUnit = 2, kSteps = kChunk / 16; // of 16 k
    // Adds a tile of both parts. What the next stage needs is asked for in the middle of each, and
    // the next x at the end of a chunk, while wgmmas run.
    template <int Width>
    MX_MEMBER void add_columns(Sums& sums) {
        unsigned operand[2][kUnit][4];
        const int chunks = a.chunks();
        int before = 0; // the slot of the chunk before
        outside = 0;
        open(0);
        barrier_wait(shared_address(shared.ready + from.at), from.parity);
#pragma unroll 1
        for (int c = 0; c < chunks; ++c) {
            const MatrixDescriptor x(shared_address(shared.x[from.at]), kCols * 16, 128);
            const int slot = from.at;
            from.next();
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                const int stage = ring.at;
                ring.next();
                scale[0] = next_scale[0];
                scale[1] = next_scale[1];
                fetch(stage, 1);
                if (__builtin_expect((zero_bytes(scale[0]) | zero_bytes(scale[1])) != 0, false))
                    look_for_lost(stage, t);
#pragma unroll
                for (int j = 0; j < kSteps; j += kUnit) {
                    unsigned (&w)[kUnit][4] = operand[j / kUnit % 2];
#pragma unroll
                    for (int n = 0; n < kUnit; ++n)
                        expand(w[n], j + n);
                    wgmma_fence();
#pragma unroll
                    for (int n = 0; n < kUnit; ++n)
                        wgmma_f16_first<Width>(sums[t], w[n], x.at((j + n) * kStepBytes));
                    wgmma_commit();
                    if (j + kUnit == kSteps / 2 && (t + 1 < kTiles || c + 1 < chunks))
                        open((t + 1) % kTiles);
                    if (j == kSteps / 2)
                        close(stage);
                    if (j + kUnit == kSteps && t + 1 == kTiles && c + 1 < chunks)
                        barrier_wait(shared_address(shared.ready + from.at), from.parity);
                    wgmma_wait<1>();
                    if (j == 0 && t == 0 && c > 0)
                        take(before);
                }
            }
            before = slot;
        }
        wgmma_wait<0>();
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
            keep_in_order(sums[t]);
        take(before);
    }
    // Adds as many columns as the least of these widths that holds them. A loop for each: ptxas
    // takes wgmmas in branches of one loop apart.
    template <int Width, int... Narrower>
    MX_MEMBER void add_some(Sums& sums, int columns) {
        if constexpr (sizeof...(Narrower) > 0) {
            constexpr int widths[] = {Narrower...};
            if (columns <= widths[0])
                return add_some<Narrower...>(sums, columns);
        }
        add_columns<Width>(sums);
    }
    MX_MEMBER void add(Sums& sums, int columns) {
        add_some<kCols, kCols - 8, kCols - 16, kCols - 32>(sums, columns);
    }

    // Makes results of a part's sums.
    MX_MEMBER void finish(const Entry& entry, unsigned tile, int t, float (&sums)[kCols / 2],
                          unsigned (&amaxes)[kGroupWarps][kActivated ? kCols : 2]) const {
        const float by_w[2] = {bits_to_float((powers >> t * 16 & 255) << 23),
                               bits_to_float((powers >> t * 16 + 8 & 255) << 23)};
        Finisher{a, group, warp, lane}.run(entry, tile, group * kTiles + t, by_w,
                                           outside >> t * 2 & 3, sums, amaxes);
    }

    MX_MEMBER void run() {
        Turn<kEntries> turn;
        bool is_first = true;
        for (int amax_turn = 0;; turn.next()) {
            barrier_wait(shared_address(shared.opened + turn.at), turn.parity);
            const Entry& entry = shared.queue[turn.at];
            if (entry.expert < 0)
                break;
            if (is_first)
                FirstTops::leave(a, shared, entry, group, warp, lane);
            is_first = false;
            for (unsigned tile = entry.tile; tile < entry.end; ++tile) {
                Sums sums = {};
                add(sums, entry.col_tiles * 8);
#pragma unroll
                for (int t = 0; t < kTiles; ++t, amax_turn ^= 1)
                    finish(entry, tile, t, sums[t], shared.amax[amax_turn][group]);
            }
            __syncwarp();
            if (lane == 0)
                barrier_arrive(shared_address(shared.closed + turn.at));
        }
    }
};

using Places = SharedOfTwo;
using Factors = Filler;

} // namespace mx
