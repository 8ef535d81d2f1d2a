// Decode linear for up to 16 rows of x on Hopper, weights straight into registers:
// y = dequantised(x) * dequantised(w)^T + bias.
//
//   xq [M, K], wq [N, K]        e4m3 payload
//   xs [M, K/32], ws [N, K/32]  e8m0 scale of each 32 consecutive k
//                               or xq is bf16 or fp16, there is no xs, and x is quantised here
//   y  [M, N]                   fp32, bf16 or fp16
//   bias [N]                    any of these, or none
//
// A cluster computes kRows consecutive outputs n for all m. Its kSplit workgroups have a part of K
// each, and the waves of a workgroup take turns with that, a chunk of 128 k at a time, and ask for
// kUnroll chunks of w and x before they use the first, or for one as they use the one before it.
// Nothing but sums passes through shared memory, and no one waits for another before the end. A
// launch that overlaps the one ahead of it asks for its first weights before that has ended.
//
// Products are those of mma over fp16, which any e4m3 is. Each of four lanes has 16 bytes of 64 k
// of a row of w, and so two of them another block of 32 k than the others, although mma adds over
// all four. Up to 4 rows of x the sums of both blocks stay apart; above that fp16 has the
// blocks' scales in it.
//
// Sums are fp32 and added in an order that depends on nothing but the configuration: over blocks,
// then waves, by the workgroup that owns the tile: of a cluster's, they take turns.

#define MX_CLUSTER MX_SPLIT

#include "common/epilogue.h"
#include "common/scale.h"
#include "common/target.h"
#include "fused.h"
#include "rows_sm90.h"
#include "sm90/cluster.h"
#include "sm90/mma.h"
#include "sm90/tma.h"

using namespace mx;

constexpr int kRows = MX_ROWS;          // outputs n of a workgroup
constexpr int kWaves = MX_WAVES;        // waves of a workgroup
constexpr int kUnroll = MX_UNROLL;      // chunks of a wave whose loads precede all use, or 0:
constexpr bool kInTurn = kUnroll == 0;  // each is asked for while the one before is used
constexpr int kSplit = MX_SPLIT;        // workgroups of a cluster, which share K
constexpr int kResident = MX_RESIDENT;  // workgroups of an SM that registers are to allow
constexpr bool kOverlaps = MX_OVERLAPS; // may begin before the grid ahead of it ends
constexpr bool kEven = MX_EVEN;         // each round of each wave has all of its chunks
constexpr unsigned kDepth = MX_DEPTH;   // K
constexpr bool kQuantises = !kIsQuantised<MX_X>;
// 2: kRows divides N; 1: the last workgroup starts among rows of another; 0: N is less than kRows.
constexpr int kRowsFit = MX_ROWS_FIT;

constexpr int kHalves = (kRows + 7) / 8; // tiles of 8 rows of w
constexpr int kSteps = 2;                // of 64 k of a chunk
constexpr int kXBytes = kQuantises ? 2 : 1;
constexpr int kStep = kChunk / kSteps;
constexpr int kThreads = kLanes * kWaves;
constexpr int kParts = kSplit * kWaves; // whose sums are added

constexpr int kChunks = kDepth / kChunk + (kDepth % kChunk > 0); // of K
constexpr bool kWholeChunks = kDepth % kChunk == 0;
constexpr int kRoundChunks = (kInTurn ? 1 : kUnroll) * kParts;
static_assert(!kEven || kChunks % kRoundChunks == 0);
constexpr int kRounds = kChunks / kRoundChunks; // if even

// True if K goes on to k of chunk c.
MX_DEVICE bool within(int c, int k) {
    return kWholeChunks || static_cast<unsigned>(c * kChunk + k) < kDepth;
}
MX_DEVICE int blocks_left(int c) { return static_cast<int>(kDepth / kBlock) - c * kBlocks; }

// Opaque to the compiler, which would keep each address of a loop in registers of its own.
MX_DEVICE void advance_pointer(const unsigned char*& p, int bytes) {
    p += bytes;
    asm volatile("" : "+l"(p));
}

// A way out that no wave takes, as no address is above 2^64 - 2^32. ptxas would gather loads behind
// the products, past __syncwarp too, but moves few past this.
MX_DEVICE void keep_loads_in_order(const unsigned char* p) {
    asm volatile("{\n"
                 ".reg .pred never;\n"
                 "setp.eq.u32 never, %0, 0xffffffff;\n"
                 "@never exit;\n"
                 "}" ::"r"(static_cast<unsigned>(reinterpret_cast<unsigned long>(p) >> 32))
                 : "memory");
}

// Scales of four blocks, of which `left` exist.
template <bool Aligned>
MX_DEVICE unsigned scales_at(const unsigned char* p, int left) {
    if constexpr (Aligned)
        return load_word(p);
    unsigned v = kUnitScales;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
        if (i < left)
            v = (v & ~(0xffu << 8 * i)) | load_byte(p + i) << 8 * i;
    return v;
}

template <int Distance>
MX_DEVICE unsigned across_lanes(unsigned x) {
    return __shfl_xor_sync(0xffffffff, x, Distance);
}

// True if the top bit of any byte is set in any lane.
MX_DEVICE bool any_far(unsigned bits) { return __any_sync(0xffffffff, bits & 0x80808080); }

// What a lane has of w in a chunk: 16 bytes of row lane / 4 of each half, twice, and the scales of
// rows lane, 32 + lane and so on, which others need.
constexpr int kScaleWords = (kHalves + 3) / 4;

struct Weights {
    u32x4 payload[kHalves][kSteps];
    unsigned scales[kScaleWords];

    // The scales of some row of half h.
    MX_MEMBER unsigned scales_of(int h, int row) const {
        return of_lane(h % 4 * 8 + row, scales[h / 4]);
    }
};

// A lane reads them here.
struct WeightsReader {
    // Of the first half, at known distances from which the others are, and of a last one that is no
    // whole half; of each where N has too few rows.
    static constexpr bool kAllBases = kRowsFit == 0;
    static constexpr int kBases = kAllBases ? kHalves : kHalves > 1 && kRows % 8 > 0 ? 2 : 1;

    const unsigned char *payload[kBases], *scales[kScaleWords];
    int place; // which bytes of a step, 16 of 64, the lane reads

    // From a chunk on. Rows past the last are computed from it and not stored.
    MX_MEMBER void open(const unsigned char* wq, const unsigned char* ws, int at,
                        unsigned first_row, unsigned last_row, unsigned chunk, int lane) {
        place = at;
        const auto row = [&](unsigned i, unsigned end) {
            return kAllBases     ? min(first_row + i, last_row)
                   : end > kRows ? first_row + min(i, kRows - 1u)
                                 : first_row + i;
        };
#pragma unroll
        for (int i = 0; i < kBases; ++i) {
            const unsigned first = 8 * (kAllBases || i == 0 ? i : kHalves - 1);
            payload[i] = wq +
                         static_cast<unsigned long>(row(first + lane / 4, first + 8)) * kDepth +
                         (chunk * kChunk + place);
        }
#pragma unroll
        for (int i = 0; i < kScaleWords; ++i)
            scales[i] = ws +
                        static_cast<unsigned long>(row(kLanes * i + lane, kLanes * (i + 1))) *
                            (kDepth / kBlock) +
                        chunk * kBlocks;
    }
    MX_MEMBER const unsigned char* payload_of(int h) const {
        if (kAllBases)
            return payload[h];
        return h > 0 && 8 * h + 8 > kRows ? payload[kBases - 1] : payload[0] + 8l * h * kDepth;
    }
    MX_MEMBER void advance(int chunks) {
#pragma unroll
        for (int i = 0; i < kBases; ++i)
            advance_pointer(payload[i], chunks * kChunk);
#pragma unroll
        for (int i = 0; i < kScaleWords; ++i)
            advance_pointer(scales[i], chunks * kBlocks);
    }
    // ahead: chunks from where the lane is; it is chunk c of K.
    MX_MEMBER void load_payload(Weights& w, int ahead, int c) const {
#pragma unroll
        for (int h = 0; h < kHalves; ++h)
#pragma unroll
            for (int s = 0; s < kSteps; ++s)
                load_step(w, h, s, ahead, c);
    }
    MX_MEMBER void load_step(Weights& w, int h, int s, int ahead, int c) const {
        if (within(c, s * kStep + place))
            w.payload[h][s] = load_once_in_lines(payload_of(h) + ahead * kChunk + s * kStep);
    }
    template <bool Aligned>
    MX_MEMBER void load_scales(Weights& w, int ahead, int c) const {
#pragma unroll
        for (int i = 0; i < kScaleWords; ++i)
            w.scales[i] = scales_at<Aligned>(scales[i] + ahead * kBlocks, blocks_left(c));
    }
};

// A chunk, `ahead` of where the readers are, for what is read of it once more.
struct XReader;
struct Here {
    const WeightsReader& w;
    const XReader& x;
    int ahead, chunk, lane;
};

// What is done with weights at the beginning of both ways after a branch is not to be done ahead of
// it: all of a wave's other work is, while it waits for them.
MX_DEVICE void unlike_the_other_way(u32x4& v) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        asm volatile("" : "+r"(v.words[i]));
}

#if MX_TOKENS <= 4

// Up to 4 rows of x: mma.m16n8k16 over payloads alone.
//
// Lane 4g + t loads 16 bytes of row g of 8, at k = 16t of 64: one scale lasts for t = 0 and 1,
// another for t = 2 and 3. As mma adds over t, x has a column for each token and block of 32 k,
// which is zero in the other block's lanes. So half of the matrix unit's work is for nothing, and a
// lane finds the sums of both blocks of a row of w and token t side by side:
//
//   B, 64 k of x          t = 0, 1       t = 2, 3
//   column 2m             x[m, 0..31]    0
//   column 2m + 1         0              x[m, 32..63]

constexpr int kTiles = (kHalves + 1) / 2; // of 16 rows of w, as mma takes them
constexpr int kLaneSums = 1;              // of a half, that a lane has
constexpr bool kLateX = false;

using Sums = float[kHalves][kLaneSums]; // of row g of each half by token t

MX_DEVICE int row_of(int lane, int) { return lane / 4; }
MX_DEVICE int token_of(int lane, int) { return lane % 4; }

MX_DEVICE int place_of(int t) { return t * kPiece; }

// Four scales of w times four of x by one addition, of words: right where each byte of w is in 64
// to 191 and each of x in 64 to 190, as then their sums less 127 are in 1 to 254.
MX_DEVICE unsigned multiply_scales(unsigned w, unsigned x) { return w + (x - kUnitScales); }
// The top bit of a byte is set unless all bytes are in that range.
MX_DEVICE unsigned far_w(unsigned scales) { return scales - 0x40404040; }
MX_DEVICE unsigned far_x(unsigned scales) { return (scales - 0x40404040) | (scales - 0x3f3f3f3f); }

// Adds a block's products, times its scales of four of a row of w and of x.
// Far: scales may be so far from 1 that they are to be applied in turn.
template <bool Far>
MX_DEVICE void add_scaled_block(float& sum, float product, unsigned of_w, unsigned of_x,
                                int block) {
    if constexpr (Far)
        sum = add_scaled(sum, product, e8m0_split(byte_of(of_w, block)),
                         e8m0_to_f32(byte_of(of_x, block)));
    else
        sum = mx::fma(product, usual_scale(multiply_scales(of_w, of_x), block), sum);
}

// What a lane has of x in a chunk: pieces of column g, and the scales of token t.
struct X {
    u32x4 payload[kSteps];
    unsigned scales;

    MX_MEMBER unsigned far(const Weights& w) const {
        unsigned bits = far_x(scales);
#pragma unroll
        for (int i = 0; i < kScaleWords; ++i)
            bits |= far_w(w.scales[i]);
        return bits;
    }
};

struct Chunk {
    Weights w;
    X x; // or in place of its payload 16 numbers that are yet to be quantised
};

// A lane reads x here. What it quantises is all of one step: lanes whose column is zero in their
// blocks do it for the others, which have these in the other step.
struct XReader {
    const unsigned char *payload, *scales;
    int place;
    bool is_own, has_payload, has_scales;

    MX_MEMBER void open(const unsigned char* xq, const unsigned char* xs, unsigned M,
                        unsigned chunk, int lane) {
        const unsigned g = lane / 4, t = lane % 4;
        is_own = t / 2 == g % 2;
        place = is_own || !kQuantises ? place_of(t) : kStep + place_of(t ^ 2);
        payload =
            xq + (static_cast<unsigned long>(g / 2) * kDepth + (chunk * kChunk + place)) * kXBytes;
        scales = xs + static_cast<unsigned long>(t) * (kDepth / kBlock) + chunk * kBlocks;
        has_payload = g / 2 < M && (is_own || kQuantises);
        has_scales = t < M;
    }
    MX_MEMBER void advance(int chunks) {
        advance_pointer(payload, chunks * kChunk * kXBytes);
        if constexpr (!kQuantises)
            advance_pointer(scales, chunks * kBlocks);
    }
    MX_MEMBER void load_payload(Chunk& chunk, int ahead, int c) const {
#pragma unroll
        for (int s = 0; s < kSteps; ++s)
            if (has_payload && within(c, (kQuantises ? 0 : s * kStep) + place))
                chunk.x.payload[s] =
                    load(payload + ahead * kChunk * kXBytes + s * (kQuantises ? 16 : kStep));
    }
    MX_MEMBER void load_step(Chunk&, int, int, int) const {} // x is not expanded late
    template <bool Aligned>
    MX_MEMBER void load_scales(Chunk& chunk, int ahead, int c) const {
        if constexpr (kQuantises)
            return;
        chunk.x.scales = kUnitScales;
        if (has_scales)
            chunk.x.scales = scales_at<Aligned>(scales + ahead * kBlocks, blocks_left(c));
    }
    // x of chunk c, from what was loaded.
    MX_MEMBER X take(const Chunk& chunk, int c, int lane) const {
        if constexpr (!kQuantises)
            return chunk.x;
        const QuantisedHalf half =
            quantised(HalfBlock<MX_X>{chunk.x.payload[0], chunk.x.payload[1]});
        X x = {};
        unsigned scales = (within(c, place) ? half.scale : kUnitScales & 0xff)
                          << 8 * (place / kBlock);
        scales |= across_lanes<2>(scales);
        scales |= across_lanes<4>(scales);
        scales = of_lane(lane % 4 * 8, scales);
        x.scales = has_scales ? scales : kUnitScales;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned other = across_lanes<2>(half.payload[i]);
            x.payload[0].words[i] = is_own ? half.payload[i] : 0;
            x.payload[1].words[i] = is_own ? other : 0;
        }
        return x;
    }
};

// Made of x and of scales before the weights are there.
struct Ready {
    unsigned columns[kSteps][4][2];
    unsigned w_scales[kHalves], x_scales;
};

// True if scales are far from 1.
MX_DEVICE bool make_ready(Ready& ready, const Chunk& chunk, const Here& here) {
    const X x = here.x.take(chunk, here.chunk, here.lane);
    const bool far = any_far(x.far(chunk.w));
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            e4m3x4_to_f16(x.payload[s][i], ready.columns[s][i][0], ready.columns[s][i][1]);
#pragma unroll
    for (int h = 0; h < kHalves; ++h)
        ready.w_scales[h] = chunk.w.scales_of(h, row_of(here.lane, 0));
    ready.x_scales = x.scales;
    return far;
}

// Far: as of add_scaled_block.
// refill_w(h, s) is called when the weights of half h, step s are no longer needed.
template <bool Far, class RefillW>
MX_DEVICE void add_products(Sums& sums, const Chunk& chunk, const Ready& ready, RefillW refill_w) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            unsigned rows[2][4][2] = {};
#pragma unroll
            for (int h = 0; h < 2; ++h)
                if (2 * tile + h < kHalves) {
                    u32x4 w = chunk.w.payload[2 * tile + h][s];
                    if constexpr (Far)
                        unlike_the_other_way(w);
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        e4m3x4_to_f16(w[i], rows[h][i][0], rows[h][i][1]);
                    refill_w(2 * tile + h, s);
                }
            float products[4] = {};
#pragma unroll
            for (int i = 0; i < 4; ++i)
                mma(products, rows[0][i][0], rows[1][i][0], rows[0][i][1], rows[1][i][1],
                    ready.columns[s][i][0], ready.columns[s][i][1]);
#pragma unroll
            for (int h = 2 * tile; h < kHalves && h < 2 * tile + 2; ++h)
#pragma unroll
                for (int b = 0; b < 2; ++b)
                    add_scaled_block<Far>(sums[h][0], products[2 * (h % 2) + b], ready.w_scales[h],
                                          ready.x_scales, 2 * s + b);
        }
}

template <class RefillW, class RefillX>
MX_DEVICE void add_chunk(Sums& sums, const Chunk& chunk, const Ready& ready, bool far, const Here&,
                         RefillW refill_w, RefillX) {
    if (far)
        add_products<true>(sums, chunk, ready, refill_w);
    else
        add_products<false>(sums, chunk, ready, refill_w);
}

#else

// 5 to 16 rows of x: mma.m16n8k16 over fp16 that has block scales in it.
//
// Lane 4g + t loads 16 bytes of row g of 8, of w and of x, at k = 16t of 64. fp16 has room for 22
// octaves of scales beside an e4m3. So each block of a chunk is multiplied, exactly, with its scale
// over the largest one of the wave's rows there, their top, of w as of x: mma then adds up a whole
// chunk, and its sums count in fp32, times both tops. Chunks whose scales leave that range are
// computed block by block, as described below.
//
// Up to 8 rows, 16 rows of w are mma's A and x is B; above, 16 rows of x are A and 8 of w are B:
//
//   M to 8    A: rows g and g + 8 of w   B: token g      D: rows g and g + 8, tokens 2t and 2t + 1
//   M to 16   A: tokens g and g + 8      B: row g of w   D: tokens g and g + 8, rows 2t and 2t + 1

constexpr int kTokenTiles = MX_TOKENS / 8; // of 8 rows of x
constexpr bool kXIsA = kTokenTiles == 2;
constexpr int kTileHalves = kXIsA ? 1 : 2; // of w, that mma takes
constexpr int kTiles = (kHalves + kTileHalves - 1) / kTileHalves;
constexpr int kLaneTokens = 2, kLaneRows = kXIsA ? 2 : 1; // of a half, whose sums a lane has
constexpr int kLaneSums = kLaneTokens * kLaneRows;
// Where each chunk is asked for while the one before is used, x of a step becomes fp16 as the step
// begins, which takes fewer registers.
constexpr bool kLateX = kInTurn && kXIsA;
static_assert(!(kQuantises && kXIsA), "few rows are quantised here");

using Sums = float[kHalves][kLaneSums];

// A lane's tokens and rows.
MX_DEVICE int token_at(int lane, int i) { return kXIsA ? 8 * i + lane / 4 : lane % 4 * 2 + i; }
MX_DEVICE int row_at(int lane, int i) { return kXIsA ? lane % 4 * 2 + i : lane / 4; }
// Those of sum i of a half.
MX_DEVICE int token_of(int lane, int i) { return token_at(lane, i / kLaneRows); }
MX_DEVICE int row_of(int lane, int i) { return row_at(lane, i % kLaneRows); }

MX_DEVICE int place_of(int t) { return t * kPiece; }

struct X {
    u32x4 payload[kTokenTiles][kSteps];
    unsigned scales; // of token `lane`, modulo those of all tiles
};

struct Chunk {
    Weights w;
    X x;
    HalfBlock<MX_X> halves[kSteps]; // of x, if yet to be quantised
};

// Where a lane reads x. Tokens past the last are computed from it and not stored.
struct XReader {
    const unsigned char *payload[kTokenTiles], *scales;
    int place;

    MX_MEMBER void open(const unsigned char* xq, const unsigned char* xs, unsigned M,
                        unsigned chunk, int lane) {
        place = place_of(lane % 4);
#pragma unroll
        for (int i = 0; i < kTokenTiles; ++i)
            payload[i] = xq + (static_cast<unsigned long>(min(lane / 4 + 8u * i, M - 1)) * kDepth +
                               (chunk * kChunk + place)) *
                                  kXBytes;
        scales =
            xs +
            static_cast<unsigned long>(min(lane % (8u * kTokenTiles), M - 1)) * (kDepth / kBlock) +
            chunk * kBlocks;
    }
    MX_MEMBER void advance(int chunks) {
#pragma unroll
        for (int i = 0; i < kTokenTiles; ++i)
            advance_pointer(payload[i], chunks * kChunk * kXBytes);
        if constexpr (!kQuantises)
            advance_pointer(scales, chunks * kBlocks);
    }
    MX_MEMBER void load_payload(Chunk& chunk, int ahead, int c) const {
#pragma unroll
        for (int s = 0; s < kSteps; ++s)
            load_step(chunk, s, ahead, c);
    }
    MX_MEMBER void load_step(Chunk& chunk, int s, int ahead, int c) const {
#pragma unroll
        for (int i = 0; i < kTokenTiles; ++i)
            if (within(c, s * kStep + place)) {
                const unsigned char* from = payload[i] + (ahead * kChunk + s * kStep) * kXBytes;
                if constexpr (kQuantises)
                    chunk.halves[s] = {load(from), load(from + 16)};
                else
                    chunk.x.payload[i][s] = load(from);
            }
    }
    template <bool Aligned>
    MX_MEMBER void load_scales(Chunk& chunk, int ahead, int c) const {
        if constexpr (!kQuantises)
            chunk.x.scales = scales_at<Aligned>(scales + ahead * kBlocks, blocks_left(c));
    }
    // x of chunk c, from what was loaded.
    MX_MEMBER X take(const Chunk& chunk, int c, int lane) const {
        if constexpr (!kQuantises)
            return chunk.x;
        X x;
        unsigned of_row = 0;
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            const QuantisedHalf half = quantised(chunk.halves[s]);
            x.payload[0][s] = half.payload;
            of_row |= (within(c, s * kStep + place) ? half.scale : kUnitScales & 0xff)
                      << 8 * (2 * s + lane % 4 / 2);
        }
        of_row |= across_lanes<2>(of_row);
        x.scales = of_lane(lane % 8 * 4, of_row);
        return x;
    }
};

// Four scales of each lane's row as factors in fp16 relative to the top of all lanes, which becomes
// 2^7. Bytes are upper ones of fp16.
struct Relative {
    static constexpr unsigned kLeastTop = 72, kMostTop = 190;

    unsigned factors[kScaleWords], top;
    unsigned far; // the top bit of a byte is set unless all that is in range

    // of_zeros: bytes of ones for scales that do not count, as their blocks are of zeros.
    template <int Words>
    MX_MEMBER Relative(const unsigned (&scales)[Words], const unsigned (&of_zeros)[Words]) {
        unsigned counted[Words];
#pragma unroll
        for (int i = 0; i < Words; ++i)
            counted[i] = scales[i] & ~of_zeros[i];
        top = __reduce_max_sync(0xffffffff, largest_byte(counted));
        const unsigned above = top - kLeastTop;
        far = above | (above + (127 - (kMostTop - kLeastTop)));
#pragma unroll
        for (int i = 0; i < Words; ++i) {
            const unsigned below = (top * 0x01010101 - counted[i]) & ~of_zeros[i];
            factors[i] = 4 * (0x01010101 * kF16Scales) - 4 * below;
            far |= below | (below + 0x01010101 * (128 - kF16Scales));
        }
    }
    // 2^(top - 127), over the 2^7 that factors have.
    MX_MEMBER float scale() const { return bits_to_float((top - 7) << 23); }
};

// The factor of the block that a lane has in a step, as both fp16 of a word.
MX_DEVICE unsigned factor_of(unsigned factors, int lane, int s) {
    return __byte_perm(factors, 0, 0x0404 + 0x1010 * (lane % 4 / 2 + 2 * s));
}

// What mma takes of x and of a tile of w in a step: 16 bytes of each of a lane's rows, in fp16.
using XWords = unsigned[kTokenTiles][4][2];
using TileWords = unsigned[kTileHalves][4][2];

// Which scales of a lane's rows are of blocks of zeros, as bytes of ones.
struct Zeros {
    unsigned of_w[kScaleWords] = {}, of_x[1] = {};
};

// Made of x and of scales before the weights are there.
struct Ready {
    XWords x[kSteps];
    unsigned w_factors[kHalves], x_factors[kTokenTiles];
    float scale;

    MX_MEMBER void expand_x(const X& taken, int s, int lane) {
#pragma unroll
        for (int i = 0; i < kTokenTiles; ++i) {
            const unsigned factor = factor_of(x_factors[i], lane, s);
#pragma unroll
            for (int j = 0; j < 4; ++j)
                e4m3x4_to_f16_times(taken.payload[i][s][j], factor, x[s][i][j][0], x[s][i][j][1]);
        }
    }
    // Returns whether scales are far from each other, or from 1.
    MX_MEMBER bool make(const X& taken, const Weights& weights, const Zeros& zeros, int lane) {
        const unsigned x_scales[1] = {taken.scales};
        const Relative x(x_scales, zeros.of_x);
#pragma unroll
        for (int i = 0; i < kTokenTiles; ++i)
            x_factors[i] = of_lane(8 * i + lane / 4, x.factors[0]);
        if constexpr (!kLateX)
#pragma unroll
            for (int s = 0; s < kSteps; ++s)
                expand_x(taken, s, lane);
        const Relative w(weights.scales, zeros.of_w);
#pragma unroll
        for (int h = 0; h < kHalves; ++h)
            w_factors[h] = of_lane(h % 4 * 8 + lane / 4, w.factors[h / 4]);
        scale = x.scale() * w.scale();
        return any_far(x.far | w.far);
    }
};

MX_DEVICE void add_tile(float (&products)[4], const TileWords& w, const XWords& x) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
        if constexpr (kXIsA)
            mma(products, x[0][j][0], x[1][j][0], x[0][j][1], x[1][j][1], w[0][j][0], w[0][j][1]);
        else
            mma(products, w[0][j][0], w[1][j][0], w[0][j][1], w[1][j][1], x[0][j][0], x[0][j][1]);
}

// The number, among a tile's products, of sum i of half h.
MX_DEVICE float product_of(const float (&products)[4], int h, int i) {
    return products[h % kTileHalves * 2 + i];
}

// Adds to products those of a tile of w in a step.
template <class RefillW>
MX_DEVICE void add_step(float (&products)[4], const Chunk& chunk, const Ready& ready, int tile,
                        int s, int lane, RefillW refill_w) {
    TileWords words = {};
#pragma unroll
    for (int h = kTileHalves * tile; h < kHalves && h < kTileHalves * (tile + 1); ++h) {
        u32x4 w = chunk.w.payload[h][s];
        unlike_the_other_way(w);
        const unsigned factor = factor_of(ready.w_factors[h], lane, s);
#pragma unroll
        for (int j = 0; j < 4; ++j)
            e4m3x4_to_f16_times(w[j], factor, words[h % kTileHalves][j][0],
                                words[h % kTileHalves][j][1]);
        refill_w(h, s);
    }
    add_tile(products, words, ready.x[s]);
}

MX_DEVICE void add_scaled_products(Sums& sums, const float (&products)[4], float scale, int tile) {
#pragma unroll
    for (int h = kTileHalves * tile; h < kHalves && h < kTileHalves * (tile + 1); ++h)
#pragma unroll
        for (int i = 0; i < kLaneSums; ++i)
            sums[h][i] = mx::fma(product_of(products, h, i), scale, sums[h][i]);
}

template <class RefillW, class RefillX>
MX_DEVICE void add_products(Sums& sums, const Chunk& chunk, Ready& ready, int lane,
                            RefillW refill_w, RefillX refill_x) {
    if constexpr (kLateX) {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            ready.expand_x(chunk.x, s, lane);
            refill_x(s);
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                float products[4] = {};
                add_step(products, chunk, ready, tile, s, lane, refill_w);
                add_scaled_products(sums, products, ready.scale, tile);
            }
        }
    } else {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            float products[4] = {};
#pragma unroll
            for (int s = 0; s < kSteps; ++s)
                add_step(products, chunk, ready, tile, s, lane, refill_w);
            add_scaled_products(sums, products, ready.scale, tile);
        }
    }
}

// Where scales leave fp16's range, those of blocks of zeros, which may be anything, are left out,
// and other chunks computed block by block, times both scales in turn (common/scale.h), which is
// exact whatever they are.

// Four lanes have 16 bytes each of both of a row's blocks in a step. Adds, to what a lane that has
// the scales of row lane % 8 knows of it, which of them are of zeros.
MX_DEVICE void note_zero_blocks(unsigned& of_zeros, const u32x4& bytes, int s, bool has_scales,
                                int lane) {
    const unsigned any = (bytes[0] | bytes[1] | bytes[2] | bytes[3]) & 0x7f7f7f7f;
    const unsigned zero = lanes_where(any == 0) >> 4 * (lane % 8);
    const unsigned blocks = ((zero & 3) == 3 ? 0xffu : 0) | ((zero & 12) == 12 ? 0xff00u : 0);
    if (has_scales)
        of_zeros |= blocks << 16 * s;
}

// Blocks of zeros, but for those whose scale is NaN.
MX_DEVICE Zeros zero_blocks(const X& x, const Weights& w, int lane) {
    Zeros zeros;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int i = 0; i < kTokenTiles; ++i)
            note_zero_blocks(zeros.of_x[0], x.payload[i][s], s, lane / 8 % kTokenTiles == i, lane);
#pragma unroll
        for (int h = 0; h < kHalves; ++h)
            note_zero_blocks(zeros.of_w[h / 4], w.payload[h][s], s, lane / 8 == h % 4, lane);
    }
    zeros.of_x[0] &= ~__vcmpeq4(x.scales, ~0u);
#pragma unroll
    for (int i = 0; i < kScaleWords; ++i)
        zeros.of_w[i] = kLanes * i + lane < 8 * kHalves
                            ? zeros.of_w[i] & ~__vcmpeq4(w.scales[i], ~0u)
                            : ~0u; // of another lane's row, the last
    return zeros;
}

// True if the chunk is far.
MX_DEVICE bool make_ready(Ready& ready, Chunk& chunk, const Here& here) {
    const auto make = [&](auto zeros_of) {
        const X x = here.x.take(chunk, here.chunk, here.lane);
        return ready.make(x, chunk.w, zeros_of(x), here.lane);
    };
    bool far = make([](const X&) { return Zeros{}; });
    if (far) {
        // Kept until here, x would take registers.
        here.x.load_payload(chunk, here.ahead, here.chunk);
        far = make([&](const X& x) { return zero_blocks(x, chunk.w, here.lane); });
    }
    return far;
}

// Weights are not read again, as ptxas would then ask for them after the branch.
MX_DEVICE void add_far_chunk(Sums& sums, const u32x4 (&payload)[kHalves][kSteps],
                             const Here& here) {
    const int lane = here.lane;
    Chunk chunk = {};
    here.w.load_scales<false>(chunk.w, here.ahead, here.chunk);
    here.x.load_scales<false>(chunk, here.ahead, here.chunk);
    here.x.load_payload(chunk, here.ahead, here.chunk);
    const X x = here.x.take(chunk, here.chunk, lane);
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll 1
        for (int b = 2 * s; b < 2 * s + 2; ++b) {
            const bool mine = lane % 4 / 2 == b % 2;
            XWords x_words;
            float x_scales[kLaneTokens];
#pragma unroll
            for (int i = 0; i < kTokenTiles; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    e4m3x4_to_f16(mine ? x.payload[i][s][j] : 0, x_words[i][j][0],
                                  x_words[i][j][1]);
#pragma unroll
            for (int i = 0; i < kLaneTokens; ++i)
                x_scales[i] = e8m0_to_f32(byte_of(of_lane(token_at(lane, i), x.scales), b));
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                const int first = kTileHalves * tile;
                TileWords words = {};
#pragma unroll
                for (int h = first; h < kHalves && h < first + kTileHalves; ++h)
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        e4m3x4_to_f16(mine ? payload[h][s][j] : 0, words[h - first][j][0],
                                      words[h - first][j][1]);
                float products[4] = {};
                add_tile(products, words, x_words);
#pragma unroll
                for (int h = first; h < kHalves && h < first + kTileHalves; ++h)
#pragma unroll
                    for (int i = 0; i < kLaneSums; ++i) {
                        const unsigned scales = chunk.w.scales_of(h, row_of(lane, i));
                        sums[h][i] =
                            add_scaled(sums[h][i], product_of(products, h, i),
                                       e8m0_split(byte_of(scales, b)), x_scales[i / kLaneRows]);
                    }
            }
        }
}

// refill_w(h, s) is called when the weights of half h, step s are no longer needed, refill_x(s) if
// x is expanded late and that of a step is not.
template <class RefillW, class RefillX>
MX_DEVICE void add_chunk(Sums& sums, const Chunk& chunk, Ready& ready, bool far, const Here& here,
                         RefillW refill_w, RefillX refill_x) {
    if (!far) {
        add_products(sums, chunk, ready, here.lane, refill_w, refill_x);
        return;
    }
    add_far_chunk(sums, chunk.w.payload, here);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
        refill_x(s);
#pragma unroll
        for (int h = 0; h < kHalves; ++h)
            refill_w(h, s);
    }
}

#endif

using Out = DType<MX_OUT>;

struct alignas(4 * kLaneSums) LaneSums { // of a half
    float sums[kLaneSums];
};
// Where a cluster has more workgroups than halves, sums of a part of a half's lanes are owned: then
// more of them add, and other lanes add other parts.
constexpr int kUnits = 4 * kHalves <= kSplit ? 4 : 2 * kHalves <= kSplit ? 2 : 1; // of a half
constexpr int kUnitLanes = kLanes / kUnits;
constexpr int kAllUnits = kHalves * kUnits;
constexpr int kOwned = (kAllUnits + kSplit - 1) / kSplit;
constexpr int kSumBytes = kUnitLanes * sizeof(LaneSums); // of a unit, from one part

// Adds the products of a wave's chunks, from `mine` on, Unroll of them in a round.
template <bool Aligned, int Unroll>
MX_DEVICE void add_chunks(Sums& sums, WeightsReader& w, XReader& x, int mine, int end, int lane) {
    const auto let_next_begin = [] { // what is stored later comes after this as well
        launch_dependents();
        wait_for_grid_ahead();
    };
    if (kOverlaps && !kEven && mine >= end)
        let_next_begin();
    constexpr int a_round = Unroll * kWaves;
    constexpr int rounds = kChunks / (a_round * kSplit); // if kEven
    // One or two are code of their own each, at known distances from where the readers stay.
    constexpr bool in_line = Aligned && kEven && rounds <= 2;
#pragma unroll(in_line ? rounds : 1)
    for (int r = 0; kEven ? r < rounds : mine + r * a_round < end; ++r) {
        const int first = mine + r * a_round, begin = in_line ? r * a_round : 0;
        Chunk loaded[Unroll] = {};
        const auto each = [&](auto do_one) {
#pragma unroll
            for (int u = 0; u < Unroll; ++u)
                if (u == 0 || kEven || first + u * kWaves < end)
                    do_one(loaded[u], begin + u * kWaves, first + u * kWaves);
        };
        const auto ask_w = [&] {
            each([&](Chunk& to, int ahead, int c) { w.load_scales<Aligned>(to.w, ahead, c); });
            each([&](Chunk& to, int ahead, int c) { w.load_payload(to.w, ahead, c); });
        };
        const auto ask_x = [&] {
            each([&](Chunk& to, int ahead, int c) { x.load_payload(to, ahead, c); });
            each([&](Chunk& to, int ahead, int c) { x.load_scales<Aligned>(to, ahead, c); });
        };
        if constexpr (kOverlaps) {
            ask_w();
            if (r == 0)
                let_next_begin();
            ask_x();
        } else {
            ask_x();
            ask_w();
        }
        each([&](Chunk& chunk, int ahead, int c) {
            Ready ready;
            const Here here{w, x, ahead, c, lane};
            const bool far = make_ready(ready, chunk, here);
            add_chunk(sums, chunk, ready, far, here, [](int, int) {}, [](int) {});
        });
        if constexpr (!in_line) {
            w.advance(a_round);
            x.advance(a_round);
        }
    }
}

// The same of one chunk at a time, in the same order: the next is asked for while this one is used,
// piece by piece, as its registers come free.
template <bool Aligned>
MX_DEVICE void add_chunks_in_turn(Sums& sums, WeightsReader& w, XReader& x, int mine, int end,
                                  int lane) {
    Chunk chunk = {};
    const auto ask_x = [&](int c) {
        x.load_payload(chunk, 0, c);
        x.load_scales<Aligned>(chunk, 0, c);
    };
    const auto exists = [&](int r) { return kEven ? r < kRounds : mine + r * kWaves < end; };
    if (!kOverlaps && exists(0))
        ask_x(mine);
    if (exists(0)) {
        w.load_scales<Aligned>(chunk.w, 0, mine);
        w.load_payload(chunk.w, 0, mine);
    }
    if constexpr (kOverlaps) { // what is stored later comes after this as well
        launch_dependents();
        wait_for_grid_ahead();
        if (exists(0))
            ask_x(mine);
    }
#pragma unroll 1
    for (int r = 0; exists(r); ++r) {
        const int c = mine + r * kWaves, next = c + kWaves;
        const bool more = exists(r + 1);
        w.advance(kWaves);
        x.advance(kWaves);
        Ready ready;
        const Here here{w, x, -kWaves, c, lane};
        const bool far = make_ready(ready, chunk, here);
        if (more) {
            if constexpr (!kLateX)
                x.load_payload(chunk, 0, next);
            x.load_scales<Aligned>(chunk, 0, next);
            w.load_scales<Aligned>(chunk.w, 0, next);
        }
        const auto refill_x = [&](int s) {
            if constexpr (kLateX) {
                if (more)
                    x.load_step(chunk, s, 0, next);
            }
        };
        const auto refill_w = [&](int h, int s) {
            if (more)
                w.load_step(chunk.w, h, s, 0, next);
            if (MX_TOKENS <= 8 || h == kHalves - 1)
                keep_loads_in_order(w.payload[0]);
        };
        add_chunk(sums, chunk, ready, far, here, refill_w, refill_x);
    }
}

MX_DEVICE void store_sums_async(unsigned to, const float (&v)[kLaneSums], unsigned barrier) {
    if constexpr (kLaneSums == 1)
        store_async(to, float_to_bits(v[0]), barrier);
    else if constexpr (kLaneSums == 2)
        store_async(to, v[0], v[1], barrier);
    else
        store_async(to, float4{v[0], v[1], v[2], v[3]}, barrier);
}

// Sums of a lane to the workgroups that own its units.
MX_DEVICE void send(const Sums& sums, unsigned inbox, unsigned full, int part, unsigned lane) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
        const unsigned unit = h * kUnits + lane / kUnitLanes;
        const unsigned to = inbox + (unit / kSplit * kParts + part) * kSumBytes +
                            lane % kUnitLanes * sizeof(LaneSums);
        store_sums_async(address_in_cluster(to, unit % kSplit), sums[h],
                         address_in_cluster(full, unit % kSplit));
    }
}

extern "C" __global__ void MX_CLUSTER_DIMS __launch_bounds__(kThreads, kResident)
    aiter_mx_linear_mma_registers(const unsigned char* xq, const unsigned char* xs,
                                  const unsigned char* wq, const unsigned char* ws,
                                  const void* bias, Out* y, long M, long N, long K, int bias_kind) {
    const int lane = threadIdx.x % kLanes;
    // In 31 bits each, K known to the compiler, as the first loads wait for all of this.
    const int rank = blockIdx.x % kSplit;
    const int begin = rank * (kChunks / kSplit) + min(rank, kChunks % kSplit);
    const int end = begin + kChunks / kSplit + (rank < kChunks % kSplit);
    const unsigned rows = static_cast<unsigned>(N), own_row = blockIdx.x / kSplit * kRows;
    const unsigned first_row = kRowsFit == 1 ? min(own_row, rows - kRows) : own_row;
    const unsigned last_row = min(first_row + kRows, kRowsFit ? first_row + kRows : rows) - 1;
    WeightsReader w;
    XReader x;
    const unsigned from = begin + threadIdx.x / kLanes;
    x.open(xq, xs, static_cast<unsigned>(M), from, lane);
    w.open(wq, ws, place_of(lane % 4), first_row, last_row, from, lane);
    const int wave = warp_uniform(threadIdx.x / kLanes);
    __shared__ LaneSums sums_of[kOwned][kParts][kUnitLanes];
    __shared__ unsigned long long barrier; // of what the cluster sends
    const int owned = (kAllUnits - rank + kSplit - 1) / kSplit;
    if constexpr (kSplit > 1) {
        if (threadIdx.x == kThreads - kLanes) {
            barrier_init(shared_address(&barrier), 1);
            fence_barrier_init();
            barrier_arrive_expect(shared_address(&barrier), owned * kParts * kSumBytes);
        }
        __syncwarp();
        cluster_arrive_relaxed();
    }
    Sums sums = {};
    // Scales that are no words of memory are read byte by byte, with few registers.
    const auto scales = reinterpret_cast<unsigned long>(ws) | reinterpret_cast<unsigned long>(xs);
    if (kWholeChunks && scales % kBlocks == 0)
        if constexpr (kInTurn)
            add_chunks_in_turn<true>(sums, w, x, begin + wave, end, lane);
        else
            add_chunks<true, kUnroll>(sums, w, x, begin + wave, end, lane);
    else
        add_chunks<false, 1>(sums, w, x, begin + wave, end, lane);

    if constexpr (kSplit > 1) {
        cluster_wait(); // all of the cluster have started, and set up their barriers
        send(sums, shared_address(sums_of), shared_address(&barrier), rank * kWaves + wave, lane);
        cluster_arrive_relaxed();
    } else {
#pragma unroll
        for (int h = 0; h < kHalves; ++h)
#pragma unroll
            for (int i = 0; i < kLaneSums; ++i)
                sums_of[h][wave][lane].sums[i] = sums[h][i];
        group_barrier();
    }
#pragma unroll 1
    for (int own = wave; own < owned; own += kWaves) {
        const int unit = own * kSplit + rank;
        const int whose = unit % kUnits * kUnitLanes + lane % kUnitLanes; // lane of a half
        Out* to[kLaneSums];
        bool exists[kLaneSums];
        LaneSums added{};
#pragma unroll
        for (int i = 0; i < kLaneSums; ++i) {
            const int m = token_of(whose, i);
            const unsigned n = first_row + unit / kUnits * 8 + row_of(whose, i);
            to[i] = y + (static_cast<unsigned long>(m) * static_cast<unsigned>(N) + n);
            exists[i] = lane < kUnitLanes && m < M && n <= last_row;
            // Rows of another workgroup are its own to store: scales of a wave's other rows may
            // decide how sums round.
            if (kRowsFit == 1)
                exists[i] = exists[i] && n >= own_row;
            if (exists[i])
                added.sums[i] = load_bias(bias, bias_kind, n);
        }
        if constexpr (kSplit > 1)
            barrier_wait(shared_address(&barrier), 0);
        LaneSums sum{};
#pragma unroll
        for (int part = 0; part < kParts; part += kUnits)
            if (kParts % kUnits == 0 || part + lane / kUnitLanes < kParts)
#pragma unroll
                for (int i = 0; i < kLaneSums; ++i)
                    sum.sums[i] +=
                        sums_of[own][part + lane / kUnitLanes][lane % kUnitLanes].sums[i];
#pragma unroll
        for (int i = 0; i < kLaneSums; ++i) {
            if constexpr (kUnits > 2)
                sum.sums[i] += across<16>(sum.sums[i]);
            if constexpr (kUnits > 1)
                sum.sums[i] += across<kUnitLanes>(sum.sums[i]);
        }
#pragma unroll
        for (int i = 0; i < kLaneSums; ++i)
            if (exists[i])
                store(to[i], sum.sums[i] + added.sums[i]);
    }
    if constexpr (kSplit > 1)
        cluster_wait(); // no one ends while others may still send to it
}
