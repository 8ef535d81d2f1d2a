// What surrounds the loop of the wide linear of Hopper, linear_wide_sm90.cu: its parameters, its
// shared memory, how x and the scales of w become what it takes, and what becomes of its sums.
#pragma once

#include "mx_epilogue.h"
#include "mx_exact.h"
#include "mx_scale.h"
#include "mx_target.h"
#include "sm90_async.h"
#include "sm90_expand.h"
#include "sm90_f16_factors.h"
#include "sm90_mma.h"
#include "sm90_rows.h"

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
constexpr int kRowWarps = kRows / kWarpRows; // that have rows; others only take part in wgmma
static_assert(kRows % kWarpRows == 0, "a warp has all of its rows or none");

constexpr int kTilesM = kTileM / 8;
constexpr int kTileBytes = kLanes * 16; // sums of 16 rows of w by 8 of x, 4 values a lane
constexpr int kTiles = kRowWarps * kTilesM;
constexpr int kOwnedTiles = (kTiles + kSplit - 1) / kSplit; // workgroup t % kSplit owns tile t

// Shared memory.
constexpr int kStepBytes = 16 * kTileM * 2 + 16; // x of one wgmma; the next is in other banks
constexpr int kChunkSteps = kChunk / 16;
constexpr int kStageBytes = kRows * kChunk;
constexpr int kInboxBytes = kSplit == 1 ? 0 : kOwnedTiles * kSplit * kTileBytes;
constexpr int kScaleStride = (kChunks + 1) | 1; // words of a row of w: scales, and the largest
constexpr int kX = kDepth * kStageBytes;
constexpr int kInbox = kX + kChunks * kChunkSteps * kStepBytes;
constexpr int kTables = kInbox + kInboxBytes;
static_assert(kOnePass || kSplit == 1 || kTiles >= kSplit,
              "who owns a tile waits for the whole cluster");
static_assert(kTables + kRows * kScaleStride * 4 == MX_SHARED_BYTES,
              "the host lays shared memory out differently: aiter_mx/kernels/linear/wide_sm90.py");

constexpr unsigned kMarker = 0x7fabcdef; // a NaN that arithmetic does not make
// Stages of w that are asked for before x is there: each of them delays x.
constexpr int kEarly = kTileM <= 32 ? 4 : 1;
constexpr int kAskedFirst = kEarly < kDepth ? kEarly : kDepth;

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
    unsigned long long full[kDepth], empty[kDepth], inbox, finished;
    int x_exponent[kTileM];
    alignas(8) float x_power[kTileM];
    unsigned x_outside[kTileM], any_x_outside, any_x_far;
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

// Makes x of the part fp16, in the order in which wgmma takes it: 8x16-byte pieces of 8 rows by the
// lower, then the upper halves of the words of 16 k. A warp has 8 rows and every so many chunks; a
// lane two of the rows, 4 apart, and 16 k of a chunk.
struct XExpander {
    const Tensors& t;
    const Part& part;
    Shared& shared;
    const unsigned to;
    const int warp, lane;

    static constexpr int kPieces = kChunk / 16;
    static constexpr int kWarpsOfRows = kWarps / kTilesM; // that share 8 rows
    static constexpr int kMost = (kChunks + kWarpsOfRows - 1) / kWarpsOfRows;
    static constexpr int kBatch = kMost < 4 ? kMost : 4;            // chunks that are read at once
    static constexpr int kTops = (kChunks + kPieces - 1) / kPieces; // a lane's words of scales
    static_assert(kWarpsOfRows >= 1, "each 8 rows of x have a warp");
    u32x4 words[kBatch][2];
    unsigned tops[2][kTops];

    MX_MEMBER int sub() const { return warp / kTilesM; }
    MX_MEMBER int m(int h) const { return warp % kTilesM * 8 + lane / kPieces + 4 * h; }
    MX_MEMBER int piece() const { return lane % kPieces; }

    MX_MEMBER void read(int first) {
        const int k = first * kChunk + piece() * 16; // of the part
        const long start = part.first * static_cast<long>(kChunk);
        const long left =
            kWhole ? kChunks * kChunk : min(static_cast<long>(part.chunks * kChunk), t.K - start);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const unsigned char* const from = t.xq + min(m(h), t.M - 1) * t.K + start + k;
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int on = i * kWarpsOfRows * kChunk;
                words[i][h] = u32x4{};
                if (k + on < left)
                    words[i][h] = load(from + on);
            }
        }
    }
    // What is needed first.
    MX_MEMBER void open() {
        if (sub() >= kWarpsOfRows)
            return;
        const bool aligned = t.aligned(t.xs);
#pragma unroll
        for (int h = 0; h < 2; ++h)
            read_scales<kPieces>(tops[h], t.xs + min(m(h), t.M - 1) * t.blocks(), piece(), part, t,
                                 aligned);
        read(sub());
    }
    MX_MEMBER void expand(const u32x4& v, unsigned scales, unsigned top, int chunk, int row) const {
        const unsigned byte = factor_byte(byte_of(scales, piece() / 2), top);
        const unsigned factor = byte * 0x01000100;
        if (__builtin_expect(byte == 0 && (v[0] | v[1] | v[2] | v[3]) & 0x7f7f7f7f, false))
            shared.x_outside[row] = shared.any_x_outside = 1;
        unsigned low[4], high[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            e4m3x4_to_f16(v[j], low[j], high[j]);
            low[j] = multiply_f16x2(low[j], factor);
            high[j] = multiply_f16x2(high[j], factor);
        }
        const unsigned place = to + (chunk * kPieces + piece()) * kStepBytes + row * 16;
        store_shared_16(place, low);
        store_shared_16(place + kTileM * 16, high);
    }
    MX_MEMBER void run() {
        if (sub() >= kWarpsOfRows)
            return;
        unsigned top[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            top[h] = top_of<1 | 2 | 4>(tops[h]);
            if (sub() == 0 && piece() == 0) {
                const int exponent = exponent_of(top[h]);
                shared.x_exponent[m(h)] = exponent;
                shared.x_power[m(h)] = power(exponent);
                if (is_far(exponent))
                    shared.any_x_far = 1;
            }
        }
#pragma unroll 1
        for (int first = sub(); first < part.chunks; first += kBatch * kWarpsOfRows) {
            if (kMost > kBatch && first != sub())
                read(first);
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int chunk = first + i * kWarpsOfRows;
                if (chunk >= part.chunks)
                    break;
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    unsigned scales = tops[h][0];
#pragma unroll
                    for (int n = 1; n < kTops; ++n)
                        scales = select_bits(chunk / kPieces == n ? ~0u : 0, tops[h][n], scales);
                    scales = __shfl_sync(~0u, scales, (lane & 24) | chunk % kPieces);
                    expand(words[i][h], scales, top[h], chunk, m(h));
                }
            }
        }
        fence_async();
    }
};

// The scales of a warp's rows of w as they are used: bytes of factors, then the largest scale.
struct Table {
    const Tensors& t;
    const Part& part;
    const unsigned place; // of the warp's rows
    const int lane;
    static constexpr int kWords = (kChunks + 1) / 2; // of a lane: two have a row
    unsigned words[kWords];

    MX_MEMBER void read(long first_row) {
        const long n = min(first_row + lane / 2, t.N - 1);
        read_scales<2>(words, t.ws + n * t.blocks(), lane % 2, part, t, t.aligned(t.ws));
    }
    MX_MEMBER void write() const {
        const unsigned top = top_of<1>(words);
        const unsigned row = place + (lane / 2 * kScaleStride + lane % 2) * 4;
        constexpr unsigned each = 0x01010101;
        unsigned factors[kWords], far = 0;
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            const unsigned below = top * each - words[i]; // where it is right, no byte borrows
            factors[i] = (kTopExponent * each - below) << 2;
            far |=
                ((below + (128 - kTopExponent) * each) | below | nan_bytes(words[i])) & 0x80808080;
        }
        if (__builtin_expect(far != 0, false)) {
#pragma unroll
            for (int i = 0; i < kWords; ++i) {
                factors[i] = 0;
#pragma unroll
                for (int b = 0; b < kBlocks; ++b)
                    factors[i] |= factor_byte(byte_of(words[i], b), top) << 8 * b;
            }
        }
#pragma unroll
        for (int i = 0; i < kWords; ++i)
            if ((i + 1) * 2 <= kChunks || lane % 2 == 0)
                store_shared_4(row + i * 8, factors[i]);
        if (lane % 2 == 0)
            store_shared_4(row + kChunks * 4, exponent_of(top));
        __syncwarp();
    }
};

// Adds what the workgroups of the cluster sent, and stores it.
struct Finisher {
    const Tensors& t;
    const void* bias;
    Out* y;
    int bias_kind, rank, lane;

    MX_MEMBER void store_tile(long first, int tile, float4 sum, unsigned marked) const {
        const int m = tile % kTilesM * 8 + lane % 4 * 2;
        const long n = first + tile / kTilesM * kWarpRows + lane / 4;
        float values[4] = {sum.x, sum.y, sum.z, sum.w};
        if (__builtin_expect(marked, 0))
            compute_again(values, marked, m, n);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (n + 8 * i >= t.N)
                continue;
            const float added = bias_kind == kNone ? 0 : load_bias(bias, bias_kind, n + 8 * i);
#pragma unroll
            for (int j = 0; j < 2; ++j)
                if (m + j < t.M)
                    store(y + (m + j) * t.N + n + 8 * i, values[i * 2 + j] + added);
        }
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
    // Of those that are owned, every step-th one.
    MX_MEMBER void run(long first, unsigned inbox, int owned, int from, int step) const {
        for (int i = from; i < owned; i += step) {
            const unsigned place = inbox + i * kSplit * kTileBytes + lane * 16;
            float4 sum = load_tile(place);
#pragma unroll
            for (int s = 1; s < kSplit; ++s)
                sum = add(sum, load_tile(place + s * kTileBytes));
            unsigned marked = 0;
            const float any = (sum.x + sum.y) + (sum.z + sum.w);
            if (__builtin_expect(any != any, false))
#pragma unroll 1
                for (int s = 0; s < kSplit; ++s)
                    marked |= marks(load_tile(place + s * kTileBytes));
            store_tile(first, i * kSplit + rank, sum, marked);
        }
    }
};

} // namespace mx
