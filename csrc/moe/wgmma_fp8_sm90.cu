// Grouped GEMM over routed tokens on Hopper, for up to some tens of tokens an expert and results of
// 16 bits or activated ones. aiter_mx/kernels/moe_gemm/problem.py defines what it computes and its
// arguments.
//
// A workgroup takes kRows rows of an expert's w and up to kCols rows of x, as in
// wgmma_f16_sm90.cu, and computes as linear/wgmma_fp8_sm90.cu does. Nothing is converted:
//
//   w       -> a ring in shared memory for each warpgroup that adds, by TMA: wgmma's A
//   x       -> shared memory, kSlots chunks ahead, swizzled as TMA does: wgmma's B
//   scales  -> shared memory; those of x as bf16. Another wgmma multiplies those of w and of x.
//   sums    += products of a block of 32 k times what that gave, in fp32
//
// Rows whose scales are so far from 1 that this is not exact, zero blocks aside, are computed again
// in fp32.

#include "wgmma_sm90.h"

namespace mx {

// Scales of a row come for so many chunks at a time, and lie in places for as many. Such a place is
// free again when slots of x are: with these many none is in use that is not.
constexpr int kScalePlacesOuter = (kSlots + 2 * kVectorChunks - 2) / kVectorChunks;

struct Shared {
    unsigned char ring[kGroups][kDepth][kStageBytes];
    unsigned char x[kSlots][kCols * kChunk]; // its pieces are swizzled as those of w
    // Scales of 4 blocks of x as bf16, then zeros: wgmma's B.
    alignas(16) unsigned x_factors[kSlots][kCols][4];
    alignas(16) unsigned x_scales[kScalePlacesOuter][kCols][kVectorChunks]; // as they are
    alignas(16) unsigned w_scales[kScalePlacesOuter][kRows][kVectorChunks];
    // What warps exchange where gate and up rows lie apart: sums, and whether rows have far scales.
    float traded[kHalves ? kGroups : 1][kGroupWarps][kHalves ? kCols / 4 + 1 : 1][kLanes];
    Entry queue[kEntries];
    unsigned amax[2][kGroups][kGroupWarps][kActivated ? kCols : 2];   // of a warp's features
    unsigned long long full[kGroups][kDepth], empty[kGroups][kDepth]; // barriers of w
    // Of x and all scales: have come; are ready; are not needed any more.
    unsigned long long arrived[kSlots], ready[kSlots], taken[kSlots];
    unsigned long long opened[kEntries], closed[kEntries]; // of the queue
};
static_assert(
    sizeof(Shared) <= MX_SHARED_BYTES,
    "the host gives too little shared memory: aiter_mx/kernels/moe_gemm/wgmma_fp8_sm90.py");

MX_DEVICE void set_up_barriers_of_x(Shared& shared) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
        barrier_init(shared_address(shared.arrived + i), kLanes);
        barrier_init(shared_address(shared.ready + i), 1);
        barrier_init(shared_address(shared.taken + i), kAddWarps);
    }
}

} // namespace mx

#include "sm90/bf16_factors.h"
#include "sm90/memory.h"
#include "wgmma_roles_sm90.h"

using namespace mx;

// Some warps bring x, and the scales of x and w.

// As far_scales, of w, where it may be 2^-63 to 2^64: the product with one of x is in fp32, too.
MX_DEVICE unsigned far_of_w(unsigned scales) { return ~(scales ^ scales << 1) & 0x80808080; }

// Of a row's four scales, some of which are far: those that are not, else 0. Blocks are those of
// row `row` of what is at `payload`; notes in `counts` whether one with a far scale is not zero.
MX_DEVICE unsigned without_far(unsigned scales, unsigned far, unsigned payload, int row,
                               bool& counts) {
    unsigned kept = scales;
#pragma unroll 1
    for (int b = 0; b < kBlocks; ++b) {
        if (!(far >> 8 * b & 128))
            continue;
        unsigned any = 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32x4 v = load_shared_16(payload + swizzled_128(0, row, b * 2 + i));
            any |= (v[0] | v[1] | v[2] | v[3]) & 0x7f7f7f7f;
        }
        counts |= any != 0 || (scales >> 8 * b & 255) == kNanScale;
        kept &= ~(255u << 8 * b);
    }
    return kept;
}

// Starts copies of x, and of the scales of x and w. One warp.
MX_DEVICE void fetch_all(const MoeArgs& a, Shared& shared, int lane) {
    wait_for_grid_ahead(); // which made x
    constexpr int rows_at_once = kLanes / kPieces, batches = kCols / rows_at_once;
    const int piece = lane % kPieces, first_row = lane / kPieces;
    const unsigned places[2] = {swizzled_128(0, first_row, piece),
                                swizzled_128(0, first_row + rows_at_once, piece)};
    const unsigned blocks = static_cast<unsigned>(a.K) / kBlock;
    static_assert(kLongScales && kScaleChunks == kVectorChunks, "K is a multiple of these chunks");
    static_assert(2 * rows_at_once == 8, "after two batches pieces are swizzled the same way");
    PipelineState<kEntries> turn;
    PipelineState<kSlots> to;
    PipelineState<kScalePlacesOuter> scales_to;
    for (; has_entry(shared, turn); turn.next()) {
        const Entry& entry = shared.queue[turn.at];
        const int rows = entry.col_tiles * 8, chunks = a.chunks();
        int row[batches]; // of x, or -1: looked up once, not for each chunk
#pragma unroll
        for (int i = 0; i < batches; ++i)
            row[i] = i * rows_at_once < rows ? entry.x_row[i * rows_at_once + first_row] : -1;
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk, to.next()) {
            barrier_wait(shared_address(shared.taken + to.at), to.parity ^ 1);
            if (chunk % kVectorChunks == 0) {
                const unsigned char* const ws = a.ws + chunk * kBlocks;
#pragma unroll
                for (int i = 0; i < kRows / kLanes; ++i) {
                    const int r = i * kLanes + lane;
                    const unsigned w = row_of_w(a, entry.tile, r / kGroupRows, r % kGroupRows);
                    copy_scales(shared_address(shared.w_scales[scales_to.at][r]),
                                row_at(ws,
                                       entry.expert * static_cast<int>(a.N) + static_cast<int>(w),
                                       blocks),
                                true);
                }
                for (int m = lane; m < rows; m += kLanes)
                    copy_scales(shared_address(shared.x_scales[scales_to.at][m]),
                                row_at(a.xs + chunk * kBlocks, entry.x_row[m], blocks),
                                entry.x_row[m] >= 0);
                scales_to.next();
            }
            const unsigned slot = shared_address(shared.x[to.at]);
            const unsigned char* const x = a.xq + chunk * kChunk + piece * 16;
#pragma unroll
            for (int i = 0; i < batches; ++i)
                if (i * rows_at_once < rows)
                    copy_async(slot + places[i % 2] + i / 2 * 8 * kChunk, row_at(x, row[i], a.K),
                               row[i] >= 0);
            barrier_arrive_copied(shared_address(shared.arrived + to.at));
        }
    }
    copy_wait<0>(); // copies must not outlive the warp
}

// Makes wgmma's B of x's scales, and hands it and x over to wgmma. One warp, which fetches nothing,
// as its fences would wait for that.
MX_DEVICE void hand_over(const MoeArgs& a, Shared& shared, int lane) {
    PipelineState<kEntries> turn;
    PipelineState<kSlots> at;
    PipelineState<kScalePlacesOuter> place;
    for (; has_entry(shared, turn); turn.next()) {
        Entry& entry = shared.queue[turn.at];
        const int rows = entry.col_tiles * 8, chunks = a.chunks();
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk, at.next()) {
            barrier_wait(shared_address(shared.arrived + at.at), at.parity);
            for (int m = lane; m < rows; m += kLanes) {
                unsigned scales = load_shared_4(
                    shared_address(&shared.x_scales[place.at][m][chunk % kVectorChunks]));
                const unsigned far = far_scales(scales);
                if (__builtin_expect(far != 0 && entry.x_row[m] >= 0, false)) {
                    bool counts = false;
                    scales = without_far(scales, far, shared_address(shared.x[at.at]), m, counts);
                    if (counts)
                        entry.x_outside[m] = entry.any_x_outside = 1;
                }
                const unsigned factors[4] = {e8m0x2_to_bf16(scales, 0), e8m0x2_to_bf16(scales, 1),
                                             0, 0};
                store_shared_16(shared_address(shared.x_factors[at.at][m]), factors);
            }
            fence_async();
            barrier_arrive_warp(shared_address(shared.ready + at.at), lane);
            if (chunk % kVectorChunks == kVectorChunks - 1)
                place.next();
        }
    }
}

// Adds tiles and stores what they come to. Lane 4 g + t of a warp has sums of rows g and g + 8 of
// the warp's 16 in a stage.
struct Adder {
    const MoeArgs& a;
    Shared& shared;
    const int group, warp, lane; // warp: of the group
    PipelineState<kDepth> ring;
    PipelineState<kSlots> from;
    PipelineState<kScalePlacesOuter> place;
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
            scales[i] = e8m0x2_to_bf16(scales[i], lane % 2);
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
        PipelineState<kEntries> turn;
        for (int amax_turn = 0; has_entry(shared, turn); turn.next(), amax_turn ^= 1) {
            const Entry& entry = shared.queue[turn.at];
            float sums[kCols / 2] = {};
            outside = 0;
            add<16, 24, 32, 40, 48>(sums, entry.col_tiles * 8);
            const unsigned left_out = kHalves ? trade(sums) : exchange(sums);
            const Finisher finisher{a, group, kHalves ? warp % 2 * 2 + warp / 2 : warp, lane};
            finisher.run_scaled(entry, entry.tile, group, left_out, sums,
                                shared.amax[amax_turn][group]);
            barrier_arrive_warp(shared_address(shared.closed + turn.at), lane);
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    aiter_mx_moe_gemm_wgmma_fp8(MX_MOE_PARAMETERS, const __grid_constant__ TensorMap weights_map) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    const MoeArgs a = MX_MOE_ARGS;
    Shared& shared = *reinterpret_cast<Shared*>(dynamic);
    const int lane = threadIdx.x % kLanes, warp = warp_uniform(threadIdx.x / kLanes);
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
