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

#include "../linear/rescaling_sm90.h"
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
            const unsigned box = blocks.shared + ring.at * kBlockBytes + thread * kStepBytes;
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
                    rewrite_apart(block, box, row, tops[turn]);
                else
                    tell(block, e8m0_to_f32(common), kRowsApart, common * kEach);
                fence_async();
            }
            barrier_arrive_warp(done, thread % kLanes);
        }
    }

  private:
    static constexpr unsigned kOne = rescaling::kOne, kNanPayloads = rescaling::kNanPayloads;
    static constexpr int kBlock = 32, kBlocks = kStepBytes / kBlock, kWords = kBlock / 4;
    static constexpr int kThreads = kLanes * RawBlocks::kWarps, kBarrier = 1;
    static constexpr unsigned kEach = 0x01010101, kHigh = 0x80 * kEach;
    static constexpr unsigned kMagnitudes = 0x7f * kEach, kTwos = 0x40 * kEach;
    static constexpr unsigned kUnknown = ~0u;
    static_assert(kThreads == kTileRows, "a thread has a row");

    struct Words {
        u32x4 halves[2];
        MX_MEMBER unsigned& operator[](int i) { return halves[i / 4].words[i % 4]; }
        MX_MEMBER static Words all(unsigned x) { return {{{x, x, x, x}, {x, x, x, x}}}; }
    };
    // Where a piece of 16 bytes of the thread's row lies, see swizzled_128.
    MX_MEMBER unsigned address(unsigned box, int piece) const {
        return box + (piece ^ thread % 8) * 16;
    }
    MX_MEMBER Words load_words(unsigned box, int block) const {
        return {
            {load_shared_16(address(box, 2 * block)), load_shared_16(address(box, 2 * block + 1))}};
    }
    MX_MEMBER void store_words(unsigned box, int block, const Words& words) const {
        store_shared_16(address(box, 2 * block), words.halves[0].words);
        store_shared_16(address(box, 2 * block + 1), words.halves[1].words);
    }

    // The scales of a row's blocks of 32 k, and how many of these there are.
    struct Row {
        unsigned scales;
        int blocks;
        MX_MEMBER unsigned scale(int block) const { return scales >> 8 * block & 0xff; }
    };
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

    // Puts the row's blocks under another scale, and returns true if none loses too much by it;
    // false, too, if one is zero, whose scale does not count.
    MX_MEMBER bool rewrite(unsigned box, const Row& row, unsigned common) const {
        if (row.blocks == 0) {
            for (int i = 0; i < kBlocks; ++i)
                store_words(box, i, Words::all(0));
            return true;
        }
        bool right = !rescaling::is_far(common) && common != kNanScale;
        unsigned others = 0; // a bit for each block with values that were not to be subtracted from
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
            Words words = load_words(box, i);
            // Where e4m3 is normal and stays so, two to the power of -down is a subtraction.
            const unsigned down = down_of(row, i, common);
            const unsigned least = kHigh - (down == 0 ? 0 : (down + 1) * 8 * kEach);
            unsigned small = 0, any = 0; // small: or NaN
#pragma unroll
            for (int w = 0; w < kWords; ++w) {
                const unsigned magnitudes = words[w] & kMagnitudes;
                small |= ~(magnitudes + least) | magnitudes + kEach;
                words[w] -= down * 8 * kEach;
                any |= words[w];
            }
            const bool is_other = small & kHigh;
            others |= is_other << i;
            right &= is_other || is_right(row, i, down, any);
            store_words(box, i, words);
        }
#pragma unroll 1
        for (; others != 0; others &= others - 1)
            right &= multiply_again(box, row, __ffs(others) - 1, common);
        return right;
    }
    MX_MEMBER static unsigned down_of(const Row& row, int i, unsigned common) {
        return i < row.blocks ? common - row.scale(i) : 0;
    }
    MX_MEMBER static bool is_right(const Row& row, int i, unsigned down, unsigned any) {
        const bool is = down < 8 && (any & (down == 0 ? kMagnitudes : kTwos)) != 0;
        return is || i >= row.blocks;
    }
    // Undoes the subtraction from a block, and multiplies.
    MX_MEMBER bool multiply_again(unsigned box, const Row& row, int i, unsigned common) const {
        Words words = load_words(box, i);
        const unsigned down = down_of(row, i, common);
        unsigned any = 0;
#pragma unroll
        for (int w = 0; w < kWords; ++w)
            words[w] += down * 8 * kEach;
        multiply(words, down);
#pragma unroll
        for (int w = 0; w < kWords; ++w)
            any |= words[w];
        store_words(box, i, words);
        return is_right(row, i, down, any);
    }
    MX_MEMBER static void multiply(Words& words, unsigned down) {
        const unsigned factors = (15 - down << 10) * 0x00010001u;
#pragma unroll
        for (int w = 0; w < kWords; ++w)
            words[w] = rescaling::rescaled(words[w], factors);
    }

    // Stores what the product finds a block's scales by: those of four blocks of each row, and
    // what all rows have in common.
    MX_MEMBER void tell(const RawBlock& block, float common, float kind, unsigned of_row) const {
        block.words[thread] = of_row;
        if (thread == 0) {
            block.common[0] = common;
            block.common[blocks.of.operands().blocks()] = kind;
        }
    }

    // Rewrites a block, of which not all may have a scale in common: each row's, or each block's.
    // What was there is overwritten by now.
    MX_MEMBER void rewrite_apart(const RawBlock& block, unsigned box, const Row& row,
                                 unsigned (&of_warps)[RawBlocks::kWarps]) const {
        using namespace rescaling;
        unsigned most[kBlocks], top = 0; // 0 where no value counts
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
            const bool counts = i < row.blocks && row.scale(i) != kNanScale;
            most[i] = counts ? largest(words_of_w(block, i)) : 0;
            top = max(top, most[i] == 0 ? 0 : row.scale(i) + 1);
        }
        leave_top(top, of_warps);
        named_barrier(kBarrier, kThreads);
        const unsigned top_of_all = top_of_warps(of_warps);
        const unsigned common = top_of_all == 0 ? kOne : top_of_all - 1;
        const unsigned own = top == 0 ? kOne : top - 1;
        bool rows_apart = false, apart = false, far = false;
        unsigned each = 0;
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
            const unsigned scale = most[i] == 0 ? kOne : row.scale(i);
            rows_apart |= loses(most[i], scale, common);
            apart |= loses(most[i], scale, own);
            far |= is_far(scale);
            each |= scale << 8 * i;
        }
        const bool some = top_of_all != 0; // where all are zero any scale will do
        rows_apart = named_barrier_or(kBarrier, kThreads, rows_apart && some);
        apart = named_barrier_or(kBarrier, kThreads, apart && some);
        far = named_barrier_or(kBarrier, kThreads, far);
        tell(block,
             apart        ? 0
             : rows_apart ? -1
                          : e8m0_to_f32(common),
             !apart ? kRowsApart
             : far  ? kFarApart
                    : kBlocksApart,
             apart        ? each
             : rows_apart ? own * kEach
                          : common * kEach);
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
            if (i >= row.blocks)
                continue;
            Words words = Words::all(kNanPayloads);
            if (row.scale(i) != kNanScale) {
                words = words_of_w(block, i);
                if (most[i] != 0 && !apart)
                    multiply(words, (rows_apart ? own : common) - row.scale(i));
            }
            store_words(box, i, words);
        }
    }

    // The words of the row's i-th block as they are in w.
    MX_MEMBER Words words_of_w(const RawBlock& block, int i) const {
        const unsigned char* const at = block.payload + further * blocks.of.K + i * kBlock;
        return {{load(at), load(at + 16)}};
    }
    // Of their magnitudes in e4m3.
    MX_MEMBER static unsigned largest(const Words& words) {
        return max(rescaling::largest_magnitude(words.halves[0]),
                   rescaling::largest_magnitude(words.halves[1]));
    }
};

} // namespace mx
