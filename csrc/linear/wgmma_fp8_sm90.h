// What the outer linear is made of: sizes, scales, and where sums go.
// The kernel and a drawing are in wgmma_fp8_sm90.cu.
#pragma once

#include "blocks_sm90.h"
#include "common/epilogue.h"
#include "common/target.h"
#include "sm90/memory.h"
#include "sm90/rows.h"
#include "sm90/tma.h"

namespace mx {

constexpr bool kTurned = MX_TURNED;           // wgmma's A is x, its B is w; else the other way
constexpr int kRowsM = MX_ROWS_M;             // of x, a multiple of 8
constexpr int kRowsW = MX_ROWS_W;             // of w in a workgroup, a multiple of 8
constexpr int kRowGroups = MX_ROW_GROUPS;     // warpgroups side by side along w
constexpr int kKGroups = MX_K_GROUPS;         // warpgroups that take turns along K
constexpr int kSplit = MX_SPLIT;              // workgroups of a cluster, which share K
constexpr int kChunks = MX_CHUNKS;            // of the largest part of K
constexpr int kStages = MX_STAGES;            // of them, that there is room for
constexpr int kDepth = MX_DEPTH;              // of them, that are under way at a time
constexpr bool kEven = MX_EVEN;               // whether all parts of K are as large
constexpr int kScaleChunks = MX_SCALE_CHUNKS; // whose scales of a row are loaded at once
using Out = DType<MX_OUT>;

constexpr int kGroups = kRowGroups * kKGroups;
constexpr int kWarps = 4 * kGroups; // that multiply
constexpr int kConsumers = kWarps * kLanes;
constexpr int kThreads = kConsumers + 4 * kLanes; // one more warpgroup, of which two threads copy
constexpr int kSet = kConsumers + kLanes;         // of the threads, that set out together
// Of a lane. All of those that a launch begins with are a workgroup's: what the warpgroup that
// copies leaves goes to the others.
constexpr int kCopyRegisters = 24;
constexpr int kMostRegisters = kGroups == 1 ? 248 : kGroups == 2 ? 240 : kGroups == 3 ? 160 : 112;
constexpr int kParts = kSplit * kKGroups; // whose sums are added

constexpr int kRowsA = kTurned ? kRowsM : kRowsW, kRowsB = kTurned ? kRowsW : kRowsM;
constexpr int kColumns = kTurned ? kRowsW / kRowGroups : kRowsM; // of a wgmma
constexpr int kTilesB = kColumns / 8;
constexpr int kValues = kColumns / 2; // of a block's products, of a thread
// Blocks whose products and scales are in registers: some are multiplied while another is added.
constexpr bool fits(int buffers) {
    return (2 * buffers + 1) * kValues + (buffers > 2 ? 30 + 2 * buffers : 32) <= kMostRegisters;
}
constexpr int kBuffers = fits(4) ? 4 : fits(3) ? 3 : fits(2) ? 2 : 1;
// Whether scales are multiplied before their chunk is there: it was faster so.
constexpr bool kScalesFirst = kBuffers > 2 && kKGroups > 2;
static_assert(kRowsM % 8 == 0 && kRowsW % 8 == 0 && kColumns % 8 == 0, "8 rows are a unit");

// Tiles of sums: 16 rows of A by 8 of B.
constexpr int kTileBytes = kLanes * 16;
constexpr int kActive = (kRowsA + 15) / 16; // sixteens of rows of A, of a warp each
constexpr int kTiles = kActive * (kRowsB / 8);
constexpr int kOwnedTiles = (kTiles + kSplit - 1) / kSplit;
// With two for each part, or more, a part's warp keeps those from first_kept(part) on of its own
// and gets the others' for these: wgmma_fp8_kept_sm90.h. Else they are dealt out to the
// workgroups.
constexpr bool kKept = kParts > 1 && kTilesB >= 2 * kParts;
constexpr int kMostKept = (kTilesB + kParts - 1) / kParts;
constexpr int kRowWarps = kTurned ? kActive * kRowGroups : kActive; // of a part, with rows
MX_DEVICE constexpr int first_kept(int part) { return (part * kTilesB + kParts - 1) / kParts; }
constexpr int kBoxes = kKept         ? kKGroups * kRowWarps * kMostKept * (kParts - 1)
                       : kParts == 1 ? 0
                                     : kOwnedTiles * kParts;
constexpr int kInboxBytes = kBoxes * kTileBytes;
MX_DEVICE constexpr int boxes_of(int part) { // of a workgroup, into which sums come
    return kKept ? (first_kept((part + 1) * kKGroups) - first_kept(part * kKGroups)) * kRowWarps *
                       (kParts - 1)
                 : (kTiles - part + kSplit - 1) / kSplit * kParts;
}
static_assert(kTiles >= kSplit, "who owns a tile waits for the whole cluster");

constexpr int kXBytes = kRowsM * kChunk, kWBytes = kRowsW * kChunk; // of a chunk
constexpr int kStageBytes = kXBytes + kWBytes;
// Scales are bf16, which all but the ends of e8m0 are in, and 8 bytes of a row in a chunk. Of B
// those of two chunks are side by side: 8 k of wgmma's.
constexpr int kFactorBytes = 4 * 2, kPairs = (kChunks + 1) / 2;
constexpr int kScalesA = kStages * kStageBytes;
constexpr int kScalesB = kScalesA + kChunks * kRowsA * kFactorBytes;
constexpr int kInbox = kScalesB + kPairs * kRowsB * 2 * kFactorBytes;
constexpr int kBarriers = kInbox + kInboxBytes;
constexpr bool kRefills = kStages < kChunks;
constexpr int kRings = kRefills ? 2 : 1; // of barriers
constexpr int kEnd = kBarriers + (kRings * kStages + 2) * 8;
static_assert(!kRefills || kStages % kKGroups == 0,
              "a stage is one warpgroup's, as are its phases");
static_assert(kEnd + 1024 <= MX_SHARED_BYTES, "the host lays shared memory out differently: "
                                              "aiter_mx/kernels/linear/outer_sm90.py");

using Sums = float[kValues];

MX_DEVICE void store_shared_8(unsigned address, unsigned x, unsigned y) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y) : "memory");
}
// The top bit of a byte is set unless that scale is in 2^-62 to 2^62: then the product of two, and
// times a sum of a block, is in fp32.
MX_DEVICE unsigned is_far(unsigned scales) {
    return (__vabsdiffu4(scales, kUnitScales) + 0x41414141) & 0x80808080;
}

// Scales on their way from memory to their places in shared memory: those of a few chunks of a row
// are an item, w's of the first threads, x's of the next.
struct ScaleCopies {
    static constexpr int kAtOnce = kScaleChunks;
    // Of B those of a whole number of pairs of chunks: where they come one by one there may be one
    // chunk more than A has.
    static constexpr int kOfRow = kAtOnce == 1 ? 2 * kPairs : kChunks / kAtOnce;
    static constexpr int kItemsW = kRowsW * kOfRow, kItemsX = kRowsM * kOfRow;
    static constexpr int kFirstX = (kItemsW + kLanes - 1) / kLanes * kLanes;
    static constexpr int kOwn = (kFirstX + kItemsX + kConsumers - 1) / kConsumers; // of a thread
    static_assert(kAtOnce == 1 || (kEven && kChunks % kAtOnce == 0), "all items are whole");

    struct Item {
        bool of_x, exists;
        int row, chunk;
    };
    unsigned words[kOwn][kAtOnce];
    const unsigned char* from[kOwn]; // null where there is nothing to load
    bool aligned;                    // to what is loaded at once

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
        aligned = ((reinterpret_cast<unsigned long>(xs) | reinterpret_cast<unsigned long>(ws)) %
                   (4 * kAtOnce)) == 0;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const Item own = item(i);
            from[i] = nullptr;
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j)
                words[i][j] = 0;
            if (!own.exists || (kAtOnce == 1 && own.chunk >= chunks))
                continue;
            if (own.of_x && overlaps)
                wait_for_grid_ahead();
            const int last = own.of_x ? M - 1 : static_cast<int>(N - 1 - first_row);
            from[i] = (own.of_x ? xs : ws + first_row * blocks) +
                      static_cast<unsigned long>(min(own.row, last)) * blocks +
                      (first_chunk + own.chunk) * kBlocks;
            if (aligned)
                load_words(words[i], from[i]);
        }
    }
    // Asks for those at odd addresses. By then boxes are asked for: they do not wait for code that
    // is seldom run.
    MX_MEMBER void ask_bytes() {
        if (__builtin_expect(aligned, 1))
            return;
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
            if (from[i] != nullptr)
#pragma unroll
                for (int j = 0; j < kAtOnce; ++j)
                    words[i][j] = load_scale_word(from[i] + j * kBlocks);
    }
    // Returns whether any is near the ends of e8m0.
    MX_MEMBER bool put(unsigned shared, int chunks) const {
        unsigned far = 0;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const Item own = item(i);
            const bool of_a = own.of_x == kTurned;
            if (!own.exists || (kAtOnce == 1 && of_a && own.chunk >= kChunks))
                continue;
            const unsigned place =
                of_a ? kScalesA + (own.chunk * kRowsA + own.row) * kFactorBytes
                     : kScalesB + (own.chunk / 2 * kRowsB + own.row) * 2 * kFactorBytes +
                           own.chunk % 2 * kFactorBytes;
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                const unsigned word = words[i][j];
                far |= kAtOnce > 1 || own.chunk < chunks ? is_far(word) : 0;
                const unsigned further =
                    of_a ? j * kRowsA * kFactorBytes : (j / 2 * 2 * kRowsB + j % 2) * kFactorBytes;
                store_shared_8(shared + place + further, __byte_perm(word, 0, 0x4140) << 7,
                               __byte_perm(word, 0, 0x4342) << 7);
            }
        }
        return far != 0;
    }

  private:
    MX_MEMBER static void load_words(unsigned (&to)[kAtOnce], const unsigned char* from) {
        if constexpr (kAtOnce == 4)
            asm volatile("ld.relaxed.cta.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                         : "l"(from));
        else if constexpr (kAtOnce == 2)
            asm volatile("ld.relaxed.cta.global.v2.u32 {%0, %1}, [%2];"
                         : "=r"(to[0]), "=r"(to[1])
                         : "l"(from));
        else
            to[0] = load_word(from);
    }
};

// Of a warp's tile of sums: what a lane's value is of.
struct Place {
    int row_warp, column_group; // sixteen of rows of A; first row of B
    int lane;

    MX_MEMBER int a(int value) const { return row_warp * 16 + lane / 4 + value / 2 % 2 * 8; }
    MX_MEMBER int b(int value) const {
        return column_group + value / 4 * 8 + lane % 4 * 2 + value % 2;
    }
    MX_MEMBER int m(int value) const { return kTurned ? a(value) : b(value); }
    MX_MEMBER int row(int value) const { return kTurned ? b(value) : a(value); }
};

// The sums of a lane over its warpgroup's chunks, where a row of w or x has scales so near the ends
// of e8m0 that they are to be applied one after the other.
MX_DEVICE void sum_again(Sums& sums, const Tensors& t, const Place& place, long first,
                         int first_chunk, int chunk, int chunks) {
#pragma unroll 1
    for (int v = 0; v < kValues; ++v) {
        const int row = place.row(v), m = place.m(v);
        const long n = first + row;
        if (row >= kRowsW || n >= t.N || m >= t.M)
            continue;
        const unsigned char* w_scales = t.ws + n * t.blocks() + first_chunk * kBlocks;
        const unsigned char* x_scales = t.xs + m * t.blocks() + first_chunk * kBlocks;
        unsigned far = 0;
#pragma unroll 1
        for (int c = chunk; c < chunks; c += kKGroups)
            far |= is_far(load_scale_word(w_scales + c * kBlocks)) |
                   is_far(load_scale_word(x_scales + c * kBlocks));
        if (!far)
            continue;
        const float sum = exact_sum(t, m, n, first_chunk + chunk, first_chunk + chunks, kKGroups);
#pragma unroll
        for (int i = 0; i < kValues; ++i)
            sums[i] = i == v ? sum : sums[i];
    }
}

// Where a lane's values of a tile go, and what is added to them.
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
    static constexpr int kNextM = kTurned ? 0 : 1, kNextRow = 1 - kNextM;
    static constexpr int kAfterM = kTurned ? 8 : 0, kAfterRow = 8 - kAfterM;

    // Tiles are counted over all warpgroups.
    MX_MEMBER Target target(int tile) const {
        const int warp = tile / kTilesB, j = tile % kTilesB;
        const Place place{kTurned ? warp % kActive : warp, kTurned ? warp / kActive * kColumns : 0,
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
                if (const int own_row = row + i * (kTurned ? 1 : 8); own_row < rows)
                    target.bias[i] = load_bias(bias, bias_kind, first + own_row);
        return target;
    }
    MX_MEMBER void operator()(const Target& target, float4 sums) const {
        const float values[2][2] = {{sums.x, sums.y}, {sums.z, sums.w}};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            Out* here = target.to + (kTurned ? i * kAfterM * N : i * kAfterRow);
            float two[2];
#pragma unroll
            for (int j = 0; j < 2; ++j)
                two[j] = values[i][j] + target.bias[kTurned ? j : i];
            const bool exists = target.exist >> 2 * i & 1, second = target.exist >> (2 * i + 1) & 1;
            if (kTurned && paired) {
                store_pair(here, two[0], two[1], exists ? 0 : -1);
            } else {
                if (exists)
                    store(here, two[0]);
                if (second)
                    store(here + (kTurned ? 1 : N), two[1]);
            }
        }
    }
    MX_MEMBER void operator()(float4 sums, int tile) const { (*this)(target(tile), sums); }
};

// Where sums of all parts come for the workgroup that owns them.
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
                store(target, sum_of_parts(at + warp * kParts * kTileBytes));
        } else {
            // As many tiles of a warp at once as there are, up to four: each waits for its loads.
            constexpr int at_once = kTilesOfWarp < 4 ? kTilesOfWarp : 4;
#pragma unroll 1
            for (int first = warp; first < owned; first += at_once * kWarps) {
                float4 sums[at_once];
#pragma unroll
                for (int j = 0; j < at_once; ++j)
                    if (const int i = first + j * kWarps; i < owned)
                        sums[j] = sum_of_parts(at + i * kParts * kTileBytes);
#pragma unroll
                for (int j = 0; j < at_once; ++j)
                    if (const int i = first + j * kWarps; i < owned)
                        store(sums[j], i * kSplit + part);
            }
        }
    }
    MX_MEMBER static float4 sum_of_parts(unsigned at) {
        float4 sum = load_tile(at);
#pragma unroll
        for (int s = 1; s < kParts; ++s)
            sum = add(sum, load_tile(at + s * kTileBytes));
        return sum;
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

} // namespace mx
