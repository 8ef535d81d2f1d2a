// How the grouped GEMM's clusters go over the tiles, and its warpgroups over the ring of stages.
#pragma once

#include "grouped_sm90.h"

namespace mx {

constexpr int kCluster = 2; // workgroups that share a tile's tokens
constexpr int kConsumers = 2;
constexpr int kGroupRows = 64; // of w for a consumer
constexpr int kRows = kConsumers * kGroupRows;
constexpr int kNoTile = 1 << 30; // beyond all

// The tiles that a cluster computes, one after another: first those of most slabs.
template <int Order>
struct TileWalk {
    const Workspace& workspace;
    int rank, pairs, step;
    int slabs = kMostSlabs; // of the tiles of this class
    int first = 0, count;   // of the workspace's tiles, in this class
    int turn;               // in this class
    // What is next, and where.
    TokenTile tokens;
    int index; // of tokens in the list
    int n;     // first row of w of this workgroup

    MX_MEMBER TileWalk(const Workspace& workspace, long N, int rank)
        : workspace(workspace), rank(rank) {
        pairs = (N + kCluster * kRows - 1) / (kCluster * kRows);
        turn = blockIdx.x / kCluster;
        step = gridDim.x / kCluster;
        count = workspace.tiles()[kMostSlabs];
        find();
    }
    MX_MEMBER bool any() const { return slabs > 0; }
    MX_MEMBER void next() {
        turn += step;
        find();
    }

  private:
    MX_MEMBER void find() {
        while (turn >= count * pairs) {
            if (--slabs == 0)
                return;
            turn -= count * pairs;
            first += count;
            count = workspace.tiles()[slabs];
        }
        const int super = turn / (Order * pairs) * Order, height = min(Order, count - super);
        const int inside = turn - super * pairs;
        index = first + super + inside % height;
        tokens = workspace.tile()[index];
        n = (inside / height * kCluster + rank) * kRows;
    }
};

// Which stage of the ring is next, and the parity of its barriers' phase.
template <int Stages>
struct StageRing {
    int stage = 0, parity = 0;

    MX_MEMBER void advance() {
        if (++stage == Stages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

} // namespace mx
