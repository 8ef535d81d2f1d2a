// The frame of the Hopper kernels of moe_gemm over wgmma: sizes, what columns of x a lane has sums
// of, and how workgroups share the work. A kernel includes this, defines struct Shared, the layout
// of its shared memory, and set_up_barriers_of_x, and then includes wgmma_roles_sm90.h.
#pragma once

#include "common/quantize.h"
#include "common/scale.h"
#include "common/target.h"
#include "moe_sm90.h"
#include "sm90/tma.h"

namespace mx {

constexpr int kGroupWarps = 4, kGroupThreads = kGroupWarps * kLanes;

// Of pair p of values of a lane, those of one row of w: columns of x.
MX_DEVICE int column_of(int tile, int c, int lane) { return tile * 8 + lane % 4 * 2 + c; }

// A warpgroup has a block of 32 activated features, and a lane one of them in some columns of x.
// First each warp notes the largest magnitude of its 8 features of a column; after a barrier that
// of all is found.
template <int Columns>
MX_DEVICE void note_largest(unsigned (&amaxes)[kGroupWarps][Columns], float value, int column,
                            int warp, int lane) {
    unsigned amax = magnitude_bits(value);
#pragma unroll
    for (int distance = 4; distance < kLanes; distance *= 2)
        amax = max(amax, __shfl_xor_sync(~0u, amax, distance));
    if (lane < 4)
        amaxes[warp][column] = amax;
}

template <int Columns>
MX_DEVICE unsigned largest_of(const unsigned (&amaxes)[kGroupWarps][Columns], int column) {
    unsigned amax = amaxes[0][column];
#pragma unroll
    for (int v = 1; v < kGroupWarps; ++v)
        amax = max(amax, amaxes[v][column]);
    return amax;
}

// Workgroups share the items that are left over when all have had as many.

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

// Workgroups share pieces that are fewer than they are.

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

constexpr int kColTiles = MX_COL_TILES;          // 8 rows of x each
constexpr int kGroups = MX_GROUPS;               // warpgroups that add
constexpr int kTiles = MX_TILES;                 // parts of 64 rows of w of each
constexpr int kDepth = MX_DEPTH;                 // stages of the ring of weights, 128 k each
constexpr int kSlots = MX_SLOTS;                 // chunks of x that are ready, or about to be
constexpr int kAhead = MX_AHEAD;                 // chunks of x on their way before those
constexpr bool kResident = MX_RESIDENT;          // kSlots are all of K
constexpr bool kEarlyRouting = MX_EARLY_ROUTING; // it is older than the kernel ahead
constexpr bool kFp8 = MX_FP8;                    // nothing becomes fp16: fewer warps bring x
constexpr int kActivation = MX_ACTIVATION;
constexpr bool kActivated = kActivation != kNoActivation;
constexpr bool kHalves = kActivated && !MX_INTERLEAVED; // gate and up rows are N / 2 apart
using Out = DType<kActivated ? kF32 : MX_OUT>;

// Warpgroups: those that add, one that makes x fp16, one for scales of w, and one that starts
// copies.
constexpr int kAddWarps = kGroups * kGroupWarps;
constexpr int kBringGroups = kFp8 ? 1 : 3, kFetchWarps = kGroupWarps - 1;
constexpr int kThreads = (kGroups + kBringGroups) * kGroupThreads;
// Registers move from the warps that bring to those that add.
constexpr int kBringingRegisters = kFp8 ? 56 : 48;
constexpr int kPool = 65536 / kThreads / 8 * 8 * kThreads;
constexpr int kMostRegisters =
    (kPool - kBringGroups * kGroupThreads * kBringingRegisters) / (kGroups * kGroupThreads) / 8 * 8;
constexpr int kAddingRegisters = kMostRegisters < 232 ? kMostRegisters : 232;

constexpr int kGroupRows = 64;                           // of w, of a part of a warpgroup
constexpr int kParts = kGroups * kTiles;                 // of a tile
constexpr int kRows = kParts * kGroupRows;               // of a tile
constexpr int kBoxRows = kGroupRows / (kHalves ? 2 : 1); // gate rows and up rows, or both
constexpr int kStageBytes = kGroupRows * kChunk;
constexpr int kCols = kColTiles * 8;
// Blocks are joined where each tile is another entry. Where x stays, to know how many pieces there
// are would delay the start by more than it is worth; with two parts, experts have many rows.
constexpr int kJoinedIds = kResident || kTiles > 1 ? 0 : kCols;
using Walk = MoeWalk<(kCols + kLanes - 1) / kLanes * kLanes, kJoinedIds>;

// With an activation, a round more or less is worth less than it takes to find out.
constexpr bool kSharesLast = kTiles > 1 && !kActivated;
constexpr int kFeatures = kActivated ? kRows / 2 : kRows; // of the result, of a tile
MX_DEVICE unsigned tiles_of(const MoeArgs& a) {
    return (static_cast<unsigned>(a.N) + kRows - 1) / kRows;
}
// The row of an expert's w that is row r of a part of a tile; of those past the last one, the last.
MX_DEVICE unsigned row_of_w(const MoeArgs& a, unsigned tile, int part, unsigned r) {
    const unsigned rows = a.N, first = (tile * kParts + part) * kBoxRows;
    if constexpr (!kHalves)
        return min(first + r, rows - 1);
    return min(first + r % kBoxRows, rows / 2 - 1) + r / kBoxRows * (rows / 2);
}
// The row of that part that is row i of two of a lane of a warp of the group. Where gate and up
// rows do not lie apart they are neighbours; which is the first of the two turns in the middle, so
// that 8 lanes' rows are on different banks.
MX_DEVICE int row_of(int warp, int lane, int i) {
    const int g = lane / 4;
    return kHalves ? i * kBoxRows + warp * 8 + g : warp * 16 + g * 2 + (i ^ g >> 2);
}
// Where K is a multiple of 512, scales of so many chunks are loaded at once.
constexpr bool kLongScales = MX_LONG_SCALES;
constexpr int kVectorChunks = 16 / kBlocks;
// Of x such a load lies in shared memory until all that it is for has been expanded.
constexpr int kScaleChunks = kLongScales ? kVectorChunks : 1;
constexpr int kScalePlaces = (kAhead + 2 * (kScaleChunks - 1)) / kScaleChunks;
constexpr int kPieces = kChunk / 16;        // of 16 k, of a chunk
constexpr int kStepBytes = 32 * kCols + 16; // x of 16 k; the next is in other banks
constexpr int kPasses = kCols / 16;         // of the threads that bring x over its rows
static_assert(kCols % 16 == 0, "all threads that bring x have as many rows");
constexpr int kEntries = 4;
constexpr unsigned kPollNs = 40; // a fraction of what a warpgroup takes for 128 k

// What the workgroup sums up: rows of x by some tiles of w.
struct alignas(16) Entry {
    int t[kCols];          // routed rows, or -1
    float weights[kCols];  // of the routing
    int x_row[kCols];      // of x, or -1
    float x_power[kCols];  // what sums are to be multiplied with
    unsigned x_top[kCols]; // the scale to which a row of x is relative
    int x_outside[kCols];  // whether a row of x has scales too far apart
    int expert;            // -1: there is nothing more
    unsigned tile, end;    // from, to
    int col_tiles;         // that have rows
    int any_x_outside;
};

} // namespace mx
