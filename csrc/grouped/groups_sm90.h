// What the launches of the grouped GEMM over fp8 under one scale know of groups: the tiles of their
// w, and lists of blocks of 128 rows of x, of which each is of one group:
//
//   block_ends [G]      int, blocks of all groups up to each and with it
//   pair_ends  [G]      likewise pairs of a group's blocks, of which the last may be a lone one
//   busy       [G + 1]  the groups that have rows, behind how many there are
//   starts, ends  [G] each: rows of each group, with MX_ROUTED
//   blocks     [most_blocks]
//
// Of w there are tiles of 128 rows, those of a group one after another; with an activation 64 rows
// of gate and the 64 of up that belong to them.
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

struct GroupSizes {
    long M, N, K; // rows of x, or places; of w of a group
    int groups;

    // Results of a row of a group.
    MX_MEMBER long features() const { return kActivation ? N / 2 : N; }
    // Tiles of w of a group.
    MX_MEMBER int across() const { return (features() + kTileFeatures - 1) / kTileFeatures; }
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

struct BlockOfX {
    int row;  // the first, of all rows of x, or of places
    int rows; // that it has
};

struct GroupLists {
    int* memory;
    int groups, most_blocks;

    MX_MEMBER int* block_ends() const { return memory; }
    MX_MEMBER int* pair_ends() const { return block_ends() + groups; }
    MX_MEMBER int* busy() const { return pair_ends() + groups; }
    MX_MEMBER int* starts() const { return busy() + groups + 1; }
    MX_MEMBER int* ends() const { return starts() + groups; }
    MX_MEMBER BlockOfX* blocks() const {
        return reinterpret_cast<BlockOfX*>(memory + (5 * groups + 2) / 2 * 2);
    }
    MX_MEMBER unsigned* behind() const {
        return reinterpret_cast<unsigned*>(blocks() + most_blocks);
    }

    // Of what ends where `ends` says, before a group, and of it.
    MX_MEMBER static int before(const int* ends, int group) {
        return group > 0 ? ends[group - 1] : 0;
    }
    MX_MEMBER static int count(const int* ends, int group) {
        return ends[group] - before(ends, group);
    }
    // The first group that ends behind so many.
    MX_MEMBER int group_of(const int* ends, int number) const {
        int group = 0;
        for (int left = groups; left > 0;) {
            const int half = left / 2;
            const bool behind = ends[group + half] <= number;
            group += behind ? half + 1 : 0;
            left = behind ? left - half - 1 : half;
        }
        return group;
    }
};

// The parameters of all launches; MX_SIZES are those of a workspace.
#define MX_RESCALED_PARAMETERS                                                                     \
    const unsigned char *xq, const unsigned char *xs, const unsigned char *wq,                     \
        const unsigned char *ws, const void *bias, void *out, const void *starts,                  \
        const void *ends, unsigned char *workspace, long M, long N, long K, long G, int layout,    \
        int index_bytes, int bias_kind, MX_SIZES
#define MX_RESCALED_ROUTED_PARAMETERS                                                              \
    const unsigned char *xq, const unsigned char *xs, const unsigned char *wq,                     \
        const unsigned char *ws, const int *sorted_ids, const int *expert_ids,                     \
        const int *post_padded, const float *, const void *bias, void *out, void *more,            \
        unsigned char *workspace, long M, long N, long K, long G, int valid_tokens, int a_div,     \
        int packed_top_k, int max_blocks, int block_m, int bias_kind, MX_SIZES, float alpha,       \
        float beta, float limit
#if MX_ROUTED
#define MX_PARAMETERS MX_RESCALED_ROUTED_PARAMETERS
#else
#define MX_PARAMETERS MX_RESCALED_PARAMETERS
#endif

} // namespace mx
