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
//             before x is asked for, unless that waits for the launch ahead. The ring goes on from
//             pass to pass, and with it come the scales of the next one's rows
//   consumers: ask for x and scales; multiply two or four blocks while as many others are scaled;
//              send their sums to the workgroup that owns them
//   helper, where there are several passes: adds what was sent, while consumers go on
//
// Sums are added over the warpgroups and the cluster in a fixed order.

#include "common/scale.h"
#include "common/target.h"
#include "fp8_sm90.h"
#include "fp8_x_sm90.h"
#include "sm90/async.h"
#include "sm90/copy.h"
#include "sm90/rows.h"
#include "sm90/tensor_map.h"
#include "sm90/wgmma_fp8.h"

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
                        const __grid_constant__ TensorMap w_map,
                        const __grid_constant__ TensorMap w_scales_map) {
    extern __shared__ unsigned char dynamic[];
    const unsigned shared = held((shared_address(dynamic) + 1023) & ~1023u);
    const unsigned full = shared + kBarriers, empty = full + 8 * kDepth,
                   inbox_full = empty + 8 * kDepth, inbox_free = inbox_full + 8 * kInboxes,
                   scales_full = inbox_free + 8 * kInboxes;
    const int lane = held(threadIdx.x % kLanes);
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / kLanes, 0);
    const int cluster = blockIdx.x / kSplit, rank = blockIdx.x % kSplit;
    const int owned = (kTiles - rank + kSplit - 1) / kSplit;
    const int chunks = part_chunks + (rank < parts_with_one_more);
    const int first_chunk = rank * part_chunks + min(rank, parts_with_one_more);
    const long first_row = static_cast<long>(cluster) * passes * tile_rows;
    const bool boxed = kScaleBoxes && reinterpret_cast<unsigned long>(ws) % 16 == 0;
    const Store store_outputs{bias, y, bias_kind, static_cast<int>(M), N, lane};
    const Inbox inbox{store_outputs, shared + kInbox, inbox_full, inbox_free, rank, owned};

    if (warp == kWarps) { // the producer
        const int total = chunks * passes;
        // Where to copy next. It is uniform to ptxas, which else takes 100 cycles a copy.
        int next_c = 0, next_row = cluster * passes * tile_rows, passes_left = passes;
        [[maybe_unused]] int buffer = 0;
        const auto copy_scales = [&] {
            if (!kScaleBoxes || !boxed)
                return;
            barrier_arrive_expect(scales_full + 8 * buffer, tile_rows * kScalePitch);
            copy_box(shared + kWScales + buffer * kWScaleBytes, w_scales_map,
                     first_chunk * kBlocks & ~15, next_row, scales_full + 8 * buffer);
            buffer = buffer + 1 == kScaleBuffers ? 0 : buffer + 1;
        };
        const auto copy = [&](int stage, bool may_end_pass) {
            barrier_arrive_expect(full + 8 * stage, tile_rows * kChunk);
            copy_box(shared + stage * kStageBytes, w_map, (first_chunk + next_c) * kChunk, next_row,
                     full + 8 * stage);
            ++next_c;
            if (!kOnePass && may_end_pass && next_c == chunks) {
                next_c = 0;
                next_row += tile_rows;
                if (--passes_left > 0)
                    copy_scales();
            }
        };
        const auto fill = [&](auto from, auto to) {
#pragma unroll
            for (int i = decltype(from)::value; i < decltype(to)::value; ++i)
                if (i < kMostChunks - 1 || i < total)
                    copy(i, i + 2 >= kMostChunks);
        };
        if (elected_lane()) {
            prefetch_map(w_map);
            // One thread alone: ptxas makes a loop with fences of lanes that set up one each.
#pragma unroll
            for (int i = 0; i < kEarly; ++i)
                barrier_init(full + 8 * i, 1);
            if constexpr (kScaleBoxes)
#pragma unroll
                for (int i = 0; i < kScaleBuffers; ++i)
                    barrier_init(scales_full + 8 * i, 1);
            fence_barrier_init();
            copy_scales();
            fill(Int<0>(), Int<kEarly>());
#pragma unroll
            for (int i = kEarly; i < kDepth; ++i)
                barrier_init(full + 8 * i, 1);
            if constexpr (kRefills) {
#pragma unroll
                for (int i = 0; i < kDepth; ++i)
                    barrier_init(empty + 8 * i, kRowWarps);
            }
            if constexpr (kSplit > 1 || kHelped) {
#pragma unroll
                for (int i = 0; i < kInboxes; ++i) {
                    barrier_init(inbox_full + 8 * i, kSplit > 1 ? 1 : kWarps);
                    if (kHelped)
                        barrier_init(inbox_free + 8 * i, kSplit);
                }
            }
            fence_barrier_init();
            if constexpr (kSplit > 1) {
#pragma unroll
                for (int i = 0; i < kInboxes; ++i)
                    inbox.expect(i);
            }
        }
        __syncwarp();
        named_barrier_arrive(3, kThreads); // barriers are set up
        if constexpr (kSplit > 1)
            cluster_arrive_relaxed();
        if (!overlaps)
            named_barrier(2, kCopied); // what would wait behind the weights is asked for
        if (elected_lane()) {
            fill(Int<kEarly>(), Int<kDepth>());
            if constexpr (!kWaits)
                launch_dependents();
            if constexpr (kRefills) {
                int stage = 0, parity = 0;
#pragma unroll 1
                for (int i = kDepth; i < total; ++i) {
                    if (kWaits && i + kLastBoxes == total)
                        launch_dependents();
                    barrier_wait(empty + 8 * stage, parity);
                    copy(stage, true);
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
    if (kHelped && warp > kWarps) {
        if constexpr (kSplit > 1)
            cluster_arrive_relaxed();
        named_barrier(3, kThreads);
        if constexpr (kSplit > 1)
            cluster_wait();
#pragma unroll 1
        for (int pass = 0; pass + 1 < passes; ++pass) { // all add the last one's
            inbox.wait(pass);
            if (kSplit > 1 && lane == 0)
                inbox.expect(pass + kInboxes);
            inbox.add_up(pass, first_row + pass * static_cast<long>(tile_rows), tile_rows, 0, 1);
            __syncwarp();
            if (pass + kInboxes < passes) // else no one waits for it
                inbox.set_free(pass);
        }
        if constexpr (kSplit > 1) {
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
    const unsigned w_scales =
        kScaleBoxes ? shared + kWScales + row_warp * 16 * kScalePitch + (first_chunk * kBlocks & 15)
                    : shared + kWScales + warp * kScaleBuffers * kWarpScaleBytes;
    const ScaleCopies scales{
        ws + first_chunk * kBlocks, blocks, N - 1, row_warp * 16, tile_rows - 1, chunks, w_scales};
    if constexpr (!kScaleBoxes)
        scales.ask(first_row, 0, k_group, lane);
    if (overlaps)
        wait_for_grid_ahead();
    XCopies x_copies{t, shared, first_chunk, chunks};
    x_copies.ask();
    if (!overlaps)
        named_barrier_arrive(2, kCopied);
    x_copies.put_scales();
    copy_wait<0>();
    fence_async();
    named_barrier(3, kThreads); // x is there, and barriers are set up
    if constexpr (kSplit > 1)
        cluster_wait(); // all of the cluster's workgroups have started

    const SwizzledDescriptor a(shared + row_warp / 4 * 64 * kChunk), x(shared + kX);
    const unsigned x_scales = held(shared + kXScales + lane % 4 * 8);
    int stage = k_group, parity = 0, c = k_group;
    [[maybe_unused]] Turn<kScaleBuffers> buffer;
    for (int pass = 0; pass < passes; ++pass) {
        const long pass_first = first_row + pass * static_cast<long>(tile_rows);
        Sums sums = {};
        unsigned words_at;
        if constexpr (kScaleBoxes) {
            const unsigned here = w_scales + buffer.at * kWScaleBytes;
            words_at = here + lane / 4 * kScalePitch + c * kBlocks;
            if (boxed)
                barrier_wait(scales_full + 8 * buffer.at, buffer.parity);
            else
                scales.bring(pass_first, here, c, lane);
            buffer.next();
        } else {
            words_at = w_scales + pass % kScaleBuffers * kWarpScaleBytes + lane / 4 * 4;
            if constexpr (!kOnePass) {
                if (pass > 0) {
                    copy_wait<0>();
                    __syncwarp();
                }
                if (pass + 1 < passes)
                    scales.ask(pass_first + tile_rows, (pass + 1) % 2,
                               (c % kKGroups + (chunks / kKGroups + 1) * kKGroups - chunks) %
                                   kKGroups,
                               lane);
                copy_commit();
            }
        }
        // A box has nothing in place of rows that are not the tile's, or zeros.
        const int rows_left = static_cast<int>(min(N - pass_first, static_cast<long>(tile_rows))) -
                              row_warp * 16 - lane / 4;
        // kStep blocks are in the matrix unit while the sums of as many before them are scaled: the
        // four of a chunk in turn with the next one's, or two of a chunk with its others.
        float acc[2][kStep][kValues];
        unsigned words[2][2], far = 0; // scales of the rows, and whether any are extreme
        unsigned x_scales_at = x_scales + c * (kBlocks * kRowsM * 4);
        int used[2];
        const auto begin = [&](auto turn) {
            constexpr int p = decltype(turn)::value, first = kWhole ? 0 : p * kStep;
            constexpr bool ends_chunk = kWhole || p == 1;
            if (kWhole || p == 0)
                wait_for_stage(full + 8 * stage, parity);
            const unsigned a_at = a.low + stage * (kStageBytes / 16),
                           x_at = x.low + c * (kXBytes / 16);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < kStep; ++i)
                wgmma_block(acc[p][i], SwizzledDescriptor::of(a_at + (first + i) * (kBlock / 16)),
                            SwizzledDescriptor::of(x_at + (first + i) * (kBlock / 16)));
            wgmma_commit();
            if constexpr (ends_chunk) {
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    words[p][i] = load_shared_4(words_at + i * kRowStride);
                words_at += kChunkStride;
                used[p] = stage;
                stage += kKGroups;
                if (stage >= kDepth) {
                    stage -= kDepth;
                    parity ^= 1;
                }
                c += kKGroups;
            }
        };
        const auto finish = [&](auto turn, auto pending) {
            constexpr int p = decltype(turn)::value, of = kWhole ? p : 1,
                          first = kWhole ? 0 : p * kStep;
            float2 sx[kStep][kTilesM];
#pragma unroll
            for (int i = 0; i < kStep; ++i)
#pragma unroll
                for (int j = 0; j < kTilesM; ++j)
                    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                                 : "=f"(sx[i][j].x), "=f"(sx[i][j].y)
                                 : "r"(x_scales_at + ((first + i) * kRowsM + j * 8) * 4));
            if (kWhole || p == 1) {
                x_scales_at += kKGroups * (kBlocks * kRowsM * 4);
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    far |= kScaleBoxes && rows_left <= 8 * i ? 0 : unusual(words[of][i]);
            }
            wgmma_wait<decltype(pending)::value>();
#pragma unroll
            for (int i = 0; i < kStep; ++i)
                keep_in_order(acc[p][i]);
            if (kRefills && (kWhole || p == 1) && lane == 0)
                barrier_arrive(empty + 8 * used[of]);
            if (active) {
#pragma unroll
                for (int i = 0; i < kStep; ++i) {
                    const float rows[2] = {usual_scale(words[of][0], first + i),
                                           usual_scale(words[of][1], first + i)};
#pragma unroll
                    for (int v = 0; v < kValues; ++v)
                        sums[v] = mx::fma(acc[p][i][v] * rows[v / 2 % 2],
                                          v % 2 ? sx[i][v / 4].y : sx[i][v / 4].x, sums[v]);
                }
            }
            keep_in_order(sums);
        };
        begin(Int<0>());
        while (true) {
            if (kWhole && c >= chunks) {
                finish(Int<0>(), Int<0>());
                break;
            }
            begin(Int<1>());
            finish(Int<0>(), Int<1>());
            if (c >= chunks) {
                finish(Int<1>(), Int<0>());
                break;
            }
            begin(Int<0>());
            finish(Int<1>(), Int<1>());
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
            if constexpr (kHelped)
                inbox.wait_until_free(pass);
#pragma unroll
            for (int j = 0; j < kTilesM; ++j)
                inbox.send(pass, row_warp * kTilesM + j, k_group, tile_sum(j));
            if constexpr (kHelped && kSplit == 1) {
                __syncwarp();
                if (lane == 0)
                    barrier_arrive(inbox_full + Inbox::box(pass));
            }
        }
    }
    if constexpr (kParts > 1) {
        if constexpr (kSplit > 1)
            cluster_arrive_relaxed();
        const int last = passes - 1;
        inbox.wait(last);
        inbox.add_up(last, first_row + last * static_cast<long>(tile_rows), tile_rows, warp,
                     kWarps);
        if constexpr (kSplit > 1)
            cluster_wait();
    }
}
