// What the linear over fp8 is made of: sizes, copies of scales, and where sums go.
// The kernel and a drawing are in fp8_sm90.cu.
#pragma once

#include "blocks_sm90.h"
#include "common/epilogue.h"
#include "common/target.h"
#include "sm90/async.h"
#include "sm90/copy.h"
#include "sm90/rows.h"

namespace mx {

constexpr int kTilesM = MX_TILES_M;       // of 8 rows of x
constexpr int kRowGroups = MX_ROW_GROUPS; // of 64 rows of w, a warpgroup each
constexpr int kSplit = MX_SPLIT;          // workgroups of a cluster, which share K
constexpr int kDepth = MX_DEPTH;          // chunks under way
constexpr int kPerSm = MX_PER_SM;
constexpr int kKGroups = MX_K_GROUPS; // warpgroups that take turns along K
constexpr bool kOnePass = MX_ONE_PASS;
constexpr bool kRefills = MX_REFILLS; // a workgroup takes more chunks than its ring has
using Out = DType<MX_OUT>;

// Chunks that are asked for ahead of x: what was fastest.
constexpr int kWantedEarly = kPerSm > 1 ? 2 : kRefills ? 4 : 1;
constexpr int kEarly = kWantedEarly < kDepth ? kWantedEarly : kDepth;

// An SM that has room for the next launch beside this one lets it begin, to fill its rings, when
// this one has so many boxes left to ask for, of 11 or 10 under way: 4 and 8 were slower.
constexpr bool kWaits = MX_ALONE;
constexpr int kLastBoxes = 6;

constexpr int kGroupThreads = 128;
constexpr int kConsumers = kRowGroups * kKGroups * kGroupThreads;
constexpr int kParts = kSplit * kKGroups;         // whose sums are added
constexpr bool kHelped = !kOnePass && kParts > 1; // by a warp that adds what others have sent
constexpr int kCopied = kConsumers + kLanes;      // threads of the consumers and of the producer
constexpr int kThreads = kCopied + kHelped * kLanes;
constexpr int kWarps = kConsumers / kLanes;
constexpr int kRowsM = 8 * kTilesM;
constexpr int kValues = 4 * kTilesM; // of a block's products, of a thread

constexpr int kMostRegisters = 512 / ((kThreads / kLanes * kPerSm + 3) / 4) / 8 * 8; // of a lane
// Blocks whose products are in registers at once, twice: a chunk's, if there is room. Not where all
// of an SM waits for weights that were asked for at once: there two are 1 to 3 % faster.
constexpr bool kWhole =
    (kTilesM == 1 || (kTilesM == 2 && kMostRegisters >= 128)) && (!kOnePass || kPerSm > 1);
constexpr int kStep = kWhole ? kBlocks : kBlocks / 2;

constexpr int kTileBytes = kLanes * 16; // sums of 16 rows of w by 8 of x
constexpr int kRowWarps = 4 * kRowGroups;
constexpr int kTiles = kRowWarps * kTilesM;
constexpr int kOwnedTiles = (kTiles + kSplit - 1) / kSplit;
constexpr int kInboxes = kOnePass ? 1 : 2;
constexpr int kInboxBytes = kParts == 1 ? 0 : kOwnedTiles * kParts * kTileBytes;
static_assert(kOnePass || kTiles >= kSplit, "who owns a tile waits for the whole cluster");

constexpr int kStageBytes = MX_STAGE_BYTES; // what wgmma reads beyond belongs to no row
constexpr int kMostChunks = MX_MOST_CHUNKS; // of a workgroup's part of K
constexpr int kXBytes = kRowsM * kChunk;    // of a chunk
constexpr int kX = kDepth * kStageBytes;
constexpr int kXScales = kX + kMostChunks * kXBytes;
constexpr int kWScales = kXScales + kMostChunks * kBlocks * kRowsM * 4;
constexpr int kWarpScaleBytes = ((kMostChunks + kKGroups - 1) / kKGroups + 1) / 2 * kLanes * 4;
// Scales of w come by boxes of a pass's rows, or else each warp copies its own. A row of a box has
// so many bytes, from a multiple of 16 on.
constexpr int kScalePitch = MX_SCALE_PITCH;
constexpr bool kScaleBoxes = kScalePitch > 0;
constexpr int kScaleBuffers = MX_SCALE_BUFFERS;
constexpr int kWScaleBytes =
    kScaleBoxes ? 64 * kRowGroups * kScalePitch : kWarps * kWarpScaleBytes; // of a buffer
constexpr int kRowStride = kScaleBoxes ? 8 * kScalePitch : 8 * 4; // from a lane's row to its other
constexpr int kChunkStride = kScaleBoxes ? kKGroups * kBlocks : 16 * 4;
constexpr int kInbox = kWScales + kScaleBuffers * kWScaleBytes;
constexpr int kBarriers = kInbox + kInboxes * kInboxBytes;
constexpr int kEnd = kBarriers + (2 * kDepth + 2 * kInboxes + kScaleBuffers) * 8;
static_assert(kEnd + 1024 <= MX_SHARED_BYTES,
              "the host lays shared memory out differently: aiter_mx/kernels/linear/fp8_sm90.py");

using Sums = float[kValues];

MX_DEVICE void store_shared(unsigned to, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}

// The sums of a lane over its warpgroup's chunks, where w has scales so near the ends of e8m0 that
// they are to be applied in two steps.
MX_DEVICE void sum_again(Sums& sums, const Tensors& t, long first, int row, int tile_rows,
                         int first_chunk, int chunk, int chunks, int lane) {
#pragma unroll 1
    for (int v = 0; v < kValues; ++v) {
        const int in_tile = row + v / 2 % 2 * 8, m = v / 4 * 8 + lane % 4 * 2 + v % 2;
        const long n = first + in_tile;
        if (in_tile >= tile_rows || n >= t.N || m >= t.M)
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
    long N;
    int lane;

    MX_MEMBER void operator()(float4 sums, long first, int end, int tile) const {
        const int m = tile % kTilesM * 8 + lane % 4 * 2;
        const int row = tile / kTilesM * 16 + lane / 4;
        const float values[2][2] = {{sums.x, sums.y}, {sums.z, sums.w}};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const long n = first + row + 8 * i;
            if (row + 8 * i >= end || n >= N)
                continue;
            const float added = load_bias(bias, bias_kind, n);
#pragma unroll
            for (int j = 0; j < 2; ++j)
                if (m + j < M)
                    store(y + (m + j) * N + n, values[i][j] + added);
        }
    }
};

// Where sums of all parts come for the workgroup that owns them.
struct Inbox {
    const Store& store;
    unsigned boxes, full, free;
    int rank, owned;

    MX_MEMBER static unsigned parity(int pass) { return pass / kInboxes & 1; }
    MX_MEMBER static int box(int pass) { return pass % kInboxes * 8; }
    MX_MEMBER void expect(int pass) const {
        if constexpr (kSplit > 1)
            barrier_arrive_expect(full + box(pass), owned * kParts * kTileBytes);
    }
    // Waits for the sums of a pass.
    MX_MEMBER void wait(int pass) const {
        if constexpr (kSplit > 1 || kHelped) {
            if (owned > 0)
                barrier_wait(full + box(pass), parity(pass));
        } else {
            named_barrier(1, kConsumers);
        }
    }
    // Waits until all of the cluster have read what was sent two passes ago.
    MX_MEMBER void wait_until_free(int pass) const {
        if (pass >= kInboxes)
            barrier_wait(free + box(pass), parity(pass) ^ 1);
    }
    MX_MEMBER void set_free(int pass) const {
        if constexpr (kSplit > 1) {
            if (store.lane < kSplit)
                barrier_arrive_read(address_in_cluster(free + box(pass), store.lane));
        } else if (store.lane == 0) {
            barrier_arrive(free + box(pass));
        }
    }
    MX_MEMBER void add_up(int pass, long first, int end, int warp, int warps) const {
        const unsigned at = boxes + pass % kInboxes * kInboxBytes + store.lane * 16;
#pragma unroll 1
        for (int i = warp; i < owned; i += warps) {
            float4 sum = load_tile(at + i * kParts * kTileBytes);
#pragma unroll
            for (int s = 1; s < kParts; ++s)
                sum = add(sum, load_tile(at + (i * kParts + s) * kTileBytes));
            store(sum, first, end, i * kSplit + rank);
        }
    }
    MX_MEMBER void send(int pass, int tile, int k_group, float4 sum) const {
        const int to = tile % kSplit;
        const unsigned place = boxes + pass % kInboxes * kInboxBytes +
                               (tile / kSplit * kParts + rank * kKGroups + k_group) * kTileBytes;
        if constexpr (kSplit > 1)
            store_async(address_in_cluster(place + store.lane * 16, to), sum,
                        address_in_cluster(full + box(pass), to));
        else
            store_tile(place + store.lane * 16, sum);
    }
};

// Copies of the scales of w that a warp needs, those of its own 16 rows and chunks: a word each.
struct ScaleCopies {
    const unsigned char* ws;
    long blocks, last_row;
    int row, last_in_tile, chunks; // row: the warp's first
    unsigned to;

    MX_MEMBER void ask(long tile_row, int buffer, int first, int lane) const {
        const unsigned row_lane = lane % 16u, after = lane / 16u; // two chunks at once
        const long n =
            min(tile_row + min(row + static_cast<int>(row_lane), last_in_tile), last_row);
        const int begin = first + static_cast<int>(after) * kKGroups;
        const unsigned char* from = ws + n * blocks + begin * kBlocks;
        const unsigned at = to + buffer * kWarpScaleBytes + lane * 4;
        constexpr int most = ((kMostChunks + kKGroups - 1) / kKGroups + 1) / 2;
        if (reinterpret_cast<unsigned long>(ws) % 4 == 0) {
#pragma unroll
            for (int i = 0; i < most; ++i)
                if (begin + i * 2 * kKGroups < chunks)
                    copy_word_async(at + i * kLanes * 4, from + i * 2 * kKGroups * kBlocks);
        } else {
#pragma unroll 1
            for (int i = 0; begin + i * 2 * kKGroups < chunks; ++i)
                store_shared(at + i * kLanes * 4,
                             bits_to_float(load_scale_word(from + i * 2 * kKGroups * kBlocks)));
        }
    }
    // Brings a tile's to where a box would have them, for scales at addresses that it cannot have.
    MX_MEMBER void bring(long tile_row, unsigned here, int first, int lane) const {
        __syncwarp();
#pragma unroll 1
        for (int i = lane; i < 16 * ((chunks - first + kKGroups - 1) / kKGroups); i += kLanes) {
            const int row_lane = i % 16, c = first + i / 16 * kKGroups;
            const long n = min(tile_row + min(row + row_lane, last_in_tile), last_row);
            store_shared(here + row_lane * kScalePitch + c * kBlocks,
                         bits_to_float(load_scale_word(ws + n * blocks + c * kBlocks)));
        }
        __syncwarp();
    }
};

} // namespace mx
