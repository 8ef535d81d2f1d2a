// The rings of stages in shared memory of the grouped GEMM on Hopper, of x and of w, and the thread
// that fills them.
#pragma once

#include "common/epilogue.h"
#include "sm90/async.h"
#include "sm90/copy.h"
#include "sm90/global.h"
#include "sm90/tensor_map.h"
#include "walk_sm90.h"

namespace mx {

constexpr int kStages = MX_STAGES, kWStages = MX_W_STAGES; // of the rings of x and of w
constexpr int kOrder = MX_ORDER; // tiles of tokens that share a tile of w before the next
using Out = DType<MX_OUT>;
using Walk = TileWalk<kOrder>;
using Ring = StageRing<kStages>;
using WRing = StageRing<kWStages>;

constexpr int kBlock = 32; // k of one scale

constexpr int kStageX = kMostSlabs * kSlabUnitBytes;
constexpr int kBoxUnits = 2, kBoxK = kBoxUnits * kUnitK; // of w that is copied at a time
constexpr int kStagingBytes = 8 << 10;                   // of 16-bit results, for a consumer
constexpr int kStageW = kRows * kBoxK;
constexpr int kAtW = kStages * kStageX;
constexpr int kAtStaging = kAtW + kWStages * kStageW;
static_assert(kAtStaging + kConsumers * kStagingBytes == MX_SHARED_BYTES,
              "the host lays shared memory out differently: "
              "aiter_mx/kernels/grouped_gemm/persistent_sm90.py");

// Barriers of each stage: x is there, it has been used, w is there, it has been used.
constexpr int kXFull = 0, kEmpty = 8 * kStages;
constexpr int kWFull = 16 * kStages, kWEmpty = kWFull + 8 * kWStages;
// After them, what the expander and the producer tell each other, then tiles that the cluster
// computes, and a barrier for each that says that it is there. A tile is told once all stages but
// one of the tile before are under way, so that consumers have read all but the last kStages + 1.
constexpr int kWorkPlaces = 8;
static_assert(kWorkPlaces >= kStages + 2, "a tile would be overwritten before it is read");
constexpr int kTold = kWEmpty + 8 * kWStages, kWork = (kTold + 8 + 15) / 16 * 16;
constexpr int kWorkFull = kWork + kWorkPlaces * sizeof(Work);
constexpr int kBarrierBytes = kWorkFull + 8 * kWorkPlaces;
constexpr int kClaimAhead = 3; // units before its end that a tile's successor is claimed

// The tile of this turn of the cluster, which was told.
MX_DEVICE Work told(unsigned barriers, unsigned turn) {
    const unsigned place = barriers + kWork + turn % kWorkPlaces * sizeof(Work);
    const u32x4 halves[2] = {load_shared_vector(place), load_shared_vector(place + 16)};
    Work work;
    __builtin_memcpy(&work, halves, sizeof(Work));
    return work;
}
// The same, once it is told.
MX_DEVICE Work receive(unsigned barriers, unsigned turn) {
    barrier_wait(barriers + kWorkFull + 8 * (turn % kWorkPlaces), turn / kWorkPlaces % 2);
    return told(barriers, turn);
}

struct Operands {
    const unsigned char *xq, *xs, *wq, *ws;
    const void* bias;
    Out* y;
    long N, K;
    int bias_kind;

    MX_MEMBER long blocks() const { return K / kBlock; }
    MX_MEMBER int units() const { return (K + kUnitK - 1) / kUnitK; }
};

// Fills stage after stage, for one tile after another.
struct Producer {
    const Operands& t;
    const TensorMap& weights;
    const Workspace& workspace;
    unsigned shared, barriers, now;
    int rank;
    Ring ring;
    WRing w;
    unsigned long long expanded; // of the tile, as last seen

    // Waits until a chunk of x is there, and what its expansion noted.
    MX_MEMBER void await(int tile, int chunk) {
        const int place = chunk % kChunksOfWord;
        if (place == 0)
            expanded = 0;
        const auto there = [&] {
            return (expanded >> place * kChunkParts & kWholeChunk) == kWholeChunk;
        };
        if (there())
            return;
        do
            expanded = load_acquire(workspace.expanded(tile) + chunk / kChunksOfWord);
        while (!there());
        fence_async_global();
    }

    // Fills the stages of one tile after another. The first workgroup's producer claims them, and
    // tells all of the cluster.
    MX_MEMBER void run() {
        Walk walk(workspace, t.N);
        if (rank == 0)
            send(0, walk.at(blockIdx.x / kCluster));
        for (unsigned turn = 0;; ++turn) {
            barrier_arrive_expect(barriers + kWorkFull + 8 * (turn % kWorkPlaces), sizeof(Work));
            const Work work = receive(barriers, turn);
            if (work.slabs == 0)
                break;
            tile(work, walk, turn);
        }
        announce_shared(now, kNoTile);
    }

    MX_MEMBER void send(unsigned turn, const Work& work) const {
        const unsigned place = barriers + kWork + turn % kWorkPlaces * sizeof(Work);
        const unsigned barrier = barriers + kWorkFull + 8 * (turn % kWorkPlaces);
        u32x4 halves[2];
        __builtin_memcpy(halves, &work, sizeof(Work));
        for (int to = 0; to < kCluster; ++to)
            for (int i = 0; i < 2; ++i)
                store_async(address_in_cluster(place + 16 * i, to), halves[i],
                            address_in_cluster(barrier, to));
    }

    MX_MEMBER void tile(const Work& work, Walk& walk, unsigned turn) {
        // What tails need has been expanded, or will be whatever this workgroup multiplies.
        announce_shared(now, work.tail ? kNoTile : work.tokens.index);
        const int units = t.units(), index = work.tokens.index;
        const int slabs = (work.tokens.rows + kSlabRows - 1) / kSlabRows;
        const int row = work.tokens.group * t.N + work.n + (work.tail ? 0 : rank * kRows);
        const int claimed_at = max(units - kClaimAhead, 0);
        const long slab_bytes = units * static_cast<long>(kSlabUnitBytes);
        // Of a tile each workgroup brings every second slab to both; of a tail what it needs.
        const int first = work.tail ? rank * work.slabs : rank, step = work.tail ? 1 : kCluster;
        const int end = work.tail ? min(first + work.slabs, slabs) : slabs;
        const int arriving = max(work.tail ? end - first : slabs, 0) * kSlabUnitBytes;
        const unsigned short mask = work.tail ? 1 << rank : (1 << kCluster) - 1;
        const unsigned char* x = workspace.x() + (work.tokens.slab + first) * slab_bytes;
        unsigned next = 0;
        for (int unit = 0; unit < units; ++unit) {
            if (unit == claimed_at && rank == 0)
                next = atomicAdd(workspace.begun(), 1u);
            if (unit == units - 1 && rank == 0)
                send(turn + 1, walk.at(next));
            if (unit % kBoxUnits == 0) {
                barrier_wait(barriers + kWEmpty + 8 * w.stage, w.parity ^ 1);
                const unsigned w_barrier = barriers + kWFull + 8 * w.stage;
                barrier_arrive_expect(w_barrier, kStageW);
                copy_box(shared + kAtW + w.stage * kStageW, weights, unit * kUnitK, row, w_barrier);
                w.advance();
            }
            barrier_wait(barriers + kEmpty + 8 * ring.stage, ring.parity ^ 1);
            if (unit % kChunkUnits == 0)
                await(index, unit / kChunkUnits);
            const unsigned barrier = barriers + kXFull + 8 * ring.stage;
            barrier_arrive_expect(barrier, arriving);
            const unsigned place = shared + ring.stage * kStageX + first * kSlabUnitBytes;
            if (first < end)
                copy_to_cluster(place, x, kSlabUnitBytes, barrier, mask);
            if (first + step < end)
                copy_to_cluster(place + step * kSlabUnitBytes, x + step * slab_bytes,
                                kSlabUnitBytes, barrier, mask);
            x += kSlabUnitBytes;
            ring.advance();
        }
    }
};

} // namespace mx
