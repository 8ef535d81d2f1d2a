// What the outer linear is made of: sizes, scales, and where sums go.
// The kernel and a drawing are in linear_outer_sm90.cu.
#pragma once

#include "linear_blocks_sm90.h"
#include "mx_epilogue.h"
#include "mx_target.h"
#include "sm90_async.h"
#include "sm90_copy.h"
#include "sm90_rows.h"
#include "sm90_shared.h"

namespace mx {

constexpr bool kTurned = MX_TURNED;       // wgmma's A is x, its B is w; else the other way
constexpr int kRowsM = MX_ROWS_M;         // of x, a multiple of 8
constexpr int kRowsW = MX_ROWS_W;         // of w in a workgroup, a multiple of 8
constexpr int kRowGroups = MX_ROW_GROUPS; // warpgroups side by side along w
constexpr int kKGroups = MX_K_GROUPS;     // warpgroups that take turns along K
constexpr int kSplit = MX_SPLIT;          // workgroups of a cluster, which share K
constexpr int kChunks = MX_CHUNKS;        // of the largest part of K
constexpr int kStages = MX_STAGES;        // of them, that there is room for
constexpr int kDepth = MX_DEPTH;          // of them, that are under way at a time
using Out = DType<MX_OUT>;

constexpr int kGroups = kRowGroups * kKGroups;
constexpr int kWarps = 4 * kGroups; // that multiply
constexpr int kConsumers = kWarps * kLanes;
constexpr int kThreads = kConsumers + 4 * kLanes; // one more warpgroup, of which a thread copies
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
// Blocks whose products and scales are in registers: one is multiplied while another is added.
constexpr int kBuffers = 5 * kValues + 32 <= kMostRegisters ? 2 : 1;
static_assert(kRowsM % 8 == 0 && kRowsW % 8 == 0 && kColumns % 8 == 0, "8 rows are a unit");

// Tiles of sums: 16 rows of A by 8 of B.
constexpr int kTileBytes = kLanes * 16;
constexpr int kActive = (kRowsA + 15) / 16; // sixteens of rows of A, of a warp each
constexpr int kTiles = kActive * (kRowsB / 8);
constexpr int kOwnedTiles = (kTiles + kSplit - 1) / kSplit;
constexpr int kInboxBytes = kParts == 1 ? 0 : kOwnedTiles * kParts * kTileBytes;
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
constexpr int kEnd = kBarriers + (kRings * kStages + 1) * 8;
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

// Whether any of the threads of a barrier says so. No other barrier may have its id.
MX_DEVICE bool named_barrier_or(int id, int threads, bool x) {
    unsigned any;
    asm volatile("{\n"
                 ".reg .pred mine, any;\n"
                 "setp.ne.u32 mine, %3, 0;\n"
                 "barrier.cta.red.or.pred any, %1, %2, mine;\n"
                 "selp.u32 %0, 1, 0, any;\n"
                 "}"
                 : "=r"(any)
                 : "r"(id), "r"(threads), "r"(static_cast<unsigned>(x))
                 : "memory");
    return any;
}

// Scales on their way from memory to their places in shared memory.
template <int Rows, bool IsA>
struct ScaleCopies {
    static constexpr int kEach = IsA ? kChunks : 2 * kPairs; // of a row
    static constexpr int kItems = Rows * kEach;
    static constexpr int kOwn = (kItems + kConsumers - 1) / kConsumers; // of a thread

    unsigned words[kOwn];

    // Rows beyond the last one get its scales; chunks that there are not have none, zeros.
    MX_MEMBER void ask(const unsigned char* s, long first_row, long last_row, long blocks,
                       int first_chunk, int chunks) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const int item = threadIdx.x + i * kConsumers, chunk = item % kEach;
            words[i] = 0;
            if ((kItems % kConsumers == 0 || item < kItems) && chunk < chunks)
                words[i] = load_scale_word(s + min(first_row + item / kEach, last_row) * blocks +
                                           (first_chunk + chunk) * kBlocks);
        }
    }
    // Returns whether any is near the ends of e8m0.
    MX_MEMBER bool put(unsigned shared, int chunks) const {
        unsigned far = 0;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const int item = threadIdx.x + i * kConsumers, row = item / kEach, chunk = item % kEach;
            if (kItems % kConsumers != 0 && item >= kItems)
                continue;
            far |= chunk < chunks ? is_far(words[i]) : 0;
            const unsigned place = IsA ? kScalesA + (chunk * Rows + row) * kFactorBytes
                                       : kScalesB + (chunk / 2 * Rows + row) * 2 * kFactorBytes +
                                             chunk % 2 * kFactorBytes;
            store_shared_8(shared + place, __byte_perm(words[i], 0, 0x4140) << 7,
                           __byte_perm(words[i], 0, 0x4342) << 7);
        }
        return far != 0;
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

struct Store {
    const void* bias;
    Out* y;
    int bias_kind, M;
    long N, first;
    int lane;
    bool paired; // whether neighbours along N can be stored at once

    // Of a tile, these counted over all warpgroups.
    MX_MEMBER void operator()(float4 sums, int tile) const {
        const int warp = tile / kTilesB, j = tile % kTilesB;
        const Place place{kTurned ? warp % kActive : warp, kTurned ? warp / kActive * kColumns : 0,
                          lane};
        const int m = place.m(4 * j), row = place.row(4 * j);
        // From one value to the next, and to the one after it.
        constexpr int next_m = kTurned ? 0 : 1, next_row = 1 - next_m;
        constexpr int after_m = kTurned ? 8 : 0, after_row = 8 - after_m;
        const float values[2][2] = {{sums.x, sums.y}, {sums.z, sums.w}};
        Out* to = y + m * N + first + row;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int own_m = m + i * after_m, own_row = row + i * after_row;
            Out* here = to + (kTurned ? i * after_m * N : i * after_row);
            if (own_m >= M || own_row >= kRowsW || first + own_row >= N)
                continue;
            float two[2] = {values[i][0], values[i][1]};
            const bool second =
                own_m + next_m < M && own_row + next_row < kRowsW && first + own_row + next_row < N;
            if (bias_kind != kNone) {
                two[0] += load_bias(bias, bias_kind, first + own_row);
                if (second)
                    two[1] += load_bias(bias, bias_kind, first + own_row + next_row);
            }
            if (kTurned && paired) {
                store_pair(here, two[0], two[1], 0);
            } else {
                store(here, two[0]);
                if (second)
                    store(here + (kTurned ? 1 : N), two[1]);
            }
        }
    }
};

// Where sums of all parts come for the workgroup that owns them.
struct Inbox {
    const Store& store;
    unsigned boxes, full;
    int part, owned;

    MX_MEMBER void expect() const {
        if constexpr (kSplit > 1)
            barrier_arrive_expect(full, owned * kParts * kTileBytes);
    }
    MX_MEMBER void wait() const {
        if constexpr (kSplit > 1)
            barrier_wait(full, 0);
        else
            named_barrier(1, kConsumers);
    }
    // As many tiles of a warp at once as there are, up to four: each waits for its loads.
    MX_MEMBER void add_up(int warp) const {
        constexpr int each = (kOwnedTiles + kWarps - 1) / kWarps;
        constexpr int at_once = each < 4 ? each : 4;
        const unsigned at = boxes + store.lane * 16;
#pragma unroll 1
        for (int first = warp; first < owned; first += at_once * kWarps) {
            float4 sums[at_once];
#pragma unroll
            for (int j = 0; j < at_once; ++j) {
                const int i = first + j * kWarps;
                if (i < owned)
                    sums[j] = load_tile(at + i * kParts * kTileBytes);
#pragma unroll
                for (int s = 1; s < kParts; ++s)
                    if (i < owned)
                        sums[j] = add(sums[j], load_tile(at + (i * kParts + s) * kTileBytes));
            }
#pragma unroll
            for (int j = 0; j < at_once; ++j)
                if (first + j * kWarps < owned)
                    store(sums[j], (first + j * kWarps) * kSplit + part);
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

} // namespace mx
