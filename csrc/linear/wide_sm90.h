// What surrounds the loop of the wide linear of Hopper, wide_sm90.cu: its parameters, its
// shared memory, how scales become what it takes, who asks for w, and what becomes of sums.
#pragma once

#include "common/epilogue.h"
#include "common/scale.h"
#include "common/target.h"
#include "sm90/f16_factors.h"
#include "sm90/rows.h"
#include "sm90/tma.h"

namespace mx {

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
static_assert(!kLate || (!kOnePass && kSplit > 1 && kAddWarps == 8 && kChunks > kBusyChunks &&
                         kTileM > 32 && kWhole),
              "the host lets other passes run on than can: aiter_mx/kernels/linear/wide_sm90.py");
constexpr int kAddingRegisters = 168, kHelpingRegisters = 88; // 16 warps have 128 each
constexpr int kRowWarps = kRows / kWarpRows; // that have rows; others only take part in wgmma
static_assert(kRows % kWarpRows == 0, "a warp has all of its rows or none");

constexpr int kTilesM = kTileM / 8;
constexpr int kTileBytes = kLanes * 16; // sums of 16 rows of w by 8 of x, 4 values a lane
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
static_assert(kTables + (kLate ? 2 : 1) * kTableBytes == MX_SHARED_BYTES,
              "the host lays shared memory out differently: aiter_mx/kernels/linear/wide_sm90.py");

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
// What a row's sums are to be multiplied with, as a power of two.
MX_DEVICE int exponent_of(unsigned top) { return static_cast<int>(top) - 127 + 15 - kTopExponent; }

// Whether such a power, times another, may be beyond fp32.
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
    Turn<kDepth> ring;

    MX_MEMBER void ask(int stage) const {
        const unsigned barrier = shared_address(shared.full + stage);
        barrier_arrive_expect(barrier, kStageBytes);
        copy_box(base + stage * kStageBytes, weights, (part.first + chunk) * kChunk, tile * kRows,
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
            float4 sum = load_tile(at);
#pragma unroll
            for (int s = 1; s < kSplit; ++s)
                sum = add(sum, load_tile(at + s * kTileBytes));
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

} // namespace mx
