// Linear on Hopper, for some hundreds to some thousands of rows:
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
// There are two ways to share the work:
//
// - For few tiles, the kSplit CTAs of a cluster compute a tile of kRows features by kTokens tokens,
//   each over its part of K; each adds up the sums of all of them, in the order of their ranks, for
//   its share of the tile's tokens.
// - For many (MX_PAIRS) clusters are two CTAs, which compute kRows features of a tile each. Both
//   need all of the tile's x, and each brings half of it to both. Clusters stay: each computes
//   whole tiles, as many as all clusters have, and then its even share of the chunks of K of all
//   tiles that are left. Parts of a tile meet in memory: a part that is not the last to end leaves
//   its sums there, and the last one adds all up, in the order of K, whichever it is. None waits
//   for another. With MX_SPLIT clusters compute whole tiles alone, and add up so many parts of K
//   one after the other, which gives the bits of as many CTAs that share K.
//
//   warps 0 and 1: a lane each starts the copies of x and of w
//   the second warpgroup and those after it, 64 features each: w to bf16, multiply; store, where
//   the CTA has all of K, or clusters stay
//
// For few tokens (MX_OWN_X) there is no launch ahead: all warps of MX_HELPERS warpgroups but the
// one that brings w make bf16 of x, and the warpgroups that multiply may have a part of K each in
// place of features (MX_K_GROUPS). As a wgmma adds 16 k of an output at a time, whatever its tile
// is, the sums are the same bits as those of kSplit * kKGroups CTAs.
//
// For more rows than features (MX_SWAPPED) x and w change places: x is wgmma's A, and the launch
// ahead makes bf16 of w, which is the smaller of them. What is called tokens below are features
// then, and the other way round. There is no bias: the sums leave no registers for it.
//
// The launch ahead may still run when this one begins: w is asked for at once, x when that ends.
//
// Scales that bf16 does not cover are noted, and the outputs that they reach are computed again by
// fp32 arithmetic after the others are stored.
//
// To 128 tokens both may be fp16 in place of bf16 (MX_F16). Making it of w takes half of the
// instructions, which such tiles wait for, but it covers fewer scales: relative to each row's
// reference, sm90/f16_relative.h, which the row's sums are multiplied with at the end. What is said
// of scales that bf16 does not cover holds for fp16, then.

#define MX_CLUSTER (MX_PAIRS ? 2 : MX_SPLIT)

#include "common/epilogue.h"
#include "common/scale.h"
#include "common/target.h"
#include "shares_sm90.h"
#include "sm90/cluster.h"
#include "sm90/convert.h"
#include "sm90/exact.h"
#include "sm90/expand.h"
#include "sm90/f16_relative.h"
#include "sm90/memory.h"
#include "sm90/tma.h"
#include "sm90/wgmma.h"
#include "wgmma_bf16_x_sm90.h"

using namespace mx;

constexpr int kTokens = MX_TILE_M;               // a multiple of 8, at most 288
constexpr int kGroups = MX_GROUPS;               // warpgroups that multiply, side by side along w
constexpr int kKGroups = MX_K_GROUPS;            // as many of each, which share the CTA's part of K
constexpr int kSplit = MX_PAIRS ? 1 : MX_SPLIT;  // CTAs that share K
constexpr int kInTurn = MX_PAIRS ? MX_SPLIT : 1; // parts of K that a CTA adds up in their order
constexpr bool kOwnX = MX_OWN_X;     // each CTA makes bf16 of its x itself, without a launch ahead
constexpr int kHelpers = MX_HELPERS; // warpgroups that copy, and make bf16 of x if it is its own
constexpr bool kPairs = MX_PAIRS, kSwapped = MX_SWAPPED, kF16 = MX_F16;
constexpr int kXStages = MX_X_STAGES, kWStages = MX_W_STAGES;
using Out = DType<MX_OUT>;
using XWorkspace = XWorkspaceOf<kF16>;

constexpr int kPair = kPairs ? 2 : 1; // CTAs that share x
constexpr int kCluster = kPair * kSplit;
constexpr int kParts = kSplit * kKGroups; // of K
// Whether warpgroups store what they come to; else the CTA does, from shared memory.
constexpr bool kStoresSums = kParts == 1 && !kOwnX;
static_assert(!kPairs || kParts == 1);
static_assert(kKGroups == 1 || kGroups == 1);
static_assert(!kOwnX || (!kPairs && kTokens <= 32));
static_assert(!kSwapped || (kStoresSums && kTokens % 16 == 0));
static_assert(!kF16 || (!kOwnX && !kSwapped));
constexpr int kGroupThreads = 128, kWarps = 4; // of a warpgroup
constexpr int kThreads = (kHelpers + kGroups * kKGroups) * kGroupThreads;
constexpr int kGroupRows = 64, kRows = kGroups * kGroupRows;
constexpr int kBlock = 32, kUnitK = 64, kChunkK = 128;
constexpr int kOctets = kTokens / 8;
constexpr int kStepBytes = 256, kOctetBytes = 4 * kStepBytes;

constexpr int kXStageBytes = kTokens * kUnitK * 2, kXPartBytes = kXStageBytes / kPair;
constexpr int kWStageBytes = kRows * kChunkK;
constexpr int kAtW = kXStages * kXStageBytes;
constexpr int kStageBytes = kAtW + kWStages * kWStageBytes;
// Where the CTA stores sums, they take the place of the stages. With this pitch a warp's stores of
// them have no conflicts.
constexpr int kPitch = kRows + 4;
constexpr int kSumBytes = kStoresSums ? 0 : kTokens * kPitch * 4;
// The sums of the parts of K before this one.
constexpr int kKeptBytes = kInTurn > 1 ? kTokens * kRows * 4 : 0;
constexpr int kAtBarriers = (kStageBytes > kSumBytes ? kStageBytes : kSumBytes) + kKeptBytes;
constexpr int kXFull = kAtBarriers, kXEmpty = kXFull + 8 * kXStages;
constexpr int kWFull = kXEmpty + 8 * kXStages, kWEmpty = kWFull + 8 * kWStages;
// Warpgroups that share K have a ring each.
constexpr int kRingEnd = kWEmpty + 8 * kWStages;
constexpr int kRingBytes = kKGroups == 1 ? kRingEnd : (kRingEnd + 1023) / 1024 * 1024;
// Whether any scale of the CTA's is one that bf16 does not cover; then which tokens and features
// have such, for each warpgroup that stores.
constexpr int kOutsideAt = kKGroups * kRingBytes;
constexpr int kFlags = kOutsideAt + 16;
constexpr int kFlagBytes = kTokens + (kStoresSums ? kGroupRows : kRows);
constexpr int kSharedBytes = kFlags + (kStoresSums ? kGroups : 1) * kFlagBytes;
static_assert(kFlags % 8 == 0 && kFlagBytes % 8 == 0);
static_assert(kSharedBytes <= MX_SHARED_BYTES, "the host lays shared memory out differently: "
                                               "aiter_mx/kernels/linear/wgmma_bf16_sm90.py");
// Registers of a thread that copies and of one that multiplies, once it is known which it is, and
// of both before.
constexpr bool kMany = kTokens > 256; // tokens: then pairs have few registers to spare
constexpr int kHelperRegisters = kPairs && kMany ? 24 : kPairs ? 40 : 56;
constexpr int kConsumerRegisters = kGroups == 3     ? 152
                                   : kTokens <= 128 ? (kF16 && kPairs ? 232 : 184)
                                   : !kPairs        ? 224
                                   : kMany          ? 240
                                                    : 232;
constexpr bool kSetsRegisters = kGroups > 1;
// CTAs that an SM has room for.
constexpr int kOfSm = kTokens > 64 || MX_SHARED_BYTES > 113 << 10 ? 1
                      : kOwnX && MX_SHARED_BYTES <= 75 << 10      ? 3
                                                                  : 2;
constexpr int kLaunchRegisters =
    kOwnX || kOfSm > 1 ? 65536 / (kThreads * kOfSm) / 8 * 8
    : kGroups == 1
        ? (kF16 ? 248 : 240)
        : ((kGroups * kConsumerRegisters + kHelperRegisters) / (kGroups + 1) + 7) / 8 * 8;
// What a warp computes again at a time, as registers allow: outputs, and parts of their K; and rows
// whose scales it looks at.
constexpr int kMendRegisters =
    kStoresSums && kSetsRegisters ? kConsumerRegisters : kLaunchRegisters;
constexpr int kMended = kOwnX ? 2 : kMendRegisters >= 224 && !kF16 ? 6 : 4, kMendedAtOnce = 2;
constexpr int kSeenAtOnce = kOwnX || kF16 ? 8 : 16;
constexpr unsigned kOutside = 0x10000; // added to the count of ended parts
constexpr int kConsumersBarrier = 1 + kGroups;

// What a CTA computes.
struct Schedule : Shares {
    int rank;  // among those that share K
    int tiles; // of clusters that add up parts of K in turn

    MX_MEMBER int longest_part() const { return (chunks + kParts - 1) / kParts; }
    // k_group: which of the warpgroups that share the CTA's part of K.
    MX_MEMBER bool segment(int i, Segment& s, int k_group = 0) const {
        if constexpr (!kPairs) {
            const long part = rank * kKGroups + k_group;
            const int first = chunks * part / kParts;
            s = {cluster, first, static_cast<int>(chunks * (part + 1) / kParts) - first};
            return i == 0;
        }
        if constexpr (kInTurn > 1) {
            const int tile = i / kInTurn * clusters + cluster;
            if (tile >= tiles)
                return false;
            const long in_turn = i % kInTurn;
            const int first = chunks * in_turn / kInTurn;
            s = {tile, first, static_cast<int>(chunks * (in_turn + 1) / kInTurn) - first};
            return true;
        }
        return shared_segment(i, s);
    }
};

struct Operands {
    const unsigned char *xq, *xs, *wq, *ws;
    const void* bias;
    Out* y;
    long M, N, K;
    int bias_kind;
    XWorkspace x;
    Schedule schedule;
    int member; // of a pair

    MX_MEMBER long blocks() const { return K / kBlock; }
    MX_MEMBER int units(const Segment& s) const {
        return min(2 * s.chunks, static_cast<int>((K + kUnitK - 1) / kUnitK) - 2 * s.first_chunk);
    }
    MX_MEMBER int token_tile(const Segment& s) const {
        return s.tile % static_cast<int>(x.tiles());
    }
    MX_MEMBER long row(const Segment& s) const {
        return (s.tile / static_cast<int>(x.tiles()) * kPair + member) * static_cast<long>(kRows);
    }
};

// Start the copies of all segments, a warp each, so that neither waits for room of the other's.
MX_DEVICE void bring_w(const Operands& t, const TensorMap& weights, unsigned shared) {
    PipelineState<kWStages> w;
    Segment s;
    const auto bring = [&](unsigned ring, int chunk) {
        const unsigned full = ring + kWFull + 8 * w.at;
        barrier_wait(ring + kWEmpty + 8 * w.at, w.parity ^ 1);
        barrier_arrive_expect(full, kWStageBytes);
        tma_load(ring + kAtW + w.at * kWStageBytes, weights, chunk * kChunkK, t.row(s), full);
    };
    if constexpr (kKGroups > 1) {
        for (int i = 0; i < t.schedule.longest_part(); ++i, w.next())
            for (int group = 0; group < kKGroups; ++group) {
                t.schedule.segment(0, s, group);
                if (i < s.chunks)
                    bring(shared + group * kRingBytes, s.first_chunk + i);
            }
    } else {
        for (int i = 0; t.schedule.segment(i, s); ++i)
            for (int chunk = s.first_chunk; chunk < s.first_chunk + s.chunks; ++chunk, w.next())
                bring(shared, chunk);
    }
}
MX_DEVICE void bring_x(const Operands& t, unsigned shared) {
    PipelineState<kXStages> stage;
    Segment s;
    for (int i = 0; t.schedule.segment(i, s); ++i) {
        const int part = t.member * kXPartBytes, units = t.units(s);
        const unsigned char* from = t.x.unit(t.token_tile(s), 2 * s.first_chunk) + part;
        for (int unit = 0; unit < units; ++unit, from += kXStageBytes, stage.next()) {
            const unsigned full = shared + kXFull + 8 * stage.at;
            barrier_wait(shared + kXEmpty + 8 * stage.at, stage.parity ^ 1);
            barrier_arrive_expect(full, kXStageBytes);
            if constexpr (kPairs)
                copy_to_cluster(shared + stage.at * kXStageBytes + part, from, kXPartBytes, full,
                                (1 << kPair) - 1);
            else
                copy_bulk(shared + stage.at * kXStageBytes, from, kXStageBytes, full);
        }
    }
}

// Makes bf16 of x, as the launch ahead does where there is one. A warp has every kWorkers-th unit
// of 64 k, a lane 16 k of every eighth token of it. A fence waits for all that the warp has asked
// for: so it loads some units at a time, and makes them known by one fence.
struct Expander {
    static constexpr int kWorkers = kHelpers * 4 - 1; // warps
    // Units at a time, fewer than there are stages: else it would wait for what it has yet to give.
    static constexpr int kRoom = ((kXStages - 1) * kKGroups - 1) / kWorkers + 1;
    static constexpr int kWanted = 4;
    static constexpr int kAtOnce = kRoom < kWanted ? kRoom : kWanted;
    const Operands& t;
    const unsigned shared;
    const int worker, lane;
    bool outside = false; // whether bf16 does not cover a scale

    struct Unit {
        unsigned ring; // of the warpgroup that multiplies by it
        int stage, parity;
        long token, k; // of the lane's first
        bool exists;
    };
    // Warpgroups that share K have their units in turn.
    MX_MEMBER Unit unit(int i) const {
        Segment s;
        const int group = i % kKGroups, of_part = i / kKGroups;
        t.schedule.segment(0, s, group);
        return {shared + group * kRingBytes,
                of_part % kXStages,
                of_part / kXStages % 2,
                t.token_tile(s) * static_cast<long>(kTokens) + lane % 8,
                (2 * s.first_chunk + of_part) * static_cast<long>(kUnitK) + lane / 8 * 16,
                of_part < t.units(s)};
    }
    MX_MEMBER void load_unit(const Unit& of, u32x4 (&words)[kOctets],
                             unsigned (&scales)[kOctets]) const {
#pragma unroll
        for (int j = 0; j < kOctets; ++j) {
            words[j] = u32x4{};
            scales[j] = 127;
            const long row = of.token + j * 8;
            if (of.exists && of.k < t.K && row < t.M) {
                words[j] = load(t.xq + row * t.K + of.k);
                scales[j] = load_byte(t.xs + row * t.blocks() + of.k / kBlock);
            }
        }
    }
    MX_MEMBER void put(const Unit& of, const u32x4 (&words)[kOctets],
                       const unsigned (&scales)[kOctets]) {
        barrier_wait(of.ring + kXEmpty + 8 * of.stage, of.parity ^ 1);
        const unsigned to =
            of.ring + of.stage * kXStageBytes + lane / 8 * kStepBytes + lane % 8 * 16;
#pragma unroll
        for (int j = 0; j < kOctets; ++j) {
            const bool is_nan = scales[j] == kNanScale, over = scales[j] > kLastXScale && !is_nan;
            outside |= over;
            const float factor = bits_to_float(is_nan ? kNanBits
                                               : over ? 0
                                                      : (scales[j] + 60) << 23);
            unsigned even[4], odd[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                e4m3x4_to_bf16(words[j][i], factor, even[i], odd[i]);
            store_shared_16(to + j * kOctetBytes, even);
            store_shared_16(to + j * kOctetBytes + kStepBytes / 2, odd);
        }
    }
    MX_MEMBER void run() {
        const int all = 2 * t.schedule.longest_part() * kKGroups;
#pragma unroll 1
        for (int first = worker; first < all; first += kAtOnce * kWorkers) {
            u32x4 words[kAtOnce][kOctets];
            unsigned scales[kAtOnce][kOctets];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                load_unit(unit(first + i * kWorkers), words[i], scales[i]);
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                if (const Unit of = unit(first + i * kWorkers); of.exists)
                    put(of, words[i], scales[i]);
            fence_async();
            __syncwarp();
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                if (const Unit of = unit(first + i * kWorkers); of.exists && lane == 0)
                    barrier_arrive(of.ring + kXFull + 8 * of.stage);
        }
        if (__any_sync(0xffffffff, outside) && lane == 0)
            announce_shared(shared + kOutsideAt, 1);
    }
};

MX_DEVICE void store_shared_byte(unsigned address, bool value) {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(unsigned(value)) : "memory");
}
MX_DEVICE bool load_shared_byte(unsigned address) {
    unsigned v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

constexpr int kSampledOfW = 16;
// The reference of a row of w.
MX_DEVICE unsigned reference_of(const unsigned char* scales, long blocks) {
    unsigned reference = 0;
#pragma unroll
    for (int i = 0; i < kSampledOfW; ++i)
        reference =
            max(reference, sample_of(load_byte(scales + sampled_block<kSampledOfW>(i, blocks))));
    return reference_from(reference);
}

// Notes for each of some rows whether it has a scale that bf16 does not cover, or fp16; small ones
// count where they have values. A warp takes some rows at a time, a lane every 32nd scale of them.
// references: of x, where fp16.
template <bool OfX>
MX_DEVICE void note_outside(unsigned flags, const unsigned char* payload,
                            const unsigned char* scales, const unsigned* references, int rows,
                            long blocks, int warp, int warps, int lane) {
    constexpr int at_once = kSeenAtOnce;
#pragma unroll 1
    for (int first = warp * at_once; first < rows; first += warps * at_once) {
        unsigned outside = 0, reference[at_once] = {};
        if constexpr (kF16) {
            const int row = min(first + lane % at_once, rows - 1);
            const unsigned own =
                OfX ? load_relaxed(references + row) : reference_of(scales + row * blocks, blocks);
#pragma unroll
            for (int i = 0; i < at_once; ++i)
                reference[i] = __shfl_sync(0xffffffff, own, i);
        }
#pragma unroll 1
        for (long b = lane; b < blocks; b += kLanes) {
            unsigned scale[at_once];
#pragma unroll
            for (int i = 0; i < at_once; ++i)
                scale[i] = load_byte(scales + min(first + i, rows - 1) * blocks + b);
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                const bool is_nan = scale[i] == kNanScale;
                bool counts = scale[i] > (OfX ? kLastXScale : kLastWScale) && !is_nan;
                bool if_any = !OfX && scale[i] < kFirstWScale;
                if constexpr (kF16) {
                    counts = false;
                    if_any = !is_nan &&
                             !is_covered(scale[i], reference[i], OfX ? kOfLargest : kOfSampled);
                }
                if (if_any) {
                    const unsigned char* const of =
                        payload + (min(first + i, rows - 1) * blocks + b) * kBlock;
                    counts = has_values(load(of)) || has_values(load(of + kBlock / 2));
                }
                outside |= (counts ? 1u : 0u) << i;
            }
        }
        outside = __reduce_or_sync(0xffffffff, outside);
        if (lane < min(at_once, rows - first))
            store_shared_byte(flags + first + lane, outside >> lane & 1);
    }
}

// A part of the result, and the threads that store it.
struct Block {
    long token, row;
    int tokens, rows;
    int thread, warps;
    unsigned flags; // in shared memory, of all tokens and rows
};

// Computes again the outputs of a block that scales reach which bf16 does not cover, once all of
// its threads are here: sync waits for them. of_x: whether such a scale may be x's. A warp takes
// some rows at a time.
template <class Sync>
MX_DEVICE void mend(const Operands& t, const Block& block, bool of_x, Sync sync) {
    constexpr int count = kMended;
    const int thread = afresh(block.thread), lane = thread % kLanes, warp = thread / kLanes;
    const int tokens = block.tokens, rows = block.rows;
    const auto of_x_row = [&](int token) {
        const long m = block.token + min(token, tokens - 1);
        return ScaledRow{t.xq + m * t.K, t.xs + m * t.blocks()};
    };
    const auto of_w_row = [&](int row) {
        const long n = block.row + min(row, rows - 1);
        return ScaledRow{t.wq + n * t.K, t.ws + n * t.blocks()};
    };
    const unsigned of_tokens = afresh(block.flags), of_rows = of_tokens + kTokens;
    ScaledRow some[count];
    const auto take = [&](int first, const auto& row) {
#pragma unroll
        for (int i = 0; i < count; ++i)
            some[i] = row(first + i);
    };
    const ScaledRow x = of_x_row(0), w = of_w_row(0);
    note_outside<true>(of_tokens, x.payload, x.scales, t.x.references() + block.token,
                       of_x ? tokens : 0, t.blocks(), warp, block.warps, lane);
    note_outside<false>(of_rows, w.payload, w.scales, nullptr, rows, t.blocks(), warp, block.warps,
                        lane);
    sync(); // these are there, and all sums have been stored
    // Most eights have none. Those past the end are never set but by chance.
    const auto each_noted = [&](unsigned flags, int all, const auto& f) {
#pragma unroll 1
        for (int i = 0; i < all; ++i) {
            if (i % 8 == 0)
                if (const uint2 eight = load_shared_8(flags + i); (eight.x | eight.y) == 0) {
                    i += 7;
                    continue;
                }
            if (load_shared_byte(flags + i))
                f(i);
        }
    };
    const auto keep = [&](int token, int row, float sum) {
        const long m = block.token + token, n = block.row + row;
        store(t.y + (kSwapped ? n * t.M + m : m * t.N + n),
              kSwapped ? sum : sum + load_bias(t.bias, t.bias_kind, n));
    };
    float sums[count];
    each_noted(of_rows, rows, [&](int row) {
#pragma unroll 1
        for (int first = warp * count; first < tokens; first += block.warps * count) {
            take(first, of_x_row);
            exact_outputs_of_warp<kMendedAtOnce>(sums, of_w_row(row), some, t.K, lane);
            if (lane < min(count, tokens - first))
                keep(first + lane, row, one_of(sums, lane));
        }
    });
    each_noted(of_tokens, of_x ? tokens : 0, [&](int token) {
#pragma unroll 1
        for (int first = warp * count; first < rows; first += block.warps * count) {
            take(first, of_w_row);
            exact_outputs_of_warp<kMendedAtOnce>(sums, of_x_row(token), some, t.K, lane);
            if (lane < min(count, rows - first) && !load_shared_byte(of_rows + first + lane))
                keep(token, first + lane, one_of(sums, lane));
        }
    });
    sync(); // the flags have been read
}

// Stores what 64 features by the tokens of a tile come to.
struct Results {
    const Operands& t;
    const Block& block;

    MX_MEMBER void store_sums(const float (&sums)[kTokens / 2]) const {
        if constexpr (kSwapped)
            store_rows(sums);
        else if constexpr (sizeof(Out) == 4)
            store_fp32(sums);
        else
            store_16<Out>(sums);
    }

  private:
    // Nothing changes by adding -0.
    MX_MEMBER float added(long n) const {
        return t.bias_kind == kNone ? -0.0f : load_bias(t.bias, t.bias_kind, min(n, t.N - 1));
    }
    template <class T>
    MX_MEMBER void store_16(const float (&sums)[kTokens / 2]) const {
        if (t.N % 4 == 0 && reinterpret_cast<unsigned long long>(t.y) % (4 * sizeof(T)) == 0)
            store_fours<T, true>(sums);
        else
            store_fours<T, false>(sums);
    }
    // A warp stores the 16 features of 8 tokens at a time, 32 bytes of each; whole: a lane's four
    // at once.
    template <class T, bool Whole>
    MX_MEMBER void store_fours(const float (&sums)[kTokens / 2]) const {
        const int lane = block.thread % kLanes, odd = lane % 2;
        const long first = block.row + block.thread / kLanes * 16;
        const float plus[2] = {added(first + lane / 4), added(first + lane / 4 + 8)};
        const long n = first + odd * 8 + lane % 4 / 2 * 4; // of this lane's four
        const int left = n < t.N ? block.tokens - lane / 4 : 0;
        Out* to = t.y + (block.token + lane / 4) * t.N + n;
#pragma unroll
        for (int j = 0; j < kOctets; ++j, to += 8 * t.N) {
            const unsigned low =
                transpose(pack<T>(sums[4 * j] + plus[0], sums[4 * j + 1] + plus[0]));
            const unsigned high =
                transpose(pack<T>(sums[4 * j + 2] + plus[1], sums[4 * j + 3] + plus[1]));
            const unsigned got = __shfl_xor_sync(0xffffffff, odd ? low : high, 1);
            const unsigned four[2] = {odd ? got : low, odd ? high : got};
            if constexpr (Whole) {
                if (j * 8 < left)
                    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(four[0]),
                                 "r"(four[1])
                                 : "memory");
            } else if (j * 8 < left) {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (n + i < t.N)
                        reinterpret_cast<unsigned short*>(to)[i] = four[i / 2] >> i % 2 * 16;
            }
        }
    }
    MX_MEMBER void store_fp32(const float (&sums)[kTokens / 2]) const {
        const int lane = block.thread % kLanes, left = block.tokens - lane % 4 * 2;
        const long n = block.row + block.thread / kLanes * 16 + lane / 4;
        const float plus[2] = {added(n), added(n + 8)};
        Out* to = t.y + (block.token + lane % 4 * 2) * t.N + n;
#pragma unroll
        for (int j = 0; j < kOctets; ++j, to += 8 * t.N)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (j * 8 + i % 2 < left && n + i / 2 * 8 < t.N)
                    store(to + i % 2 * t.N + i / 2 * 8, sums[4 * j + i] + plus[i / 2]);
    }
    // Swapped: a thread has two neighbouring columns of y in each of two rows, for each octet.
    MX_MEMBER void store_rows(const float (&sums)[kTokens / 2]) const {
        const int lane = block.thread % kLanes;
        const int row = block.thread / kLanes * 16 + lane / 4;
        if (t.M % 8 == 0 && reinterpret_cast<unsigned long long>(t.y) % 16 == 0)
            store_rows_whole<Out>(sums, row, lane % 4);
        else
            store_rows_singly(sums, row, lane % 4);
    }
    MX_MEMBER void store_rows_singly(const float (&sums)[kTokens / 2], int row, int quarter) const {
#pragma unroll
        for (int j = 0; j < kOctets; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int column = j * 8 + quarter * 2 + i % 2, of_row = row + i / 2 * 8;
                if (column < block.tokens && of_row < block.rows)
                    store(t.y + (block.row + of_row) * t.M + block.token + column, sums[4 * j + i]);
            }
    }
    // Four lanes have the same rows: of 16-bit results each stores 16 bytes of one of these, of one
    // octet out of two.
    template <class T>
    MX_MEMBER void store_rows_whole(const float (&sums)[kTokens / 2], int row, int quarter) const {
        if constexpr (sizeof(T) == 4) {
#pragma unroll
            for (int j = 0; j < kOctets; ++j)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    if (j * 8 < block.tokens && row + i * 8 < block.rows)
                        asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(
                                         t.y + (block.row + row + i * 8) * t.M + block.token +
                                         j * 8 + quarter * 2),
                                     "f"(sums[4 * j + 2 * i]), "f"(sums[4 * j + 2 * i + 1])
                                     : "memory");
        } else {
            const int own_row = row + quarter / 2 * 8, own_octet = quarter % 2;
            Out* const to = t.y + (block.row + own_row) * t.M + block.token + own_octet * 8;
            const int left = own_row < block.rows ? block.tokens - own_octet * 8 : 0;
#pragma unroll
            for (int j = 0; j < kOctets; j += 2) {
                // words[i]: of row i / 2 and octet i % 2
                unsigned words[4] = {pack<T>(sums[4 * j], sums[4 * j + 1]),
                                     pack<T>(sums[4 * j + 4], sums[4 * j + 5]),
                                     pack<T>(sums[4 * j + 2], sums[4 * j + 3]),
                                     pack<T>(sums[4 * j + 6], sums[4 * j + 7])};
                exchange<1>(words[0], words[1], quarter % 2);
                exchange<1>(words[2], words[3], quarter % 2);
                exchange<2>(words[0], words[2], quarter / 2);
                exchange<2>(words[1], words[3], quarter / 2);
                if (j * 8 < left)
                    store_vector(to + j * 8, {words[0], words[1], words[2], words[3]});
            }
        }
    }
    // Lanes that differ in the bit Distance: the lower one gets both `low`, the upper one both
    // `high`, its own in its own place.
    template <int Distance>
    MX_MEMBER static void exchange(unsigned& low, unsigned& high, bool is_upper) {
        const unsigned got = __shfl_xor_sync(0xffffffff, is_upper ? low : high, Distance);
        (is_upper ? low : high) = got;
    }
    // Lane 4g + t of a matrix of 8 x 8 gives columns 2t and 2t + 1 of row g, and gets those rows of
    // column g.
    MX_MEMBER static unsigned transpose(unsigned v) {
        unsigned transposed;
        asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(v));
        return transposed;
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
struct Adder {
    const Operands& t;
    const unsigned shared;
    const Block& block; // this CTA's share of the tokens
    const int first;    // of them, in the tile

    MX_MEMBER void store_sums() const {
        constexpr int quads = kRows / 4;
        const bool whole =
            t.N % 4 == 0 && reinterpret_cast<unsigned long long>(t.y) % (4 * sizeof(Out)) == 0;
        unsigned parts[kParts];
#pragma unroll
        for (int s = 0; s < kParts; ++s) {
            const unsigned own = shared + s % kKGroups * kRingBytes;
            parts[s] = kSplit == 1 ? own : address_in_cluster(own, s / kKGroups);
        }
        const int items = block.tokens * quads;
        constexpr bool one_quad = kThreads % quads == 0; // whether all items of a thread have it
        float plus[4];
        if constexpr (one_quad)
            load_plus(plus, threadIdx.x % quads);
#pragma unroll 2
        for (int item = threadIdx.x; item < items; item += kThreads) {
            const int token = item / quads, quad = item % quads;
            float4 of[kParts];
#pragma unroll
            for (int s = 0; s < kParts; ++s)
                of[s] = load_cluster_16(parts[s] + ((first + token) * kPitch + quad * 4) * 4);
            float sums[4] = {of[0].x, of[0].y, of[0].z, of[0].w};
#pragma unroll
            for (int s = 1; s < kParts; ++s) {
                sums[0] += of[s].x;
                sums[1] += of[s].y;
                sums[2] += of[s].z;
                sums[3] += of[s].w;
            }
            const long row = block.row + quad * 4;
            Out* const to = t.y + (block.token + token) * t.N + row;
            if constexpr (!one_quad)
                load_plus(plus, quad);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                sums[i] += plus[i];
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

  private:
    // Of four features. Nothing changes by adding -0.
    MX_MEMBER void load_plus(float (&plus)[4], int quad) const {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            plus[i] = t.bias_kind == kNone
                          ? -0.0f
                          : load_bias(t.bias, t.bias_kind, min(block.row + quad * 4 + i, t.N - 1));
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
};

// Of a tile's tokens, a lane has that of token `lane` and of every 32nd after it.
struct TokenReferences {
    unsigned words[(kTokens + kLanes - 1) / kLanes];
};

// Multiplies 64 rows of w by the tokens of a tile.
struct Consumer {
    const Operands& t;
    const unsigned shared, outside_at; // its ring; where it notes scales that bf16 does not cover
    const int group, k_group, warp, lane; // warp: of the group
    PipelineState<kXStages> x;            // where x of the next unit to multiply is
    PipelineState<kWStages> w;            // where w of the next unit to expand is
    int used;                             // stage of the unit before, none at first
    // Scales of the next chunk: of row lane / 4 of the warp's 16, or of that + 8 for odd lanes; the
    // first two of them, or the others for lanes 2 and 3 of four. Then those of this chunk, as
    // factors.
    unsigned scales, factors;
    // Where fp16: the reference of the row whose scales this lane loads, and factors for them.
    unsigned reference;
    F16Factors f16_factors{0, kOfSampled};
    TokenReferences token_references;
    const unsigned char* scales_at;
    int scales_left;  // for this lane, from there
    const bool pairs; // whether two scales are one load
    unsigned least, most, nan[2];
    unsigned x_outside;          // of this thread's units
    bool outside_so_far = false; // of w, in parts of K before this one
    unsigned ended_before; // parts of the tile, when this one was almost multiplied: of thread 0
    const unsigned magnitude = kF16 ? 0 : held(kMagnitude);
    const unsigned w_place;          // of what this lane loads of w, in the first stage
    const unsigned x_empty;          // of the first stage, in this lane's CTA of the cluster
    unsigned words[2][4], factor[2]; // of the unit to expand: [row]

    MX_MEMBER Consumer(const Operands& t, unsigned all, int group, int k_group, int warp, int lane)
        : t(t), shared(all + k_group * kRingBytes), outside_at(all + kOutsideAt), group(group),
          k_group(k_group), warp(warp), lane(lane),
          pairs(t.blocks() % 2 == 0 && reinterpret_cast<unsigned long long>(t.ws) % 2 == 0),
          w_place(held(shared + kAtW + (group * kGroupRows + warp * 16 + lane % 8) * kChunkK +
                       (lane / 8 ^ lane % 8) * 16)),
          x_empty(held(kPairs ? address_in_cluster(shared + kXEmpty, lane % kPair)
                              : shared + kXEmpty)) {}

    MX_MEMBER int thread() const { return warp * kLanes + lane; }
    // Those of the row of which this lane loads some.
    MX_MEMBER const unsigned char* scales_of_row(const Segment& s) const {
        const long row = t.row(s) + group * kGroupRows + warp * 16 + lane / 4 + lane % 2 * 8;
        return t.ws + min(row, t.N - 1) * t.blocks();
    }
    MX_MEMBER void open(const Segment& s) {
        used = -1;
        factors = 0;
        least = most = 127 * 0x00010001;
        nan[0] = nan[1] = 0;
        const unsigned char* const of_row = scales_of_row(s);
        const long block = s.first_chunk * static_cast<long>(kChunkK / kBlock) + lane / 2 % 2 * 2;
        scales_at = of_row + block;
        scales_left = t.blocks() - block;
        scales = 127 * 0x0101;
        if (kF16 && scales_left < 2) // any of the row's
            scales = load_byte(of_row) * 0x0101;
        load_scales();
    }
    MX_MEMBER TokenReferences load_token_references(const Segment& s) const {
        TokenReferences found;
        const unsigned* const of_tile =
            t.x.references() + t.token_tile(s) * static_cast<long>(kTokens);
#pragma unroll
        for (int i = 0; i * kLanes < kTokens; ++i)
            found.words[i] = load_relaxed(of_tile + min(i * kLanes + lane, kTokens - 1));
        return found;
    }
    // Two lanes have half of the samples each of a row.
    MX_MEMBER void find_reference(const Segment& s) {
        constexpr int own = kSampledOfW / 2;
        const unsigned char* const of_row = scales_of_row(s);
        unsigned samples[own];
#pragma unroll
        for (int i = 0; i < own; ++i)
            samples[i] =
                load_byte(of_row + sampled_block<kSampledOfW>(lane / 2 % 2 * own + i, t.blocks()));
        reference = 0;
#pragma unroll
        for (int i = 0; i < own; ++i)
            reference = max(reference, sample_of(samples[i]));
        reference = reference_from(max(reference, __shfl_xor_sync(0xffffffff, reference, 2)));
        f16_factors = F16Factors(reference, kOfSampled);
        least = most = reference * 0x00010001;
    }
    // Whether bf16 does not cover a scale of the tile's x: of all K, whatever the segment is.
    MX_MEMBER void look_at_x(const Segment& s) {
        const long of_tile = t.x.outside_of_tile();
        const unsigned* const flags = t.x.outside() + t.token_tile(s) * of_tile;
        for (int i = thread(); i < of_tile; i += kGroupThreads)
            x_outside |= load_relaxed(flags + i);
    }

    MX_MEMBER void load_scales() {
        const unsigned missing = kF16 ? scales : 127 * 0x0101; // fp16 covers any one of the row's
        if (pairs) {
            scales = scales_left > 0 ? load_two(scales_at) : missing;
        } else {
            const unsigned first = scales_left > 0 ? load_byte(scales_at) : missing & 0xff;
            scales = first | (scales_left > 1 ? load_byte(scales_at + 1) << 8 : missing & 0xff00);
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
            factors = kF16 ? f16_factors(halves) : w_factors(halves);
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
            if constexpr (kF16) {
                e4m3x4_to_f16<J / 2>(words[i][J], factor[i], a[J][i], a[J][2 + i]);
            } else {
                e4m3x4_to_bf16<J / 2>(words[i][J], factor[i], magnitude, a[J][i], a[J][2 + i]);
                nan[i] |= (words[i][J] + 0x01010101) ^ words[i][J];
            }
        }
    }
    MX_MEMBER void release_x(int stage) const {
        if constexpr (kPairs) {
            if (lane < kPair)
                barrier_arrive_read(x_empty + 8 * stage);
        } else if (lane == 0) {
            barrier_arrive(x_empty + 8 * stage);
        }
    }
    MX_MEMBER void release_w(int stage) const {
        if (lane == 0)
            barrier_arrive(shared + kWEmpty + 8 * stage);
    }

    // A tile of more tokens than a wgmma takes is multiplied in two parts.
    static constexpr int kFirstTokens = kTokens > 256 ? (kTokens / 2 + 7) / 8 * 8 : kTokens;
    static constexpr int kSecondAt = kFirstTokens / 8 * kOctetBytes;
    template <int Sums>
    MX_MEMBER static void wgmma_tokens(float (&sums)[Sums], const unsigned (&a)[4],
                                       unsigned long long b, unsigned long long second) {
        constexpr int first = kFirstTokens / 2, others = Sums - first;
        if constexpr (kF16) {
            static_assert(others == 0);
            wgmma_f16(sums, a, b);
        } else if constexpr (others == 0) {
            wgmma(sums, a, b);
        } else {
            wgmma(reinterpret_cast<float (&)[first]>(sums), a, b);
            wgmma(reinterpret_cast<float (&)[others]>(sums[first]), a, second);
        }
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
        wgmma_tokens(sums, a[Buffer][0], b.at(0), b.at(kSecondAt));
        wgmma_tokens(sums, a[Buffer][1], b.at(kStepBytes), b.at(kSecondAt + kStepBytes));
        wgmma_commit();
        if constexpr (!Last)
            fetch<Buffer == 0>();
        wgmma_wait<1>();
        if (Buffer == 1 || used >= 0)
            release_x(used);
        used = stage;
        if constexpr (!Last) {
            expand<0>(a[1 - Buffer]);
            expand<1>(a[1 - Buffer]);
        }
        wgmma_fence();
        wgmma_tokens(sums, a[Buffer][2], b.at(2 * kStepBytes), b.at(kSecondAt + 2 * kStepBytes));
        wgmma_tokens(sums, a[Buffer][3], b.at(3 * kStepBytes), b.at(kSecondAt + 3 * kStepBytes));
        wgmma_commit();
        if constexpr (!Last) {
            expand<2>(a[1 - Buffer]);
            expand<3>(a[1 - Buffer]);
            if constexpr (Buffer == 0) {
                release_w(w.at);
                w.next();
            }
        }
    }

    MX_MEMBER void add(float (&sums)[kTokens / 2], const Segment& s, bool is_first) {
        unsigned a[2][4][4];
        const int units = t.units(s);
        if constexpr (kF16)
            find_reference(s);
        fetch<false>();
        expand<0>(a[0]);
        expand<1>(a[0]);
        expand<2>(a[0]);
        expand<3>(a[0]);
        if (kPairs && is_first)
            cluster_wait(); // the other CTA's barriers are there
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
            release_w(w.at);
            w.next();
        }
        wait_for_grid_ahead();
        x_outside = 0;
        if constexpr (!kOwnX)
            look_at_x(s);
        if constexpr (kF16 && !kPairs)
            token_references = load_token_references(s);
        if (kPairs && kInTurn == 1 && s.chunks < t.schedule.chunks && thread() == 0)
            ended_before = load_acquire(ended_at(s));
        wgmma_wait<0>();
        keep_in_order(sums);
        release_x(used);
    }

    // Of the thread's sums: four after another.
    MX_MEMBER unsigned kept_at(int octet) const {
        return shared + kStageBytes + ((octet * kGroups + group) * kGroupThreads + thread()) * 16;
    }
    // Adds the sums of the parts of K before this one. Without a part after it these are all.
    MX_MEMBER bool add_kept(float (&sums)[kTokens / 2], int in_turn) const {
#pragma unroll
        for (int j = 0; j < kOctets; ++j) {
            if (in_turn > 0)
                add_four(&sums[4 * j], load_cluster_16(kept_at(j)));
            if (in_turn < kInTurn - 1) {
                const unsigned four[4] = {
                    float_to_bits(sums[4 * j]), float_to_bits(sums[4 * j + 1]),
                    float_to_bits(sums[4 * j + 2]), float_to_bits(sums[4 * j + 3])};
                store_shared_16(kept_at(j), four);
            }
        }
        return in_turn == kInTurn - 1;
    }

    // Computes segment i, and loads what the next one needs first.
    MX_MEMBER void segment(const Segment& s, const Segment& next, int i) {
        float sums[kTokens / 2];
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i)
            sums[i] = 0;
        add(sums, s, i == 0);
        const unsigned highest = max(most & 0xffff, most >> 16);
        const unsigned lowest = min(least & 0xffff, least >> 16);
        const bool nan_scale = highest == kNanScale;
        const bool w_outside = kF16
                                   ? !is_covered(lowest, reference, kOfSampled) ||
                                         (!is_covered(highest, reference, kOfSampled) && !nan_scale)
                                   : lowest < kFirstWScale || (highest > kLastWScale && !nan_scale);
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (any_of_row((nan[i] & 0x80808080) || (lane % 2 == i && nan_scale), lane)) {
                asm volatile(""); // a branch: selects would be run by all
#pragma unroll
                for (int j = 0; j < kOctets; ++j)
                    sums[4 * j + 2 * i] = sums[4 * j + 2 * i + 1] = bits_to_float(kNanBits);
            }
        if constexpr (kPairs)
            open(next);
        if constexpr (kInTurn > 1) {
            outside_so_far = i % kInTurn > 0 && outside_so_far || w_outside;
            if (add_kept(sums, i % kInTurn))
                finish(sums, s, outside_so_far);
        } else if constexpr (kStoresSums) {
            finish(sums, s, w_outside);
        } else {
            if constexpr (kF16)
                apply_references(sums, token_references);
            share(sums, w_outside || x_outside);
        }
    }

    // Multiplies sums with what both rows' references stand for.
    MX_MEMBER void apply_references(float (&sums)[kTokens / 2],
                                    const TokenReferences& of_tokens) const {
        float of_rows[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
            of_rows[i] = reference_value(__shfl_sync(0xffffffff, reference, i, 4), kOfSampled);
#pragma unroll
        for (int j = 0; j < kOctets; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int token = j * 8 + lane % 4 * 2 + i;
                const float of_token = reference_value(
                    __shfl_sync(0xffffffff, of_tokens.words[j * 8 / kLanes], token % kLanes),
                    kOfLargest);
                sums[4 * j + i] *= of_token * of_rows[0];
                sums[4 * j + 2 + i] *= of_token * of_rows[1];
            }
    }

    // Leaves the sums where all CTAs of the cluster find them.
    MX_MEMBER void share(const float (&sums)[kTokens / 2], bool outside) const {
        if (outside)
            announce_shared(outside_at, 1);
        // All have multiplied: their stages become the place of the sums.
        named_barrier(kConsumersBarrier + k_group, kGroups * kGroupThreads);
        const unsigned place =
            shared + (lane % 4 * 2 * kPitch + group * kGroupRows + warp * 16 + lane / 4) * 4;
#pragma unroll
        for (int j = 0; j < kOctets; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                store_shared_4(place + ((j * 8 + i % 2) * kPitch + i / 2 * 8) * 4,
                               float_to_bits(sums[j * 4 + i]));
    }

    MX_MEMBER void finish(float (&sums)[kTokens / 2], const Segment& s, bool w_outside) const {
        bool outside = named_barrier_or(1 + group, kGroupThreads, w_outside || x_outside);
        if constexpr (kPairs && kInTurn == 1)
            if (s.chunks < t.schedule.chunks && !join(sums, s, outside))
                return;
        const long token = t.token_tile(s) * static_cast<long>(kTokens);
        const long row = t.row(s) + group * kGroupRows;
        const Block block{token,
                          row,
                          static_cast<int>(min(t.M - token, static_cast<long>(kTokens))),
                          static_cast<int>(max(min(t.N - row, static_cast<long>(kGroupRows)), 0l)),
                          thread(),
                          kWarps,
                          shared + kFlags + group * kFlagBytes};
        if constexpr (kF16) // of pairs not loaded before, as joining takes all registers
            apply_references(sums, kPairs ? load_token_references(s) : token_references);
        Results{t, block}.store_sums(sums);
        if (__builtin_expect(outside, false))
            mend(t, block, named_barrier_or(1 + group, kGroupThreads, x_outside),
                 [&] { named_barrier(1 + group, kGroupThreads); });
    }

    // Where a part of a tile leaves its sums, 16 bytes a thread after another.
    MX_MEMBER unsigned char* place(int cluster, int tile_begin) const {
        return t.x.sums() +
               ((t.schedule.place(cluster, tile_begin) * kPair + t.member) * kGroups + group) *
                   (kGroupRows * kTokens * 4L) +
               thread() * 16;
    }
    MX_MEMBER unsigned* ended_at(const Segment& s) const {
        return t.x.ended() + (t.schedule.shared_tile(s) * kPair + t.member) * kGroups + group;
    }
    // For all of the warpgroup, what its first thread finds.
    MX_MEMBER bool first_finds(bool x) const {
        return named_barrier_or(1 + group, kGroupThreads, thread() == 0 && x);
    }
    // Leaves the sums of a part of a tile, or makes them those of the whole tile and returns true
    // if all other parts have left theirs: then its own stay in registers.
    MX_MEMBER bool join(float (&sums)[kTokens / 2], const Segment& s, bool& outside) const {
        const Schedule& of = t.schedule;
        const int begin = of.begin_of(s);
        const int first = of.sharer(begin), last = of.sharer(begin + of.chunks - 1);
        const unsigned others = last - first;
        unsigned ended = ended_before;
        if (!first_finds((ended & kOutside - 1) == others)) {
            leave_part(sums, place(of.cluster, begin), kGroupThreads * 16);
            named_barrier(1 + group, kGroupThreads);
            if (thread() == 0)
                ended = add_acquire_release(ended_at(s), outside ? kOutside + 1 : 1);
            if (!first_finds((ended & kOutside - 1) == others))
                return false;
        }
        outside |= first_finds(ended >= kOutside);
        // In the order of K: the sum of all parts before this one, this one, those after it. One
        // part before it is added to it as it is, and leaves registers for more at a time.
        constexpr int most = kOctets % 8 == 0 ? 8 : 4;
        constexpr int many = kTokens > 192 && most == 8 ? 4 : most;
        const auto place_of = [&](int cluster) { return place(cluster, begin); };
        if (of.cluster - first <= 1)
            add_parts<most, false>(sums, first, last, of.cluster, kGroupThreads * 16, place_of);
        else
            add_parts<many, true>(sums, first, last, of.cluster, kGroupThreads * 16, place_of);
        return true;
    }

    MX_MEMBER void run() {
        Segment s, next;
        if (!t.schedule.segment(0, s, k_group))
            return;
        open(s);
        bool more = true;
        for (int i = 0; more; ++i) {
            next = s;
            more = t.schedule.segment(i + 1, next);
            segment(s, next, i);
            s = next;
        }
    }
};

// Stores the share of a tile's tokens that this CTA has, once all parts of K are there.
MX_DEVICE void add_up(const Operands& t, unsigned shared) {
    if constexpr (kSplit > 1) {
        cluster_arrive();
        cluster_wait();
    } else {
        group_barrier();
    }
    Segment s;
    t.schedule.segment(0, s);
    const long token = t.token_tile(s) * static_cast<long>(kTokens), row = t.row(s);
    const int tokens = min(t.M - token, static_cast<long>(kTokens));
    const int first = tokens * t.schedule.rank / kSplit;
    const Block block{token + first,
                      row,
                      tokens * (t.schedule.rank + 1) / kSplit - first,
                      static_cast<int>(min(t.N - row, static_cast<long>(kRows))),
                      static_cast<int>(threadIdx.x),
                      kThreads / kLanes,
                      shared + kFlags};
    Adder{t, shared, block, first}.store_sums();
    bool outside = false;
    if constexpr (kSplit == 1)
        outside = load_shared(shared + kOutsideAt);
    else
        for (int part = 0; part < kSplit; ++part)
            outside |= load_cluster_4(address_in_cluster(shared + kOutsideAt, part)) != 0;
    if constexpr (kSplit > 1)
        cluster_arrive();
    if (__builtin_expect(outside, false)) {
        if constexpr (kSetsRegisters) { // all have the same work now
            if (threadIdx.x < kHelpers * kGroupThreads)
                increase_registers<kLaunchRegisters>();
            else
                decrease_registers<kLaunchRegisters>();
        }
        mend(t, block, true, [] { group_barrier(); });
    }
    if constexpr (kSplit > 1)
        cluster_wait();
}

#if MX_OWN_X
#define MX_X_MEMORY
#else
#define MX_X_MEMORY unsigned char *workspace,
#endif

extern "C" __global__ void MX_CLUSTER_DIMS __maxnreg__(kLaunchRegisters)
    aiter_mx_linear_wgmma_bf16(const unsigned char* xq, const unsigned char* xs,
                               const unsigned char* wq, const unsigned char* ws, const void* bias,
                               Out* y, MX_X_MEMORY long M, long N, long K, int bias_kind,
                               int rounds, int part, int parts_with_one_more,
                               const __grid_constant__ TensorMap weights) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    const unsigned shared = held(shared_address(dynamic));
    if (threadIdx.x == 0) {
        prefetch_map(weights);
        for (int group = 0; group < kKGroups; ++group) {
            const unsigned ring = shared + group * kRingBytes;
            for (int i = 0; i < kXStages; ++i) {
                barrier_init(ring + kXFull + 8 * i, 1);
                barrier_init(ring + kXEmpty + 8 * i, kPair * kGroups * kWarps);
            }
            for (int i = 0; i < kWStages; ++i) {
                barrier_init(ring + kWFull + 8 * i, 1);
                barrier_init(ring + kWEmpty + 8 * i, kGroups * kWarps);
            }
        }
        if constexpr (!kPairs)
            store_shared(shared + kOutsideAt, 0);
        fence_barrier_init();
    }
    launch_dependents();
    group_barrier();
    if constexpr (kPairs)
        cluster_arrive_relaxed();

    const int rank = kCluster == 1 ? 0 : rank_in_cluster();
    const int clusters = gridDim.x / kCluster, cluster = blockIdx.x / kCluster;
    const int chunks = (K + kChunkK - 1) / kChunkK;
#if MX_OWN_X
    unsigned char* const workspace = nullptr;
#endif
    const bool quantised = kOwnX || xs != nullptr; // else the launch ahead quantised it
    const long tokens = kSwapped ? N : M, features = kSwapped ? M : N;
    const XWorkspace x{workspace, tokens, K, kTokens, !quantised};
    const Operands t{kSwapped    ? wq
                     : quantised ? xq
                                 : x.payload(),
                     kSwapped    ? ws
                     : quantised ? xs
                                 : x.scales(),
                     kSwapped ? xq : wq,
                     kSwapped ? xs : ws,
                     bias,
                     y,
                     tokens,
                     features,
                     K,
                     bias_kind,
                     x,
                     {{cluster, clusters, chunks, rounds, part, parts_with_one_more},
                      kPairs ? 0 : rank,
                      kInTurn == 1 ? 0
                                   : static_cast<int>(x.tiles() * ((features + kPair * kRows - 1) /
                                                                   (kPair * kRows)))},
                     kPairs ? rank : 0};
    // Told so, ptxas knows that it is the same for all lanes of a warp.
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / kLanes, 0);
    const int lane = threadIdx.x % kLanes;
    if (warp < kHelpers * kWarps) {
        if constexpr (kSetsRegisters)
            decrease_registers<kHelperRegisters>();
        if (warp == 1) {
            if (elected_lane())
                bring_w(t, weights, shared);
            __syncwarp();
        }
        if constexpr (kPairs)
            cluster_wait(); // the other CTA's barriers are there
        if (kOwnX && warp != 1) {
            wait_for_grid_ahead();
            Expander{t, shared, max(warp - 1, 0), lane}.run();
        } else if (warp == 0) {
            wait_for_grid_ahead();
            if (elected_lane())
                bring_x(t, shared);
            __syncwarp();
        }
        wait_for_grid_ahead();
    } else {
        if constexpr (kSetsRegisters)
            increase_registers<kConsumerRegisters>();
        const int group = warp / kWarps - kHelpers;
        Consumer(t, shared, group % kGroups, group / kGroups, warp % kWarps, lane).run();
    }
    if constexpr (kPairs) { // the other CTA may still bring x and give stages back
        cluster_arrive_relaxed();
        cluster_wait();
    } else if constexpr (!kStoresSums) {
        add_up(t, shared);
    }
}
