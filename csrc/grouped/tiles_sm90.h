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
//
// With MX_WGRAD the product is the gradient of w (aiter_mx/kernels/grouped_wgrad/problem.py). Then
// x is the gradient of the forward product's result and w its x, both transposed: all groups have
// the same rows of them, and each has its own k, whole chunks of them in the workspace.
#pragma once

#include "common/target.h"
#include "routed_sm90.h"
#include "row_groups_sm90.h"

#ifndef MX_WGRAD
#define MX_WGRAD 0
#endif
#ifndef MX_ACCUMULATE
#define MX_ACCUMULATE 0
#endif

namespace mx {

constexpr bool kWgrad = MX_WGRAD;
constexpr bool kAccumulate = MX_ACCUMULATE; // with MX_WGRAD: y is added to
constexpr int kSlabRows = 64;
constexpr int kMostSlabs = 4; // of a tile
constexpr int kMostRows = kMostSlabs * kSlabRows;
constexpr int kUnitK = 64;
constexpr int kSlabUnitBytes = kSlabRows * kUnitK * 2;
constexpr int kChunkUnits = 2; // of a tile's x that are expanded together
constexpr int kChunkParts = 2; // of a chunk's rows, that are expanded apart
constexpr int kChunksOfWord = 32 / kChunkParts;
constexpr unsigned kWholeChunk = (1 << kChunkParts) - 1;
constexpr unsigned kSomeNan = 1u << 31; // in what counts the consumers that have finished

// Rows of one group, next to each other, that are multiplied together.
struct TokenTile {
    long row; // first, of x and y
    short rows;
    short first; // whether it is the first of a range of its group's
    int group;
    int slab;  // first, of the workspace; with MX_WGRAD the first unit of it
    int index; // in the list
#if MX_WGRAD
    int start, columns; // first k of the group, a multiple of a chunk's, and how many it has
    int word;           // first of those that tell what is expanded
    int unused;
#endif
};

// The k that a tile is a sum over.
struct Depth {
    long start, columns;
};
MX_DEVICE Depth depth_of(const TokenTile& tile, long K) {
#if MX_WGRAD
    return {tile.start, tile.columns};
#else
    return {0, K};
#endif
}

// Chunks of so many k.
MX_DEVICE int chunks_of(long columns) {
    return (columns + kUnitK * kChunkUnits - 1) / (kUnitK * kChunkUnits);
}
MX_DEVICE int words_of(int chunks) { return (chunks + kChunksOfWord - 1) / kChunksOfWord; }

// The parts of the workspace; the host sizes it: aiter_mx/kernels/grouped_gemm. They are computed
// where they are needed, from the kernel's arguments, so that they take no registers.
struct Workspace {
    unsigned char* start;
    long most_tiles, K, w_rows; // w_rows: of all groups
    long most_words, groups;    // with MX_WGRAD: words of all tiles

    MX_MEMBER int units() const { return (K + kUnitK - 1) / kUnitK; } // of a tile
    MX_MEMBER int chunks() const { return (units() + kChunkUnits - 1) / kChunkUnits; }
    MX_MEMBER int words() const { return words_of(chunks()); }
    MX_MEMBER unsigned* after_nans() const { return nans() + w_rows / 32; }
    // With MX_ROUTED: the rows of each group.
    MX_MEMBER int* starts() const { return reinterpret_cast<int*>(after_nans()); }
    MX_MEMBER int* ends() const { return starts() + groups; }
    // With MX_WGRAD: how many groups have no k, and their numbers.
    MX_MEMBER int* empty() const { return tiles() + kMostSlabs + 1; }
    MX_MEMBER int* empty_group() const { return reinterpret_cast<int*>(after_nans()); }
    // Likewise: the first claim of each band of the expansion, and that after the last.
    MX_MEMBER unsigned* bands() const { return after_nans() + groups; }
#if MX_WGRAD
    MX_MEMBER unsigned char* x() const { return up_to_x(bands() + most_tiles + 1); }
    MX_MEMBER long all_words() const { return most_words; }
    MX_MEMBER unsigned long long* expanded(const TokenTile& tile) const {
        return expanded() + tile.word;
    }
    MX_MEMBER static int units(const TokenTile& tile) { return chunks_of(tile.columns) * 2; }
    MX_MEMBER static int words(const TokenTile& tile) { return words_of(chunks_of(tile.columns)); }
    MX_MEMBER unsigned char* x(const TokenTile& tile, int slab) const {
        return x() + (tile.slab + slab * static_cast<long>(units(tile))) * kSlabUnitBytes;
    }
#else
    MX_MEMBER unsigned char* x() const {
        return up_to_x(after_nans() + (kRouted ? 2 * groups : 0));
    }
    MX_MEMBER long all_words() const { return most_tiles * words(); }
    MX_MEMBER unsigned long long* expanded(const TokenTile& tile) const {
        return expanded() + static_cast<long>(tile.index) * words();
    }
    MX_MEMBER int units(const TokenTile&) const { return units(); }
    MX_MEMBER int words(const TokenTile&) const { return words(); }
    MX_MEMBER unsigned char* x(const TokenTile& tile, int slab) const {
        return x() + (tile.slab + slab) * (units() * static_cast<long>(kSlabUnitBytes));
    }
#endif

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
    MX_MEMBER unsigned long long* expanded() const {
        return reinterpret_cast<unsigned long long*>(tile() + most_tiles);
    }
    // A bit for each row of w that has NaN.
    MX_MEMBER unsigned* nans() const {
        return reinterpret_cast<unsigned*>(expanded() + all_words());
    }

    // Nothing is begun or noted yet. By the threads of one workgroup.
    template <int Threads>
    MX_MEMBER void clear(int clusters) const {
        if (threadIdx.x == 0) {
            *finished() = 0;
            *claimed() = 0;
            *begun() = clusters; // each begins with the tile of its own number
        }
        for (long i = threadIdx.x; i < all_words(); i += Threads)
            expanded()[i] = 0;
        for (long i = threadIdx.x; i < w_rows / 32; i += Threads)
            nans()[i] = 0;
    }

  private:
    MX_MEMBER unsigned char* up_to_x(unsigned* end) const {
        return start + (reinterpret_cast<unsigned char*>(end) - start + 1023) / 1024 * 1024;
    }
};

constexpr int kCluster = 2; // workgroups that share a tile's tokens
constexpr int kConsumers = 2;
constexpr int kGroupRows = 64; // of w for a consumer
constexpr int kRows = kConsumers * kGroupRows;
constexpr int kNoTile = 1 << 30; // beyond all

// Tiles of the list are expanded in bands: the first chunk of each tile of the band, then the
// second of each. A band has the tiles that clusters begin with together. With MX_WGRAD an eighth
// of them may begin in the next one: what is expanded long before it is multiplied leaves the L2.
MX_DEVICE int tiles_of_band(int order, int pairs, int clusters) {
    const int counted = kWgrad ? max(clusters - clusters / 8, 1) : clusters;
    return (counted + order * pairs - 1) / (order * pairs) * order;
}

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
constexpr int kWorkPieces = sizeof(Work) / 16;
static_assert(sizeof(Work) == 16 * kWorkPieces, "is sent as vectors");

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
                    return Work{};
            }
            in_tails = !in_tails;
        }
    }
};

} // namespace mx
