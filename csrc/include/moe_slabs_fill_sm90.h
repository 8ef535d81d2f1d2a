// The warps of moe_gemm_slabs_sm90.cu that ask for weights and make factors of their scales.
#pragma once

#include "moe_boxes_sm90.h"
#include "moe_boxes_x_sm90.h"
#include "sm90_mma.h"

namespace mx {

// Fills the ring of a warpgroup that adds, one warp for each: asks for boxes of weights, and makes
// factors of scales, relative to the row's largest, which is found while the tile before is under
// way. A lane has a row every kLanes.
struct Filler {
    static constexpr int kOwned = kGroupRows / kLanes; // rows of a part
    static constexpr int kBatch = kVectorChunks;       // chunks
    const MoeArgs& a;
    Shared& shared;
    const TensorMap& map;
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
    // Of kBatch chunks of a row.
    MX_MEMBER void load(unsigned (&words)[kBatch], const Place& of, int t, int r, int c) const {
        load_scales(words, scales_at(of, t, r) + c * kBlocks);
    }
    MX_MEMBER void load(Words& words, const Place& of, int c) const {
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int r = 0; r < kOwned; ++r)
                load(words[t][r], of, t, r, c);
    }
    // Brings scales of the chunks from c on nearer.
    MX_MEMBER void prefetch(const Place& of, int c) const {
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int r = 0; r < kOwned; ++r)
                prefetch_l2(scales_at(of, t, r) + c * kBlocks);
    }
    // Fills a stage with a part's weights.
    MX_MEMBER void copy(int at, const Place& of, int t, int chunk) const {
        if (!elected_lane())
            return;
        const unsigned full = shared_address(shared.full[group] + at);
        const unsigned stage = shared_address(shared.ring[group][at]);
        barrier_arrive_expect(full, kStageBytes);
        const int part = static_cast<int>(of.tile) * kParts + group * kTiles + t;
        const int row = of.expert * static_cast<int>(a.N) + part * kBoxRows;
        copy_box(stage, map, chunk * kChunk, row, full);
        if constexpr (kHalves)
            copy_box(stage + kStageBytes / 2, map, chunk * kChunk, row + static_cast<int>(a.N) / 2,
                     full);
    }
    // What the first tile waits for.
    MX_MEMBER void begin(const Place& of, Largests& largest, int chunks) const {
        for (int c = 0; c < chunks; c += kInSector)
            prefetch(of, c);
        for (int c = 0; c < chunks; c += kBatch) {
            Words words;
            load(words, of, c);
            take(largest, words);
        }
    }
    MX_MEMBER static void take(Largests& largest, const Words& words) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int r = 0; r < kOwned; ++r)
#pragma unroll
                for (int i = 0; i < kBatch; ++i)
                    largest[t][r].take(words[t][r][i]);
    }
    // Fills the next stage, with a chunk of part t.
    MX_MEMBER void fill_stage(const Place& now, int t, int chunk, const unsigned (&scales)[kOwned],
                              const unsigned (&top)[kOwned], Turn<kDepth>& to, int& asked) const {
        barrier_wait(shared_address(shared.empty[group] + to.at), to.parity ^ 1);
        if (asked > 0)
            --asked;
        else
            copy(to.at, now, t, chunk);
#pragma unroll
        for (int r = 0; r < kOwned; ++r)
            shared.factors[group][to.at][lane + r * kLanes] =
                uint2{factors_of(scales[r], top[r]), exponent_of(top[r])};
        __syncwarp();
        if (lane == 0)
            barrier_arrive(shared_address(shared.full[group] + to.at));
        to.next();
    }
    // Fills all of a tile's stages, and finds the largest scales of the next tile's rows, of which
    // one row's are loaded with each chunk. Loads find scales in the L2.
    MX_MEMBER void fill(const Place& now, const Place& next, Words& words, const Tops& top,
                        Largests& largest, Turn<kDepth>& to, int& asked, int chunks) const {
        static_assert(kTiles * kOwned <= kVectorChunks, "each row has a chunk");
        const bool any_next = next.expert >= 0;
        for (int c = 0; c < chunks; c += kBatch) {
            if (c > 0)
                load(words, now, c);
            if (c % kInSector != 0 || c + kBatch == chunks) {
                const int later = c + kBatch;
                if (later < chunks)
                    prefetch(now, later);
                if (any_next)
                    prefetch(next, later < chunks ? later : 0);
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int t_of = i / kOwned, r_of = i % kOwned;
                unsigned ahead[kBatch] = {};
                if (i < kTiles * kOwned && any_next)
                    load(ahead, next, t_of, r_of, c);
#pragma unroll
                for (int t = 0; t < kTiles; ++t) {
                    const unsigned scales[kOwned] = {words[t][0][i], words[t][1][i]};
                    fill_stage(now, t, c + i, scales, top[t], to, asked);
                }
                if (i < kTiles * kOwned)
#pragma unroll
                    for (unsigned word : ahead)
                        largest[t_of][r_of].take(word);
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
        int asked = 0; // stages that are under way already
        Words words;
        Tops top;
        Largests largest;
        if (next.expert >= 0) {
            asked = min(kDepth, chunks * kTiles);
            for (int i = 0; i < asked; ++i)
                copy(i, next, i % kTiles, i / kTiles);
            begin(next, largest, chunks);
        }
        while (next.expert >= 0) {
#pragma unroll
            for (int t = 0; t < kTiles; ++t)
#pragma unroll
                for (int r = 0; r < kOwned; ++r) {
                    top[t][r] = Largest::of(largest[t][r].both());
                    largest[t][r] = {};
                }
            const Place now = next;
            load(words, now, 0);
            if (++next.tile == next.end) {
                turn.next();
                next = open(turn);
            }
            fill(now, next, words, top, largest, to, asked, chunks);
        }
        launch_dependents(); // not before, else what comes next settles unevenly on the SMs
    }
};

} // namespace mx
