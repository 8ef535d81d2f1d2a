// The layout of moe_gemm_wide_sm90.cu's shared memory, and its warps that copy and that convert.
#pragma once

#include "mx_scale.h"
#include "mx_target.h"
#include "sm90_async.h"
#include "sm90_mma.h"
#include "sm90_moe.h"

namespace mx {

constexpr int kWarps = 8;                     // that add
constexpr int kColTiles = MX_COL_TILES;       // 8 rows of x each
constexpr int kDepth = MX_DEPTH;              // chunks in the ring
constexpr int kScaleChunks = MX_SCALE_CHUNKS; // whose scales are copied at once: 1, 2 or 4
constexpr int kActivation = MX_ACTIVATION;
using Out = DType<kActivation == kNoActivation ? MX_OUT : kF32>;

constexpr int kCopying = 4, kConverting = 4; // warps, after those that add
constexpr int kThreads = (kWarps + kCopying + kConverting) * kLanes;
// Registers move from the warps that do not add to those that do.
constexpr int kCopyingRegisters = 104, kConvertingRegisters = 72, kAddingRegisters = 168;
constexpr int kRowTiles = 2; // 16 rows of w each, of a warp
constexpr int kWarpRows = kRowTiles * 16;
constexpr int kRows = kWarps * kWarpRows;
constexpr int kCols = kColTiles * 8;
using Rows = TileRows<kRows, kWarpRows, kActivation != kNoActivation, MX_INTERLEAVED>;
using Walk = MoeWalk<kCols>;

// A slot of the ring. Of every kScaleChunks chunks the first one's slot has the scales of all.
constexpr int kScaleBytes = 4 * kScaleChunks; // of a row
constexpr int kXAt = kRows * kChunk;
constexpr int kWScalesAt = kXAt + kCols * kChunk;
constexpr int kXScalesAt = kWScalesAt + kRows * kScaleBytes;
constexpr int kSlotBytes = kXScalesAt + kCols * kScaleBytes;
// x in fp16, of a chunk: [block][tile of x][lane] 16 bytes.
constexpr int kHalvesBytes = kCols * kChunk * 2;
constexpr int kHalves = 2; // chunks that are converted

// What the workgroup sums up: rows of x by a tile of w.
struct Entry {
    int t[kCols];         // routed rows, or -1
    float weights[kCols]; // of the routing
    int expert;
    unsigned tile;
    int col_tiles; // that have rows
    int unused;    // keeps what follows aligned
};
// What is in a slot of the ring.
struct Chunk {
    int entry; // its place in the queue, or -1: there is nothing more
    int first;
};
struct Shared {
    unsigned char ring[kDepth][kSlotBytes];
    unsigned char halves[kHalves][kHalvesBytes];
    Entry queue[kDepth]; // an entry is in use as long as one of its chunks is in the ring
    unsigned amax[2][kWarps][kCols]; // of a warp's features, after the activation
    float units[4][kCols];           // of x's rows, of a chunk by its number modulo 4
    unsigned scales[kHalves][kCols]; // of x's rows, of a chunk that is converted
    alignas(4) unsigned char flags[kHalves][kConverting]; // of a chunk that is converted, by warps
    Chunk chunks[kDepth];
    unsigned long long copied[kDepth], taken[kDepth]; // barriers of the ring
    unsigned long long converted[kHalves], used[kHalves];
};
static_assert(kConverting == 4, "their flags are read as a word");
static_assert(sizeof(Shared) <= MX_SHARED_BYTES,
              "the host gives too little shared memory: aiter_mx/kernels/moe_gemm/wide_sm90.py");

// Of a chunk's scales of x: units have grown; there are some that do not fit into fp16.
enum Flags { kGrown = 1, kOutside = 2 };

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

// Units of sums, as e8m0 bytes, and the scales of w below which sums in them stay within fp32.
constexpr int kFirstUnit = 127 - 40, kLastUnit = 127 + 20;
constexpr unsigned kLastWScale = 127 + 60;
// fp16 holds scales of x from 2^-14 to 2^7 units.
constexpr int kBelowUnit = 127 - kUsualLowest, kMostAboveUnit = kF16Scales - kBelowUnit;
constexpr int kHeadroom = 2; // log2 of the largest scale of x over the unit, when that is chosen

MX_DEVICE void store_shared_16(unsigned address, const f16x8& v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.words[0]),
                 "r"(v.words[1]), "r"(v.words[2]), "r"(v.words[3])
                 : "memory");
}

// Scales of a row, of the chunk at hand and of those after it that were copied with it.
struct Scales {
    unsigned words[kScaleChunks];

    MX_MEMBER static void copy(unsigned to, const unsigned char* from) {
        if constexpr (kScaleChunks == 4)
            copy_once_async(to, from, true);
        else if constexpr (kScaleChunks == 2)
            copy_pair_async(to, from);
        else
            copy_word_async(to, from);
    }
    MX_MEMBER void load(unsigned from) {
        if constexpr (kScaleChunks == 4) {
            const uint4 v = load_shared_16(from);
            words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
        } else if constexpr (kScaleChunks == 2) {
            const uint2 v = load_shared_8(from);
            words[0] = v.x, words[1] = v.y;
        } else {
            words[0] = load_shared_4(from);
        }
    }
    MX_MEMBER void next() {
#pragma unroll
        for (int i = 0; i + 1 < kScaleChunks; ++i)
            words[i] = words[i + 1];
    }
};

// Copies a share of the rows of each chunk.
struct Copier {
    const MoeArgs& a;
    Shared& shared;
    const int lane, share;
    static constexpr int kShareRows = kRows / kCopying, kShareCols = kCols / kCopying;

    MX_MEMBER void open(const Walk& walk, int at, int (&x_rows)[kShareCols / 4], int& own) const {
        const int row = walk.row(share * kShareCols + lane % kShareCols);
        own = row < 0 ? -1 : row / a.a_div;
#pragma unroll
        for (int i = 0; i < kShareCols / 4; ++i)
            x_rows[i] = __shfl_sync(~0u, own, lane / 8 + 4 * i);
        Entry& to = shared.queue[at];
        if (lane < kShareCols) {
            const int m = share * kShareCols + lane;
            to.t[m] = row;
            if (a.weights != nullptr && row >= 0)
                copy_word_async(shared_address(to.weights + m), walk.weight(m, row));
        }
        if (lane == 0 && share == 0) {
            to.expert = walk.expert;
            to.tile = walk.tile;
            to.col_tiles = walk.col_tiles();
        }
    }
    MX_MEMBER void copy(const Walk& walk, unsigned to, int chunk,
                        const int (&x_rows)[kShareCols / 4], int own) const {
        const Offset first_row = walk.expert * static_cast<Offset>(a.N);
        const int part = lane % 8, row_in_4 = lane / 8;
        const Offset k = static_cast<Offset>(chunk) * kChunk + part * 16;
        const unsigned char* w = a.wq + first_row * a.K + k;
        unsigned place = to + share * kShareRows * kChunk + swizzled(row_in_4, part);
#pragma unroll 8
        for (int i = 0; i < kShareRows / 4; ++i) {
            const int r = share * kShareRows + i * 4 + row_in_4;
            copy_once_async(place + i * 4 * kChunk, w + a.row_of_k(Rows::row(a, walk.tile, r)),
                            true);
        }
        place = to + kXAt + share * kShareCols * kChunk + swizzled(row_in_4, part);
#pragma unroll
        for (int i = 0; i < kShareCols / 4; ++i)
            if (x_rows[i] >= 0)
                copy_async(place + i * 4 * kChunk, a.xq + a.row_of_k(x_rows[i]) + k, true);
        if (chunk % kScaleChunks)
            return;
        const unsigned char* w_scales = a.ws + first_row * a.blocks() + chunk * kBlocks;
#pragma unroll
        for (int i = 0; i < kShareRows / kLanes; ++i) {
            const int r = share * kShareRows + i * kLanes + lane;
            Scales::copy(to + kWScalesAt + r * kScaleBytes,
                         w_scales + a.row_of_blocks(Rows::row(a, walk.tile, r)));
        }
        if (lane < kShareCols) {
            const unsigned at = to + kXScalesAt + (share * kShareCols + lane) * kScaleBytes;
            if (own >= 0)
                Scales::copy(at, a.xs + a.row_of_blocks(own) + chunk * kBlocks);
            else // so that the row does not look unusual
#pragma unroll
                for (int i = 0; i < kScaleChunks; ++i)
                    store_shared_4(at + i * 4, 0x7f7f7f7f);
        }
    }
    MX_MEMBER void run() const {
        Walk walk(a, Rows::count(a), lane);
        int x_rows[kShareCols / 4], own = -1;
        const int chunks = a.chunks();
        int chunk = chunks, entry = kDepth - 1;
        for (Turn<kDepth> turn;; turn.next()) {
            barrier_wait(shared_address(shared.taken + turn.at), turn.parity ^ 1);
            if (chunk == chunks) {
                const bool more = walk.next([&] {
                    store_zeros<Out, Rows::kFeatures, kActivation != kNoActivation>(a, walk, share,
                                                                                    kCopying);
                });
                chunk = 0;
                entry = !more ? -1 : entry + 1 == kDepth ? 0 : entry + 1;
                if (more)
                    open(walk, entry, x_rows, own);
            }
            if (lane == 0 && share == 0)
                shared.chunks[turn.at] = {entry, chunk == 0};
            if (entry >= 0)
                copy(walk, shared_address(shared.ring[turn.at]), chunk, x_rows, own);
            const unsigned copied = shared_address(shared.copied + turn.at);
            barrier_arrive_with_copies(copied);
            barrier_arrive(copied); // for what was stored
            if (entry < 0) {
                launch_dependents(); // not before, else what comes next settles unevenly
                break;
            }
            ++chunk;
        }
        copy_commit();
        copy_wait<0>(); // copies must not outlive the warp
    }
};

// Makes fp16 of x. Each thread has a part of a row.
struct Converter {
    Shared& shared;
    const int lane, warp;
    static constexpr int kRowThreads = kConverting * kLanes / kCols;
    static constexpr int kParts = 8 / kRowThreads; // of 16 k

    MX_MEMBER void run() const {
        const int thread = warp * kLanes + lane;
        const int row = thread / kRowThreads, first_part = thread % kRowThreads * kParts;
        int unit = 0, in_entry = 0; // of the row's sums, an e8m0 byte; chunks of it so far
        unsigned number = 0;
        Scales held;
        Turn<kHalves> to;
        for (Turn<kDepth> turn;; turn.next(), to.next(), ++number) {
            barrier_wait(shared_address(shared.copied + turn.at), turn.parity);
            const Chunk chunk = shared.chunks[turn.at];
            if (chunk.entry < 0)
                break;
            barrier_wait(shared_address(shared.used + to.at), to.parity ^ 1);
            const unsigned from = shared_address(shared.ring[turn.at]);
            in_entry = chunk.first ? 0 : in_entry + 1;
            if (in_entry % kScaleChunks == 0)
                held.load(from + kXScalesAt + row * kScaleBytes);
            const unsigned scales = held.words[0];
            held.next();
            const int most =
                max(max(scales & 255, scales >> 8 & 255), max(scales >> 16 & 255, scales >> 24));
            const int needed = min(max(most - kHeadroom, kFirstUnit), kLastUnit);
            const bool grown = !chunk.first && needed > unit && most > unit + kMostAboveUnit;
            if (chunk.first || grown)
                unit = needed;
            if (first_part == 0) {
                shared.units[number % 4][row] = bits_to_float(unit << 23);
                shared.scales[to.at][row] = scales;
            }
            const bool outside = convert(from + kXAt, shared_address(shared.halves[to.at]), scales,
                                         unit, row, first_part);
            const bool any_grown = __any_sync(~0u, grown), any_outside = __any_sync(~0u, outside);
            if (lane == 0)
                shared.flags[to.at][warp] = any_grown * kGrown + any_outside * kOutside;
            barrier_arrive(shared_address(shared.converted + to.at));
        }
    }
    // Whether there are values whose scale does not fit.
    MX_MEMBER bool convert(unsigned x, unsigned halves, unsigned scales, int unit, int row,
                           int first_part) const {
        // 4 rows later lanes take parts, and 2 rows later halves of these, in the other order: so
        // they are on different banks.
        const int flipped = row / 4 % 2, swapped = row / 2 % 2 * 16;
        bool outside = false;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const int part = first_part + (i ^ flipped), b = part / 2;
            const uint4 payload = load_shared_16(x + swizzled(row, part));
            const unsigned byte = scales >> 8 * b & 255;
            outside |=
                !f16_holds(byte, unit - kBelowUnit) &&
                (byte == kNanScale || (payload.x | payload.y | payload.z | payload.w) & 0x7f7f7f7f);
            const unsigned factor = e8m0_to_f16x2(byte, unit - kBelowUnit);
            const unsigned place =
                halves + ((b * kColTiles + row / 8) * kLanes + row % 8 * 4 + part % 2 * 2) * 16;
            const uint2 first = swapped ? uint2{payload.z, payload.w} : uint2{payload.x, payload.y};
            const uint2 second =
                swapped ? uint2{payload.x, payload.y} : uint2{payload.z, payload.w};
            store_shared_16(place + swapped, multiply(e4m3x8_to_f16(first), factor));
            store_shared_16(place + (swapped ^ 16), multiply(e4m3x8_to_f16(second), factor));
        }
        return outside;
    }
};

} // namespace mx
