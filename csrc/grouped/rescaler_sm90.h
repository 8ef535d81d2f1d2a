// Puts tiles of w under one scale for 128 k while they are multiplied: what the launch ahead does
// to a linear's w, see rescaling_sm90.h, to blocks of 128 rows x 128 k in shared memory.
//
//   loader, a thread: has blocks of w copied by TMA into shared memory, a ring, once their place in
//     the ring of tiles is free
//   rescaler, a warpgroup: rewrites a block where it lies. A thread has a row
//   storers, two threads: have rewritten blocks copied to their place, and count the tile's steps
//
// CTAs take blocks as they come to it, those of a tile one after another. A tile's place is free
// once all products have read the tile that it had before.
#pragma once

#include "../linear/rescaled_row_sm90.h"
#include "common/target.h"
#include "rescaled_groups_sm90.h"
#include "sm90/memory.h"
#include "sm90/tma.h"

namespace mx {

constexpr int kStepBytes = RescaledOperands::kStepK, kBlockBytes = kTileRows * kStepBytes;
constexpr int kRawBlocks = MX_RAW_BLOCKS;
using RawRing = PipelineState<kRawBlocks>;

// A block that is in shared memory, of a tile of w, and where its rows are: the first of w, and
// what the product finds their scales by. The tile is negative where there are no more.
struct RawBlock {
    const unsigned char *payload, *scales;
    unsigned* words;
    float* common;
    int tile, step;
    int rows, blocks; // that w has: of each run of rows, and of a row's of 32 k
};

// What these share.
struct RawBlocks {
    GroupWorkspace of;
    unsigned shared;             // addresses: of the blocks,
    unsigned came, done, copied; // and of barriers of each: it came, was rewritten, was copied
    RawBlock* each;              // in shared memory

    static constexpr int kWarps = 4, kStorers = 2; // kWarps: of the rescaler

    // Has the barriers ready.
    MX_MEMBER void init() const {
        for (int i = 0; i < kRawBlocks; ++i) {
            barrier_init(came + 8 * i, 1);
            barrier_init(done + 8 * i, kWarps);
            barrier_init(copied + 8 * i, 1);
        }
    }
    MX_MEMBER int steps() const { return of.operands().steps(); }
    // Of the operands, a tile's first row.
    MX_MEMBER int row_of(int tile) const {
        return of.operands().first_w() + tile % of.room * kTileRows;
    }
};
static_assert(kRawBlocks % RawBlocks::kStorers == 0, "a place of the ring is of one storer");

struct Loader {
    const RawBlocks& blocks;
    const TensorMap& weights;
    const unsigned char *payload, *scales; // of w

    MX_MEMBER void run() const {
        const unsigned all = blocks.of.busy()[0] * blocks.of.across() * blocks.steps();
        RawRing ring;
        for (unsigned number = claim(); number < all; ring.next()) {
            const unsigned next = claim();
            while (!is_free(number / blocks.steps()))
                ;
            barrier_wait(blocks.copied + 8 * ring.at, ring.parity ^ 1);
            load(number, ring.at);
            number = next;
        }
        for (int i = 0; i < RawBlocks::kStorers; ++i, ring.next()) {
            barrier_wait(blocks.copied + 8 * ring.at, ring.parity ^ 1);
            blocks.each[ring.at].tile = -1;
            barrier_arrive(blocks.came + 8 * ring.at);
        }
    }

  private:
    MX_MEMBER unsigned claim() const { return add_relaxed(blocks.of.claimed(), 1); }
    // Whether all products have read what a tile's place had. What follows are writes to it alone,
    // which wait for the answer.
    MX_MEMBER bool is_free(int tile) const {
        const GroupWorkspace of = blocks.of.anew();
        const int before = tile - of.room;
        if (before < 0)
            return true;
        const int group = of.busy()[1 + before / of.across()];
        return load_relaxed(of.used() + before) == of.count_of_x(group);
    }
    MX_MEMBER void load(int number, int at) const {
        const GroupWorkspace of = blocks.of.anew();
        const RescaledOperands to = of.operands();
        const int tile = number / to.steps(), step = number % to.steps();
        const int group = of.busy()[1 + tile / of.across()], first = tile % of.across() * kRunRows;
        const long row = group * of.N + first;
        unsigned* const words = to.words() + step * static_cast<long>(to.words_of_step());
        const long of_row = of.K / 32, before = step * (kStepBytes / 32);
        blocks.each[at] = {payload + row * of.K + step * kStepBytes,
                           scales + row * of_row + before,
                           words + blocks.row_of(tile),
                           reinterpret_cast<float*>(words + to.rows()) +
                               blocks.row_of(tile) / kTileRows,
                           tile,
                           step,
                           static_cast<int>((kRunRows == kTileRows ? of.N : of.features()) - first),
                           static_cast<int>(of_row - before)};
        const unsigned barrier = blocks.came + 8 * at;
        barrier_arrive_expect(barrier, kBlockBytes);
#pragma unroll
        for (int i = 0; i < kTileRows; i += kRunRows)
            tma_load(blocks.shared + at * kBlockBytes + i * kStepBytes, weights, step * kStepBytes,
                     row + i / kRunRows * of.features(), barrier);
    }
};

struct Storer {
    const RawBlocks& blocks;
    const TensorMap& operands;
    int index;

    MX_MEMBER void run() const {
        for (RawRing ring;; ring.next()) {
            if (ring.at % RawBlocks::kStorers != index)
                continue;
            barrier_wait(blocks.done + 8 * ring.at, ring.parity);
            const int tile = blocks.each[ring.at].tile, step = blocks.each[ring.at].step;
            if (tile < 0)
                return;
            tma_store(operands, step * kStepBytes, blocks.row_of(tile),
                      blocks.shared + ring.at * kBlockBytes);
            tma_store_commit();
            tma_store_wait_read<0>();
            barrier_arrive(blocks.copied + 8 * ring.at);
            tma_store_wait();
            fence_async_global();
            add_release(blocks.of.ready() + tile, 1);
        }
    }
};

struct Rescaler {
    const RawBlocks& blocks;
    unsigned (*tops)[RawBlocks::kWarps]; // in shared memory, two by turns
    int thread;
    // Which of a run's rows is the thread's, and how far into w it is from the tile's first.
    const int of_run = thread % kRunRows;
    const long further = of_run + thread / kRunRows * blocks.of.features();

    // While a block is rewritten the next one's scales are loaded, if it has come; each warp then
    // leaves the largest of its own behind, so that one barrier serves for both blocks.
    MX_MEMBER void run() const {
        RawRing ring;
        Row row{}, next{};
        bool known = false; // whether the next block's is
        if (thread < RawBlocks::kWarps)
            tops[0][thread] = kUnknown;
        named_barrier(kBarrier, kThreads);
        int ended = 0;
        for (int turn = 0; ended < RawBlocks::kStorers; turn ^= 1) {
            barrier_wait(blocks.came + 8 * ring.at, ring.parity);
            const RawBlock& block = blocks.each[ring.at];
            const unsigned box = blocks.shared + ring.at * kBlockBytes;
            const unsigned done = blocks.done + 8 * ring.at;
            ring.next();
            if (__any_sync(~0u, block.tile < 0)) {
                ++ended;
            } else {
                unsigned top = top_of_warps(tops[turn]);
                row = next;
                if (__any_sync(~0u, top == kUnknown)) {
                    if (!known)
                        row = load_row(block);
                    named_barrier(kBarrier, kThreads); // all have read what was here
                    leave_top(top_of(row), tops[turn]);
                    named_barrier(kBarrier, kThreads);
                    top = top_of_warps(tops[turn]);
                }
                const unsigned common = top == 0 ? kOne : top - 1;
                known = __all_sync(~0u, barrier_test(blocks.came + 8 * ring.at, ring.parity));
                if (known)
                    next = load_row(blocks.each[ring.at]);
                const bool fails = !rewrite(box, row, common);
                leave_top(known ? top_of(next) : kUnknown, tops[turn ^ 1]);
                if (named_barrier_or(kBarrier, kThreads, fails))
                    tell(block, rewrite_apart(block, box, row, tops[turn]));
                else
                    tell(block, {e8m0_to_f32(common), common * RowScales::kEach});
                fence_async();
            }
            barrier_arrive_warp(done, thread % kLanes);
        }
    }

  private:
    static constexpr unsigned kOne = rescaling::kOne;
    static constexpr int kBlock = RowScales::kBlock, kBlocks = RowScales::kMost;
    static constexpr int kThreads = kLanes * RawBlocks::kWarps, kBarrier = 1;
    static constexpr unsigned kUnknown = ~0u;
    static_assert(kThreads == kTileRows, "a thread has a row");

    using Row = RowScales;
    MX_MEMBER Row load_row(const RawBlock& block) const {
        if (block.tile < 0 || of_run >= block.rows)
            return {0, 0};
        const unsigned char* const at = block.scales + further * (blocks.of.K / kBlock);
        if (blocks.of.K % kStepBytes == 0)
            return {load_word(at), kBlocks};
        Row row{0, min(block.blocks, kBlocks)};
#pragma unroll
        for (int i = 0; i < kBlocks; ++i)
            row.scales |= (i < row.blocks ? load_byte(at + i) : 0) << 8 * i;
        return row;
    }

    // The largest scale of a row, plus 1, or 0 if there is none.
    MX_MEMBER static unsigned top_of(const Row& row) {
        unsigned top = 0;
#pragma unroll
        for (int i = 0; i < kBlocks; ++i)
            top = max(top, i < row.blocks ? row.scale(i) + 1 : 0);
        return top;
    }
    // Leaves a warp's largest behind, and finds that of all warps.
    MX_MEMBER void leave_top(unsigned top, unsigned (&of_warps)[RawBlocks::kWarps]) const {
        top = __reduce_max_sync(~0u, top);
        if (thread % kLanes == 0)
            of_warps[thread / kLanes] = top;
    }
    MX_MEMBER static unsigned top_of_warps(const unsigned (&of_warps)[RawBlocks::kWarps]) {
        unsigned top = 0;
#pragma unroll
        for (int i = 0; i < RawBlocks::kWarps; ++i)
            top = max(top, of_warps[i]);
        return top;
    }

    // Puts the row's blocks under another scale, see RowInPlace. Rows that w has not become zeros.
    MX_MEMBER bool rewrite(unsigned box, const Row& row, unsigned common) const {
        const RowInPlace in_place = RowInPlace::of(box, thread);
        if (row.blocks > 0)
            return in_place.rewrite(row, common);
        for (int i = 0; i < kBlocks; ++i)
            in_place.store(i, RowInPlace::Words::all(0));
        return true;
    }
    MX_MEMBER RescaledRow rewrite_apart(const RawBlock& block, unsigned box, const Row& row,
                                        unsigned (&of_warps)[RawBlocks::kWarps]) const {
        const auto largest_of = [&](unsigned top) {
            leave_top(top, of_warps);
            named_barrier(kBarrier, kThreads);
            return top_of_warps(of_warps);
        };
        const auto any_of = [](bool x) { return named_barrier_or(kBarrier, kThreads, x); };
        const unsigned char* const from = block.payload + further * blocks.of.K;
        return RowInPlace::of(box, thread).rewrite_apart(row, from, largest_of, any_of);
    }

    // Stores what the product finds a block's scales by: those of four blocks of each row, and
    // what all rows have in common.
    MX_MEMBER void tell(const RawBlock& block, const RescaledRow& found) const {
        block.words[thread] = found.of_row;
        if (thread == 0) {
            const bool alike = found.common >= 0, by_rows = found.common == kRowsApart;
            block.common[0] = alike ? found.common : by_rows ? -1 : 0;
            block.common[blocks.of.operands().blocks()] = alike ? kRowsApart : found.common;
        }
    }
};

} // namespace mx
