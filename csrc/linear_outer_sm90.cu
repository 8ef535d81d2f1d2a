// Decode linear for up to 64 rows of x on Hopper, for bf16 results: y = dequantised(x) *
// dequantised(w)^T + bias.
//
//   xq [M, K], wq [N, K]        e4m3 payload, K a multiple of 128
//   xs [M, K/32], ws [N, K/32]  e8m0 scale of each 32 consecutive k
//   y  [M, N]                   bf16
//   bias [N]                    fp32, bf16, fp16 or none
//
// A cluster takes kRowsW rows of w, its kSplit workgroups a part of K each, in chunks of 128 k.
// Those of x and of w come to shared memory together, so that products begin when the first of both
// are there. Most often each chunk has a stage of its own, and nothing waits for room.
//
//   producer, a thread: asks for boxes of x and w, kDepth chunks ahead of what has come
//   consumers: bring scales; then have blocks of 32 k multiplied from shared memory as they are,
//              add the products times their scales to sums in fp32, and send their sums to the
//              workgroup that owns them
//
// The matrix unit makes the scales too: the product of a column of x's scales and a row of w's,
// over bf16, with one k that is not zero, lies in registers as the block's products do. So a
// product takes one instruction. Scales so far from 1 that this is not exact, of rows of x or of w,
// have the sums of these computed again without it.
//
// wgmma's A, of 64 rows, is x where kTurned: then its four warps have as much work each, whatever
// the rows of w. Sums are added over the warpgroups and the cluster in a fixed order.

#include "linear_outer_sm90.h"
#include "mx_target.h"
#include "sm90_async.h"
#include "sm90_copy.h"
#include "sm90_rows.h"
#include "sm90_tensor_map.h"
#include "sm90_wgmma_fp8.h"

using namespace mx;

#if MX_SPLIT > 1
#define CLUSTER __cluster_dims__(kSplit, 1, 1)
#else
#define CLUSTER
#endif

extern "C" __global__ void CLUSTER __launch_bounds__(kThreads, 1)
    aiter_mx_linear_outer(const unsigned char* xq, const unsigned char* xs, const unsigned char* wq,
                          const unsigned char* ws, const void* bias, Out* y, long M, long N, long K,
                          int bias_kind, int part_chunks, int parts_with_one_more, int overlaps,
                          const __grid_constant__ TensorMap w_map,
                          const __grid_constant__ TensorMap x_map) {
    extern __shared__ unsigned char dynamic[];
    const unsigned shared = held((shared_address(dynamic) + 1023) & ~1023u);
    const unsigned full = shared + kBarriers, empty = full + 8 * kStages,
                   inbox_full = full + 8 * kRings * kStages;
    const int lane = held(threadIdx.x % kLanes);
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / kLanes, 0);
    const int part = blockIdx.x % kSplit;
    const long first_row = static_cast<long>(blockIdx.x / kSplit) * kRowsW;
    const int owned = (kTiles - part + kSplit - 1) / kSplit;
    const int chunks = part_chunks + (part < parts_with_one_more);
    const int first_chunk = part * part_chunks + min(part, parts_with_one_more);
    const Store store_outputs{
        bias, y,         bias_kind, static_cast<int>(M),
        N,    first_row, lane,      ((N | reinterpret_cast<unsigned long>(y) >> 1) & 1) == 0};
    const Inbox inbox{store_outputs, shared + kInbox, inbox_full, part, owned};

    if (warp >= kWarps) { // the producer
        if constexpr (kGroups > 1)
            decrease_registers<kCopyRegisters>();
        if (warp > kWarps)
            return;
        const auto copy_w = [&](int c, int stage) {
            barrier_arrive_expect(full + 8 * stage, kStageBytes);
            copy_box(shared + stage * kStageBytes + (kTurned ? kXBytes : 0), w_map,
                     (first_chunk + c) * kChunk, static_cast<int>(first_row), full + 8 * stage);
        };
        const auto copy_x = [&](int c, int stage) {
            copy_box(shared + stage * kStageBytes + (kTurned ? 0 : kWBytes), x_map,
                     (first_chunk + c) * kChunk, 0, full + 8 * stage);
        };
        constexpr int early = kDepth < kStages ? kDepth : kStages;
        if (elected_lane()) {
            prefetch_map(x_map);
            prefetch_map(w_map);
            // One thread alone: ptxas makes a loop with fences of lanes that set up one each.
#pragma unroll
            for (int i = 0; i < kStages; ++i) {
                barrier_init(full + 8 * i, 1);
                if (kRefills)
                    barrier_init(empty + 8 * i, 4 * kRowGroups);
            }
            if constexpr (kSplit > 1)
                barrier_init(inbox_full, 1);
            fence_barrier_init();
            inbox.expect();
            if (!overlaps) {
                copy_x(0, 0);
                copy_w(0, 0);
            }
        }
        __syncwarp();
        named_barrier_arrive(3, kSet); // barriers are set up
        if constexpr (kSplit > 1)
            cluster_arrive_relaxed();
        if (overlaps) {
            if (elected_lane())
#pragma unroll 1
                for (int i = 0; i < early && i < chunks; ++i)
                    copy_w(i, i);
            __syncwarp();
            wait_for_grid_ahead();
        } else {
            named_barrier(2, kSet); // scales, which would wait behind weights, are asked for
        }
        if (elected_lane()) {
#pragma unroll
            for (int i = 0; i < early; ++i)
                if (i < kChunks - 1 || i < chunks) {
                    if (overlaps || i > 0)
                        copy_x(i, i);
                    if (!overlaps && i > 0)
                        copy_w(i, i);
                }
            launch_dependents();
            Turn<kStages> arriving, next{early % kStages, early == kStages};
#pragma unroll 1
            for (int i = early; i < chunks; ++i) {
                barrier_wait(full + 8 * arriving.at, arriving.parity);
                arriving.next();
                if (kRefills && i >= kStages)
                    barrier_wait(empty + 8 * next.at, next.parity ^ 1);
                copy_x(i, next.at);
                copy_w(i, next.at);
                next.next();
            }
        }
        __syncwarp();
        if constexpr (kSplit > 1) {
            cluster_wait();
            cluster_arrive_relaxed();
            cluster_wait();
        }
        return;
    }

    if constexpr (kGroups > 1)
        increase_registers<kMostRegisters>();
    if constexpr (kSplit > 1)
        cluster_arrive_relaxed();
    const Tensors t{xq, xs, wq, ws, static_cast<int>(M), N, K};
    const long blocks = t.blocks();
    ScaleCopies<kRowsW, !kTurned> w_scales;
    ScaleCopies<kRowsM, kTurned> x_scales;
    w_scales.ask(ws, first_row, N - 1, blocks, first_chunk, chunks);
    if (overlaps)
        wait_for_grid_ahead();
    x_scales.ask(xs, 0, M - 1, blocks, first_chunk, chunks);
    if (!overlaps)
        named_barrier_arrive(2, kSet);
    named_barrier(3, kSet); // barriers are set up
    bool far = w_scales.put(shared, chunks);
    far |= x_scales.put(shared, chunks);
    fence_async();
    far = named_barrier_or(4, kConsumers, far); // scales are there

    const int k_group = warp / (4 * kRowGroups), row_warp = warp % (4 * kRowGroups);
    const int row_group = row_warp / 4, sixteen = kTurned ? row_warp % 4 : row_warp;
    const bool active = sixteen < kActive;
    const Place place{sixteen, kTurned ? row_group * kColumns : 0, lane};
    const SwizzledDescriptor a(shared + (kTurned ? 0 : row_group * 64 * kChunk));
    const SwizzledDescriptor b_rows(shared +
                                    (kTurned ? kXBytes + row_group * kColumns * kChunk : kWBytes));
    const unsigned words_at =
        held(shared + kScalesA + (sixteen * 16 + lane / 4) * kFactorBytes + lane % 2 * 4);
    const MatrixDescriptor factors(shared + kScalesB +
                                       (kTurned ? row_group * kColumns * 2 * kFactorBytes : 0),
                                   0, 8 * 2 * kFactorBytes);
    Sums sums = {};
    float products[kBuffers][kValues], scales[kBuffers][kValues];
    // A's scales: words of the lane's two rows, and what of them is a block's: of a chunk of an
    // even number in lanes 4i and 4i + 1, for wgmma's first 4 k, else in the other two.
    unsigned by[kBuffers][2], words[2], masks[kBlocks];
    const unsigned zero = held(0);
    const auto fetch = [&](int c) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            words[i] = load_shared_4(words_at + (c * kRowsA + 8 * i) * kFactorBytes);
#pragma unroll
        for (int i = 0; i < kBlocks; ++i)
            masks[i] = lane % 4 == c % 2 * 2 + i / 2 ? (i % 2 ? 0xffff0000 : 0xffff) : 0;
    };
    int c = k_group, stage = k_group;
    unsigned parity = 0;
    const auto begin = [&](auto at, auto block) {
        constexpr int p = decltype(at)::value, b = decltype(block)::value;
        const unsigned k = stage * (kStageBytes / 16) + b * (kBlock / 16);
        by[p][0] = held(words[0] & masks[b]);
        by[p][1] = held(words[1] & masks[b]);
        wgmma_fence();
        wgmma_block(products[p], SwizzledDescriptor::of(a.low + k),
                    SwizzledDescriptor::of(b_rows.low + k));
        wgmma_factors(scales[p], by[p][0], by[p][1], zero,
                      factors.at(c / 2 * (kRowsB * 2 * kFactorBytes)));
        wgmma_commit();
    };
    const auto finish = [&](auto at, auto pending) {
        constexpr int p = decltype(at)::value;
        wgmma_wait<decltype(pending)::value>();
        keep_in_order(products[p]);
        keep_in_order(scales[p]);
        asm volatile("" : "+r"(by[p][0]), "+r"(by[p][1]));
        if (active)
#pragma unroll
            for (int v = 0; v < kValues; ++v)
                sums[v] = mx::fma(products[p][v], scales[p][v], sums[v]);
        keep_in_order(sums);
    };
    const auto go_on = [&] {
        c += kKGroups;
        stage += kKGroups;
        if (kRefills && stage >= kStages) {
            stage -= kStages;
            parity ^= 1;
        }
    };
    // Behind all of a chunk's products.
    const auto free_stage = [&](int used) {
        if (kRefills && lane == 0)
            barrier_arrive(empty + 8 * used);
    };
    constexpr Int<0> i0;
    constexpr Int<1> i1;
    constexpr Int<2> i2;
    constexpr Int<3> i3;
    fetch(c);
    wait_for_stage(full + 8 * stage, parity);
    if constexpr (kBuffers == 1) {
        while (true) {
            begin(i0, i0);
            finish(i0, i0);
            begin(i0, i1);
            finish(i0, i0);
            begin(i0, i2);
            finish(i0, i0);
            begin(i0, i3);
            const int used = stage;
            go_on();
            if (c >= chunks)
                break;
            fetch(c);
            finish(i0, i0);
            free_stage(used);
            wait_for_stage(full + 8 * stage, parity);
        }
        finish(i0, i0);
    } else {
        begin(i0, i0);
        while (true) {
            begin(i1, i1);
            finish(i0, i1);
            begin(i0, i2);
            finish(i1, i1);
            begin(i1, i3);
            const int used = stage;
            go_on();
            const bool more = c < chunks;
            if (more)
                fetch(c);
            finish(i0, i1);
            if (!more)
                break;
            wait_for_stage(full + 8 * stage, parity);
            begin(i0, i0);
            finish(i1, i1);
            free_stage(used);
        }
        finish(i1, i0);
    }
    if (far && active)
        sum_again(sums, t, place, first_row, first_chunk, k_group, chunks);
    const auto tile_sum = [&](int j) {
        return float4{sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]};
    };
    const int first_tile = (kTurned ? row_group * kActive + sixteen : sixteen) * kTilesB;
    if constexpr (kSplit > 1)
        cluster_wait(); // all of the cluster's workgroups have started
    if constexpr (kParts == 1) {
        if (active)
#pragma unroll
            for (int j = 0; j < kTilesB; ++j)
                store_outputs(tile_sum(j), first_tile + j);
    } else {
        if (active)
#pragma unroll
            for (int j = 0; j < kTilesB; ++j)
                inbox.send(first_tile + j, k_group, tile_sum(j));
        inbox.wait();
        if constexpr (kSplit > 1)
            cluster_arrive_relaxed();
        inbox.add_up(warp);
        if constexpr (kSplit > 1)
            cluster_wait();
    }
}
