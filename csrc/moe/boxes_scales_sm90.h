// The warps of wgmma_f16_sm90.cu that make factors of w's scales.
#pragma once

#include "boxes_sm90.h"

namespace mx {

// Makes factors of scales of w: relative to the row's largest, which is found while the tile before
// is under way. A warp for each warpgroup that adds, whose lanes have a row every kLanes.
struct Scaler {
    static constexpr int kOwned = kGroupRows / kLanes, kBatch = 2; // rows, chunks
    const MoeArgs& a;
    Shared& shared;
    const int group, lane;

    using Words = unsigned[kOwned][kBatch];
    MX_MEMBER static void load(Words& words, const unsigned char* const (&from)[kOwned], int c,
                               int chunks) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
#pragma unroll
            for (int r = 0; r < kOwned; ++r) {
                words[r][i] = 0;
                if (c + i < chunks)
                    words[r][i] = load_word(from[r] + (c + i) * kBlocks);
            }
    }
    MX_MEMBER void locate(const unsigned char* (&rows)[kOwned], int expert, unsigned tile) const {
#pragma unroll
        for (int r = 0; r < kOwned; ++r) {
            const unsigned row = row_of_w(a, tile, group, lane + r * kLanes);
            rows[r] = a.ws + (expert * static_cast<Offset>(a.N) + row) * a.blocks();
        }
    }
    // The largest scales of the first tile, which waits for all of them: they are asked for at
    // once, and loaded many at a time.
    MX_MEMBER static void begin(Largest (&largest)[kOwned],
                                const unsigned char* const (&from)[kOwned], int chunks) {
#pragma unroll 1
        for (int c = 0; c < chunks; c += 32 / kBlocks) // of a sector
#pragma unroll
            for (int r = 0; r < kOwned; ++r)
                prefetch_l2(from[r] + c * kBlocks);
        constexpr int vectors = 3; // at once
        const int whole = chunks / kVectorChunks * kVectorChunks;
#pragma unroll 1
        for (int c = 0; c < whole; c += vectors * kVectorChunks) {
            unsigned some[kOwned][vectors][kVectorChunks] = {};
#pragma unroll
            for (int r = 0; r < kOwned; ++r)
#pragma unroll
                for (int i = 0; i < vectors; ++i)
                    if (c + i * kVectorChunks < whole)
                        load_scales(some[r][i], from[r] + (c + i * kVectorChunks) * kBlocks);
#pragma unroll
            for (int r = 0; r < kOwned; ++r)
#pragma unroll
                for (int i = 0; i < vectors; ++i)
#pragma unroll
                    for (unsigned word : some[r][i])
                        largest[r].take(word);
        }
        for (int c = whole; c < chunks; ++c)
#pragma unroll
            for (int r = 0; r < kOwned; ++r)
                largest[r].take(load_word(from[r] + c * kBlocks));
    }
    MX_MEMBER void run() const {
        const int chunks = a.chunks();
        Turn<kEntries> turn;
        Turn<kDepth> to;
        barrier_wait(shared_address(shared.opened + turn.at), turn.parity);
        int expert = shared.queue[turn.at].expert;
        unsigned tile = shared.queue[turn.at].tile, end = shared.queue[turn.at].end;
        if (expert < 0)
            return;
        const unsigned char *rows[kOwned], *next[kOwned];
        Words words;
        unsigned top[kOwned];
        locate(rows, expert, tile);
        Largest largest[kOwned];
        begin(largest, rows, chunks);
        while (expert >= 0) {
#pragma unroll
            for (int r = 0; r < kOwned; ++r) {
                top[r] = Largest::of(largest[r].both());
                largest[r] = {};
            }
            load(words, rows, 0, chunks);
            if (++tile == end) {
                turn.next();
                barrier_wait(shared_address(shared.opened + turn.at), turn.parity);
                expert = shared.queue[turn.at].expert;
                tile = shared.queue[turn.at].tile;
                end = shared.queue[turn.at].end;
            }
            locate(next, max(expert, 0), tile);
            for (int c = 0; c < chunks; c += kBatch) {
                Words later, ahead;
                load(later, rows, c + kBatch, chunks);
                load(ahead, next, c, expert < 0 ? 0 : chunks);
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    if (c + i >= chunks)
                        break;
                    barrier_wait(shared_address(shared.empty[group] + to.at), to.parity ^ 1);
#pragma unroll
                    for (int r = 0; r < kOwned; ++r)
                        shared.factors[group][to.at][lane + r * kLanes] = uint2{
                            factors_of(words[r][i], top[r]), __float_as_uint(power_of(top[r]))};
                    __syncwarp();
                    if (lane == 0)
                        barrier_arrive(shared_address(shared.full[group] + to.at));
                    to.next();
                }
#pragma unroll
                for (int r = 0; r < kOwned; ++r)
#pragma unroll
                    for (int i = 0; i < kBatch; ++i) {
                        largest[r].take(ahead[r][i]);
                        words[r][i] = later[r][i];
                    }
            }
#pragma unroll
            for (int r = 0; r < kOwned; ++r)
                rows[r] = next[r];
        }
    }
};

} // namespace mx
