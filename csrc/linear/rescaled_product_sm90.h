// What multiplies operands that rescale_sm90.h, or its like for groups, has put under one scale for
// each 128 k where it can. Two warpgroups have 64 rows of x each of a tile of 128 by 128.
//
// The products of a step are added by wgmma over fp8 with about 14 bits, and those to sums in fp32,
// times the step's scales. While a warpgroup does so, the wgmmas of its next step run, and the
// other's.
#pragma once

#include "common/target.h"
#include "rescaled_sm90.h"
#include "rescaled_step_sm90.h"
#include "sm90/memory.h"
#include "sm90/tma.h"
#include "sm90/wgmma.h"

namespace mx {

#ifndef MX_WRITTEN_MEANWHILE
#define MX_WRITTEN_MEANWHILE 0
#endif

constexpr int kStages = MX_STAGES;
// Whether CTAs of this launch write operands that others multiply.
constexpr bool kWrittenMeanwhile = MX_WRITTEN_MEANWHILE;
constexpr int kTile = RescaledOperands::kRows, kStepK = RescaledOperands::kStepK;
constexpr int kBlocks = kStepK / 32; // of a step
constexpr int kConsumers = 2, kGroupThreads = 128, kWarps = 4;
constexpr int kGroupRows = kTile / kConsumers;
constexpr int kValues = kTile / 2; // of a thread
constexpr int kStageX = kTile * kStepK, kStageBytes = 2 * kStageX;
static_assert(kStages > 2,
              "a consumer has two steps under way, and the next has to come meanwhile");
using Ring = PipelineState<kStages>;

// What a launch or CTA ahead left in memory.
template <class T>
MX_DEVICE T cached(const T* p) {
    return kWrittenMeanwhile ? *p : __ldg(p);
}

// Scales of steps, in their order. A lane's sums are of two rows, which three other lanes have too:
// of these four, two load the scale of a row each, one what all rows of w have in common, and one
// what those of x have. Words are loaded for two steps at once, and two steps later that load is
// waited for: ptxas waits for all loads that are under way, so none may be younger.
struct Scales {
    // Of the step that is multiplied next:
    float own;  // this lane's part of its scales
    bool apart; // whether they have none in common, which all warps of these rows find alike

    MX_MEMBER Scales(const RescaledOperands& of, long row, long x_row, long w_row, int lane)
        : of_row(lane % 4 < 2), pitch(of.words_of_step()),
          words(of.words() + (of_row          ? row + lane % 4 * 8
                              : lane % 4 == 2 ? of.rows() + w_row / kTile
                                              : of.rows() + x_row / kTile)) {}
    // Starts anew: asks for a step and what follows, so many steps in all, and then goes to it.
    MX_MEMBER void ask(int step, int steps) {
        at = words + static_cast<long>(step) * pitch;
        later = load(false);
        load_two(steps - 1);
    }
    MX_MEMBER void begin() { set(later); }
    // Goes to the step behind the first or the second of a pair.
    template <bool Second>
    MX_MEMBER void next() {
        set(Second ? later : ahead[0]);
        if constexpr (!Second)
            later = ahead[1];
    }
    // Loads for the next pair when so many steps are left, which has to be behind next<false>() and
    // what the warp waits for then: ptxas moves loads ahead of arithmetic, but not of that.
    MX_MEMBER void load_ahead(int left) { load_two(left - 2); }

  private:
    const bool of_row;
    const unsigned pitch;        // words of a step
    const unsigned* const words; // where this lane's are
    const unsigned* at;
    unsigned later, ahead[2];

    MX_MEMBER void set(unsigned word) {
        own = bits_to_float(of_row ? (word & 0xff) << 23 : word);
        apart = __any_sync(~0u, !of_row && !(own > 0)); // so ptxas sees that all go the same way
    }
    // Of steps that do not exist, the last one's are loaded again.
    MX_MEMBER void load_two(int exist) {
        ahead[0] = load(exist > 0);
        ahead[1] = load(exist > 1);
    }
    // Volatile, so that it stays behind wgmmas.
    MX_MEMBER unsigned load(bool further) {
        at += further ? pitch : 0;
        unsigned word;
        if constexpr (kWrittenMeanwhile)
            asm volatile("ld.global.u32 %0, [%1];" : "=r"(word) : "l"(at));
        else
            asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(word) : "l"(at));
        return word;
    }
};

// Steps of a tile, and its first rows of x and of w, among those of the operands.
struct TilePlace {
    RescaledOperands of;
    long x_row, w_row;
    int first_step, steps;
};

// Of a warpgroup.
struct Products {
    unsigned shared, full, empty; // addresses
    int index, warp, lane;

    using Sums = float[kValues];

    // The first row of x of the warpgroup's.
    MX_MEMBER long first_row(const TilePlace& tile) const {
        return tile.x_row + index * kGroupRows;
    }
    // The first of a lane's two rows of x, which are eight apart, from there.
    MX_MEMBER int own_row() const { return warp * 16 + lane / 4; }

    // Waits for the next step's operands.
    MX_MEMBER void expect(const Ring& ring) const { barrier_wait(full + 8 * ring.at, ring.parity); }

    // Passes by so many steps, for a warpgroup without rows.
    MX_MEMBER void skip(int steps, Ring& ring) const {
        for (int step = 0; step < steps; ++step, ring.next()) {
            barrier_wait(full + 8 * ring.at, ring.parity);
            __syncwarp(); // all lanes have seen it
            release(ring.at);
        }
    }

    // The sums of a tile's steps. where() tells which tile it is; it is asked again in steps whose
    // scales are apart, so that registers need not have it meanwhile.
    template <class Where>
    MX_MEMBER void sum(Sums& sums, const Where& where, Ring& ring) const {
        const TilePlace tile = where();
        int left = warp_uniform(tile.steps);
        Scales scales(tile.of, first_row(tile) + own_row(), tile.x_row, tile.w_row, lane);
        scales.ask(tile.first_step, left);
#pragma unroll
        for (int v = 0; v < kValues; ++v)
            sums[v] = 0;
        scales.begin();
#pragma unroll 1
        while (left > 0) {
            if (__builtin_expect(scales.apart, false)) {
                const TilePlace here = where();
                const int step = here.first_step + here.steps - left;
                const long own = first_row(here) + own_row();
                const unsigned* const words =
                    here.of.words() + static_cast<long>(step) * here.of.words_of_step();
                if (--left > 0)
                    scales.ask(step + 1, left);
                const Apart apart{cached(words + own), cached(words + own + 8),
                                  words + here.w_row + lane % 4 * 2};
                add_apart(sums, apart, kind_of(here, step), ring);
                scales.begin();
            } else {
                add_steps(sums, scales, ring, left);
            }
        }
    }

    MX_MEMBER static constexpr int place(int value) { return RescaledStep::place(value); }

  private:
    // A step whose products are under way: its stage, and a lane's part of its scales.
    struct UnderWay {
        int stage;
        float own;
    };

    // Adds up steps until none is left, or the next one's scales are apart. A step's products are
    // added while the next one's are under way. So there are two sets of them, which two steps of a
    // round have: ptxas has to know which set a wgmma writes.
    MX_MEMBER void add_steps(float (&sums)[kValues], Scales& scales, Ring& ring, int& left) const {
        float products[2][kValues];
        UnderWay first = start<false>(products[0], scales, ring, left);
#pragma unroll 1
        for (;;) {
            if (left == 0 || scales.apart) {
                add<0>(sums, products[0], first);
                return;
            }
            const UnderWay second = start<true>(products[1], scales, ring, left);
            add<1>(sums, products[0], first);
            if (left == 0 || scales.apart) {
                add<0>(sums, products[1], second);
                return;
            }
            first = start<false>(products[0], scales, ring, left);
            add<1>(sums, products[1], second);
        }
    }
    // Waits for a step's operands, and starts to multiply them: the first of a pair, or the second.
    template <bool Second>
    MX_MEMBER UnderWay start(float (&products)[kValues], Scales& scales, Ring& ring,
                             int& left) const {
        const float own = scales.own;
        scales.next<Second>();
        const UnderWay step{wait(ring), own};
        RescaledStep::multiply<kBlocks>(products, x_at(step.stage), w_at(step.stage));
        ring.next();
        --left;
        if constexpr (!Second)
            scales.load_ahead(left);
        return step;
    }
    // Adds a step's products once they have come, behind which so many steps are under way.
    template <int Behind>
    MX_MEMBER void add(float (&sums)[kValues], float (&products)[kValues],
                       const UnderWay& step) const {
        const auto of_lane = [&](int i) { return __shfl_sync(~0u, step.own, i, 4); };
        const float common = of_lane(2); // that of x is 1
        const float upper = common * of_lane(0), lower = common * of_lane(1);
        wgmma_wait<Behind>();
        keep_in_order(products);
        release(step.stage);
#pragma unroll
        for (int v = 0; v < kValues; ++v)
            sums[place(v)] = mx::fma(products[v], v / 2 % 2 ? lower : upper, sums[place(v)]);
    }

    // The next step's stage, once its operands have come, and where wgmma finds them.
    MX_MEMBER int wait(const Ring& ring) const {
        barrier_wait(full + 8 * ring.at, ring.parity);
        return ring.at;
    }
    MX_MEMBER unsigned x_at(int stage) const {
        return SwizzledDescriptor(shared + index * kGroupRows * kStepK).low +
               stage * (kStageBytes / 16);
    }
    MX_MEMBER unsigned w_at(int stage) const {
        return SwizzledDescriptor(shared + kStageX).low + stage * (kStageBytes / 16);
    }

    // What has a scale of its own in a step.
    MX_MEMBER static float kind_of(const TilePlace& tile, int step) {
        const RescaledOperands& of = tile.of;
        const unsigned* const kinds =
            of.words() + static_cast<long>(step) * of.words_of_step() + of.rows() + of.blocks();
        return fminf(bits_to_float(cached(kinds + tile.x_row / kTile)),
                     bits_to_float(cached(kinds + tile.w_row / kTile)));
    }

    MX_MEMBER void release(int stage) const {
        if (lane == 0)
            barrier_arrive(empty + 8 * stage);
    }

    // Scales of a step in which not all have one in common: of both rows of x, and where those of
    // this lane's columns begin, two of each eight.
    struct Apart {
        unsigned upper, lower;
        const unsigned* columns;

        MX_MEMBER uint2 of_piece(int piece) const {
            return cached(reinterpret_cast<const uint2*>(columns + 8 * piece));
        }
    };
    // Adds up a step in which not all have a scale in common.
    MX_MEMBER void add_apart(float (&sums)[kValues], const Apart& of, float kind,
                             Ring& ring) const {
        const int stage = wait(ring);
        RescaledStep::add_apart(
            sums, x_at(stage), w_at(stage), of.upper, of.lower,
            [&](int piece) { return of.of_piece(piece); }, kind);
        __syncwarp(); // all lanes have read scales that another tile may take the place of
        release(stage);
        ring.next();
    }
};

// Has a step of a tile's x and w copied into a stage that is free.
MX_DEVICE void copy_step(const TensorMap& operands, unsigned shared, unsigned full,
                         const Ring& ring, int step, int x_row, int w_row) {
    const unsigned barrier = full + 8 * ring.at, to = shared + ring.at * kStageBytes;
    barrier_arrive_expect(barrier, kStageBytes);
    tma_load(to, operands, step * kStepK, x_row, barrier);
    tma_load(to + kStageX, operands, step * kStepK, w_row, barrier);
}

// The barriers of the ring's stages, whose addresses these are.
MX_DEVICE void init_ring(unsigned full, unsigned empty) {
    for (int i = 0; i < kStages; ++i) {
        barrier_init(full + 8 * i, 1);
        barrier_init(empty + 8 * i, kConsumers * kWarps);
    }
    fence_barrier_init();
}

} // namespace mx
