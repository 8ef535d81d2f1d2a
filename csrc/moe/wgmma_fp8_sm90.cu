// Grouped GEMM over routed tokens on Hopper, for up to some tens of tokens an expert and results of
// 16 bits or activated ones. aiter_mx/kernels/moe_gemm/problem.py defines what it computes and its
// arguments.
//
// A workgroup takes kRows rows of an expert's w and up to kCols rows of x, as in
// wgmma_f16_sm90.cu, and computes as linear/wgmma_fp8_sm90.cu does. Nothing is converted:
//
//   w       -> a ring in shared memory for each warpgroup that adds, by boxes of 128 k: wgmma's A
//   x       -> shared memory, kSlots chunks ahead, in the order of boxes: wgmma's B
//   scales  -> shared memory; those of x as bf16. Another wgmma multiplies those of w and of x.
//   sums    += products of a block of 32 k times what that gave, in fp32
//
// Rows whose scales are so far from 1 that this is not exact, zero blocks aside, are computed again
// in fp32.

#include "boxes_finish_sm90.h"
#include "boxes_sm90.h"
#include "common/target.h"
#include "moe_sm90.h"
#include "sm90/tma.h"
#include "sm90/wgmma.h"
#include "wgmma_fp8_bring_sm90.h"

using namespace mx;

// Adds tiles and stores what they come to. Lane 4 g + t of a warp has sums of rows g and g + 8 of
// the warp's 16 in a stage.
struct Adder {
    const MoeArgs& a;
    Shared& shared;
    const int group, warp, lane; // warp: of the group
    Turn<kDepth> ring;
    Turn<kSlots> from;
    Turn<kScalePlacesOuter> place;
    unsigned outside; // a bit for each of the two rows: has far scales that count, as the lane sees

    // Two blocks' scales of each of the lane's two rows, as bf16; the lane with t = 0 has blocks 0
    // and 1, that with t = 1 blocks 2 and 3.
    MX_MEMBER void load_scales_of(unsigned (&scales)[2], int chunk) {
        const int first = warp * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < 2; ++i)
            scales[i] = load_shared_4(
                shared_address(&shared.w_scales[place.at][group * kGroupRows + first + 8 * i]
                                               [chunk % kVectorChunks]));
        barrier_wait(shared_address(shared.full[group] + ring.at), ring.parity);
        if (__builtin_expect((far_of_w(scales[0]) | far_of_w(scales[1])) != 0, false)) {
#pragma unroll 1
            for (int i = 0; i < 2; ++i) {
                const unsigned own = i ? scales[1] : scales[0];
                bool counts = false;
                const unsigned kept =
                    without_far(own, far_of_w(own), shared_address(shared.ring[group][ring.at]),
                                first + 8 * i, counts);
                outside |= (counts ? 1u : 0u) << i;
                scales[0] = i ? scales[0] : kept;
                scales[1] = i ? kept : scales[1];
            }
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; ++i)
            scales[i] = __byte_perm(scales[i], 0, lane % 2 ? 0x4342 : 0x4140) << 7;
    }
    // Adds a tile's first Width columns. Some blocks are multiplied while another is added, but for
    // the ends of chunks: ptxas has wgmmas across the end of a loop wait for each other.
    template <int Width>
    MX_MEMBER void add_columns(float (&sums)[kCols / 2]) {
        constexpr int buffers = Width <= 16 ? 4 : 2, values = Width / 2;
        float products[buffers][values], factors[buffers][values];
        unsigned by[buffers][2], scales[2], masks[kBlocks];
        const unsigned zero = held(0);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
            masks[b] = held(lane % 4 == b / 2 ? (b % 2 ? 0xffff0000 : 0xffff) : 0);
        const SwizzledDescriptor w(shared_address(shared.ring[group][0])),
            x(shared_address(shared.x[0]));
        const MatrixDescriptor x_factors(shared_address(shared.x_factors[0]), 0, 8 * 16);
        const int chunks = a.chunks();
        const auto multiply = [&](int p, int b) {
            constexpr int block = kBlock / 16, stage = kStageBytes / 16, slot = kCols * kChunk / 16;
#pragma unroll
            for (int i = 0; i < 2; ++i)
                by[p][i] = held(scales[i] & masks[b]);
            wgmma_fence();
            wgmma_block(products[p], SwizzledDescriptor::of(w.low + ring.at * stage + b * block),
                        SwizzledDescriptor::of(x.low + from.at * slot + b * block));
            wgmma_factors(factors[p], by[p][0], by[p][1], zero, x_factors.at(from.at * kCols * 16));
            wgmma_commit();
        };
        const auto add_block = [&](int p) {
            keep_in_order(products[p]);
            keep_in_order(factors[p]);
            asm volatile("" : "+r"(by[p][0]), "+r"(by[p][1]));
#pragma unroll
            for (int v = 0; v < values; ++v)
                sums[v] = mx::fma(products[p][v], factors[p][v], sums[v]);
            keep_in_order(sums);
        };
#pragma unroll 1
        for (int c = 0; c < chunks; ++c) {
            barrier_wait(shared_address(shared.ready + from.at), from.parity);
            load_scales_of(scales, c);
#pragma unroll
            for (int b = 0; b < buffers; ++b)
                multiply(b, b);
            if constexpr (buffers == 2) {
#pragma unroll
                for (int b = 0; b < 2; ++b) {
                    wgmma_wait<1>();
                    add_block(b);
                    multiply(b, b + 2);
                }
            } else {
                wgmma_wait<3>();
                add_block(0);
                wgmma_wait<2>();
                add_block(1);
            }
            wgmma_wait<1>();
            add_block(buffers - 2);
            wgmma_wait<0>();
            if (lane == 0) {
                barrier_arrive(shared_address(shared.empty[group] + ring.at));
                barrier_arrive(shared_address(shared.taken + from.at));
            }
            add_block(buffers - 1);
            ring.next();
            from.next();
            if (c % kVectorChunks == kVectorChunks - 1)
                place.next();
        }
    }
    // Adds as many columns as the least of these widths that holds them. A loop for each.
    template <int Width, int... Wider>
    MX_MEMBER void add(float (&sums)[kCols / 2], int columns) {
        if constexpr (sizeof...(Wider) > 0 && Width < kCols) {
            if (columns > Width)
                return add<Wider...>(sums, columns);
        }
        add_columns<Width>(sums);
    }

    // Puts sums of rows that are neighbours into one lane, as row_of has them; returns outside's
    // bits for these.
    MX_MEMBER unsigned exchange(float (&sums)[kCols / 2]) const {
        const int g = lane / 4, upper = g / 4;
        const int one = (g * 2 % 8 + upper) * 4 + lane % 4;
        const int other = (g * 2 % 8 + 1 - upper) * 4 + lane % 4;
        const bool odd = g % 2;
#pragma unroll
        for (int j = 0; j < kColTiles; ++j)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float first = sums[j * 4 + c], second = sums[j * 4 + 2 + c];
                sums[j * 4 + c] = __shfl_sync(~0u, odd ? second : first, one);
                sums[j * 4 + 2 + c] = __shfl_sync(~0u, odd ? first : second, other);
            }
        unsigned found = 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) { // all lanes of a row see the same
            const unsigned there = __shfl_sync(~0u, outside, i ? other : one);
            found |= (there >> upper & 1) << i;
        }
        return found;
    }
    // The same where gate and up rows lie apart: two warps have both of 16 features, and each takes
    // those of 8.
    MX_MEMBER unsigned trade(float (&sums)[kCols / 2]) const {
        const bool up = warp >= 2;
        auto& own = shared.traded[group][warp];
        const auto& others = shared.traded[group][warp ^ 2];
#pragma unroll
        for (int j = 0; j < kColTiles; ++j)
#pragma unroll
            for (int c = 0; c < 2; ++c)
                own[j * 2 + c][lane] = up ? sums[j * 4 + c] : sums[j * 4 + 2 + c];
        own[kCols / 4][lane] = bits_to_float(outside);
        named_barrier(1 + group, kGroupThreads);
#pragma unroll
        for (int j = 0; j < kColTiles; ++j)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float value = others[j * 2 + c][lane];
                sums[j * 4 + c] = up ? value : sums[j * 4 + c];
                sums[j * 4 + 2 + c] = up ? sums[j * 4 + 2 + c] : value;
            }
        const unsigned there = float_to_bits(others[kCols / 4][lane]);
        return up ? there >> 1 | (outside & 2) : (outside & 1) | there << 1 & 2;
    }

    MX_MEMBER void run() {
        Turn<kEntries> turn;
        for (int amax_turn = 0;; turn.next(), amax_turn ^= 1) {
            barrier_wait(shared_address(shared.opened + turn.at), turn.parity);
            const Entry& entry = shared.queue[turn.at];
            if (entry.expert < 0)
                break;
            float sums[kCols / 2] = {};
            outside = 0;
            add<16, 24, 32, 40, 48>(sums, entry.col_tiles * 8);
            const unsigned left_out = kHalves ? trade(sums) : exchange(sums);
            const Finisher finisher{a, group, kHalves ? warp % 2 * 2 + warp / 2 : warp, lane};
            finisher.run_scaled(entry, entry.tile, group, left_out, sums,
                                shared.amax[amax_turn][group]);
            __syncwarp();
            if (lane == 0)
                barrier_arrive(shared_address(shared.closed + turn.at));
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    aiter_mx_moe_gemm_wgmma_fp8(MX_MOE_PARAMETERS, const __grid_constant__ TensorMap weights_map) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    const MoeArgs a = MX_MOE_ARGS;
    Shared& shared = *reinterpret_cast<Shared*>(dynamic);
    // The same in all lanes, and known to be.
    const int lane = threadIdx.x % kLanes, warp = __shfl_sync(~0u, threadIdx.x / kLanes, 0);
    set_up_barriers(shared);
    if (warp < kAddWarps) {
        increase_registers<kAddingRegisters>();
        Adder{a, shared, warp / kGroupWarps, warp % kGroupWarps, lane}.run();
    } else {
        decrease_registers<kBringingRegisters>();
        const int role = warp - kAddWarps;
        if (role == 0)
            hand_over(a, shared, lane);
        else if (role == 1)
            open_entries(a, shared, lane);
        else if (role == 2)
            fetch_all(a, shared, lane);
        else
            copy_weights(a, shared, weights_map, lane);
    }
}
