// Linear on Hopper, for some tens to some thousands of rows:
// y[m, n] = dequantised(x[m]) * dequantised(w[n])^T + bias[n].
// aiter_mx/kernels/linear/problem.py defines its arguments.
//
// Both operands are made bf16 with their scales applied, which is exact, so that sums over all of K
// stay in the matrix unit: w in registers, as wgmma's A, x in shared memory, as its B.
//
//   w  -> TMA, 128 k of kRows rows a stage -> registers -> bf16, wgmma's A
//   x  -> bf16 in memory, by the launch ahead, wgmma_bf16_x_sm90.cu, a unit of 64 k of kTokens
//         tokens after another as wgmma takes its B -> bulk copies, a unit a stage
//
// A CTA computes a tile of kRows features by kTokens tokens over its part of K. The kSplit CTAs of
// a cluster share K; each adds up the sums of all of them, in the order of their ranks, for its
// share of the tile's tokens.
//
//   warps 0 and 1: a lane each starts the copies of x and of w
//   the second warpgroup and those after it, 64 features each: w to bf16, multiply
//
// The launch ahead may still run when this one begins: w is asked for at once, x when that ends.
//
// Scales that bf16 does not cover are noted, and the outputs that they reach are computed again by
// fp32 arithmetic after the others are stored.

#include "common/epilogue.h"
#include "common/scale.h"
#include "common/target.h"
#include "sm90/convert.h"
#include "sm90/expand.h"
#include "sm90/memory.h"
#include "sm90/tma.h"
#include "sm90/wgmma.h"
#include "wgmma_bf16_x_sm90.h"

using namespace mx;

constexpr int kTokens = MX_TILE_M; // a multiple of 16, at most 256
constexpr int kGroups = MX_GROUPS; // warpgroups that multiply
constexpr int kSplit = MX_SPLIT;   // CTAs of a cluster
constexpr int kXStages = MX_X_STAGES, kWStages = MX_W_STAGES;
using Out = DType<MX_OUT>;

constexpr int kGroupThreads = 128, kWarps = 4; // of a warpgroup
constexpr int kThreads = (1 + kGroups) * kGroupThreads;
constexpr int kGroupRows = 64, kRows = kGroups * kGroupRows;
constexpr int kBlock = 32, kUnitK = 64, kChunkK = 128;
constexpr int kOctets = kTokens / 8;
constexpr int kStepBytes = 256, kOctetBytes = 4 * kStepBytes;

constexpr int kXStageBytes = kTokens * kUnitK * 2;
constexpr int kWStageBytes = kRows * kChunkK;
constexpr int kAtW = kXStages * kXStageBytes;
constexpr int kStageBytes = kAtW + kWStages * kWStageBytes;
// Sums take the place of the stages. With this pitch a warp's stores of them have no conflicts.
constexpr int kPitch = kRows + 4;
constexpr int kSumBytes = kTokens * kPitch * 4;
constexpr int kAtBarriers = kStageBytes > kSumBytes ? kStageBytes : kSumBytes;
constexpr int kXFull = kAtBarriers, kXEmpty = kXFull + 8 * kXStages;
constexpr int kWFull = kXEmpty + 8 * kXStages, kWEmpty = kWFull + 8 * kWStages;
// Whether a scale of this CTA's part is outside; then which tokens and features have such scales.
constexpr int kOutside = kWEmpty + 8 * kWStages;
constexpr int kTokenOutside = kOutside + 8, kRowOutside = kTokenOutside + kTokens;
constexpr int kSharedBytes = kRowOutside + kRows;
static_assert(kSharedBytes <= MX_SHARED_BYTES, "the host lays shared memory out differently: "
                                               "aiter_mx/kernels/linear/wgmma_bf16_sm90.py");
// Registers of a thread that copies and of one that multiplies, once it is known which it is, and
// of both before.
constexpr int kHelperRegisters = 40;
constexpr int kConsumerRegisters = kGroups == 3     ? 152
                                   : kTokens <= 128 ? 160
                                   : kTokens <= 160 ? 184
                                   : kTokens <= 192 ? 208
                                                    : 232;
constexpr int kLaunchRegisters =
    kGroups == 1 ? 240
                 : ((kGroups * kConsumerRegisters + kHelperRegisters) / (kGroups + 1) + 7) / 8 * 8;
constexpr int kConsumersBarrier = 2;

struct Tile {
    const unsigned char *xq, *xs, *wq, *ws;
    const void* bias;
    Out* y;
    long M, N, K;
    int bias_kind;
    long token, row;         // the first of either
    int first_chunk, chunks; // of K in this CTA's part

    MX_MEMBER long blocks() const { return K / kBlock; }
    MX_MEMBER int units() const {
        return min(2 * chunks, static_cast<int>((K + kUnitK - 1) / kUnitK) - 2 * first_chunk);
    }
    MX_MEMBER int tokens() const { return min(M - token, static_cast<long>(kTokens)); }
    MX_MEMBER int rows() const { return min(N - row, static_cast<long>(kRows)); }
};

// Starts the copies, and notes whether bf16 covers all scales of the tile's x.
struct Producer {
    const Tile& t;
    const TensorMap& weights;
    const unsigned shared;
    const XWorkspace x;
    const long tile; // of tokens

    // Of one warp; another brings x, so that neither waits for room of the other's.
    MX_MEMBER void bring_w() const {
        if (!elected_lane())
            return;
        PipelineState<kWStages> w;
        for (int chunk = 0; chunk < t.chunks; ++chunk, w.next()) {
            const unsigned full = shared + kWFull + 8 * w.at;
            barrier_wait(shared + kWEmpty + 8 * w.at, w.parity ^ 1);
            barrier_arrive_expect(full, kWStageBytes);
            tma_load(shared + kAtW + w.at * kWStageBytes, weights,
                     (t.first_chunk + chunk) * kChunkK, t.row, full);
        }
    }
    MX_MEMBER void bring_x(int lane) const {
        wait_for_grid_ahead();
        if (elected_lane()) {
            const unsigned char* from = x.unit(tile, 2 * t.first_chunk);
            PipelineState<kXStages> stage;
            const int units = t.units();
            for (int unit = 0; unit < units; ++unit, from += kXStageBytes, stage.next()) {
                const unsigned full = shared + kXFull + 8 * stage.at;
                barrier_wait(shared + kXEmpty + 8 * stage.at, stage.parity ^ 1);
                barrier_arrive_expect(full, kXStageBytes);
                copy_bulk(shared + stage.at * kXStageBytes, from, kXStageBytes, full);
            }
        }
        __syncwarp();
        bool outside = false;
        for (long i = lane; i < x.units(); i += kLanes)
            outside |= x.outside()[tile * x.units() + i] != 0;
        if (__any_sync(0xffffffff, outside) && lane == 0)
            announce_shared(shared + kOutside, 1);
    }
};

// Multiplies 64 rows of w by the tile's tokens.
struct Consumer {
    const Tile& t;
    const unsigned shared;
    const int group, warp, lane; // warp: of the group
    PipelineState<kXStages> x;   // where x of the next unit to multiply is
    PipelineState<kWStages> w;   // where w of the next unit to expand is
    int used = -1;               // stage of the unit before
    // Scales of the next chunk: of row lane / 4 of the warp's 16, or of that + 8 for odd lanes; the
    // first two of them, or the others for lanes 2 and 3 of four. Then those of this chunk, as
    // factors.
    unsigned scales, factors = 0;
    const unsigned char* scales_at;
    long scales_left; // for this lane, from there
    const bool pairs; // whether two scales are one load
    unsigned least = 127 * 0x00010001, most = 127 * 0x00010001, nan[2] = {0, 0};
    const unsigned magnitude = held(kMagnitude);
    const unsigned w_place;          // of what this lane loads of w, in the first stage
    unsigned words[2][4], factor[2]; // of the unit to expand: [row]

    MX_MEMBER Consumer(const Tile& t, unsigned shared, int group, int warp, int lane)
        : t(t), shared(shared), group(group), warp(warp), lane(lane),
          pairs(t.blocks() % 2 == 0 && reinterpret_cast<unsigned long long>(t.ws) % 2 == 0),
          w_place(held(shared + kAtW + (group * kGroupRows + warp * 16 + lane % 8) * kChunkK +
                       (lane / 8 ^ lane % 8) * 16)) {
        const long row = t.row + group * kGroupRows + warp * 16 + lane / 4 + lane % 2 * 8;
        const long block = t.first_chunk * static_cast<long>(kChunkK / kBlock) + lane / 2 % 2 * 2;
        scales_at = t.ws + min(row, t.N - 1) * t.blocks() + block;
        scales_left = t.blocks() - block;
        load_scales();
    }

    MX_MEMBER void load_scales() {
        if (pairs) {
            scales = scales_left > 0 ? load_two(scales_at) : 127 * 0x0101;
        } else {
            const unsigned first = scales_left > 0 ? load_byte(scales_at) : 127;
            scales = first | (scales_left > 1 ? load_byte(scales_at + 1) : 127) << 8;
        }
        scales_at += kChunkK / kBlock;
        scales_left -= kChunkK / kBlock;
    }

    // The payload of the next unit, once it is there, and its scales as factors.
    template <bool Odd>
    MX_MEMBER void fetch() {
        if constexpr (!Odd)
            barrier_wait(shared + kWFull + 8 * w.at, w.parity);
        const unsigned place = (w_place + w.at * kWStageBytes) ^ (Odd ? kUnitK : 0);
        load_matrices(words[0], place);
        load_matrices(words[1], place + 8 * kChunkK);
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
        for (int i = 0; i < 2; ++i) {
            e4m3x4_to_bf16<J / 2>(words[i][J], factor[i], magnitude, a[J][i], a[J][2 + i]);
            nan[i] |= (words[i][J] + 0x01010101) ^ words[i][J];
        }
    }
    MX_MEMBER void release(unsigned barriers, int stage) const {
        if (lane == 0)
            barrier_arrive(shared + barriers + 8 * stage);
    }

    // Multiplies a unit, which is in registers as a[Buffer], while the next becomes a[1 - Buffer].
    template <int Buffer, bool Last>
    MX_MEMBER void multiply(float (&sums)[kTokens / 2], unsigned (&a)[2][4][4]) {
        // Told so, ptxas computes descriptors in uniform registers.
        const int stage = __shfl_sync(0xffffffff, x.at, 0);
        barrier_wait(shared + kXFull + 8 * stage, x.parity);
        x.next();
        const MatrixDescriptor b(shared + stage * kXStageBytes, kStepBytes / 2, kOctetBytes);
        wgmma_fence();
        wgmma(sums, a[Buffer][0], b.at(0));
        wgmma(sums, a[Buffer][1], b.at(kStepBytes));
        wgmma_commit();
        if constexpr (!Last)
            fetch<Buffer == 0>();
        wgmma_wait<1>();
        if (Buffer == 1 || used >= 0)
            release(kXEmpty, used);
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
            if constexpr (Buffer == 0) {
                release(kWEmpty, w.at);
                w.next();
            }
        }
    }

    MX_MEMBER void add(float (&sums)[kTokens / 2]) {
        unsigned a[2][4][4];
        const int units = t.units();
        fetch<false>();
        expand<0>(a[0]);
        expand<1>(a[0]);
        expand<2>(a[0]);
        expand<3>(a[0]);
        int unit = 0;
        for (; unit + 2 < units; unit += 2) {
            multiply<0, false>(sums, a);
            multiply<1, false>(sums, a);
        }
        if (unit + 1 < units) {
            multiply<0, false>(sums, a);
            multiply<1, true>(sums, a);
        } else {
            multiply<0, true>(sums, a);
        }
        wgmma_wait<0>();
        keep_in_order(sums);
    }

    MX_MEMBER void run() {
        float sums[kTokens / 2];
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i)
            sums[i] = 0;
        add(sums);
        const unsigned highest = max(most & 0xffff, most >> 16);
        const bool nan_scale = highest == kNanScale;
        if (min(least & 0xffff, least >> 16) < kFirstWScale ||
            (highest > kLastWScale && !nan_scale))
            announce_shared(shared + kOutside, 1);
        bool nan_row[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
            nan_row[i] = any_of_row((nan[i] & 0x80808080) || (lane % 2 == i && nan_scale), lane);
        // All have multiplied: their stages become the place of the sums.
        named_barrier(kConsumersBarrier, kGroups * kGroupThreads);
        const unsigned place =
            shared + (lane % 4 * 2 * kPitch + group * kGroupRows + warp * 16 + lane / 4) * 4;
#pragma unroll
        for (int j = 0; j < kOctets; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float sum = nan_row[i / 2] ? bits_to_float(kNanBits) : sums[j * 4 + i];
                store_shared_4(place + ((j * 8 + i % 2) * kPitch + i / 2 * 8) * 4,
                               float_to_bits(sum));
            }
    }
};

MX_DEVICE float4 load_cluster_16(unsigned address) {
    float4 v;
    if constexpr (kSplit == 1)
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                     : "r"(address)
                     : "memory");
    else
        asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                     : "r"(address)
                     : "memory");
    return v;
}
MX_DEVICE unsigned load_cluster_4(unsigned address) {
    unsigned v;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

// Adds the parts' sums for this CTA's share of the tokens, and stores what they come to.
struct Finisher {
    const Tile& t;
    const unsigned shared;
    const int rank;

    MX_MEMBER int first() const { return t.tokens() * rank / kSplit; }
    MX_MEMBER int end() const { return t.tokens() * (rank + 1) / kSplit; }

    MX_MEMBER void store_sums() const {
        constexpr int quads = kRows / 4;
        const bool whole =
            t.N % 4 == 0 && reinterpret_cast<unsigned long long>(t.y) % (4 * sizeof(Out)) == 0;
        unsigned parts[kSplit];
#pragma unroll
        for (int s = 0; s < kSplit; ++s)
            parts[s] = kSplit == 1 ? shared : address_in_cluster(shared, s);
        const int items = (end() - first()) * quads;
#pragma unroll 2
        for (int item = threadIdx.x; item < items; item += kThreads) {
            const int token = first() + item / quads, quad = item % quads;
            float4 of[kSplit];
#pragma unroll
            for (int s = 0; s < kSplit; ++s)
                of[s] = load_cluster_16(parts[s] + (token * kPitch + quad * 4) * 4);
            float sums[4] = {of[0].x, of[0].y, of[0].z, of[0].w};
#pragma unroll
            for (int s = 1; s < kSplit; ++s) {
                sums[0] += of[s].x;
                sums[1] += of[s].y;
                sums[2] += of[s].z;
                sums[3] += of[s].w;
            }
            const long row = t.row + quad * 4;
            Out* const to = t.y + (t.token + token) * t.N + row;
            if (t.bias_kind != kNone)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    sums[i] += load_bias(t.bias, t.bias_kind, min(row + i, t.N - 1));
            if (whole && row < t.N) {
                store_four(to, sums);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (row + i < t.N)
                        store(to + i, sums[i]);
            }
        }
    }

    // Computes again the outputs that scales reach which bf16 does not cover.
    MX_MEMBER void mend() const {
        const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
        const int tokens = end() - first(), rows = t.rows();
        constexpr int warps = kThreads / kLanes;
        for (int i = warp; i < tokens + rows; i += warps) {
            const bool of_x = i < tokens;
            const unsigned char* const scales = of_x ? t.xs + (t.token + first() + i) * t.blocks()
                                                     : t.ws + (t.row + i - tokens) * t.blocks();
            bool outside = false;
            for (long b = lane; b < t.blocks(); b += kLanes) {
                const unsigned scale = load_byte(scales + b);
                outside |=
                    scale != kNanScale &&
                    (of_x ? scale > kLastXScale : scale < kFirstWScale || scale > kLastWScale);
            }
            outside = __any_sync(0xffffffff, outside);
            if (lane == 0)
                store_shared_byte(of_x ? kTokenOutside + i : kRowOutside + i - tokens, outside);
        }
        group_barrier(); // these are there, and all sums have been stored
        for (int i = warp; i < tokens * rows; i += warps) {
            const int token = i / rows, row = i % rows;
            if (!load_shared_byte(kTokenOutside + token) && !load_shared_byte(kRowOutside + row))
                continue;
            const long m = t.token + first() + token, n = t.row + row;
            const float sum = exact_output_of_warp(m, n, lane);
            if (lane == 0)
                store(t.y + m * t.N + n, sum + load_bias(t.bias, t.bias_kind, n));
        }
    }

  private:
    MX_MEMBER void store_shared_byte(int at, bool value) const {
        asm volatile("st.shared.u8 [%0], %1;" ::"r"(shared + at), "r"(unsigned(value)) : "memory");
    }
    MX_MEMBER bool load_shared_byte(int at) const {
        unsigned v;
        asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(shared + at) : "memory");
        return v;
    }

    MX_MEMBER static void store_four(float* to, const float (&v)[4]) {
        store_vector(to, u32x4{float_to_bits(v[0]), float_to_bits(v[1]), float_to_bits(v[2]),
                               float_to_bits(v[3])});
    }
    template <class T>
    MX_MEMBER static void store_four(T* to, const float (&v)[4]) {
        asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(pack<T>(v[0], v[1])),
                     "r"(pack<T>(v[2], v[3]))
                     : "memory");
    }

    // The lanes take 16 k in turn.
    MX_MEMBER float exact_output_of_warp(long m, long n, int lane) const {
        constexpr int piece = 16;
        float sum = 0.0f;
#pragma unroll 1
        for (long k = lane * piece; k < t.K; k += kLanes * piece)
            sum += exact_piece(t.xq + m * t.K + k, t.wq + n * t.K + k,
                               load_byte(t.xs + m * t.blocks() + k / kBlock),
                               load_byte(t.ws + n * t.blocks() + k / kBlock));
#pragma unroll
        for (int distance = kLanes / 2; distance; distance /= 2)
            sum += __shfl_xor_sync(0xffffffff, sum, distance);
        return sum;
    }
    MX_MEMBER static float exact_piece(const unsigned char* xq, const unsigned char* wq,
                                       unsigned x_scale, unsigned w_scale) {
        f32x2 x[8], w[8];
        const u32x4 x_words = load(xq), w_words = load(wq);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            e4m3x4_to_f32(x_words[i], x[2 * i], x[2 * i + 1]);
            e4m3x4_to_f32(w_words[i], w[2 * i], w[2 * i + 1]);
        }
        return add_scaled(0.0f, dot(x, w), e8m0_split(x_scale), e8m0_to_f32(w_scale));
    }
};

#if MX_SPLIT > 1
#define MX_CLUSTER __cluster_dims__(MX_SPLIT, 1, 1)
#else
#define MX_CLUSTER
#endif

extern "C" __global__ void MX_CLUSTER __maxnreg__(kLaunchRegisters)
    aiter_mx_linear_wgmma_bf16(const unsigned char* xq, const unsigned char* xs,
                               const unsigned char* wq, const unsigned char* ws, const void* bias,
                               Out* y, unsigned char* workspace, long M, long N, long K,
                               int bias_kind, const __grid_constant__ TensorMap weights) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    const unsigned shared = held(shared_address(dynamic));
    if (threadIdx.x == 0) {
        prefetch_map(weights);
        for (int i = 0; i < kXStages; ++i) {
            barrier_init(shared + kXFull + 8 * i, 1);
            barrier_init(shared + kXEmpty + 8 * i, kGroups * kWarps);
        }
        for (int i = 0; i < kWStages; ++i) {
            barrier_init(shared + kWFull + 8 * i, 1);
            barrier_init(shared + kWEmpty + 8 * i, kGroups * kWarps);
        }
        store_shared(shared + kOutside, 0);
        fence_barrier_init();
    }
    launch_dependents();
    group_barrier();

    const int rank = kSplit == 1 ? 0 : rank_in_cluster();
    const unsigned tile = blockIdx.x / kSplit;
    const unsigned token_tiles = (M + kTokens - 1) / kTokens;
    const int chunks = (K + kChunkK - 1) / kChunkK;
    const int first_chunk = static_cast<long>(chunks) * rank / kSplit;
    const Tile t{xq,
                 xs,
                 wq,
                 ws,
                 bias,
                 y,
                 M,
                 N,
                 K,
                 bias_kind,
                 tile % token_tiles * static_cast<long>(kTokens),
                 tile / token_tiles * static_cast<long>(kRows),
                 first_chunk,
                 static_cast<int>(static_cast<long>(chunks) * (rank + 1) / kSplit) - first_chunk};
    // Told so, ptxas knows that it is the same for all lanes of a warp.
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / kLanes, 0);
    const int lane = threadIdx.x % kLanes;
    if (warp < kWarps) {
        if constexpr (kGroups > 1)
            decrease_registers<kHelperRegisters>();
        const Producer producer{t, weights, shared, {workspace, M, K, kTokens}, tile % token_tiles};
        if (warp == 0)
            producer.bring_x(lane);
        else if (warp == 1)
            producer.bring_w();
        __syncwarp();
        wait_for_grid_ahead();
    } else {
        if constexpr (kGroups > 1)
            increase_registers<kConsumerRegisters>();
        Consumer(t, shared, warp / kWarps - 1, warp % kWarps, lane).run();
        wait_for_grid_ahead();
    }
    if constexpr (kSplit > 1) {
        cluster_arrive();
        cluster_wait();
    } else {
        group_barrier();
    }
    const Finisher finisher{t, shared, rank};
    finisher.store_sums();
    bool outside = false;
    if constexpr (kSplit == 1)
        outside = load_shared(shared + kOutside);
    else
        for (int s = 0; s < kSplit; ++s)
            outside |= load_cluster_4(address_in_cluster(shared + kOutside, s)) != 0;
    if constexpr (kSplit > 1)
        cluster_arrive();
    if (__builtin_expect(outside, false))
        finisher.mend();
    if constexpr (kSplit > 1)
        cluster_wait();
}
