// Decode linear for up to 64 rows of x on Hopper: y = dequantised(x) * dequantised(w)^T + bias.
//
//   xq [M, K], wq [N, K]        e4m3 payload
//   xs [M, K/32], ws [N, K/32]  e8m0 scale of each 32 consecutive k
//   y  [M, N]                   fp32, bf16 or fp16
//   bias [N]                    any of these, or none
//
// A cluster of kSplit workgroups, which share K, takes kRows rows of w at a time:
//
//   w  -> a ring in shared memory, by boxes of kRows rows by 128 k -> registers -> fp16, wgmma's A
//   x  -> this workgroup's part of K, by boxes, once -> fp16 in shared memory: wgmma's B
//
// Both are fp16 with their scales applied, relative to the largest of the row in the part of K, so
// that sums over the part stay in the matrix unit and take both rows' largest scales at its end.
// Then they go to the workgroup of the cluster that owns the output, which adds them in a fixed
// order. A row whose scales are too far apart for fp16, zero blocks aside, sends kMarker instead,
// and the owner computes its outputs again in fp32.
//
// Warps: kAddWarps of 16 rows of w each; helpers, who add what comes in while others go on; and
// the last one, who also asks for w.

#include "linear_wide_sm90.h"
#include "linear_wide_x_sm90.h"
#include "mx_target.h"
#include "sm90_async.h"
#include "sm90_copy.h"
#include "sm90_mma.h"
#include "sm90_rows.h"
#include "sm90_tensor_map.h"
#include "sm90_wgmma.h"

using namespace mx;

struct Adder {
    Shared& shared;
    const int warp, lane;
    const unsigned table; // of the warp
    // Addresses: the lane's first 16 bytes of w in the ring, its first scales, barriers.
    const unsigned from, scales, full, empty;
    Turn<kDepth> ring;
    unsigned words[2][4], scale[2];
    unsigned outside[2];
    int exponent[2]; // of what the rows are relative to
    uint2 any_x;     // whether any of x is outside, is far

    static constexpr bool kAllHaveRows = kRows % 64 == 0;
    MX_MEMBER bool has_rows() const { return kAllHaveRows || warp < kRowWarps; }

    MX_MEMBER Adder(Shared& shared, unsigned base, unsigned table, int warp, int lane)
        : shared(shared), warp(warp), lane(lane), table(table),
          from(held(base + (warp * kWarpRows + lane % 8) * kChunk + (lane / 8 ^ lane % 8) * 16)),
          scales(held(table + lane / 4 * kScaleStride * 4)),
          full(held(shared_address(shared.full))), empty(held(shared_address(shared.empty))) {
        outside[0] = outside[1] = 0;
    }
    MX_MEMBER void fetch(int u) {
        if (!has_rows())
            return;
        const unsigned place = (from ^ u * 64) + ring.at * kStageBytes;
        load_matrices(words[0], place);
        load_matrices(words[1], place + 8 * kChunk);
    }
    // Notes rows of blocks that fp16 takes for zero, though they are not.
    MX_MEMBER void look_for_lost() {
        const unsigned first = from - lane % 8 * kChunk - (lane / 8 ^ lane % 8) * 16;
#pragma unroll 1
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + i % 2 * 8, piece = lane % 4 * 2 + i / 2;
            const u32x4 v = load_shared_vector(first + ring.at * kStageBytes + row * kChunk +
                                               (piece ^ row % 8) * 16);
            const bool lost = byte_of(i % 2 ? scale[1] : scale[0], lane % 4) == 0 &&
                              (v[0] | v[1] | v[2] | v[3]) & 0x7f7f7f7f;
            outside[0] |= lost && i % 2 == 0;
            outside[1] |= lost && i % 2;
        }
    }
    MX_MEMBER void open(int chunk) {
        if (!has_rows())
            return;
        barrier_wait(full + ring.at * 8, ring.parity);
        scale[0] = load_shared_4(scales + chunk * 4);
        scale[1] = load_shared_4(scales + chunk * 4 + 8 * kScaleStride * 4);
        if (__builtin_expect((zero_bytes(scale[0]) | zero_bytes(scale[1])) != 0, false))
            look_for_lost();
        fetch(0);
    }
    MX_MEMBER void close() {
        if (has_rows()) {
            __syncwarp();
            if (lane == 0)
                barrier_arrive(empty + ring.at * 8);
        }
        ring.next();
    }
    MX_MEMBER void expand(unsigned (&a)[4][4], int u) {
        if (!has_rows())
            return;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int b = u * 2 + j / 2;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const unsigned factor = __byte_perm(scale[i], 0, 0x0404 | b << 4 | b << 12);
                e4m3x4_to_f16(words[i][j], a[j][i], a[j][2 + i]);
                a[j][i] = multiply_f16x2(a[j][i], factor);
                a[j][2 + i] = multiply_f16x2(a[j][2 + i], factor);
            }
        }
    }
    MX_MEMBER void add(float (&sums)[kTileM / 2], unsigned x, int chunks) {
        MatrixDescriptor b(x, kTileM * 16, 128);
        unsigned a[2][4][4]; // of warps without rows: anything
        outside[0] = outside[1] = 0;
        if (chunks > 0)
            open(0);
#pragma unroll 1
        for (int c = 0; c < chunks; ++c) {
#pragma unroll
            for (int u = 0; u < 2; ++u) {
                expand(a[u], u);
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    wgmma_f16(sums, a[u][j], b.at(j * kStepBytes));
                wgmma_commit();
                b.advance(4 * kStepBytes);
                if (u == 0) {
                    fetch(1);
                } else {
                    close();
                    if (c + 1 < chunks)
                        open(c + 1);
                }
                wgmma_wait<1>();
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) // ahead of the wait, which has time for it
            exponent[i] =
                has_rows()
                    ? load_shared_4(table + ((lane / 4 + 8 * i) * kScaleStride + kChunks) * 4)
                    : 0;
        any_x = load_shared_8(shared_address(shared.any_x));
        wgmma_wait<0>();
        keep_in_order(sums);
    }

    // Applies the rows' largest scales, and marks what is to be computed again.
    MX_MEMBER void scale_sums(float (&sums)[kTileM / 2]) const {
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
        if (__builtin_expect(!__any_sync(~0u, outside[0] | outside[1]) && !any_x.x, true))
            return;
        unsigned again = 0; // a bit for each of the two rows
#pragma unroll
        for (int i = 0; i < 2; ++i)
            again |= (any_of_row(outside[i] != 0, lane) ? 1u : 0u) << i;
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
};

#if MX_SPLIT > 1
#define CLUSTER __cluster_dims__(kSplit, 1, 1)
#else
#define CLUSTER
#endif

extern "C" __global__ void CLUSTER __launch_bounds__(kThreads, 1)
    aiter_mx_linear_wide(const unsigned char* xq, const unsigned char* xs, const unsigned char* wq,
                         const unsigned char* ws, const void* bias, Out* y, long M, long N, long K,
                         int bias_kind, int part_chunks, int parts_with_one_more, int overlaps,
                         const __grid_constant__ TensorMap weights,
                         const __grid_constant__ TensorMap x_map) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    __shared__ Shared shared;
    // The same in all lanes, and known to be.
    const int lane = threadIdx.x % kLanes, warp = __shfl_sync(~0u, threadIdx.x / kLanes, 0);
    const unsigned base = shared_address(dynamic);
    const int rank = blockIdx.x % kSplit;
    const int owned = (kTiles - rank + kSplit - 1) / kSplit;
    const Tensors t{xq, xs, wq, ws, static_cast<int>(M), N, K};
    const Part part{rank * part_chunks + min(rank, parts_with_one_more),
                    part_chunks + (rank < parts_with_one_more)};
    const int first_tile = blockIdx.x / kSplit, tile_step = gridDim.x / kSplit;
    const int tiles = (N + kRows - 1) / kRows;
    const Finisher finisher{t, bias, y, bias_kind, rank, lane};
    const unsigned inbox = base + kInbox, inbox_full = shared_address(&shared.inbox);
    int turn = 0;
    const bool adds = warp < kAddWarps, asks = warp == kWarps - 1;
    const bool has_rows = Adder::kAllHaveRows ? adds : warp < kRowWarps;
    // Several warps ask for what comes first, as a box takes one some hundred cycles: for a chunk
    // of x from this one on, where there is room again, and for stage `early` of the ring.
    const auto ask_for_x = [&](int first) {
        const int c = first + warp;
        if (warp < kSlots && c < part.chunks) {
            const unsigned barrier = shared_address(shared.x_full + c);
            barrier_arrive_expect(barrier, kSlotBytes);
            copy_box(base + kStaging + warp * kSlotBytes, x_map, (part.first + c) * kChunk, 0,
                     barrier);
        }
    };
    const int early = kWarps - 1 - warp;
    if (elected_lane()) {
        if (warp < kChunks)
            barrier_init(shared_address(shared.x_full + warp), 1);
        if (early < kDepth) {
            barrier_init(shared_address(shared.full + early), 1);
            barrier_init(shared_address(shared.empty + early), kRowWarps);
        }
        if (warp == kWarps / 2) {
            barrier_init(inbox_full, 1 + kRowWarps * kLanes);
            barrier_init(shared_address(&shared.finished), kSplit);
            shared.any_x[0] = shared.any_x[1] = 0;
        }
        fence_barrier_init();
        if (kSplit > 1 && warp == kWarps / 2)
            barrier_arrive_expect(inbox_full, owned * kSentBytes);
        if (!overlaps)
            ask_for_x(0);
    }
    __syncwarp();
    const auto ask_early = [&] {
        Asker asker{shared, weights, base, part, first_tile, early, tiles, tile_step, {}};
        if (early >= kAskedFirst)
            return;
        if constexpr (!kWhole || kDepth > kChunks) {
#pragma unroll 1
            while (asker.chunk >= part.chunks && asker.tile < tiles) {
                asker.chunk -= part.chunks;
                asker.tile += tile_step;
            }
        }
        if (asker.tile < tiles && elected_lane())
            asker.ask(early);
        __syncwarp();
    };
    if (overlaps) // x is not there before the launch ahead has ended
        ask_early();
    if (threadIdx.x < kTileM)
        shared.x_outside[threadIdx.x] = 0;
    XExpander expander{t, part, shared, base + kStaging, base + kX};
    Table table{t, part, base + kTables + warp * kWarpRows * kScaleStride * 4, lane};
    if (has_rows)
        table.read(first_tile * static_cast<long>(kRows) + warp * kWarpRows);
    if (overlaps) {
        launch_dependents();
        wait_for_grid_ahead();
        if (elected_lane())
            ask_for_x(0);
        __syncwarp();
    }
    expander.open();
    __syncthreads();                          // barriers are set up
    if (!overlaps && (!kPaced || early == 0)) // x is asked for, which would come after w
        ask_early();
    expander.run(
        [&](int first) {
            if (elected_lane())
                ask_for_x(first);
            __syncwarp();
        },
        [&](int round) {
            if (kPaced && !overlaps && early == round + 1)
                ask_early();
        });
    if (kPaced && !overlaps && early > XExpander::kRounds)
        ask_early();
    if (has_rows)
        table.write();
    __syncthreads();
    if (!overlaps)
        launch_dependents();
    if (kSplit > 1)
        cluster_arrive_relaxed(); // once all have, inboxes are free
    if (adds) {
        Adder adder(shared, base, table.place, warp, lane);
        for (int tile = first_tile; tile < tiles; tile += tile_step, ++turn) {
            const long first = tile * static_cast<long>(kRows);
            if (!kOnePass && turn > 0 && has_rows) {
                __syncwarp(); // all lanes have read what it replaces
                table.write();
            }
            if (!kOnePass && has_rows && tile + tile_step < tiles)
                table.read(first + tile_step * static_cast<long>(kRows) + warp * kWarpRows);
            float sums[kTileM / 2] = {};
            adder.add(sums, base + kX, part.chunks);
            if (has_rows)
                adder.scale_sums(sums);
            if (kSplit > 1 && turn == 0)
                cluster_wait(); // all of the cluster have room for sums
            if (!kOnePass && kSplit > 1 && turn > 0) {
                barrier_wait(shared_address(&shared.finished), (turn - 1) & 1);
                named_barrier(2, (kAddWarps + kFinishers) * kLanes); // which have read the inbox
            }
            if (has_rows) {
                const unsigned here = held(inbox); // no address is kept from pass to pass
#pragma unroll
                for (int j = 0; j < kTilesM; ++j) {
                    const float4 sum{sums[4 * j], sums[4 * j + 1], sums[4 * j + 2],
                                     sums[4 * j + 3]};
                    const int i = warp * kTilesM + j;
                    if constexpr (kSplit > 1) {
                        const unsigned to =
                            here + (i / kSplit * kSplit + rank) * kTileBytes + lane * 16;
                        if (i % kSplit == rank)
                            store_tile(to, sum);
                        else
                            store_async(address_in_cluster(to, i % kSplit), sum,
                                        address_in_cluster(inbox_full, i % kSplit));
                    } else {
                        finisher.store_tile(first, i, finisher.place(first, i), sum,
                                            Finisher::marks(sum));
                    }
                }
                if (kSplit > 1) // each lane for what it keeps
                    barrier_arrive(inbox_full);
            }
        }
    } else {
        if (asks && part.chunks > 0 && elected_lane()) {
            Asker asker{shared, weights, base, part, first_tile, 0, tiles, tile_step, {}};
            int asked = 0;
#pragma unroll 1
            for (; asker.tile < tiles; ++asked) {
                if (asked >= kAskedFirst) {
                    barrier_wait(shared_address(shared.empty + asker.ring.at),
                                 asker.ring.parity ^ 1);
                    asker.ask(asker.ring.at);
                }
                asker.next();
            }
        }
        __syncwarp();
        if (kSplit > 1)
            cluster_wait();
        for (int tile = first_tile; tile < tiles; tile += tile_step, ++turn) {
            if (kOnePass || kSplit == 1 || asks || tile + tile_step >= tiles)
                continue;
            finisher.run(tile * static_cast<long>(kRows), inbox, owned, warp - kAddWarps,
                         kFinishers, [&] { barrier_wait(inbox_full, turn & 1); });
            named_barrier_arrive(2, (kAddWarps + kFinishers) * kLanes);
            named_barrier(1, kFinishers * kLanes);
            if (warp > kAddWarps)
                continue;
            if (lane == 0)
                barrier_arrive_expect(inbox_full, owned * kSentBytes);
            __syncwarp();
            if (lane < kSplit) // the cluster may send the next sums
                barrier_arrive_read(address_in_cluster(shared_address(&shared.finished), lane));
        }
    }
    if constexpr (kSplit > 1) {
        --turn; // all add what came last
        // Who does not send knows by this alone that all before it has come: else the parity that
        // is waited for might be that of two phases before.
        if (!kOnePass)
            __syncthreads();
        finisher.run((first_tile + turn * tile_step) * static_cast<long>(kRows), inbox, owned, warp,
                     kWarps, [&] {
                         if (owned > 0)
                             barrier_wait(inbox_full, turn & 1);
                         __syncwarp();
                         cluster_arrive_relaxed();
                     });
        cluster_wait();
    }
}
