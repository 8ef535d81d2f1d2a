// The warps of wgmma_f16_sm90.cu that bring x and make it fp16, as
// wgmma takes it: 8x16-byte pieces of 8 rows by the lower, then the upper halves of the words of 16
// k.
#pragma once

#include "boxes_rows_sm90.h"
#include "boxes_sm90.h"
#include "sm90/mma.h"
#include "sm90/tma.h"

namespace mx {

// For how many chunks x of an entry comes.
MX_DEVICE int chunks_of(const MoeArgs& a, const Entry& entry) {
    return kResident ? a.chunks() : static_cast<int>(entry.end - entry.tile) * a.chunks();
}

// Starts copies of x. Warps apart from those that make x fp16, whose fences would wait for them.
MX_DEVICE void fetch_x(const MoeArgs& a, Shared& shared, int warp, int lane) {
    wait_for_grid_ahead(); // which made x
    const int piece = lane % kPieces;
    constexpr int rows_at_once = kFetchWarps * kLanes / kPieces;
    constexpr int batches = (kCols + rows_at_once - 1) / rows_at_once;
    const int first_row = (warp * kLanes + lane) / kPieces, first_scale = warp * kLanes + lane;
    constexpr int lanes = kFetchWarps * kLanes, scale_rows = (kCols + lanes - 1) / lanes;
    Turn<kEntries> turn;
    Turn<kAhead> to;
    Turn<kScalePlaces> scales_to;
    for (;; turn.next()) {
        barrier_wait(shared_address(shared.opened + turn.at), turn.parity);
        const Entry& entry = shared.queue[turn.at];
        if (entry.expert < 0)
            break;
        const int rows = (entry.col_tiles + 1) / 2 * 16, chunks = a.chunks();
        int row[batches]; // of x, or -1: looked up once, not for each chunk
#pragma unroll
        for (int i = 0; i < batches; ++i)
            row[i] = i * rows_at_once + first_row < rows ? entry.x_row[i * rows_at_once + first_row]
                                                         : -1;
        int scale_row[scale_rows];
#pragma unroll
        for (int i = 0; i < scale_rows; ++i)
            scale_row[i] =
                i * lanes + first_scale < rows ? entry.x_row[i * lanes + first_scale] : -1;
        int chunk = 0;
        for (int left = chunks_of(a, entry); left > 0; --left, to.next()) {
            barrier_wait(shared_address(shared.drained + to.at), to.parity ^ 1);
            const unsigned place = shared_address(shared.fetched[to.at][first_row]) + piece * 16;
            const unsigned char* const x = a.xq + chunk * kChunk + piece * 16;
#pragma unroll
            for (int i = 0; i < batches; ++i)
                if (i * rows_at_once + first_row < rows)
                    copy_async(place + i * rows_at_once * kChunk, row_at(x, row[i], a.K),
                               row[i] >= 0);
            if (chunk % kScaleChunks == 0) {
#pragma unroll
                for (int i = 0; i < scale_rows; ++i)
                    if (const int to_row = i * lanes + first_scale; to_row < rows)
                        copy_scales(shared_address(shared.fetched_scales[scales_to.at][to_row]),
                                    row_at(a.xs + chunk * kBlocks, scale_row[i], a.K / kBlock),
                                    scale_row[i] >= 0);
                scales_to.next();
            }
            barrier_arrive_copied(shared_address(shared.arrived + to.at));
            if (++chunk == chunks)
                chunk = 0;
        }
    }
    copy_wait<0>(); // copies must not outlive the warp
}

// A thread has 16 k of a chunk of every 16th row. A warp has 4 adjacent ones of each 16, and of
// these lane 4 * pass + i has the scales of the one that is i-th.
struct Bringer {
    const MoeArgs& a;
    Shared& shared;
    const int thread; // of these

    static_assert(kPasses * 4 <= kLanes, "a lane has scales of one row");

    MX_MEMBER int piece() const { return thread % kPieces; }
    MX_MEMBER int column(int pass) const { return pass * 16 + thread / kPieces; }
    // Whose scales the lane has.
    MX_MEMBER int scaled_column() const {
        const int lane = thread % kLanes;
        return min(lane / 4, kPasses - 1) * 16 + thread / kLanes * 4 + lane % 4;
    }

    static constexpr int kTopRows = kPasses < 3 ? kPasses : 3, kTopWords = 6; // loads at once
    // Finds the largest scale of each row.
    MX_MEMBER void find_tops(Entry& entry) const {
        const int chunks = a.chunks(), passes = (entry.col_tiles + 1) / 2;
#pragma unroll 1
        for (int first = 0; first < passes; first += kTopRows) {
            Largest largest[kTopRows];
            const unsigned char* scales[kTopRows];
            bool exists[kTopRows];
#pragma unroll
            for (int i = 0; i < kTopRows; ++i) {
                const int row = first + i < passes ? entry.x_row[column(first + i)] : -1;
                exists[i] = row >= 0;
                scales[i] = row_at(a.xs, row, a.K / kBlock);
            }
#pragma unroll 1
            for (int c = piece(); c < chunks; c += kTopWords * kPieces) {
                unsigned words[kTopWords][kTopRows];
#pragma unroll
                for (int n = 0; n < kTopWords; ++n)
#pragma unroll
                    for (int i = 0; i < kTopRows; ++i) {
                        const int at = c + n * kPieces;
                        words[n][i] = 0;
                        if (exists[i] && at < chunks)
                            words[n][i] = load_word(scales[i] + at * kBlocks);
                    }
#pragma unroll
                for (int n = 0; n < kTopWords; ++n)
#pragma unroll
                    for (int i = 0; i < kTopRows; ++i)
                        largest[i].take(words[n][i]);
            }
#pragma unroll
            for (int i = 0; i < kTopRows; ++i) {
                unsigned both = largest[i].both();
#pragma unroll
                for (int distance = 1; distance < kPieces; distance *= 2)
                    both = __vmaxu2(both, __shfl_xor_sync(~0u, both, distance));
                const unsigned top = Largest::of(both);
                const int m = column(first + i);
                if (piece() == 0 && first + i < passes) {
                    entry.x_top[m] = top;
                    entry.x_power[m] = power_of(top);
                }
            }
        }
        __syncwarp();
    }

    // Makes fp16 of 16 k of a row.
    MX_MEMBER static void expand(const uint4& v, unsigned factor, unsigned to) {
        const unsigned words[4] = {v.x, v.y, v.z, v.w};
        unsigned low[4], high[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            e4m3x4_to_f16(words[j], low[j], high[j]);
            low[j] = multiply_f16x2(low[j], factor);
            high[j] = multiply_f16x2(high[j], factor);
        }
        store_shared_16(to, low);
        store_shared_16(to + kCols * 16, high);
    }

    static constexpr int kBatch = 3; // passes at once
    // factors: of the row whose scales the lane has.
    MX_MEMBER void expand_batch(int from, int first, int passes, unsigned slot,
                                unsigned factors) const {
        const int b = piece() / 2, row = thread % kLanes / kPieces; // a block; of 4
        uint4 v[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int m = column(min(first + i, kPasses - 1));
            v[i] = load_shared_16(shared_address(shared.fetched[from][m] + piece() * 16));
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int m = column(first + i);
            const unsigned of_row = __shfl_sync(~0u, factors, (first + i) * 4 + row);
            const unsigned factor = __byte_perm(of_row, 0, 0x0404 | b << 4 | b << 12);
            if (first + i >= passes)
                continue;
            expand(v[i], factor, slot + m * 16);
        }
    }

    // Notes rows of blocks that fp16 takes for zero, though they are not.
    MX_MEMBER void look_for_lost(Entry& entry, int from, int passes, unsigned factors) const {
#pragma unroll 1
        for (int pass = 0; pass < passes; ++pass) {
            const int m = column(pass);
            const uint4 v = load_shared_16(shared_address(shared.fetched[from][m] + piece() * 16));
            const unsigned of_row = __shfl_sync(~0u, factors, pass * 4 + thread % kLanes / kPieces);
            if ((of_row >> piece() / 2 * 8 & 255) == 0 && (v.x | v.y | v.z | v.w) & 0x7f7f7f7f)
                entry.x_outside[m] = entry.any_x_outside = 1;
        }
    }

    MX_MEMBER void run() const {
        wait_for_grid_ahead(); // which made x
        Turn<kEntries> turn;
        Turn<kAhead> from;
        Turn<kScalePlaces> scales_from;
        Turn<kScaleChunks> word; // of these
        Turn<kSlots> to;
        for (;; turn.next()) {
            barrier_wait(shared_address(shared.opened + turn.at), turn.parity);
            Entry& entry = shared.queue[turn.at];
            if (entry.expert < 0)
                break;
            const int passes = (entry.col_tiles + 1) / 2, own = scaled_column();
            find_tops(entry);
            const bool exists = own < passes * 16 && entry.x_row[own] >= 0;
            const unsigned top = exists ? entry.x_top[own] : kFirstTop;
            for (int left = chunks_of(a, entry); left > 0; --left, from.next(), to.next()) {
                barrier_wait(shared_address(shared.arrived + from.at), from.parity);
                unsigned scales = kFirstTop * 0x01010101;
                if (exists)
                    scales = load_shared_4(
                        shared_address(&shared.fetched_scales[scales_from.at][own][word.at]));
                const unsigned factors = factors_of(scales, top);
                const bool any_zero = __any_sync(~0u, zero_bytes(factors) != 0);
                barrier_wait(shared_address(shared.taken + to.at), to.parity ^ 1);
                const unsigned slot = shared_address(shared.x[to.at]) + piece() * kStepBytes;
#pragma unroll
                for (int first = 0; first < kPasses; first += kBatch) {
                    if (first >= passes)
                        break;
                    expand_batch(from.at, first, passes, slot, factors);
                }
                if (__builtin_expect(any_zero, false))
                    look_for_lost(entry, from.at, passes, factors);
                fence_async();
                __syncwarp();
                word.next();
                if (word.at == 0)
                    scales_from.next();
                if (thread % kLanes == 0) {
                    barrier_arrive(shared_address(shared.drained + from.at));
                    barrier_arrive(shared_address(shared.ready + to.at));
                }
            }
        }
    }
};

} // namespace mx
