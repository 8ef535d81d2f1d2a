// Linear for few rows of x, or few weights, on Hopper, for bf16 results: y = dequantised(x) *
// dequantised(w)^T + bias.
//
//   xq [M, K], wq [N, K]        e4m3 payload
//   xs [M, K/32], ws [N, K/32]  e8m0 scale of each 32 consecutive k
//                               or xq is bf16 or fp16, there is no xs, and x is quantised here
//   y  [M, N]                   bf16
//   bias [N]                    fp32, bf16, fp16 or none
//
// A cluster takes kRowsW rows of w, its kSplit workgroups a part of K each, in chunks of 128 k.
// Where K ends within the last one, TMA has zeros for what is missing, which any scale does for.
// Those of x and of w come to shared memory together, so that products begin when the first of both
// are there. Most often each chunk has a stage of its own, and nothing waits for room.
//
//   producers, two threads: start TMA copies, one of w, the other of x, kDepth chunks ahead of what
//              has come
//   consumers: bring scales; then have blocks of 32 k multiplied from shared memory as they are,
//              add the products times their scales to sums in fp32, and send their sums to the
//              workgroup that owns them
//
// The matrix unit makes the scales too: the product of a column of x's scales and a row of w's,
// over bf16, with one k that is not zero, lies in registers as the block's products do. So a
// product takes one instruction. Scales so far from 1 that this is not exact, of rows of x or of w,
// have the sums of these computed again without it.
//
// wgmma's A, of 64 rows, is x where kXIsA: then its four warps have as much work each, whatever
// the rows of w, and more rows of x than 64 are for two warpgroups and more. Sums are added over
// the warpgroups and the cluster in a fixed order.
//
// Where kQuantises, the consumers bring x to shared memory themselves, all of the workgroup's part
// of K, before they multiply: each cluster does it anew, while its first weights are on their way.
//
// Where kTiled, a cluster takes kRowsM of the rows of x, not all; the grid's y counts them.

#define MX_CLUSTER MX_SPLIT

#include "common/epilogue.h"
#include "common/scale.h"
#include "common/target.h"
#include "fused.h"
#include "rows_sm90.h"
#include "sm90/bf16_factors.h"
#include "sm90/cluster.h"
#include "sm90/exact.h"
#include "sm90/memory.h"
#include "sm90/tma.h"
#include "sm90/wgmma.h"

using namespace mx;

template <int I>
struct Int {
    static constexpr int value = I;
};

constexpr bool kWhole = MX_WHOLE; // K is a multiple of kChunk

// Those of a chunk's scales that exist, and 1 for the others.
MX_DEVICE unsigned with_units(unsigned scales, int exist) {
    if (kWhole || exist >= kBlocks)
        return scales;
    const unsigned mask = (1u << 8 * max(exist, 0)) - 1;
    return (scales & mask) | (kUnitScales & ~mask);
}

// The scales of a chunk, which may be at any address.
MX_DEVICE unsigned load_scale_word(const unsigned char* p, int exist) {
    if (kWhole && reinterpret_cast<unsigned long>(p) % 4 == 0)
        return load_word(p);
    unsigned v = 0;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
        if (kWhole || i < exist)
            v |= load_byte(p + i) << (8 * i);
    return with_units(v, exist);
}

// The first bytes of an aligned word, as many as there are; no one waits for them unless they are
// three.
MX_DEVICE unsigned load_some(const unsigned char* p, long bytes) {
    if (bytes > 3)
        return load_word(p);
    if (bytes == 3)
        return load_two(p) | load_byte(p + 2) << 16;
    return bytes == 2 ? load_two(p) : bytes == 1 ? load_byte(p) : 0;
}

// Waits for a stage while wgmmas are under way. ptxas lets these run on only past a loop that does
// not go on for ever.
MX_DEVICE void wait_for_stage(unsigned barrier, unsigned parity) {
#pragma unroll 1
    for (int i = 0; i < 1 << 30; ++i) {
        unsigned done;
        asm volatile("{\n"
                     ".reg .pred done;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, done;\n"
                     "}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
        if (done)
            return;
    }
    __trap();
}

constexpr bool kXIsA = MX_X_IS_A;         // wgmma's A is x, its B is w; else the other way
constexpr bool kTiled = MX_TILED;         // whether there may be more rows of x
constexpr int kRowsM = MX_ROWS_M;         // of x, a multiple of 8
constexpr int kRowsW = MX_ROWS_W;         // of w in a workgroup, a multiple of 8
constexpr int kRowGroups = MX_ROW_GROUPS; // warpgroups side by side along w, and along x
constexpr int kKGroups = MX_K_GROUPS;     // warpgroups that take turns along K
constexpr int kSplit = MX_SPLIT;          // workgroups of a cluster, which share K
constexpr bool kQuantises = !kIsQuantised<MX_X>;
constexpr int kPerSm = MX_PER_SM;             // workgroups that an SM is to hold
constexpr int kChunks = MX_CHUNKS;            // of the largest part of K
constexpr int kStages = MX_STAGES;            // of them, that there is room for
constexpr int kDepth = MX_DEPTH;              // of them, that are under way at a time
constexpr bool kEven = MX_EVEN;               // whether all parts of K are as large
constexpr int kScaleChunks = MX_SCALE_CHUNKS; // whose scales of a row are loaded at once
using Out = DType<MX_OUT>;

constexpr int kGroups = kRowGroups * kKGroups;
constexpr int kWarps = 4 * kGroups; // that multiply
constexpr int kConsumers = kWarps * kLanes;
// Two warps copy, a thread each. Where an SM holds one workgroup they are of one more warpgroup,
// and what that leaves of its registers goes to the others: all of those that a launch begins with
// are a workgroup's.
constexpr bool kDealsRegisters = kPerSm == 1 && kGroups > 1;
constexpr int kThreads = kConsumers + (kPerSm == 1 ? 4 : 2) * kLanes;
constexpr int kSet = kConsumers + kLanes; // of the threads, that set out together
constexpr int kCopyRegisters = 24;        // of a lane
// Each quarter of an SM has 512 for a lane of all its warps, which are given 8 at a time.
constexpr int kMostRegisters = kPerSm > 1     ? 512 / ((kThreads / kLanes * kPerSm + 3) / 4) / 8 * 8
                               : kGroups == 1 ? 248
                               : kGroups == 2 ? 240
                               : kGroups == 3 ? 160
                                              : 112;
constexpr int kParts = kSplit * kKGroups; // whose sums are added

constexpr int kGroupRows = 64; // of A, of a warpgroup
constexpr int kRowsA = kXIsA ? kRowsM : kRowsW, kRowsB = kXIsA ? kRowsW : kRowsM;
constexpr int kGroupsA = kXIsA ? (kRowsM + kGroupRows - 1) / kGroupRows : kRowGroups; // along A
constexpr int kGroupsB = kRowGroups / kGroupsA;
constexpr int kColumns = kRowsB / kGroupsB; // of a wgmma
constexpr int kTilesB = kColumns / 8;
constexpr int kValues = kColumns / 2; // of a block's products, of a thread
// Blocks whose products and scales are in registers: some are multiplied while another is added.
constexpr bool fits(int buffers) {
    return (2 * buffers + 1) * kValues + (buffers > 2 ? 30 + 2 * buffers : 32) <= kMostRegisters;
}
constexpr int kBuffers = fits(4) ? 4 : fits(3) ? 3 : fits(2) ? 2 : 1;
// True if scales are multiplied before their chunk is there, where that is faster.
constexpr bool kScalesFirst = kBuffers > 2 && kKGroups > 2;
static_assert(kRowsM % 8 == 0 && kRowsW % 8 == 0 && kColumns % 8 == 0, "8 rows are a unit");
static_assert(kGroupsA * kGroupsB == kRowGroups && kColumns * kGroupsB == kRowsB,
              "each warpgroup has as many rows of B");

// Tiles of sums: 16 rows of A by 8 of B.
constexpr int kActive = (kRowsA + 15) / 16; // sixteens of rows of A, of a warp each
constexpr int kTiles = kActive * (kRowsB / 8);
constexpr int kOwnedTiles = (kTiles + kSplit - 1) / kSplit;
// With two for each part, or more, a part's warp keeps those from first_kept(part) on of its own
// and gets the others' for these (Kept). Else they are dealt out to the
// workgroups.
constexpr bool kKept = kParts > 1 && kTilesB >= 2 * kParts;
constexpr int kMostKept = (kTilesB + kParts - 1) / kParts;
constexpr int kRowWarps = kActive * kGroupsB; // of a part, with rows
MX_DEVICE constexpr int first_kept(int part) { return (part * kTilesB + kParts - 1) / kParts; }
constexpr int kBoxes = kKept         ? kKGroups * kRowWarps * kMostKept * (kParts - 1)
                       : kParts == 1 ? 0
                                     : kOwnedTiles * kParts;
constexpr int kInboxBytes = kBoxes * kTileBytes;
// Of a warp's results where there is one part, where the stages were.
constexpr int kStagingBytes = kXIsA ? (kTilesB | 1) * 256 : 0;
MX_DEVICE constexpr int boxes_of(int part) { // of a workgroup, into which sums come
    return kKept ? (first_kept((part + 1) * kKGroups) - first_kept(part * kKGroups)) * kRowWarps *
                       (kParts - 1)
                 : (kTiles - part + kSplit - 1) / kSplit * kParts;
}

constexpr int kXBytes = kRowsM * kChunk, kWBytes = kRowsW * kChunk; // of a chunk
constexpr int kStageBytes = kXBytes + kWBytes;
// Scales are bf16, which all but the ends of e8m0 are in, and 8 bytes of a row in a chunk. Of B
// those of two chunks are side by side: 8 k of wgmma's. Neighbouring lanes store neighbouring
// chunks of a row: with these pitches, in banks of their own.
constexpr int kFactorBytes = 4 * 2, kPairs = (kChunks + 1) / 2;
constexpr int kPitchA = (kRowsA + 1) * kFactorBytes;     // from a chunk to the next
constexpr int kPitchB = (kRowsB + 1) * 2 * kFactorBytes; // from two chunks to the next
constexpr int kScalesA = kStages * kStageBytes;
constexpr int kScalesB = kScalesA + (kChunks * kPitchA + 15) / 16 * 16;
constexpr int kInbox = kScalesB + kPairs * kPitchB;
constexpr int kBarriers = kInbox + kInboxBytes;
static_assert(kParts > 1 || kActive * kGroupsB * kStagingBytes <= kStages * kStageBytes);
constexpr bool kRefills = kStages < kChunks;
constexpr int kRings = kRefills ? 2 : 1; // of barriers
constexpr int kEnd = kBarriers + (kRings * kStages + 2) * 8;
static_assert(!kQuantises || !(kRefills || kTiled), "x stays in its stages");
static_assert(!kRefills || kStages % kKGroups == 0,
              "a stage is one warpgroup's, as are its phases");
static_assert(kEnd + 1024 <= MX_SHARED_BYTES, "the host lays shared memory out differently: "
                                              "aiter_mx/kernels/linear/wgmma_fp8_sm90.py");

using Sums = float[kValues];

// Scales on their way from memory to their places in shared memory: those of a few chunks of a row
// are an item, w's of the first threads, x's of the next. They are a vector where those of all rows
// begin at a multiple of it, else words. Where K ends within a chunk rows begin at any address:
// then the first and the last word have some of others.
struct ScaleCopies {
    static constexpr bool kVectors = kScaleChunks > 1;
    static constexpr int kAtOnce = kVectors ? kScaleChunks : 4;
    static constexpr int kWords = kWhole ? kAtOnce : kAtOnce + 1; // of an item
    // Of B those of a whole number of pairs of chunks: there may be one chunk more than A has.
    static constexpr int kOfRow = (2 * kPairs + kAtOnce - 1) / kAtOnce;
    static constexpr int kItemsW = kRowsW * kOfRow, kItemsX = kRowsM * kOfRow;
    static constexpr int kFirstX = (kItemsW + kLanes - 1) / kLanes * kLanes;
    static constexpr int kOwn = (kFirstX + kItemsX + kConsumers - 1) / kConsumers; // of a thread
    static_assert(!kVectors || (kWhole && kEven && kChunks % kAtOnce == 0), "all are whole");

    struct Item {
        bool of_x, exists;
        int row, chunk;
    };
    unsigned words[kOwn][kWords];
    const unsigned char* from[kOwn]; // null where there is nothing to load
    bool aligned;                    // to what is loaded at once, or no word begins before a tensor
    int left;                        // blocks, from the first chunk on

    MX_MEMBER static Item item(int i) {
        const unsigned number = threadIdx.x + i * kConsumers;
        const bool of_x = number >= kFirstX;
        const unsigned own = number - (of_x ? kFirstX : 0);
        return {of_x, own < (of_x ? kItemsX : kItemsW), static_cast<int>(own / kOfRow),
                static_cast<int>(own % kOfRow * kAtOnce)};
    }
    // Rows beyond the last one get its scales; chunks that there are not have none, zeros.
    MX_MEMBER void ask(const unsigned char* xs, const unsigned char* ws, long first_row, int M,
                       long N, long K, int first_chunk, int chunks, bool overlaps) {
        const unsigned blocks = static_cast<unsigned>(K) / kBlock;
        left = min(static_cast<int>(blocks) - first_chunk * kBlocks, chunks * kBlocks);
        aligned = !kWhole ||
                  ((reinterpret_cast<unsigned long>(xs) | reinterpret_cast<unsigned long>(ws)) %
                   (kVectors ? 4 * kAtOnce : 4)) == 0;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const Item own = item(i);
            from[i] = nullptr;
#pragma unroll
            for (int j = 0; j < kWords; ++j)
                words[i][j] = 0;
            if (!own.exists || (!kVectors && own.chunk >= chunks) || (kQuantises && own.of_x))
                continue;
            if (own.of_x && overlaps)
                wait_for_grid_ahead();
            const int last = own.of_x ? M - 1 : static_cast<int>(N - 1 - first_row);
            from[i] = (own.of_x ? xs : ws + first_row * blocks) +
                      static_cast<unsigned long>(min(own.row, last)) * blocks +
                      (first_chunk + own.chunk) * kBlocks;
            if constexpr (kVectors) {
                if (aligned)
                    load_vector(words[i], from[i]);
            } else if constexpr (kWhole) {
#pragma unroll
                for (int j = 0; j < kWords; ++j)
                    if (aligned && exist(own, j) > 0)
                        words[i][j] = load_word(from[i] + j * kBlocks);
            } else {
                const unsigned char* const tensor = own.of_x ? xs : ws;
                const unsigned char* const word = from[i] - offset(i);
                aligned &= word >= tensor;
                const long bytes = word < tensor ? 0 : tensor + (own.of_x ? M : N) * blocks - word;
                if (bytes >= kWords * 4) {
#pragma unroll
                    for (int j = 0; j < kWords; ++j)
                        words[i][j] = load_word(word + j * 4);
                } else {
#pragma unroll
                    for (int j = 0; j < kWords; ++j)
                        words[i][j] = load_some(word + j * 4, bytes - j * 4);
                }
            }
        }
    }
    // Asks for those at odd addresses. By then TMA copies are under way: they do not wait for code
    // that is seldom run.
    MX_MEMBER void ask_bytes() {
        if (__builtin_expect(aligned, 1))
            return;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            if (from[i] == nullptr)
                continue;
            unsigned before = 0; // words are as if they had been loaded
#pragma unroll
            for (int j = 0; j < kWords; ++j) {
                const int exists = j < kAtOnce ? exist(item(i), j) : 0;
                const unsigned scales =
                    exists > 0 ? load_scale_word(from[i] + j * kBlocks, exists) : 0;
                words[i][j] = kWhole ? scales : __funnelshift_l(before, scales, 8 * offset(i));
                before = scales;
            }
        }
    }
    // Returns whether any is near the ends of e8m0.
    MX_MEMBER bool put(unsigned shared, int chunks) const {
        unsigned far = 0;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const Item own = item(i);
            const bool of_a = own.of_x == kXIsA;
            if (!own.exists || (kQuantises && own.of_x))
                continue;
            const unsigned place =
                of_a ? kScalesA + own.chunk * kPitchA + own.row * kFactorBytes
                     : kScalesB + own.chunk / 2 * kPitchB + own.row * 2 * kFactorBytes;
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                if (!kVectors && own.chunk + j >= (of_a ? kChunks : 2 * kPairs))
                    break;
                const unsigned word = of_chunk(i, j);
                far |= kVectors || own.chunk + j < chunks ? far_scales(word) : 0;
                const unsigned further =
                    of_a ? j * kPitchA : j / 2 * kPitchB + j % 2 * kFactorBytes;
                store_shared_8(shared + place + further, e8m0x2_to_bf16(word, 0),
                               e8m0x2_to_bf16(word, 1));
            }
        }
        return far != 0;
    }

  private:
    // Of an item's address in its first word.
    MX_MEMBER unsigned offset(int i) const { return reinterpret_cast<unsigned long>(from[i]) & 3; }
    // Blocks from one of an item's chunks on.
    MX_MEMBER int exist(const Item& own, int j) const { return left - (own.chunk + j) * kBlocks; }
    MX_MEMBER unsigned of_chunk(int i, int j) const {
        if constexpr (kWhole)
            return words[i][j];
        else
            return with_units(__funnelshift_r(words[i][j], words[i][j + 1], 8 * offset(i)),
                              exist(item(i), j));
    }
    MX_MEMBER static void load_vector(unsigned (&to)[kWords], const unsigned char* from) {
        if constexpr (kAtOnce == 4)
            asm volatile("ld.relaxed.cta.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                         : "l"(from));
        else
            asm volatile("ld.relaxed.cta.global.v2.u32 {%0, %1}, [%2];"
                         : "=r"(to[0]), "=r"(to[1])
                         : "l"(from));
    }
};

// Brings x to its stages and its scales to their places. Returns whether any is near the ends of
// e8m0. Rows and chunks that there are not are zeros. All loads are under way at once: further ones
// would wait behind those of weights.
MX_DEVICE bool quantise_x(const unsigned char* x, int M, long K, unsigned shared, int first_chunk,
                          int chunks) {
    constexpr int halves = kChunk / 16; // of a chunk of a row
    constexpr int of_row = (kXIsA ? kChunks : 2 * kPairs) * halves;
    constexpr int rounds = (kRowsM * of_row + kConsumers - 1) / kConsumers;
    HalfBlock<MX_X> loaded[rounds] = {};
    bool exists[rounds];
    const auto number = [](int i) { return static_cast<int>(threadIdx.x) + i * kConsumers; };
#pragma unroll
    for (int i = 0; i < rounds; ++i) {
        const int row = number(i) / of_row, half = number(i) % of_row;
        const long k = static_cast<long>(first_chunk) * kChunk + half * 16;
        exists[i] = row < M && half / halves < chunks && (kWhole || k < K);
        const unsigned char* const from = x + 2 * (row * K + k);
        if (exists[i])
            loaded[i] = {load(from), load(from + 16)};
    }
    unsigned far = 0;
#pragma unroll
    for (int i = 0; i < rounds; ++i) {
        const QuantisedHalf found = quantised(loaded[i]); // by all lanes
        const int row = number(i) / of_row, half = number(i) % of_row;
        const int chunk = half / halves, piece = half % halves;
        const unsigned scale = exists[i] ? found.scale : kUnitScales & 0xff;
        far |= far_scales(scale | kUnitScales << 8);
        if (row >= kRowsM)
            continue;
        if (chunk < kChunks)
            store_shared_16(shared + chunk * kStageBytes + (kXIsA ? 0 : kWBytes) + row * kChunk +
                                (piece ^ row % 8) * 16,
                            found.payload.words);
        // Those of the second chunk of a pair are there even where it is not.
        const unsigned place = kXIsA ? kScalesA + chunk * kPitchA + row * kFactorBytes
                                     : kScalesB + chunk / 2 * kPitchB + row * 2 * kFactorBytes +
                                           chunk % 2 * kFactorBytes;
        if (piece % 2 == 0)
            store_shared_2(shared + place + piece, scale << 7);
    }
    return far != 0;
}

// The row and column of a lane's value in a warp's tile of sums.
struct Place {
    int row_warp, column_group; // sixteen of rows of A; first row of B
    int lane;

    MX_MEMBER int a(int value) const { return row_warp * 16 + lane / 4 + value / 2 % 2 * 8; }
    MX_MEMBER int b(int value) const {
        return column_group + value / 4 * 8 + lane % 4 * 2 + value % 2;
    }
    MX_MEMBER int m(int value) const { return kXIsA ? a(value) : b(value); }
    MX_MEMBER int row(int value) const { return kXIsA ? b(value) : a(value); }
};

// A lane's 16 k of a row of w, or of one of x that is yet to be quantised.
template <bool IsX>
MX_DEVICE QuantisedHalf half_of(const ScaledRow& row, long k) {
    if constexpr (IsX)
        return quantised(
            HalfBlock<MX_X>{load(row.payload + 2 * k), load(row.payload + 2 * k + 16)});
    else
        return {load(row.payload + k), load_byte(row.scales + k / kBlock)};
}
MX_DEVICE void to_f32(const u32x4& payload, f32x2 (&values)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        e4m3x4_to_f32(payload[i], values[2 * i], values[2 * i + 1]);
}

// exact_outputs_of_warp, in the same order, where x is yet to be quantised. OneIsX: whether the one
// row is of x, or the others are. Lanes past K take its end, as all quantise.
template <bool OneIsX, int Count>
MX_DEVICE void exact_outputs_of_halves(float (&sums)[Count], const ScaledRow& one,
                                       const ScaledRow (&others)[Count], long K, int lane) {
#pragma unroll
    for (int i = 0; i < Count; ++i)
        sums[i] = 0;
#pragma unroll 1
    for (long from = 0; from < K; from += kLanes * 16) {
        const long k = min(from + lane * 16, K - kBlock + lane % 2 * 16);
        const QuantisedHalf own = half_of<OneIsX>(one, k);
        f32x2 own_values[8];
        to_f32(own.payload, own_values);
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            const QuantisedHalf other = half_of<!OneIsX>(others[i], k);
            f32x2 values[8];
            to_f32(other.payload, values);
            if (from + lane * 16 < K)
                sums[i] = add_scaled(sums[i], dot(own_values, values), e8m0_split(own.scale),
                                     e8m0_to_f32(other.scale));
        }
    }
    add_up_lanes(sums);
}

// Computes the sums of rows again whose scales are so near the ends of e8m0 that they are to be
// applied one after the other. All warps share the outputs of such a row, over the workgroup's part
// of K, and hand them over where stages were. Of warpgroups that take turns along K the first one
// has them.
MX_DEVICE void sum_again(Sums& sums, const Tensors& t, const Place& place, unsigned shared,
                         long first, int first_chunk, int chunks, int warp) {
    constexpr int rows = kRowsA + kRowsB, most = kRowsA > kRowsB ? kRowsA : kRowsB;
    constexpr int at_once = kPerSm > 1 ? 1 : kMostRegisters > 160 ? 4 : 2;
    static_assert(most * 4 + rows <= kStages * kStageBytes, "they fit where stages were");
    const unsigned results = shared, flags = shared + most * 4;
    const auto exists = [&](bool of_a, int row) {
        return of_a == kXIsA ? row < t.M : row < kRowsW && first + row < t.N;
    };
    named_barrier(1, kConsumers); // all stages have been read
#pragma unroll 1
    for (int i = threadIdx.x; i < rows; i += kConsumers) {
        const bool of_a = i < kRowsA;
        const int row = of_a ? i : i - kRowsA;
        unsigned far = 0;
#pragma unroll 1
        for (int c = 0; c < chunks && exists(of_a, row); ++c) {
            const uint2 four = load_shared_8(
                shared + (of_a ? kScalesA + c * kPitchA + row * kFactorBytes
                               : kScalesB + c / 2 * kPitchB + (2 * row + c % 2) * kFactorBytes));
            far |= far_scales(four.x >> 7 | four.y << 1); // e8m0 again, in another order
        }
        store_shared_1(flags + i, far != 0);
    }
    named_barrier(1, kConsumers);
    const long k = first_chunk * static_cast<long>(kChunk);
    const long length = min(t.K - k, chunks * static_cast<long>(kChunk));
    const auto row_of = [&](bool of_a, int row) -> ScaledRow {
        const bool of_x = of_a == kXIsA;
        const long at = of_x ? min(row, t.M - 1) : min(first + row, t.N - 1);
        return {(of_x ? t.xq : t.wq) + (at * t.K + k) * (kQuantises && of_x ? 2 : 1),
                (of_x ? t.xs : t.ws) + at * t.blocks() + k / kBlock};
    };
#pragma unroll 1
    for (int i = 0; i < rows; ++i) {
        if (!load_shared_1(flags + i))
            continue;
        const bool by_a = i < kRowsA;
        const int own = by_a ? i : i - kRowsA, others = by_a ? kRowsB : kRowsA;
        const ScaledRow one = row_of(by_a, own);
#pragma unroll 1
        for (int j = warp * at_once; j < others; j += kWarps * at_once) {
            ScaledRow some[at_once];
#pragma unroll
            for (int o = 0; o < at_once; ++o)
                some[o] = row_of(!by_a, j + o);
            float found[at_once];
            if constexpr (!kQuantises)
                exact_outputs_of_warp(found, one, some, length, place.lane);
            else if (by_a == kXIsA)
                exact_outputs_of_halves<true>(found, one, some, length, place.lane);
            else
                exact_outputs_of_halves<false>(found, one, some, length, place.lane);
            if (place.lane < at_once)
                store_shared_4(results + (j + place.lane) * 4,
                               float_to_bits(one_of(found, place.lane)));
            __syncwarp();
        }
        named_barrier(1, kConsumers);
#pragma unroll
        for (int v = 0; v < kValues; ++v) {
            const int a = place.a(v), b = place.b(v);
            if ((by_a ? a : b) != own)
                continue;
            const unsigned found = load_shared_4(results + (by_a ? b : a) * 4);
            sums[v] = warp < 4 * kRowGroups ? bits_to_float(found) : 0;
        }
        named_barrier(1, kConsumers); // they have been read
    }
}

// A lane's values of a tile go here, after the bias is added.
struct Target {
    Out* to;        // of the first
    float bias[2];  // of the two rows of w that it has values of
    unsigned exist; // bits: which of the four are outputs
};

struct Store {
    const void* bias;
    Out* y;
    int bias_kind, M;
    long N, first;
    int lane;
    bool paired; // whether neighbours along N can be stored at once

    // From a lane's value of a tile to the next, and to the one after that.
    static constexpr int kNextM = kXIsA ? 0 : 1, kNextRow = 1 - kNextM;
    static constexpr int kAfterM = kXIsA ? 8 : 0, kAfterRow = 8 - kAfterM;

    // Tiles are counted over all warpgroups.
    MX_MEMBER Target target(int tile) const {
        const int warp = tile / kTilesB, j = tile % kTilesB;
        const Place place{kXIsA ? warp % kActive : warp, kXIsA ? warp / kActive * kColumns : 0,
                          lane};
        const int m = place.m(4 * j), row = place.row(4 * j);
        const int rows = static_cast<int>(min(static_cast<long>(kRowsW), N - first));
        Target target{y + m * N + first + row, {0, 0}, 0};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int own_m = m + i / 2 * kAfterM + i % 2 * kNextM,
                      own_row = row + i / 2 * kAfterRow + i % 2 * kNextRow;
            target.exist |= (own_m < M && own_row < rows) << i;
        }
        if (bias_kind != kNone)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (const int own_row = row + i * (kXIsA ? 1 : 8); own_row < rows)
                    target.bias[i] = load_bias(bias, bias_kind, first + own_row);
        return target;
    }
    MX_MEMBER void operator()(const Target& target, float4 sums) const {
        const float values[2][2] = {{sums.x, sums.y}, {sums.z, sums.w}};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            Out* here = target.to + (kXIsA ? i * kAfterM * N : i * kAfterRow);
            float two[2];
#pragma unroll
            for (int j = 0; j < 2; ++j)
                two[j] = values[i][j] + target.bias[kXIsA ? j : i];
            const bool exists = target.exist >> 2 * i & 1, second = target.exist >> (2 * i + 1) & 1;
            if (kXIsA && paired) {
                store_pair(here, two[0], two[1], exists ? 0 : -1);
            } else {
                if (exists)
                    store(here, two[0]);
                if (second)
                    store(here + (kXIsA ? 1 : N), two[1]);
            }
        }
    }
    MX_MEMBER void operator()(float4 sums, int tile) const { (*this)(target(tile), sums); }
};

// Sums of all parts come here for the workgroup that owns them.
struct Inbox {
    const Store& store;
    unsigned boxes, full;
    int part, owned;

    MX_MEMBER void wait() const {
        if constexpr (kSplit > 1)
            barrier_wait(full, 0);
        else
            named_barrier(1, kConsumers);
    }
    static constexpr int kTilesOfWarp = (kOwnedTiles + kWarps - 1) / kWarps;
    // Where it is one tile, what is known of it before the sums are is worked out by then.
    static constexpr bool kEarly = kParts > 1 && !kKept && kTilesOfWarp == 1;

    MX_MEMBER Target target(int warp) const {
        if (!kEarly || warp >= owned)
            return {};
        return store.target(warp * kSplit + part);
    }
    MX_MEMBER void add_up(int warp, const Target& target) const {
        const unsigned at = boxes + store.lane * 16;
        if constexpr (kEarly) {
            if (warp < owned)
                store(target, sum_of_tiles<kParts>(at + warp * kParts * kTileBytes));
        } else {
            // As many tiles of a warp at once as there are, up to four: each waits for its loads.
            constexpr int at_once = kTilesOfWarp < 4 ? kTilesOfWarp : 4;
#pragma unroll 1
            for (int first = warp; first < owned; first += at_once * kWarps) {
                float4 sums[at_once];
#pragma unroll
                for (int j = 0; j < at_once; ++j)
                    if (const int i = first + j * kWarps; i < owned)
                        sums[j] = sum_of_tiles<kParts>(at + i * kParts * kTileBytes);
#pragma unroll
                for (int j = 0; j < at_once; ++j)
                    if (const int i = first + j * kWarps; i < owned)
                        store(sums[j], i * kSplit + part);
            }
        }
    }
    MX_MEMBER void send(int tile, int k_group, float4 sum) const {
        const int to = tile % kSplit;
        const unsigned place =
            boxes + (tile / kSplit * kParts + part * kKGroups + k_group) * kTileBytes;
        if constexpr (kSplit > 1)
            store_async(address_in_cluster(place + store.lane * 16, to), sum,
                        address_in_cluster(full, to));
        else
            store_tile(place + store.lane * 16, sum);
    }
};

// The sums of all parts of K come together. A warp that has a tile for each part, or more, keeps
// its share of them in registers, sends the others, and adds to its own what comes from the warps
// of the same rows in the other parts.

// Calls f(Int<0>), ... f(Int<Count - 1>).
template <int Count, class F>
MX_DEVICE void for_each_int(const F& f) {
    if constexpr (Count > 0) {
        for_each_int<Count - 1>(f);
        f(Int<Count - 1>{});
    }
}

// Of 8 by 8 values of 16 bits: lane 4i + j gives values 2j and 2j + 1 of row i, and gets those of
// column i.
MX_DEVICE unsigned transposed(unsigned v) {
    unsigned t;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(v));
    return t;
}

struct Kept {
    const Store& store;
    unsigned boxes, full;
    int row_warp, own; // of the warps with rows; of the parts

    MX_MEMBER static float4 tile_of(const Sums& sums, int j) {
        return {sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]};
    }
    // For what part `from` has of a tile that part `to`, another one, keeps.
    MX_MEMBER unsigned box(int to, int tile, int from) const {
        const int warp = to % kKGroups * kRowWarps + row_warp;
        return boxes + store.lane * 16 +
               ((warp * kMostKept + tile) * (kParts - 1) + from - (from > to)) * kTileBytes;
    }
    MX_MEMBER void send(const Sums& sums) const {
        for_each_int<kTilesB>([&](auto tile) {
            constexpr int j = decltype(tile)::value, to = j * kParts / kTilesB;
            if (to == own)
                return;
            const unsigned at = box(to, j - first_kept(to), own);
            if constexpr (kSplit > 1)
                store_async(address_in_cluster(at, to / kKGroups), tile_of(sums, j),
                            address_in_cluster(full, to / kKGroups));
            else
                store_tile(at, tile_of(sums, j));
        });
    }
    // Where there is one part; staging: where the warp leaves 16-bit results on their way.
    MX_MEMBER void store_own(const Sums& sums, unsigned staging) const {
        float4 tiles[kTilesB];
#pragma unroll
        for (int i = 0; i < kTilesB; ++i)
            tiles[i] = tile_of(sums, i);
        store_tiles(tiles, 0, staging);
    }
    // Adds in the order of the parts, whoever does it.
    MX_MEMBER void receive(const Sums& sums) const {
        for_each_int<kParts>([&](auto part) {
            constexpr int p = decltype(part)::value, first = first_kept(p);
            constexpr int count = first_kept(p + 1) - first;
            if constexpr (count > 0)
                if (p == own) {
                    float4 tiles[count];
#pragma unroll
                    for (int i = 0; i < count; ++i)
                        tiles[i] = whole<p>(tile_of(sums, first + i), i);
                    store_tiles(tiles, first, box(own, 0, own == 0 ? 1 : 0) - store.lane * 16);
                }
        });
    }

  private:
    template <int Part>
    MX_MEMBER float4 whole(float4 own_sums, int tile) const {
        float4 of[kParts];
#pragma unroll
        for (int s = 0; s < kParts; ++s)
            of[s] = s == Part ? own_sums : load_tile(box(Part, tile, s));
#pragma unroll
        for (int s = 1; s < kParts; ++s)
            of[0] = add(of[0], of[s]);
        return of[0];
    }
    // Code that has not run yet comes from memory: so little of it, where no output is special.
    template <int Count>
    MX_MEMBER void store_tiles(float4 (&tiles)[Count], int first, unsigned staging) const {
        const bool plain = !kXIsA && store.paired && store.first + kRowsW <= store.N;
        const bool staged =
            kXIsA && store.N % 8 == 0 && reinterpret_cast<unsigned long>(store.y) % 16 == 0;
        if (store.bias_kind != kNone && (plain || staged))
            add_bias(tiles, first);
        if (staged) {
            __syncwarp(); // others have loaded what came to the place of these
            store_staged(tiles, first, staging);
        } else if (plain) {
#pragma unroll
            for (int i = 0; i < Count; ++i)
                store_plain(tiles[i], first + i);
        } else {
#pragma unroll
            for (int i = 0; i < Count; ++i)
                store(tiles[i], row_warp * kTilesB + first + i);
        }
    }
    // The first of the warp's rows of A; of w in the workgroup, of tile j, where x is A.
    MX_MEMBER int a() const { return row_warp % kActive * 16; }
    MX_MEMBER int row(int j) const { return row_warp / kActive * kColumns + 8 * j; }
    template <int Count>
    MX_MEMBER void add_bias(float4 (&tiles)[Count], int first) const {
        if (store.bias_kind == kF32)
            add_bias_of<float>(tiles, first);
        else if (store.bias_kind == kBF16)
            add_bias_of<bf16>(tiles, first);
        else
            add_bias_of<fp16>(tiles, first);
    }
    // All loads are under way at once. Where w is A all tiles have the same two rows of it.
    template <class Bias, int Count>
    MX_MEMBER void add_bias_of(float4 (&tiles)[Count], int first) const {
        constexpr int of_tiles = kXIsA ? Count : 1, next = kXIsA ? 1 : 8;
        Bias loaded[of_tiles][2];
#pragma unroll
        for (int i = 0; i < of_tiles; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int n =
                    (kXIsA ? row(first + i) + store.lane % 4 * 2 : a() + store.lane / 4) + j * next;
                loaded[i][j] =
                    static_cast<const Bias*>(store.bias)[min(store.first + n, store.N - 1)];
            }
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            float plus[2];
#pragma unroll
            for (int j = 0; j < 2; ++j)
                if constexpr (sizeof(Bias) == 4)
                    plus[j] = loaded[kXIsA ? i : 0][j];
                else
                    plus[j] = to_f32(loaded[kXIsA ? i : 0][j]);
            tiles[i].x += plus[0];
            tiles[i].y += plus[kXIsA];
            tiles[i].z += plus[!kXIsA];
            tiles[i].w += plus[1];
        }
    }
    // By way of shared memory, so that whole sectors are stored, of 32 bytes and more. Where w is A
    // a token's features in a warp are one sector, and that way is longer than it saves.
    template <int Count>
    MX_MEMBER void store_staged(const float4 (&tiles)[Count], int first, unsigned staging) const {
        constexpr int pitch = (Count | 1) * 16; // bytes of a row
        const int lane = store.lane;
        const int rows = static_cast<int>(min(static_cast<long>(kRowsW), store.N - store.first));
        const unsigned to = staging + lane % 16 * pitch + lane / 16 * 16;
        for_each_int<(Count + 1) / 2>([&](auto at) {
            constexpr int i = 2 * decltype(at)::value, next = i + 1 < Count ? i + 1 : i;
            store_matrices<i + 1 < Count>(
                to + i * 16, pack<Out>(tiles[i].x, tiles[i].y), pack<Out>(tiles[i].z, tiles[i].w),
                pack<Out>(tiles[next].x, tiles[next].y), pack<Out>(tiles[next].z, tiles[next].w));
        });
        __syncwarp();
#pragma unroll 2
        for (int i = lane; i < 16 * Count; i += kLanes) {
            const int of_x = i / Count, piece = i % Count;
            const int m = a() + of_x, n = row(first) + piece * 8;
            if (m < store.M && n < rows)
                store_vector(store.y + m * store.N + store.first + n,
                             load_shared_16(staging + of_x * pitch + piece * 16));
        }
    }
    // Two matrices of 8 by 8, or four; lane 4i + j has columns 2j and 2j + 1 of row i.
    template <bool Four>
    MX_MEMBER static void store_matrices(unsigned address, unsigned v0, unsigned v1, unsigned v2,
                                         unsigned v3) {
        if constexpr (Four)
            asm volatile(
                "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                "r"(v0), "r"(v1), "r"(v2), "r"(v3)
                : "memory");
        else
            asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address),
                         "r"(v0), "r"(v1)
                         : "memory");
    }
    // Where w is A: two neighbours along N at a time.
    MX_MEMBER void store_plain(float4 tile, int j) const {
        const int i = store.lane / 4, pair = store.lane % 4 * 2, m = 8 * j + i, n = a() + pair;
        const unsigned low = transposed(pack<Out>(tile.x, tile.y)),
                       high = transposed(pack<Out>(tile.z, tile.w));
        unsigned* to = reinterpret_cast<unsigned*>(store.y + m * store.N + store.first + n);
        if (m < store.M && n < kRowsW)
            *to = low;
        if (m < store.M && n + 8 < kRowsW)
            to[4] = high;
    }
};

extern "C" __global__ void MX_CLUSTER_DIMS __launch_bounds__(kThreads, kPerSm)
    aiter_mx_linear_wgmma_fp8(const unsigned char* xq, const unsigned char* xs,
                              const unsigned char* wq, const unsigned char* ws, const void* bias,
                              Out* y, long M, long N, long K, int bias_kind, int part_chunks,
                              int parts_with_one_more, int overlaps,
                              const __grid_constant__ TensorMap w_map,
                              const __grid_constant__ TensorMap x_map) {
    extern __shared__ unsigned char dynamic[];
    const unsigned shared = held((shared_address(dynamic) + 1023) & ~1023u);
    const unsigned full = shared + kBarriers, empty = full + 8 * kStages,
                   inbox_full = full + 8 * kRings * kStages, received = inbox_full + 8;
    const int part = kSplit == 1 ? 0 : blockIdx.x % kSplit;
    const long first_row = static_cast<long>(blockIdx.x / kSplit) * kRowsW;
    const int owned = (kTiles - part + kSplit - 1) / kSplit;
    const int chunks = kEven ? kChunks : part_chunks + (part < parts_with_one_more);
    const int first_chunk =
        kEven ? part * kChunks : part * part_chunks + min(part, parts_with_one_more);

    const int first_m = kTiled ? blockIdx.y * kRowsM : 0;
    if (threadIdx.x >= kConsumers) { // the producers
        const int warp = warp_uniform(threadIdx.x / kLanes);
        if (warp > kWarps + 1) {
            if constexpr (kDealsRegisters)
                decrease_registers<kCopyRegisters>();
            return;
        }
        const bool of_x = warp > kWarps;
        const TensorMap& map = of_x ? x_map : w_map;
        if (elected_lane()) {
            prefetch_map(map);
            if (!of_x) {
                // One thread alone: ptxas makes a loop with fences of lanes that set up one each.
#pragma unroll
                for (int i = 0; i < kStages; ++i) {
                    barrier_init(full + 8 * i, kQuantises ? 1 : 2);
                    if (kRefills)
                        barrier_init(empty + 8 * i, 4 * kRowGroups);
                }
                if constexpr (kSplit > 1) {
                    barrier_init(inbox_full, 1);
                    barrier_init(received, kSplit - 1);
                }
                fence_barrier_init();
                if constexpr (kSplit > 1)
                    barrier_arrive_expect(inbox_full, boxes_of(part) * kTileBytes);
                barrier_arrive_expect(full, kWBytes);
                tma_load(shared + (kXIsA ? kXBytes : 0), w_map, first_chunk * kChunk,
                         static_cast<int>(first_row), full);
            }
        }
        __syncwarp();
        if (!of_x) { // barriers are set up
            named_barrier_arrive(2, 2 * kLanes);
            named_barrier_arrive(3, kSet);
        }
        // Before a wait: whom a producer waits for may be waiting for its registers.
        if constexpr (kDealsRegisters)
            decrease_registers<kCopyRegisters>();
        if (of_x) {
            named_barrier(2, 2 * kLanes);
            if (overlaps)
                wait_for_grid_ahead();
        }
        if constexpr (kSplit > 1)
            cluster_arrive_relaxed();
        const unsigned to = shared + (of_x == kXIsA ? 0 : kXIsA ? kXBytes : kWBytes);
        const int row = of_x ? first_m : static_cast<int>(first_row);
        constexpr int early = kDepth < kStages ? kDepth : kStages;
        if (!(kQuantises && of_x) && elected_lane()) {
            PipelineState<kStages> arriving, next;
            if (!of_x)
                next.next(); // of its first box
#pragma unroll 1
            for (int i = of_x ? 0 : 1; i < chunks; ++i) {
                if (i >= early) {
                    barrier_wait(full + 8 * arriving.at, arriving.parity);
                    arriving.next();
                    if (kRefills && i >= kStages)
                        barrier_wait(empty + 8 * next.at, next.parity ^ 1);
                }
                barrier_arrive_expect(full + 8 * next.at, of_x ? kXBytes : kWBytes);
                tma_load(to + next.at * kStageBytes, map, (first_chunk + i) * kChunk, row,
                         full + 8 * next.at);
                next.next();
                // An SM that is to hold several workgroups has room for the next launch's, which
                // ask for weights while these wait for x.
                if ((of_x == (kPerSm == 1) || kQuantises) && i == min(early, chunks) - 1)
                    launch_dependents();
            }
        }
        __syncwarp();
        if constexpr (kSplit > 1) {
            cluster_wait();            // racecheck has all warps wait for it
            barrier_wait(received, 0); // a workgroup stays until the others have what it sent
        }
        return;
    }

    if constexpr (kTiled) {
        xq += first_m * K;
        xs += first_m * (K / kBlock);
        y += first_m * N;
        M -= first_m;
    }
    ScaleCopies scale_copies;
    scale_copies.ask(xs, ws, first_row, static_cast<int>(M), N, K, first_chunk, chunks, overlaps);
    if constexpr (kSplit > 1)
        cluster_arrive_relaxed();
    if constexpr (kDealsRegisters)
        increase_registers<kMostRegisters>();
    const int lane = held(threadIdx.x % kLanes);
    const int warp = warp_uniform(threadIdx.x / kLanes);
    const Store store_outputs{
        bias, y,         bias_kind, static_cast<int>(M),
        N,    first_row, lane,      ((N | reinterpret_cast<unsigned long>(y) >> 1) & 1) == 0};
    const Inbox inbox{store_outputs, shared + kInbox, inbox_full, part, owned};
    if (Inbox::kEarly && overlaps && bias_kind != kNone)
        wait_for_grid_ahead();
    const Target target = inbox.target(warp);
    bool far = false;
    if constexpr (kQuantises) { // while w's scales are on their way
        if (overlaps)
            wait_for_grid_ahead();
        far = quantise_x(xq, static_cast<int>(M), K, shared, first_chunk, chunks);
    }
    scale_copies.ask_bytes();
    named_barrier(3, kSet); // barriers are set up
    far |= scale_copies.put(shared, chunks);
    fence_async();
    far = named_barrier_or(4, kConsumers, far); // scales are there

    const int k_group = warp / (4 * kRowGroups), row_warp = warp % (4 * kRowGroups);
    const int group_a = row_warp / 4 % kGroupsA, group_b = row_warp / (4 * kGroupsA);
    const int sixteen = group_a * 4 + row_warp % 4;
    // Not known to the compiler where registers are few: it then spills none of the products.
    const bool active = kGroups > 2 ? static_cast<int>(held(sixteen)) < kActive : sixteen < kActive;
    const Place place{sixteen, group_b * kColumns, lane};
    const SwizzledDescriptor a(shared + group_a * kGroupRows * kChunk);
    const SwizzledDescriptor b_rows(shared + (kXIsA ? kXBytes : kWBytes) +
                                    group_b * kColumns * kChunk);
    const unsigned words_at =
        held(shared + kScalesA + (sixteen * 16 + lane / 4) * kFactorBytes + lane % 2 * 4);
    const MatrixDescriptor factors(shared + kScalesB + group_b * kColumns * 2 * kFactorBytes, 0,
                                   8 * 2 * kFactorBytes);
    Sums sums = {};
    float products[kBuffers][kValues], scales[kBuffers][kValues];
    // A's scales: words of the lane's two rows, and what of them is a block's: of a chunk of an
    // even number in lanes 4i and 4i + 1, for wgmma's first 4 k, else in the other two.
    unsigned by[kBuffers][2], words[2], masks[kBlocks];
    const unsigned zero = held(0);
    const auto fetch = [&](int c) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            words[i] = load_shared_4(words_at + c * kPitchA + 8 * i * kFactorBytes);
#pragma unroll
        for (int i = 0; i < kBlocks; ++i)
            masks[i] = lane % 4 == c % 2 * 2 + i / 2 ? (i % 2 ? 0xffff0000 : 0xffff) : 0;
    };
    int c = k_group, stage = k_group;
    unsigned parity = 0;
    const auto take_scales = [&](int p, int block) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            by[p][i] = held(words[i] & masks[block]);
    };
    const auto multiply_payload = [&](int p, int block) {
        const unsigned k = stage * (kStageBytes / 16) + block * (kBlock / 16);
        wgmma_block(products[p], SwizzledDescriptor::of(a.low + k),
                    SwizzledDescriptor::of(b_rows.low + k));
    };
    const auto multiply_scales = [&](int p) {
        wgmma_factors(scales[p], by[p][0], by[p][1], zero, factors.at(c / 2 * kPitchB));
    };
    const auto multiply = [&](int p, int block) {
        multiply_payload(p, block);
        multiply_scales(p);
    };
    const auto keep = [&](int p) {
        keep_in_order(products[p]);
        keep_in_order(scales[p]);
        asm volatile("" : "+r"(by[p][0]), "+r"(by[p][1]));
    };
    const auto add_products = [&](int p) {
        if (active)
#pragma unroll
            for (int v = 0; v < kValues; ++v)
                sums[v] = mx::fma(products[p][v], scales[p][v], sums[v]);
        keep_in_order(sums);
    };
    const auto begin = [&](auto at, auto block) {
        constexpr int p = decltype(at)::value, b = decltype(block)::value;
        take_scales(p, b);
        wgmma_fence();
        multiply(p, b);
        wgmma_commit();
    };
    const auto finish = [&](auto at, auto pending) {
        constexpr int p = decltype(at)::value;
        wgmma_wait<decltype(pending)::value>();
        keep(p);
        add_products(p);
    };
    const auto go_on = [&] {
        c += kKGroups;
        stage += kKGroups;
        if (kRefills && stage >= kStages) {
            stage -= kStages;
            parity ^= 1;
        }
    };
    // Behind all of a chunk's products.
    const auto free_stage = [&](int used) {
        if (kRefills && lane == 0)
            barrier_arrive(empty + 8 * used);
    };
    constexpr Int<0> i0;
    constexpr Int<1> i1;
    constexpr Int<2> i2;
    constexpr Int<3> i3;
    fetch(c);
    if constexpr (!kScalesFirst)
        wait_for_stage(full + 8 * stage, parity);
    if constexpr (kBuffers > 2) { // a chunk at a time
        while (true) {
            if constexpr (kScalesFirst) {
                wgmma_fence();
                for_each_int<kBuffers>([&](auto at) {
                    constexpr int p = decltype(at)::value;
                    take_scales(p, p);
                    multiply_scales(p);
                });
                wait_for_stage(full + 8 * stage, parity);
                for_each_int<kBuffers>([&](auto at) {
                    constexpr int p = decltype(at)::value;
                    multiply_payload(p, p);
                    wgmma_commit();
                });
            } else {
                begin(i0, i0);
                begin(i1, i1);
                begin(i2, i2);
                if constexpr (kBuffers == 4)
                    begin(i3, i3);
            }
            if constexpr (kBuffers == 4) {
                finish(i0, i3);
            } else {
                finish(i0, i2);
                begin(i0, i3);
            }
            const int used = stage;
            go_on();
            if (c < chunks)
                fetch(c);
            finish(i1, i2);
            finish(i2, i1);
            finish(Int<3 % kBuffers>(), i0);
            if (c >= chunks)
                break;
            free_stage(used);
            if constexpr (!kScalesFirst)
                wait_for_stage(full + 8 * stage, parity);
        }
    } else if constexpr (kBuffers == 1) {
        while (true) {
            begin(i0, i0);
            finish(i0, i0);
            begin(i0, i1);
            finish(i0, i0);
            begin(i0, i2);
            finish(i0, i0);
            begin(i0, i3);
            const int used = stage;
            go_on();
            if (c >= chunks)
                break;
            fetch(c);
            finish(i0, i0);
            free_stage(used);
            wait_for_stage(full + 8 * stage, parity);
        }
        finish(i0, i0);
    } else { // two at a time: one wait for both, while other warpgroups have theirs multiplied
        const auto begin_two = [&](int block) {
            take_scales(0, block);
            take_scales(1, block + 1);
            wgmma_fence();
            multiply(0, block);
            multiply(1, block + 1);
            wgmma_commit();
        };
        const auto wait_for_two = [&] {
            wgmma_wait<0>();
            keep(0);
            keep(1);
        };
        while (true) {
            begin_two(0);
            wait_for_two();
            add_products(0);
            add_products(1);
            begin_two(2);
            const int used = stage;
            go_on();
            const bool more = c < chunks;
            if (more)
                fetch(c);
            wait_for_two();
            free_stage(used);
            add_products(0);
            add_products(1);
            if (!more)
                break;
            wait_for_stage(full + 8 * stage, parity);
        }
    }
    const Tensors t{xq, xs, wq, ws, static_cast<int>(M), N, K};
    if (__builtin_expect(far, 0))
        sum_again(sums, t, place, shared, first_row, first_chunk, chunks, warp);
    const auto tile_sum = [&](int j) {
        return float4{sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]};
    };
    const int first_tile = (group_b * kActive + sixteen) * kTilesB;
    if constexpr (kSplit > 1)
        cluster_wait(); // all of the cluster's workgroups have started
    const auto tell_received = [&] {
        if (kSplit > 1 && warp == 0 && lane < kSplit && lane != part)
            barrier_arrive_read(address_in_cluster(received, lane));
    };
    if constexpr (kParts == 1) {
        if constexpr (kXIsA)
            named_barrier(1, kConsumers); // all stages have been read
        const int own = first_tile / kTilesB;
        if (active)
            Kept{store_outputs, 0, 0, own, 0}.store_own(sums, shared + own * kStagingBytes);
    } else if constexpr (kKept) {
        const Kept kept{store_outputs, shared + kInbox, inbox_full, first_tile / kTilesB,
                        part * kKGroups + k_group};
        if (active)
            kept.send(sums);
        inbox.wait();
        tell_received();
        if (active)
            kept.receive(sums);
    } else {
        if (active)
#pragma unroll
            for (int j = 0; j < kTilesB; ++j)
                inbox.send(first_tile + j, k_group, tile_sum(j));
        inbox.wait();
        tell_received();
        inbox.add_up(warp, target);
    }
}
