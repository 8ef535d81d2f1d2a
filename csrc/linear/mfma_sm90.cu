// Decode linear for up to 64 rows of x on Hopper: y = dequantised(x) * dequantised(w)^T + bias.
//
//   xq [M, K], wq [N, K]        e4m3 payload
//   xs [M, K/32], ws [N, K/32]  e8m0 scale of each 32 consecutive k
//   y  [M, N]                   fp32, bf16 or fp16
//   bias [N]                    any of these, or none
//
// Weights are the A operand of wgmma, a tile of 64 rows of w at a time; x is B. Both become bf16
// with their scales applied, which is exact, so that sums over all of K stay in the matrix unit.
//
// A cluster of kSplit workgroups takes kRowGroups tiles at a time. K is in kSplit * kKGroups parts,
// one for a warpgroup, which are added through the cluster's shared memory:
//
//                 k -> | workgroup 0        | workgroup 1        | ... of the cluster
//   tile i             | group 0 | group 2  | group 0 | group 2  |
//   tile i + 1         | group 1 | group 3  | group 1 | group 3  |
//
// A lane reads 16 consecutive bytes of two rows straight into registers, kDepth such units of 64 k
// ahead of their use, across the ends of tiles. A unit is 4 lanes wide and feeds 4 wgmmas: word j
// of each lane goes to wgmma j, and x is stored in the same order of k.
//
// Partial sums go to the workgroup of the cluster that owns the output, which adds them in a fixed
// order. Scales that bf16 cannot hold are computed apart: kMarker is sent for the partial sums of
// the row, and the owner computes its outputs again in fp32.

#include "common/epilogue.h"
#include "common/exact.h"
#include "common/scale.h"
#include "common/target.h"
#include "sm90/async.h"
#include "sm90/expand.h"
#include "sm90/shared.h"
#include "sm90/wgmma.h"

using namespace mx;

constexpr int kTileM = MX_TILE_M;         // rows of x, with padding: 8, 16, 32 or 64
constexpr int kSplit = MX_SPLIT;          // workgroups of a cluster
constexpr int kRowGroups = MX_ROW_GROUPS; // tiles of a cluster at a time
constexpr int kKGroups = MX_K_GROUPS;     // warpgroups of a workgroup that share a tile
constexpr int kDepth = MX_DEPTH;          // units in flight
static_assert(kDepth % 2 == 0, "units take turns with two sets of registers for wgmma's A");
constexpr int kXUnits = MX_X_UNITS; // units of x that a part of K has room for
using Out = DType<MX_OUT>;

constexpr int kBlock = 32; // k of one scale
constexpr int kUnit = 64;  // k of 4 wgmmas
constexpr int kRows = 64;  // of w in a tile
constexpr int kGroupThreads = 128;
constexpr int kThreads = kRowGroups * kKGroups * kGroupThreads;

constexpr int kStepBytes = 16 * kTileM * 2; // B of one wgmma
constexpr int kXBytes = kXUnits * 4 * kStepBytes;

// A thread holds kPairs pairs of outputs. Pair p belongs to workgroup p % kSplit.
constexpr int kPairs = kTileM / 4;
constexpr int kSources = kSplit * kKGroups; // partial sums of each output
constexpr int kOwnedPairs = (kPairs + kSplit - 1) / kSplit;
constexpr int kPairBytes = kGroupThreads * 8; // from one source
constexpr int kPartials = kKGroups * kXBytes;
constexpr int kPartialBytes = kOwnedPairs * kSources * kPairBytes; // of a tile
constexpr int kSlots = 2; // a tile's outputs are added while the next one is computed
static_assert(kPartials + kSlots * kRowGroups * kPartialBytes == MX_SHARED_BYTES,
              "the host lays shared memory out differently: aiter_mx/kernels/linear/mfma_sm90.py");

constexpr unsigned kNanBF16x2 = 0x7fc07fc0;
constexpr unsigned kMarker = 0x7fabcdef; // a NaN that arithmetic does not make

struct Tensors {
    const unsigned char *xq, *xs, *wq, *ws;
    long M, N, K;

    MX_MEMBER long blocks() const { return K / kBlock; }
    MX_MEMBER long units() const { return (K + kUnit - 1) / kUnit; }
};

// The units of one part of K.
struct Part {
    int first, units;
    int padded; // steps of kDepth, the same for all parts

    MX_MEMBER Part(const Tensors& t, int index) {
        const int all = t.units();
        first = all * index / kSources;
        units = all * (index + 1) / kSources - first;
        padded = ((all + kSources - 1) / kSources + kDepth - 1) / kDepth * kDepth;
    }
};

MX_DEVICE float2 load_shared_pair(unsigned address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
    return v;
}

// Bytes 0 and 2, then 1 and 3, of four e4m3 times a w_factor, where the compiler is to choose how
// bits are put together. NaN payloads are not NaN here: see Weights::nan.
MX_DEVICE void e4m3x4_to_bf16(unsigned word, unsigned factor, unsigned& even, unsigned& odd) {
    constexpr unsigned magnitude = kMagnitude; // the other bits come from signs
    const unsigned signs = word & 0x80808080;
    even = multiply_bf16x2(((word << 4) & magnitude) | ((signs << 8) & ~magnitude), factor);
    odd = multiply_bf16x2(((word >> 4) & magnitude) | (signs & ~magnitude), factor);
}

// x of a part of K to bf16, in the order in which wgmma takes it: units from the first, of which
// only some exist. Returns whether this thread left values out because of their scale.
MX_DEVICE bool expand_x(const Tensors& t, int first, int existing, int units, unsigned to,
                        int thread) {
    constexpr int warps = kRowGroups * kGroupThreads / kLanes;
    const int row_in_8 = thread % 8, step = thread / 8 % 4;
    bool left_out = false;
#pragma unroll 2
    for (int i = thread / kLanes; i < units * (kTileM / 8); i += warps) {
        const int unit = i / (kTileM / 8), m = i % (kTileM / 8) * 8 + row_in_8;
        const long k = (first + unit) * static_cast<long>(kUnit);
        unsigned even[4], odd[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            unsigned words[2] = {}, scale = 127;
            if (unit < existing && m < t.M && k + half * kBlock < t.K) {
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
            for (int i = 0; i < 2; ++i)
                e4m3x4_to_bf16(words[i], factor, even[half * 2 + i], odd[half * 2 + i]);
        }
        const unsigned place = to + (unit * 4 + step) * kStepBytes + m * 16;
        store_shared_16(place, even);
        store_shared_16(place + kStepBytes / 2, odd);
    }
    return left_out;
}

// 64 k of a lane's two rows of w.
struct Weights {
    u32x4 payload[2];
    unsigned scale[2];

    // Sets the top bit of a byte of nan[i] where row i has a NaN payload, and outside[i] if values
    // of it are left out because of their scale.
    MX_MEMBER void to_bf16(unsigned (&a)[4][4], unsigned (&nan)[2], unsigned (&outside)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            unsigned factor = w_factor(scale[i]);
            if (scale[i] - kFirstWScale > kLastWScale - kFirstWScale) {
                factor = scale[i] == kNanScale ? kNanBF16x2 : 0;
                outside[i] |=
                    factor ? 0
                           : (payload[i][0] | payload[i][1] | payload[i][2] | payload[i][3]) &
                                 0x7f7f7f7f;
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                e4m3x4_to_bf16(payload[i][j], factor, a[j][i], a[j][2 + i]);
                nan[i] |= (payload[i][j] & 0x7f7f7f7f) + 0x01010101;
            }
        }
    }
};

// Reads a part's units of one tile after another.
struct Reader {
    const Tensors& t;
    const Part& part;
    int row, quarter;        // of the tile, and row + 8; which 16 of the 64 k
    long tile, step;         // its tile now, and how far to the next
    int unit = 0, units = 0; // its unit now, and those that this lane has
    const unsigned char *payload[2], *scale[2];

    MX_MEMBER Reader(const Tensors& t, const Part& part, int row, int quarter, long tile, long step)
        : t(t), part(part), row(row), quarter(quarter), tile(tile), step(step) {
        open();
    }
    MX_MEMBER void open() {
        const long k = part.first * static_cast<long>(kUnit) + quarter * 16;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const long n = min(tile * kRows + row + 8 * i, t.N - 1);
            payload[i] = t.wq + n * t.K + k;
            scale[i] = t.ws + n * t.blocks() + k / kBlock;
        }
        const bool half = k + part.units * kUnit - quarter * 16 > t.K; // of the last unit exists
        units = tile * kRows >= t.N ? 0 : half && quarter >= 2 ? part.units - 1 : part.units;
        unit = 0;
    }
    MX_MEMBER void next(Weights& w) {
        if (unit == part.padded) {
            tile += step;
            open();
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            w.payload[i] = u32x4{};
            w.scale[i] = 127;
            if (unit < units) {
                w.payload[i] = load_once(payload[i] + unit * kUnit);
                w.scale[i] = load_byte(scale[i] + unit * 2);
            }
        }
        ++unit;
    }
};

// Adds the partial sums of one tile that this workgroup owns, and stores them.
struct Epilogue {
    const Tensors& t;
    const void* bias;
    Out* y;
    int bias_kind, rank, k_group, row, column;

    MX_MEMBER void operator()(long tile, unsigned partials) const {
        for (int p = k_group * kSplit + rank; p < kPairs; p += kKGroups * kSplit) {
            float sum[2] = {};
            bool again = false;
#pragma unroll
            for (int s = 0; s < kSources; ++s) {
                const float2 part =
                    load_shared_pair(partials + (p / kSplit * kSources + s) * kPairBytes);
                again |= __float_as_uint(part.x) == kMarker;
                sum[0] += part.x;
                sum[1] += part.y;
            }
            const long n = tile * kRows + row + p % 2 * 8;
            if (n >= t.N)
                continue;
            const long m = p / 2 * 8 + column;
            if (__builtin_expect(again, false))
                for (int i = 0; i < 2; ++i)
                    if (m + i < t.M)
                        (i ? sum[1] : sum[0]) =
                            exact_output(t.xq + (m + i) * t.K, t.xs + (m + i) * t.blocks(),
                                         t.wq + n * t.K, t.ws + n * t.blocks(), t.K);
            const float added = load_bias(bias, bias_kind, n);
            Out* to = y + m * t.N + n;
            if (m < t.M)
                store(to, sum[0] + added);
            if (m + 1 < t.M)
                store(to + t.N, sum[1] + added);
        }
    }
};

extern "C" __global__ void __cluster_dims__(kSplit, 1, 1) __launch_bounds__(kThreads, 1)
    aiter_mx_linear_mfma(const unsigned char* xq, const unsigned char* xs, const unsigned char* wq,
                         const unsigned char* ws, const void* bias, Out* y, long M, long N, long K,
                         int bias_kind) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    __shared__ unsigned long long arrived_barriers[kRowGroups][kSlots];
    __shared__ unsigned long long taken_barriers[kRowGroups][kSlots];
    __shared__ unsigned x_outside[kKGroups];

    const unsigned shared = shared_address(dynamic);
    const int thread = threadIdx.x, lane = thread % kLanes;
    const int group = thread / kGroupThreads, in_group = thread % kGroupThreads;
    const int row_group = group % kRowGroups, k_group = group / kRowGroups;
    // Before any loads: fences and barriers wait for those that are under way.
    if (thread < kRowGroups * kSlots) {
        barrier_init(shared_address(arrived_barriers[0] + thread), 1);
        barrier_init(shared_address(taken_barriers[0] + thread), kSources * 4);
        fence_barrier_init();
    }
    if (thread < kKGroups)
        x_outside[thread] = 0;
    group_barrier();
    cluster_arrive();

    const int rank = rank_in_cluster();
    const int source = rank * kKGroups + k_group;
    const Tensors t{xq, xs, wq, ws, M, N, K};
    const Part part(t, source);

    // Tiles are dealt to clusters kRowGroups at a time.
    const long first_tile = blockIdx.x / kSplit * static_cast<long>(kRowGroups);
    const long tile_step = gridDim.x / kSplit * static_cast<long>(kRowGroups);
    const int row = in_group / kLanes * 16 + lane / 4; // and row + 8 of the tile
    Reader reader(t, part, row, lane % 4, first_tile + row_group, tile_step);
    Weights ring[kDepth];
#pragma unroll
    for (int d = 0; d < kDepth; ++d)
        reader.next(ring[d]);

    const unsigned x = shared + k_group * kXBytes;
    const auto bring_x = [&](int from) {
        const int in_k_group = row_group * kGroupThreads + in_group;
        if (expand_x(t, part.first + from, part.units - from, min(kXUnits, part.padded - from), x,
                     in_k_group))
            x_outside[k_group] = 1;
        fence_async();
        named_barrier(1 + k_group, kRowGroups * kGroupThreads);
    };
    const bool x_stays = part.padded <= kXUnits;
    if (x_stays)
        bring_x(0);

    const int owned = (kPairs - rank + kSplit - 1) / kSplit;
    const unsigned arrived = shared_address(arrived_barriers[row_group]);
    const unsigned taken = shared_address(taken_barriers[row_group]);
    const unsigned partials =
        shared + kPartials + row_group * kSlots * kPartialBytes + in_group * 8;
    const Epilogue epilogue{t, bias, y, bias_kind, rank, k_group, row, lane % 4 * 2};
    const auto finish = [&](unsigned turn, bool last) {
        const int slot = turn % kSlots;
        if (owned > 0)
            barrier_wait_cluster(arrived + 8 * slot, turn / kSlots & 1);
        if (last) {
            __syncwarp();
            cluster_arrive();
        }
        epilogue(first_tile + turn * tile_step + row_group, partials + slot * kPartialBytes);
        __syncwarp();
    };

    unsigned turn = 0;
    for (long tiles = first_tile; tiles * kRows < N; tiles += tile_step, ++turn) {
        float sums[kTileM / 2] = {};
        unsigned nan[2] = {}, outside[2] = {};
        unsigned a[2][4][4];
        MatrixDescriptor b(x, kStepBytes / 2, 128);
        static_assert(kXUnits % kDepth == 0, "x comes in whole steps");
        for (int u = 0; u < part.padded; u += kDepth) {
            if (!x_stays && u % kXUnits == 0) {
                wgmma_wait<0>();
                named_barrier(1 + k_group, kRowGroups * kGroupThreads);
                bring_x(u);
                b = MatrixDescriptor(x, kStepBytes / 2, 128);
            }
#pragma unroll
            for (int d = 0; d < kDepth; ++d) {
                ring[d].to_bf16(a[d % 2], nan, outside);
                reader.next(ring[d]);
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    wgmma(sums, a[d % 2][j], b.at(j * kStepBytes));
                wgmma_commit();
                b.advance(4 * kStepBytes);
                wgmma_wait<1>();
            }
        }
        wgmma_wait<0>();

        unsigned special[2]; // sent instead of a row's sums
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            nan[i] &= 0x80808080;
#pragma unroll
            for (int distance = 1; distance <= 2; distance *= 2) { // the lanes of a row
                nan[i] |= __shfl_xor_sync(0xffffffff, nan[i], distance);
                outside[i] |= __shfl_xor_sync(0xffffffff, outside[i], distance);
            }
            special[i] = outside[i] | x_outside[k_group] ? kMarker : nan[i] ? kNanBits : 0;
        }
        const int slot = turn % kSlots;
        if (turn == 0)
            cluster_wait();      // all workgroups of the cluster have set up their barriers
        else if (turn >= kSlots) // they have added what was in the slot
            barrier_wait_cluster(taken + 8 * slot, (turn / kSlots & 1) ^ 1);
        if (k_group == 0 && in_group == 0 && owned > 0)
            barrier_arrive_expect(arrived + 8 * slot, owned * kSources * kPairBytes);
#pragma unroll
        for (int p = 0; p < kPairs; ++p) {
            const unsigned to =
                partials + slot * kPartialBytes + (p / kSplit * kSources + source) * kPairBytes;
            const unsigned instead = special[p % 2];
            store_async(address_in_cluster(to, p % kSplit),
                        instead ? bits_to_float(instead) : sums[2 * p],
                        instead ? bits_to_float(instead) : sums[2 * p + 1],
                        address_in_cluster(arrived + 8 * slot, p % kSplit));
        }
        if (turn > 0) {
            finish(turn - 1, false);
            if ((tiles + tile_step) * kRows < N && lane < kSplit) // the slot will be filled again
                barrier_arrive_cluster(address_in_cluster(taken + 8 * (slot ^ 1), lane));
        }
    }
    finish(turn - 1, true);
    cluster_wait(); // what was sent to this workgroup, and by it, has arrived
}
