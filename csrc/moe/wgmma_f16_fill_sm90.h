// The warps of wgmma_f16_sm90.cu that make factors of w's scales where there are two tiles.
#pragma once

#include "boxes_sm90.h"
#include "boxes_x_sm90.h"
#include "sm90/memory.h"

namespace mx {

// Beside what one tile needs, scales of w as they are: of the tile that is under way and of the
// next one, so many times of each as are there or on their way.
constexpr int kScaleTurns = 2;
struct SharedOfTwo : Shared {
    alignas(16) unsigned w_scales[2][kScaleTurns][kParts][kGroupRows][kVectorChunks];
};
static_assert(
    sizeof(SharedOfTwo) <= MX_SHARED_BYTES,
    "the host gives too little shared memory: aiter_mx/kernels/moe_gemm/wgmma_f16_sm90.py");

// The largest scales of the first tile's rows, for which all wait. The warps that add have nothing
// to do yet, and registers for all scales of a row at once: they leave them where the first factors
// of the row will be, for the warp that makes these.
struct FirstTops {
    static constexpr int kMeet = kGroupThreads + kLanes;          // threads
    static constexpr int kLanesOfRow = kLanes / 16, kVectors = 6; // loads at once
    static_assert(kTiles <= kDepth, "a part has a stage");

    MX_MEMBER static int barrier(int group) { return 1 + kGroups + group; }
    // By all warps of a group that adds.
    MX_MEMBER static void leave(const MoeArgs& a, Shared& shared, const Entry& first, int group,
                                int warp, int lane) {
        const int vectors = a.chunks() / kVectorChunks; // K is a multiple of 512
        const int row = warp * 16 + lane / kLanesOfRow, own = lane % kLanesOfRow;
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            const unsigned in_w = row_of_w(a, first.tile, group * kTiles + t, row);
            const unsigned char* const scales =
                row_at(a.ws, first.expert * static_cast<int>(a.N) + static_cast<int>(in_w),
                       static_cast<unsigned>(a.K) / kBlock);
            Largest largest;
#pragma unroll 1
            for (int v = own; v < vectors; v += kLanesOfRow * kVectors) {
                unsigned some[kVectors][kVectorChunks] = {};
#pragma unroll
                for (int i = 0; i < kVectors; ++i)
                    if (v + i * kLanesOfRow < vectors)
                        load_scales(some[i], scales + (v + i * kLanesOfRow) * 16);
#pragma unroll
                for (int i = 0; i < kVectors; ++i)
#pragma unroll
                    for (unsigned word : some[i])
                        largest.take(word);
            }
            unsigned both = largest.both();
#pragma unroll
            for (int distance = 1; distance < kLanesOfRow; distance *= 2)
                both = __vmaxu2(both, __shfl_xor_sync(~0u, both, distance));
            if (own == 0)
                shared.factors[group][t][row].y = Largest::of(both);
        }
        named_barrier_arrive(barrier(group), kMeet);
    }
    MX_MEMBER static void wait(int group) { named_barrier(barrier(group), kMeet); }
    MX_MEMBER static unsigned take(const Shared& shared, int group, int t, int row) {
        return shared.factors[group][t][row].y;
    }
};

// Fills the ring of a warpgroup that adds, one warp for each, with factors of scales, relative to
// the row's largest, which is found while the tile before is under way. A lane has a row every
// kLanes, and copies the scales of these itself, so that it waits for no other's.
struct Filler {
    static constexpr int kOwned = kGroupRows / kLanes; // rows of a part
    static constexpr int kBatch = kVectorChunks;       // chunks
    const MoeArgs& a;
    SharedOfTwo& shared;
    const int group, lane;

    static constexpr int kInSector = 32 / kBlocks; // chunks that a prefetch brings
    using Words = unsigned[kTiles][kOwned][kBatch];
    using Tops = unsigned[kTiles][kOwned];
    using Largests = Largest[kTiles][kOwned];
    struct Place {
        int expert;
        unsigned tile, end;
    };

    // The scales of row r of part t. Worked out where they are used, as places of all rows would
    // not fit the registers.
    MX_MEMBER const unsigned char* scales_at(const Place& of, int t, int r) const {
        const unsigned row = row_of_w(a, held(of.tile), group * kTiles + t, lane + r * kLanes);
        return row_at(a.ws, of.expert * static_cast<int>(a.N) + static_cast<int>(row),
                      static_cast<unsigned>(a.K) / kBlock);
    }
    // Starts copies of kBatch chunks, from c on, of all of a lane's rows. which: 0 of the tile that
    // is under way, 1 of the next one.
    MX_MEMBER void ask(int which, int turn, const Place& of, int c) const {
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int r = 0; r < kOwned; ++r)
                copy_scales(asked_at(which, turn, t, r), scales_at(of, t, r) + c * kBlocks, true);
    }
    MX_MEMBER unsigned asked_at(int which, int turn, int t, int r) const {
        return shared_address(shared.w_scales[which][turn][group * kTiles + t][lane + r * kLanes]);
    }
    MX_MEMBER void take_asked(unsigned (&words)[kBatch], int which, int turn, int t, int r) const {
        const uint4 v = load_shared_16(asked_at(which, turn, t, r));
        words[0] = v.x;
        words[1] = v.y;
        words[2] = v.z;
        words[3] = v.w;
    }
    // Makes the factors of the next stage.
    MX_MEMBER void fill_stage(const unsigned (&scales)[kOwned], const unsigned (&top)[kOwned],
                              Turn<kDepth>& to) const {
        barrier_wait(shared_address(shared.empty[group] + to.at), to.parity ^ 1);
#pragma unroll
        for (int r = 0; r < kOwned; ++r)
            shared.factors[group][to.at][lane + r * kLanes] =
                uint2{factors_of(scales[r], top[r]), exponent_of(top[r])};
        __syncwarp();
        if (lane == 0)
            barrier_arrive(shared_address(shared.full[group] + to.at));
        to.next();
    }
    // Fills all of a tile's stages, and finds the largest scales of the next tile's rows.
    MX_MEMBER void fill(const Place& now, const Place& next, const Tops& top, Largests& largest,
                        Turn<kDepth>& to, int chunks) const {
        static_assert(kTiles * kOwned <= kVectorChunks, "each row has a chunk");
        const bool any_next = next.expert >= 0;
        int turn = 0;
        ask(0, turn, now, 0);
        if (any_next)
            ask(1, turn, next, 0);
        copy_commit();
#pragma unroll 1
        for (int c = 0; c < chunks; c += kBatch, turn ^= 1) {
            if (c + kBatch < chunks) {
                ask(0, turn ^ 1, now, c + kBatch);
                if (any_next)
                    ask(1, turn ^ 1, next, c + kBatch);
            }
            copy_commit();
            copy_wait<1>();
            Words words;
#pragma unroll
            for (int t = 0; t < kTiles; ++t)
#pragma unroll
                for (int r = 0; r < kOwned; ++r)
                    take_asked(words[t][r], 0, turn, t, r);
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
#pragma unroll
                for (int t = 0; t < kTiles; ++t) {
                    const unsigned scales[kOwned] = {words[t][0][i], words[t][1][i]};
                    fill_stage(scales, top[t], to);
                }
                if (i < kTiles * kOwned && any_next) {
                    unsigned ahead[kBatch];
                    take_asked(ahead, 1, turn, i / kOwned, i % kOwned);
#pragma unroll
                    for (unsigned word : ahead)
                        largest[i / kOwned][i % kOwned].take(word);
                }
            }
        }
    }
    // The next entry, once it is there.
    MX_MEMBER Place open(const Turn<kEntries>& turn) const {
        barrier_wait(shared_address(shared.opened + turn.at), turn.parity);
        const Entry& entry = shared.queue[turn.at];
        return {entry.expert, entry.tile, entry.end};
    }
    MX_MEMBER void run() const {
        const int chunks = a.chunks();
        Turn<kEntries> turn;
        Turn<kDepth> to;
        Place next = open(turn);
        Tops top;
        Largests largest;
        if (next.expert < 0)
            return;
        FirstTops::wait(group);
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int r = 0; r < kOwned; ++r)
                top[t][r] = FirstTops::take(shared, group, t, lane + r * kLanes);
        while (next.expert >= 0) {
#pragma unroll
            for (int t = 0; t < kTiles; ++t)
#pragma unroll
                for (int r = 0; r < kOwned; ++r)
                    largest[t][r] = {};
            const Place now = next;
            if (++next.tile == next.end) {
                turn.next();
                next = open(turn);
            }
            fill(now, next, top, largest, to, chunks);
#pragma unroll
            for (int t = 0; t < kTiles; ++t)
#pragma unroll
                for (int r = 0; r < kOwned; ++r)
                    top[t][r] = Largest::of(largest[t][r].both());
        }
        copy_wait<0>(); // copies must not outlive the warp
    }
};

} // namespace mx
