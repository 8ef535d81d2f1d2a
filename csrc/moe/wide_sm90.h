// The layout of wide_sm90.cu's shared memory, and its warps that bring x there.
#pragma once

#include "common/scale.h"
#include "common/target.h"
#include "groups_sm90.h"
#include "moe_sm90.h"
#include "sm90/expand.h"
#include "sm90/tma.h"

namespace mx {

constexpr int kColTiles = MX_COL_TILES;          // 8 rows of x each
constexpr int kGroups = MX_GROUPS;               // warpgroups that add
constexpr int kDepth = MX_DEPTH;                 // chunks of weights in flight
constexpr bool kWhole = MX_WHOLE;                // K is a multiple of kDepth chunks
constexpr bool kEarlyRouting = MX_EARLY_ROUTING; // it is older than the kernel ahead
constexpr int kActivation = MX_ACTIVATION;
constexpr bool kActivated = kActivation != kNoActivation;
using Out = DType<kActivated ? kF32 : MX_OUT>;

constexpr int kThreads = (kGroups + 1) * kGroupThreads; // the last warpgroup brings x
// Registers move from the warps that bring x to those that add.
constexpr int kAddingRegisters = kGroups == 2 ? 208 : kColTiles < 12 ? 144 : 136;
constexpr int kBringingRegisters = kGroups == 2 ? 88 : kColTiles < 12 ? 80 : 104;

constexpr int kUnit = 64;      // k of 4 matrix instructions
constexpr int kGroupRows = 64; // of w, of a warpgroup
constexpr int kRows = kGroups * kGroupRows;
constexpr int kCols = kColTiles * 8;
// With an activation a warp has 8 gate rows, and the up rows of the same features.
using Rows = TileRows<kRows, 16, kActivated, MX_INTERLEAVED>;
using Walk = MoeWalk<kCols>;

// Row i of a lane within the tile. Where nothing is activated a lane's rows are neighbours, so that
// it stores two features at once.
MX_DEVICE int row_of(int warp, int lane, int i) {
    return warp * 16 + (kActivated ? lane / 4 + 8 * i : lane / 4 * 2 + i);
}

// x of a chunk in bf16, as wgmma takes it: a step is 16 k, in two halves.
constexpr int kUnits = kChunk / kUnit, kSteps = 4; // of a chunk, of a unit
constexpr int kHalfStepBytes = 8 * kCols * 2, kStepBytes = 2 * kHalfStepBytes;
constexpr int kSlotBytes = kUnits * kSteps * kStepBytes;
constexpr int kSlots = MX_SLOTS; // chunks of x that are ready, or about to be
constexpr int kAhead = MX_AHEAD; // chunks of x on their way before those
// An entry is opened when the fetching of x gets to it, and taken from the queue when it has been
// added: as many may lie between as there are chunks, each an entry of its own.
constexpr int kEntries = 8;
static_assert(kEntries > kAhead + 1);
// Those that add ask for the next entry before they take the chunks of their last step.
static_assert(kAhead + kSlots > kDepth + 1);

// What the workgroup sums up: rows of x by a tile of w.
struct Entry {
    int t[kCols];         // routed rows, or -1
    float weights[kCols]; // of the routing
    int outside[kCols];   // whether a row of x has scales that bf16 does not hold
    int expert;           // -1: there is nothing more
    unsigned tile;
    int col_tiles; // that have rows
    int any_outside;
};
constexpr int kTiles = kColTiles / kGroupWarps; // of x, of a warp that brings it
static_assert(kTiles * kGroupWarps == kColTiles, "each warp has as many tiles of x");
struct Shared {
    unsigned char x[kSlots][kSlotBytes];
    // What a thread that brings x has fetched, for itself alone.
    uint4 fetched[kAhead][kTiles][kUnits][kGroupThreads];
    unsigned fetched_scales[kAhead][kTiles][kGroupThreads];
    Entry queue[kEntries];
    int outside[kRows / 2][2]; // whether a row of w has scales that bf16 does not hold
    unsigned amax[2][kGroups][kGroupWarps][kActivated ? kCols : 2]; // of a warp's features
    unsigned long long ready[kSlots], taken[kSlots];                // barriers of x
    unsigned long long opened[kEntries], closed[kEntries];          // and of the queue
};
static_assert(sizeof(Shared) <= MX_SHARED_BYTES,
              "the host gives too little shared memory: aiter_mx/kernels/moe_gemm/wide_sm90.py");

constexpr unsigned kNanBF16x2 = 0x7fc07fc0;

// The factor of activations as bf16, twice, for scales up to kLastXScale.
MX_DEVICE unsigned x_factor(unsigned scale) { return (scale + 60) * 0x00800080; }

// Four activations times factor, exactly: bytes 0 and 2, then 1 and 3. NaN stays NaN.
MX_DEVICE void activations_to_bf16(unsigned word, unsigned factor, unsigned& even, unsigned& odd) {
    e4m3x4_to_bf16(word, 1.0f, even, odd);
    even = multiply_bf16x2(even, factor);
    odd = multiply_bf16x2(odd, factor);
}

// A step is kDepth chunks, of which the last one's may not all exist.
MX_DEVICE int steps_of(const MoeArgs& a) { return (a.chunks() + kDepth - 1) / kDepth; }

// Looks up what the workgroup is to do, fetches the rows of x that it takes, and makes them bf16.
// A warp has tiles warp, warp + 4, ... of 8 rows, lane 4g + t of these 16 k of row g of each unit.
struct Bringer {
    const MoeArgs& a;
    Shared& shared;
    const int lane, warp;

    MX_MEMBER void open(Walk& walk, const Turn<kEntries>& turn) const {
        barrier_wait(shared_address(shared.closed + turn.at), turn.parity ^ 1);
        Entry& to = shared.queue[turn.at];
        const bool more =
            walk.next([&] { store_zeros<Out, Rows::kFeatures, kActivated>(a, walk, 0, 1); });
        if (more)
#pragma unroll
            for (int i = 0; i < kCols / kLanes; ++i) {
                const int m = i * kLanes + lane;
                const int row = walk.row(m);
                to.t[m] = row;
                to.outside[m] = 0;
                to.weights[m] = row < 0 || a.weights == nullptr ? 1.0f : *walk.weight(m, row);
            }
        if (lane == 0) {
            to.expert = more ? walk.expert : -1;
            to.tile = walk.tile;
            to.col_tiles = walk.col_tiles();
            to.any_outside = 0;
        }
        __syncwarp();
        if (lane == 0)
            barrier_arrive(shared_address(shared.opened + turn.at));
    }

    // How many tiles of x of the entry are this warp's.
    MX_MEMBER int tiles_of(const Entry& entry) const {
        return (entry.col_tiles + kGroupWarps - 1 - warp) / kGroupWarps;
    }
    MX_MEMBER int column(int tile) const { return (tile * kGroupWarps + warp) * 8 + lane / 4; }

    // Goes over the chunks of one entry after another, and starts their copies.
    struct Fetcher {
        const Bringer& of;
        Walk walk; // of the first warp alone
        Turn<kEntries> turn;
        Turn<kAhead> to;
        int left = 0;          // chunks of the open entry, or -1: there are no more entries
        int count;             // its tiles
        Offset places[kTiles]; // of rows of x, in K, or none
        static constexpr Offset kNone = ~Offset(0);

        MX_MEMBER void open() {
            const MoeArgs& a = of.a;
            if (of.warp == 0)
                of.open(walk, turn);
            barrier_wait(shared_address(of.shared.opened + turn.at), turn.parity);
            const Entry& entry = of.shared.queue[turn.at];
            turn.next();
            left = entry.expert < 0 ? -1 : steps_of(a) * kDepth;
            count = of.tiles_of(entry);
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                const int t = i < count && left > 0 ? entry.t[of.column(i)] : -1;
                places[i] = t < 0 ? kNone : a.row_of_k(t / a.a_div);
            }
        }
        MX_MEMBER void fetch() {
            const MoeArgs& a = of.a;
            if (left == 0)
                open();
            if (left > 0) {
                const int thread = of.warp * kLanes + of.lane;
                const bool in_k = kWhole || left > steps_of(a) * kDepth - a.chunks();
#pragma unroll
                for (int i = 0; i < kTiles; ++i) {
                    if (i >= count)
                        break;
                    const bool exists = in_k && places[i] != kNone;
                    const Offset place = exists ? places[i] : 0;
                    const unsigned char* x = a.xq + place + of.lane % 4 * 16;
#pragma unroll
                    for (int u = 0; u < kUnits; ++u)
                        copy_async(shared_address(&of.shared.fetched[to.at][i][u][thread]),
                                   x + u * kUnit, exists);
                    copy_word_async(shared_address(&of.shared.fetched_scales[to.at][i][thread]),
                                    a.xs + place / kBlock, exists ? 4 : 0);
                    places[i] += exists ? kChunk : 0;
                }
                --left;
            }
            copy_commit();
            to.next();
        }
    };

    // Makes bf16 of what a thread has of a tile. Returns whether values are left out because of
    // their scale.
    MX_MEMBER bool expand(const uint4 (&fetched)[kUnits][kGroupThreads], unsigned scales,
                          unsigned to) const {
        constexpr unsigned each = 0x01010101, top = 0x80 * each;
        static_assert(kLastXScale >= 0x80);
        bool left_out = false;
        unsigned factors[kUnits];
        uint4 v[kUnits];
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
            v[u] = load_shared_16(shared_address(&fetched[u][warp * kLanes + lane]));
            factors[u] = x_factor(__byte_perm(scales, 0, 0x4440 + u * 2 + lane % 4 / 2));
        }
        if (((scales & ~top) + (0xff - kLastXScale) * each) & scales & top) {
#pragma unroll
            for (int u = 0; u < kUnits; ++u) {
                const unsigned scale = scales >> (u * 2 + lane % 4 / 2) * 8 & 255;
                if (scale <= kLastXScale)
                    continue;
                factors[u] = scale == kNanScale ? kNanBF16x2 : 0;
                left_out |= scale != kNanScale && (v[u].x | v[u].y | v[u].z | v[u].w) & ~top;
            }
        }
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
            const unsigned words[4] = {v[u].x, v[u].y, v[u].z, v[u].w};
#pragma unroll
            for (int j = 0; j < kSteps; ++j) {
                unsigned even, odd;
                activations_to_bf16(words[j], factors[u], even, odd);
                store_shared_4(to + (u * kSteps + j) * kStepBytes, even);
                store_shared_4(to + (u * kSteps + j) * kStepBytes + kHalfStepBytes, odd);
            }
        }
        return left_out;
    }

    MX_MEMBER void run() const {
        if (!kEarlyRouting)
            wait_for_grid_ahead();
        Fetcher fetcher{*this, Walk(a, Rows::count(a), lane)};
        if (kEarlyRouting) {
            fetcher.open();
            wait_for_grid_ahead(); // which made x
        }
        for (int i = 0; i < kAhead - 1; ++i)
            fetcher.fetch();
        Turn<kEntries> turn;
        Turn<kAhead> from;
        Turn<kSlots> to;
        for (;; turn.next()) {
            barrier_wait(shared_address(shared.opened + turn.at), turn.parity);
            Entry& entry = shared.queue[turn.at];
            if (entry.expert < 0)
                break;
            const int count = tiles_of(entry);
            for (int left = steps_of(a) * kDepth; left > 0; --left, from.next(), to.next()) {
                fetcher.fetch();
                copy_wait<kAhead - 1>();
                barrier_wait(shared_address(shared.taken + to.at), to.parity ^ 1);
                const unsigned slot = shared_address(shared.x[to.at]) + warp * 128 + lane * 4;
#pragma unroll
                for (int i = 0; i < kTiles; ++i) {
                    if (i >= count)
                        break;
                    const unsigned scales = load_shared_4(
                        shared_address(&shared.fetched_scales[from.at][i][warp * kLanes + lane]));
                    if (expand(shared.fetched[from.at][i], scales, slot + i * kGroupWarps * 128))
                        entry.outside[column(i)] = entry.any_outside = 1;
                }
                fence_async();
                __syncwarp();
                if (lane == 0)
                    barrier_arrive(shared_address(shared.ready + to.at));
            }
        }
        launch_dependents(); // not before, else what comes next settles unevenly on the SMs
        copy_wait<0>();      // copies must not outlive the warp
    }
};

} // namespace mx
