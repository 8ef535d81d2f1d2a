// The layout of mma_ring_sm90.cu's shared memory, and how a warp fills its ring.
#pragma once

#include "common/target.h"
#include "moe_sm90.h"
#include "sm90/tma.h"

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
// With an activation, neighbours of a cluster that have a block of 32 features together.
constexpr int kCluster = kActivation == kNoActivation ? 1 : 4 / kRowTiles;
constexpr int kQuads = Rows::kFeatures / 4; // of features of a workgroup
constexpr int kBlockQuads = kBlock / 4;
static_assert(kActivation == kNoActivation || kQuads * kCluster == kBlockQuads,
              "a cluster has one block of 32 features");

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
    int rows;   // of x, up to the last one there is
    int unused; // keeps what follows aligned

    MX_MEMBER int col_tiles() const { return kColTiles == 1 ? 1 : (rows + 7) / 8; }
};

// The largest magnitude of each four features of the block, for each row of x. Two entries take
// turns.
struct Maxima {
    unsigned long barriers[2];
    unsigned of_quad[2][kCols][kBlockQuads];
};
constexpr int kMaximaBytes = kCluster > 1 ? sizeof(Maxima) : 0;
static_assert(
    kWarps * (kRingBytes + kPartials * 4 + kEntries * sizeof(Entry)) + kMaximaBytes ==
        MX_SHARED_BYTES,
    "the host lays shared memory out differently: aiter_mx/kernels/moe_gemm/stream_sm90.py");

MX_DEVICE int blocks_of(const MoeArgs& a, int chunk) {
    return kWhole ? kBlocks : min(kBlocks, static_cast<int>(a.blocks()) - chunk * kBlocks);
}

// Copies the scales of one row's blocks of a chunk, of which `blocks` exist. Words are aligned, so
// that of a K that is not whole the bytes may begin anywhere in the first of two. Of the tensor's
// last word, which may go past its end, nothing but those bytes is read, one by one: a copy of part
// of a word leaves the others alone, too, but tools take it for one of the whole.
MX_DEVICE void copy_part(unsigned to, const unsigned char* word, int bytes,
                         const unsigned char* end) {
    if (bytes > 0 && word + 4 <= end) {
        copy_word_async(to, word, bytes);
    } else {
        unsigned scales = 0;
        for (int i = 0; i < bytes; ++i)
            scales |= static_cast<unsigned>(word[i]) << 8 * i;
        store_shared_4(to, scales);
    }
}
MX_DEVICE void copy_scales(unsigned to, const unsigned char* from, int blocks,
                           const unsigned char* end) {
    if constexpr (kWhole) {
        copy_word_async(to, from);
    } else {
        const int before = reinterpret_cast<unsigned long>(from) % 4;
        copy_part(to, from - before, min(before + blocks, 4), end);
        copy_part(to + 4, from - before + 4, before + blocks - 4, end);
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
    unsigned a_div_inverse;              // times 2^32, rounded up; of 1, 0
    int opened = 0, slot = 0, entry = 0; // entries so far; the next slots of ring and queue
    int chunk;                           // the next one
    static constexpr int kScaleRows = (kRows + kLanes - 1) / kLanes;
    unsigned tile_of_rows, w_rows[kRows / 4], ws_rows[kScaleRows]; // of w, that this lane copies
    int x_rows[kCols / 4], xs_row; // that this lane copies of the open entry, or -1
    bool is_over = false;          // no entry is left
    long asked_at = -1;            // place of the item of ask_for_first(), until it is opened
    unsigned asked_tile;
    const unsigned char *xs_end, *ws_end; // of scales, unless K is whole

    MX_MEMBER Filler(const MoeArgs& a, Walk& walk, unsigned ring, Entry* queue, int lane, int warp)
        : a(a), walk(walk), ring(ring), queue(queue), lane(lane), warp(warp),
          a_div_inverse(a.a_div == 1 ? 0 : ~0u / static_cast<unsigned>(a.a_div) + 1) {
        if constexpr (!kWhole) {
            xs_end = a.xs + a.row_of_blocks(x_row(a.num_valid - 1) + 1);
            ws_end = a.ws + static_cast<Offset>(a.num_experts) * a.N * a.blocks();
        }
        find_w_rows(walk.next_tile);
    }
    // Those of w that this lane copies.
    MX_MEMBER void find_w_rows(unsigned tile) {
        tile_of_rows = tile;
#pragma unroll
        for (int i = 0; i < kRows / 4; ++i)
            w_rows[i] = Rows::row(a, tile, lane / 8 + 4 * i);
#pragma unroll
        for (int i = 0; i < kScaleRows; ++i)
            ws_rows[i] = Rows::row(a, tile, i * kLanes + lane);
    }

    // Asks for the first chunk of w as soon as its expert is known. Whether its block has rows is
    // found out meanwhile.
    MX_MEMBER void ask_for_first() {
        if (walk.next_begin >= walk.padded ||
            static_cast<unsigned>(walk.next_expert) >= static_cast<unsigned>(a.num_experts))
            return;
        walk.expert = walk.next_expert;
        chunk = warp;
        copy_w();
        asked_at = walk.next_begin + walk.next_in_block;
        asked_tile = walk.next_tile;
    }
    // Whether the entry that was just opened is the one whose first chunk has been asked for. If
    // there is another one, that copy must be over before the slot is filled anew.
    MX_MEMBER bool has_first() {
        if (asked_at >= 0 && walk.place == asked_at && walk.tile == asked_tile) {
            asked_at = -1;
            return true;
        }
        drop_first();
        return false;
    }
    MX_MEMBER void drop_first() {
        if (asked_at < 0)
            return;
        copy_commit();
        copy_wait<0>();
        __syncwarp();
        asked_at = -1;
    }
    MX_MEMBER bool open() {
        if (!walk.next(
                [&] {
                    store_zeros<Out, Rows::kFeatures, kActivation != kNoActivation>(a, walk, warp,
                                                                                    kWarps);
                },
                false))
            return false;
        if (walk.tile != tile_of_rows)
            find_w_rows(walk.tile);
        ++opened;
        chunk = warp;
        return true;
    }
    // t / a_div, without the long chain that a division is. The product is at most one too high.
    MX_MEMBER int x_row(unsigned t) const {
        const unsigned row = a_div_inverse == 0 ? t : __umulhi(t, a_div_inverse);
        return row - (row * static_cast<unsigned>(a.a_div) > t);
    }
    // Finds the rows of x of the entry that was opened, and puts it into the queue.
    MX_MEMBER void find_rows() {
        const int row = walk.row(lane % kCols);
        xs_row = row < 0 ? -1 : x_row(row);
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
            to.rows = walk.rows();
        }
        entry = entry + 1 == kEntries ? 0 : entry + 1;
    }
    // Where 16 bytes of a chunk that this lane copies begin in a row, and whether they exist.
    MX_MEMBER Offset place_in_row(bool& exists) const {
        const Offset k = static_cast<Offset>(chunk) * kChunk + lane % 8 * 16;
        exists = kWhole || k < static_cast<Offset>(a.K);
        return exists ? k : 0;
    }
    MX_MEMBER void copy_w() const {
        const unsigned to = ring + slot * kSlotBytes;
        bool exists;
        const Offset first_row = walk.expert * static_cast<Offset>(a.N);
        const unsigned char* w = a.wq + first_row * a.K + place_in_row(exists);
#pragma unroll
        for (int i = 0; i < kRows / 4; ++i)
            copy_once_in_lines_async(to + swizzled(lane / 8, lane % 8) + i * 4 * kChunk,
                                     w + a.row_of_k(w_rows[i]), exists);
        const unsigned char* w_scales = a.ws + first_row * a.blocks() + chunk * kBlocks;
#pragma unroll
        for (int i = 0; i < kScaleRows; ++i) {
            const int r = i * kLanes + lane;
            if (r < kRows)
                copy_scales(to + kWScalesAt + r * kScaleWords * 4,
                            w_scales + a.row_of_blocks(ws_rows[i]), blocks_of(a, chunk), ws_end);
        }
    }
    MX_MEMBER void copy_x() const {
        const unsigned to = ring + slot * kSlotBytes;
        bool exists;
        const unsigned char* x = a.xq + place_in_row(exists);
#pragma unroll
        for (int i = 0; i < kCols / 4; ++i)
            if (x_rows[i] >= 0)
                copy_async(to + kXAt + swizzled(lane / 8, lane % 8) + i * 4 * kChunk,
                           x + a.row_of_k(x_rows[i]), exists);
        if (lane < kCols) {
            const unsigned at = to + kXScalesAt + lane * kScaleWords * 4;
            if (xs_row >= 0) {
                copy_scales(at, a.xs + a.row_of_blocks(xs_row) + chunk * kBlocks,
                            blocks_of(a, chunk), xs_end);
            } else {
#pragma unroll
                for (int i = 0; i < kScaleWords; ++i)
                    store_shared_4(at + i * 4, 0x7f7f7f7f); // so that no sum looks unusual
            }
        }
    }
    // Brings this warp's next chunk, if there is one: of w, of x, or both.
    MX_MEMBER void fill(bool of_w, bool of_x) {
        const bool opens = opened == 0 || chunk >= a.chunks();
        if (!opens || open()) {
            if (of_w && !(opens && has_first()))
                copy_w();
            if (opens) // once the weights are asked for, to which all this makes no difference
                find_rows();
            if (of_x)
                copy_x();
            if (opens && walk.looks_ahead)
                walk.look_ahead();
            chunk += kWarps;
        } else if (of_x) {
            drop_first();
            is_over = true;
            launch_dependents(); // not before, else what comes next settles unevenly on the SMs
        }
        if (of_x)
            copy_commit();
        slot = slot + 1 == kDepth ? 0 : slot + 1;
    }
};

} // namespace mx
