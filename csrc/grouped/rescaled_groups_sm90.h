// What the launches of the grouped GEMM over fp8 under one scale hand each other: operands as
// rescaled_sm90.h has them, 128 rows of x for each tile, which are of one group, and a ring of
// tiles of w; and in place of counters and sums
//
//   tile_ends  [G]      int, tiles of x of all groups up to each and with it
//   busy       [G + 1]  int, the groups that have rows, behind how many there are
//   starts, ends  [G] each, int: rows of each group, with MX_ROUTED
//   tiles      [most_tiles]
//   claimed    [2]      blocks of w, and tiles of results, that CTAs have taken; cleared
//   ready, used  [tiles of w] each: of a tile of w the steps that are in the ring, and the products
//                       that have read it; cleared
//
// Rows of a tile that its group has not are zeros. Of w there are tiles of 128 rows, too, those of
// a group one after another; with an activation 64 rows of gate and the 64 of up that belong to
// them. Numbers of tiles of w pass over groups without rows, and tile t has place t % room of the
// ring.
#pragma once

#include "../linear/rescaled_sm90.h"
#include "common/target.h"
#include "routed_sm90.h"
#include "row_groups_sm90.h"

namespace mx {

constexpr int kTileRows = RescaledOperands::kRows;
// Features of results that a tile has.
constexpr int kTileFeatures = kActivation ? kTileRows / 2 : kTileRows;
// Rows of w that follow one another, of a tile's.
constexpr int kRunRows = kActivation && !kInterleaved ? kTileFeatures : kTileRows;

struct TileOfX {
    int row;  // the first, of all rows of x, or of places
    int rows; // that it has
};

struct GroupWorkspace {
    unsigned char* memory;
    long M, N, K; // rows of x, or places; of w of a group
    int groups;
    int most_tiles; // of x
    int room;       // tiles of w in the ring

    // The same, so that compilers work out anew what follows from it, for which registers have no
    // room meanwhile.
    MX_MEMBER GroupWorkspace anew() const {
        GroupWorkspace same = *this;
        asm volatile("" : "+r"(same.most_tiles), "+r"(same.room));
        return same;
    }
    MX_MEMBER RescaledOperands operands() const {
        return {memory, static_cast<long>(most_tiles) * kTileRows,
                static_cast<long>(room) * kTileRows, K};
    }
    MX_MEMBER int* tile_ends() const { return reinterpret_cast<int*>(operands().ended()); }
    MX_MEMBER int* busy() const { return tile_ends() + groups; }
    MX_MEMBER int* starts() const { return busy() + groups + 1; }
    MX_MEMBER int* ends() const { return starts() + groups; }
    MX_MEMBER TileOfX* tiles() const {
        return reinterpret_cast<TileOfX*>(tile_ends() + (4 * groups + 2) / 2 * 2);
    }
    MX_MEMBER unsigned* claimed() const {
        return reinterpret_cast<unsigned*>(tiles() + most_tiles);
    }
    MX_MEMBER unsigned* ready() const { return claimed() + 2; }
    MX_MEMBER unsigned* used() const { return ready() + groups * across(); }
    // Words from claimed() on that are cleared.
    MX_MEMBER int counters() const { return 2 + 2 * groups * across(); }
    // Results of a row of a group.
    MX_MEMBER long features() const { return kActivation ? N / 2 : N; }
    // Tiles of w of a group.
    MX_MEMBER int across() const { return (features() + kTileFeatures - 1) / kTileFeatures; }
    // Tiles of x of a group, and which of all tiles is its first.
    MX_MEMBER int first_of_x(int group) const { return group > 0 ? tile_ends()[group - 1] : 0; }
    MX_MEMBER int count_of_x(int group) const { return tile_ends()[group] - first_of_x(group); }
    // Which row of its group's w is the i-th of a tile's 128, or -1.
    MX_MEMBER long w_row(int tile, int i) const {
        if constexpr (kActivation && !kInterleaved) {
            const long feature = tile * static_cast<long>(kTileFeatures) + i % kTileFeatures;
            return feature < features() ? i / kTileFeatures * features() + feature : -1;
        }
        const long row = tile * static_cast<long>(kTileRows) + i;
        return row < N ? row : -1;
    }
};

// The parameters of all launches.
#define MX_RESCALED_PARAMETERS                                                                     \
    const unsigned char *xq, const unsigned char *xs, const unsigned char *wq,                     \
        const unsigned char *ws, const void *bias, void *out, const void *starts,                  \
        const void *ends, unsigned char *workspace, long M, long N, long K, long G, int layout,    \
        int index_bytes, int bias_kind, int most_tiles, int room, int panel
#define MX_RESCALED_ROUTED_PARAMETERS                                                              \
    const unsigned char *xq, const unsigned char *xs, const unsigned char *wq,                     \
        const unsigned char *ws, const int *sorted_ids, const int *expert_ids,                     \
        const int *post_padded, const float *, const void *bias, void *out, void *more,            \
        unsigned char *workspace, long M, long N, long K, long G, int valid_tokens, int a_div,     \
        int packed_top_k, int max_blocks, int block_m, int bias_kind, int most_tiles, int room,    \
        int panel, float alpha, float beta, float limit

} // namespace mx
