// How a consumer of the grouped GEMM on Hopper stores its part of a tile.
//
// 16-bit results go through shared memory, from where the copy engine takes them to memory, in
// boxes of 32 tokens, while the next tile is multiplied. They need more room than there is beside
// the rings: so the stages that were used last are given back only when they have been read, by
// each warp once it has seen that those that it sent have been.
#pragma once

#include "common/epilogue.h"
#include "sm90/async.h"
#include "sm90/copy.h"
#include "sm90/global.h"
#include "sm90/tensor_map.h"
#include "stage_sm90.h"

namespace mx {

constexpr int kGroupThreads = 128;
constexpr int kWarps = kGroupThreads / kLanes;
constexpr int kBoxRows = 32, kBoxBytes = kBoxRows * kGroupRows * 2;
constexpr int kOwnBoxes = kStagingBytes / kBoxBytes;
static_assert(kOwnBoxes + 4 + kBoxUnits == 8, "four in the stage's x, and the others in its w");
constexpr int kConsumersBarrier = 1 + kConsumers; // a named one of all, after those of each

struct Results {
    const Operands& t;
    const TensorMap& map;
    const TokenTile& tokens;
    int n, index, thread;
    // Where boxes are staged: kOwnBoxes in a place of this consumer's, four in its part of the x
    // that was used last, the others in that of w.
    unsigned own, in_x, in_w;

    // Returns whether again holds for any thread.
    template <int Slabs>
    MX_MEMBER bool store(const float (&sums)[Slabs * 32], const float (&added)[2],
                         bool again) const {
        if constexpr (sizeof(Out) == 4)
            return store_fp32<Slabs>(sums, added, again);
        else
            return store_16<Slabs>(sums, added, again);
    }

  private:
    template <int Slabs>
    MX_MEMBER bool store_fp32(const float (&sums)[Slabs * 32], const float (&added)[2],
                              bool again) const {
        const int lane = thread % kLanes;
        const long first = n + thread / kLanes * 16 + lane / 4; // row of w
        Out* to = t.y + (tokens.row + lane % 4 * 2) * t.N + first;
#pragma unroll
        for (int i = 0; i < Slabs * 32; ++i) {
            const int token = i / 4 * 8 + i % 2, row = i / 2 % 2 * 8;
            if (token + lane % 4 * 2 < tokens.rows && first + row < t.N)
                mx::store(to + token * t.N + row, sums[i] + added[i / 2 % 2]);
        }
        return named_barrier_or(1 + index, kGroupThreads, again);
    }

    template <int Slabs>
    MX_MEMBER bool store_16(const float (&sums)[Slabs * 32], const float (&added)[2],
                            bool again) const {
        constexpr int boxes = Slabs * kSlabRows / kBoxRows;
        // The warps have seen that what was staged before has been read.
        named_barrier(1 + index, kGroupThreads);
        stage<Slabs, 0, (boxes < kOwnBoxes ? boxes : kOwnBoxes)>(sums, added);
        if constexpr (boxes <= kOwnBoxes) {
            const bool any = named_barrier_or(1 + index, kGroupThreads, again);
            send<0, boxes>();
            return any;
        } else {
            // The other consumer, if it has rows of w, may still multiply by the stage.
            if (n + (1 - 2 * index) * kGroupRows < t.N)
                named_barrier(kConsumersBarrier, kConsumers * kGroupThreads);
            else
                named_barrier(1 + index, kGroupThreads);
            send<0, kOwnBoxes>();
            stage<Slabs, kOwnBoxes, boxes>(sums, added);
            const bool any = named_barrier_or(1 + index, kGroupThreads, again);
            send<kOwnBoxes, boxes>();
            return any;
        }
    }

    MX_MEMBER unsigned place(int box) const {
        return box < kOwnBoxes       ? own + box * kBoxBytes
               : box < kOwnBoxes + 4 ? in_x + (box - kOwnBoxes) * kBoxBytes
                                     : in_w + (box - kOwnBoxes - 4) * kBoxBytes;
    }

    // Adding nothing takes as many instructions as all else.
    template <int Slabs, int First, int End>
    MX_MEMBER void stage(const float (&sums)[Slabs * 32], const float (&added)[2]) const {
        if (t.bias_kind == kNone)
            stage_sums<Slabs, First, End, false>(sums, added);
        else
            stage_sums<Slabs, First, End, true>(sums, added);
    }

    // Stages some boxes as [token][n], 128 bytes a token, 16 bytes at place ^ token % 8, as the map
    // has them.
    template <int Slabs, int First, int End, bool Biased>
    MX_MEMBER void stage_sums(const float (&sums)[Slabs * 32], const float (&added)[2]) const {
        const int lane = thread % kLanes, row = lane % 8;
        const int piece = (thread / kLanes * 2 + lane / 8 % 2) ^ row;
        const unsigned at_place = (lane / 16 * 8 + row) * 128 + piece * 16;
#pragma unroll
        for (int box = First; box < End; ++box) {
#pragma unroll
            for (int j = 0; j < 2; ++j) { // 16 tokens
                unsigned packed[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int at = ((box * 2 + j) * 2 + i / 2) * 4 + i % 2 * 2;
                    const float plus = Biased ? added[i % 2] : -0.0f;
                    packed[i] = pack<Out>(sums[at] + plus, sums[at + 1] + plus);
                }
                store_matrices_transposed(place(box) + at_place + j * 16 * 128, packed);
            }
        }
        fence_async();
    }

    // Stores boxes that all threads have staged.
    template <int First, int End>
    MX_MEMBER void send() const {
        const bool aligned = reinterpret_cast<unsigned long long>(t.y) % 16 == 0;
        // Each warp's first thread stores some of the boxes that are whole, all threads the others.
        const int whole = max(First, aligned ? min(tokens.rows / kBoxRows, End) : 0);
        if (thread % kLanes == 0) {
#pragma unroll 1
            for (int box = First + (thread / kLanes - First & kWarps - 1); box < whole;
                 box += kWarps)
                store_box(map, n * sizeof(Out), tokens.row + box * kBoxRows, place(box));
            store_commit();
        }
#pragma unroll 1
        for (int box = whole; box < End; ++box)
            send_rows(box * kBoxRows, place(box), aligned);
    }

    // Stores the rows of a box that are of the tile, where the copy engine cannot.
    MX_MEMBER void send_rows(int first, unsigned staged, bool aligned) const {
        const int piece = thread % 8, rows = min(tokens.rows - first, kBoxRows);
        if (n + piece * 8 >= t.N)
            return;
#pragma unroll 1
        for (int row = thread / 8; row < rows; row += kGroupThreads / 8) {
            const u32x4 values = load_shared_vector(staged + row * 128 + (piece ^ (row % 8)) * 16);
            Out* to = t.y + (tokens.row + first + row) * t.N + n + piece * 8;
            if (aligned)
                store_vector(to, values);
            else
                store_halves(to, values);
        }
    }

    MX_MEMBER static void store_halves(Out* to, const u32x4& values) {
        unsigned short* halves = reinterpret_cast<unsigned short*>(to);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            halves[i] = values[i / 2] >> (i % 2 * 16);
    }
};

} // namespace mx
