// The layout of shared memory in wgmma_f16_sm90.cu, and their warps
// that look up what there is to do and bring weights.
#pragma once

#include "common/scale.h"
#include "common/target.h"
#include "groups_sm90.h"
#include "last_round_sm90.h"
#include "moe_sm90.h"
#include "shares_sm90.h"
#include "sm90/f16_factors.h"
#include "sm90/tma.h"

namespace mx {

constexpr int kColTiles = MX_COL_TILES;          // 8 rows of x each
constexpr int kGroups = MX_GROUPS;               // warpgroups that add
constexpr int kTiles = MX_TILES;                 // parts of 64 rows of w of each
constexpr int kDepth = MX_DEPTH;                 // stages of the ring of weights, 128 k each
constexpr int kSlots = MX_SLOTS;                 // chunks of x that are ready, or about to be
constexpr int kAhead = MX_AHEAD;                 // chunks of x on their way before those
constexpr bool kResident = MX_RESIDENT;          // kSlots are all of K
constexpr bool kEarlyRouting = MX_EARLY_ROUTING; // it is older than the kernel ahead
#ifdef MX_OUTER
constexpr bool kOuter = true; // wgmma_fp8_sm90.cu, whose warps that bring do less
#else
constexpr bool kOuter = false;
#endif
constexpr int kActivation = MX_ACTIVATION;
constexpr bool kActivated = kActivation != kNoActivation;
constexpr bool kHalves = kActivated && !MX_INTERLEAVED; // gate and up rows are N / 2 apart
using Out = DType<kActivated ? kF32 : MX_OUT>;

// Warpgroups: those that add, one that makes x fp16, one for scales of w, and one that starts
// copies.
constexpr int kAddWarps = kGroups * kGroupWarps;
constexpr int kBringGroups = kOuter ? 1 : 3, kFetchWarps = kGroupWarps - 1;
constexpr int kThreads = (kGroups + kBringGroups) * kGroupThreads;
// Registers move from the warps that bring to those that add.
constexpr int kBringingRegisters = kOuter ? 56 : 48;
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

#ifdef MX_OUTER
#include "wgmma_fp8_shared_sm90.h"
#else
#include "boxes_shared_sm90.h"
#endif

namespace mx {

// Scales of four chunks of a row: 16 bytes, or words where these begin at no multiple of 16.
MX_DEVICE void load_scales(unsigned (&words)[kVectorChunks], const unsigned char* from) {
    if (__builtin_expect(reinterpret_cast<unsigned long>(from) % 16 == 0, true)) {
        const u32x4 v = load(from);
#pragma unroll
        for (int i = 0; i < kVectorChunks; ++i)
            words[i] = v[i];
        return;
    }
#pragma unroll
    for (int i = 0; i < kVectorChunks; ++i)
        words[i] = load_word(from + i * kBlocks);
}

// Rows are held relative to their largest scale, or to the nearest of these, so that the powers of
// two of a row of x and one of w are a float, and a row of zeros needs nothing more. Of a row
// beyond the last nothing is held.
constexpr unsigned kFirstTop = 74, kLastTop = 194, kNoTop = 512;
MX_DEVICE unsigned top_to_use(unsigned top) {
    return top > kLastTop ? kNoTop : max(top, kFirstTop);
}
// What a row's sums are to be multiplied with, and the exponent of that float.
MX_DEVICE unsigned exponent_of(unsigned top) {
    return top == kNoTop ? 127 : top + 15 - kTopExponent;
}
MX_DEVICE float power_of(unsigned top) { return bits_to_float(exponent_of(top) << 23); }
// Those of four blocks.
MX_DEVICE unsigned factors_of(unsigned scales, unsigned top) {
    constexpr unsigned each = 0x01010101;
    const unsigned below = top * each - scales; // where it is right, no byte borrows
    const unsigned nan = ((scales & 0x7f * each) + each) & scales;
    const unsigned far = (below + (128 - kTopExponent) * each) | below | nan;
    if (__builtin_expect(!(far & 0x80 * each) && top != kNoTop, true))
        return (kTopExponent * each - below) << 2;
    unsigned factors = 0;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
        factors |= factor_byte(scales >> 8 * b & 255, top) << 8 * b;
    return factors;
}

// The largest of some scales that are numbers.
struct Largest {
    unsigned even = 0, odd = 0; // one more than the largest, of two bytes each

    MX_MEMBER void take(unsigned scales) {
        constexpr unsigned bytes = 0x00ff00ff, one = 0x00010001;
        even = __vmaxu2(even, ((scales & bytes) + one) & bytes); // kNanScale becomes 0
        odd = __vmaxu2(odd, ((scales >> 8 & bytes) + one) & bytes);
    }
    MX_MEMBER unsigned both() const { return __vmaxu2(even, odd); }
    MX_MEMBER static unsigned of(unsigned both) {
        return top_to_use(max(max(both & 0xffff, both >> 16), 1u) - 1);
    }
};

// Fills the queue: entries are the pieces of the routing with the tiles of w that are this
// workgroup's.
struct Opener {
    const MoeArgs& a;
    Shared& shared;
    const int lane;
    Walk walk;
    Turn<kEntries> turn;
    int given = 0, rows = 0;           // columns of the walk's rows, in the queue and all
    unsigned pieces = 0;               // where x is resident
    unsigned long first = 0, last = 0; // items of the last part, there
    bool in_parts;                     // not whole pieces
    unsigned items = 0;                // opened

    // Where x is resident, a workgroup has successive tiles. As long as there is a piece for each
    // workgroup, each takes a whole one: blocks of one expert are then under way at the same time,
    // and read its weights from memory but once. Tiles of the pieces that are left over are shared.
    MX_MEMBER Opener(const MoeArgs& a, Shared& shared, int lane)
        : a(a), shared(shared), lane(lane), walk(a, tiles_of(a), lane, !kResident),
          in_parts(!kResident) {
        if constexpr (kResident) {
            walk.padded = *a.padded;
            pieces = blocks() * walk.pieces_of_block();
            walk.next_piece = blockIdx.x;
            walk.next_tile = 0;
            walk.step_pieces = gridDim.x;
            walk.step_tiles = 0;
            walk.end_piece = pieces / gridDim.x * gridDim.x;
            if (walk.end_piece == 0)
                begin_parts();
            else
                walk.look_ahead();
        }
    }
    // About what a piece takes: for each tile of w, and for rows of x besides.
    MX_MEMBER unsigned cost_of(unsigned piece) const {
        constexpr unsigned unit = 64, of_tile = 32 * unit; // measured for K = 768
        int first_id;
        const unsigned block = walk.block_of(piece, first_id);
        const int* const ids = a.ids + block * static_cast<long>(a.block_m) + first_id;
        const int count = min(a.block_m - first_id, Walk::kPiece);
        unsigned cost = of_tile;
#pragma unroll
        for (int m = 0; m < Walk::kPiece; m += 8)
            if (m < count && routed_row(ids[m], a.num_valid, a.packed_top_k) >= 0)
                cost += unit + (m > 0 && m % kCols == 0 ? of_tile : 0);
        return cost;
    }
    MX_MEMBER void begin_parts() {
        in_parts = true;
        const PieceShares shares(lane, walk.end_piece, pieces, walk.tiles,
                                 [&](unsigned piece) { return cost_of(piece); });
        const unsigned long start = walk.end_piece * static_cast<unsigned long>(walk.tiles);
        first = start + shares.first();
        last = start + shares.last();
        walk.next_piece = first / walk.tiles;
        walk.step_pieces = 1;
        walk.end_piece = first == last ? 0 : (last + walk.tiles - 1) / walk.tiles;
        walk.look_ahead();
    }
    // Of the open piece.
    MX_MEMBER unsigned first_tile() const {
        if (!kResident)
            return walk.tile;
        const unsigned long start = (walk.next_piece - 1) * static_cast<unsigned long>(walk.tiles);
        return in_parts ? max(first, start) - start : 0;
    }
    MX_MEMBER unsigned end_tile() const {
        if (!kResident)
            return walk.tile + 1;
        const unsigned long start = (walk.next_piece - 1) * static_cast<unsigned long>(walk.tiles);
        return in_parts ? min(last, start + walk.tiles) - start : walk.tiles;
    }
    // The walk's next rows, if there are any.
    MX_MEMBER bool next() {
        const auto absent = [&] {
            const unsigned end = end_tile();
            for (unsigned tile = first_tile(); tile < end; ++tile) {
                walk.tile = tile;
                store_zeros<Out, kFeatures, kActivated>(a, walk, 0, 1);
            }
        };
        return walk.next(absent, true, [&] {
            if constexpr (kSharesLast)
                share_last_round();
        });
    }
    // Once the next item would be of the round that is not whole, finds the workgroup's, if any.
    MX_MEMBER void share_last_round() {
        const LastRound last(blocks() * walk.pieces_of_block(), walk.tiles);
        if (++items != last.rounds || !last.is_shared())
            return;
        const unsigned item = last.item(lane, [&](unsigned piece) { return col_tiles_of(piece); });
        constexpr unsigned beyond = 1u << 30; // all pieces
        walk.next_piece = item == LastRound::kNone ? beyond : item / walk.tiles;
        walk.next_tile = item == LastRound::kNone ? 0 : item % walk.tiles;
    }
    MX_MEMBER unsigned blocks() const {
        return min((walk.padded + a.block_m - 1) / a.block_m, a.max_blocks);
    }
    // Of a piece, 8 rows of x each, if its ids come first.
    MX_MEMBER unsigned col_tiles_of(unsigned piece) const {
        int first_id;
        const unsigned block = walk.block_of(piece, first_id);
        const int* const ids = a.ids + block * static_cast<long>(a.block_m) + first_id;
        const int count = min(a.block_m - first_id, Walk::kPiece);
        unsigned found = 0;
#pragma unroll
        for (int m = 0; m < Walk::kPiece; m += 8)
            found += m < count && routed_row(ids[m], a.num_valid, a.packed_top_k) >= 0;
        return found;
    }
    // Returns whether there is one more.
    MX_MEMBER bool open() {
        barrier_wait(shared_address(shared.closed + turn.at), turn.parity ^ 1);
        Entry& to = shared.queue[turn.at];
        bool more = given < rows;
        if (!more) {
            more = next();
            if (!more && !in_parts) {
                begin_parts();
                more = next();
            }
            given = 0;
            rows = walk.col_tiles() * 8;
        }
        if (more)
#pragma unroll
            for (int i = 0; i < (kCols + kLanes - 1) / kLanes; ++i) {
                const int m = i * kLanes + lane;
                const int row = walk.row(given + m);
                if (m < kCols) {
                    const bool valid = given + m < rows && row >= 0;
                    to.t[m] = valid ? row : -1;
                    to.x_row[m] = valid ? row / a.a_div : -1;
                    to.x_outside[m] = 0;
                    to.weights[m] =
                        valid && a.weights != nullptr ? *walk.weight(given + m, row) : 1.0f;
                }
            }
        if (lane == 0) {
            to.expert = more ? walk.expert : -1;
            to.tile = more ? first_tile() : 0;
            to.end = more ? end_tile() : 0;
            to.col_tiles = min(kColTiles, (rows - given) / 8);
            to.any_x_outside = 0;
        }
        given += kCols;
        __syncwarp();
        if (lane == 0)
            barrier_arrive(shared_address(shared.opened + turn.at));
        turn.next();
        return more;
    }
};

// Fills the queue as far as there is room. One warp.
MX_DEVICE void open_entries(const MoeArgs& a, Shared& shared, int lane) {
    if (!kEarlyRouting)
        wait_for_grid_ahead();
    Opener opener(a, shared, lane);
    while (opener.open())
        ;
}

// Asks for boxes of weights. One warp, of which a lane serves each warpgroup that adds: these run
// apart from each other, so that it must not wait for one of them alone.
MX_DEVICE void copy_weights(const MoeArgs& a, Shared& shared, const TensorMap& map, int lane) {
    const int group = min(lane, kGroups - 1), chunks = a.chunks();
    bool done = lane >= kGroups;
    int left = 0, chunk = 0, t = 0, row = 0; // stages of the entry; the next one's place
    Turn<kEntries> turn;
    Turn<kDepth> to;
    if (lane == 0)
        prefetch_map(map);
    while (__any_sync(~0u, !done)) {
        bool asked = false;
        if (!done && left == 0 &&
            barrier_test(shared_address(shared.opened + turn.at), turn.parity)) {
            const Entry& entry = shared.queue[turn.at];
            turn.next();
            done = entry.expert < 0;
            left = static_cast<int>(entry.end - entry.tile) * chunks * kTiles;
            row = entry.expert * static_cast<int>(a.N) +
                  static_cast<int>(entry.tile * kParts + group * kTiles) * kBoxRows;
        }
        if (!done && left > 0 &&
            barrier_test(shared_address(shared.empty[group] + to.at), to.parity ^ 1)) {
            const unsigned full = shared_address(shared.full[group] + to.at);
            barrier_arrive_expect(full, kStageBytes);
            const unsigned stage = shared_address(shared.ring[group][to.at]);
            copy_box(stage, map, chunk * kChunk, row + t * kBoxRows, full);
            if constexpr (kHalves)
                copy_box(stage + kStageBytes / 2, map, chunk * kChunk,
                         row + t * kBoxRows + static_cast<int>(a.N) / 2, full);
            to.next();
            --left;
            if (++t == kTiles) {
                t = 0;
                ++chunk;
            }
            if (chunk == chunks) {
                chunk = 0;
                row += kParts * kBoxRows;
            }
            asked = true;
        }
        if (!__any_sync(~0u, asked))
            __nanosleep(kPollNs);
    }
    launch_dependents(); // not before, else what comes next settles unevenly on the SMs
}

} // namespace mx
