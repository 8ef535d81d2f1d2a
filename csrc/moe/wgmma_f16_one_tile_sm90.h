// How a warpgroup of wgmma_f16_sm90.cu adds one tile of 64 rows of w.
#pragma once

#include "boxes_finish_sm90.h"
#include "boxes_roles_sm90.h"
#include "boxes_scales_sm90.h"
#include "boxes_sm90.h"
#include "moe_sm90.h"
#include "sm90/tma.h"
#include "sm90/wgmma.h"

namespace mx {

constexpr int kSteps = 4; // matrix instructions of a unit, of 64 k

// Adds tiles and stores what they come to.
struct Adder {
    const MoeArgs& a;
    Shared& shared;
    const int group, warp, lane; // warp: of the group
    const unsigned base;         // of its ring
    unsigned place[2];           // in a stage: of what the lane gives ldmatrix the address of
    Turn<kDepth> ring;
    Turn<kSlots> from;
    unsigned words[2][4], scale[2];
    float by_w[2];
    unsigned outside[2]; // whether a row of w has scales too far apart, as far as the lane sees it

    MX_MEMBER Adder(const MoeArgs& a, Shared& shared, int group, int warp, int lane)
        : a(a), shared(shared), group(group), warp(warp), lane(lane),
          base(held(shared_address(shared.ring[group][0]))) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = row_of(warp, lane % 8 * 4, i);
            place[i] = held(row * kChunk + (lane / 8 ^ row % 8) * 16);
        }
    }
    MX_MEMBER void fetch(int u) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            load_matrices(words[i], base + ring.at * kStageBytes + (place[i] ^ u * 64));
    }
    // Notes rows of blocks that fp16 takes for zero, though they are not.
    MX_MEMBER void look_for_lost() {
#pragma unroll 1
        for (int at = 0; at < 4; ++at) {
            const int row = row_of(warp, lane, at % 2), piece = lane % 4 * 2 + at / 2;
            const u32x4 v = load_shared_vector(base + ring.at * kStageBytes + row * kChunk +
                                               (piece ^ row % 8) * 16);
            const unsigned byte = (at % 2 ? scale[1] : scale[0]) >> lane % 4 * 8 & 255;
            const bool lost = byte == 0 && (v[0] | v[1] | v[2] | v[3]) & 0x7f7f7f7f;
            outside[0] |= lost && at % 2 == 0;
            outside[1] |= lost && at % 2;
        }
    }
    MX_MEMBER void open() {
        barrier_wait(shared_address(shared.full[group] + ring.at), ring.parity);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint2 both = load_shared_8(
                shared_address(&shared.factors[group][ring.at][row_of(warp, lane, i)]));
            scale[i] = both.x;
            by_w[i] = __uint_as_float(both.y);
        }
        fetch(0);
        if (__builtin_expect((zero_bytes(scale[0]) | zero_bytes(scale[1])) != 0, false))
            look_for_lost();
    }
    MX_MEMBER void close() {
        __syncwarp();
        if (lane == 0)
            barrier_arrive(shared_address(shared.empty[group] + ring.at));
        ring.next();
    }
    MX_MEMBER void expand(unsigned (&to)[kSteps][4], int u) const {
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
            const int b = u * 2 + j / 2;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const unsigned factor = __byte_perm(scale[i], 0, 0x0404 | b << 4 | b << 12);
                e4m3x4_to_f16(words[i][j], to[j][i], to[j][2 + i]);
                to[j][i] = multiply_f16x2(to[j][i], factor);
                to[j][2 + i] = multiply_f16x2(to[j][2 + i], factor);
            }
        }
    }
    MX_MEMBER void take(int slot) const {
        if (lane == 0)
            barrier_arrive(shared_address(shared.taken + slot));
    }
    // Multiplies as many columns as the least of these widths that holds them.
    template <int Width, int... Narrower>
    MX_MEMBER static void multiply(float (&sums)[kCols / 2], const unsigned (&w)[kSteps][4],
                                   const MatrixDescriptor& x, int columns) {
        if constexpr (sizeof...(Narrower) > 0) {
            constexpr int widths[] = {Narrower...};
            if (Width > kCols || columns <= widths[0])
                return multiply<Narrower...>(sums, w, x, columns);
        }
        if constexpr (Width <= kCols)
            multiply_by<Width>(sums, w, x);
    }
    template <int Width>
    MX_MEMBER static void multiply_by(float (&sums)[kCols / 2], const unsigned (&w)[kSteps][4],
                                      const MatrixDescriptor& x) {
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < kSteps; ++j)
            wgmma_f16_first<Width>(sums, w[j], x.at(j * kStepBytes));
        wgmma_commit();
    }
    // frees: whether x is not needed again.
    MX_MEMBER void add(float (&sums)[kCols / 2], int columns, bool frees) {
        unsigned operand[2][kSteps][4];
        const int chunks = a.chunks();
        int before = 0; // the slot of the chunk before
        outside[0] = outside[1] = 0;
        open();
#pragma unroll 1
        for (int c = 0; c < chunks; ++c) {
#pragma unroll
            for (int u = 0; u < 2; ++u) {
                expand(operand[u], u);
                if (u == 0)
                    barrier_wait(shared_address(shared.ready + from.at), from.parity);
                const MatrixDescriptor x(
                    shared_address(shared.x[from.at]) + u * kSteps * kStepBytes, kCols * 16, 128);
                multiply<128, 112, 96, 88, 80, 72, 64, 56, 48, 40, 32, 24, 16>(sums, operand[u], x,
                                                                               columns);
                if (u == 0) {
                    fetch(1);
                } else {
                    close();
                    if (c + 1 < chunks)
                        open();
                }
                wgmma_wait<1>();
                if (u == 0 && c > 0 && frees)
                    take(before);
            }
            before = from.at;
            if (kResident && !frees)
                from.at = from.at + 1 == kSlots ? 0 : from.at + 1; // the same once more
            else
                from.next();
        }
        wgmma_wait<0>();
        keep_in_order(sums);
        if (frees)
            take(before);
    }

    MX_MEMBER void run() {
        Turn<kEntries> turn;
        for (int amax_turn = 0;; turn.next()) {
            barrier_wait(shared_address(shared.opened + turn.at), turn.parity);
            const Entry& entry = shared.queue[turn.at];
            if (entry.expert < 0)
                break;
            for (unsigned tile = entry.tile; tile < entry.end; ++tile, amax_turn ^= 1) {
                float sums[kCols / 2] = {};
                add(sums, entry.col_tiles * 8, !kResident || tile + 1 == entry.end);
                Finisher{a, group, warp, lane}.run(entry, tile, group, by_w,
                                                   outside[0] | outside[1] << 1, sums,
                                                   shared.amax[amax_turn][group]);
            }
            __syncwarp();
            if (lane == 0)
                barrier_arrive(shared_address(shared.closed + turn.at));
        }
    }
};

using Places = Shared;
using Factors = Scaler;

} // namespace mx
