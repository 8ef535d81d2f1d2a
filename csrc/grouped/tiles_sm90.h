// The two launches of a grouped GEMM on Hopper share these facts: how x lies in the workspace,
// which rows each group has, and the order of tiles.
//
// x is expanded to bf16 before it is multiplied. Rows of a group start at a slab of 64 rows of
// their own; a tile is up to 4 slabs of one group. A slab is a sequence of units of 64 k:
//
//   slab:  unit of k 0..63 (8 KiB) | unit of k 64..127 | ...
//   unit:  rows 0..7 (1 KiB) | rows 8..15 | ...
//   1 KiB: k 0..15 (256 bytes) | k 16..31 | k 32..47 | k 48..63
//   256:   16 bytes a row of even k | 16 bytes a row of odd k
//
// which is how wgmma takes its B from shared memory, so that a unit of a tile is one copy a slab.
#pragma once

#include "common/target.h"

namespace mx {

constexpr int kSlabRows = 64;
constexpr int kMostSlabs = 4; // of a tile
constexpr int kUnitK = 64;
constexpr int kSlabUnitBytes = kSlabRows * kUnitK * 2;
constexpr int kChunkUnits = 2; // of a tile's x that are expanded together
constexpr int kChunkParts = 2; // of a chunk's rows, that are expanded apart
constexpr int kChunksOfWord = 32 / kChunkParts;
constexpr unsigned kWholeChunk = (1 << kChunkParts) - 1;
constexpr unsigned kSomeNan = 1u << 31; // in what counts the consumers that have finished

// Rows of one group that are multiplied together.
struct TokenTile {
    long row; // first, of x and y
    short rows;
    short first; // whether it is the first of its group
    int group;
    int slab;  // first, of the workspace
    int index; // in the list
};

// The parts of the workspace; the host sizes it: aiter_mx/kernels/grouped_gemm. They are computed
// where they are needed, from the kernel's arguments, so that they take no registers.
struct Workspace {
    unsigned char* start;
    long most_tiles, K, w_rows; // w_rows: of all groups

    MX_MEMBER int units() const { return (K + kUnitK - 1) / kUnitK; } // of a tile
    MX_MEMBER int chunks() const { return (units() + kChunkUnits - 1) / kChunkUnits; }
    MX_MEMBER int words() const { return (chunks() + kChunksOfWord - 1) / kChunksOfWord; }

    // How many tiles of 1, 2, .. kMostSlabs slabs there are, from index 1.
    MX_MEMBER int* tiles() const { return reinterpret_cast<int*>(start); }
    // How many consumers have stored all that they will, and whether w has NaN.
    MX_MEMBER unsigned* finished() const { return reinterpret_cast<unsigned*>(start + 64); }
    // How many parts of chunks someone expands or has expanded.
    MX_MEMBER unsigned* claimed() const { return reinterpret_cast<unsigned*>(start + 128); }
    // How many of the product's tiles clusters have begun.
    MX_MEMBER unsigned* begun() const { return reinterpret_cast<unsigned*>(start + 192); }
    // Tiles, those of most slabs first.
    MX_MEMBER TokenTile* tile() const { return reinterpret_cast<TokenTile*>(start + 256); }
    // Of each kChunksOfWord chunks of a tile: a bit for each part that is there; in the upper half,
    // whether it has scales that bf16 does not cover.
    MX_MEMBER unsigned long long* expanded(long of_tile) const {
        return reinterpret_cast<unsigned long long*>(tile() + most_tiles) + of_tile * words();
    }
    // A bit for each row of w that has NaN.
    MX_MEMBER unsigned* nans() const { return reinterpret_cast<unsigned*>(expanded(most_tiles)); }
    MX_MEMBER unsigned char* x() const {
        return start + ((reinterpret_cast<unsigned char*>(nans()) - start) + w_rows / 8 + 1023) /
                           1024 * 1024;
    }
};

// Which rows of x each group has: aiter_mx/kernels/grouped_gemm/problem.py says what the host
// passes. Whatever the bounds, no row outside 0 .. rows - 1 is named.

struct RowRange {
    long begin, end;
};

struct RowGroups {
    const void *starts, *ends;
    long rows, count;
    int layout, index_bytes;

    MX_MEMBER RowRange range(long group) const {
        constexpr int masked = 1;
        if (layout == masked) {
            const long room = rows / count;
            const long begin = group * room;
            return {begin, begin + cut(at(ends, group), room)};
        }
        const long end = ends ? cut(at(ends, group), rows) : rows;
        const long begin = starts          ? cut(at(starts, group), rows)
                           : group && ends ? cut(at(ends, group - 1), rows)
                                           : 0;
        return {begin, max(begin, end)};
    }

  private:
    MX_MEMBER static long cut(long bound, long most) { return min(max(bound, 0l), most); }
    MX_MEMBER long at(const void* bounds, long group) const {
        return index_bytes == 4 ? static_cast<const int*>(bounds)[group]
                                : static_cast<const long*>(bounds)[group];
    }
};

constexpr int kCluster = 2; // workgroups that share a tile's tokens
constexpr int kConsumers = 2;
constexpr int kGroupRows = 64; // of w for a consumer
constexpr int kRows = kConsumers * kGroupRows;
constexpr int kNoTile = 1 << 30; // beyond all

// The rows of a w are cut into those of tiles. Where one or two consumers of a tile would have
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

} // namespace mx
