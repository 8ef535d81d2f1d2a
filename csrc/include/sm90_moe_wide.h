// The layout of moe_gemm_wide_sm90.cu's shared memory, and its warps that bring x there.
#pragma once

#include "mx_scale.h"
#include "mx_target.h"
#include "sm90_async.h"
#include "sm90_expand.h"
#include "sm90_moe.h"

namespace mx {

constexpr int kColTiles = MX_COL_TILES;          // 8 rows of x each
constexpr int kGroups = MX_GROUPS;               // warpgroups that add
constexpr int kDepth = MX_DEPTH;                 // chunks of weights in flight
constexpr bool kWhole = MX_WHOLE;                // K is a multiple of kDepth chunks
constexpr bool kEarlyRouting = MX_EARLY_ROUTING; // it is older than the kernel ahead
constexpr int kActivation = MX_ACTIVATION;
constexpr bool kActivated = kActivation != kNoActivation;
using Out = DType<kActivated ? kF32 : MX_OUT>;

constexpr int kGroupWarps = 4, kGroupThreads = kGroupWarps * kLanes;
constexpr int kThreads = (kGroups + 1) * kGroupThreads; // the last warpgroup brings x
// Registers move from the warps that bring x to those that add.
constexpr int kAddingRegisters = kGroups == 3 ? 144 : 208;
constexpr int kBringingRegisters = kGroups == 3 ? 80 : 88;

constexpr int kUnit = 64;      // k of 4 matrix instructions
constexpr int kGroupRows = 64; // of w, of a warpgroup
constexpr int kRows = kGroups * kGroupRows;
constexpr int kCols = kColTiles * 8;
// With an activation a warp has 8 gate rows, and the up rows of the same features.
using Rows = TileRows<kRows, 16, kActivated, MX_INTERLEAVED>;
using Walk = MoeWalk<kCols>;

// x of a chunk in bf16, as wgmma takes it: a step is 16 k, in two halves.
constexpr int kUnits = kChunk / kUnit, kSteps = 4; // of a chunk, of a unit
constexpr int kHalfStepBytes = 8 * kCols * 2, kStepBytes = 2 * kHalfStepBytes;
constexpr int kSlotBytes = kUnits * kSteps * kStepBytes;
constexpr int kSlots = MX_SLOTS; // chunks of x that are ready, or about to be
constexpr int kEntries = 4;      // of the queue
// A tile is opened when all x of the one before is on its way, for which those that add have to
// have taken the chunks before their last step.
static_assert(kSlots > kDepth);

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
struct Shared {
    unsigned char x[kSlots][kSlotBytes];
    Entry queue[kEntries];
    int outside[kRows / 2][2]; // whether a row of w has scales that bf16 does not hold
    unsigned amax[2][kGroups][kGroupWarps][kActivated ? kCols : 2]; // of a warp's features
    unsigned long long ready[kSlots], taken[kSlots];                // barriers of x
    unsigned long long opened[kEntries], closed[kEntries];          // and of the queue
};
static_assert(sizeof(Shared) <= MX_SHARED_BYTES,
              "the host gives too little shared memory: aiter_mx/kernels/moe_gemm/wide_sm90.py");

// A place in a ring of Size, and the parity of the round.
template <int Size>
struct Turn {
    int at = 0;
    unsigned parity = 0;

    MX_MEMBER void next() {
        if (++at == Size) {
            at = 0;
            parity ^= 1;
        }
    }
};

// What others read too, in the order of the source.
MX_DEVICE unsigned load_word(const unsigned char* p) {
    unsigned v;
    asm volatile("ld.relaxed.cta.global.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

// A step is kDepth chunks, of which the last one's may not all exist.
MX_DEVICE int steps_of(const MoeArgs& a) { return (a.chunks() + kDepth - 1) / kDepth; }

// Looks up what the workgroup is to do, brings the rows of x that it takes, and makes them bf16.
// Lane 4g + t has 16 k of row g of 8.
struct Bringer {
    const MoeArgs& a;
    Shared& shared;
    const int lane, warp;
    static constexpr int kTiles = kColTiles / kGroupWarps;
    static_assert(kTiles * kGroupWarps == kColTiles, "each warp has as many tiles of x");

    MX_MEMBER void open(Walk& walk, const Turn<kEntries>& turn) const {
        barrier_wait(shared_address(shared.closed + turn.at), turn.parity ^ 1);
        Entry& to = shared.queue[turn.at];
        const bool more =
            walk.next([&] { store_zeros<Out, Rows::kFeatures, kActivated>(a, walk, 0, 1); });
        if (more)
#pragma unroll
            for (int i = 0; i < (kCols + kLanes - 1) / kLanes; ++i) {
                const int m = i * kLanes + lane;
                const int row = walk.row(m);
                to.t[m] = row;
                to.outside[m] = 0;
                if (a.weights != nullptr)
                    to.weights[m] = row < 0 ? 0.0f : *walk.weight(m, row);
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

    // Of a chunk of each of 8 rows, 16 k of each unit.
    struct Task {
        u32x4 payload[kUnits];
        unsigned scales; // of 4 blocks

        MX_MEMBER void load(const MoeArgs& a, int row, int chunk, int lane) {
            const bool exists = row >= 0 && chunk < a.chunks();
            const unsigned char* from = a.xq + a.row_of_k(row) + chunk * kChunk + lane % 4 * 16;
#pragma unroll
            for (int u = 0; u < kUnits; ++u)
                payload[u] = exists ? mx::load(from + u * kUnit) : u32x4{};
            scales = exists ? load_word(a.xs + a.row_of_blocks(row) + chunk * kBlocks) : 0x7f7f7f7f;
        }
        // Returns whether values are left out because of their scale.
        MX_MEMBER bool store(unsigned to, int lane) const {
            bool left_out = false;
#pragma unroll
            for (int u = 0; u < kUnits; ++u) {
                const u32x4& words = payload[u];
                const unsigned scale = scales >> (u * 2 + lane % 4 / 2) * 8 & 255;
                const bool outside = kLastXScale < scale && scale != kNanScale;
                const float factor = bits_to_float(scale == kNanScale ? kNanBits
                                                   : outside          ? 0
                                                                      : (scale + 60) << 23);
                left_out |= outside && (words[0] | words[1] | words[2] | words[3]) & 0x7f7f7f7f;
#pragma unroll
                for (int j = 0; j < kSteps; ++j) {
                    unsigned even, odd;
                    e4m3x4_to_bf16(words[j], factor, even, odd);
                    store_shared_4(to + (u * kSteps + j) * kStepBytes, even);
                    store_shared_4(to + (u * kSteps + j) * kStepBytes + kHalfStepBytes, odd);
                }
            }
            return left_out;
        }
    };

    MX_MEMBER void bring(Entry& entry, Turn<kSlots>& to, int chunks) const {
        int rows[kTiles], count = 0; // of x, or -1
        bool outside[kTiles] = {};
        Task tasks[kTiles];
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            const int tile = i * kGroupWarps + warp;
            const int t = tile < entry.col_tiles ? entry.t[tile * 8 + lane / 4] : -1;
            rows[i] = t < 0 ? -1 : t / a.a_div;
            count += tile < entry.col_tiles;
            tasks[i].load(a, rows[i], 0, lane);
        }
        for (int chunk = 0; chunk < chunks; ++chunk, to.next()) {
            barrier_wait(shared_address(shared.taken + to.at), to.parity ^ 1);
            const unsigned slot = shared_address(shared.x[to.at]) + warp * 128 + lane * 4;
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                if (i >= count)
                    break;
                outside[i] |= tasks[i].store(slot + i * kGroupWarps * 128, lane);
                tasks[i].load(a, rows[i], chunk + 1, lane);
            }
            if (chunk + 1 == chunks)
#pragma unroll
                for (int i = 0; i < kTiles; ++i)
                    if (outside[i])
                        entry.outside[(i * kGroupWarps + warp) * 8 + lane / 4] = entry.any_outside =
                            1;
            fence_async();
            __syncwarp();
            if (lane == 0)
                barrier_arrive(shared_address(shared.ready + to.at));
        }
    }

    MX_MEMBER void run() const {
        if (!kEarlyRouting)
            wait_for_grid_ahead();
        Walk walk(a, Rows::count(a), lane); // of the first warp alone
        Turn<kEntries> turn;
        Turn<kSlots> to;
        for (int entries = 0;; ++entries) {
            if (warp == 0)
                open(walk, turn);
            if (kEarlyRouting && entries == 0)
                wait_for_grid_ahead(); // which made x
            barrier_wait(shared_address(shared.opened + turn.at), turn.parity);
            Entry& entry = shared.queue[turn.at];
            if (entry.expert < 0)
                break;
            bring(entry, to, steps_of(a) * kDepth);
            turn.next();
        }
        launch_dependents(); // not before, else what comes next settles unevenly on the SMs
    }
};

} // namespace mx
