// Grouped GEMM on Hopper over fp8 whose blocks of 128 k are under one scale, which w comes under in
// shared memory, where it is multiplied from:
//
//   y[m, n] = sum over steps of 128 k of (xq[m, :] * wq[g, n, :]) * xs[m] * ws[g, 32 rows of w] +
//   bias[g, n]
//
// The launches ahead, rescale_groups_sm90.h, list blocks of x and put it under one scale.
// in_place_rescaler_sm90.h does so to w; rescaled_step_sm90.h has the products of a step. With
// MX_ROUTED groups are experts' places, and with MX_ACTIVATION results are activated, quantised,
// and go to their routed rows.
//
//   producers, two warps: blocks of w, 128 rows x 128 k, with their scales, and of x what a
//     consumer multiplies at a time, 64 rows x 128 k, into rings
//   rescalers, six warps: of 32 rows of a block at a time
//   consumers, two warpgroups, up to 128 rows of x each: the products of a step, 64 rows at a time;
//     then adds those to its sums in fp32, times the step's scales. While it does so, the wgmmas of
//     the other consumer run.
//
// A tile is a pair of blocks of x by 128 rows of w. Workgroups stay, and take tiles as they come to
// them.

#include "../linear/rescaled_step_sm90.h"
#include "common/target.h"
#include "group_results_sm90.h"
#include "in_place_groups_sm90.h"
#include "in_place_rescaler_sm90.h"
#include "rescale_groups_sm90.h"
#include "sm90/memory.h"
#include "sm90/tma.h"

using namespace mx;

constexpr int kConsumers = 2, kGroupThreads = 128, kGroupWarps = 4;
constexpr int kProducers = 2, kRescalers = 2 * kGroupWarps - kProducers; // warps
constexpr int kThreads = (2 + kConsumers) * kGroupThreads;
constexpr int kHelperRegisters = 40, kConsumerRegisters = 216;
constexpr int kUnitBytes = kUnitRows * kStepBytes, kRecordBytes = 4 * kRecordWords; // of x
constexpr int kHalves = 2;                     // units of a block of x, and of a consumer
constexpr int kScales = kStepBytes / 32;       // of a row of a step
constexpr int kValues = RescaledStep::kValues; // of a thread, of a unit
constexpr int kSwath = 4; // pairs of blocks of x that share a tile of w before the next
using Out = DType<MX_OUT>;

// Blocks of w and units of x, of each consumer, that are under way.
constexpr int kBlocks = MX_BLOCKS, kUnits = MX_UNITS;
using Ring = PipelineState<kBlocks>;
using RingOfX = PipelineState<kUnits>;

struct Args {
    GroupWorkspace of;
    const unsigned char *payload, *scales; // of w
    GroupResults<Out> results;

    MX_MEMBER int steps() const { return of.operands().steps(); }
    // All tiles.
    MX_MEMBER int tiles() const { return of.lists().pair_ends()[of.groups - 1] * of.across(); }
};

// Of results. The group is negative where there are no more.
struct Tile {
    int group, of_w; // which of its group's tiles of w
    int block;       // of x, the first of a pair
    BlockOfX rows[2];

    // Tiles of a group are numbered down kSwath pairs of blocks before the next of w.
    MX_MEMBER static Tile at(const GroupWorkspace& of, int number) {
        const GroupLists lists = of.lists();
        const int across = of.across();
        const int group = lists.group_of(lists.pair_ends(), number / across);
        const int in_group = number - lists.before(lists.pair_ends(), group) * across;
        const int super = in_group / (kSwath * across) * kSwath;
        const int height = min(kSwath, lists.count(lists.pair_ends(), group) - super);
        const int place = in_group - super * across, in_blocks = 2 * (super + place % height);
        const int block = lists.before(lists.block_ends(), group) + in_blocks;
        const bool is_pair = in_blocks + 1 < lists.count(lists.block_ends(), group);
        const BlockOfX* const rows = lists.blocks() + block;
        return {group, place / height, block, {rows[0], is_pair ? rows[1] : BlockOfX{0, 0}}};
    }
    // Which units of x are a consumer's: those of a block, or one of them if that is all there is.
    MX_MEMBER int first_unit(int consumer) const {
        return rows[1].rows > 0 ? kHalves * consumer : consumer;
    }
    MX_MEMBER int units(int consumer) const {
        const int most = rows[1].rows > 0 ? kHalves : 1;
        const int exist = (rows[0].rows + rows[1].rows + kUnitRows - 1) / kUnitRows;
        return max(0, min(most, exist - first_unit(consumer)));
    }
    // Of the unit, and how many there are.
    MX_MEMBER BlockOfX of_unit(int unit) const {
        const BlockOfX& all = rows[unit / kHalves];
        const int first = unit % kHalves * kUnitRows;
        return {all.row + first, all.rows - first};
    }
};
// Tiles whose first blocks are under way, and one whose results are stored.
constexpr int kTiles = kBlocks + 1;
using TileRing = PipelineState<kTiles>;

// Shared memory, by addresses and pointers.
struct Shared {
    unsigned address, barriers;
    Tile* tiles;
    PlaceOfBlock* places; // of blocks of w

    // Beside a unit of x its record; beside a block of w see BlockInPlace.
    static constexpr int kBlockWords = 4 * kTileRows;
    static constexpr int kW = kConsumers * kUnits * kUnitBytes, kOfX = kW + kBlocks * kBlockBytes;
    static constexpr int kOwn = kOfX + kConsumers * kUnits * kRecordBytes;
    static constexpr int kTold = kOwn + kBlocks * kBlockWords;
    static constexpr int kCommons = kTold + kBlocks * kBlockWords;
    static constexpr int kSize = kCommons + 4 * kQuarters * kBlocks;

    MX_MEMBER unsigned x(int consumer, int unit) const {
        return address + (consumer * kUnits + unit) * kUnitBytes;
    }
    MX_MEMBER unsigned record(int consumer, int unit) const {
        return address + kOfX + (consumer * kUnits + unit) * kRecordBytes;
    }
    MX_MEMBER BlockInPlace block(int i) const {
        return {address + kW + i * kBlockBytes, address + kOwn + i * kBlockWords,
                address + kTold + i * kBlockWords, address + kCommons + 4 * kQuarters * i};
    }

    // Barriers: a block of w and its scales are there; it is rewritten; consumers are done with it.
    static constexpr int kBarriers = 3 * kBlocks + 2 * kConsumers * kUnits + kTiles;
    MX_MEMBER unsigned came(int block) const { return barriers + 8 * block; }
    MX_MEMBER unsigned full(int block) const { return came(kBlocks + block); }
    MX_MEMBER unsigned empty(int block) const { return came(2 * kBlocks + block); }
    // A unit of x is there; its consumer is done with it.
    MX_MEMBER unsigned x_full(int consumer, int unit) const {
        return came(3 * kBlocks + consumer * kUnits + unit);
    }
    MX_MEMBER unsigned x_empty(int consumer, int unit) const {
        return x_full(kConsumers + consumer, unit);
    }
    // A tile is told.
    MX_MEMBER unsigned told(int tile) const { return x_empty(kConsumers, tile); }
    // The tile whose turn it is.
    MX_MEMBER const Tile& await_tile(const TileRing& ring) const {
        barrier_wait(told(ring.at), ring.parity);
        return tiles[ring.at];
    }
    MX_MEMBER void init() const {
        for (int i = 0; i < kTiles; ++i)
            barrier_init(told(i), 1);
        for (int i = 0; i < kBlocks; ++i) {
            barrier_init(came(i), 1 + kLanes);
            barrier_init(full(i), kQuarters);
            barrier_init(empty(i), kConsumers * kGroupWarps);
        }
        for (int i = 0; i < kConsumers * kUnits; ++i) {
            barrier_init(x_full(0, i), 1);
            barrier_init(x_empty(0, i), kGroupWarps);
        }
        fence_barrier_init();
    }
};
static_assert(Shared::kSize == MX_SHARED_BYTES, "the host lays shared memory out differently: "
                                                "aiter_mx/kernels/grouped_gemm/in_place_sm90.py");

// A warp.
struct ProducerOfW {
    const Args& a;
    const TensorMap& weights;
    const Shared& shared;
    const int lane;

    MX_MEMBER void run() const {
        Ring ring;
        TileRing to;
        const int tiles = a.tiles();
        for (int number = __shfl_sync(~0u, claim(), 0); number < tiles; to.next()) {
            const int next = claim();
            const Tile tile = Tile::at(a.of, number);
            tell(tile, to.at, ring);
            load(tile, ring);
            number = __shfl_sync(~0u, next, 0);
        }
        tell({-1, 0, 0, {}}, to.at, ring);
        // Each rescaler finds one of these quarters to be its next.
        for (int i = 0; i < kRescalers; i += kQuarters, ring.next()) {
            barrier_wait(shared.empty(ring.at), ring.parity ^ 1);
            if (lane == 0) {
                shared.places[ring.at].step = -1;
                barrier_arrive(shared.came(ring.at));
            }
            __syncwarp();
            barrier_arrive(shared.came(ring.at));
        }
    }

  private:
    static constexpr int kRows = kTileRows / kLanes;

    // Lane 0's counts.
    MX_MEMBER int claim() const { return lane == 0 ? add_relaxed(a.of.claimed(), 1) : 0; }
    // Tells of a tile once the place of its first block is free, and so its own.
    MX_MEMBER void tell(const Tile& tile, int at, const Ring& ring) const {
        barrier_wait(shared.empty(ring.at), ring.parity ^ 1);
        if (lane == 0) {
            shared.tiles[at] = tile;
            barrier_arrive(shared.told(at));
        }
        __syncwarp();
    }
    MX_MEMBER void load(const Tile& tile, Ring& ring) const {
        const int in_group = tile.of_w * kRunRows, steps = a.steps(), of_row = a.of.K / 32;
        const long row = tile.group * a.of.N + in_group;
        const int rows = (kRunRows == kTileRows ? a.of.N : a.of.features()) - in_group;
        // Of four rows: behind the last one its scales are found again.
        const unsigned char* from[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int own = i * kLanes % kRunRows;
            const long further =
                own < rows ? own + lane + i * kLanes / kRunRows * a.of.features() : 0;
            from[i] = a.scales + (row + further) * of_row;
        }
#pragma unroll 1
        for (int step = 0; step < steps; ++step, ring.next()) {
            barrier_wait(shared.empty(ring.at), ring.parity ^ 1);
            const unsigned came = shared.came(ring.at);
            const BlockInPlace block = shared.block(ring.at);
            if (lane == 0) {
                shared.places[ring.at] = {row, step, rows, of_row - step * kScales};
                barrier_arrive_expect(came, kBlockBytes);
#pragma unroll
                for (int i = 0; i < kTileRows; i += kRunRows)
                    tma_load(block.box + i * kStepBytes, weights, step * kStepBytes,
                             row + i / kRunRows * a.of.features(), came);
            }
            __syncwarp();
            load_scales(from, block.own_words + 4 * lane, came, of_row - step * kScales);
        }
    }

    // Of so many blocks of 32 k; behind them zeros.
    MX_MEMBER void load_scales(const unsigned char* (&from)[kRows], unsigned to, unsigned came,
                               int exist) const {
        if (a.of.K % kStepBytes == 0) {
#pragma unroll
            for (int i = 0; i < kRows; ++i)
                copy_word_async(to + 4 * kLanes * i, from[i]);
            barrier_arrive_copied(came);
        } else {
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                unsigned word = 0;
#pragma unroll
                for (int j = 0; j < kScales; ++j)
                    word |= (j < exist ? load_byte(from[i] + j) : 0) << 8 * j;
                store_shared_4(to + 4 * kLanes * i, word);
            }
            barrier_arrive(came);
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i)
            from[i] += kScales;
    }
};

// A thread.
struct ProducerOfX {
    const Args& a;
    const TensorMap& operands;
    const Shared& shared;

    MX_MEMBER void run() const {
        RingOfX rings[kConsumers];
        const int steps = a.steps();
        const RescaledRows from = a.of.operands();
        for (TileRing turn;; turn.next()) {
            const Tile& tile = shared.await_tile(turn);
            if (tile.group < 0)
                return;
            int units[kConsumers], rows[kConsumers];
            const unsigned* records[kConsumers]; // of a step
#pragma unroll
            for (int c = 0; c < kConsumers; ++c) {
                units[c] = tile.units(c);
                rows[c] = tile.block * kTileRows + tile.first_unit(c) * kUnitRows;
                records[c] = from.record(0, rows[c]);
            }
#pragma unroll 1
            for (int column = 0; column < steps * kStepBytes; column += kStepBytes) {
#pragma unroll
                for (int i = 0; i < kHalves; ++i)
#pragma unroll
                    for (int c = 0; c < kConsumers; ++c)
                        if (i < units[c])
                            load(c, rows[c] + i * kUnitRows, column, records[c] + i * kRecordWords,
                                 rings[c]);
#pragma unroll
                for (int c = 0; c < kConsumers; ++c)
                    records[c] += from.words_of_step();
            }
        }
    }

  private:
    MX_MEMBER void load(int consumer, int row, int column, const unsigned* record,
                        RingOfX& ring) const {
        const unsigned full = shared.x_full(consumer, ring.at);
        barrier_wait(shared.x_empty(consumer, ring.at), ring.parity ^ 1);
        barrier_arrive_expect(full, kUnitBytes + kRecordBytes);
        tma_load(shared.x(consumer, ring.at), operands, column, row, full);
        copy_bulk(shared.record(consumer, ring.at), record, kRecordBytes, full);
        ring.next();
    }
};

struct Consumer {
    const Args& a;
    const Shared& shared;
    const int index, thread;
    const int warp = thread / kLanes, lane = thread % kLanes;

    using Half = RescaledStep::Values;
    using Sums = float[kHalves * kValues];

    MX_MEMBER void run() const {
        Ring w;
        RingOfX x;
        for (TileRing at;; at.next()) {
            const Tile& tile = shared.await_tile(at);
            if (__any_sync(~0u, tile.group < 0))
                return;
            const int units = warp_uniform(tile.units(index));
            if (units == 0) {
                skip(w);
                continue;
            }
            Sums sums;
            multiply(sums, units, w, x);
#pragma unroll
            for (int i = 0; i < kHalves; ++i)
                if (i < units)
                    store_unit(half_of(sums, i), at.at, i);
        }
    }

  private:
    MX_MEMBER static Half& half_of(Sums& sums, int i) {
        return reinterpret_cast<Half&>(sums[i * kValues]);
    }
    MX_MEMBER void skip(Ring& w) const {
        for (int left = a.steps(); left > 0; --left, w.next()) {
            expect_w(w);
            __syncwarp(); // all lanes have seen it
            release_w(w);
        }
    }

    // The sums of so many units of a tile.
    MX_MEMBER void multiply(Sums& sums, int units, Ring& w, RingOfX& x) const {
#pragma unroll
        for (int v = 0; v < kHalves * kValues; ++v)
            sums[v] = 0;
        int left = a.steps();
        while (left > 0) {
            if (__builtin_expect(expect(w, x), true)) {
                add_steps(sums, units, w, x, left);
            } else {
                add_apart(sums, units, w, x);
                --left;
            }
        }
    }
    MX_MEMBER void expect_w(const Ring& w) const { barrier_wait(shared.full(w.at), w.parity); }
    MX_MEMBER void expect_x(const RingOfX& x) const {
        barrier_wait(shared.x_full(index, x.at), x.parity);
    }
    // Waits for a step's operands, and tells whether they have scales in common.
    MX_MEMBER bool expect(const Ring& w, const RingOfX& x) const {
        expect_w(w);
        expect_x(x);
        const unsigned of_x = load_shared_4(shared.record(index, x.at) + 4 * kUnitRows);
        const u32x4 of_w = load_shared_16(shared.block(w.at).commons);
        const unsigned signs = of_w[0] | of_w[1] | of_w[2] | of_w[3];
        // So ptxas sees that all go the same way.
        return !__any_sync(~0u, of_x == 0 || static_cast<int>(signs) < 0);
    }
    MX_MEMBER void release_w(const Ring& w) const {
        if (lane == 0)
            barrier_arrive(shared.empty(w.at));
    }
    MX_MEMBER void release_x(RingOfX& x) const {
        if (lane == 0)
            barrier_arrive(shared.x_empty(index, x.at));
        x.next();
    }

    // Adds up steps until none is left, or the next one's scales are apart.
    MX_MEMBER void add_steps(Sums& sums, int units, Ring& w, RingOfX& x, int& left) const {
#pragma unroll 1
        for (;;) {
            add_half<0>(sums, w, x);
            if (units > 1) {
                expect_x(x);
                add_half<1>(sums, w, x);
            }
            release_w(w);
            w.next();
            if (--left == 0 || !expect(w, x))
                return;
        }
    }
    template <int Part>
    MX_MEMBER void add_half(Sums& sums, const Ring& w, RingOfX& x) const {
        Half products;
        const unsigned words = shared.record(index, x.at) + 4 * own_row();
        RescaledStep::multiply<kScales>(products, x_at(x), w_at(w));
        const float rows[2] = {of_byte(load_shared_4(words)),
                               of_byte(load_shared_4(words + 4 * 8))};
        const u32x4 of_w = load_shared_16(shared.block(w.at).commons);
        wgmma_wait<0>();
        keep_in_order(products);
        release_x(x);
#pragma unroll
        for (int v = 0; v < kValues; ++v) {
            float& sum = sums[Part * kValues + RescaledStep::place(v)];
            const float of_column = bits_to_float(of_w[v / (kValues / kQuarters)]);
            sum = mx::fma(products[v], rows[v / 2 % 2] * of_column, sum);
        }
    }
    MX_MEMBER static float of_byte(unsigned word) { return bits_to_float((word & 0xff) << 23); }
    // The first of a lane's two rows of a unit, which are eight apart.
    MX_MEMBER int own_row() const { return warp * 16 + lane / 4; }
    MX_MEMBER unsigned x_at(const RingOfX& x) const {
        return SwizzledDescriptor(shared.x(index, 0)).low + x.at * (kUnitBytes / 16);
    }
    MX_MEMBER unsigned w_at(const Ring& w) const {
        return SwizzledDescriptor(shared.block(0).box).low + w.at * (kBlockBytes / 16);
    }

    // Adds up a step in which not all have a scale in common.
    MX_MEMBER void add_apart(Sums& sums, int units, Ring& w, RingOfX& x) const {
        float kind = bits_to_float(load_shared_4(shared.record(index, x.at) + 4 * kUnitRows + 4));
        const u32x4 of_w = load_shared_16(shared.block(w.at).commons);
#pragma unroll
        for (int q = 0; q < kQuarters; ++q)
            kind = fminf(kind, bits_to_float(of_w[q]));
        const unsigned columns = shared.block(w.at).told_words + lane % 4 * 8;
        const auto of_piece = [&](int piece) { return load_shared_8(columns + 32 * piece); };
#pragma unroll
        for (int i = 0; i < kHalves; ++i)
            if (i < units) {
                expect_x(x);
                const unsigned words = shared.record(index, x.at) + 4 * own_row();
                RescaledStep::add_apart(half_of(sums, i), x_at(x), w_at(w), load_shared_4(words),
                                        load_shared_4(words + 4 * 8), of_piece, kind);
                __syncwarp(); // all lanes have read the scales
                release_x(x);
            }
        release_w(w);
        w.next();
    }

    // Stores the results of a unit, so many rows that there are.
    MX_MEMBER void store_unit(Half& sums, int at, int i) const {
        const Tile& tile = shared.tiles[at];
        // So that nothing that follows from it stays in registers between tiles.
        const int own = held(static_cast<unsigned>(thread)), lane = own % kLanes,
                  warp = own / kLanes;
        const BlockOfX unit = tile.of_unit(tile.first_unit(index) + i);
        a.results.store(sums, tile.group, tile.of_w, unit.row + static_cast<long>(warp) * 16,
                        unit.rows - warp * 16, lane);
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    aiter_mx_grouped_in_place(MX_PARAMETERS, const __grid_constant__ TensorMap operands,
                              const __grid_constant__ TensorMap weights) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    __shared__ __align__(16) unsigned long long barriers[Shared::kBarriers];
    __shared__ Tile tiles[kTiles];
    __shared__ PlaceOfBlock places[kBlocks];
    const Shared shared{held(shared_address(dynamic)), held(shared_address(barriers)), tiles,
                        places};
    if (threadIdx.x == 0) {
        prefetch_map(operands);
        prefetch_map(weights);
        shared.init();
    }
    group_barrier();
    wait_for_grid_ahead();
    const GroupWorkspace of MX_WORKSPACE;
    const Args a{
        of,
        wq,
        ws,
        MX_GROUP_RESULTS,
    };
    const int group = warp_uniform(threadIdx.x / kGroupThreads);
    if (group < 2) {
        decrease_registers<kHelperRegisters>();
        const int warp = warp_uniform(threadIdx.x / kLanes), lane = threadIdx.x % kLanes;
        if (warp == 0) {
            ProducerOfW{a, weights, shared, lane}.run();
        } else if (warp == 1) {
            if (lane == 0)
                ProducerOfX{a, operands, shared}.run();
            __syncwarp();
        } else {
            // The quarters of all blocks are taken in turns.
            Ring ring;
            int quarter = warp - kProducers;
#pragma unroll 1
            for (;;) {
                for (; quarter >= kQuarters; quarter -= kQuarters)
                    ring.next();
                barrier_wait(shared.came(ring.at), ring.parity);
                if (__any_sync(~0u, places[ring.at].step < 0))
                    break;
                const BlockInPlace block = shared.block(ring.at);
                Rescaler{wq, a.of, block, places[ring.at], quarter, lane}.run();
                fence_async();
                barrier_arrive_warp(shared.full(ring.at), lane);
                quarter += kRescalers;
            }
        }
    } else {
        increase_registers<kConsumerRegisters>();
        Consumer{a, shared, group - 2, static_cast<int>(threadIdx.x) % kGroupThreads}.run();
    }
}
