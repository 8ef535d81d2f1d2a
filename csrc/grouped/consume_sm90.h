// What a warpgroup of the grouped GEMM on Hopper does that multiplies: 64 rows of w of a tile, made
// bf16 in registers, by all of its tokens.
#pragma once

#include "again_sm90.h"
#include "common/epilogue.h"
#include "sm90/async.h"
#include "sm90/copy.h"
#include "sm90/expand.h"
#include "sm90/global.h"
#include "sm90/lanes.h"
#include "sm90/tensor_map.h"
#include "sm90/wgmma.h"
#include "stage_sm90.h"
#include "store_sm90.h"

namespace mx {

constexpr int kStepBytes = 256; // of 8 tokens' x, for one wgmma

struct Consumer {
    const Operands& t;
    const Workspace& workspace;
    const TensorMap& results;
    unsigned shared, barriers;
    int index, rank, thread, lane, warp;
    unsigned turn = 0;
    TokenTile tokens; // this consumer's part of the tile
    int n;            // its first row of w
    int slabs;        // of tokens; of the next tile once that is awaited
    int x_slab;       // of a stage
    Ring ring;        // where x of the next unit to multiply is
    WRing w;          // where w of the next unit to expand is
    // Stage of the unit before, or of the tile before, where results may be on their way out; none
    // at first. And that of the last w of the tile before, likewise.
    int used = -1, used_w;
    // Scales of the next two units: of row lane / 4 of the warp's 16, or that + 8 for odd lanes,
    // and of the second unit for lanes 2 and 3 of four; of each the first 32 k and the other. Then
    // those of this unit and the next, or the one before, as factors.
    unsigned scales, factors;
    const unsigned char* scales_at;
    int scales_left; // beyond those, for this lane
    unsigned least, most, nan[2];
    int looks_for_nan; // in the tile's w
    const unsigned magnitude = held(kMagnitude);
    unsigned w_place;                // of what this lane loads of w, in the first stage
    unsigned words[2][4], factor[2]; // of the unit to expand: [row]

    MX_MEMBER Consumer(const Operands& t, const Workspace& workspace, const TensorMap& results,
                       unsigned shared, unsigned barriers, int index, int rank, int thread)
        : t(t), workspace(workspace), results(results), shared(shared), barriers(barriers),
          index(index), rank(rank), thread(thread) {
        lane = thread % kLanes;
        warp = thread / kLanes;
        w_place = held(shared + kAtW + (index * kGroupRows + warp * 16 + lane % 8) * kBoxK +
                       (lane / 8 ^ lane % 8) * 16);
    }

    // The next two scales of this lane's.
    MX_MEMBER void load_scales() {
        if constexpr (MX_SCALES_APART) {
            const unsigned first = scales_left > 0 ? load_byte(scales_at) : 127;
            scales = first | (scales_left > 1 ? load_byte(scales_at + 1) : 127) << 8;
        } else {
            scales = scales_left > 0 ? load_two(scales_at) : 127 * 0x0101;
        }
        scales_at += 4;
        scales_left -= 4;
    }
    MX_MEMBER int first_row(const Work& work, int tail) const {
        return work.n + (tail ? 0 : rank * kRows) + index * kGroupRows;
    }
    // Waits for the next tile, and loads what it needs first.
    MX_MEMBER void await() {
        const Work work = receive(barriers, turn);
        // Told so, ptxas knows that these are the same for all lanes of a warp.
        slabs = __shfl_sync(0xffffffff, work.slabs, 0);
        const long row = first_row(work, work.tail) + warp * 16 + lane / 4 + lane % 2 * 8;
        const int skipped = lane / 2 % 2 * 2;
        scales_at = t.ws + (work.tokens.group * t.N + min(row, t.N - 1)) * t.blocks() + skipped;
        scales_left = t.blocks() - skipped;
        load_scales();
    }
    // Takes the tile of a turn.
    MX_MEMBER void open(unsigned turn) {
        const Work work = told(barriers, turn);
        const int tail = __shfl_sync(0xffffffff, work.tail, 0);
        x_slab = tail ? rank * slabs : 0;
        tokens = work.tokens;
        looks_for_nan = __shfl_sync(0xffffffff, tokens.first, 0);
        tokens.row += x_slab * kSlabRows;
        tokens.rows = min(tokens.rows - x_slab * kSlabRows, slabs * kSlabRows);
        n = first_row(work, tail);
    }

    MX_MEMBER void release(int stage) const {
        if (lane < kCluster)
            barrier_arrive_read(address_in_cluster(barriers + kEmpty + 8 * stage, lane));
    }

    MX_MEMBER void release_w(int stage) const {
        if (lane == 0)
            barrier_arrive(barriers + kWEmpty + 8 * stage);
    }

    // Waits until this warp's results of the tile before have been read, and gives back the stage
    // of w that held some.
    MX_MEMBER void release_results() const {
        if (lane == 0)
            store_wait_read<0>();
        __syncwarp();
        if (used >= 0)
            release_w(used_w);
    }

    // The payload of the next unit, once it is there, and its scales as factors. Odd: of its
    // tile's.
    template <bool Odd>
    MX_MEMBER void fetch() {
        if constexpr (!Odd)
            barrier_wait(barriers + kWFull + 8 * w.stage, w.parity);
        const unsigned place = (w_place + w.stage * kStageW) ^ (Odd ? kUnitK : 0);
        load_matrices(words[0], place);
        load_matrices(words[1], place + 8 * kBoxK);
        if constexpr (!Odd) {
            const unsigned halves = __byte_perm(scales, 0, 0x4140);
            least = min_halves(least, halves);
            most = max_halves(most, halves);
            factors = w_factors(halves);
            load_scales();
        }
#pragma unroll
        for (int row = 0; row < 2; ++row)
            factor[row] = __shfl_sync(0xffffffff, factors, Odd * 2 + row, 4);
    }
    // What wgmma J of the unit needs.
    template <int J>
    MX_MEMBER void expand(unsigned (&a)[4][4]) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            e4m3x4_to_bf16<J / 2>(words[i][J], factor[i], magnitude, a[J][i], a[J][2 + i]);
    }
    // Looks for NaN in the unit.
    MX_MEMBER void look() {
        if (!looks_for_nan)
            return;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const unsigned word = words[i / 4][i % 4];
            // The top bit of a byte changes if it is NaN, or if one below is.
            nan[i / 4] |= (word + 0x01010101) ^ word;
        }
    }

    // Multiplies a unit, which is in registers as a[Buffer], while the next becomes a[1 - Buffer].
    // Held: that one is the tile's last, whose w makes room for results.
    template <int Buffer, bool Last, int Slabs, bool Held = false>
    MX_MEMBER void multiply(float (&sums)[Slabs * 32], unsigned (&a)[2][4][4], int unit,
                            unsigned x_place) {
        // Told so, ptxas computes descriptors in uniform registers.
        const int parity = ring.parity, stage = __shfl_sync(0xffffffff, ring.stage, 0);
        ring.advance();
        barrier_wait(barriers + kXFull + 8 * stage, parity);
        const MatrixDescriptor b(x_place + stage * kStageX, kStepBytes / 2, 4 * kStepBytes);
        wgmma_fence();
        wgmma(sums, a[Buffer][0], b.at(0));
        wgmma(sums, a[Buffer][1], b.at(kStepBytes));
        wgmma_commit();
        if constexpr (!Last)
            fetch<Buffer == 0>();
        wgmma_wait<1>();
        if (Buffer == 0 && unit == 0)
            release_results();
        if (Buffer == 1 || used >= 0)
            release(used);
        used = stage;
        if constexpr (!Last) {
            expand<0>(a[1 - Buffer]);
            expand<1>(a[1 - Buffer]);
        }
        wgmma_fence();
        wgmma(sums, a[Buffer][2], b.at(2 * kStepBytes));
        wgmma(sums, a[Buffer][3], b.at(3 * kStepBytes));
        wgmma_commit();
        if constexpr (!Last) {
            expand<2>(a[1 - Buffer]);
            expand<3>(a[1 - Buffer]);
            look();
            if constexpr (Buffer == 0) {
                if constexpr (Held)
                    used_w = w.stage;
                else
                    release_w(w.stage);
                w.advance();
            }
        }
    }

    // Lets the ring pass where no output is this consumer's.
    MX_MEMBER void skip() {
        if (used >= 0) {
            release_results();
            release(used);
        }
        used = -1;
        for (int unit = 0; unit < t.units(); ++unit) {
            barrier_wait(barriers + kXFull + 8 * ring.stage, ring.parity);
            if (unit % kBoxUnits == 0) {
                barrier_wait(barriers + kWFull + 8 * w.stage, w.parity);
                __syncwarp(); // all lanes have seen it
                release_w(w.stage);
                w.advance();
            }
            release(ring.stage);
            ring.advance();
        }
        await();
    }

    template <int Slabs>
    MX_MEMBER void tile() {
        open(turn++);
        least = most = 127 * 0x00010001;
        nan[0] = nan[1] = 0;
        if (n >= t.N || tokens.rows <= 0)
            return skip();
        float sums[Slabs * 32];
#pragma unroll
        for (int i = 0; i < Slabs * 32; ++i)
            sums[i] = 0;
        // Of tails a consumer has two slabs at most.
        const unsigned x_place = shared + (Slabs > 2 ? 0 : x_slab * kSlabUnitBytes);
        unsigned a[2][4][4];
        const int units = t.units();
        fetch<false>();
        expand<0>(a[0]);
        expand<1>(a[0]);
        expand<2>(a[0]);
        expand<3>(a[0]);
        look();
        int unit = 0;
        for (; unit + 2 < units; unit += 2) {
            multiply<0, false, Slabs>(sums, a, unit, x_place);
            multiply<1, false, Slabs>(sums, a, unit + 1, x_place);
        }
        if (unit + 1 < units) {
            multiply<0, false, Slabs, true>(sums, a, unit, x_place);
            multiply<1, true, Slabs>(sums, a, unit + 1, x_place);
        } else {
            multiply<0, true, Slabs>(sums, a, unit, x_place);
            used_w = w.stage;
            w.advance();
        }
        open(turn - 1); // again, so that it takes no registers in the loop
        finish<Slabs>(sums);
    }

    template <int Slabs>
    MX_MEMBER void finish(float (&sums)[Slabs * 32]) {
        if (looks_for_nan)
            note_nans(workspace, tokens.group * t.N + n + warp * 16, lane, nan[0] & 0x80808080,
                      nan[1] & 0x80808080);
        const bool scale_outside = min(least & 0xffff, least >> 16) < kFirstWScale ||
                                   max(most & 0xffff, most >> 16) > kLastWScale;
        const bool x_outside = tile_outside(tokens.index);
        const bool again = scale_outside || x_outside;
        float added[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
            added[i] =
                load_bias(t.bias, t.bias_kind,
                          tokens.group * t.N +
                              min(static_cast<long>(n) + warp * 16 + lane / 4 + i * 8, t.N - 1));
        await();
        wgmma_wait<0>();
        keep_in_order(sums);
        const Results out{t,
                          results,
                          tokens,
                          n,
                          index,
                          thread,
                          shared + kAtStaging + index * kStagingBytes,
                          shared + used * kStageX + index * (kStageX / kConsumers),
                          shared + kAtW + used_w * kStageW + index * (kStageW / kConsumers)};
        if (out.template store<Slabs>(sums, added, again)) {
            if (lane == 0)
                store_wait();
            named_barrier(1 + index, kGroupThreads);
            if (__any_sync(0xffffffff, again))
                compute_again(t, tokens, n + warp * 16, lane, scale_outside, x_outside);
        }
    }

    // After the last tile.
    MX_MEMBER void leave(const RowGroups& groups) const {
        if (lane == 0)
            store_wait();
        named_barrier(1 + index, kGroupThreads);
        bool last = false; // and there is NaN
        if (thread == 0)
            last = add_acquire_release(workspace.finished(), 1) ==
                   (kSomeNan | (gridDim.x * kConsumers - 1));
        if (named_barrier_or(1 + index, kGroupThreads, last))
            spread_nans(t, workspace, groups, thread);
    }

    MX_MEMBER bool tile_outside(int tile) const {
        // No loop for the usual K: it would wait for what it loads.
        const unsigned long long* from = workspace.expanded(tile);
        unsigned long long bits = lane < workspace.words() ? load_relaxed(from + lane) : 0;
        if (workspace.words() > kLanes)
#pragma unroll 1
            for (int i = lane + kLanes; i < workspace.words(); i += kLanes)
                bits |= load_relaxed(from + i);
        return bits >> 32;
    }
};

} // namespace mx
