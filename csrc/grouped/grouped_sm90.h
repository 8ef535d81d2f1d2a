// What the two launches of a grouped GEMM on Hopper share: how x lies in the workspace.
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

} // namespace mx
