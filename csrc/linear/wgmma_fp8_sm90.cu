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
//   producers, two threads: ask for boxes, one of w, the other of x, kDepth chunks ahead of what
//              has come
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

#include "common/target.h"
#include "sm90/rows.h"
#include "sm90/tma.h"
#include "sm90/wgmma.h"
#include "wgmma_fp8_kept_sm90.h"
#include "wgmma_fp8_sm90.h"

using namespace mx;

#if MX_SPLIT > 1
#define CLUSTER __cluster_dims__(kSplit, 1, 1)
#else
#define CLUSTER
#endif

extern "C" __global__ void CLUSTER __launch_bounds__(kThreads, 1)
    aiter_mx_linear_wgmma_fp8(const unsigned char* xq, const unsigned char* xs,
                              const unsigned char* wq, const unsigned char* ws, const void* bias,
                              Out* y, long M, long N, long K, int bias_kind, int part_chunks,
                              int parts_with_one_more, int overlaps,
                              const __grid_constant__ TensorMap w_map,
                              const __grid_constant__ TensorMap x_map) {
    extern __shared__ unsigned char dynamic[];
    const unsigned shared = held((shared_address(dynamic) + 1023) & ~1023u);
    const unsigned full = shared + kBarriers, empty = full + 8 * kStages,
                   inbox_full = full + 8 * kRings * kStages, received = inbox_full + 8;
    const int part = kSplit == 1 ? 0 : blockIdx.x % kSplit;
    const long first_row = static_cast<long>(blockIdx.x / kSplit) * kRowsW;
    const int owned = (kTiles - part + kSplit - 1) / kSplit;
    const int chunks = kEven ? kChunks : part_chunks + (part < parts_with_one_more);
    const int first_chunk =
        kEven ? part * kChunks : part * part_chunks + min(part, parts_with_one_more);

    if (threadIdx.x >= kConsumers) { // the producers
        const int warp = __shfl_sync(0xffffffff, threadIdx.x / kLanes, 0);
        if (warp > kWarps + 1) {
            if constexpr (kGroups > 1)
                decrease_registers<kCopyRegisters>();
            return;
        }
        const bool of_x = warp > kWarps;
        const TensorMap& map = of_x ? x_map : w_map;
        if (elected_lane()) {
            prefetch_map(map);
            if (!of_x) {
                // One thread alone: ptxas makes a loop with fences of lanes that set up one each.
#pragma unroll
                for (int i = 0; i < kStages; ++i) {
                    barrier_init(full + 8 * i, 2);
                    if (kRefills)
                        barrier_init(empty + 8 * i, 4 * kRowGroups);
                }
                if constexpr (kSplit > 1) {
                    barrier_init(inbox_full, 1);
                    barrier_init(received, kSplit - 1);
                }
                fence_barrier_init();
                if constexpr (kSplit > 1)
                    barrier_arrive_expect(inbox_full, boxes_of(part) * kTileBytes);
                barrier_arrive_expect(full, kWBytes);
                copy_box(shared + (kTurned ? kXBytes : 0), w_map, first_chunk * kChunk,
                         static_cast<int>(first_row), full);
            }
        }
        __syncwarp();
        if (!of_x) { // barriers are set up
            named_barrier_arrive(2, 2 * kLanes);
            named_barrier_arrive(3, kSet);
        }
        // Before a wait: whom a producer waits for may be waiting for its registers.
        if constexpr (kGroups > 1)
            decrease_registers<kCopyRegisters>();
        if (of_x) {
            named_barrier(2, 2 * kLanes);
            if (overlaps)
                wait_for_grid_ahead();
        }
        if constexpr (kSplit > 1)
            cluster_arrive_relaxed();
        const unsigned to = shared + (of_x == kTurned ? 0 : kTurned ? kXBytes : kWBytes);
        const int row = of_x ? 0 : static_cast<int>(first_row);
        constexpr int early = kDepth < kStages ? kDepth : kStages;
        if (elected_lane()) {
            Turn<kStages> arriving, next;
            if (!of_x)
                next.next(); // of its first box
#pragma unroll 1
            for (int i = of_x ? 0 : 1; i < chunks; ++i) {
                if (i >= early) {
                    barrier_wait(full + 8 * arriving.at, arriving.parity);
                    arriving.next();
                    if (kRefills && i >= kStages)
                        barrier_wait(empty + 8 * next.at, next.parity ^ 1);
                }
                barrier_arrive_expect(full + 8 * next.at, of_x ? kXBytes : kWBytes);
                copy_box(to + next.at * kStageBytes, map, (first_chunk + i) * kChunk, row,
                         full + 8 * next.at);
                next.next();
                if (of_x && i == min(early, chunks) - 1)
                    launch_dependents();
            }
        }
        __syncwarp();
        if constexpr (kSplit > 1) {
            cluster_wait();            // racecheck has all warps wait for it
            barrier_wait(received, 0); // a workgroup stays until the others have what it sent
        }
        return;
    }

    ScaleCopies scale_copies;
    scale_copies.ask(xs, ws, first_row, static_cast<int>(M), N, K, first_chunk, chunks, overlaps);
    if constexpr (kSplit > 1)
        cluster_arrive_relaxed();
    if constexpr (kGroups > 1)
        increase_registers<kMostRegisters>();
    const int lane = held(threadIdx.x % kLanes);
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / kLanes, 0);
    const Store store_outputs{
        bias, y,         bias_kind, static_cast<int>(M),
        N,    first_row, lane,      ((N | reinterpret_cast<unsigned long>(y) >> 1) & 1) == 0};
    const Inbox inbox{store_outputs, shared + kInbox, inbox_full, part, owned};
    if (Inbox::kEarly && overlaps && bias_kind != kNone)
        wait_for_grid_ahead();
    const Target target = inbox.target(warp);
    scale_copies.ask_bytes();
    named_barrier(3, kSet); // barriers are set up
    bool far = scale_copies.put(shared, chunks);
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
    const auto take_scales = [&](int p, int block) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            by[p][i] = held(words[i] & masks[block]);
    };
    const auto multiply_payload = [&](int p, int block) {
        const unsigned k = stage * (kStageBytes / 16) + block * (kBlock / 16);
        wgmma_block(products[p], SwizzledDescriptor::of(a.low + k),
                    SwizzledDescriptor::of(b_rows.low + k));
    };
    const auto multiply_scales = [&](int p) {
        wgmma_factors(scales[p], by[p][0], by[p][1], zero,
                      factors.at(c / 2 * (kRowsB * 2 * kFactorBytes)));
    };
    const auto multiply = [&](int p, int block) {
        multiply_payload(p, block);
        multiply_scales(p);
    };
    const auto keep = [&](int p) {
        keep_in_order(products[p]);
        keep_in_order(scales[p]);
        asm volatile("" : "+r"(by[p][0]), "+r"(by[p][1]));
    };
    const auto add_products = [&](int p) {
        if (active)
#pragma unroll
            for (int v = 0; v < kValues; ++v)
                sums[v] = mx::fma(products[p][v], scales[p][v], sums[v]);
        keep_in_order(sums);
    };
    const auto begin = [&](auto at, auto block) {
        constexpr int p = decltype(at)::value, b = decltype(block)::value;
        take_scales(p, b);
        wgmma_fence();
        multiply(p, b);
        wgmma_commit();
    };
    const auto finish = [&](auto at, auto pending) {
        constexpr int p = decltype(at)::value;
        wgmma_wait<decltype(pending)::value>();
        keep(p);
        add_products(p);
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
    if constexpr (!kScalesFirst)
        wait_for_stage(full + 8 * stage, parity);
    if constexpr (kBuffers > 2) { // a chunk at a time
        while (true) {
            if constexpr (kScalesFirst) {
                wgmma_fence();
                for_each_int<kBuffers>([&](auto at) {
                    constexpr int p = decltype(at)::value;
                    take_scales(p, p);
                    multiply_scales(p);
                });
                wait_for_stage(full + 8 * stage, parity);
                for_each_int<kBuffers>([&](auto at) {
                    constexpr int p = decltype(at)::value;
                    multiply_payload(p, p);
                    wgmma_commit();
                });
            } else {
                begin(i0, i0);
                begin(i1, i1);
                begin(i2, i2);
                if constexpr (kBuffers == 4)
                    begin(i3, i3);
            }
            if constexpr (kBuffers == 4) {
                finish(i0, i3);
            } else {
                finish(i0, i2);
                begin(i0, i3);
            }
            const int used = stage;
            go_on();
            if (c < chunks)
                fetch(c);
            finish(i1, i2);
            finish(i2, i1);
            finish(Int<3 % kBuffers>(), i0);
            if (c >= chunks)
                break;
            free_stage(used);
            if constexpr (!kScalesFirst)
                wait_for_stage(full + 8 * stage, parity);
        }
    } else if constexpr (kBuffers == 1) {
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
    } else { // two at a time: one wait for both, while other warpgroups have theirs multiplied
        const auto begin_two = [&](int block) {
            take_scales(0, block);
            take_scales(1, block + 1);
            wgmma_fence();
            multiply(0, block);
            multiply(1, block + 1);
            wgmma_commit();
        };
        const auto wait_for_two = [&] {
            wgmma_wait<0>();
            keep(0);
            keep(1);
        };
        while (true) {
            begin_two(0);
            wait_for_two();
            add_products(0);
            add_products(1);
            begin_two(2);
            const int used = stage;
            go_on();
            const bool more = c < chunks;
            if (more)
                fetch(c);
            wait_for_two();
            free_stage(used);
            add_products(0);
            add_products(1);
            if (!more)
                break;
            wait_for_stage(full + 8 * stage, parity);
        }
    }
    const Tensors t{xq, xs, wq, ws, static_cast<int>(M), N, K};
    if (__builtin_expect(far && active, 0))
        sum_again(sums, t, place, first_row, first_chunk, k_group, chunks);
    const auto tile_sum = [&](int j) {
        return float4{sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]};
    };
    const int first_tile = (kTurned ? row_group * kActive + sixteen : sixteen) * kTilesB;
    if constexpr (kSplit > 1)
        cluster_wait(); // all of the cluster's workgroups have started
    const auto tell_received = [&] {
        if (kSplit > 1 && warp == 0 && lane < kSplit && lane != part)
            barrier_arrive_read(address_in_cluster(received, lane));
    };
    if constexpr (kParts == 1) {
        if (active)
#pragma unroll
            for (int j = 0; j < kTilesB; ++j)
                store_outputs(tile_sum(j), first_tile + j);
    } else if constexpr (kKept) {
        const Kept kept{store_outputs, shared + kInbox, inbox_full, first_tile / kTilesB,
                        part * kKGroups + k_group};
        if (active)
            kept.send(sums);
        inbox.wait();
        tell_received();
        if (active)
            kept.receive(sums);
    } else {
        if (active)
#pragma unroll
            for (int j = 0; j < kTilesB; ++j)
                inbox.send(first_tile + j, k_group, tile_sum(j));
        inbox.wait();
        tell_received();
        inbox.add_up(warp, target);
    }
}
