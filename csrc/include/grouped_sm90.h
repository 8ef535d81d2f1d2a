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

#include "mx_target.h"

namespace mx {

constexpr int kSlabRows = 64;
constexpr int kMostSlabs = 4; // of a tile
constexpr int kUnitK = 64;
constexpr int kSlabUnitBytes = kSlabRows * kUnitK * 2;
constexpr int kFlagsOfSlab = 8; // parts of K that are expanded apart

// Rows of one group that are multiplied together.
struct TokenTile {
    long row; // first, of x and y
    int rows;
    int group;
    int slab; // first, of the workspace
    int padding;
};

// The parts of the workspace; the host sizes it: aiter_mx/kernels/grouped_gemm.
struct Workspace {
    int* tiles;             // how many of 1, 2, .. kMostSlabs slabs, from index 1
    TokenTile* tile;        // those of most slabs first
    unsigned char* outside; // of each slab kFlagsOfSlab: whether bf16 does not cover all scales
    unsigned char* x;

    MX_MEMBER Workspace(void* start, long most_tiles, long most_slabs) {
        unsigned char* at = static_cast<unsigned char*>(start);
        tiles = reinterpret_cast<int*>(at);
        at += 128;
        tile = reinterpret_cast<TokenTile*>(at);
        at += (most_tiles * static_cast<long>(sizeof(TokenTile)) + 127) / 128 * 128;
        outside = at;
        at += (most_slabs * kFlagsOfSlab + 1023) / 1024 * 1024;
        x = at;
    }
};

} // namespace mx
