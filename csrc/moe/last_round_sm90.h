// How the workgroups of wgmma_f16_sm90.cu share the items that are left over when all have had
// as many.
#pragma once

#include "common/target.h"

namespace mx {

// Items are all tiles of w of a piece after each other, and go to workgroups in turn. Those beyond
// the last whole round go to the workgroups whose items have had the least rows until then. All
// workgroups must find the same: one warp of each, from the lists alone.
struct LastRound {
    static constexpr unsigned kNone = ~0u;
    static constexpr unsigned kOfTile = 24; // what an item takes, where 8 rows of x take 1 more
    static constexpr int kOwned = 5;        // workgroups of a lane
    static constexpr int kInWord = 8;       // pieces, with 4 bits each
    static constexpr unsigned kMostPieces = 2 * kInWord * kLanes;
    static constexpr unsigned kMostRounds = 64; // after more the rest hardly counts

    const unsigned pieces, tiles, rounds, left;

    MX_MEMBER LastRound(unsigned pieces, unsigned tiles)
        : pieces(pieces), tiles(tiles), rounds(pieces * tiles / gridDim.x),
          left(pieces * tiles % gridDim.x) {}
    // Two rounds, as a workgroup's first items are known before this is.
    MX_MEMBER bool is_shared() const {
        return pieces <= kMostPieces && rounds > 1 && rounds <= kMostRounds && left > 0 &&
               gridDim.x <= kOwned * kLanes;
    }
    // The workgroup's item of the last round, or kNone. col_tiles_of: 8 rows of x each, of a piece.
    template <class ColTiles>
    MX_MEMBER unsigned item(int lane, ColTiles col_tiles_of) const {
        unsigned counts[2] = {};
#pragma unroll 1
        for (int i = 0; i < kInWord; ++i)
#pragma unroll
            for (int word = 0; word < 2; ++word) {
                const unsigned piece = (word * kInWord + i) * kLanes + lane;
                if (piece < pieces)
                    counts[word] |= min(col_tiles_of(piece), 15u) << i * 4;
            }
        unsigned done[kOwned], own = 0; // with the workgroup's number, so that no two are the same
#pragma unroll
        for (int i = 0; i < kOwned; ++i) {
            const unsigned workgroup = i * kLanes + lane;
            unsigned piece = workgroup / tiles, tile = workgroup % tiles, cost = 0;
#pragma unroll 1
            for (unsigned r = 0; r < rounds; ++r) {
                const unsigned low = __shfl_sync(~0u, counts[0], piece % kLanes);
                const unsigned high = __shfl_sync(~0u, counts[1], piece % kLanes);
                const unsigned at = piece / kLanes;
                cost += kOfTile + ((at < kInWord ? low : high) >> at % kInWord * 4 & 15);
                piece += gridDim.x / tiles;
                tile += gridDim.x % tiles;
                if (tile >= tiles) {
                    tile -= tiles;
                    ++piece;
                }
            }
            done[i] = workgroup < gridDim.x ? cost * (kOwned * kLanes) + workgroup : ~0u;
            const unsigned found = __shfl_sync(~0u, done[i], blockIdx.x % kLanes);
            own = blockIdx.x / kLanes == i ? found : own;
        }
        unsigned ahead = 0; // workgroups that have had less
#pragma unroll
        for (unsigned other : done)
            ahead += other < own;
        ahead = __reduce_add_sync(~0u, ahead);
        return ahead < left ? pieces * tiles - left + ahead : kNone;
    }
};

} // namespace mx
