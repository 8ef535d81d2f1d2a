// Grouped GEMM on Hopper for many rows of each group, over fp8 whose blocks of 128 k are under one
// scale:
//
//   y[m, n] = sum over steps of 128 k of (xq[m, :] * wq[g, n, :]) * xs[m] * ws[g, 128 rows of w] +
//   bias[g, n]
//
// The launches ahead, rescale_groups_sm90.h, list tiles of x and make its operand of blocks of
// 32 k. That of w is made here, a few tiles ahead of the products: rescaler_sm90.h.
// rescaled_product_sm90.h multiplies both. With MX_ROUTED groups are experts' places, and with
// MX_ACTIVATION results are activated, quantised, and go to their routed rows.
//
//   producer, a thread: the step's x and w, as boxes that TMA swizzles, into a ring
//   consumer, two warpgroups, 64 rows of x each: the sums of a tile, then its results
//   loader, storers, threads, and rescaler, a warpgroup: the tiles of w of all CTAs' producers
//
// Workgroups stay, and take tiles as they come to it. So they may wait for each other's tiles of w,
// however many of them there are at a time.

#define MX_WRITTEN_MEANWHILE 1
#include "../linear/rescaled_product_sm90.h"
#include "common/target.h"
#include "group_results_sm90.h"
#include "rescaled_groups_sm90.h"
#include "rescaler_sm90.h"

#include "rescale_groups_sm90.h" // over that workspace
#include "sm90/memory.h"
#include "sm90/tma.h"

using namespace mx;

static_assert(kStages * kStageBytes + kRawBlocks * kBlockBytes == MX_SHARED_BYTES,
              "the host lays shared memory out differently: "
              "aiter_mx/kernels/grouped_gemm/rescaled_sm90.py");
constexpr int kThreads = (2 + kConsumers) * kGroupThreads;
constexpr int kProducerRegisters = 40, kRescalerRegisters = 40, kConsumerRegisters = 216;
constexpr int kSwath = 8; // tiles of x that share a tile of w before the next
using Out = DType<MX_OUT>;

struct Args {
    GroupWorkspace of;
    int panel; // tiles of w that all of its group's x share before the next ones
    GroupResults<Out> results;
};

// A tile of results: of x, and of w of a group; of_x is negative where there are no more.
struct Tile {
    int of_x;
    BlockOfX rows;
    int group, of_group;
    int of_w; // which of all groups' that have rows
};

// The tiles of all groups, one after another; those asked for grow. Of a group they are numbered
// panel after panel, and in each down kSwath tiles of x before the next of w.
struct Walk {
    int busy, group; // which of those that have rows
    int first_of_x, count_of_x;
    int through; // tiles up to it and with it

    MX_MEMBER void begin() { busy = -1, through = 0; }
    MX_MEMBER Tile at(const Args& a, int turn) {
        const GroupWorkspace& of = a.of;
        const int across = of.across();
        while (turn >= through) {
            if (++busy >= of.busy()[0])
                return {-1, {}, 0, 0, 0};
            group = a.of.busy()[1 + busy];
            first_of_x = a.of.first_of_x(group);
            count_of_x = a.of.count_of_x(group);
            through += count_of_x * across;
        }
        const int in_group = turn - (through - count_of_x * across);
        const int first_of_w = in_group / (a.panel * count_of_x) * a.panel;
        const int count_of_w = min(a.panel, across - first_of_w);
        const int inside = in_group - first_of_w * count_of_x;
        const int super = inside / (kSwath * count_of_w) * kSwath;
        const int height = min(kSwath, count_of_x - super), place = inside - super * count_of_w;
        const int of_group = first_of_w + place / height;
        const int of_x = first_of_x + super + place % height;
        return {of_x, a.of.lists().blocks()[of_x], group, of_group, busy * across + of_group};
    }
};

// A tile in shared memory, for which a warp's registers have no room meanwhile.
struct KeptTile {
    int words[sizeof(Tile) / sizeof(int)];

    MX_MEMBER void keep(const Tile& tile, int lane) {
        __syncwarp(); // all lanes have read the one before
        if (lane == 0)
            *reinterpret_cast<Tile*>(words) = tile;
        __syncwarp();
    }
    MX_MEMBER Tile again() const {
        asm volatile("" ::: "memory"); // so that it is read again
        return *reinterpret_cast<const Tile*>(words);
    }
};

struct Consumer {
    const Args& a;
    const Products products;
    const Tile* tiles; // in shared memory, of stages with which one begins
    KeptTile* kept;    // likewise, of all warps
    const int index = products.index, warp = products.warp, lane = products.lane;

    MX_MEMBER void run() const {
        Ring ring;
        for (;;) {
            products.expect(ring); // the scales are there when the operands are
            Tile tile = tiles[ring.at];
            if (__any_sync(~0u, tile.of_x < 0))
                return;
            if (__any_sync(~0u, index * kGroupRows >= tile.rows.rows)) {
                products.skip(a.of.operands().steps(), ring);
                continue;
            }
            own().keep(tile, lane);
            Products::Sums sums;
            products.sum(sums, [&] { return place(); }, ring);
            tile = own().again();
            // The first of this warp's rows, and how many of these 16 there are.
            const int first = index * kGroupRows + warp * 16, left = tile.rows.rows - first;
            a.results.store(sums, tile.group, tile.of_group,
                            tile.rows.row + static_cast<long>(first), left, lane);
        }
    }

  private:
    // The warp's, whose address is found again each time.
    MX_MEMBER KeptTile& own() const {
        int thread = threadIdx.x;
        asm volatile("" : "+r"(thread));
        return kept[thread / kLanes - kThreads / kLanes + kConsumers * kWarps];
    }
    MX_MEMBER TilePlace place() const {
        const GroupWorkspace of = a.of.anew();
        const Tile tile = own().again();
        const RescaledOperands operands = of.operands();
        return {operands, tile.of_x * static_cast<long>(kTile),
                operands.first_w() + tile.of_w % of.room * static_cast<long>(kTile), 0,
                operands.steps()};
    }
};

struct Producer {
    const Args& a;
    const TensorMap& operands;
    unsigned shared, full, empty;
    // In shared memory: for each stage the tile that begins with it, and that of w which ends with
    // it, or -1; and what registers have no room for.
    Tile* tiles;
    int* ending;
    Walk& walk;

    MX_MEMBER void run() const {
        Ring ring;
        const int steps = a.of.operands().steps();
        for (int i = 0; i < kStages; ++i)
            ending[i] = -1;
        walk.begin();
        Tile tile = walk.at(a, claim());
        while (tile.of_x >= 0) {
            const unsigned next = claim();
            const int of_w = tile.of_w, x_row = tile.of_x * kTile;
            const int w_row = a.of.anew().operands().first_w() + of_w % a.of.room * kTile;
            while (load_acquire(a.of.ready() + of_w) != steps)
                tell_of_ended(ring); // whose place it may be that is waited for
            fence_async_global();
#pragma unroll 1
            for (int step = 0; step < steps; ++step, ring.next()) {
                await_free(ring);
                if (step == 0)
                    tiles[ring.at] = tile;
                if (step == steps - 1)
                    ending[ring.at] = of_w;
                copy_step(operands, shared, full, ring, step, x_row, w_row);
            }
            tile = walk.at(a, next);
        }
        await_free(ring);
        tiles[ring.at].of_x = -1;
        barrier_arrive(full + 8 * ring.at);
        ring.next();
#pragma unroll 1
        for (int i = 1; i < kStages; ++i, ring.next())
            await_free(ring);
    }

  private:
    MX_MEMBER unsigned claim() const { return add_relaxed(a.of.claimed() + 1, 1); }
    MX_MEMBER void await_free(const Ring& ring) const {
        barrier_wait(empty + 8 * ring.at, ring.parity ^ 1);
        tell(ring.at);
    }
    // Tells of all stages that are free by now, from the next one on.
    MX_MEMBER void tell_of_ended(Ring ring) const {
#pragma unroll 1
        for (int i = 0; i < kStages; ++i, ring.next())
            if (barrier_test(empty + 8 * ring.at, ring.parity ^ 1))
                tell(ring.at);
    }
    // Counts the product that has read all of a tile of w with a stage, if somebody asks. It is
    // over by now, so nothing has to be ordered, for which the thread would wait.
    MX_MEMBER void tell(int stage) const {
        const int of_w = ending[stage];
        if (of_w < 0)
            return;
        ending[stage] = -1;
        const GroupWorkspace& of = a.of;
        if (of_w + of.room < of.busy()[0] * of.across())
            count_relaxed(of.used() + of_w, 1);
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    aiter_mx_grouped_rescaled(MX_PARAMETERS, const __grid_constant__ TensorMap operands,
                              const __grid_constant__ TensorMap weights) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    __shared__ __align__(16) unsigned long long barriers[2 * kStages + 3 * kRawBlocks];
    __shared__ RawBlock raw_blocks[kRawBlocks];
    __shared__ unsigned tops[2][RawBlocks::kWarps];
    __shared__ Tile tiles[kStages];
    __shared__ KeptTile kept[kConsumers * kWarps];
    __shared__ int ending[kStages];
    __shared__ Walk walk;
    const GroupWorkspace of MX_WORKSPACE;
    unsigned shared = shared_address(dynamic), full = shared_address(barriers);
    const unsigned came = full + 8 * 2 * kStages;
    const RawBlocks blocks{of,
                           shared + kStages * kStageBytes,
                           came,
                           came + 8 * kRawBlocks,
                           came + 8 * 2 * kRawBlocks,
                           raw_blocks};
    if (threadIdx.x == 0) {
        prefetch_map(operands);
        prefetch_map(weights);
        blocks.init();
        init_ring(full, full + 8 * kStages);
    }
    group_barrier();
    wait_for_grid_ahead();
    const Args a{
        of,
        panel,
        MX_GROUP_RESULTS,
    };
    const int group = warp_uniform(threadIdx.x / kGroupThreads);
    const int thread = threadIdx.x % kGroupThreads;
    if (group == 0) {
        decrease_registers<kProducerRegisters>();
        if (thread == 0)
            Producer{a, operands, shared, full, full + 8 * kStages, tiles, ending, walk}.run();
        else if (thread == kLanes)
            Loader{blocks, weights, wq, ws}.run();
        else if (thread == 2 * kLanes || thread == 3 * kLanes)
            Storer{blocks, operands, thread / kLanes - 2}.run();
        __syncwarp();
    } else if (group == 1) {
        decrease_registers<kRescalerRegisters>();
        Rescaler{blocks, tops, thread}.run();
    } else {
        increase_registers<kConsumerRegisters>();
        shared = held(shared), full = held(full);
        const int warp = thread / kLanes;
        const Products products{shared, full, full + 8 * kStages, group - 2, warp, thread % kLanes};
        Consumer{a, products, tiles, kept}.run();
    }
}
