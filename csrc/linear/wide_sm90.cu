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

#include "common/target.h"
#include "sm90/rows.h"
#include "sm90/tma.h"
#include "wide_add_sm90.h"
#include "wide_sm90.h"
#include "wide_x_sm90.h"

using namespace mx;

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
    if (warp < 2 && elected_lane())
        prefetch_map(warp == 0 ? x_map : weights);
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
    // Several warps ask for x, as a box takes one some hundred cycles: for chunks from this one on,
    // where there is room again.
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
    // Scales before x, as what is asked for later comes later; x may be the launch ahead's.
    XExpander expander{t, part, shared, base + kStaging, base + kX};
    const unsigned first_table = base + kTables + warp * kWarpRows * kScaleStride * 4;
    Table table{t, part, first_table, lane};
    const auto read_table = [&](int tile) {
        if (has_rows && tile < tiles)
            table.read(tile * static_cast<long>(kRows) + warp * kWarpRows);
    };
    if (!overlaps)
        expander.open();
    read_table(first_tile);
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
    // For a stage that is asked for the first time.
    const auto ask_early = [&](int stage) {
        Asker asker{shared, weights, base, part, first_tile, stage, tiles, tile_step, {}};
        if constexpr (!kWhole || kDepth > kChunks) {
#pragma unroll 1
            while (asker.chunk >= part.chunks && asker.tile < tiles) {
                asker.chunk -= part.chunks;
                asker.tile += tile_step;
            }
        }
        if (asker.tile < tiles && elected_lane())
            asker.ask(stage);
        __syncwarp();
    };
    // By the last warp: for one more stage, if no more than kInFlight are then under way.
    int asked = 0;
    const auto ask_next = [&] {
        if (!asks || overlaps || asked >= kAskedFirst || (!kWhole && part.chunks == 0))
            return;
        if (asked >= kInFlight &&
            !__any_sync(~0u, barrier_test(shared_address(shared.full + (asked - kInFlight)), 0)))
            return;
        ask_early(asked++);
    };
    // x is not there before the launch ahead has ended, and several warps have time to ask.
    if (overlaps && early < kAskedFirst)
        ask_early(early);
    if (threadIdx.x < kTileM)
        shared.x_outside[threadIdx.x] = 0;
    if (overlaps) {
        launch_dependents();
        wait_for_grid_ahead();
        if (elected_lane())
            ask_for_x(0);
        __syncwarp();
        expander.open();
    }
    __syncthreads(); // barriers are set up
    if (!kPaced)
#pragma unroll
        for (int i = 1; i < kInFlight; ++i)
            ask_next();
    ask_next(); // x has been asked for, which would come after w
    bool careful = false;
    if (kWhole && has_rows) // x is waited for; what is read byte by byte comes later
        careful = table.write();
    expander.run(
        [&](int first) {
            if (elected_lane())
                ask_for_x(first);
            __syncwarp();
        },
        ask_next);
    if (!kWhole && has_rows)
        careful = table.write();
    __syncthreads();
    if (!overlaps)
        launch_dependents();
    if (kSplit > 1)
        cluster_arrive_relaxed(); // once all have, inboxes are free
    // The last of several passes is added by all, when it has come.
    const auto finish_last = [&] {
        --turn;
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
    };
    // Waits until the cluster has room for the sums of a pass.
    const auto wait_for_room = [&](int pass) {
        if (pass == 0)
            cluster_wait();
        else
            barrier_wait(shared_address(&shared.finished), (pass - 1) & 1);
        if (pass > 0) // they have read the inbox, as `finished` says too, but not to racecheck
            named_barrier(2 + warp / kInStep, (kInStep + kFinishers) * kLanes);
    };
    if (adds) {
        if constexpr (kLate)
            increase_registers<kAddingRegisters>();
        Adder adder(shared, base, warp, lane);
        adder.use(table.place, careful);
        Adder::Sums late;       // of the pass before
        Adder::Operands a = {}; // of warps without rows: anything
        if constexpr (kLate) {
            read_table(first_tile + tile_step);
            adder.begin(a, part.chunks);
        }
        for (int tile = first_tile; tile < tiles; tile += tile_step, ++turn) {
            const long first = tile * static_cast<long>(kRows);
            const bool more = !kOnePass && tile + tile_step < tiles;
            if constexpr (!kLate) {
                if (!kOnePass && turn > 0 && has_rows) {
                    __syncwarp(); // all lanes have read what it replaces
                    adder.use(table.place, table.write());
                }
                if (more)
                    read_table(tile + tile_step);
                adder.begin(a, part.chunks);
            }
            Adder::Sums sums = {};
            adder.add(sums, a, base + kX, part.chunks, more, [&](int c, int j) {
                const int group = warp / 4;
                if (j > 0)
                    return;
                if (makes_table_with(c, group) && more && has_rows) {
                    table.place = first_table + (turn % 2 == 0 ? kTableBytes : 0);
                    adder.use_next(table.place, table.write());
                    read_table(tile + 2 * tile_step);
                }
                if (!sends_with(c, group) || turn == 0)
                    return;
                wait_for_room(turn - 1);
                if (!has_rows)
                    return;
#pragma unroll
                for (int n = 0; n < kTilesM; ++n)
                    adder.send(late, n, rank, held(inbox));
                adder.tell_sent();
            });
            if (has_rows)
                adder.scale_sums(sums);
            if (kLate && more) {
#pragma unroll
                for (int i = 0; i < kTileM / 2; ++i)
                    late[i] = sums[i];
                adder.scales = adder.next_scales;
                continue;
            }
            if constexpr (kSplit > 1) {
                wait_for_room(turn);
                if (has_rows) {
                    const unsigned here = held(inbox); // no address is kept from pass to pass
#pragma unroll
                    for (int j = 0; j < kTilesM; ++j)
                        adder.send(sums, j, rank, here);
                    adder.tell_sent();
                }
            } else if (has_rows) {
#pragma unroll
                for (int j = 0; j < kTilesM; ++j) {
                    const float4 sum{sums[4 * j], sums[4 * j + 1], sums[4 * j + 2],
                                     sums[4 * j + 3]};
                    const int i = warp * kTilesM + j;
                    finisher.store_tile(first, i, finisher.place(first, i), sum,
                                        Finisher::marks(sum));
                }
            }
        }
        if constexpr (kLate)
            finish_last();
    } else {
        if constexpr (kLate)
            decrease_registers<kHelpingRegisters>();
        if (asks && part.chunks > 0 && elected_lane()) {
            Asker asker{shared, weights, base, part, first_tile, 0, tiles, tile_step, {}};
            Turn<kDepth> arriving;
            const int before = overlaps ? kAskedFirst : asked;
#pragma unroll 1
            for (int i = 0; asker.tile < tiles; ++i) {
                if (i >= before) {
                    if (i >= kInFlight)
                        barrier_wait(shared_address(shared.full + arriving.at), arriving.parity);
                    barrier_wait(shared_address(shared.empty + asker.ring.at),
                                 asker.ring.parity ^ 1);
                    asker.ask(asker.ring.at);
                }
                if (i >= kInFlight)
                    arriving.next();
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
#pragma unroll
            for (int i = 0; i < kAddWarps / kInStep; ++i)
                named_barrier_arrive(2 + i, (kInStep + kFinishers) * kLanes);
            named_barrier(1, kFinishers * kLanes);
            if (warp == kAddWarps) {
                if (lane == 0)
                    barrier_arrive_expect(inbox_full, owned * kSentBytes);
                __syncwarp();
                if (lane < kSplit) // the cluster may send the next sums
                    barrier_arrive_read(address_in_cluster(shared_address(&shared.finished), lane));
            }
        }
        if constexpr (kLate)
            finish_last();
    }
    if constexpr (kSplit > 1 && !kLate)
        finish_last();
}
