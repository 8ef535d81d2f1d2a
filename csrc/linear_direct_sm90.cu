// Decode linear for up to 4 rows of x on Hopper, weights straight into registers:
// y = dequantised(x) * dequantised(w)^T + bias.
//
//   xq [M, K], wq [N, K]        e4m3 payload
//   xs [M, K/32], ws [N, K/32]  e8m0 scale of each 32 consecutive k
//   y  [M, N]                   fp32, bf16 or fp16
//   bias [N]                    any of these, or none
//
// A cluster computes kRows consecutive outputs n for all m. Its kSplit workgroups have a part of K
// each, and the waves of a workgroup take turns with that, a chunk of 128 k at a time, and ask for
// kUnroll chunks of w and x before they use the first. Nothing but sums passes through shared
// memory, and no one waits for another before the end. A launch that overlaps the one ahead of it
// asks for its first weights before that has ended.
//
// Products are those of mma.m16n8k16 over fp16, which any e4m3 is. Lane 4g + t loads 16 bytes of
// row g of 8, at k = 16t of 64: one scale lasts for t = 0 and 1, another for t = 2 and 3. As mma
// adds over t, x has a column for each token and block of 32 k, which is zero in the other block's
// lanes. So half of the matrix unit's work is for nothing, and a lane finds the sums of both blocks
// of a row of w and token t side by side:
//
//   B, 64 k of x          t = 0, 1       t = 2, 3
//   column 2m             x[m, 0..31]    0
//   column 2m + 1         0              x[m, 32..63]
//
// Sums are fp32 and added in an order that depends on nothing but the configuration: over blocks,
// then waves, by the workgroup that owns the tile: of a cluster's, they take turns.

#include "mx_epilogue.h"
#include "mx_scale.h"
#include "mx_target.h"
#include "sm90_async.h"
#include "sm90_mma.h"
#include "sm90_rows.h"

using namespace mx;

#if MX_SPLIT > 1
#define CLUSTER __cluster_dims__(kSplit, 1, 1)
#else
#define CLUSTER
#endif

constexpr int kRows = MX_ROWS;                 // outputs n of a workgroup
constexpr int kWaves = MX_WAVES;               // waves of a workgroup
constexpr int kUnroll = MX_UNROLL;             // chunks of a wave whose loads precede all use
constexpr int kSplit = MX_SPLIT;               // workgroups of a cluster, which share K
constexpr bool kOverlaps = MX_OVERLAPS;        // may begin before the grid ahead of it ends
constexpr bool kWholeChunks = MX_WHOLE_CHUNKS; // of K
constexpr bool kEven = MX_EVEN;                // each round of each wave has all of its chunks
using Out = DType<MX_OUT>;

constexpr int kHalves = (kRows + 7) / 8;  // tiles of 8 rows of w
constexpr int kTiles = (kHalves + 1) / 2; // of 16, as mma takes them
constexpr int kSteps = 2;                 // of 64 k of a chunk
constexpr int kStep = kChunk / kSteps;
constexpr int kThreads = kLanes * kWaves;
constexpr int kParts = kSplit * kWaves; // whose sums are added
constexpr int kOwned = (kHalves + kSplit - 1) / kSplit;
constexpr int kSumBytes = kLanes * 4; // of a half, from one part

using Sums = float[2 * kTiles]; // of rows g of each half by token t

struct Chunk {
    u32x4 w[kHalves][kSteps], x[kSteps];
    unsigned w_scales[kHalves], x_scales; // x_scales: of token t
};

// Scales of four blocks, of which `left` exist.
template <bool Aligned>
MX_DEVICE unsigned load_scales(const unsigned char* p, long left) {
    if constexpr (Aligned)
        return load_word(p);
    unsigned v = kUnitScales;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
        if (i < left)
            v = (v & ~(0xffu << 8 * i)) | load_byte(p + i) << 8 * i;
    return v;
}

// What a lane reads.
struct Operands {
    const unsigned char *w[kHalves], *w_scales[kHalves], *x, *x_scales;
    long K;
    int t, begin, end; // chunks of the workgroup
    bool has_x, has_x_scales;

    MX_MEMBER bool exists(int c, int s) const {
        return kWholeChunks || c * kChunk + s * kStep + t * kPiece < K;
    }
    MX_MEMBER void load_w(Chunk& chunk, int c) const {
#pragma unroll
        for (int h = 0; h < kHalves; ++h)
#pragma unroll
            for (int s = 0; s < kSteps; ++s)
                if (exists(c, s))
                    chunk.w[h][s] = load_once_in_lines(w[h] + c * kChunk + s * kStep);
    }
    MX_MEMBER void load_x(Chunk& chunk, int c) const {
#pragma unroll
        for (int s = 0; s < kSteps; ++s)
            if (has_x && exists(c, s))
                chunk.x[s] = load(x + c * kChunk + s * kStep);
    }
    template <bool Aligned>
    MX_MEMBER void load_w_scales(Chunk& chunk, int c) const {
#pragma unroll
        for (int h = 0; h < kHalves; ++h)
            chunk.w_scales[h] =
                load_scales<Aligned>(w_scales[h] + c * kBlocks, K / kBlock - c * kBlocks);
    }
    template <bool Aligned>
    MX_MEMBER void load_x_scales(Chunk& chunk, int c) const {
        if (has_x_scales)
            chunk.x_scales = load_scales<Aligned>(x_scales + c * kBlocks, K / kBlock - c * kBlocks);
    }
};

// Far: scales of w may be so near the ends of e8m0 that they are to be applied in two steps.
template <bool Far>
MX_DEVICE void add_products(Sums& sums, const Chunk& chunk) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
        unsigned columns[4][2];
        float x_scales[2];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            e4m3x4_to_f16(chunk.x[s][i], columns[i][0], columns[i][1]);
#pragma unroll
        for (int b = 0; b < 2; ++b)
            x_scales[b] = e8m0_to_f32(byte_of(chunk.x_scales, 2 * s + b));
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            unsigned rows[2][4][2] = {};
            unsigned scales[2] = {kUnitScales, kUnitScales};
#pragma unroll
            for (int h = 0; h < 2; ++h)
                if (2 * tile + h < kHalves) {
                    scales[h] = chunk.w_scales[2 * tile + h];
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        e4m3x4_to_f16(chunk.w[2 * tile + h][s][i], rows[h][i][0], rows[h][i][1]);
                }
            float products[4] = {};
#pragma unroll
            for (int i = 0; i < 4; ++i)
                mma(products, rows[0][i][0], rows[1][i][0], rows[0][i][1], rows[1][i][1],
                    columns[i][0], columns[i][1]);
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int b = 0; b < 2; ++b) {
                    float& sum = sums[2 * tile + h];
                    const float product = products[2 * h + b];
                    if constexpr (Far)
                        sum = add_scaled(sum, product, e8m0_split(byte_of(scales[h], 2 * s + b)),
                                         x_scales[b]);
                    else
                        sum =
                            mx::fma(product * usual_scale(scales[h], 2 * s + b), x_scales[b], sum);
                }
        }
    }
}

// Adds the products of a wave's chunks, Unroll of them in a round.
template <bool Aligned, int Unroll>
MX_DEVICE void add_chunks(Sums& sums, const Operands& operands, int wave) {
    const auto let_next_begin = [] { // what is stored later comes after this as well
        launch_dependents();
        wait_for_grid_ahead();
    };
    const int mine = operands.begin + wave, end = operands.end;
    if (kOverlaps && mine >= end)
        let_next_begin();
#pragma unroll 1
    for (int first = mine; first < end; first += Unroll * kWaves) {
        Chunk loaded[Unroll] = {};
        const auto each = [&](auto do_one) {
#pragma unroll
            for (int u = 0; u < Unroll; ++u)
                if (u == 0 || kEven || first + u * kWaves < end)
                    do_one(loaded[u], first + u * kWaves);
        };
        const auto ask_w = [&] {
            each([&](Chunk& chunk, int c) { operands.load_w_scales<Aligned>(chunk, c); });
            each([&](Chunk& chunk, int c) { operands.load_w(chunk, c); });
        };
        const auto ask_x = [&] {
            each([&](Chunk& chunk, int c) { operands.load_x(chunk, c); });
            each([&](Chunk& chunk, int c) { operands.load_x_scales<Aligned>(chunk, c); });
        };
        if constexpr (kOverlaps) {
            ask_w();
            if (first == mine)
                let_next_begin();
            ask_x();
        } else {
            ask_x();
            ask_w();
        }
        each([&](const Chunk& chunk, int) {
            unsigned far = 0;
#pragma unroll
            for (int h = 0; h < kHalves; ++h)
                far |= unusual(chunk.w_scales[h]);
            if (__any_sync(0xffffffff, far))
                add_products<true>(sums, chunk);
            else
                add_products<false>(sums, chunk);
        });
    }
}

// Sums of a lane to the workgroups that own the halves.
MX_DEVICE void send(const Sums& sums, unsigned inbox, unsigned full, int part, int lane) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
        const unsigned to = inbox + (h / kSplit * kParts + part) * kSumBytes + lane * 4;
        store_async(address_in_cluster(to, h % kSplit), float_to_bits(sums[h]),
                    address_in_cluster(full, h % kSplit));
    }
}

extern "C" __global__ void CLUSTER __launch_bounds__(kThreads, 1)
    aiter_mx_linear_direct(const unsigned char* xq, const unsigned char* xs,
                           const unsigned char* wq, const unsigned char* ws, const void* bias,
                           Out* y, long M, long N, long K, int bias_kind) {
    const int lane = threadIdx.x % kLanes, g = lane / 4, t = lane % 4;
    const int wave = __shfl_sync(0xffffffff, threadIdx.x / kLanes, 0);
    const int rank = blockIdx.x % kSplit;
    const long first_row = static_cast<long>(blockIdx.x / kSplit) * kRows;
    const long blocks = K / kBlock;
    const int chunks = static_cast<int>((K + kChunk - 1) / kChunk);
    __shared__ float sums_of[kOwned][kParts][kLanes];
    __shared__ unsigned long long barrier; // of what the cluster sends
    const int owned = (kHalves - rank + kSplit - 1) / kSplit;
    if constexpr (kSplit > 1) {
        if (threadIdx.x == kThreads - kLanes) {
            barrier_init(shared_address(&barrier), 1);
            fence_barrier_init();
            barrier_arrive_expect(shared_address(&barrier), owned * kParts * kSumBytes);
        }
        __syncwarp();
        cluster_arrive_relaxed();
    }
    Operands operands{.x = xq + g / 2 * K + t * kPiece,
                      .x_scales = xs + t * blocks,
                      .K = K,
                      .t = t,
                      .begin = rank * (chunks / kSplit) + min(rank, chunks % kSplit),
                      .has_x = g / 2 < M && t / 2 == g % 2,
                      .has_x_scales = t < M};
    operands.end = operands.begin + chunks / kSplit + (rank < chunks % kSplit);
#pragma unroll
    for (int h = 0; h < kHalves; ++h) { // rows past the last are computed from it and not stored
        const long n = min(first_row + min(8 * h + g, kRows - 1), N - 1);
        operands.w[h] = wq + n * K + t * kPiece;
        operands.w_scales[h] = ws + n * blocks;
    }
    Sums sums = {};
    // Scales that are no words of memory are read byte by byte, with few registers.
    const auto scales = reinterpret_cast<unsigned long>(ws) | reinterpret_cast<unsigned long>(xs);
    if (kWholeChunks && scales % kBlocks == 0)
        add_chunks<true, kUnroll>(sums, operands, wave);
    else
        add_chunks<false, 1>(sums, operands, wave);

    if constexpr (kSplit > 1) {
        cluster_wait(); // all of the cluster have started, and set up their barriers
        send(sums, shared_address(sums_of), shared_address(&barrier), rank * kWaves + wave, lane);
        cluster_arrive_relaxed();
    } else {
#pragma unroll
        for (int h = 0; h < kHalves; ++h)
            sums_of[h][wave][lane] = sums[h];
        group_barrier();
    }
    for (int i = wave; i < owned; i += kWaves) {
        const int row = 8 * (i * kSplit + rank) + g;
        const long n = first_row + row;
        const bool exists = row < kRows && n < N && t < M;
        const float added = exists ? load_bias(bias, bias_kind, n) : 0.0f;
        if constexpr (kSplit > 1)
            barrier_wait(shared_address(&barrier), 0);
        if (exists) {
            float sum = 0.0f;
#pragma unroll
            for (int other = 0; other < kParts; ++other)
                sum += sums_of[i][other][lane];
            store(y + t * N + n, sum + added);
        }
    }
    if constexpr (kSplit > 1)
        cluster_wait(); // no one ends while others may still send to it
}
