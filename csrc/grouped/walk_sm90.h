// How the grouped GEMM's clusters go over the tiles, and its warpgroups over the ring of stages.
#pragma once

#include "grouped_sm90.h"

namespace mx {

constexpr int kCluster = 2; // workgroups that share a tile's tokens
constexpr int kConsumers = 2;
constexpr int kGroupRows = 64; // of w for a consumer
constexpr int kRows = kConsumers * kGroupRows;
constexpr int kNoTile = 1 << 30; // beyond all

// How the rows of a w are cut into those of tiles. Where one or two consumers of a tile would have
// none, two slabs are a tail: each workgroup has both, and half of the tokens. One slab is no tail:
// what its x takes from the L2 would make it as long as a whole tile.
struct Columns {
    int panels, tail; // tiles but for the tail; whether there is one

    MX_MEMBER explicit Columns(long N) {
        constexpr int rows = kCluster * kRows;
        const int slabs = (N % rows + kGroupRows - 1) / kGroupRows;
        tail = slabs == kConsumers;
        panels = N / rows + (slabs != 0 && !tail);
    }
};

// The tiles of the list where a consumer has so many slabs of a tail.
struct Tails {
    int first = 0, count = 0;

    MX_MEMBER Tails(const Columns& columns, int slabs, const int* tiles) {
        const int wide = tiles[4] + tiles[3];
        if (columns.tail && slabs == 2)
            count = wide;
        else if (columns.tail && slabs == 1)
            first = wide, count = tiles[2] + tiles[1];
    }
};

// A tile of the product.
struct Work {
    TokenTile tokens;
    int n;       // first row of w of the cluster
    short slabs; // of tokens that a consumer multiplies; 0 after the last tile
    short tail;  // whether it is one of a tail
};
static_assert(sizeof(Work) == 32, "is sent as two vectors");

// The tiles in the order in which clusters begin them: those where a consumer has most slabs first.
template <int Order>
struct TileWalk {
    const Workspace& workspace;
    const Columns columns;
    int slabs = kMostSlabs, first = 0;
    bool in_tails = false;
    unsigned before = 0; // turns of the kinds before

    MX_MEMBER TileWalk(const Workspace& workspace, long N) : workspace(workspace), columns(N) {}

    // The tile of a turn; those asked for grow.
    MX_MEMBER Work at(unsigned turn) {
        while (true) {
            const int* tiles = workspace.tiles();
            const Tails tails(columns, slabs, tiles);
            const int from = in_tails ? tails.first : first;
            const int count = in_tails ? tails.count : tiles[slabs];
            const int panels = in_tails ? 1 : columns.panels;
            const unsigned inside = turn - before;
            if (inside < static_cast<unsigned>(count * panels)) {
                const int super = inside / (Order * panels) * Order;
                const int height = min(Order, count - super), place = inside - super * panels;
                Work work;
                work.tokens = workspace.tile()[from + super + place % height];
                work.n = (in_tails ? columns.panels : place / height) * kCluster * kRows;
                work.slabs = slabs;
                work.tail = in_tails;
                return work;
            }
            before += count * panels;
            if (in_tails) {
                first += tiles[slabs];
                if (--slabs == 0)
                    return Work{{}, 0, 0, 0};
            }
            in_tails = !in_tails;
        }
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
