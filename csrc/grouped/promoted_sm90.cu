// Grouped GEMM on Hopper of fp8 operands whose scales are fp32, one for each 128 k:
//
//   y[m] = sum over k' of (xq[m, k'] * wq[g, :, k']^T) * xs[m, k'] * ws[g, n / 128, k']
//
// for each group g, each row m of it, and each step k' of 128 k.
// aiter_mx/kernels/promoted_gemm/wgmma_fp8_sm90.py says what is passed.
//
//   producer, a thread: the step's x and w, as boxes that TMA swizzles, into a ring
//   consumer, two warpgroups: the products of a step by wgmma over fp8, which adds them with about
//     14 bits; then adds those to its sums in fp32, times the step's scales. While one does
//     so, the other's wgmmas run.
//
// A tile is kTileM rows of x by 128 rows of w. A consumer has 64 rows of it, or 128 of 256; tiles
// of 64 rows are shared by columns. Workgroups stay and take tile after tile; an SM has two of
// those whose tiles are small, so that weights arrive for one while the other begins or ends a
// tile. Where two are a cluster they have the same rows of x, next to each other in w, and each
// brings a half of x to both.

#include "common/target.h"
#include "row_groups_sm90.h"
#include "sm90/cluster.h"
#include "sm90/memory.h"
#include "sm90/tma.h"
#include "sm90/wgmma.h"

using namespace mx;

constexpr int kTileM = MX_TILE_M, kCluster = MX_CLUSTER, kStages = MX_STAGES;
constexpr int kResident = kTileM == 64 ? 2 : 1; // workgroups on an SM
constexpr int kTileN = 128, kStepK = 128;
constexpr int kSwath = 8; // tiles of rows that share a tile of w before the next
constexpr int kConsumers = 2, kGroupThreads = 128, kWarps = 4;
constexpr int kThreads = (1 + kConsumers) * kGroupThreads;
constexpr bool kByColumns = kTileM == 64;
constexpr int kWaves = kTileM == 256 ? 2 : 1;              // of 64 rows, of a consumer
constexpr int kColumns = kByColumns ? kTileN / 2 : kTileN; // of a consumer
constexpr int kValues = kColumns / 2;                      // of 64 rows, of a thread
constexpr int kStageX = kTileM * kStepK, kStageW = kTileN * kStepK;
constexpr int kStageBytes = kStageX + kStageW;
constexpr int kBoxRows = kTileM / kCluster; // of x, that a workgroup brings
static_assert(kStages * kStageBytes == MX_SHARED_BYTES,
              "the host lays shared memory out differently: "
              "aiter_mx/kernels/promoted_gemm/wgmma_fp8_sm90.py");
constexpr int kProducerRegisters = kResident > 1 ? 32 : 40;
constexpr int kConsumerRegisters = kResident > 1 ? 104 : 232;
using Out = DType<MX_OUT>;
using Ring = PipelineState<kStages>;

struct Args {
    const float *xs, *ws;
    Out* y;
    RowGroups groups;
    long N, K;
    // Floats from a scale to that of the next row of x in its group, step, and group; and of w.
    long x_row, x_step, x_group, w_block, w_step, w_group;

    MX_MEMBER int steps() const { return (K + kStepK - 1) / kStepK; }
    MX_MEMBER int pairs() const { return (N + kCluster * kTileN - 1) / (kCluster * kTileN); }
};

struct Tile {
    long row, in_group; // first row, of x and within its group's room
    int rows, group;    // rows is 0 after the last tile
    int n;              // of the cluster
};

// The tiles of all ranges of rows one after another; those asked for grow.
struct TileWalk {
    const Args& a;
    const int ranges = a.groups.ranges();
    int number = -1, group = 0, begin = 0, end = 0; // of this range: its group and rows
    long through = 0;                               // tiles of all up to this one

    MX_MEMBER Tile at(int turn) {
        const int pairs = a.pairs();
        while (turn >= through) {
            if (++number >= ranges)
                return Tile{0, 0, 0, 0, 0};
            const RowRange range = a.groups.range(number);
            group = a.groups.group_of(number);
            begin = range.begin;
            end = range.end;
            through += static_cast<long>((end - begin + kTileM - 1) / kTileM) * pairs;
        }
        const int tiles = (end - begin + kTileM - 1) / kTileM;
        const int inside = turn - (through - static_cast<long>(tiles) * pairs);
        const int super = inside / (kSwath * pairs) * kSwath;
        const int height = min(kSwath, tiles - super), place = inside - super * pairs;
        const int row = begin + (super + place % height) * kTileM;
        Tile tile;
        tile.row = row;
        tile.in_group = row - a.groups.room() * group;
        tile.rows = min(kTileM, end - row);
        tile.group = group;
        tile.n = place / height * kCluster * kTileN;
        return tile;
    }
};

// Whether the product of two scales, neither of which is 0 or NaN, may lie outside of fp32.
MX_DEVICE bool is_far(float factor, float one, float other) {
    const float size = fabsf(factor);
    return !(size >= 0x1p-100f && size <= 0x1p100f) && one * 0.0f == 0.0f && one != 0.0f &&
           other * 0.0f == 0.0f && other != 0.0f;
}

// A lane's sums are of kRows rows, which three other lanes have too: each of the four loads the
// scales of one, makes a factor of them, and hands it to the others, a step ahead.
struct Scales {
    static constexpr int kRows = 2 * kWaves;
    const float *of_row, *of_w; // at `step`
    long row_step, w_step;
    int steps, step;
    float row, w; // of `step`

    MX_MEMBER Scales(const Args& a, const float* of_row, const float* of_w)
        : of_row(of_row), of_w(of_w), row_step(a.x_step), w_step(a.w_step), steps(a.steps()),
          step(0), row(__ldg(of_row)), w(__ldg(of_w)) {}

    // Factors of `step`; loads the next one's scales. Whether this lane's factor is far is told.
    MX_MEMBER bool take(float (&factor)[kRows]) {
        const float own = row * w;
        const bool far = is_far(own, row, w);
#pragma unroll
        for (int i = 0; i < kRows; ++i)
            factor[i] = __shfl_sync(~0u, own, i, 4);
        if (++step < steps) {
            row = __ldg(of_row += row_step);
            w = __ldg(of_w += w_step);
        }
        return far;
    }
    // The product of the scales of row i and of w in a step before.
    MX_MEMBER double product(int i, int before) const {
        const int back = min(step, steps - 1) - before;
        const double own = __shfl_sync(~0u, __ldg(of_row - back * row_step), i, 4);
        return own * __ldg(of_w - back * w_step);
    }
};

struct Consumer {
    const Args& a;
    unsigned shared, full, empty; // addresses
    int index, rank, warp, lane;

    MX_MEMBER void run() const {
        TileWalk walk{a};
        Ring ring;
        const int clusters = gridDim.x / kCluster;
        for (int turn = blockIdx.x / kCluster;; turn += clusters) {
            const Tile tile = walk.at(turn);
            if (tile.rows == 0)
                break;
            multiply(tile, ring);
        }
    }

  private:
    MX_MEMBER void release(int stage) const {
        if (lane < kCluster) {
            const unsigned barrier = empty + 8 * stage;
            if constexpr (kCluster > 1)
                barrier_arrive_read(address_in_cluster(barrier, lane));
            else
                barrier_arrive(barrier);
        }
    }

    MX_MEMBER void multiply(const Tile& tile, Ring& ring) const {
        const int n = tile.n + rank * kTileN;
        const int first = kByColumns ? 0 : index * kWaves * 64;
        const int rows = warp_uniform(tile.rows);
        const int mine = lane % Scales::kRows;
        const int row = first + mine / 2 * 64 + warp * 16 + lane / 4 + 8 * (mine % 2);
        const long last_block = (a.N - 1) / kTileN;
        Scales scales(a,
                      a.xs + (a.groups.room() ? tile.group * a.x_group : 0) +
                          (tile.in_group + min(row, rows - 1)) * a.x_row,
                      a.ws + tile.group * a.w_group + min(n / kTileN + 0l, last_block) * a.w_block);
        float sums[kWaves][kValues];
#pragma unroll
        for (int wave = 0; wave < kWaves; ++wave)
#pragma unroll
            for (int v = 0; v < kValues; ++v)
                sums[wave][v] = 0;
        float factor[Scales::kRows], next[Scales::kRows];
        bool far = __any_sync(~0u, scales.take(factor)), next_is_far = false;
        const SwizzledDescriptor x(shared + (kByColumns ? 0 : first * kStepK));
        const SwizzledDescriptor w(shared + kStageX + (kByColumns ? index * kColumns * kStepK : 0));
        const int steps = a.steps();
#pragma unroll 1
        for (int step = 0; step < steps; ++step, ring.next()) {
            const int stage = warp_uniform(ring.at);
            barrier_wait(full + 8 * stage, ring.parity);
            const unsigned at = stage * (kStageBytes / 16);
#pragma unroll
            for (int wave = 0; wave < kWaves; ++wave) {
                const bool last = wave == kWaves - 1;
                if (first + wave * 64 >= rows) {
                    if (wave == 0)
                        next_is_far = scales.take(next);
                    if (last)
                        release(stage);
                    continue;
                }
                float products[kValues];
                const unsigned x_at = x.low + at + wave * (64 * kStepK / 16), w_at = w.low + at;
                wgmma_fence();
                wgmma_fp8<false>(products, SwizzledDescriptor::of(x_at),
                                 SwizzledDescriptor::of(w_at));
#pragma unroll
                for (int k = 1; k < kStepK / 32; ++k)
                    wgmma_fp8<true>(products, SwizzledDescriptor::of(x_at + 2 * k),
                                    SwizzledDescriptor::of(w_at + 2 * k));
                wgmma_commit();
                if (wave == 0)
                    next_is_far = scales.take(next);
                wgmma_wait<0>();
                keep_in_order(products);
                if (last)
                    release(stage);
                if (__builtin_expect(far, false))
                    promote_far(sums[wave], products, scales, wave, step);
                else
                    promote(sums[wave], products, factor[2 * wave], factor[2 * wave + 1]);
            }
            far = __any_sync(~0u, next_is_far);
#pragma unroll
            for (int i = 0; i < Scales::kRows; ++i)
                factor[i] = next[i];
        }
#pragma unroll
        for (int wave = 0; wave < kWaves; ++wave)
            store_rows(sums[wave], tile.row + first + wave * 64, rows - first - wave * 64,
                       n + (kByColumns ? index * kColumns : 0));
    }

    MX_MEMBER static void promote(float (&sums)[kValues], const float (&products)[kValues],
                                  float upper, float lower) {
#pragma unroll
        for (int v = 0; v < kValues; ++v)
            sums[v] = mx::fma(products[v], v / 2 % 2 ? lower : upper, sums[v]);
    }
    // Where the product of scales is not in fp32, but what they make of a product may be.
    MX_MEMBER static void promote_far(float (&sums)[kValues], const float (&products)[kValues],
                                      const Scales& scales, int wave, int step) {
        const double both[2] = {scales.product(2 * wave, step), scales.product(2 * wave + 1, step)};
#pragma unroll
        for (int v = 0; v < kValues; ++v)
            sums[v] += static_cast<float>(products[v] * both[v / 2 % 2]);
    }

    // Sums of up to 64 rows from `row`, and of columns from n.
    MX_MEMBER void store_rows(const float (&sums)[kValues], long row, int rows, int n) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int own = warp * 16 + lane / 4 + 8 * i;
            Out* const to = a.y + (row + own) * a.N;
            if constexpr (sizeof(Out) == 4) {
#pragma unroll
                for (int piece = 0; piece < kColumns / 8; ++piece) {
                    const int column = n + 8 * piece + lane % 4 * 2;
                    store_pair(to + column, sums[4 * piece + 2 * i], sums[4 * piece + 2 * i + 1],
                               own < rows && column < a.N ? 0 : -1);
                }
            } else {
#pragma unroll
                for (int four = 0; four < kColumns / 32; ++four) {
                    u32x4 words;
#pragma unroll
                    for (int piece = 0; piece < 4; ++piece) {
                        const int v = 4 * (4 * four + piece) + 2 * i;
                        words.words[piece] = pack<Out>(sums[v], sums[v + 1]);
                    }
                    transpose_pairs(words, lane);
                    const int column = n + 32 * four + lane % 4 * 8;
                    if (own < rows && column < a.N)
                        store_vector(to + column, words);
                }
            }
        }
    }
};

struct Producer {
    const Args& a;
    const TensorMap &x, &w;
    unsigned shared, full, empty;
    int rank;

    MX_MEMBER void run() const {
        TileWalk walk{a};
        Ring ring;
        const int steps = a.steps();
        const int clusters = gridDim.x / kCluster;
        for (int turn = blockIdx.x / kCluster;; turn += clusters) {
            const Tile tile = walk.at(turn);
            if (tile.rows == 0)
                break;
            const int x_row = tile.row + rank * kBoxRows;
            const int w_row = tile.group * a.N + tile.n + rank * kTileN;
            for (int step = 0; step < steps; ++step, ring.next()) {
                barrier_wait(empty + 8 * ring.at, ring.parity ^ 1);
                const unsigned barrier = full + 8 * ring.at;
                const unsigned to = shared + ring.at * kStageBytes;
                barrier_arrive_expect(barrier, kStageBytes);
                if constexpr (kCluster > 1)
                    tma_load_to_cluster(to + rank * kBoxRows * kStepK, x, step * kStepK, x_row,
                                        barrier, (1 << kCluster) - 1);
                else
                    tma_load(to, x, step * kStepK, x_row, barrier);
                tma_load(to + kStageX, w, step * kStepK, w_row, barrier);
            }
        }
    }
};

extern "C" __global__ void MX_CLUSTER_DIMS __launch_bounds__(kThreads, kResident)
    aiter_mx_promoted_gemm_wgmma_fp8(const unsigned char* xq, const float* xs,
                                     const unsigned char* wq, const float* ws, Out* y,
                                     const void* starts, const void* ends, long M, long N, long K,
                                     long G, int layout, int index_bytes, long x_row, long x_step,
                                     long x_group, long w_block, long w_step, long w_group,
                                     const __grid_constant__ TensorMap x_map,
                                     const __grid_constant__ TensorMap w_map) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    __shared__ __align__(16) unsigned long long barriers[2 * kStages];
    const unsigned shared = held(shared_address(dynamic)), full = held(shared_address(barriers));
    const unsigned empty = full + 8 * kStages;
    if (threadIdx.x == 0) {
        prefetch_map(x_map);
        prefetch_map(w_map);
        for (int i = 0; i < kStages; ++i) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, kCluster * kConsumers * kWarps);
        }
        fence_barrier_init();
    }
    group_barrier();
    if constexpr (kCluster > 1) {
        cluster_arrive();
        cluster_wait();
    }
    wait_for_grid_ahead();
    const Args a{xs,      ws,      y,      {starts, ends, M, G, layout, index_bytes},
                 N,       K,       x_row,  x_step,
                 x_group, w_block, w_step, w_group};
    const int rank = kCluster > 1 ? rank_in_cluster() : 0;
    const int group = warp_uniform(threadIdx.x / kGroupThreads);
    if (group == 0) {
        decrease_registers<kProducerRegisters>();
        if (threadIdx.x == 0)
            Producer{a, x_map, w_map, shared, full, empty, rank}.run();
        __syncwarp();
    } else {
        increase_registers<kConsumerRegisters>();
        const int thread = threadIdx.x % kGroupThreads;
        Consumer{a, shared, full, empty, group - 1, rank, thread / kLanes, thread % kLanes}.run();
    }
    if constexpr (kCluster > 1) { // what the other workgroup sends has arrived, and been used
        cluster_arrive();
        cluster_wait();
    }
}
