// The ring of stages in shared memory of the grouped GEMM on Hopper, and the thread that fills it.
#pragma once

#include "grouped_walk_sm90.h"
#include "mx_epilogue.h"
#include "sm90_async.h"
#include "sm90_copy.h"
#include "sm90_global.h"
#include "sm90_tensor_map.h"

namespace mx {

constexpr int kStages = MX_STAGES; // of the ring
constexpr int kOrder = MX_ORDER;   // tiles of tokens that share a tile of w before the next
using Out = DType<MX_OUT>;
using Walk = TileWalk<kOrder>;
using Ring = StageRing<kStages>;

constexpr int kBlock = 32; // k of one scale

constexpr int kStageX = kMostSlabs * kSlabUnitBytes;
constexpr int kStageW = kRows * kUnitK;
constexpr int kStagingBytes = kGroupRows * kSlabRows * 2; // a slab of 16-bit results
constexpr int kAtW = kStages * kStageX;
constexpr int kAtStaging = kAtW + kStages * kStageW;
static_assert(kAtStaging + kConsumers * kStagingBytes == MX_SHARED_BYTES,
              "the host lays shared memory out differently: "
              "aiter_mx/kernels/grouped_gemm/persistent_sm90.py");

// Barriers of each stage: x is there, w is there, and both have been used.
constexpr int kXFull = 0, kWFull = 8 * kStages, kEmpty = 16 * kStages;

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

    MX_MEMBER void tile(const Walk& walk) {
        store_shared(now, walk.index);
        const int units = t.units(), slabs = walk.slabs;
        const int row = walk.tokens.group * t.N + walk.n;
        const long slab_bytes = units * static_cast<long>(kSlabUnitBytes);
        const unsigned char* x = workspace.x() + (walk.tokens.slab + rank) * slab_bytes;
        for (int unit = 0; unit < units; ++unit) {
            barrier_wait(barriers + kEmpty + 8 * ring.stage, ring.parity ^ 1);
            const unsigned w_barrier = barriers + kWFull + 8 * ring.stage;
            barrier_arrive_expect(w_barrier, kStageW);
            copy_box(shared + kAtW + ring.stage * kStageW, weights, unit * kUnitK, row, w_barrier);
            if (unit % kChunkUnits == 0)
                await(walk.index, unit / kChunkUnits);
            const unsigned barrier = barriers + kXFull + 8 * ring.stage;
            barrier_arrive_expect(barrier, slabs * kSlabUnitBytes);
            const unsigned place = shared + ring.stage * kStageX + rank * kSlabUnitBytes;
            if (rank < slabs)
                copy_to_cluster(place, x, kSlabUnitBytes, barrier, 3);
            if (rank + 2 < slabs)
                copy_to_cluster(place + 2 * kSlabUnitBytes, x + 2 * slab_bytes, kSlabUnitBytes,
                                barrier, 3);
            x += kSlabUnitBytes;
            ring.advance();
        }
    }
};

} // namespace mx
