// Decode linear for up to 64 rows of x on Hopper: y = dequantised(x) * dequantised(w)^T + bias.
//
//   xq [M, K], wq [N, K]        e4m3 payload
//   xs [M, K/32], ws [N, K/32]  e8m0 scale of each 32 consecutive k
//   y  [M, N]                   fp32, bf16 or fp16
//   bias [N]                    any of these, or none
//
// Weights are the A operand of wgmma, 64 rows of w at a time; x is B. Both become bf16 with their
// scales applied, which is exact, so that sums over all of K stay in the matrix unit.
//
//   cluster of kSplit workgroups    takes tiles of 64 rows, each workgroup a slice of K
//     kGroups consumer warpgroups   take chunks of the slice in turn, each adds up its own
//     kProducers producer warps     fill a ring of stages with chunks of weights, tile after tile
//
//   k of a slice ->  |chunk 0: group 0|chunk 1: group 1|chunk 2: group 0|...
//
// A consumer lane takes 16 consecutive bytes of a row, so one unit of 64 k is 4 lanes wide and
// feeds 4 wgmmas: word j of each lane goes to wgmma j. x is stored in the same order of k.
//
// At the end of a tile the consumers send their partial sums to the workgroups of the cluster that
// own these outputs, which add them in a fixed order.
//
// Scales that bf16 cannot hold are computed apart: their part of the product is left zero, kMarker
// is sent for the partial sums, and the owner computes these outputs again in fp32.

#include "mx_scale.h"
#include "mx_target.h"
#include "sm90_async.h"
#include "sm90_wgmma.h"

using namespace mx;

constexpr int kTileM = MX_TILE_M;   // rows of x, with padding: 8, 16, 32 or 64
constexpr int kSplit = MX_SPLIT;    // workgroups of a cluster, which split K
constexpr int kGroups = MX_GROUPS;  // consumer warpgroups of a workgroup
constexpr int kUnits = MX_UNITS;    // most units of a chunk
constexpr int kStages = MX_STAGES;  // chunks that are in flight
constexpr int kXSlots = MX_X_SLOTS; // chunks of x that a group can keep
constexpr int kPerSM = MX_PER_CU;   // workgroups that fit an SM
using Out = DType<MX_OUT>;

constexpr int kBlock = 32; // k of one scale
constexpr int kUnit = 64;  // k of 4 wgmmas
constexpr int kRows = 64;  // of w in a tile
constexpr int kGroupThreads = 128;
constexpr int kProducers = 4;
constexpr int kThreads = kGroups * kGroupThreads + kProducers * kLanes;

// Row pitches that keep the 8 lanes of a 16-byte access, and rows of factors, in different banks.
constexpr int kPitch = kUnits * kUnit + (kUnits % 2 ? 0 : 64);
constexpr int kFactorPitch = 2 * kUnits + (kUnits % 2 ? 0 : 2);
constexpr int kStageBytes = kRows * kPitch;
constexpr int kFactorBytes = kRows * kFactorPitch * 4;
constexpr int kStepBytes = 16 * kTileM * 2; // B of one wgmma
constexpr int kXSlotBytes = kUnits * 4 * kStepBytes;

// A consumer thread holds kPairs pairs of outputs. Pair p belongs to workgroup p % kSplit.
constexpr int kPairs = kTileM / 4;
constexpr int kSources = kSplit * kGroups; // partial sums of each output
constexpr int kOwnedPairs = (kPairs + kSplit - 1) / kSplit;
constexpr int kPartialBytes = kGroupThreads * 8; // of one pair from one source

constexpr int kFactors = kStages * kStageBytes;
constexpr int kX = kFactors + kStages * kFactorBytes;
constexpr int kPartials = kX + kGroups * kXSlots * kXSlotBytes;
static_assert(kStages % kGroups == 0, "a stage has one group that empties it");
static_assert(kPartials + kOwnedPairs * kSources * kPartialBytes == MX_SHARED_BYTES,
              "the host lays shared memory out differently: aiter_mx/kernels/linear_mfma.py");

// w is held as w * 2^-60 and x as x * 2^60: with these, bf16 covers scales of w from 2^-64 to 2^67
// and of x up to 2^59, whatever the payload.
constexpr unsigned kFirstWScale = 63, kLastWScale = 194, kLastXScale = 186;
constexpr unsigned kNoScales = 127 | 127 << 8;
constexpr unsigned kNanBF16x2 = 0x7fc07fc0;
constexpr unsigned kMarker = 0x7fabcdef; // a NaN that arithmetic does not make

struct Tensors {
    const unsigned char *xq, *xs, *wq, *ws;
    long M, N, K;

    MX_MEMBER long blocks() const { return K / kBlock; }
    MX_MEMBER long units() const { return (K + kUnit - 1) / kUnit; }
};

// A workgroup's part of K, in chunks that are as equal as whole units allow.
struct Slice {
    int first, units, chunks;

    MX_MEMBER Slice(const Tensors& t, int rank) {
        first = t.units() * rank / kSplit;
        units = t.units() * (rank + 1) / kSplit - first;
        const int longest = (t.units() + kSplit - 1) / kSplit; // the same in all the cluster
        chunks = (longest + kGroups * kUnits - 1) / (kGroups * kUnits) * kGroups;
    }
    MX_MEMBER int chunk(int c) const { return first + units * c / chunks; }
};

MX_DEVICE u32x4 load_shared(unsigned address) {
    u32x4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
                 : "r"(address));
    return v;
}
MX_DEVICE unsigned load_shared_word(unsigned address) {
    unsigned v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}
MX_DEVICE float2 load_shared_pair(unsigned address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
    return v;
}
MX_DEVICE unsigned load_two_bytes(const unsigned char* p) {
    unsigned short v;
    asm volatile("ld.relaxed.cta.global.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}
MX_DEVICE void store_shared(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}
MX_DEVICE void store_shared(unsigned address, unsigned a, unsigned b) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}

MX_DEVICE unsigned multiply_bf16x2(unsigned a, unsigned b) {
    unsigned product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

// Bytes 0 and 2, then 1 and 3, of four e4m3 times factor, which undoes the 2^-120 of the payload's
// bits at the place of a bf16's. NaN payloads are not NaN here: see Weights::nan.
MX_DEVICE void e4m3x4_to_bf16(unsigned word, unsigned factor, unsigned& even, unsigned& odd) {
    constexpr unsigned magnitude = 0x07f007f0; // the other bits come from signs
    const unsigned signs = word & 0x80808080;
    even = multiply_bf16x2(((word << 4) & magnitude) | ((signs << 8) & ~magnitude), factor);
    odd = multiply_bf16x2(((word >> 4) & magnitude) | (signs & ~magnitude), factor);
}

// What multiplies a bf16 of w's payload, twice; 0 where bf16 does not reach.
MX_DEVICE unsigned weight_factor(unsigned scale) {
    if (scale == kNanScale)
        return kNanBF16x2;
    const bool held = kFirstWScale <= scale && scale <= kLastWScale;
    return held ? (scale - 127 - 60 + 120 + 127) * 0x00800080 : 0;
}

MX_DEVICE bool any_nonzero(const unsigned char* payload) { // of 32 e4m3
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32x4 words = load(payload + 16 * i);
        bits |= words[0] | words[1] | words[2] | words[3];
    }
    return bits & 0x7f7f7f7f;
}

// A producer warp fills every kProducers-th stage; four lanes take a row. That a stage has one warp
// that fills it and one group that empties it keeps both within a phase of its barriers' parity.
struct Producer {
    static constexpr int kRowLanes = 4;
    static constexpr int kRowsAtOnce = kLanes / kRowLanes;
    static constexpr int kRowSteps = kRows / kRowsAtOnce;
    static constexpr int kUnitSteps = (kUnits + kRowLanes - 1) / kRowLanes;

    Tensors t;
    unsigned shared, full;
    volatile unsigned* outside;
    int lane;
    // The chunk whose scales are on their way.
    long tile;
    int stage = -1, first, units;
    unsigned scales[kRowSteps][kUnitSteps]; // of both blocks of a unit

    MX_MEMBER int row(int i) const { return i * kRowsAtOnce + lane / kRowLanes; }
    MX_MEMBER long row_of_w(int i) const { return min(tile * kRows + row(i), t.N - 1); }
    MX_MEMBER int unit(int j) const { return j * kRowLanes + lane % kRowLanes; }

    MX_MEMBER void start() {
        const long k = first * static_cast<long>(kUnit) + lane % kRowLanes * 16;
#pragma unroll
        for (int i = 0; i < kRowSteps; ++i) {
            const unsigned char* from = t.wq + row_of_w(i) * t.K + k;
            const unsigned to =
                shared + stage * kStageBytes + row(i) * kPitch + lane % kRowLanes * 16;
#pragma unroll
            for (int u = 0; u < kUnits; ++u)
                if (u < units) // zeros beyond K
                    copy_async(to + u * kUnit, from + u * kUnit, k + u * kUnit < t.K ? 16 : 0);
        }
        barrier_arrive_copies(full + 8 * stage);
#pragma unroll
        for (int i = 0; i < kRowSteps; ++i) {
            const unsigned char* from = t.ws + row_of_w(i) * t.blocks() + first * 2l;
#pragma unroll
            for (int j = 0; j < kUnitSteps; ++j)
                scales[i][j] = unit(j) < units ? load_scales(from, unit(j) * 2) : kNoScales;
        }
    }

    // Two bytes; the second may lie beyond K.
    MX_MEMBER unsigned load_scales(const unsigned char* from, int block) const {
        if (t.blocks() % 2 == 0)
            return load_two_bytes(from + block);
        const bool both = first * 2l + block + 1 < t.blocks();
        return load_byte(from + block) | (both ? load_byte(from + block + 1) : 127) << 8;
    }

    MX_MEMBER void finish() {
        if (stage < 0)
            return;
        bool left_out = false;
#pragma unroll
        for (int i = 0; i < kRowSteps; ++i)
#pragma unroll
            for (int j = 0; j < kUnitSteps; ++j) {
                unsigned factors[2];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    factors[half] = weight_factor(scales[i][j] >> 8 * half & 255);
                    if (factors[half] == 0)
                        left_out |= any_nonzero(t.wq + row_of_w(i) * t.K +
                                                ((first + unit(j)) * 2l + half) * kBlock);
                }
                if (unit(j) < units)
                    store_shared(shared + kFactors + stage * kFactorBytes +
                                     (row(i) * kFactorPitch + unit(j) * 2) * 4,
                                 factors[0], factors[1]);
            }
        left_out = __any_sync(0xffffffff, left_out);
        if (lane == 0)
            outside[stage] = left_out;
        barrier_arrive(full + 8 * stage);
    }
};

MX_DEVICE void produce(Producer producer, const Slice& slice, unsigned empty, long tile,
                       long tile_step, long tiles, int warp) {
    int stage = 0, parity = 1;
    for (; tile < tiles; tile += tile_step)
        for (int c = 0; c < slice.chunks; ++c, ++stage) {
            if (stage == kStages) {
                stage = 0;
                parity ^= 1;
            }
            if (stage % kProducers != warp)
                continue;
            // The stage may wait for the very chunk whose scales are pending: see to them first,
            // unless the stage is free.
            if (!__all_sync(0xffffffff, barrier_is_over(empty + 8 * stage, parity))) {
                producer.finish();
                producer.stage = -1;
                barrier_wait(empty + 8 * stage, parity);
            }
            Producer next = producer;
            next.tile = tile;
            next.stage = stage;
            next.first = slice.chunk(c);
            next.units = slice.chunk(c + 1) - next.first;
            next.start();
            producer.finish();
            producer = next;
        }
    producer.finish();
    copies_wait(); // a warp that has ended arrives nowhere
}

// x of a chunk to bf16, in the order in which wgmma takes it. Returns whether this thread left
// values out because of their scale.
MX_DEVICE bool expand_x(const Tensors& t, int first, int units, unsigned to, int thread) {
    constexpr int rows_at_once = 8;
    const int row_in_8 = thread % rows_at_once, step = thread / rows_at_once % 4;
    bool left_out = false;
#pragma unroll 2
    for (int i = thread / kLanes; i < units * (kTileM / 8); i += kGroupThreads / kLanes) {
        const int unit = i / (kTileM / 8), m = i % (kTileM / 8) * 8 + row_in_8;
        const long k = (first + unit) * static_cast<long>(kUnit);
        unsigned even[4], odd[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            unsigned words[2] = {}, scale = 127;
            if (m < t.M && k + half * kBlock < t.K) {
                const unsigned char* from = t.xq + m * t.K + k + half * kBlock + step * 4;
                words[0] = __ldg(reinterpret_cast<const unsigned*>(from));
                words[1] = __ldg(reinterpret_cast<const unsigned*>(from + 16));
                scale = __ldg(t.xs + m * t.blocks() + k / kBlock + half);
            }
            const bool outside = kLastXScale < scale && scale != kNanScale;
            left_out |= outside && ((words[0] | words[1]) & 0x7f7f7f7f);
            const float factor = bits_to_float(scale == kNanScale ? kNanBits
                                               : outside          ? 0
                                                                  : (scale + 60) << 23);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                f32x2 low, high;
                e4m3x4_to_f32(words[i], low, high);
                asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
                    : "=r"(even[half * 2 + i])
                    : "f"(high.x * factor), "f"(low.x * factor));
                asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
                    : "=r"(odd[half * 2 + i])
                    : "f"(high.y * factor), "f"(low.y * factor));
            }
        }
        const unsigned place = to + (unit * 4 + step) * kStepBytes + m * 16;
        store_shared(place, even[0], even[1], even[2], even[3]);
        store_shared(place + kStepBytes / 2, odd[0], odd[1], odd[2], odd[3]);
    }
    return left_out;
}

// 64 k of a lane's two rows of w.
struct Weights {
    u32x4 payload[2];
    unsigned factor[2];

    MX_MEMBER void load(unsigned payloads, unsigned factors) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            payload[i] = load_shared(payloads + i * 8 * kPitch);
            factor[i] = load_shared_word(factors + i * 8 * kFactorPitch * 4);
        }
    }
    MX_MEMBER void to_bf16(unsigned (&a)[4][4]) const {
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                e4m3x4_to_bf16(payload[i][j], factor[i], a[j][i], a[j][2 + i]);
    }
    // Sets the top bit of a byte of found[i] where row i has a NaN payload.
    MX_MEMBER void find_nan(unsigned (&found)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                found[i] |= (payload[i][j] & 0x7f7f7f7f) + 0x01010101;
    }
};

// One output in fp32, as linear_gemv.cu computes it: for scales that bf16 does not hold.
MX_DEVICE float exact_output(const Tensors& t, long m, long n) {
    float sum = 0.0f;
    for (long k = 0; k < t.K; k += 16) {
        f32x2 x[8], w[8];
        const u32x4 x_words = load(t.xq + m * t.K + k), w_words = load(t.wq + n * t.K + k);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            e4m3x4_to_f32(x_words[i], x[2 * i], x[2 * i + 1]);
            e4m3x4_to_f32(w_words[i], w[2 * i], w[2 * i + 1]);
        }
        const unsigned x_scale = load_byte(t.xs + (m * t.K + k) / kBlock);
        const unsigned w_scale = load_byte(t.ws + (n * t.K + k) / kBlock);
        sum = add_scaled(sum, dot(x, w), e8m0_split(x_scale), e8m0_to_f32(w_scale));
    }
    return sum;
}

MX_DEVICE float load_bias(const void* bias, int kind, long n) {
    switch (kind) {
    case kF32:
        return static_cast<const float*>(bias)[n];
    case kBF16:
        return to_f32(static_cast<const bf16*>(bias)[n]);
    case kFP16:
        return to_f32(static_cast<const fp16*>(bias)[n]);
    default:
        return 0.0f;
    }
}

extern "C" __global__ void __cluster_dims__(kSplit, 1, 1) __launch_bounds__(kThreads, kPerSM)
    aiter_mx_linear_mfma(const unsigned char* xq, const unsigned char* xs, const unsigned char* wq,
                         const unsigned char* ws, const void* bias, Out* y, long M, long N, long K,
                         int bias_kind) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    __shared__ unsigned long long full_barriers[kStages], empty_barriers[kStages];
    __shared__ unsigned long long partials_barrier, taken_barrier;
    __shared__ unsigned stage_outside[kStages];
    __shared__ unsigned x_outside[kGroups];

    const unsigned shared = shared_address(dynamic);
    const unsigned full = shared_address(full_barriers), empty = shared_address(empty_barriers);
    const unsigned arrived = shared_address(&partials_barrier);
    const unsigned taken = shared_address(&taken_barrier);
    const int thread = threadIdx.x, warp = thread / kLanes, lane = thread % kLanes;
    const int rank = rank_in_cluster();
    const Tensors t{xq, xs, wq, ws, M, N, K};
    const Slice slice(t, rank);
    const long tiles = (N + kRows - 1) / kRows;
    const long first_tile = blockIdx.x / kSplit, tile_step = gridDim.x / kSplit;

    if (thread == 0) {
#pragma unroll
        for (int s = 0; s < kStages; ++s) {
            barrier_init(full + 8 * s, 2 * kLanes);
            barrier_init(empty + 8 * s, 4);
        }
        barrier_init(arrived, 1);
        barrier_init(taken, kSources * 4);
        fence_barrier_init();
    }
    if (thread < kGroups)
        x_outside[thread] = 0;
    cluster_arrive();
    group_barrier();

    if (warp >= kGroups * 4) {
        produce(Producer{t, shared, full, stage_outside, lane}, slice, empty, first_tile, tile_step,
                tiles, warp - kGroups * 4);
        return;
    }

    const int group = warp / 4, in_group = thread % kGroupThreads;
    const int row = warp % 4 * 16 + lane / 4; // and row + 8 of the tile
    const unsigned x = shared + kX + group * kXSlots * kXSlotBytes;
    const bool x_stays = slice.chunks <= kXSlots * kGroups;
    const auto bring_x = [&](int c, int slot) {
        const int first = slice.chunk(c), units = slice.chunk(c + 1) - first;
        if (expand_x(t, first, units, x + slot * kXSlotBytes, in_group))
            x_outside[group] = 1;
    };
    if (x_stays) {
        for (int c = group, slot = 0; c < slice.chunks; c += kGroups, ++slot)
            bring_x(c, slot);
        fence_async();
        warpgroup_barrier(1 + group);
    }
    const unsigned payloads = row * kPitch + lane % 4 * 16;
    const unsigned factors = (row * kFactorPitch + lane % 4 / 2) * 4;

    int stage = group, parity = 0;
    unsigned turn = 0;
    for (long tile = first_tile; tile < tiles; tile += tile_step, ++turn) {
        float sums[kTileM / 2] = {};
        unsigned nan[2] = {}, outside = 0;
        for (int c = group, slot = 0; c < slice.chunks; c += kGroups) {
            const int units = slice.chunk(c + 1) - slice.chunk(c);
            if (!x_stays) {
                wgmma_wait<0>();
                warpgroup_barrier(1 + group);
                bring_x(c, 0);
                fence_async();
                warpgroup_barrier(1 + group);
            }
            unsigned long long b = matrix_descriptor(x + slot * kXSlotBytes, kStepBytes / 2, 128);
            slot += x_stays;

            barrier_wait(full + 8 * stage, parity);
            const unsigned from = shared + stage * kStageBytes + payloads;
            const unsigned scaled_by = shared + kFactors + stage * kFactorBytes + factors;
            outside |= stage_outside[stage];
            Weights next;
            unsigned a[2][4][4];
            if (units)
                next.load(from, scaled_by);
            for (int u = 0; u < units; u += 2) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    if (u + i < units) {
                        const Weights w = next;
                        if (u + i + 1 < units)
                            next.load(from + (u + i + 1) * kUnit, scaled_by + (u + i + 1) * 8);
                        w.to_bf16(a[i]);
                        w.find_nan(nan);
                        wgmma_fence();
#pragma unroll
                        for (int j = 0; j < 4; ++j, b += kStepBytes >> 4)
                            wgmma(sums, a[i][j], b);
                        wgmma_commit();
                        wgmma_wait<1>();
                    }
                }
            }
            __syncwarp();
            if (lane == 0)
                barrier_arrive(empty + 8 * stage);
            stage += kGroups;
            if (stage >= kStages) {
                stage -= kStages;
                parity ^= 1;
            }
        }
        wgmma_wait<0>();

        unsigned special[2]; // sent instead of a row's sums
        outside |= x_outside[group];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            unsigned found = nan[i] & 0x80808080; // in any lane of the row
            found |= __shfl_xor_sync(0xffffffff, found, 1);
            found |= __shfl_xor_sync(0xffffffff, found, 2);
            special[i] = outside ? kMarker : found ? kNanBits : 0;
        }
        if (turn == 0)
            cluster_wait(); // all workgroups of the cluster have set up their barriers
        else
            barrier_wait_cluster(taken, (turn & 1) ^ 1); // they have added the last partial sums
        const int owned = (kPairs - rank + kSplit - 1) / kSplit;
        if (thread == 0 && owned > 0)
            barrier_arrive_expect(arrived, owned * kSources * kPartialBytes);
        const int source = rank * kGroups + group;
        const unsigned partials = shared + kPartials + in_group * 8;
#pragma unroll
        for (int p = 0; p < kPairs; ++p) {
            const unsigned to = partials + (p / kSplit * kSources + source) * kPartialBytes;
            const unsigned instead = special[p % 2];
            const float first = instead ? bits_to_float(instead) : sums[2 * p];
            const float second = instead ? bits_to_float(instead) : sums[2 * p + 1];
            store_async(address_in_cluster(to, p % kSplit), first, second,
                        address_in_cluster(arrived, p % kSplit));
        }

        if (owned > 0)
            barrier_wait_cluster(arrived, turn & 1);
        const bool last = tile + tile_step >= tiles;
        if (last) {
            __syncwarp();
            cluster_arrive();
        }
        for (int l = group; l < owned; l += kGroups) {
            const int p = l * kSplit + rank;
            float2 sum = {};
            bool again = false;
#pragma unroll
            for (int s = 0; s < kSources; ++s) {
                const float2 part = load_shared_pair(partials + (l * kSources + s) * kPartialBytes);
                again |= __float_as_uint(part.x) == kMarker;
                sum.x += part.x;
                sum.y += part.y;
            }
            const long n = tile * kRows + row + p % 2 * 8;
            const long m = p / 2 * 8 + lane % 4 * 2;
            if (n < N) {
                const float added = load_bias(bias, bias_kind, n);
                if (m < M)
                    store(y + m * N + n, (again ? exact_output(t, m, n) : sum.x) + added);
                if (m + 1 < M)
                    store(y + (m + 1) * N + n, (again ? exact_output(t, m + 1, n) : sum.y) + added);
            }
        }
        __syncwarp();
        if (!last && lane < kSplit)
            barrier_arrive_cluster(address_in_cluster(taken, lane));
    }
    cluster_wait(); // what was sent to this workgroup, and by it, has arrived
}
