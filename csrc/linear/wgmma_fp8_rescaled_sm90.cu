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
#include "rescaled_product_sm90.h"
#include "rescaled_results_sm90.h"
#include "shares_sm90.h"
#include "sm90/memory.h"
#include "sm90/tma.h"

using namespace mx;

constexpr int kThreads = (1 + kConsumers) * kGroupThreads;
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
constexpr int kSwath = 8; // tiles of rows that share a tile of w before the next
static_assert(kStages * kStageBytes == MX_SHARED_BYTES,
              "the host lays shared memory out differently: "
              "aiter_mx/kernels/linear/wgmma_fp8_rescaled_sm90.py");
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

struct Consumer {
    const Args& a;
    const Products products;
    const int index = products.index, warp = products.warp, lane = products.lane;

    MX_MEMBER void run() const {
        Ring ring;
        Segment s;
        for (int i = 0; a.shares.shared_segment(i, s); ++i)
            multiply(s, ring);
    }

  private:
    MX_MEMBER void multiply(const Segment& s, Ring& ring) const {
        const Tile tile = tile_of(a, s.tile);
        const long first = tile.m + products.index * kGroupRows;
        if (first >= a.of.M) {
            products.skip(s.chunks, ring);
            return;
        }
        Products::Sums sums;
        const TilePlace place{a.of, tile.m, a.of.first_w() + tile.n, s.first_chunk, s.chunks};
        products.sum(sums, [&] { return place; }, ring);
        if (s.chunks == a.shares.chunks || join(sums, s))
            store_rows(sums, first, tile.n);
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

    // Stores sums of 64 rows from `row`, and of columns from n.
    MX_MEMBER void store_rows(float (&sums)[kValues], long row, long n) const {
        if (a.bias_kind != kNone)
            add_bias(sums, n);
        row += products.own_row();
        const int rows = min(a.of.M - row, static_cast<long>(kGroupRows));
        const int columns = min(a.N - n, static_cast<long>(kTile));
        RescaledResults<Out>{a.y + row * a.features + n, a.features, rows, columns, lane}.store(
            sums, are_whole(a.y, a.features));
    }
    MX_MEMBER void add_bias(float (&sums)[kValues], long n) const {
#pragma unroll
        for (int piece = 0; piece < kTile / 8; ++piece)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const long column = min(n + 8 * piece + lane % 4 * 2 + i, a.N - 1);
                const float bias = load_bias(a.bias, a.bias_kind, a.first_feature + column);
                sums[Products::place(4 * piece + i)] += bias;
                sums[Products::place(4 * piece + 2 + i)] += bias;
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
                copy_step(operands, shared, full, ring, step, tile.m, w_row);
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
        init_ring(full, empty);
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
        Consumer{a, {shared, full, empty, group - 1, thread / kLanes, thread % kLanes}}.run();
    }
}
