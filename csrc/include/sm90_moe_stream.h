// The layout of moe_gemm_sm90.cu's shared memory, and how a warp fills its ring.
#pragma once

#include "mx_target.h"
#include "sm90_async.h"
#include "sm90_moe.h"

namespace mx {

constexpr int kRowTiles = MX_ROW_TILES;          // 16 rows of w each
constexpr int kColTiles = MX_COL_TILES;          // 8 rows of x each
constexpr int kWarps = MX_K_WARPS;               // of a workgroup, which share K
constexpr int kDepth = MX_DEPTH;                 // chunks of a warp in its ring
constexpr int kGroups = MX_GROUPS;               // workgroups that an SM must have room for
constexpr bool kWhole = MX_WHOLE;                // K is a multiple of kChunk
constexpr bool kEarlyRouting = MX_EARLY_ROUTING; // it is older than the kernel ahead
constexpr int kActivation = MX_ACTIVATION;
using Out = DType<kActivation == kNoActivation ? MX_OUT : kF32>;

constexpr int kRows = kRowTiles * 16;
constexpr int kCols = kColTiles * 8;
constexpr int kThreads = kWarps * kLanes;
using Rows = TileRows<kRows, kRows, kActivation != kNoActivation, MX_INTERLEAVED>;
using Walk = MoeWalk<kCols>;
static_assert(kActivation == kNoActivation || kRows % (2 * kBlock) == 0,
              "a tile has whole blocks of gate and of up");

// A slot of a ring. Scales of a row are the aligned words that hold its bytes.
constexpr int kScaleWords = kWhole ? 1 : 2;
constexpr int kXAt = kRows * kChunk;
constexpr int kWScalesAt = kXAt + kCols * kChunk;
constexpr int kXScalesAt = kWScalesAt + kRows * kScaleWords * 4;
constexpr int kSlotBytes = kXScalesAt + kCols * kScaleWords * 4;
constexpr int kRingBytes = kDepth * kSlotBytes; // of a warp
constexpr int kPitch = kRows + 4;               // of partial sums: keeps lanes on different banks
constexpr int kPartials = kCols * kPitch;       // of a warp
constexpr int kEntries = kDepth + 1;            // of a warp's queue

// What a warp is to sum up: some rows of x by a tile of w.
struct Entry {
    int t[kCols];         // routed rows, or -1
    float weights[kCols]; // of the routing
    int expert;
    unsigned tile;
    int col_tiles; // that have rows
    int unused;    // keeps what follows aligned
};
static_assert(kWarps * (kRingBytes + kPartials * 4 + kEntries * sizeof(Entry)) == MX_SHARED_BYTES,
              "the host lays shared memory out differently: aiter_mx/kernels/moe_gemm/sm90.py");

MX_DEVICE int blocks_of(const MoeArgs& a, int chunk) {
    return kWhole ? kBlocks : min(kBlocks, static_cast<int>(a.blocks()) - chunk * kBlocks);
}

// Copies the scales of one row's blocks of a chunk, of which `blocks` exist. Words are aligned, so
// that of a K that is not whole the bytes may begin anywhere in the first of two.
MX_DEVICE void copy_scales(unsigned to, const unsigned char* from, int blocks) {
    if constexpr (kWhole) {
        copy_word_async(to, from);
    } else {
        const int before = reinterpret_cast<unsigned long>(from) % 4;
        const int bytes = before + blocks; // none beyond the last is read
        copy_word_async(to, from - before, min(bytes, 4));
        copy_word_async(to + 4, from - before + (bytes > 4 ? 4 : 0), max(bytes - 4, 0));
    }
}
MX_DEVICE unsigned load_scales(unsigned at, const unsigned char* base, Offset first) {
    if constexpr (kWhole) {
        return load_shared_4(at);
    } else {
        const uint2 words = load_shared_8(at);
        const unsigned before = (reinterpret_cast<unsigned long>(base) + first) % 4;
        return __funnelshift_r(words.x, words.y, before * 8);
    }
}

// Brings chunks into a warp's ring, and opens one entry after another.
struct Filler {
    const MoeArgs& a;
    Walk& walk;
    const unsigned ring;
    Entry* const queue;
    const int lane, warp;
    int opened = 0, slot = 0, entry = 0; // entries so far; the next slots of ring and queue
    int chunk;                           // the next one
    int x_rows[kCols / 4], xs_row;       // that this lane copies of the open entry, or -1

    MX_MEMBER bool open() {
        if (!walk.next([&] {
                store_zeros<Out, Rows::kFeatures, kActivation != kNoActivation>(a, walk, warp,
                                                                                kWarps);
            }))
            return false;
        const int row = walk.row(lane % kCols);
        xs_row = row < 0 ? -1 : row / a.a_div;
#pragma unroll
        for (int i = 0; i < kCols / 4; ++i)
            x_rows[i] = __shfl_sync(~0u, xs_row, lane / 8 + 4 * i);
        Entry& to = queue[entry];
        if (lane < kCols) {
            to.t[lane] = row;
            if (a.weights != nullptr && row >= 0)
                copy_word_async(shared_address(to.weights + lane), walk.weight(lane, row));
        }
        if (lane == 0) {
            to.expert = walk.expert;
            to.tile = walk.tile;
            to.col_tiles = walk.col_tiles();
        }
        entry = entry + 1 == kEntries ? 0 : entry + 1;
        ++opened;
        chunk = warp;
        return true;
    }
    // Of w, of x, or both.
    MX_MEMBER void copy_chunk(bool of_w, bool of_x) const {
        const unsigned to = ring + slot * kSlotBytes;
        const int part = lane % 8, row_in_4 = lane / 8;
        const Offset k = static_cast<Offset>(chunk) * kChunk + part * 16;
        const int blocks = blocks_of(a, chunk);
        const unsigned place = to + swizzled(row_in_4, part);
        const bool exists = kWhole || k < static_cast<Offset>(a.K);
        const Offset from = exists ? k : 0, first_row = walk.expert * static_cast<Offset>(a.N);
        if (of_w) {
            const unsigned char* w = a.wq + first_row * a.K + from;
#pragma unroll
            for (int i = 0; i < kRows / 4; ++i)
                copy_once_async(place + i * 4 * kChunk,
                                w + a.row_of_k(Rows::row(a, walk.tile, row_in_4 + 4 * i)), exists);
            const unsigned char* w_scales = a.ws + first_row * a.blocks() + chunk * kBlocks;
#pragma unroll
            for (int i = 0; i < (kRows + kLanes - 1) / kLanes; ++i) {
                const int r = i * kLanes + lane;
                if (r < kRows)
                    copy_scales(to + kWScalesAt + r * kScaleWords * 4,
                                w_scales + a.row_of_blocks(Rows::row(a, walk.tile, r)), blocks);
            }
        }
        if (!of_x)
            return;
#pragma unroll
        for (int i = 0; i < kCols / 4; ++i)
            if (x_rows[i] >= 0)
                copy_async(place + kXAt + i * 4 * kChunk, a.xq + a.row_of_k(x_rows[i]) + from,
                           exists);
        if (lane < kCols) {
            const unsigned at = to + kXScalesAt + lane * kScaleWords * 4;
            if (xs_row >= 0) {
                copy_scales(at, a.xs + a.row_of_blocks(xs_row) + chunk * kBlocks, blocks);
            } else {
#pragma unroll
                for (int i = 0; i < kScaleWords; ++i)
                    store_shared_4(at + i * 4, 0x7f7f7f7f); // so that no sum looks unusual
            }
        }
    }
    // Brings this warp's next chunk, if there is one.
    MX_MEMBER void fill(bool of_w, bool of_x) {
        if ((opened > 0 && chunk < a.chunks()) || open()) {
            copy_chunk(of_w, of_x);
            chunk += kWarps;
        } else if (of_x) {
            launch_dependents(); // not before, else what comes next settles unevenly on the SMs
        }
        if (of_x)
            copy_commit();
        slot = slot + 1 == kDepth ? 0 : slot + 1;
    }
};

} // namespace mx
