// The loop of the wide linear of Hopper, wide_sm90.cu: what each of its warps that have rows
// of w does with them, from the ring in shared memory to sums of a part of K.
#pragma once

#include "common/target.h"
#include "sm90/memory.h"
#include "sm90/mma.h"
#include "sm90/rows.h"
#include "sm90/tma.h"
#include "sm90/wgmma.h"
#include "wide_sm90.h"

namespace mx {

struct Adder {
    using Sums = float[kTileM / 2];
    static constexpr int kSteps = kChunk / 16; // wgmmas of a chunk
    static constexpr int kUnit = kSteps / 2;   // of them, between waits
    using Operands = unsigned[2][kUnit][4];    // of one unit that is multiplied, and of the next

    Shared& shared;
    const int warp, lane;
    // Addresses: the lane's first 16 bytes of w in the ring, its first scales, barriers.
    const unsigned from, full, empty;
    unsigned scales, next_scales; // of this pass and, where kLate, of the next
    bool careful;                 // whether any factor of the warp's rows is 0
    Turn<kDepth> ring;
    unsigned words[2][2][4], scale[2], next_scale[2];
    unsigned outside[2], lost[2]; // of the chunks that were opened, of the pass
    int exponent[2];              // of what the rows are relative to
    uint2 any_x;                  // whether any of x is outside, is far

    static constexpr bool kAllHaveRows = kRows % 64 == 0;
    MX_MEMBER bool has_rows() const { return kAllHaveRows || warp < kRowWarps; }

    MX_MEMBER Adder(Shared& shared, unsigned base, int warp, int lane)
        : shared(shared), warp(warp), lane(lane),
          from(held(base + (warp * kWarpRows + lane % 8) * kChunk + (lane / 8 ^ lane % 8) * 16)),
          full(held(shared_address(shared.full))), empty(held(shared_address(shared.empty))) {
        outside[0] = outside[1] = 0;
    }
    // The table of the warp's rows.
    MX_MEMBER void use(unsigned table, bool has_zeros) {
        scales = held(table + lane / 4 * kScaleStride * 4);
        careful = has_zeros;
    }
    // That of the next pass, whose first chunk is opened in this one.
    MX_MEMBER void use_next(unsigned table, bool has_zeros) {
        next_scales = held(table + lane / 4 * kScaleStride * 4);
        careful |= has_zeros;
    }
    // Half of a chunk.
    MX_MEMBER void fetch(int half) {
        if (!has_rows())
            return;
        const unsigned place = (from ^ half * 64) + ring.at * kStageBytes;
        load_matrices(words[half][0], place);
        load_matrices(words[half][1], place + 8 * kChunk);
    }
    // Notes rows of blocks that fp16 takes for zero, though they are not.
    MX_MEMBER void look_for_lost() {
        const unsigned first = from - lane % 8 * kChunk - (lane / 8 ^ lane % 8) * 16;
#pragma unroll 1
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + i % 2 * 8, piece = lane % 4 * 2 + i / 2;
            const u32x4 v = load_shared_vector(first + ring.at * kStageBytes + row * kChunk +
                                               (piece ^ row % 8) * 16);
            const bool lost = byte_of(i % 2 ? next_scale[1] : next_scale[0], lane % 4) == 0 &&
                              (v[0] | v[1] | v[2] | v[3]) & 0x7f7f7f7f;
            outside[0] |= lost && i % 2 == 0;
            outside[1] |= lost && i % 2;
        }
    }
    // The next chunk's scales, which are `there`, and its first half.
    MX_MEMBER void open(unsigned there) {
        if (!has_rows())
            return;
        barrier_wait(full + ring.at * 8, ring.parity);
        next_scale[0] = load_shared_4(there);
        next_scale[1] = load_shared_4(there + 8 * kScaleStride * 4);
        fetch(0);
        if (__builtin_expect(careful, false) &&
            (zero_bytes(next_scale[0]) | zero_bytes(next_scale[1])) != 0)
            look_for_lost();
    }
    MX_MEMBER void close(int stage) const {
        if (has_rows()) {
            __syncwarp();
            if (lane == 0)
                barrier_arrive(empty + stage * 8);
        }
    }
    // Step j of 16 k of a chunk.
    MX_MEMBER void expand(unsigned (&a)[4], int j, const unsigned (&by)[2]) const {
        if (!has_rows())
            return;
        const int b = j / 2;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned factor = __byte_perm(by[i], 0, 0x0404 | b << 4 | b << 12);
            e4m3x4_to_f16(words[j / 4][i][j % 4], a[i], a[2 + i]);
            a[i] = multiply_f16x2(a[i], factor);
            a[2 + i] = multiply_f16x2(a[2 + i], factor);
        }
    }
    // What is multiplied first. Without a chunk: anything, which is not multiplied.
    MX_MEMBER void begin(Operands& a, int chunks) {
        outside[0] = outside[1] = 0;
        if (kLate || chunks > 0) {
            open(scales);
            fetch(1);
#pragma unroll
            for (int n = 0; n < kUnit; ++n)
                expand(a[0][n], n, next_scale);
        }
    }
    // Calls between(j) behind the wgmmas of the unit that begins with step j. A unit is expanded
    // while the one before is multiplied, from words that were asked for a half of a chunk before,
    // so that none of it is waited for. `last`: of the pass; `more`: whether a chunk follows, of
    // this pass or the next; `there`: where the chunk's scales are, then the next one's.
    template <class Between>
    MX_MEMBER void add_chunk(Sums& sums, Operands& a, const MatrixDescriptor& b, bool last,
                             bool more, unsigned& there, const Between& between) {
        const int stage = ring.at;
        ring.next();
        scale[0] = next_scale[0];
        scale[1] = next_scale[1];
#pragma unroll
        for (int j = 0; j < kSteps; j += kUnit) {
            const int ahead = j + kUnit;
            wgmma_fence();
#pragma unroll
            for (int n = 0; n < kUnit; ++n)
                wgmma_f16(sums, a[j / kUnit % 2][n], b.at((j + n) * kStepBytes));
            wgmma_commit();
            between(j);
            if (ahead == kSteps && more) { // as late as can be: it may not have come
                if (kLate && last) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        lost[i] = outside[i];
                        outside[i] = 0;
                    }
                }
                there = kLate && last ? next_scales : there + 4;
                open(there);
                fetch(1);
            }
            wgmma_wait<1>();
#pragma unroll
            for (int n = 0; n < kUnit; ++n) // behind the last chunk: of anything
                expand(a[ahead / kUnit % 2][n], (ahead + n) % kSteps,
                       ahead == kSteps ? next_scale : scale);
            if (ahead == kSteps / 2)
                close(stage);
        }
    }
    // All of a pass. Where kLate, calls between(c, j) as add_chunk does, for chunks c of the first
    // kBusyChunks. `more`: whether there is a pass after this one.
    template <class Between>
    MX_MEMBER void add(Sums& sums, Operands& a, unsigned x, int chunks, bool more,
                       const Between& between) {
        const auto nothing = [](int) {};
        MatrixDescriptor b(x, kTileM * 16, 128);
        unsigned there = scales;
        if constexpr (kLate) {
#pragma unroll
            for (int c = 0; c < kBusyChunks; ++c) {
                add_chunk(sums, a, b, false, true, there, [&](int j) { between(c, j); });
                b.advance(kSteps * kStepBytes);
            }
        }
#pragma unroll 1
        for (int c = kLate ? kBusyChunks : 0; c < chunks; ++c) {
            const bool last = c + 1 == chunks;
            add_chunk(sums, a, b, last, !last || (kLate && more), there, nothing);
            b.advance(kSteps * kStepBytes);
        }
        if (!kLate || !more) {
            lost[0] = outside[0];
            lost[1] = outside[1];
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) // ahead of the wait, which has time for it
            exponent[i] =
                has_rows() ? load_shared_4(scales + (8 * i * kScaleStride + kChunks) * 4) : 0;
        any_x = load_shared_8(shared_address(shared.any_x));
        wgmma_wait<0>();
        keep_in_order(sums);
    }

    // Applies the rows' largest scales, and marks what is to be computed again.
    MX_MEMBER void scale_sums(Sums& sums) const {
        const bool far = is_far(exponent[0]) || is_far(exponent[1]) || any_x.y;
        if (__builtin_expect(!__any_sync(~0u, far), true)) {
            const float by_w[2] = {power(exponent[0]), power(exponent[1])};
#pragma unroll
            for (int j = 0; j < kTilesM; ++j) {
                const float2 by_x =
                    *reinterpret_cast<const float2*>(shared.x_power + j * 8 + lane % 4 * 2);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    sums[j * 4 + i * 2] *= by_w[i] * by_x.x;
                    sums[j * 4 + i * 2 + 1] *= by_w[i] * by_x.y;
                }
            }
        } else {
#pragma unroll 1
            for (int half = 0; half < 2; ++half) // so that nothing is rounded or overflows early
#pragma unroll 1
                for (int at = 0; at < kTileM / 2; ++at) {
                    const int x = shared.x_exponent[column(at)];
                    const int w = at / 2 % 2 ? exponent[1] : exponent[0];
                    const float by_w = power(half ? w - (w >> 1) : w >> 1);
                    const float by_x = power(half ? x - (x >> 1) : x >> 1);
#pragma unroll
                    for (int i = 0; i < kTileM / 2; ++i)
                        sums[i] = i == at ? sums[i] * by_w * by_x : sums[i];
                }
        }
        if (__builtin_expect(!__any_sync(~0u, lost[0] | lost[1]) && !any_x.x, true))
            return;
        unsigned again = 0; // a bit for each of the two rows
#pragma unroll
        for (int i = 0; i < 2; ++i)
            again |= (any_of_row(lost[i] != 0, lane) ? 1u : 0u) << i;
#pragma unroll 1
        for (int at = 0; at < kTileM / 2; ++at) {
            const bool marked = again >> (at / 2 % 2) & 1 || shared.x_outside[column(at)];
#pragma unroll
            for (int i = 0; i < kTileM / 2; ++i)
                sums[i] = i == at && marked ? bits_to_float(kMarker) : sums[i];
        }
    }
    // Of x, of the lane's value.
    MX_MEMBER int column(int value) const { return value / 4 * 8 + lane % 4 * 2 + value % 2; }

    // Sends tile j of sums to the workgroup of the cluster that owns it.
    MX_MEMBER void send(const Sums& sums, int j, int rank, unsigned inbox) const {
        const unsigned barrier = shared_address(&shared.inbox);
        const float4 sum{sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]};
        const int i = warp * kTilesM + j, owner = i % kSplit;
        const unsigned to = inbox + (i / kSplit * kSplit + rank) * kTileBytes + lane * 16;
        if (owner == rank)
            store_tile(to, sum);
        else
            store_async(address_in_cluster(to, owner), sum, address_in_cluster(barrier, owner));
    }
    // When all have been sent: each lane for what it keeps.
    MX_MEMBER void tell_sent() const { barrier_arrive(shared_address(&shared.inbox)); }
};

} // namespace mx
