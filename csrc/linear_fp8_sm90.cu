// Decode linear for up to 32 rows of x on Hopper, for bf16 results: y = dequantised(x) *
// dequantised(w)^T + bias.
//
//   xq [M, K], wq [N, K]        e4m3 payload, K a multiple of 128
//   xs [M, K/32], ws [N, K/32]  e8m0 scale of each 32 consecutive k
//   y  [M, N]                   bf16
//   bias [N]                    fp32, bf16, fp16 or none
//
// A cluster takes `passes` tiles of `tile_rows` rows of w after one another. Its kSplit workgroups
// have a part of K each, and the warpgroups of a workgroup, of 64 rows each, take turns with the
// part's chunks of 128 k. Payloads are multiplied as they are, from shared memory: a producer, a
// thread, asks for boxes of w by a tensor map, far ahead; x stays from start to end. The products
// of a block of 32 k come from one wgmma and are added, times both scales, to sums in fp32. Where a
// scale of w is near the ends of e8m0, a warp computes its sums again without the matrix unit.
//
//   producer: barriers and kEarly boxes; then a ring of boxes, which x would wait behind: so not
//             before x is asked for, unless that waits for the launch ahead
//   consumers: ask for x and scales; multiply two blocks while two others are scaled
//
// Sums are added over the warpgroups and the cluster in a fixed order.

#include "linear_fp8_sm90.h"
#include "mx_scale.h"
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

extern "C" __global__ void CLUSTER __launch_bounds__(kThreads, kPerSm)
    aiter_mx_linear_fp8(const unsigned char* xq, const unsigned char* xs, const unsigned char* wq,
                        const unsigned char* ws, const void* bias, Out* y, long M, long N, long K,
                        int bias_kind, int tile_rows, int passes, int part_chunks,
                        int parts_with_one_more, int overlaps,
                        const __grid_constant__ TensorMap w_map) {
    extern __shared__ unsigned char dynamic[];
    const unsigned shared = held((shared_address(dynamic) + 1023) & ~1023u);
    const unsigned full = shared + kBarriers, empty = full + 8 * kDepth,
                   inbox_full = empty + 8 * kDepth;
    const int lane = held(threadIdx.x % kLanes);
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / kLanes, 0);
    const int cluster = blockIdx.x / kSplit, rank = blockIdx.x % kSplit;
    const int owned = (kTiles - rank + kSplit - 1) / kSplit;
    const int chunks = part_chunks + (rank < parts_with_one_more);
    const int first_chunk = rank * part_chunks + min(rank, parts_with_one_more);
    const long first_row = static_cast<long>(cluster) * passes * tile_rows;

    if (warp == kWarps) { // the producer
        const int total = chunks * passes;
        // Where to copy next. It is uniform to ptxas, which else takes 100 cycles a copy.
        int next_c = 0, next_row = cluster * passes * tile_rows;
        const auto copy = [&](int stage) {
            barrier_arrive_expect(full + 8 * stage, tile_rows * kChunk);
            copy_box(shared + stage * kStageBytes, w_map, (first_chunk + next_c) * kChunk, next_row,
                     full + 8 * stage);
            ++next_c;
            if (!kOnePass && next_c == chunks) {
                next_c = 0;
                next_row += tile_rows;
            }
        };
        const auto fill = [&](auto from, auto to) {
#pragma unroll
            for (int i = decltype(from)::value; i < decltype(to)::value; ++i)
                if (i < kMostChunks - 1 || i < total)
                    copy(i);
        };
        if (elected_lane()) {
            prefetch_map(w_map);
            // One thread alone: ptxas makes a loop with fences of lanes that set up one each.
#pragma unroll
            for (int i = 0; i < kEarly; ++i)
                barrier_init(full + 8 * i, 1);
            fence_barrier_init();
            fill(Int<0>(), Int<kEarly>());
#pragma unroll
            for (int i = kEarly; i < kDepth; ++i)
                barrier_init(full + 8 * i, 1);
            if constexpr (kRefills) {
#pragma unroll
                for (int i = 0; i < kDepth; ++i)
                    barrier_init(empty + 8 * i, kRowWarps);
            }
            if constexpr (kSplit > 1) {
#pragma unroll
                for (int i = 0; i < kInboxes; ++i)
                    barrier_init(inbox_full + 8 * i, 1);
            }
            fence_barrier_init();
            if constexpr (kSplit > 1) {
#pragma unroll
                for (int i = 0; i < kInboxes; ++i)
                    barrier_arrive_expect(inbox_full + 8 * i, owned * kParts * kTileBytes);
            }
        }
        __syncwarp();
        named_barrier_arrive(3, kThreads); // barriers are set up
        if constexpr (kSplit > 1)
            cluster_arrive_relaxed();
        if (!overlaps)
            named_barrier(2, kThreads); // what would wait behind the weights is asked for
        if (elected_lane()) {
            fill(Int<kEarly>(), Int<kDepth>());
            launch_dependents();
            if constexpr (kRefills) {
                int stage = 0, parity = 0;
#pragma unroll 1
                for (int i = kDepth; i < total; ++i) {
                    barrier_wait(empty + 8 * stage, parity);
                    copy(stage);
                    if (++stage == kDepth) {
                        stage = 0;
                        parity ^= 1;
                    }
                }
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

    if constexpr (kSplit > 1)
        cluster_arrive_relaxed();
    const long blocks = K / kBlock;
    const Tensors t{xq, xs, wq, ws, static_cast<int>(M), N, K};
    const int k_group = warp / kRowWarps, row_warp = warp % kRowWarps;
    const bool active = row_warp * 16 < tile_rows;
    const unsigned w_scales = shared + kWScales + warp * kScaleBuffers * kWarpScaleBytes;
    const ScaleCopies scales{
        ws + first_chunk * kBlocks, blocks, N - 1, row_warp * 16, tile_rows - 1, chunks, w_scales};
    scales.ask(first_row, 0, k_group, lane);
    if (overlaps)
        wait_for_grid_ahead();
    // x and its scales, these as fp32 in order of blocks. Rows that x does not have may be
    // anything.
    constexpr unsigned kXWords = (kRowsM * kMostChunks + kConsumers - 1) / kConsumers;
    const unsigned thread = threadIdx.x;
    unsigned x_words[kXWords];
#pragma unroll
    for (unsigned j = 0; j < kXWords; ++j) {
        const unsigned i = thread + j * kConsumers, m = i % kRowsM, at = i / kRowsM;
        if (m < M && at < chunks)
            x_words[j] = load_scale_word(xs + m * blocks + (first_chunk + at) * kBlocks);
    }
    constexpr unsigned kPieces = kChunk / kPiece, kXPieces = kRowsM * kPieces; // of a chunk
    if constexpr (kConsumers % kXPieces == 0) {
        constexpr unsigned step = kConsumers / kXPieces; // chunks
        const unsigned piece = thread % kPieces, m = thread / kPieces % kRowsM;
        const unsigned first = thread / kXPieces;
        const unsigned to = shared + kX + first * kXBytes + m * kChunk + (piece ^ (m % 8)) * kPiece;
        const unsigned char* from = xq + m * K + (first_chunk + first) * kChunk + piece * kPiece;
        if (m < M)
#pragma unroll
            for (unsigned j = 0; j < (kMostChunks + step - 1) / step; ++j)
                if (first + j * step < chunks)
                    copy_async(to + j * step * kXBytes, from + j * step * kChunk, true);
    } else {
#pragma unroll 1
        for (unsigned i = thread; i < kXPieces * chunks; i += kConsumers) {
            const unsigned piece = i % kPieces, m = i / kPieces % kRowsM, at = i / kXPieces;
            if (m < M)
                copy_async(shared + kX + at * kXBytes + m * kChunk + (piece ^ (m % 8)) * kPiece,
                           xq + m * K + (first_chunk + at) * kChunk + piece * kPiece, true);
        }
    }
    copy_commit();
    if (!overlaps)
        named_barrier_arrive(2, kThreads);
#pragma unroll
    for (unsigned j = 0; j < kXWords; ++j) {
        const unsigned i = thread + j * kConsumers, m = i % kRowsM, at = i / kRowsM;
        if (m < M && at < chunks)
#pragma unroll
            for (int b = 0; b < kBlocks; ++b)
                store_shared(shared + kXScales + ((at * kBlocks + b) * kRowsM + m) * 4,
                             e8m0_to_f32(byte_of(x_words[j], b)));
    }
    copy_wait<0>();
    fence_async();
    named_barrier(3, kThreads); // x is there, and barriers are set up
    if constexpr (kSplit > 1)
        cluster_wait(); // all of the cluster's workgroups have started

    const Store store_outputs{bias, y, bias_kind, static_cast<int>(M), N, lane};
    Inbox inbox{store_outputs, shared + kInbox, inbox_full, warp, rank, owned};
    const SwizzledDescriptor a(shared + row_warp / 4 * 64 * kChunk), x(shared + kX);
    const unsigned x_scales = held(shared + kXScales + lane % 4 * 8);
    int stage = k_group, parity = 0, c = k_group;
    for (int pass = 0; pass < passes; ++pass) {
        const long pass_first = first_row + pass * static_cast<long>(tile_rows);
        Sums sums = {};
        if constexpr (!kOnePass) {
            if (pass > 0) {
                copy_wait<0>();
                __syncwarp();
            }
            if (pass + 1 < passes)
                scales.ask(pass_first + tile_rows, (pass + 1) % 2,
                           (c % kKGroups + (chunks / kKGroups + 1) * kKGroups - chunks) % kKGroups,
                           lane);
            copy_commit();
        }
        unsigned words_at = w_scales + pass % kScaleBuffers * kWarpScaleBytes + lane / 4 * 4;
        // Blocks are multiplied in pairs, one pair of them in the matrix unit while the sums of the
        // other are scaled.
        float acc[2][2][kValues];
        unsigned words[2], far = 0; // scales of the rows, and whether any are extreme
        const auto multiply = [&](auto pair) {
            constexpr int p = decltype(pair)::value;
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 2; ++i)
                wgmma_block(acc[p][i], a.at(stage * kStageBytes + (2 * p + i) * kBlock),
                            x.at(c * kXBytes + (2 * p + i) * kBlock));
            wgmma_commit();
        };
        const auto promote = [&](auto pair, auto pending, unsigned x_scales_at) {
            constexpr int p = decltype(pair)::value;
            float2 sx[2][kTilesM];
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < kTilesM; ++j)
                    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                                 : "=f"(sx[i][j].x), "=f"(sx[i][j].y)
                                 : "r"(x_scales_at + ((2 * p + i) * kRowsM + j * 8) * 4));
            wgmma_wait<decltype(pending)::value>();
            keep_in_order(acc[p][0]);
            keep_in_order(acc[p][1]);
            if (active) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float rows[2] = {usual_scale(words[0], 2 * p + i),
                                           usual_scale(words[1], 2 * p + i)};
#pragma unroll
                    for (int v = 0; v < kValues; ++v)
                        sums[v] = mx::fma(acc[p][i][v] * rows[v / 2 % 2],
                                          v % 2 ? sx[i][v / 4].y : sx[i][v / 4].x, sums[v]);
                }
            }
            keep_in_order(sums);
        };
        const auto release = [&](int of) {
            if (kRefills && lane == 0)
                barrier_arrive(empty + 8 * of);
        };
        const auto load_w_scales = [&] {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                words[i] = load_shared_4(words_at + i * 32);
                far |= unusual(words[i]);
            }
            words_at += 16 * 4;
        };
        wait_for_stage(full + 8 * stage, parity);
        multiply(Int<0>());
        multiply(Int<1>());
        load_w_scales();
        unsigned x_scales_at = x_scales + c * (kBlocks * kRowsM * 4);
        int used = stage;
        for (c += kKGroups; c < chunks; c += kKGroups) {
            promote(Int<0>(), Int<1>(), x_scales_at);
            stage += kKGroups;
            if (stage >= kDepth) {
                stage -= kDepth;
                parity ^= 1;
            }
            wait_for_stage(full + 8 * stage, parity);
            multiply(Int<0>());
            promote(Int<1>(), Int<1>(), x_scales_at);
            release(used);
            used = stage;
            multiply(Int<1>());
            load_w_scales();
            x_scales_at += kKGroups * (kBlocks * kRowsM * 4);
        }
        promote(Int<0>(), Int<1>(), x_scales_at);
        promote(Int<1>(), Int<0>(), x_scales_at);
        release(used);
        stage += kKGroups;
        if (stage >= kDepth) {
            stage -= kDepth;
            parity ^= 1;
        }
        if (__any_sync(0xffffffff, far))
            sum_again(sums, t, pass_first, row_warp * 16 + lane / 4, tile_rows, first_chunk,
                      c % kKGroups, chunks, lane);
        c -= chunks;
        const auto tile_sum = [&](int j) {
            return float4{sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]};
        };
        if constexpr (kParts == 1) {
#pragma unroll
            for (int j = 0; j < kTilesM; ++j)
                store_outputs(tile_sum(j), pass_first, tile_rows, row_warp * kTilesM + j);
        } else {
            if (pass > 0) {
                inbox.finish(false);
                if constexpr (kSplit > 1)
                    named_barrier(1, kConsumers);
            }
            inbox.begin(pass_first, tile_rows);
#pragma unroll
            for (int j = 0; j < kTilesM; ++j)
                inbox.send(row_warp * kTilesM + j, k_group, tile_sum(j));
        }
    }
    if constexpr (kParts > 1) {
        if constexpr (kSplit > 1)
            cluster_arrive_relaxed();
        inbox.finish(true);
        if constexpr (kSplit > 1)
            cluster_wait();
    }
}
