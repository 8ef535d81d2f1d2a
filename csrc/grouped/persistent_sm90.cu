// Grouped GEMM on Hopper, for many rows: y[m] = dequantised(x[m]) * dequantised(w[g])^T + bias[g]
// for each group g and each row m of it.
//
//   xq [M, K], wq [G, N, K]        e4m3 payload; with MX_X_E5M2 xq is e5m2, a gradient
//   xs [M, K/32], ws [G, N, K/32]  e8m0 scale of each 32 consecutive k
//   y  [M, N]                      fp32, bf16 or fp16
//   bias [G, N]                    any of these, or none
//
// Both operands are made bf16 with their scales applied, which is exact, so that sums over all of
// K stay in the matrix unit. x becomes so in memory, in the order of the tiles and just ahead of
// them; w in registers, as wgmma's A, while the matrix unit works on the k before.
//
// Two workgroups, a cluster, compute a tile of 256 rows of w by up to 256 tokens, 128 rows of w
// each; both need all of the tile's x, and each brings half of it to both.
//
//   producer, a thread: 128 k of w as a box, and 64 k of x by copies of 8 KiB a slab, into a ring
//     each
//   expander, three warps: x to bf16, for all workgroups
//   consumer, two warpgroups, 64 rows of w each: w to bf16, multiply; then store the tile
//
// With MX_WGRAD it computes the gradient of w instead: tiles_sm90.h says of what. A group's k then
// end anywhere in a chunk, and what stands after them takes no part: x becomes zeros there, and
// consumers clear it in their rows of w. Groups without k are no tiles; the expanders write their
// zeros once all of x is expanded.
//
// Clusters stay and claim the tiles of all groups, long ones first, kOrder tiles of tokens with the
// same w after one another (tiles_sm90.h). What bf16 does not cover is put right after a tile
// is stored, or before it is activated. NaN in w is looked for in the first tile of each group
// alone, and put right by the consumer that finishes last.

#include "common/epilogue.h"
#include "common/quantize.h"
#include "common/scale.h"
#include "common/target.h"
#include "list_sm90.h"
#include "sm90/convert.h"
#include "sm90/expand.h"
#include "sm90/memory.h"
#include "sm90/mma.h"
#include "sm90/tma.h"
#include "sm90/wgmma.h"
#include "tiles_sm90.h"

using namespace mx;

#ifndef MX_X_E5M2
#define MX_X_E5M2 0
#endif
constexpr bool kWide = MX_X_E5M2;
// Of x, whose largest is 2^7 times as large in e5m2.
constexpr unsigned kLastScale = kWide ? kLastXScale - 7 : kLastXScale;

// Four bytes of x to two pairs of floats, exactly. e5m2 is the upper byte of fp16.
MX_DEVICE void x_to_f32(unsigned word, f32x2& low, f32x2& high) {
    if constexpr (!kWide)
        return e4m3x4_to_f32(word, low, high);
    const unsigned halves[2] = {__byte_perm(word, 0, 0x1404), __byte_perm(word, 0, 0x3424)};
    low = {half_to_f32<0>(halves[0]), half_to_f32<1>(halves[0])};
    high = {half_to_f32<0>(halves[1]), half_to_f32<1>(halves[1])};
}

// Four bytes of x times factor: bytes 0 and 2, then 1 and 3.
MX_DEVICE void x_to_bf16(unsigned word, float factor, unsigned& even, unsigned& odd) {
    if constexpr (!kWide)
        return e4m3x4_to_bf16(word, factor, even, odd);
    f32x2 low, high;
    x_to_f32(word, low, high);
    even = pack<bf16>(low.x * factor, high.x * factor);
    odd = pack<bf16>(low.y * factor, high.y * factor);
}

// The expansion of x to bf16, by some warps of each workgroup while the others multiply.
//
// Chunks of tiles are claimed one after another in about the order in which the product needs them,
// by whoever is there: no workgroup waits for one that may not have started, and a chunk that is
// claimed is expanded without waiting for others, so launches on several streams cannot block each
// other.

// The first bytes of a vector, and zeros.
MX_DEVICE u32x4 first_bytes(const u32x4& words, int count) {
    u32x4 kept;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int bytes = min(max(count - 4 * i, 0), 4);
        kept.words[i] = bytes == 4 ? words[i] : words[i] & (1u << 8 * bytes) - 1;
    }
    return kept;
}

// A part of a chunk of a tile.
struct Part {
    int tile, chunk, part;
};

// Which part a claim is: bands follow one another, and in each chunks, then tiles, then parts.
struct Claims {
    const Workspace& workspace;
    int band, tiles;
    int parts; // of a tile
    unsigned all;
    // With MX_WGRAD bands differ in depth. This one's number, and its first claim and that after.
    int number = 0;
    unsigned begin = 0, end = 0;

    MX_MEMBER Claims(const Workspace& workspace, int band) : workspace(workspace), band(band) {
        tiles = 0;
#pragma unroll
        for (int kind = 1; kind <= kMostSlabs; ++kind)
            tiles += workspace.tiles()[kind];
        if constexpr (kWgrad) {
            all = workspace.bands()[(tiles + band - 1) / band];
            end = workspace.bands()[1];
        } else {
            parts = workspace.chunks() * kChunkParts;
            all = tiles * parts;
        }
    }
    // Those asked for grow.
    MX_MEMBER Part at(unsigned claim) {
        if constexpr (kWgrad) {
            while (claim >= end) {
                begin = end;
                end = workspace.bands()[++number + 1];
            }
            return inside(number * band, claim - begin);
        }
        const unsigned of_band = band * parts;
        return inside(claim / of_band * band, claim % of_band);
    }

  private:
    MX_MEMBER Part inside(int first, int claim) const {
        const int height = min(band, tiles - first);
        return {first + claim / kChunkParts % height, claim / (height * kChunkParts),
                claim % kChunkParts};
    }
};

template <int Threads, int Barrier>
struct Expander {
    static constexpr int kBlock = 32; // k of one scale
    static constexpr int kOctet = 8;  // rows that a warp expands at a time
    static constexpr int kUnroll = 3; // octets, of a chunk's units each
    static constexpr int kAhead = 1;  // bands beyond the one that this workgroup multiplies
    static constexpr int kWarps = Threads / kLanes;

    const Workspace& workspace;
    const unsigned char *xq, *xs;
    long K;
    Routing routing;
    int thread;
    unsigned turn; // shared: what was claimed
    unsigned now;  // shared: the tile that this workgroup multiplies, or one beyond all

    // Returns how far beyond all parts the first such claim is, and how many parts there are.
    MX_MEMBER unsigned run(int band, unsigned& parts) const {
        unsigned next = thread == 0 ? claim() : 0;
        Claims claims(workspace, band);
        while (true) {
            if (thread == 0)
                store_shared(turn, next);
            named_barrier(Barrier, Threads);
            const unsigned mine = load_shared(turn);
            if (mine >= claims.all) {
                parts = claims.all;
                return mine - parts;
            }
            if (thread == 0)
                next = claim();
            const auto [tile, chunk, part] = claims.at(mine);
            if (thread == 0)
                while (tile >= (static_cast<int>(watch_shared(now)) / band + 1 + kAhead) * band)
                    sleep(500);
            named_barrier(Barrier, Threads);
            const TokenTile of = workspace.tile()[tile];
            if (kWgrad && chunk * kChunkUnits >= workspace.units(of))
                continue; // another tile of the band has more
            const bool outside = expand(of, chunk, part);
            fence_async_global();
            const bool any = named_barrier_or(Barrier, Threads, outside);
            const unsigned long long bit = 1ull << (chunk % kChunksOfWord * kChunkParts + part);
            if (thread == 0)
                set_bits_release(workspace.expanded(of) + chunk / kChunksOfWord,
                                 bit | (any ? bit << 32 : 0));
        }
    }

    // Writes the zeros of groups without k, in pieces of which the first claim is this one's.
    MX_MEMBER void clear(unsigned piece, unsigned parts, unsigned char* y, long group_bytes) const {
        constexpr int piece_bytes = 32 << 10;
        const unsigned of_group = (group_bytes + piece_bytes - 1) / piece_bytes;
        const unsigned all = *workspace.empty() * of_group;
        const bool aligned = reinterpret_cast<unsigned long long>(y) % 16 == 0;
        named_barrier(Barrier, Threads); // all have read what was claimed last
        while (piece < all) {
            const long first = piece % of_group * static_cast<long>(piece_bytes);
            const int bytes = min(group_bytes - first, static_cast<long>(piece_bytes));
            unsigned char* const to =
                y + workspace.empty_group()[piece / of_group] * group_bytes + first;
            if (aligned)
                for (int at = thread * 16; at < bytes; at += Threads * 16)
                    store_vector(to + at, u32x4{});
            else
                for (int at = thread * 2; at < bytes; at += Threads * 2)
                    *reinterpret_cast<unsigned short*>(to + at) = 0;
            if (thread == 0)
                store_shared(turn, claim() - parts);
            named_barrier(Barrier, Threads);
            piece = load_shared(turn);
            named_barrier(Barrier, Threads); // all have read it
        }
    }

    // With MX_ROUTED: notes the places of routed rows, -1 where the expert is not here, or writes
    // zeros there; in pieces of which the first claim is this one's.
    MX_MEMBER void settle(unsigned piece, unsigned parts, int experts, unsigned char* out,
                          long features) const {
        constexpr int piece_rows = 1024;
        const long rows = routing.blocks() * static_cast<long>(routing.block_m);
        const int lane = thread % kLanes;
        named_barrier(Barrier, Threads); // all have read what was claimed last
        while (piece * static_cast<long>(piece_rows) < rows) {
#pragma unroll 1
            for (int i = thread; i - lane < piece_rows; i += Threads) {
                const long place = piece * static_cast<long>(piece_rows) + i;
                const int t = place < rows ? routing.routed(place) : -1;
                const bool absent = t >= 0 && routing.is_absent(place / routing.block_m, experts);
                if constexpr (kActivation != kNoActivation) {
                    unsigned some = __ballot_sync(0xffffffff, absent);
#pragma unroll 1
                    for (; some; some &= some - 1)
                        clear_row(__shfl_sync(0xffffffff, t, __ffs(some) - 1), lane, out, features);
                } else if (t >= 0 && routing.more) {
                    routing.places()[t] = absent ? -1 : place;
                }
            }
            if (thread == 0)
                store_shared(turn, claim() - parts);
            named_barrier(Barrier, Threads);
            piece = load_shared(turn);
            named_barrier(Barrier, Threads); // all have read it
        }
    }

  private:
    MX_MEMBER unsigned claim() const { return atomicAdd(workspace.claimed(), 1u); }

    MX_MEMBER void clear_row(long t, int lane, unsigned char* out, long features) const {
        for (long n = lane * 16; n < features; n += kLanes * 16)
            store_vector(out + t * features + n, u32x4{});
        for (long b = lane; b < features / kBlock; b += kLanes)
            routing.scales()[t * (features / kBlock) + b] = 0;
    }

    // True if bf16 does not cover a scale.
    MX_MEMBER bool expand(const TokenTile tile, int chunk, int part) const {
        const int lane = thread % kLanes, step = lane % 4, in_octet = lane / 4;
        constexpr int of_slab = kSlabRows / kOctet;
        const int octets = (tile.rows + kSlabRows - 1) / kSlabRows * (of_slab / kChunkParts);
        const long k = static_cast<long>(chunk) * (kChunkUnits * kUnitK) + step * 16;
        const Depth depth = depth_of(tile, K);
        const long first = (kRouted ? 0 : tile.row * K) + depth.start + k;
        const unsigned char* payload = xq + first;
        const unsigned char* scales = xs + first / kBlock;
        const int units = min(workspace.units(tile) - chunk * kChunkUnits, kChunkUnits);
        unsigned char* const to = workspace.x(tile, 0) + chunk * kChunkUnits * kSlabUnitBytes +
                                  step * 256 + in_octet * 16;
        bool outside = false;
        for (int from = thread / kLanes; from < octets; from += kWarps * kUnroll) {
            u32x4 words[kUnroll][kChunkUnits];
            unsigned scale[kUnroll][kChunkUnits];
            const auto row_of = [&](int i) {
                const int in_part = min(from + i * kWarps, octets - 1);
                const int octet = part * octets + in_part;
                return min(octet * kOctet + in_octet, tile.rows - 1);
            };
            [[maybe_unused]] int sources[kUnroll];
            if constexpr (kRouted)
#pragma unroll
                for (int i = 0; i < kUnroll; ++i)
                    sources[i] = routing.source(routing.routed(tile.row + row_of(i)));
#pragma unroll
            for (int i = 0; i < kUnroll; ++i) {
                const int row = kRouted ? sources[i] : row_of(i);
#pragma unroll
                for (int unit = 0; unit < kChunkUnits; ++unit) {
                    words[i][unit] = u32x4{};
                    scale[i][unit] = 127;
                    if (k + unit * kUnitK < depth.columns && (!kRouted || row >= 0)) {
                        words[i][unit] = load(payload + row * K + unit * kUnitK);
                        if constexpr (kWgrad)
                            words[i][unit] =
                                first_bytes(words[i][unit], depth.columns - k - unit * kUnitK);
                        scale[i][unit] = load_byte(scales + (row * K + unit * kUnitK) / kBlock);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < kUnroll; ++i) {
                if (from + i * kWarps >= octets)
                    break;
                const int octet = part * octets + from + i * kWarps;
                unsigned char* const slab =
                    to +
                    octet / of_slab * (workspace.units(tile) * static_cast<long>(kSlabUnitBytes)) +
                    octet % of_slab * 1024;
#pragma unroll
                for (int unit = 0; unit < kChunkUnits; ++unit)
                    if (unit < units)
                        outside |= store_expanded(slab + unit * kSlabUnitBytes, words[i][unit],
                                                  scale[i][unit]);
            }
        }
        return outside;
    }

    MX_MEMBER static bool store_expanded(unsigned char* to, const u32x4& words, unsigned scale) {
        const bool is_nan = scale == kNanScale, over = scale > kLastScale && !is_nan;
        const float factor = bits_to_float(is_nan ? kNanBits : over ? 0 : (scale + 60) << 23);
        u32x4 even, odd;
#pragma unroll
        for (int j = 0; j < 4; ++j)
            x_to_bf16(words[j], factor, even.words[j], odd.words[j]);
        store_vector(to, even);
        store_vector(to + 128, odd);
        return over;
    }
};

// The rings of stages in shared memory of the grouped GEMM on Hopper, of x and of w, and the thread
// that fills them.

constexpr int kStages = MX_STAGES, kWStages = MX_W_STAGES; // of the rings of x and of w
constexpr int kOrder = MX_ORDER; // tiles of tokens that share a tile of w before the next
using Out = DType<MX_OUT>;
using Walk = TileWalk<kOrder>;
using Ring = PipelineState<kStages>;
using WRing = PipelineState<kWStages>;

constexpr int kBlock = 32; // k of one scale

constexpr int kStageX = kMostSlabs * kSlabUnitBytes;
constexpr int kBoxUnits = 2, kBoxK = kBoxUnits * kUnitK; // of w that is copied at a time
constexpr int kStagingBytes = 8 << 10;                   // of 16-bit results, for a consumer
constexpr int kStageW = kRows * kBoxK;
constexpr int kAtW = kStages * kStageX;
constexpr int kAtStaging = kAtW + kWStages * kStageW;
static_assert(kAtStaging + kConsumers * kStagingBytes == MX_SHARED_BYTES,
              "the host lays shared memory out differently: "
              "aiter_mx/kernels/grouped_gemm/persistent_sm90.py");

// Barriers of each stage: x is there, it has been used, w is there, it has been used.
constexpr int kXFull = 0, kEmpty = 8 * kStages;
constexpr int kWFull = 16 * kStages, kWEmpty = kWFull + 8 * kWStages;
// After them, what the expander and the producer tell each other, then tiles that the cluster
// computes, and a barrier for each that says that it is there. A tile is told once all stages but
// one of the tile before are under way, so that consumers have read all but the last kStages + 1.
constexpr int kWorkPlaces = 8;
static_assert(kWorkPlaces >= kStages + 2, "a tile would be overwritten before it is read");
constexpr int kTold = kWEmpty + 8 * kWStages, kWork = (kTold + 8 + 15) / 16 * 16;
constexpr int kWorkFull = kWork + kWorkPlaces * sizeof(Work);
// With an activation, then the scale of each token's block, of each consumer.
constexpr int kAtScales = kWorkFull + 8 * kWorkPlaces;
constexpr int kBarrierBytes = kAtScales + (kActivation ? kConsumers * kMostRows : 0);
constexpr int kClaimAhead = 3; // units before its end that a tile's successor is claimed

// The tile of this turn of the cluster, which was told.
MX_DEVICE Work told(unsigned barriers, unsigned turn) {
    const unsigned place = barriers + kWork + turn % kWorkPlaces * sizeof(Work);
    u32x4 pieces[kWorkPieces];
#pragma unroll
    for (int i = 0; i < kWorkPieces; ++i)
        pieces[i] = load_shared_16(place + 16 * i);
    Work work;
    __builtin_memcpy(&work, pieces, sizeof(Work));
    return work;
}
// Waits until the tile of this turn is told, and returns it.
MX_DEVICE Work receive(unsigned barriers, unsigned turn) {
    barrier_wait(barriers + kWorkFull + 8 * (turn % kWorkPlaces), turn / kWorkPlaces % 2);
    return told(barriers, turn);
}

struct Operands {
    const unsigned char *xq, *xs, *wq, *ws;
    const void* bias;
    Out* y;
    long N, K;
    int bias_kind;
    long M; // rows of x
    RowGroups groups;
    Routing routing;
    ActivationArgs activation;

    MX_MEMBER long blocks() const { return K / kBlock; }
    MX_MEMBER int units() const { return (K + kUnitK - 1) / kUnitK; }
    // With MX_ROUTED M counts places, and this is the row of x in one, or -1.
    MX_MEMBER long x_row(long place) const {
        return kRouted ? routing.source(routing.routed(place)) : place;
    }
    // Row i, of 16, of its group's w that a warp multiplies, in a tile whose rows are counted from
    // n on. With an activation these are 8 of gate and 8 of up.
    // 64-bit arithmetic where it is not needed makes ptxas spill.
    template <class Row>
    MX_MEMBER Row w_row_of(Row n, int warp, int i) const {
        if constexpr (kActivation == kNoActivation)
            return n + warp * 16 + i;
        return gate_or_up(n / 2 + warp * 8 + i % 8, i / 8);
    }
    // The row of a group's w that makes a feature's gate, or its up.
    MX_MEMBER int gate_or_up(int feature, int up) const {
        return kInterleaved ? 2 * feature + up : feature + up * static_cast<int>(N / 2);
    }
    // The first row of w of a tile's group, and the first row of y of its tokens.
    MX_MEMBER long w_row(const TokenTile& tile) const { return kWgrad ? 0 : tile.group * N; }
    MX_MEMBER long y_row(const TokenTile& tile) const {
        if constexpr (kUnpad)
            return tile.row + groups.range_of_y(tile.group).begin - groups.range(tile.group).begin;
        return kWgrad ? tile.group * M + tile.row : tile.row;
    }
};

// The rows of each group.
MX_DEVICE RowGroups groups_of(const Operands& t, const Workspace& workspace) {
    if constexpr (!kRouted)
        return t.groups;
    return {workspace.starts(), workspace.ends(), t.M, workspace.groups, 0, sizeof(int)};
}

// Fills stage after stage, for one tile after another.
struct Producer {
    const Operands& t;
    const TensorMap& weights;
    const Workspace& workspace;
    unsigned shared, barriers, now;
    int rank;
    Ring ring;
    WRing w;
    unsigned long long expanded; // of the tile, as last seen

    // Waits until a chunk of x is there, and what its expansion noted.
    MX_MEMBER void await(const TokenTile& tile, int chunk) {
        const int place = chunk % kChunksOfWord;
        if (place == 0)
            expanded = 0;
        const auto there = [&] {
            return (expanded >> place * kChunkParts & kWholeChunk) == kWholeChunk;
        };
        if (there())
            return;
        do
            expanded = load_acquire(workspace.expanded(tile) + chunk / kChunksOfWord);
        while (!there());
        fence_async_global();
    }

    // Fills the stages of one tile after another. The first workgroup's producer claims them, and
    // tells all of the cluster.
    MX_MEMBER void run() {
        Walk walk(workspace, t.N);
        if (rank == 0)
            send(0, walk.at(blockIdx.x / kCluster));
        for (unsigned turn = 0;; ++turn) {
            barrier_arrive_expect(barriers + kWorkFull + 8 * (turn % kWorkPlaces), sizeof(Work));
            const Work work = receive(barriers, turn);
            if (work.slabs == 0)
                break;
            tile(work, walk, turn);
        }
        announce_shared(now, kNoTile);
    }

    MX_MEMBER void send(unsigned turn, const Work& work) const {
        const unsigned place = barriers + kWork + turn % kWorkPlaces * sizeof(Work);
        const unsigned barrier = barriers + kWorkFull + 8 * (turn % kWorkPlaces);
        u32x4 pieces[kWorkPieces];
        __builtin_memcpy(pieces, &work, sizeof(Work));
        for (int to = 0; to < kCluster; ++to)
            for (int i = 0; i < kWorkPieces; ++i)
                store_async(address_in_cluster(place + 16 * i, to), pieces[i],
                            address_in_cluster(barrier, to));
    }

    MX_MEMBER void tile(const Work& work, Walk& walk, unsigned turn) {
        // What tails need has been expanded, or will be whatever this workgroup multiplies.
        announce_shared(now, work.tail ? kNoTile : work.tokens.index);
        const int units = workspace.units(work.tokens);
        const int slabs = (work.tokens.rows + kSlabRows - 1) / kSlabRows;
        const int in_group = work.n + (work.tail ? 0 : rank * kRows);
        int row = t.w_row(work.tokens) + in_group;
        [[maybe_unused]] int other_row = row + kRows / 2;
        if constexpr (kActivation != kNoActivation && !kInterleaved) {
            row -= in_group / 2;
            other_row = row + t.N / 2;
        }
        const int start = depth_of(work.tokens, t.K).start;
        const int claimed_at = max(units - kClaimAhead, 0);
        const long slab_bytes = units * static_cast<long>(kSlabUnitBytes);
        // Each workgroup brings every second slab of a tile to both, and of a tail what it needs
        // itself.
        const int first = work.tail ? rank * work.slabs : rank, step = work.tail ? 1 : kCluster;
        const int end = work.tail ? min(first + work.slabs, slabs) : slabs;
        const int arriving = max(work.tail ? end - first : slabs, 0) * kSlabUnitBytes;
        const unsigned short mask = work.tail ? 1 << rank : (1 << kCluster) - 1;
        const unsigned char* x = workspace.x(work.tokens, first);
        unsigned next = 0;
        for (int unit = 0; unit < units; ++unit) {
            if (unit == claimed_at && rank == 0)
                next = atomicAdd(workspace.begun(), 1u);
            if (unit == units - 1 && rank == 0)
                send(turn + 1, walk.at(next));
            if (unit % kBoxUnits == 0) {
                barrier_wait(barriers + kWEmpty + 8 * w.at, w.parity ^ 1);
                const unsigned w_barrier = barriers + kWFull + 8 * w.at;
                barrier_arrive_expect(w_barrier, kStageW);
                const unsigned to = shared + kAtW + w.at * kStageW;
                tma_load(to, weights, start + unit * kUnitK, row, w_barrier);
                if constexpr (kActivation != kNoActivation)
                    tma_load(to + kStageW / 2, weights, start + unit * kUnitK, other_row,
                             w_barrier);
                w.next();
            }
            barrier_wait(barriers + kEmpty + 8 * ring.at, ring.parity ^ 1);
            if (unit % kChunkUnits == 0)
                await(work.tokens, unit / kChunkUnits);
            const unsigned barrier = barriers + kXFull + 8 * ring.at;
            barrier_arrive_expect(barrier, arriving);
            const unsigned place = shared + ring.at * kStageX + first * kSlabUnitBytes;
            if (first < end)
                copy_to_cluster(place, x, kSlabUnitBytes, barrier, mask);
            if (first + step < end)
                copy_to_cluster(place + step * kSlabUnitBytes, x + step * slab_bytes,
                                kSlabUnitBytes, barrier, mask);
            x += kSlabUnitBytes;
            ring.next();
        }
    }
};

constexpr int kGroupThreads = 128; // of a warpgroup
constexpr int kWarps = kGroupThreads / kLanes;

MX_DEVICE float value(float x) { return x; }
template <class T>
MX_DEVICE float value(T x) {
    return to_f32(x);
}

// Some outputs are computed without the matrix unit: those that NaN in w reaches, and those of
// scales that bf16 does not cover.

// The blocks of a row that a tile is a sum over.
struct Blocks {
    long start, count;
};
MX_DEVICE Blocks blocks_of(const Operands& t, const Depth& depth) {
    if constexpr (kWgrad)
        return {depth.start / kBlock, (depth.columns + kBlock - 1) / kBlock};
    return {0, t.blocks()};
}

// True if bf16 does not cover a scale of this row of x.
MX_DEVICE bool token_outside(const Operands& t, long row, const Depth& depth) {
    constexpr int at_once = 8;
    bool outside = false;
    const Blocks blocks = blocks_of(t, depth);
    const unsigned char* const scales = t.xs + row * t.blocks() + blocks.start;
#pragma unroll 1
    for (long first = 0; first < blocks.count; first += at_once) {
        unsigned scale[at_once];
#pragma unroll
        for (int i = 0; i < at_once; ++i)
            scale[i] = load_byte(scales + min(first + i, blocks.count - 1));
#pragma unroll
        for (int i = 0; i < at_once; ++i)
            outside |= scale[i] > kLastScale && scale[i] != kNanScale;
    }
    return outside;
}

// True if bf16 does not cover a scale of this row of w, in two blocks of each four from the first
// on. Zeros under a small scale are right as they are: quantisation gives blocks of zeros the
// smallest.
MX_DEVICE bool weights_outside(const Operands& t, long row, const Depth& depth, int first) {
    bool outside = false;
    const Blocks blocks = blocks_of(t, depth);
    const unsigned char* const scales = t.ws + row * t.blocks() + blocks.start;
    const unsigned char* const payload = t.wq + row * t.K + blocks.start * kBlock;
#pragma unroll 1
    for (long i = first; i < blocks.count; i += 4) {
        unsigned pair[2];
#pragma unroll
        for (int j = 0; j < 2; ++j)
            pair[j] = i + j < blocks.count ? load_byte(scales + i + j) : 127;
#pragma unroll 1
        for (int piece = 0; piece < 4; ++piece) {
            const unsigned scale = pair[piece / 2];
            outside |= scale > kLastWScale;
            if (scale >= kFirstWScale)
                continue;
            const long k = i * kBlock + piece * 16;
            const int left = kWgrad ? min(depth.columns - k, 16L) : 16;
            const u32x4 words = first_bytes(load(payload + k), left);
            outside |= ((words[0] | words[1] | words[2] | words[3]) & 0x7f7f7f7f) != 0;
        }
    }
    return outside;
}

MX_DEVICE void swap(unsigned& a, unsigned& b) {
    const unsigned kept = a;
    a = b;
    b = kept;
}

// An output of these rows of x and w, without the bias.
MX_DEVICE float sum_again(const Operands& t, long x, long w, const Depth& depth) {
    const unsigned char *xq = t.xq + x * t.K, *xs = t.xs + x * t.blocks();
    const unsigned char *wq = t.wq + w * t.K, *ws = t.ws + w * t.blocks();
    if constexpr (!kWgrad && !kWide)
        return exact_output(xq, xs, wq, ws, t.K);
    constexpr int piece = 16;
    float sum = 0.0f;
#pragma unroll 1
    for (long k = depth.start; k < depth.start + depth.columns; k += piece) {
        f32x2 values[8], weights[8];
        const int left = min(depth.start + depth.columns - k, static_cast<long>(piece));
        const u32x4 x_words = first_bytes(load(xq + k), left);
        const u32x4 w_words = first_bytes(load(wq + k), left);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            x_to_f32(x_words[i], values[2 * i], values[2 * i + 1]);
            e4m3x4_to_f32(w_words[i], weights[2 * i], weights[2 * i + 1]);
        }
        unsigned first = load_byte(xs + k / kBlock), other = load_byte(ws + k / kBlock);
        // Products of e5m2 have more bits below 1 than a small scale leaves.
        if (kWide && first < other)
            swap(first, other);
        sum = add_scaled(sum, dot(values, weights), e8m0_split(first), e8m0_to_f32(other));
    }
    return sum;
}

// Computes the outputs of a warp's 16 rows of w, from n, that the matrix unit cannot. Lane 4g + t
// tells whether bf16 does not cover a scale of row g, or of row g + 8 where t is odd. Where y is
// added to, nothing of these rows has been stored, and all of it is computed.
MX_DEVICE void compute_again(const Operands& t, const TokenTile& tokens, long n, int lane,
                             bool scale_outside, bool x_outside) {
    const Depth depth = depth_of(tokens, t.K);
    x_outside = __any_sync(0xffffffff, x_outside);
    const unsigned scales_outside = __ballot_sync(0xffffffff, scale_outside);
    const auto is_outside = [&](int row) { // lanes row % 8 * 4 and on hold it
        return scales_outside >> row % 8 * 4 & (row / 8 ? 0xa : 0x5);
    };
    const auto compute = [&](int m, int row) {
        const long x = t.x_row(tokens.row + m), w = t.w_row(tokens) + n + row;
        if (kRouted && x < 0)
            return;
        const float added = kWgrad ? 0 : load_bias(t.bias, t.bias_kind, w);
        const float sum = sum_again(t, x, w, depth);
        Out* const to = t.y + (t.y_row(tokens) + m) * t.N + n + row;
        store(to, sum + (kAccumulate ? value(*to) : added));
    };
    const int rows = min(16l, t.N - n);
#pragma unroll 1
    for (int row = 0; row < rows; ++row)
        if (kAccumulate || is_outside(row))
#pragma unroll 1
            for (int m = lane; m < tokens.rows; m += kLanes)
                compute(m, row);
    if (kAccumulate || !x_outside)
        return;
    // Few tokens have such scales: a lane takes a row of w.
#pragma unroll 1
    for (int base = 0; base < tokens.rows; base += kLanes) {
        const long x = base + lane < tokens.rows ? t.x_row(tokens.row + base + lane) : -1;
        unsigned some = __ballot_sync(0xffffffff, x >= 0 && token_outside(t, x, depth));
#pragma unroll 1
        for (; some; some &= some - 1)
            if (lane < rows && !is_outside(lane))
                compute(base + __ffs(some) - 1, lane);
    }
}

#if MX_ACTIVATION
// Computes again the sums of a warp's rows of w, of a tile whose rows are counted from n on, where
// bf16 does not cover a scale: of a block by the matrix unit over fp16, which holds any payload,
// and then times both scales in turn.
template <int Slabs>
MX_DEVICE void sum_blocks(float (&sums)[Slabs * 32], const Operands& t, const TokenTile& tokens,
                          int n, int warp, int lane) {
    static_assert(!kWide && !kWgrad, "both payloads are e4m3, and K is whole");
    constexpr int at_once = 2;
    const int feature = min(n / 2 + warp * 8 + lane / 4, static_cast<int>(t.N / 2) - 1);
    const long row = t.w_row(tokens) + t.gate_or_up(feature, 0);
    const int to_up = t.gate_or_up(0, 1); // rows
    const unsigned char *const of_w = t.wq + row * t.K + lane % 4 * 8, *const w_scales =
                                                                           t.ws + row * t.blocks();
    float found[Slabs * 32] = {};
#pragma unroll 1
    for (int octet = 0; octet < Slabs * 8; ++octet) {
        const int token = octet * 8 + lane / 4;
        const long x = token < tokens.rows ? t.x_row(tokens.row + token) : -1;
        const unsigned char* const of_x = t.xq + max(x, 0L) * t.K + lane % 4 * 8;
        const unsigned char* const x_scales = t.xs + max(x, 0L) * t.blocks();
        float own[4] = {};
        __syncwarp();
#pragma unroll 1
        for (long first = 0; first < t.blocks(); first += at_once) {
            uint2 x_bytes[at_once], w_bytes[at_once][2];
            unsigned x_scale[at_once], w_scale[at_once][2];
#pragma unroll
            for (int j = 0; j < at_once; ++j) {
                const long block = min(first + j, t.blocks() - 1);
                x_bytes[j] = *reinterpret_cast<const uint2*>(of_x + block * kBlock);
                x_scale[j] = load_byte(x_scales + block);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    w_bytes[j][i] = *reinterpret_cast<const uint2*>(
                        of_w + (block + i * to_up * t.blocks()) * kBlock);
                    w_scale[j][i] = load_byte(w_scales + block + i * to_up * t.blocks());
                }
            }
#pragma unroll
            for (int j = 0; j < at_once; ++j) {
                if (first + j >= t.blocks())
                    break;
                float products[4];
                mma_block(products, e4m3x8_to_f16(w_bytes[j][0]), e4m3x8_to_f16(w_bytes[j][1]),
                          e4m3x8_to_f16(x_bytes[j]));
#pragma unroll
                for (int v = 0; v < 4; ++v) {
                    const unsigned scale =
                        __shfl_sync(0xffffffff, x_scale[j], (lane % 4 * 2 + v % 2) * 4);
                    own[v] = add_scaled(own[v], products[v], e8m0_split(scale),
                                        e8m0_to_f32(w_scale[j][v / 2]));
                }
            }
        }
        // Registers have no index at run time: all move on by an octet.
#pragma unroll
        for (int v = 0; v < Slabs * 32 - 4; ++v)
            found[v] = found[v + 4];
#pragma unroll
        for (int v = 0; v < 4; ++v)
            found[Slabs * 32 - 4 + v] = own[v];
    }
#pragma unroll
    for (int v = 0; v < Slabs * 32; ++v)
        sums[v] = found[v];
}

// NaN reaches all of a block. For the consumer that finishes last.
constexpr unsigned kNanPayload = 0x7f;
MX_DEVICE void spread_nans(const Operands& t, const Workspace& workspace, const RowGroups& groups,
                           int thread) {
    const int lane = thread % kLanes;
    const long blocks_of_group = t.N / 2 / kBlock, blocks = groups.count * blocks_of_group;
#pragma unroll 1
    for (long base = thread - lane; base < blocks; base += 128) {
        // A block's rows of w have two words.
        const unsigned* const own = workspace.nans() + (base + lane) * 2;
        unsigned some = __ballot_sync(0xffffffff, base + lane < blocks &&
                                                      (load_relaxed(own) | load_relaxed(own + 1)));
#pragma unroll 1
        for (; some; some &= some - 1) {
            const long at = base + __ffs(some) - 1;
            const RowRange range = groups.range(at / blocks_of_group);
#pragma unroll 1
            for (long m = range.begin + lane; m < range.end; m += kLanes) {
                const long routed = t.routing.routed(m);
                if (routed < 0)
                    continue;
                const long block = routed * blocks_of_group + at % blocks_of_group;
                constexpr unsigned nans = kNanPayload * 0x01010101u;
                unsigned char* const to = reinterpret_cast<unsigned char*>(t.y) + block * kBlock;
                for (int i = 0; i < kBlock; i += 16)
                    store_vector(to + i, u32x4{{nans, nans, nans, nans}});
                t.routing.scales()[block] = kNanScale;
            }
        }
    }
}
#endif

// Notes which of a warp's 16 rows of w, from row, have NaN. Lane 4g + t tells whether it saw one
// in row g, and in row g + 8.
MX_DEVICE void note_nans(const Workspace& workspace, long row, int lane, bool low, bool high) {
    const unsigned seen[2] = {__ballot_sync(0xffffffff, low), __ballot_sync(0xffffffff, high)};
    if (lane != 0 || !(seen[0] | seen[1]))
        return;
    unsigned rows = 0;
#pragma unroll 1
    for (int i = 0; i < 16; ++i)
        if (seen[i / 8] >> i % 8 * 4 & 0xf)
            rows |= 1u << i;
    atomicOr(workspace.nans() + row / 32, rows << row % 32);
    atomicOr(workspace.finished(), kSomeNan);
}

#if !MX_ACTIVATION
// Makes NaN of all outputs of the rows that were noted. For the consumer that finishes last.
MX_DEVICE void spread_nans(const Operands& t, const Workspace& workspace, const RowGroups& groups,
                           int thread) {
    const int lane = thread % kLanes;
    const long words = groups.count * t.N / 32;
#pragma unroll 1
    for (long base = thread - lane; base < words; base += 128) {
        const unsigned own = base + lane < words ? load_relaxed(workspace.nans() + base + lane) : 0;
        unsigned some = __ballot_sync(0xffffffff, own);
#pragma unroll 1
        for (; some; some &= some - 1) {
            const int at = __ffs(some) - 1;
            const bool mine = __shfl_sync(0xffffffff, own, at) >> lane & 1;
            const long row = (base + at) * 32 + lane, group = row / t.N;
            const bool several = groups.runs();
            const int first = several ? 0 : group, end = several ? groups.ranges() : group + 1;
#pragma unroll 1
            for (int at = first; at < end; ++at) {
                if (!mine || groups.group_of(at) != group)
                    continue;
                const RowRange range =
                    kWgrad ? RowRange{group * t.M, (group + 1) * t.M} : groups.range_of_y(at);
#pragma unroll 1
                for (long m = range.begin; m < range.end; ++m)
                    store(t.y + m * t.N + row % t.N, bits_to_float(kNanBits));
            }
        }
    }
}

#endif

// A consumer stores its part of a tile.
//
// 16-bit results go through shared memory, from where TMA takes them to memory, in
// boxes of 32 tokens, while the next tile is multiplied. They need more room than there is beside
// the rings: so the stages that were used last are given back only when they have been read, by
// each warp once it has seen that those that it sent have been.

constexpr int kBoxRows = 32, kBoxBytes = kBoxRows * kGroupRows * 2;
constexpr int kOwnBoxes = kStagingBytes / kBoxBytes;
static_assert(kOwnBoxes + 4 + kBoxUnits == 8, "four in the stage's x, and the others in its w");
constexpr int kConsumersBarrier = 1 + kConsumers; // a named one of all, after those of each

struct Results {
    const Operands& t;
    const TensorMap& map;
    const TokenTile& tokens;
    int n, index, thread;
    // Where boxes are staged: kOwnBoxes in a place of this consumer's, four in its part of the x
    // that was used last, the others in that of w.
    unsigned own, in_x, in_w;

    // Returns whether again holds for any thread.
    template <int Slabs>
    MX_MEMBER bool store(const float (&sums)[Slabs * 32], const float (&added)[2],
                         bool again) const {
        if constexpr (kAccumulate)
            return add<Slabs>(sums, again);
        else if constexpr (sizeof(Out) == 4)
            return store_fp32<Slabs>(sums, added, again);
        else
            return store_16<Slabs>(sums, added, again);
    }

  private:
    template <int Slabs>
    MX_MEMBER bool store_fp32(const float (&sums)[Slabs * 32], const float (&added)[2],
                              bool again) const {
        const int lane = thread % kLanes;
        const long first = n + thread / kLanes * 16 + lane / 4; // row of w
        Out* to = t.y + (t.y_row(tokens) + lane % 4 * 2) * t.N + first;
#pragma unroll
        for (int i = 0; i < Slabs * 32; ++i) {
            const int token = i / 4 * 8 + i % 2, row = i / 2 % 2 * 8;
            if (token + lane % 4 * 2 < tokens.rows && first + row < t.N)
                mx::store(to + token * t.N + row, sums[i] + added[i / 2 % 2]);
        }
        return named_barrier_or(1 + index, kGroupThreads, again);
    }

    // Adds to what y holds, unless the warp's rows are to be computed again. No one else adds to
    // these, so that fp32 can be added in the L2 without waiting for what is there.
    template <int Slabs>
    MX_MEMBER bool add(const float (&sums)[Slabs * 32], bool again) const {
        const int lane = thread % kLanes;
        const long first = n + thread / kLanes * 16 + lane / 4; // row of w
        Out* to = t.y + (t.y_row(tokens) + lane % 4 * 2) * t.N + first;
        if (!__any_sync(0xffffffff, again)) {
#pragma unroll
            for (int i = 0; i < Slabs * 32; ++i) {
                const int token = i / 4 * 8 + i % 2, row = i / 2 % 2 * 8;
                if (token + lane % 4 * 2 >= tokens.rows || first + row >= t.N)
                    continue;
                Out* const at = to + token * t.N + row;
                if constexpr (sizeof(Out) == 4)
                    atomicAdd(at, sums[i]);
                else
                    mx::store(at, sums[i] + value(*at));
            }
        }
        return named_barrier_or(1 + index, kGroupThreads, again);
    }

    template <int Slabs>
    MX_MEMBER bool store_16(const float (&sums)[Slabs * 32], const float (&added)[2],
                            bool again) const {
        constexpr int boxes = Slabs * kSlabRows / kBoxRows;
        // The warps have seen that what was staged before has been read.
        named_barrier(1 + index, kGroupThreads);
        stage<Slabs, 0, (boxes < kOwnBoxes ? boxes : kOwnBoxes)>(sums, added);
        if constexpr (boxes <= kOwnBoxes) {
            const bool any = named_barrier_or(1 + index, kGroupThreads, again);
            send<0, boxes>();
            return any;
        } else {
            // The other consumer, if it has rows of w, may still multiply by the stage.
            if (n + (1 - 2 * index) * kGroupRows < t.N)
                named_barrier(kConsumersBarrier, kConsumers * kGroupThreads);
            else
                named_barrier(1 + index, kGroupThreads);
            send<0, kOwnBoxes>();
            stage<Slabs, kOwnBoxes, boxes>(sums, added);
            const bool any = named_barrier_or(1 + index, kGroupThreads, again);
            send<kOwnBoxes, boxes>();
            return any;
        }
    }

    MX_MEMBER unsigned place(int box) const {
        return box < kOwnBoxes       ? own + box * kBoxBytes
               : box < kOwnBoxes + 4 ? in_x + (box - kOwnBoxes) * kBoxBytes
                                     : in_w + (box - kOwnBoxes - 4) * kBoxBytes;
    }

    // Adding nothing takes as many instructions as all else.
    template <int Slabs, int First, int End>
    MX_MEMBER void stage(const float (&sums)[Slabs * 32], const float (&added)[2]) const {
        if (t.bias_kind == kNone)
            stage_sums<Slabs, First, End, false>(sums, added);
        else
            stage_sums<Slabs, First, End, true>(sums, added);
    }

    // Stages some boxes as [token][n], 128 bytes a token, 16 bytes at place ^ token % 8, as the map
    // has them.
    template <int Slabs, int First, int End, bool Biased>
    MX_MEMBER void stage_sums(const float (&sums)[Slabs * 32], const float (&added)[2]) const {
        const int lane = thread % kLanes, row = lane % 8;
        const int piece = (thread / kLanes * 2 + lane / 8 % 2) ^ row;
        const unsigned at_place = (lane / 16 * 8 + row) * 128 + piece * 16;
#pragma unroll
        for (int box = First; box < End; ++box) {
#pragma unroll
            for (int j = 0; j < 2; ++j) { // 16 tokens
                unsigned packed[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int at = ((box * 2 + j) * 2 + i / 2) * 4 + i % 2 * 2;
                    const float plus = Biased ? added[i % 2] : -0.0f;
                    packed[i] = pack<Out>(sums[at] + plus, sums[at + 1] + plus);
                }
                store_matrices_transposed(place(box) + at_place + j * 16 * 128, packed);
            }
        }
        fence_async();
    }

    // Stores boxes that all threads have staged.
    template <int First, int End>
    MX_MEMBER void send() const {
        const bool aligned = reinterpret_cast<unsigned long long>(t.y) % 16 == 0;
        // Each warp's first thread stores some of the boxes that are whole, all threads the others.
        const int whole = max(First, aligned ? min(tokens.rows / kBoxRows, End) : 0);
        if (thread % kLanes == 0) {
#pragma unroll 1
            for (int box = First + (thread / kLanes - First & kWarps - 1); box < whole;
                 box += kWarps)
                tma_store(map, n * sizeof(Out), t.y_row(tokens) + box * kBoxRows, place(box));
            tma_store_commit();
        }
#pragma unroll 1
        for (int box = whole; box < End; ++box)
            send_rows(box * kBoxRows, place(box), aligned);
    }

    // Stores the rows of a box that are of the tile, where the copy engine cannot.
    MX_MEMBER void send_rows(int first, unsigned staged, bool aligned) const {
        const int piece = thread % 8, rows = min(tokens.rows - first, kBoxRows);
        if (n + piece * 8 >= t.N)
            return;
#pragma unroll 1
        for (int row = thread / 8; row < rows; row += kGroupThreads / 8) {
            const u32x4 values = load_shared_16(swizzled_128(staged, row, piece));
            Out* to = t.y + (t.y_row(tokens) + first + row) * t.N + n + piece * 8;
            if (aligned)
                store_vector(to, values);
            else
                store_halves(to, values);
        }
    }

    MX_MEMBER static void store_halves(Out* to, const u32x4& values) {
        unsigned short* halves = reinterpret_cast<unsigned short*>(to);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            halves[i] = values[i / 2] >> (i % 2 * 16);
    }
};

#if MX_ACTIVATION
struct ActivatedResults {
    const Operands& t;
    const TokenTile& tokens;
    int n, index, thread;
    unsigned own, scales; // where blocks are staged, and the scales of each token's

    // Tokens whose scales a thread finds, and whose blocks it stores with its neighbour.
    template <int Slabs>
    static constexpr int kTokens = (Slabs * kSlabRows + kGroupThreads - 1) / kGroupThreads;

    // Their routed rows, or -1, which take long to come.
    template <int Slabs>
    MX_MEMBER void find_rows(int (&rows)[kTokens<Slabs>]) const {
#pragma unroll
        for (int i = 0; i < kTokens<Slabs>; ++i) {
            const int token = token_of<Slabs>(i);
            const bool exists =
                i * kGroupThreads + thread < Slabs * kSlabRows && token < tokens.rows;
            rows[i] = exists ? t.routing.routed(tokens.row + token) : -1;
        }
    }

    // Activates sums, quantises the consumer's block of 32 features of each token, and stores it in
    // the routed row. A thread has one feature of every fourth pair of tokens, its gate in the
    // first of its two rows and its up in the other.
    template <int Slabs>
    MX_MEMBER void store(const float (&sums)[Slabs * 32], const float (&added)[2],
                         const int (&rows)[kTokens<Slabs>]) const {
        const int lane = thread % kLanes, warp = thread / kLanes;
        float values[Slabs * 16]; // of tokens 8 (i / 2) + 2 (lane % 4) + i % 2
        unsigned largest[Slabs * 16];
#pragma unroll
        for (int i = 0; i < Slabs * 16; ++i) {
            const int at = i / 2 * 4 + i % 2;
            values[i] =
                activate<kActivation>(sums[at] + added[0], sums[at + 2] + added[1], t.activation);
            largest[i] = magnitude_bits(values[i]);
        }
        largest_of_lanes<Slabs * 8, 16>(largest);
        largest_of_lanes<Slabs * 4, 8>(largest);
        largest_of_lanes<Slabs * 2, 4>(largest);
        // What was staged before has been read.
        named_barrier(1 + index, kGroupThreads);
#pragma unroll
        for (int i = 0; i < Slabs * 2; ++i)
            store_shared_4(own + (warp * Slabs * 2 + i) * 128 + lane * 4, largest[i]);
        named_barrier(1 + index, kGroupThreads);
#pragma unroll
        for (int i = 0; i < kTokens<Slabs>; ++i) {
            const int at = i * kGroupThreads + thread;
            if (at >= Slabs * kSlabRows)
                break;
            unsigned amax = 0;
#pragma unroll
            for (int w = 0; w < kWarps; ++w)
                amax = max(amax, load_shared_4(own + w * Slabs * 256 + at * 4));
            const BlockScale scale = block_scale<E4M3, kRoundUp>(amax);
            store_shared_1(scales + token_of<Slabs>(i), scale.byte);
            if (rows[i] >= 0)
                t.routing.scales()[rows[i] * (t.N / 64) + n / 64] = scale.byte;
        }
        named_barrier(1 + index, kGroupThreads);
#pragma unroll
        for (int i = 0; i < Slabs * 16; i += 4) {
            f32x2 pairs[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const unsigned two = load_shared_2(scales + (i / 2 + j) * 8 + lane % 4 * 2);
                pairs[j] = {values[i + j * 2] * inverse_of(two & 0xff),
                            values[i + j * 2 + 1] * inverse_of(two >> 8)};
            }
            const unsigned bytes = f32_to_e4m3x4<false>(pairs[0], pairs[1], false);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int token = (i / 2 + j / 2) * 8 + lane % 4 * 2 + j % 2;
                store_shared_1(piece(token, warp / 2) + warp % 2 * 8 + lane / 4, bytes >> 8 * j);
            }
        }
        named_barrier(1 + index, kGroupThreads);
        // Two lanes store a token's block, and then the other's.
#pragma unroll
        for (int i = 0; i < kTokens<Slabs>; ++i)
#pragma unroll
            for (int of = 0; of < 2; ++of) {
                const int row = __shfl_sync(0xffffffff, rows[i], lane / 2 * 2 + of);
                const int token = __shfl_sync(0xffffffff, token_of<Slabs>(i), lane / 2 * 2 + of);
                if (row >= 0)
                    store_vector(reinterpret_cast<unsigned char*>(t.y) + row * (t.N / 2) + n / 2 +
                                     lane % 2 * 16,
                                 load_shared_16(piece(token, lane % 2)));
            }
    }

  private:
    // Where such a token is: lane / 4 is left with the maxima of a part of the tokens.
    template <int Slabs>
    MX_MEMBER int token_of(int i) const {
        const int at = i * kGroupThreads + thread;
        const int in_order = at % kLanes / 4 * Slabs * 2 + at / kLanes;
        return in_order / 2 * 8 + at % 4 * 2 + in_order % 2;
    }

    // Where half of a token's block is staged, so that lanes of 8 tokens use different banks.
    MX_MEMBER unsigned piece(int token, int half) const {
        return own + token * kBlock + (half ^ token / 4 % 2) * 16;
    }

    // The inverse of a block's scale, NaN where it is.
    MX_MEMBER static float inverse_of(unsigned scale) {
        return bits_to_float(scale == kNanScale ? kNanBits : (254 - scale) << 23);
    }

    // Of twice as many values the larger ones, over two lanes of which each keeps one half.
    template <int Count, int Distance, int Room>
    MX_MEMBER void largest_of_lanes(unsigned (&values)[Room]) const {
        const bool upper = thread & Distance;
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            const unsigned kept = upper ? values[Count + i] : values[i];
            const unsigned given = upper ? values[i] : values[Count + i];
            values[i] = max(kept, __shfl_xor_sync(0xffffffff, given, Distance));
        }
    }
};
#endif

// A warpgroup that multiplies takes 64 rows of w of a tile, made bf16 in registers, by all of the
// tile's tokens.

constexpr int kStepBytes = 256; // of 8 tokens' x, for one wgmma

struct Consumer {
    const Operands& t;
    const Workspace& workspace;
    const TensorMap& results;
    unsigned shared, barriers;
    int index, rank, thread, lane, warp;
    unsigned turn = 0;
    TokenTile tokens; // this consumer's part of the tile
    int n;            // its first row of w
    int slabs;        // of tokens; of the next tile once that is awaited
    // With MX_WGRAD: of the tile its units, and k of it from the next box of w on.
    int own_units, left;
    int x_slab; // of a stage
    Ring ring;  // where x of the next unit to multiply is
    WRing w;    // where w of the next unit to expand is
    // Stage of the unit before, or of the tile before, where results may be on their way out; none
    // at first. And that of the last w of the tile before, likewise.
    int used = -1, used_w;
    // Scales of the next two units: of row lane / 4 of the warp's 16, or that + 8 for odd lanes,
    // and of the second unit for lanes 2 and 3 of four; of each the first 32 k and the other. Then
    // those of this unit and the next, or the one before, as factors.
    unsigned scales, factors;
    const unsigned char* scales_at;
    int scales_left; // beyond those, for this lane
    unsigned least, most, nan[2];
    int looks_for_nan; // in the tile's w
    const unsigned magnitude = held(kMagnitude);
    unsigned w_place;                // of what this lane loads of w, in the first stage
    unsigned words[2][4], factor[2]; // of the unit to expand: [row]

    MX_MEMBER Consumer(const Operands& t, const Workspace& workspace, const TensorMap& results,
                       unsigned shared, unsigned barriers, int index, int rank, int thread)
        : t(t), workspace(workspace), results(results), shared(shared), barriers(barriers),
          index(index), rank(rank), thread(thread) {
        lane = thread % kLanes;
        warp = thread / kLanes;
        // Of the box's rows: with an activation 64 of gate and then as many of up, or both in turn.
        const int row = kActivation == kNoActivation ? index * kGroupRows + warp * 16 + lane % 8
                        : kInterleaved               ? index * kGroupRows + warp * 16 + lane % 8 * 2
                                                     : index * kGroupRows / 2 + warp * 8 + lane % 8;
        w_place = held(swizzled_128(shared + kAtW, row, lane / 8));
    }

    MX_MEMBER int tile_units() const { return kWgrad ? own_units : t.units(); }
    // The next two scales of this lane's.
    MX_MEMBER void load_scales() {
        if constexpr (MX_SCALES_APART) {
            const unsigned first = scales_left > 0 ? load_byte(scales_at) : 127;
            scales = first | (scales_left > 1 ? load_byte(scales_at + 1) : 127) << 8;
        } else {
            scales = scales_left > 0 ? load_two(scales_at) : 127 * 0x0101;
            if (kWgrad && scales_left == 1)
                scales = (scales & 0xff) | 127 << 8;
        }
        scales_at += 4;
        scales_left -= 4;
    }
    MX_MEMBER int first_row(const Work& work, int tail) const {
        return work.n + (tail ? 0 : rank * kRows) + index * kGroupRows;
    }
    // Waits for the next tile, and loads what it needs first.
    MX_MEMBER void await() {
        const Work work = receive(barriers, turn);
        slabs = warp_uniform(work.slabs);
        const long row = t.w_row_of(first_row(work, work.tail), warp, lane / 4 + lane % 2 * 8);
        const int skipped = lane / 2 % 2 * 2;
        const Depth depth = depth_of(work.tokens, t.K);
        scales_at = t.ws + (t.w_row(work.tokens) + min(row, t.N - 1)) * t.blocks() +
                    depth.start / kBlock + skipped;
        scales_left = (kWgrad ? (depth.columns + kBlock - 1) / kBlock : t.blocks()) - skipped;
        load_scales();
    }
    // Takes the tile of a turn.
    MX_MEMBER void open(unsigned turn) {
        const Work work = told(barriers, turn);
        const int tail = warp_uniform(work.tail);
        x_slab = tail ? rank * slabs : 0;
        tokens = work.tokens;
        if constexpr (kWgrad) {
            left = warp_uniform(depth_of(tokens, t.K).columns);
            own_units = chunks_of(left) * kChunkUnits;
        }
        looks_for_nan = warp_uniform(tokens.first);
        tokens.row += x_slab * kSlabRows;
        tokens.rows = min(tokens.rows - x_slab * kSlabRows, slabs * kSlabRows);
        n = first_row(work, tail);
    }

    MX_MEMBER void release(int stage) const {
        if (lane < kCluster)
            barrier_arrive_read(address_in_cluster(barriers + kEmpty + 8 * stage, lane));
    }

    MX_MEMBER void release_w(int stage) const {
        if (lane == 0)
            barrier_arrive(barriers + kWEmpty + 8 * stage);
    }

    // Waits until this warp's results of the tile before have been read, and gives back the stage
    // of w that held some.
    MX_MEMBER void release_results() const {
        if (lane == 0)
            tma_store_wait_read<0>();
        __syncwarp();
        if (used >= 0)
            release_w(used_w);
    }

    // Clears what comes after the tile's last k in this warp's rows of w, in the next box.
    MX_MEMBER void cut() const {
        const unsigned rows =
            shared + kAtW + w.at * kStageW + (index * kGroupRows + warp * 16) * kBoxK;
#pragma unroll 1
        for (int i = lane; i < 16 * (kBoxK / 16); i += kLanes) {
            const int row = i / 8, piece = i % 8, count = left - piece * 16;
            if (count >= 16)
                continue;
            const unsigned place = swizzled_128(rows, row, piece);
            const u32x4 words = first_bytes(load_shared_16(place), count);
            store_shared_16(place, words.words);
        }
        fence_async(); // copies write there next
        __syncwarp();
    }

    // The payload of the next unit, once it is there, and its scales as factors. Odd: of its
    // tile's.
    template <bool Odd>
    MX_MEMBER void fetch() {
        if constexpr (!Odd) {
            barrier_wait(barriers + kWFull + 8 * w.at, w.parity);
            if constexpr (kWgrad) {
                if (left < kBoxK)
                    cut();
                left -= kBoxK;
            }
        }
        const unsigned place = (w_place + w.at * kStageW) ^ (Odd ? kUnitK : 0);
        load_matrices(words[0], place);
        load_matrices(words[1], kActivation == kNoActivation ? place + 8 * kBoxK
                                : kInterleaved               ? (place ^ 16) + kBoxK
                                                             : place + kRows / 2 * kBoxK);
        if constexpr (!Odd) {
            const unsigned halves = __byte_perm(scales, 0, 0x4140);
            least = min_halves(least, halves);
            most = max_halves(most, halves);
            factors = w_factors(halves);
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
        for (int i = 0; i < 2; ++i)
            e4m3x4_to_bf16<J / 2>(words[i][J], factor[i], magnitude, a[J][i], a[J][2 + i]);
    }
    // Looks for NaN in the unit.
    MX_MEMBER void look() {
        if (!looks_for_nan)
            return;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const unsigned word = words[i / 4][i % 4];
            // The top bit of a byte changes if it is NaN, or if one below is.
            nan[i / 4] |= (word + 0x01010101) ^ word;
        }
    }

    // Multiplies a unit, which is in registers as a[Buffer], while the next becomes a[1 - Buffer].
    // Held: that one is the tile's last, whose w makes room for results.
    template <int Buffer, bool Last, int Slabs, bool Held = false>
    MX_MEMBER void multiply(float (&sums)[Slabs * 32], unsigned (&a)[2][4][4], int unit,
                            unsigned x_place) {
        const int parity = ring.parity, stage = warp_uniform(ring.at);
        ring.next();
        barrier_wait(barriers + kXFull + 8 * stage, parity);
        const MatrixDescriptor b(x_place + stage * kStageX, kStepBytes / 2, 4 * kStepBytes);
        wgmma_fence();
        wgmma(sums, a[Buffer][0], b.at(0));
        wgmma(sums, a[Buffer][1], b.at(kStepBytes));
        wgmma_commit();
        if constexpr (!Last)
            fetch<Buffer == 0>();
        wgmma_wait<1>();
        if (Buffer == 0 && unit == 0)
            release_results();
        if (Buffer == 1 || used >= 0)
            release(used);
        used = stage;
        if constexpr (!Last) {
            expand<0>(a[1 - Buffer]);
            expand<1>(a[1 - Buffer]);
        }
        wgmma_fence();
        wgmma(sums, a[Buffer][2], b.at(2 * kStepBytes));
        wgmma(sums, a[Buffer][3], b.at(3 * kStepBytes));
        wgmma_commit();
        if constexpr (!Last) {
            expand<2>(a[1 - Buffer]);
            expand<3>(a[1 - Buffer]);
            look();
            if constexpr (Buffer == 0) {
                if constexpr (Held)
                    used_w = w.at;
                else
                    release_w(w.at);
                w.next();
            }
        }
    }

    // Lets the ring pass where no output is this consumer's.
    MX_MEMBER void skip() {
        if (used >= 0) {
            release_results();
            release(used);
        }
        used = -1;
        for (int unit = 0; unit < tile_units(); ++unit) {
            barrier_wait(barriers + kXFull + 8 * ring.at, ring.parity);
            if (unit % kBoxUnits == 0) {
                barrier_wait(barriers + kWFull + 8 * w.at, w.parity);
                __syncwarp(); // all lanes have seen it
                release_w(w.at);
                w.next();
            }
            release(ring.at);
            ring.next();
        }
        await();
    }

    template <int Slabs>
    MX_MEMBER void tile() {
        open(turn++);
        least = most = 127 * 0x00010001;
        nan[0] = nan[1] = 0;
        if (n >= t.N || tokens.rows <= 0)
            return skip();
        float sums[Slabs * 32];
#pragma unroll
        for (int i = 0; i < Slabs * 32; ++i)
            sums[i] = 0;
        // A consumer has two slabs of a tail at most.
        const unsigned x_place = shared + (Slabs > 2 ? 0 : x_slab * kSlabUnitBytes);
        unsigned a[2][4][4];
        const int units = tile_units();
        fetch<false>();
        expand<0>(a[0]);
        expand<1>(a[0]);
        expand<2>(a[0]);
        expand<3>(a[0]);
        look();
        int unit = 0;
        for (; unit + 2 < units; unit += 2) {
            multiply<0, false, Slabs>(sums, a, unit, x_place);
            multiply<1, false, Slabs>(sums, a, unit + 1, x_place);
        }
        if (unit + 1 < units) {
            multiply<0, false, Slabs, true>(sums, a, unit, x_place);
            multiply<1, true, Slabs>(sums, a, unit + 1, x_place);
        } else {
            multiply<0, true, Slabs>(sums, a, unit, x_place);
            used_w = w.at;
            w.next();
        }
        open(turn - 1); // again, so that it takes no registers in the loop
        finish<Slabs>(sums);
    }

    template <int Slabs>
    MX_MEMBER void finish(float (&sums)[Slabs * 32]) {
        if (looks_for_nan)
            note_nans(workspace, tokens.group * t.N + n + warp * 16, lane, nan[0] & 0x80808080,
                      nan[1] & 0x80808080);
        bool scale_outside = min(least & 0xffff, least >> 16) < kFirstWScale ||
                             max(most & 0xffff, most >> 16) > kLastWScale;
        const bool x_outside = tile_outside(tokens);
        float added[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
            added[i] =
                kWgrad ? 0
                       : load_bias(t.bias, t.bias_kind,
                                   tokens.group * t.N +
                                       min(t.w_row_of(static_cast<long>(n), warp, lane / 4 + i * 8),
                                           t.N - 1));
#if MX_ACTIVATION
        const ActivatedResults out{t,
                                   tokens,
                                   n,
                                   index,
                                   thread,
                                   shared + kAtStaging + index * kStagingBytes,
                                   barriers + kAtScales + index * kMostRows};
        int rows[ActivatedResults::kTokens<Slabs>];
        out.template find_rows<Slabs>(rows);
#endif
        await();
        wgmma_wait<0>();
        keep_in_order(sums);
        if (scale_outside) {
            const long row = t.w_row_of(n, warp, lane / 4 + lane % 2 * 8);
            scale_outside = weights_outside(t, t.w_row(tokens) + min(row, t.N - 1),
                                            depth_of(tokens, t.K), lane / 2 % 2 * 2);
        }
#if MX_ACTIVATION
        __syncwarp();
        if (__any_sync(0xffffffff, scale_outside || x_outside))
            sum_blocks<Slabs>(sums, t, tokens, n, warp, lane);
        out.template store<Slabs>(sums, added, rows);
#else
        const bool again = scale_outside || x_outside;
        const Results out{t,
                          results,
                          tokens,
                          n,
                          index,
                          thread,
                          shared + kAtStaging + index * kStagingBytes,
                          shared + used * kStageX + index * (kStageX / kConsumers),
                          shared + kAtW + used_w * kStageW + index * (kStageW / kConsumers)};
        if (out.template store<Slabs>(sums, added, again)) {
            if (lane == 0)
                tma_store_wait();
            named_barrier(1 + index, kGroupThreads);
            if (__any_sync(0xffffffff, again))
                compute_again(t, tokens, n + warp * 16, lane, scale_outside, x_outside);
        }
#endif
    }

    // After the last tile.
    MX_MEMBER void leave() const {
        if (lane == 0)
            tma_store_wait();
        named_barrier(1 + index, kGroupThreads);
        bool last = false; // and there is NaN
        if (thread == 0)
            last = add_acquire_release(workspace.finished(), 1) ==
                   (kSomeNan | (gridDim.x * kConsumers - 1));
        if (named_barrier_or(1 + index, kGroupThreads, last))
            spread_nans(t, workspace, groups_of(t, workspace), thread);
    }

    MX_MEMBER bool tile_outside(const TokenTile& tile) const {
        // No loop for the usual K: it would wait for what it loads.
        const unsigned long long* from = workspace.expanded(tile);
        unsigned long long bits = lane < workspace.words(tile) ? load_relaxed(from + lane) : 0;
        if (workspace.words(tile) > kLanes)
#pragma unroll 1
            for (int i = lane + kLanes; i < workspace.words(tile); i += kLanes)
                bits |= load_relaxed(from + i);
        return bits >> 32;
    }
};

constexpr int kThreads = (1 + kConsumers) * kGroupThreads;
constexpr int kExpanderThreads = kGroupThreads - kLanes; // of the first warpgroup
// The register file, 168 for each thread at first. The consumers take no more than these.
constexpr int kHelperRegisters = 104, kConsumerRegisters = 200;
constexpr int kExpanderBarrier = kConsumersBarrier + 1;

#if MX_ROUTED
extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    aiter_mx_grouped_gemm_persistent(MX_ROUTED_PARAMETERS,
                                     const __grid_constant__ TensorMap weights,
                                     const __grid_constant__ TensorMap results) {
#else
extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    aiter_mx_grouped_gemm_persistent(const unsigned char* xq, const unsigned char* xs,
                                     const unsigned char* wq, const unsigned char* ws,
                                     const void* bias, Out* y, const void* starts, const void* ends,
                                     void* workspace_memory, long M, long N, long K, long G,
                                     int layout, int index_bytes, int bias_kind, long most_tiles,
                                     long most_slabs, long pairs, int clusters,
                                     const __grid_constant__ TensorMap weights,
                                     const __grid_constant__ TensorMap results) {
#endif
    extern __shared__ __align__(1024) unsigned char dynamic[];
    // One object for all: with two, ptxas holds barriers' addresses in vector registers, and the
    // loop over k has more instructions.
    __shared__ __align__(16) unsigned long long barrier_memory[kBarrierBytes / 8];
    const unsigned shared = held(shared_address(dynamic));
    const unsigned barriers = held(shared_address(barrier_memory));
    if (threadIdx.x == 0) {
        barrier_memory[kTold / 8] = 0; // what expander and producer tell each other
        for (int i = 0; i < kWorkPlaces; ++i)
            barrier_init(barriers + kWorkFull + 8 * i, 1);
        for (int i = 0; i < kStages; ++i) {
            barrier_init(barriers + kXFull + 8 * i, 1);
            barrier_init(barriers + kEmpty + 8 * i, kCluster * kConsumers * kWarps);
        }
        for (int i = 0; i < kWStages; ++i) {
            barrier_init(barriers + kWFull + 8 * i, 1);
            barrier_init(barriers + kWEmpty + 8 * i, kConsumers * kWarps);
        }
        fence_barrier_init();
    }
    group_barrier();
    cluster_arrive();
    cluster_wait();
    wait_for_grid_ahead();

    const Workspace workspace{
        static_cast<unsigned char*>(workspace_memory), most_tiles, K, G * N, most_slabs, G};
#if MX_ROUTED
    Out* const y = static_cast<Out*>(out);
    const RowGroups groups{}; // the list has made them
    const Routing routing{sorted_ids, expert_ids,   post_padded, more,   valid_tokens,
                          a_div,      packed_top_k, max_blocks,  block_m};
    const ActivationArgs activation{alpha, beta, limit};
#else
    const RowGroups groups{starts, ends, M, G, layout, index_bytes};
    const Routing routing{};
    const ActivationArgs activation{};
#endif
    const Operands t{xq, xs,     wq,      ws,        bias, y, N, K, kWgrad ? kNone : bias_kind,
                     M,  groups, routing, activation};
    const int rank = rank_in_cluster();
    const int group = warp_uniform(threadIdx.x / kGroupThreads);
    const int thread = threadIdx.x % kGroupThreads;
    const unsigned turn = barriers + kTold, now = turn + 4;
    if (group == 0) {
        decrease_registers<kHelperRegisters>();
        if (thread == 0) {
            Producer producer{t, weights, workspace, shared, barriers, now, rank};
            producer.run();
        } else if (thread >= kLanes) {
            const Expander<kExpanderThreads, kExpanderBarrier> expander{
                workspace, xq, xs, K, routing, thread - kLanes, turn, now};
            unsigned parts;
            const unsigned beyond =
                expander.run(tiles_of_band(kOrder, pairs, gridDim.x / kCluster), parts);
            if constexpr (kWgrad && !kAccumulate)
                expander.clear(beyond, parts, reinterpret_cast<unsigned char*>(y),
                               M * N * static_cast<long>(sizeof(Out)));
            if constexpr (kRouted)
                expander.settle(beyond, parts, G, reinterpret_cast<unsigned char*>(y), N / 2);
        }
        __syncwarp();
    } else {
        increase_registers<kConsumerRegisters>();
        Consumer consumer(t, workspace, results, shared, barriers, group - 1, rank, thread);
        consumer.await();
        // Apart, since ptxas keeps wgmmas in flight only where one kind of them is in a loop.
        while (consumer.slabs == 4)
            consumer.tile<4>();
        while (consumer.slabs == 3)
            consumer.tile<3>();
        while (consumer.slabs == 2)
            consumer.tile<2>();
        while (consumer.slabs == 1)
            consumer.tile<1>();
        consumer.leave();
    }
    cluster_arrive();
    cluster_wait(); // what the other workgroup sends has arrived
}
