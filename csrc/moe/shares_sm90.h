// How the workgroups of wgmma_f16_sm90.cu share pieces that are fewer than they are.
#pragma once

#include "common/target.h"

namespace mx {

// Parts of `left` pieces, one after the other for each workgroup, whose sizes make all workgroups
// end together: those whose whole pieces had few rows take more. One warp, of which a lane has
// every kLanes-th workgroup and every kLanes-th of these pieces.
struct PieceShares {
    static constexpr int kOwned = 5;   // of a lane
    static constexpr int kRounds = 16; // of whole pieces; after more the rest hardly counts

    const int lane;
    const unsigned workgroups, whole, left, tiles; // pieces of both kinds; tiles of each
    unsigned costs[kOwned];                        // of the lane's pieces that are left
    unsigned before = 0, own = 0, all = 0; // of these: ahead of this workgroup's; its; of all

    // cost_of: of a piece, some hundreds or thousands.
    template <class Cost>
    MX_MEMBER PieceShares(int lane, unsigned whole, unsigned pieces, unsigned tiles, Cost cost_of)
        : lane(lane), workgroups(gridDim.x), whole(whole), left(pieces - whole), tiles(tiles) {
        if (!are_by_cost())
            return;
        unsigned done[kOwned], least = ~0u; // of each workgroup's whole pieces
#pragma unroll
        for (int i = 0; i < kOwned; ++i) {
            const unsigned w = i * kLanes + lane;
            costs[i] = w < left ? cost_of(whole + w) : 0;
            done[i] = w < workgroups ? 0 : ~0u;
            if (w < workgroups)
                for (unsigned piece = w; piece < whole; piece += workgroups)
                    done[i] += cost_of(piece);
            least = min(least, done[i]);
            all += costs[i];
        }
        all = __reduce_add_sync(~0u, all);
        // The least level up to which all can be filled.
        unsigned below = __reduce_min_sync(~0u, least), level = below + all;
        while (level - below > 1) {
            const unsigned middle = below + (level - below) / 2;
            (sum_to(middle, done, ~0u) < all ? below : level) = middle;
        }
        before = sum_to(level, done, blockIdx.x);
        own = sum_to(level, done, blockIdx.x + 1) - before;
    }
    MX_MEMBER bool are_by_cost() const {
        return whole > 0 && whole <= kRounds * workgroups && workgroups <= kOwned * kLanes;
    }
    // What it takes to fill the first `count` workgroups up to a level.
    MX_MEMBER unsigned sum_to(unsigned level, const unsigned (&done)[kOwned],
                              unsigned count) const {
        unsigned sum = 0;
#pragma unroll
        for (int i = 0; i < kOwned; ++i)
            if (level > done[i] && static_cast<unsigned>(i * kLanes + lane) < count)
                sum += level - done[i];
        return __reduce_add_sync(~0u, sum);
    }
    // The item, of all tiles of the pieces that are left, at which a cost is reached.
    MX_MEMBER unsigned long item_at(unsigned cost) const {
        if (cost == 0)
            return 0; // all of the first piece, whatever it costs
        unsigned ahead = 0;
        unsigned long item = left * static_cast<unsigned long>(tiles);
#pragma unroll
        for (int i = 0; i < kOwned; ++i) {
            unsigned end = costs[i];
#pragma unroll
            for (int distance = 1; distance < kLanes; distance *= 2) {
                const unsigned other = __shfl_up_sync(~0u, end, distance);
                end += lane >= distance ? other : 0;
            }
            const unsigned into = cost - ahead - (end - costs[i]);
            const unsigned here = __ballot_sync(~0u, into < costs[i]);
            if (here != 0) {
                const int at = __ffs(here) - 1;
                const unsigned long piece = i * kLanes + at;
                item = piece * tiles + __shfl_sync(~0u, into * tiles / max(costs[i], 1u), at);
            }
            ahead += __shfl_sync(~0u, end, kLanes - 1);
        }
        return item;
    }
    MX_MEMBER unsigned long first() const {
        if (are_by_cost())
            return item_at(before);
        return left * static_cast<unsigned long>(tiles) * blockIdx.x / workgroups;
    }
    MX_MEMBER unsigned long last() const {
        if (are_by_cost())
            return item_at(before + own);
        return left * static_cast<unsigned long>(tiles) * (blockIdx.x + 1) / workgroups;
    }
};

} // namespace mx
