// Linear for hundreds of rows and more on Hopper, over fp8 whose blocks of 128 k are under one
// scale:
//
//   y[m, n] = sum over steps of 128 k of (xq[m, :] * wq[n, :]) * xs[m] * ws[128 rows of w] +
//   bias[n]
//
// The launch ahead, rescale_sm90.h, makes these of blocks of 32 k where it can. Where it cannot,
// each row of w has a scale in such a step, or, where it cannot that either, each block: then a
// step is taken 32 k at a time.
//
//   producer, a thread: the step's x and w, as boxes that TMA swizzles, into a ring
//   consumer, two warpgroups: the products of a step by wgmma over fp8, which adds them with about
//     14 bits; then adds those to its sums in fp32, times the step's scales. While it does so, the
//     wgmmas of its next step run, and the other consumer's.
//
// A tile is 128 rows of x by 128 of w, of which a consumer has half the rows of x. Workgroups stay,
// and share all tiles evenly.

#include "common/epilogue.h"
#include "common/target.h"
#include "rescaled_sm90.h"
#include "shares_sm90.h"
#include "sm90/memory.h"
#include "sm90/tma.h"
#include "sm90/wgmma.h"

using namespace mx;

constexpr int kStages = MX_STAGES;
constexpr int kTile = RescaledOperands::kRows, kStepK = RescaledOperands::kStepK;
constexpr int kBlocks = kStepK / 32; // of a step
constexpr int kSwath = 8;            // tiles of rows that share a tile of w before the next
constexpr int kConsumers = 2, kGroupThreads = 128, kWarps = 4;
constexpr int kThreads = (1 + kConsumers) * kGroupThreads;
constexpr int kGroupRows = kTile / kConsumers;
constexpr int kValues = kTile / 2; // of a thread
constexpr int kStageX = kTile * kStepK, kStageBytes = 2 * kStageX;
static_assert(kStages > 2,
              "a consumer has two steps under way, and the next has to come meanwhile");
static_assert(kStages * kStageBytes == MX_SHARED_BYTES,
              "the host lays shared memory out differently: "
              "aiter_mx/kernels/linear/wgmma_fp8_rescaled_sm90.py");
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
using Out = DType<MX_OUT>;
using Ring = PipelineState<kStages>;

struct Args {
    RescaledOperands of;
    long N;             // features of a slice of w
    Out* y;             // at the first of them
    long features;      // of a row of y
    long first_feature; // of the slice
    const void* bias;
    int bias_kind;
    Shares shares;
};

struct Tile {
    long m, n; // first row of x and of w
};

// Tiles are numbered down kSwath rows of them before the next column.
MX_DEVICE Tile tile_of(const Args& a, int number) {
    const int down = (a.of.M + kTile - 1) / kTile, across = (a.N + kTile - 1) / kTile;
    const int super = number / (kSwath * across) * kSwath;
    const int height = min(kSwath, down - super), place = number - super * across;
    return {(super + place % height) * static_cast<long>(kTile),
            place / height * static_cast<long>(kTile)};
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
        asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(word) : "l"(at));
        return word;
    }
};

struct Consumer {
    const Args& a;
    unsigned shared, full, empty; // addresses
    int index, warp, lane;

    MX_MEMBER void run() const {
        Ring ring;
        Segment s;
        for (int i = 0; a.shares.shared_segment(i, s); ++i)
            multiply(s, ring);
    }

  private:
    MX_MEMBER void multiply(const Segment& s, Ring& ring) const {
        const Tile tile = tile_of(a, s.tile);
        const long first = tile.m + index * kGroupRows;
        if (first >= a.of.M) {
            for (int step = 0; step < s.chunks; ++step, ring.next()) {
                barrier_wait(full + 8 * ring.at, ring.parity);
                __syncwarp(); // all lanes have seen it
                release(ring.at);
            }
            return;
        }
        const long w_row = a.of.first_w() + tile.n;
        const long own = first + warp * 16 + lane / 4; // this lane's rows are it and own + 8
        int left = warp_uniform(s.chunks);             // steps
        Scales scales(a.of, own, tile.m, w_row, lane);
        scales.ask(s.first_chunk, left);
        float sums[kValues];
#pragma unroll
        for (int v = 0; v < kValues; ++v)
            sums[v] = 0;
        scales.begin();
#pragma unroll 1
        while (left > 0) {
            if (__builtin_expect(scales.apart, false)) {
                const int step = s.first_chunk + s.chunks - left;
                const unsigned* const words =
                    a.of.words() + static_cast<long>(step) * a.of.words_of_step();
                if (--left > 0)
                    scales.ask(step + 1, left);
                const Apart of{__ldg(words + own), __ldg(words + own + 8),
                               words + w_row + lane % 4 * 2};
                add_apart(sums, of, kind_of(first, w_row, step), ring);
                scales.begin();
            } else {
                add_steps(sums, scales, ring, left);
            }
        }
        if (s.chunks == a.shares.chunks || join(sums, s))
            store_rows(sums, first, tile.n);
    }

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
        multiply_blocks<kBlocks>(products, x_at(step.stage), w_at(step.stage));
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

    // For all of the warpgroup, what its first thread finds.
    MX_MEMBER bool first_finds(bool x) const {
        return named_barrier_or(1 + index, kGroupThreads, warp == 0 && lane == 0 && x);
    }
    // Leaves the sums of a part of a tile, or makes them those of the whole tile and returns true
    // if all other parts have left theirs: then its own stay in registers.
    MX_MEMBER bool join(float (&sums)[kValues], const Segment& s) const {
        const Shares& of = a.shares;
        const int begin = of.begin_of(s);
        const int first = of.sharer(begin), last = of.sharer(begin + of.chunks - 1);
        const unsigned others = last - first;
        unsigned* const ended = a.of.ended() + of.shared_tile(s) * kConsumers + index;
        const bool leads = warp == 0 && lane == 0;
        const auto part = [&](int cta) {
            return a.of.sums() +
                   (of.place(cta, begin) * kConsumers + index) * (kGroupRows * kTile * 4L) +
                   (warp * kLanes + lane) * 16;
        };
        if (!first_finds(leads && load_acquire(ended) == others)) {
            leave_part(sums, part(of.cluster), kGroupThreads * 16);
            named_barrier(1 + index, kGroupThreads);
            if (!first_finds(leads && add_acquire_release(ended, 1) == others))
                return false;
        }
        if (of.cluster - first <= 1)
            add_parts<8, false>(sums, first, last, of.cluster, kGroupThreads * 16, part);
        else
            add_parts<8, true>(sums, first, last, of.cluster, kGroupThreads * 16, part);
        return true;
    }

    // What has a scale of its own in a step.
    MX_MEMBER float kind_of(long row, long w_row, int step) const {
        const unsigned* const kinds = a.of.words() +
                                      static_cast<long>(step) * a.of.words_of_step() + a.of.rows() +
                                      a.of.blocks();
        return fminf(bits_to_float(__ldg(kinds + row / kTile)),
                     bits_to_float(__ldg(kinds + w_row / kTile)));
    }

    // Which of the sums is that of a value of wgmma's. Parts leave four sums at a time, for which
    // these lie in neighbouring registers as products do. Where one of the two is odd and the other
    // even, FFMA reads both at once.
    MX_MEMBER static constexpr int place(int value) { return value ^ 1; }

    MX_MEMBER void release(int stage) const {
        if (lane == 0)
            barrier_arrive(empty + 8 * stage);
    }

    // What four scales that are alike stand for, none of which is 0 or NaN.
    MX_MEMBER static float e8m0_to_normal(unsigned scales) {
        return bits_to_float((scales & 0xff) << 23);
    }

    // The products of so many blocks of 32 k.
    template <int Blocks>
    MX_MEMBER static void multiply_blocks(float (&products)[kValues], unsigned x_at,
                                          unsigned w_at) {
        wgmma_fence();
        wgmma_fp8<false>(products, SwizzledDescriptor::of(x_at), SwizzledDescriptor::of(w_at));
#pragma unroll
        for (int k = 1; k < Blocks; ++k)
            wgmma_fp8<true>(products, SwizzledDescriptor::of(x_at + 2 * k),
                            SwizzledDescriptor::of(w_at + 2 * k));
        wgmma_commit();
    }

    // Scales of a step in which not all have one in common: of both rows of x, and where those of
    // this lane's columns begin, two of each eight.
    struct Apart {
        unsigned upper, lower;
        const unsigned* columns;

        MX_MEMBER uint2 of_piece(int piece) const {
            return __ldg(reinterpret_cast<const uint2*>(columns + 8 * piece));
        }
    };
    static constexpr int kPieces = kTile / 8;

    // Adds products of which each row and each column has a scale, `shift` bits up in its word.
    MX_MEMBER static void add_scaled(float (&sums)[kValues], float (&products)[kValues],
                                     const Apart& of, int shift) {
        const float of_rows[2] = {e8m0_to_normal(of.upper >> shift),
                                  e8m0_to_normal(of.lower >> shift)};
        wgmma_wait<0>();
        keep_in_order(products);
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
            const uint2 scales = of.of_piece(piece);
            const float of_columns[2] = {e8m0_to_normal(scales.x >> shift),
                                         e8m0_to_normal(scales.y >> shift)};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& sum = sums[place(4 * piece + i)];
                sum = mx::fma(products[4 * piece + i] * of_columns[i % 2], of_rows[i / 2], sum);
            }
        }
    }

    // Adds up a step in which not all have a scale in common.
    MX_MEMBER void add_apart(float (&sums)[kValues], const Apart& of, float kind,
                             Ring& ring) const {
        const int stage = wait(ring);
        if (__any_sync(~0u, kind == kRowsApart))
            add_rows(sums, x_at(stage), w_at(stage), of);
        else if (__any_sync(~0u, kind == kBlocksApart))
            add_blocks(sums, x_at(stage), w_at(stage), of);
        else
            add_far_blocks(sums, x_at(stage), w_at(stage), of);
        release(stage);
        ring.next();
    }

    // Adds the products of a step whose rows have scales of their own.
    MX_MEMBER void add_rows(float (&sums)[kValues], unsigned x_at, unsigned w_at,
                            const Apart& of) const {
        float products[kValues];
        multiply_blocks<kBlocks>(products, x_at, w_at);
        add_scaled(sums, products, of, 0);
    }

    // Adds the products of a step whose blocks have scales of their own.
    MX_MEMBER void add_blocks(float (&sums)[kValues], unsigned x_at, unsigned w_at,
                              const Apart& of) const {
#pragma unroll 1
        for (int k = 0; k < kBlocks; ++k, x_at += 2, w_at += 2) {
            float products[kValues];
            multiply_blocks<1>(products, x_at, w_at);
            add_scaled(sums, products, of, 8 * k);
        }
    }

    // Likewise where the product of two scales may be out of fp32, though what it makes of a
    // product is not.
    MX_MEMBER void add_far_blocks(float (&sums)[kValues], unsigned x_at, unsigned w_at,
                                  const Apart& of) const {
#pragma unroll 1
        for (int k = 0; k < kBlocks; ++k, x_at += 2, w_at += 2) {
            float products[kValues];
            multiply_blocks<1>(products, x_at, w_at);
            const unsigned of_rows[2] = {of.upper >> 8 * k & 0xff, of.lower >> 8 * k & 0xff};
            wgmma_wait<0>();
            keep_in_order(products);
#pragma unroll
            for (int piece = 0; piece < kTile / 8; ++piece) {
                const uint2 scales = of.of_piece(piece);
                const unsigned of_columns[2] = {scales.x >> 8 * k & 0xff, scales.y >> 8 * k & 0xff};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const unsigned both = of_rows[i / 2] + of_columns[i % 2]; // 2^(both - 254)
                    const unsigned half = both / 2;
                    float& sum = sums[place(4 * piece + i)];
                    sum = mx::fma(products[4 * piece + i] * bits_to_float(half << 23),
                                  bits_to_float(both - half << 23), sum);
                }
            }
        }
    }

    // Stores sums of 64 rows from `row`, and of columns from n: 16 bytes of a row at a time where
    // these are whole.
    MX_MEMBER void store_rows(float (&sums)[kValues], long row, long n) const {
        if (a.bias_kind != kNone)
            add_bias(sums, n);
        if (a.features % 8 == 0 && reinterpret_cast<unsigned long long>(a.y) % 16 == 0)
            store_whole(sums, row + warp * 16 + lane / 4, n);
        else
            store_single(sums, row + warp * 16 + lane / 4, n);
    }
    MX_MEMBER void store_whole(const float (&sums)[kValues], long row, long n) const {
#pragma unroll
        for (int four = 0; four < kTile / 32; ++four) {
            const long column = n + 32 * four + lane % 4 * 8;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                u32x4 words;
#pragma unroll
                for (int piece = 0; piece < 4; ++piece) {
                    const int v = 4 * (4 * four + piece) + 2 * i;
                    words.words[piece] = pack<Out>(sums[place(v)], sums[place(v + 1)]);
                }
                transpose_pairs(words, lane);
                if (row + 8 * i < a.of.M && column < a.N)
                    store_vector(a.y + (row + 8 * i) * a.features + column, words);
            }
        }
    }
    MX_MEMBER void store_single(const float (&sums)[kValues], long row, long n) const {
#pragma unroll
        for (int v = 0; v < kValues; ++v) {
            const long own = row + v / 2 % 2 * 8, column = n + v / 4 * 8 + lane % 4 * 2 + v % 2;
            if (own < a.of.M && column < a.N)
                store(a.y + own * a.features + column, sums[place(v)]);
        }
    }
    MX_MEMBER void add_bias(float (&sums)[kValues], long n) const {
#pragma unroll
        for (int piece = 0; piece < kTile / 8; ++piece)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const long column = min(n + 8 * piece + lane % 4 * 2 + i, a.N - 1);
                const float bias = load_bias(a.bias, a.bias_kind, a.first_feature + column);
                sums[place(4 * piece + i)] += bias;
                sums[place(4 * piece + 2 + i)] += bias;
            }
    }
};

struct Producer {
    const Args& a;
    const TensorMap& operands;
    unsigned shared, full, empty;

    MX_MEMBER void run() const {
        Ring ring;
        Segment s;
        for (int i = 0; a.shares.shared_segment(i, s); ++i) {
            const Tile tile = tile_of(a, s.tile);
            const int w_row = a.of.first_w() + tile.n;
            for (int step = s.first_chunk; step < s.first_chunk + s.chunks; ++step, ring.next()) {
                barrier_wait(empty + 8 * ring.at, ring.parity ^ 1);
                const unsigned barrier = full + 8 * ring.at;
                const unsigned to = shared + ring.at * kStageBytes;
                barrier_arrive_expect(barrier, kStageBytes);
                tma_load(to, operands, step * kStepK, tile.m, barrier);
                tma_load(to + kStageX, operands, step * kStepK, w_row, barrier);
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    aiter_mx_linear_wgmma_fp8_rescaled(const unsigned char*, const unsigned char*,
                                       const unsigned char*, const unsigned char*, const void* bias,
                                       Out* y, unsigned char* memory, long M, long N, long K,
                                       long features, long first_feature, int bias_kind, int rounds,
                                       int part, int parts_with_one_more,
                                       const __grid_constant__ TensorMap operands) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    __shared__ __align__(16) unsigned long long barriers[2 * kStages];
    const unsigned shared = held(shared_address(dynamic)), full = held(shared_address(barriers));
    const unsigned empty = full + 8 * kStages;
    if (threadIdx.x == 0) {
        prefetch_map(operands);
        for (int i = 0; i < kStages; ++i) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, kConsumers * kWarps);
        }
        fence_barrier_init();
    }
    group_barrier();
    wait_for_grid_ahead();
    const RescaledOperands of{memory, M, N, K};
    const Args a{of,
                 slice_features(N, features, first_feature),
                 y + first_feature,
                 features,
                 first_feature,
                 bias,
                 bias_kind,
                 {static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), of.steps(), rounds,
                  part, parts_with_one_more}};
    const int group = warp_uniform(threadIdx.x / kGroupThreads);
    if (group == 0) {
        decrease_registers<kProducerRegisters>();
        if (threadIdx.x == 0)
            Producer{a, operands, shared, full, empty}.run();
        __syncwarp();
    } else {
        increase_registers<kConsumerRegisters>();
        const int thread = threadIdx.x % kGroupThreads;
        Consumer{a, shared, full, empty, group - 1, thread / kLanes, thread % kLanes}.run();
    }
}
