// Decode linear for up to 64 rows of x on Hopper: y = dequantised(x) * dequantised(w)^T + bias.
//
//   xq [M, K], wq [N, K]        e4m3 payload
//   xs [M, K/32], ws [N, K/32]  e8m0 scale of each 32 consecutive k
//   y  [M, N]                   fp32, bf16 or fp16
//   bias [N]                    any of these, or none
//
// A cluster of kSplit workgroups, which share K, takes kRows rows of w at a time:
//
//   w  -> a ring in shared memory, by boxes of kRows rows by 128 k -> registers -> fp16, wgmma's A
//   x  -> this workgroup's part of K, by boxes, once -> fp16 in shared memory: wgmma's B
//
// Both are fp16 with their scales applied, relative to the largest of the row in the part of K, so
// that sums over the part stay in the matrix unit and take both rows' largest scales at its end.
// Then they go to the workgroup of the cluster that owns the output, which adds them in a fixed
// order. A row whose scales are too far apart for fp16, zero blocks aside, sends kMarker instead,
// and the owner computes its outputs again in fp32.
//
// Warps: kAddWarps of 16 rows of w each; helpers, who add what comes in while others go on; and
// the last one, who also asks for w.

#define MX_CLUSTER MX_SPLIT

#include "common/epilogue.h"
#include "common/scale.h"
#include "common/target.h"
#include "rows_sm90.h"
#include "sm90/cluster.h"
#include "sm90/f16_factors.h"
#include "sm90/memory.h"
#include "sm90/mma.h"
#include "sm90/tma.h"
#include "sm90/wgmma.h"

using namespace mx;

constexpr int kTileM = MX_TILE_M;      // rows of x, with padding: 8, 16, 32, 48 or 64
constexpr int kRows = MX_ROWS;         // of w that a cluster takes at a time
constexpr int kSplit = MX_SPLIT;       // workgroups of a cluster
constexpr int kDepth = MX_DEPTH;       // stages of the ring, of 128 k
constexpr int kChunks = MX_CHUNKS;     // of 128 k in the largest part of K
constexpr bool kOnePass = MX_ONE_PASS; // no cluster takes rows twice
constexpr bool kWhole = MX_WHOLE;      // all parts of K have kChunks whole chunks
using Out = DType<MX_OUT>;

constexpr int kGroups = (kRows + 63) / 64;
constexpr int kAddWarps = kGroups * 4, kWarps = kAddWarps < 12 ? 16 : kAddWarps + 4;
constexpr int kFinishers = kWarps - kAddWarps - 1;
constexpr int kThreads = kWarps * kLanes;
constexpr int kWarpRows = 16;
// Whether the loop runs on from pass to pass: scales of the next pass become a table of their own
// meanwhile, and sums of a pass are sent while the next one is computed, where helpers add what
// comes and there are registers for both passes' sums. With fewer rows of x, or of w in 12 warps,
// it gains nothing.
constexpr bool kLate = MX_LATE;
constexpr int kInStep = kLate ? 4 : kAddWarps; // warps that wait for room in the inbox together
// Whether a warpgroup sends with chunk c of a pass, or makes the next table: the two do so with
// different chunks, as the other one multiplies meanwhile. Both at a time take 3 % longer.
constexpr int kBusyChunks = 4;
MX_DEVICE bool sends_with(int c, int group) { return c % 2 == 0 && group == c / 2; }
MX_DEVICE bool makes_table_with(int c, int group) { return c % 2 == 1 && group == (3 - c) / 2; }
static_assert(
    !kLate || (!kOnePass && kSplit > 1 && kAddWarps == 8 && kChunks > kBusyChunks && kTileM > 32 &&
               kWhole),
    "the host lets other passes run on than can: aiter_mx/kernels/linear/wgmma_f16_sm90.py");
constexpr int kAddingRegisters = 168, kHelpingRegisters = 88; // 16 warps have 128 each
constexpr int kRowWarps = kRows / kWarpRows; // that have rows; others only take part in wgmma
static_assert(kRows % kWarpRows == 0, "a warp has all of its rows or none");

constexpr int kTilesM = kTileM / 8;
constexpr int kTiles = kRowWarps * kTilesM;
constexpr int kOwnedTiles = (kTiles + kSplit - 1) / kSplit; // workgroup t % kSplit owns tile t

// Shared memory.
// x of one wgmma: pieces of 8 rows by 16 bytes, each a line of shared memory.
constexpr int kStepBytes = 16 * kTileM * 2;
constexpr int kChunkSteps = kChunk / 16;
constexpr int kStageBytes = kRows * kChunk;
constexpr int kInboxBytes = kSplit == 1 ? 0 : kOwnedTiles * kSplit * kTileBytes;
constexpr int kScaleStride = (kChunks + 1) | 1; // words of a row of w: scales, and the largest
// x comes, as it is, to where the last stages of the ring and the inbox are later, in slots of a
// chunk: all of it at once, or as many as there is room for.
constexpr int kSlotBytes = kTileM * kChunk;
constexpr int kInbox = kDepth * kStageBytes + MX_SPARE, kX = kInbox + kInboxBytes;
constexpr int kXSubs = kThreads / (kSlotBytes / kPiece); // chunks that are expanded at a time
constexpr int kSlots = kX / kSlotBytes < kChunks ? kX / kSlotBytes / kXSubs * kXSubs : kChunks;
constexpr int kStaging = (kX - kSlots * kSlotBytes) / 1024 * 1024;
static_assert(kXSubs > 0 && kSlots > 0, "each piece of a chunk of x has a thread and a place");
constexpr int kTables = kX + kChunks * kChunkSteps * kStepBytes;
constexpr int kTableBytes = kRows * kScaleStride * 4;
static_assert(kOnePass || kSplit == 1 || kTiles >= kSplit,
              "who owns a tile waits for the whole cluster");
static_assert(
    kTables + (kLate ? 2 : 1) * kTableBytes == MX_SHARED_BYTES,
    "the host lays shared memory out differently: aiter_mx/kernels/linear/wgmma_f16_sm90.py");

constexpr unsigned kMarker = 0x7fabcdef; // a NaN that arithmetic does not make
// Stages of w that are asked for before x is fp16, where x, as it is, has left them room; and how
// many are under way at a time, as boxes that are asked for together come together, and late.
constexpr int kAskedFirst = kStaging / kStageBytes < kDepth ? kStaging / kStageBytes : kDepth;
constexpr int kFlightBytes = 64 << 10; // 36 to 48 KB are up to 9 % slower, the whole ring 4 %
constexpr int kFlights = (kFlightBytes + kStageBytes / 2) / kStageBytes;
constexpr int kInFlight = kFlights < kDepth ? kFlights : kDepth;
constexpr bool kPaced = kSplit > 2 || kTileM <= 32;   // whether the first follow one another, too
constexpr int kSentBytes = (kSplit - 1) * kTileBytes; // of a tile, by the others of the cluster

MX_DEVICE float power(int exponent) {
    return bits_to_float(static_cast<unsigned>(exponent + 127) << 23);
}
constexpr int kLeastExponent = -126; // of a power of two that is not subnormal
// One of three powers of two whose product is 2^exponent. All lie on the same side of 1, so that no
// product on the way overflows before the last; those below 1 are two, so that a sum that becomes
// subnormal is rounded once. Below 2^-252 every sum becomes zero, by 2^-252 too.
MX_DEVICE float factor_of_power(int exponent, int step) {
    if (exponent < 0)
        return power(step == 0   ? max(exponent >> 1, kLeastExponent)
                     : step == 1 ? max(exponent - (exponent >> 1), kLeastExponent)
                                 : 0);
    return power(step < 2 ? exponent / 3 : exponent - exponent / 3 * 2);
}
// A row's sums are multiplied with this power of two.
MX_DEVICE int exponent_of(unsigned top) { return static_cast<int>(top) - 127 + 15 - kTopExponent; }

// True if such a power, times another, may be beyond fp32.
MX_DEVICE bool is_far(int exponent) { return exponent > 60 || exponent < -60; }

// A part of K, in chunks.
struct Part {
    int first, chunks;
};

struct Shared {
    unsigned long long full[kDepth], empty[kDepth], x_full[kChunks], inbox, finished;
    int x_exponent[kTileM];
    alignas(8) float x_power[kTileM];
    alignas(8) unsigned any_x[2]; // outside, far
    unsigned char x_outside[kTileM];
};

// Scales of every Step-th chunk of a row from the first one on: those that exist, 0 for others.
template <int Step, int Words>
MX_DEVICE void read_scales(unsigned (&words)[Words], const unsigned char* from, int first,
                           const Part& part, const Tensors& t, bool aligned) {
    from += (part.first + first) * kBlocks;
    if (__builtin_expect(kWhole && aligned, true)) {
#pragma unroll
        for (int i = 0; i < Words; ++i)
            words[i] = (i + 1) * Step <= kChunks || first + i * Step < kChunks
                           ? load_word(from + i * Step * kBlocks)
                           : 0;
        return;
    }
#pragma unroll
    for (int i = 0; i < Words; ++i) {
        const int c = first + i * Step;
        const long left = t.K - (part.first + c) * static_cast<long>(kChunk);
        words[i] = 0;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
            if (c < part.chunks && b * kBlock < left)
                words[i] |= load_byte(from + i * Step * kBlocks + b) << 8 * b;
    }
}

// The top bit of a byte is set where it is kNanScale.
MX_DEVICE unsigned nan_bytes(unsigned scales) {
    return ((scales & 0x7f7f7f7f) + 0x01010101) & scales & 0x80808080;
}

// The largest of them that is a number, over this lane and those whose numbers differ in Bits.
template <int Bits, int Words>
MX_DEVICE unsigned top_of(const unsigned (&words)[Words]) {
    unsigned top = largest_byte(words);
    if (__builtin_expect(top == kNanScale, false)) {
        unsigned numbers[Words];
#pragma unroll
        for (int i = 0; i < Words; ++i)
            numbers[i] = words[i] & ~((nan_bytes(words[i]) >> 7) * 0xff);
        top = largest_byte(numbers);
    }
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2)
        if (Bits & distance)
            top = max(top, __shfl_xor_sync(~0u, top, distance));
    return top;
}

// Of scales, bytes of words, what fp16 is multiplied with instead, relative to the largest of all.
template <int Words>
MX_DEVICE void make_factors(unsigned (&words)[Words], unsigned top) {
    constexpr unsigned each = 0x01010101;
    unsigned factors[Words], far = 0;
#pragma unroll
    for (int i = 0; i < Words; ++i) {
        const unsigned below = top * each - words[i]; // where it is right, no byte borrows
        factors[i] = (kTopExponent * each - below) << 2;
        far |= ((below + (128 - kTopExponent) * each) | below | nan_bytes(words[i])) & 0x80808080;
    }
    if (__builtin_expect(far != 0, false)) {
#pragma unroll
        for (int i = 0; i < Words; ++i) {
            factors[i] = 0;
#pragma unroll
            for (int b = 0; b < kBlocks; ++b)
                factors[i] |= factor_byte(byte_of(words[i], b), top) << 8 * b;
        }
    }
#pragma unroll
    for (int i = 0; i < Words; ++i)
        words[i] = factors[i];
}

// The scales of a warp's rows of w as they are used: bytes of factors, then the largest scale.
struct Table {
    const Tensors& t;
    const Part& part;
    unsigned place; // of the warp's rows
    const int lane;
    static constexpr int kWords = (kChunks + 1) / 2; // of a lane: two have a row
    unsigned words[kWords];

    MX_MEMBER void read(long first_row) {
        const long n = min(first_row + lane / 2, t.N - 1);
        read_scales<2>(words, t.ws + n * t.blocks(), lane % 2, part, t, t.aligned(t.ws));
    }
    // Returns whether any factor of the warp's rows is 0.
    MX_MEMBER bool write() const {
        const unsigned top = top_of<1>(words);
        const unsigned row = place + (lane / 2 * kScaleStride + lane % 2) * 4;
        unsigned factors[kWords];
#pragma unroll
        for (int i = 0; i < kWords; ++i)
            factors[i] = words[i];
        make_factors(factors, top);
        unsigned zeros = 0;
#pragma unroll
        for (int i = 0; i < kWords; ++i)
            if ((i + 1) * 2 <= kChunks || lane % 2 == 0) {
                store_shared_4(row + i * 8, factors[i]);
                zeros |= zero_bytes(factors[i]);
            }
        if (lane % 2 == 0)
            store_shared_4(row + kChunks * 4, exponent_of(top));
        __syncwarp();
        return __any_sync(~0u, zeros != 0);
    }
};

// Asks for w, box by box.
struct Asker {
    Shared& shared;
    const TensorMap& weights;
    const unsigned base;
    const Part& part;
    int tile, chunk; // of the next box
    const int tiles, tile_step;
    PipelineState<kDepth> ring;

    MX_MEMBER void ask(int stage) const {
        const unsigned barrier = shared_address(shared.full + stage);
        barrier_arrive_expect(barrier, kStageBytes);
        tma_load(base + stage * kStageBytes, weights, (part.first + chunk) * kChunk, tile * kRows,
                 barrier);
    }
    MX_MEMBER void next() {
        ring.next();
        if (++chunk == part.chunks) {
            chunk = 0;
            tile += tile_step;
        }
    }
};

// Adds what the workgroups of the cluster sent, and stores it.
struct Finisher {
    const Tensors& t;
    const void* bias;
    Out* y;
    int bias_kind, rank, lane;

    // Where a lane's four values of a tile go, and what is added to them.
    struct Place {
        Out* to;
        float bias[2];
        unsigned exists; // bits as the values
    };
    MX_MEMBER int m_of(int tile) const { return tile % kTilesM * 8 + lane % 4 * 2; }
    MX_MEMBER long n_of(long first, int tile) const {
        return first + tile / kTilesM * kWarpRows + lane / 4;
    }
    MX_MEMBER Place place(long first, int tile) const {
        const int m = m_of(tile);
        const long n = n_of(first, tile);
        Place p{y + m * t.N + n, {}, 0};
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (n + 8 * i < t.N) {
                p.exists |= ((m < t.M ? 1 : 0) | (m + 1 < t.M ? 2 : 0)) << 2 * i;
                p.bias[i] = bias_kind == kNone ? 0 : load_bias(bias, bias_kind, n + 8 * i);
            }
        return p;
    }
    MX_MEMBER void store_tile(long first, int tile, const Place& p, float4 sum,
                              unsigned marked) const {
        float values[4] = {sum.x, sum.y, sum.z, sum.w};
        if (__builtin_expect(marked, 0))
            compute_again(values, marked, m_of(tile), n_of(first, tile));
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j)
                if (p.exists >> (i * 2 + j) & 1)
                    store(p.to + j * t.N + 8 * i, values[i * 2 + j] + p.bias[i]);
    }
    MX_MEMBER void compute_again(float (&values)[4], unsigned marked, int m, long n) const {
#pragma unroll 1
        for (int at = 0; at < 4; ++at) {
            const long x = m + at % 2, w = n + at / 2 * 8;
            if (!(marked >> at & 1) || x >= t.M || w >= t.N)
                continue;
            const float value = exact_output(t.xq + x * t.K, t.xs + x * t.blocks(), t.wq + w * t.K,
                                             t.ws + w * t.blocks(), t.K);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                values[i] = i == at ? value : values[i];
        }
    }
    MX_MEMBER static unsigned marks(float4 v) {
        return (__float_as_uint(v.x) == kMarker) | (__float_as_uint(v.y) == kMarker) << 1 |
               (__float_as_uint(v.z) == kMarker) << 2 | (__float_as_uint(v.w) == kMarker) << 3;
    }
    // Of those that are owned, every step-th one, once wait() has returned. What does not depend on
    // the sums is worked out before.
    template <class Wait>
    MX_MEMBER void run(long first, unsigned inbox, int owned, int from, int step,
                       const Wait& wait) const {
        Place p{};
        if (from < owned)
            p = place(first, from * kSplit + rank);
        asm volatile("" : "+l"(p.to), "+r"(p.exists), "+f"(p.bias[0]), "+f"(p.bias[1])::"memory");
        wait();
#pragma unroll 1
        for (int i = from; i < owned; i += step) {
            const int tile = i * kSplit + rank;
            if (i != from)
                p = place(first, tile);
            const unsigned at = inbox + i * kSplit * kTileBytes + lane * 16;
            const float4 sum = sum_of_tiles<kSplit>(at);
            unsigned marked = 0;
            const float any = (sum.x + sum.y) + (sum.z + sum.w);
            if (__builtin_expect(any != any, false))
#pragma unroll 1
                for (int s = 0; s < kSplit; ++s)
                    marked |= marks(load_tile(at + s * kTileBytes));
            store_tile(first, tile, p, sum, marked);
        }
    }
};

// Makes x of the part fp16, in the order in which wgmma takes it: 8x16-byte pieces of 8 rows by the
// lower, then the upper halves of the words of 16 k. A thread has 16 k of a row in every so many
// chunks. A loop, as code that runs once waits for its fetching.
struct XExpander {
    const Tensors& t;
    const Part& part;
    Shared& shared;
    const unsigned from, to; // e4m3, fp16

    static constexpr int kPieces = kChunk / kPiece, kEight = 8;
    static constexpr int kStep = kLanes / kEight;               // lanes of a row
    static constexpr int kTops = (kChunks + kStep - 1) / kStep; // a lane's words of scales
    unsigned tops[kTops];                                       // scales, then factors

    // Lanes 8i to 8i + 7 have the same piece of 8 rows.
    MX_MEMBER int sub() const { return threadIdx.x / (kTileM * kPieces); }
    MX_MEMBER int m() const {
        return threadIdx.x / (kEight * kPieces) % kTilesM * kEight + threadIdx.x % kEight;
    }
    MX_MEMBER int piece() const { return threadIdx.x / kEight % kPieces; }
    MX_MEMBER int first_top() const { return threadIdx.x / kEight % kStep; }

    // Loads what is needed first.
    MX_MEMBER void open() {
        if (sub() < kXSubs)
            read_scales<kStep>(tops, t.xs + min(m(), t.M - 1) * t.blocks(), first_top(), part, t,
                               t.aligned(t.xs));
    }
    MX_MEMBER void find_factors() {
        const unsigned top = top_of<8 | 16>(tops);
#pragma unroll
        for (int n = 0; n < kTops; ++n) // what does not exist is not far
            if (first_top() + n * kStep >= part.chunks)
                tops[n] = top * 0x01010101;
        make_factors(tops, top);
        if (sub() == 0 && piece() == 0) {
            const int exponent = exponent_of(top);
            shared.x_exponent[m()] = exponent;
            shared.x_power[m()] = power(exponent);
            if (is_far(exponent))
                shared.any_x[1] = 1;
        }
    }
    // Notes a row of which a block is taken for zero, though it is not.
    MX_MEMBER void look_for_lost(int batch, unsigned source, unsigned pick) const {
#pragma unroll 1
        for (int slot = 0; slot < kSlots && batch + slot < kChunks; slot += kXSubs) {
            const int chunk = batch + slot + sub();
            unsigned factors = tops[0];
#pragma unroll
            for (int n = 1; n < kTops; ++n)
                factors = chunk >= n * kStep ? tops[n] : factors;
            factors = __shfl_sync(~0u, factors, threadIdx.x % kEight + chunk * kEight);
            if (chunk < part.chunks && zero_bytes(factors) != 0) {
                barrier_wait(shared_address(shared.x_full + chunk), 0);
                const u32x4 v = load_shared_16(source + slot * kSlotBytes);
                if (__byte_perm(factors, 0, pick) == 0 &&
                    (v[0] | v[1] | v[2] | v[3]) & 0x7f7f7f7f) {
                    shared.x_outside[m()] = 1;
                    shared.any_x[0] = 1;
                }
            }
        }
    }
    // By all warps. Calls ask(chunk) where there is room for chunks from this one on, and
    // after_round behind each round. Each instruction of the loop counts, as four warps share a
    // scheduler: so what it needs is worked out before, or follows from the round before.
    template <class Ask, class AfterRound>
    MX_MEMBER void run(const Ask& ask, const AfterRound& after_round) {
        constexpr bool all_work = kThreads == kXSubs * kTileM * kPieces;
        const bool works = all_work || sub() < kXSubs; // else there are more threads than pieces
        bool careful = false;
        if (works) {
            find_factors();
#pragma unroll
            for (int n = 0; n < kTops; ++n)
                careful |= zero_bytes(tops[n]) != 0;
            careful = __any_sync(~0u, careful);
        }
        const unsigned b = piece() / 2, pick = 0x0404 | b << 4 | b << 12;
        const unsigned begin = swizzled_128(from + sub() * kSlotBytes, m(), piece());
        unsigned place = to + (sub() * kPieces + piece()) * kStepBytes + m() * kPiece;
        unsigned barrier = shared_address(shared.x_full + sub());
        unsigned lane_of = threadIdx.x % kEight + sub() * kEight; // of those 32 that count
        int chunk = sub();
#pragma unroll 1
        for (int batch = 0; batch < kChunks; batch += kSlots) {
            if (kSlots < kChunks && batch > 0) {
                group_barrier();
                ask(batch);
            }
            unsigned source = held(begin);
#pragma unroll 1
            for (int slot = 0; slot < kSlots && batch + slot < kChunks; slot += kXSubs) {
                if (works && (kWhole && kChunks % kXSubs == 0 || chunk < part.chunks)) {
                    unsigned factors = tops[0];
#pragma unroll
                    for (int n = 1; n < kTops; ++n)
                        factors = chunk >= n * kStep ? tops[n] : factors;
                    factors = __shfl_sync(~0u, factors, lane_of);
                    barrier_wait(barrier, 0);
                    store_f16_times(place, kTileM * kPiece, load_shared_16(source),
                                    __byte_perm(factors, 0, pick));
                }
                source += kXSubs * kSlotBytes;
                place += kXSubs * kPieces * kStepBytes;
                barrier += kXSubs * 8;
                lane_of += kXSubs * kEight;
                chunk += kXSubs;
                after_round();
            }
            if (__builtin_expect(careful, false)) // what they came from is still there
                look_for_lost(batch, begin, pick);
        }
        fence_async();
    }
};

// The loop over K: what each of the warps that have rows
// of w does with them, from the ring in shared memory to sums of a part of K.

struct Adder {
    using Sums = float[kTileM / 2];
    static constexpr int kSteps = kChunk / 16; // wgmmas of a chunk
    static constexpr int kUnit = kSteps / 2;   // of them, between waits
    using Operands = unsigned[2][kUnit][4];    // of one unit that is multiplied, and of the next

    Shared& shared;
    const int warp, lane;
    // Addresses: the lane's first 16 bytes of w in the ring, its first scales, barriers.
    const unsigned from, full, empty;
    unsigned scales, next_scales; // of this pass and, where kLate, of the next
    bool careful;                 // whether any factor of the warp's rows is 0
    PipelineState<kDepth> ring;
    unsigned words[2][2][4], scale[2], next_scale[2];
    unsigned outside[2], lost[2]; // of the chunks that were opened, of the pass
    int exponent[2];              // of what the rows are relative to
    uint2 any_x;                  // whether any of x is outside, is far

    static constexpr bool kAllHaveRows = kRows % 64 == 0;
    MX_MEMBER bool has_rows() const { return kAllHaveRows || warp < kRowWarps; }

    MX_MEMBER Adder(Shared& shared, unsigned base, int warp, int lane)
        : shared(shared), warp(warp), lane(lane),
          from(held(base + (warp * kWarpRows + lane % 8) * kChunk + (lane / 8 ^ lane % 8) * 16)),
          full(held(shared_address(shared.full))), empty(held(shared_address(shared.empty))) {
        outside[0] = outside[1] = 0;
    }
    // The table of the warp's rows.
    MX_MEMBER void use(unsigned table, bool has_zeros) {
        scales = held(table + lane / 4 * kScaleStride * 4);
        careful = has_zeros;
    }
    // That of the next pass, whose first chunk is opened in this one.
    MX_MEMBER void use_next(unsigned table, bool has_zeros) {
        next_scales = held(table + lane / 4 * kScaleStride * 4);
        careful |= has_zeros;
    }
    // Half of a chunk.
    MX_MEMBER void fetch(int half) {
        if (!has_rows())
            return;
        const unsigned place = (from ^ half * 64) + ring.at * kStageBytes;
        load_matrices(words[half][0], place);
        load_matrices(words[half][1], place + 8 * kChunk);
    }
    // Notes rows of blocks that fp16 takes for zero, though they are not.
    MX_MEMBER void look_for_lost() {
        const unsigned first = from - lane % 8 * kChunk - (lane / 8 ^ lane % 8) * 16;
#pragma unroll 1
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + i % 2 * 8, piece = lane % 4 * 2 + i / 2;
            const u32x4 v = load_shared_16(swizzled_128(first + ring.at * kStageBytes, row, piece));
            const bool lost = byte_of(i % 2 ? next_scale[1] : next_scale[0], lane % 4) == 0 &&
                              (v[0] | v[1] | v[2] | v[3]) & 0x7f7f7f7f;
            outside[0] |= lost && i % 2 == 0;
            outside[1] |= lost && i % 2;
        }
    }
    // The next chunk's scales, which are `there`, and its first half.
    MX_MEMBER void open(unsigned there) {
        if (!has_rows())
            return;
        barrier_wait(full + ring.at * 8, ring.parity);
        next_scale[0] = load_shared_4(there);
        next_scale[1] = load_shared_4(there + 8 * kScaleStride * 4);
        fetch(0);
        if (__builtin_expect(careful, false) &&
            (zero_bytes(next_scale[0]) | zero_bytes(next_scale[1])) != 0)
            look_for_lost();
    }
    MX_MEMBER void close(int stage) const {
        if (has_rows()) {
            __syncwarp();
            if (lane == 0)
                barrier_arrive(empty + stage * 8);
        }
    }
    // Step j of 16 k of a chunk.
    MX_MEMBER void expand(unsigned (&a)[4], int j, const unsigned (&by)[2]) const {
        if (!has_rows())
            return;
#pragma unroll
        for (int i = 0; i < 2; ++i)
            e4m3x4_to_f16_times(words[j / 4][i][j % 4], factor_of_block(by[i], j / 2), a[i],
                                a[2 + i]);
    }
    // What is multiplied first. Without a chunk: anything, which is not multiplied.
    MX_MEMBER void begin(Operands& a, int chunks) {
        outside[0] = outside[1] = 0;
        if (kLate || chunks > 0) {
            open(scales);
            fetch(1);
#pragma unroll
            for (int n = 0; n < kUnit; ++n)
                expand(a[0][n], n, next_scale);
        }
    }
    // Calls between(j) behind the wgmmas of the unit that begins with step j. A unit is expanded
    // while the one before is multiplied, from words that were asked for a half of a chunk before,
    // so that none of it is waited for. `last`: of the pass; `more`: whether a chunk follows, of
    // this pass or the next; `there`: where the chunk's scales are, then the next one's.
    template <class Between>
    MX_MEMBER void add_chunk(Sums& sums, Operands& a, const MatrixDescriptor& b, bool last,
                             bool more, unsigned& there, const Between& between) {
        const int stage = ring.at;
        ring.next();
        scale[0] = next_scale[0];
        scale[1] = next_scale[1];
#pragma unroll
        for (int j = 0; j < kSteps; j += kUnit) {
            const int ahead = j + kUnit;
            wgmma_fence();
#pragma unroll
            for (int n = 0; n < kUnit; ++n)
                wgmma_f16(sums, a[j / kUnit % 2][n], b.at((j + n) * kStepBytes));
            wgmma_commit();
            between(j);
            if (ahead == kSteps && more) { // as late as can be: it may not have come
                if (kLate && last) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        lost[i] = outside[i];
                        outside[i] = 0;
                    }
                }
                there = kLate && last ? next_scales : there + 4;
                open(there);
                fetch(1);
            }
            wgmma_wait<1>();
#pragma unroll
            for (int n = 0; n < kUnit; ++n) // behind the last chunk: of anything
                expand(a[ahead / kUnit % 2][n], (ahead + n) % kSteps,
                       ahead == kSteps ? next_scale : scale);
            if (ahead == kSteps / 2)
                close(stage);
        }
    }
    // All of a pass. Where kLate, calls between(c, j) as add_chunk does, for chunks c of the first
    // kBusyChunks. `more`: whether there is a pass after this one.
    template <class Between>
    MX_MEMBER void add(Sums& sums, Operands& a, unsigned x, int chunks, bool more,
                       const Between& between) {
        const auto nothing = [](int) {};
        MatrixDescriptor b(x, kTileM * 16, 128);
        unsigned there = scales;
        if constexpr (kLate) {
#pragma unroll
            for (int c = 0; c < kBusyChunks; ++c) {
                add_chunk(sums, a, b, false, true, there, [&](int j) { between(c, j); });
                b.advance(kSteps * kStepBytes);
            }
        }
#pragma unroll 1
        for (int c = kLate ? kBusyChunks : 0; c < chunks; ++c) {
            const bool last = c + 1 == chunks;
            add_chunk(sums, a, b, last, !last || (kLate && more), there, nothing);
            b.advance(kSteps * kStepBytes);
        }
        if (!kLate || !more) {
            lost[0] = outside[0];
            lost[1] = outside[1];
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) // ahead of the wait, which has time for it
            exponent[i] =
                has_rows() ? load_shared_4(scales + (8 * i * kScaleStride + kChunks) * 4) : 0;
        any_x = load_shared_8(shared_address(shared.any_x));
        wgmma_wait<0>();
        keep_in_order(sums);
    }

    // Applies the rows' largest scales, and marks what is to be computed again.
    MX_MEMBER void scale_sums(Sums& sums) const {
        const bool far = is_far(exponent[0]) || is_far(exponent[1]) || any_x.y;
        if (__builtin_expect(!__any_sync(~0u, far), true)) {
            const float by_w[2] = {power(exponent[0]), power(exponent[1])};
#pragma unroll
            for (int j = 0; j < kTilesM; ++j) {
                const float2 by_x =
                    *reinterpret_cast<const float2*>(shared.x_power + j * 8 + lane % 4 * 2);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    sums[j * 4 + i * 2] *= by_w[i] * by_x.x;
                    sums[j * 4 + i * 2 + 1] *= by_w[i] * by_x.y;
                }
            }
        } else {
#pragma unroll 1
            for (int step = 0; step < 3; ++step)
#pragma unroll 1
                for (int at = 0; at < kTileM / 2; ++at) {
                    const int w = at / 2 % 2 ? exponent[1] : exponent[0];
                    const float by = factor_of_power(shared.x_exponent[column(at)] + w, step);
#pragma unroll
                    for (int i = 0; i < kTileM / 2; ++i)
                        sums[i] = i == at ? sums[i] * by : sums[i];
                }
        }
        if (__builtin_expect(!__any_sync(~0u, lost[0] | lost[1]) && !any_x.x, true))
            return;
        unsigned again = 0; // a bit for each of the two rows
#pragma unroll
        for (int i = 0; i < 2; ++i)
            again |= (any_of_row(lost[i] != 0, lane) ? 1u : 0u) << i;
#pragma unroll 1
        for (int at = 0; at < kTileM / 2; ++at) {
            const bool marked = again >> (at / 2 % 2) & 1 || shared.x_outside[column(at)];
#pragma unroll
            for (int i = 0; i < kTileM / 2; ++i)
                sums[i] = i == at && marked ? bits_to_float(kMarker) : sums[i];
        }
    }
    // Of x, of the lane's value.
    MX_MEMBER int column(int value) const { return value / 4 * 8 + lane % 4 * 2 + value % 2; }

    // Sends tile j of sums to the workgroup of the cluster that owns it.
    MX_MEMBER void send(const Sums& sums, int j, int rank, unsigned inbox) const {
        const unsigned barrier = shared_address(&shared.inbox);
        const float4 sum{sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]};
        const int i = warp * kTilesM + j, owner = i % kSplit;
        const unsigned to = inbox + (i / kSplit * kSplit + rank) * kTileBytes + lane * 16;
        if (owner == rank)
            store_tile(to, sum);
        else
            store_async(address_in_cluster(to, owner), sum, address_in_cluster(barrier, owner));
    }
    // When all have been sent: each lane for what it keeps.
    MX_MEMBER void tell_sent() const { barrier_arrive(shared_address(&shared.inbox)); }
};

extern "C" __global__ void MX_CLUSTER_DIMS __launch_bounds__(kThreads, 1)
    aiter_mx_linear_wgmma_f16(const unsigned char* xq, const unsigned char* xs,
                              const unsigned char* wq, const unsigned char* ws, const void* bias,
                              Out* y, long M, long N, long K, int bias_kind, int part_chunks,
                              int parts_with_one_more, int overlaps,
                              const __grid_constant__ TensorMap weights,
                              const __grid_constant__ TensorMap x_map) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    __shared__ Shared shared;
    const int lane = threadIdx.x % kLanes, warp = warp_uniform(threadIdx.x / kLanes);
    if (warp < 2 && elected_lane())
        prefetch_map(warp == 0 ? x_map : weights);
    const unsigned base = shared_address(dynamic);
    const int rank = blockIdx.x % kSplit;
    const int owned = (kTiles - rank + kSplit - 1) / kSplit;
    const Tensors t{xq, xs, wq, ws, static_cast<int>(M), N, K};
    const Part part{rank * part_chunks + min(rank, parts_with_one_more),
                    part_chunks + (rank < parts_with_one_more)};
    const int first_tile = blockIdx.x / kSplit, tile_step = gridDim.x / kSplit;
    const int tiles = (N + kRows - 1) / kRows;
    const Finisher finisher{t, bias, y, bias_kind, rank, lane};
    const unsigned inbox = base + kInbox, inbox_full = shared_address(&shared.inbox);
    int turn = 0;
    const bool adds = warp < kAddWarps, asks = warp == kWarps - 1;
    const bool has_rows = Adder::kAllHaveRows ? adds : warp < kRowWarps;
    // Several warps ask for x, as a box takes one some hundred cycles: for chunks from this one on,
    // where there is room again.
    const auto ask_for_x = [&](int first) {
        const int c = first + warp;
        if (warp < kSlots && c < part.chunks) {
            const unsigned barrier = shared_address(shared.x_full + c);
            barrier_arrive_expect(barrier, kSlotBytes);
            tma_load(base + kStaging + warp * kSlotBytes, x_map, (part.first + c) * kChunk, 0,
                     barrier);
        }
    };
    const int early = kWarps - 1 - warp;
    // Scales before x, as what is asked for later comes later; x may be the launch ahead's.
    XExpander expander{t, part, shared, base + kStaging, base + kX};
    const unsigned first_table = base + kTables + warp * kWarpRows * kScaleStride * 4;
    Table table{t, part, first_table, lane};
    const auto read_table = [&](int tile) {
        if (has_rows && tile < tiles)
            table.read(tile * static_cast<long>(kRows) + warp * kWarpRows);
    };
    if (!overlaps)
        expander.open();
    read_table(first_tile);
    if (elected_lane()) {
        if (warp < kChunks)
            barrier_init(shared_address(shared.x_full + warp), 1);
        if (early < kDepth) {
            barrier_init(shared_address(shared.full + early), 1);
            barrier_init(shared_address(shared.empty + early), kRowWarps);
        }
        if (warp == kWarps / 2) {
            barrier_init(inbox_full, 1 + kRowWarps * kLanes);
            barrier_init(shared_address(&shared.finished), kSplit);
            shared.any_x[0] = shared.any_x[1] = 0;
        }
        fence_barrier_init();
        if (kSplit > 1 && warp == kWarps / 2)
            barrier_arrive_expect(inbox_full, owned * kSentBytes);
        if (!overlaps)
            ask_for_x(0);
    }
    __syncwarp();
    // For a stage that is asked for the first time.
    const auto ask_early = [&](int stage) {
        Asker asker{shared, weights, base, part, first_tile, stage, tiles, tile_step, {}};
        if constexpr (!kWhole || kDepth > kChunks) {
#pragma unroll 1
            while (asker.chunk >= part.chunks && asker.tile < tiles) {
                asker.chunk -= part.chunks;
                asker.tile += tile_step;
            }
        }
        if (asker.tile < tiles && elected_lane())
            asker.ask(stage);
        __syncwarp();
    };
    // By the last warp: for one more stage, if no more than kInFlight are then under way.
    int asked = 0;
    const auto ask_next = [&] {
        if (!asks || overlaps || asked >= kAskedFirst || (!kWhole && part.chunks == 0))
            return;
        if (asked >= kInFlight &&
            !__any_sync(~0u, barrier_test(shared_address(shared.full + (asked - kInFlight)), 0)))
            return;
        ask_early(asked++);
    };
    // x is not there before the launch ahead has ended, and several warps have time to ask.
    if (overlaps && early < kAskedFirst)
        ask_early(early);
    if (threadIdx.x < kTileM)
        shared.x_outside[threadIdx.x] = 0;
    if (overlaps) {
        launch_dependents();
        wait_for_grid_ahead();
        if (elected_lane())
            ask_for_x(0);
        __syncwarp();
        expander.open();
    }
    __syncthreads(); // barriers are set up
    if (!kPaced)
#pragma unroll
        for (int i = 1; i < kInFlight; ++i)
            ask_next();
    ask_next(); // x has been asked for, which would come after w
    bool careful = false;
    if (kWhole && has_rows) // x is waited for; what is read byte by byte comes later
        careful = table.write();
    expander.run(
        [&](int first) {
            if (elected_lane())
                ask_for_x(first);
            __syncwarp();
        },
        ask_next);
    if (!kWhole && has_rows)
        careful = table.write();
    __syncthreads();
    if (!overlaps)
        launch_dependents();
    if (kSplit > 1)
        cluster_arrive_relaxed(); // once all have, inboxes are free
    // The last of several passes is added by all, when it has come.
    const auto finish_last = [&] {
        --turn;
        // Who does not send knows by this alone that all before it has come: else the parity that
        // is waited for might be that of two phases before.
        if (!kOnePass)
            __syncthreads();
        finisher.run((first_tile + turn * tile_step) * static_cast<long>(kRows), inbox, owned, warp,
                     kWarps, [&] {
                         if (owned > 0)
                             barrier_wait(inbox_full, turn & 1);
                         __syncwarp();
                         cluster_arrive_relaxed();
                     });
        cluster_wait();
    };
    // Waits until the cluster has room for the sums of a pass.
    const auto wait_for_room = [&](int pass) {
        if (pass == 0)
            cluster_wait();
        else
            barrier_wait(shared_address(&shared.finished), (pass - 1) & 1);
        if (pass > 0) // they have read the inbox, as `finished` says too, but not to racecheck
            named_barrier(2 + warp / kInStep, (kInStep + kFinishers) * kLanes);
    };
    if (adds) {
        if constexpr (kLate)
            increase_registers<kAddingRegisters>();
        Adder adder(shared, base, warp, lane);
        adder.use(table.place, careful);
        Adder::Sums late;       // of the pass before
        Adder::Operands a = {}; // of warps without rows: anything
        if constexpr (kLate) {
            read_table(first_tile + tile_step);
            adder.begin(a, part.chunks);
        }
        for (int tile = first_tile; tile < tiles; tile += tile_step, ++turn) {
            const long first = tile * static_cast<long>(kRows);
            const bool more = !kOnePass && tile + tile_step < tiles;
            if constexpr (!kLate) {
                if (!kOnePass && turn > 0 && has_rows) {
                    __syncwarp(); // all lanes have read what it replaces
                    adder.use(table.place, table.write());
                }
                if (more)
                    read_table(tile + tile_step);
                adder.begin(a, part.chunks);
            }
            Adder::Sums sums = {};
            adder.add(sums, a, base + kX, part.chunks, more, [&](int c, int j) {
                const int group = warp / 4;
                if (j > 0)
                    return;
                if (makes_table_with(c, group) && more && has_rows) {
                    table.place = first_table + (turn % 2 == 0 ? kTableBytes : 0);
                    adder.use_next(table.place, table.write());
                    read_table(tile + 2 * tile_step);
                }
                if (!sends_with(c, group) || turn == 0)
                    return;
                wait_for_room(turn - 1);
                if (!has_rows)
                    return;
#pragma unroll
                for (int n = 0; n < kTilesM; ++n)
                    adder.send(late, n, rank, held(inbox));
                adder.tell_sent();
            });
            if (has_rows)
                adder.scale_sums(sums);
            if (kLate && more) {
#pragma unroll
                for (int i = 0; i < kTileM / 2; ++i)
                    late[i] = sums[i];
                adder.scales = adder.next_scales;
                continue;
            }
            if constexpr (kSplit > 1) {
                wait_for_room(turn);
                if (has_rows) {
                    const unsigned here = held(inbox); // no address is kept from pass to pass
#pragma unroll
                    for (int j = 0; j < kTilesM; ++j)
                        adder.send(sums, j, rank, here);
                    adder.tell_sent();
                }
            } else if (has_rows) {
#pragma unroll
                for (int j = 0; j < kTilesM; ++j) {
                    const float4 sum{sums[4 * j], sums[4 * j + 1], sums[4 * j + 2],
                                     sums[4 * j + 3]};
                    const int i = warp * kTilesM + j;
                    finisher.store_tile(first, i, finisher.place(first, i), sum,
                                        Finisher::marks(sum));
                }
            }
        }
        if constexpr (kLate)
            finish_last();
    } else {
        if constexpr (kLate)
            decrease_registers<kHelpingRegisters>();
        if (asks && part.chunks > 0 && elected_lane()) {
            Asker asker{shared, weights, base, part, first_tile, 0, tiles, tile_step, {}};
            PipelineState<kDepth> arriving;
            const int before = overlaps ? kAskedFirst : asked;
#pragma unroll 1
            for (int i = 0; asker.tile < tiles; ++i) {
                if (i >= before) {
                    if (i >= kInFlight)
                        barrier_wait(shared_address(shared.full + arriving.at), arriving.parity);
                    barrier_wait(shared_address(shared.empty + asker.ring.at),
                                 asker.ring.parity ^ 1);
                    asker.ask(asker.ring.at);
                }
                if (i >= kInFlight)
                    arriving.next();
                asker.next();
            }
        }
        __syncwarp();
        if (kSplit > 1)
            cluster_wait();
        for (int tile = first_tile; tile < tiles; tile += tile_step, ++turn) {
            if (kOnePass || kSplit == 1 || asks || tile + tile_step >= tiles)
                continue;
            finisher.run(tile * static_cast<long>(kRows), inbox, owned, warp - kAddWarps,
                         kFinishers, [&] { barrier_wait(inbox_full, turn & 1); });
#pragma unroll
            for (int i = 0; i < kAddWarps / kInStep; ++i)
                named_barrier_arrive(2 + i, (kInStep + kFinishers) * kLanes);
            named_barrier(1, kFinishers * kLanes);
            if (warp == kAddWarps) {
                if (lane == 0)
                    barrier_arrive_expect(inbox_full, owned * kSentBytes);
                __syncwarp();
                if (lane < kSplit) // the cluster may send the next sums
                    barrier_arrive_read(address_in_cluster(shared_address(&shared.finished), lane));
            }
        }
        if constexpr (kLate)
            finish_last();
    }
    if constexpr (kSplit > 1 && !kLate)
        finish_last();
}
