// Grouped GEMM over routed tokens on Hopper, for few tokens an expert: a stream of weights.
// aiter_mx/kernels/moe_gemm/problem.py defines what it computes and its arguments.
//
// A workgroup takes a tile of kRows rows of an expert's w and the valid rows of a block of ids,
// kCols of them at a time. Its warps share K, kChunk at a time in turn, and each brings what it
// needs into a ring of its own, kDepth chunks ahead, across the ends of tiles:
//
//   k ->          | warp 0 | warp 1 | ... | warp 0 | warp 1 | ...
//   w, kRows rows | chunk  | chunk  |     | chunk  |        |
//   x, kCols rows | chunk  | chunk  |     | chunk  |        |
//
// So nothing but the sum over warps, once a tile, makes a warp wait for another one. Both operands
// become fp16, which is exact; a 32-block is two matrix instructions, whose fp32 sums are then
// scaled and added to those of the tile. Of one or two rows of x, four blocks of each are columns
// of one matrix, so that the sums of a chunk are scaled once (add_few_blocks).
//
// With an activation, a block of 32 features is one tile's, or shared by the tiles of a cluster of
// two or four workgroups, which tell each other their largest magnitudes.
//
// What is open, and which rows of x that takes, is looked up ahead by the part that fills the ring
// (Filler); each warp keeps a queue of it for the part that empties the ring.

// With an activation, workgroups that have a block of 32 features together.
#define MX_CLUSTER (MX_ACTIVATION ? 4 / MX_ROW_TILES : 1)

#include "common/epilogue.h"
#include "common/quantize.h"
#include "common/scale.h"
#include "common/target.h"
#include "moe.h"
#include "moe_sm90.h"
#include "sm90/cluster.h"
#include "sm90/mma.h"
#include "sm90/tma.h"

using namespace mx;

constexpr int kRowTiles = MX_ROW_TILES;          // 16 rows of w each
constexpr int kColTiles = MX_COL_TILES;          // 8 rows of x each
constexpr int kWarps = MX_K_WARPS;               // of a workgroup, which share K
constexpr int kDepth = MX_DEPTH;                 // chunks of a warp in its ring
constexpr int kGroups = MX_GROUPS;               // workgroups that an SM must have room for
constexpr bool kWhole = MX_WHOLE;                // K is a multiple of kChunk
constexpr bool kEarlyRouting = MX_EARLY_ROUTING; // it is older than the kernel ahead
constexpr int kActivation = MX_ACTIVATION;
using Out = DType<kActivation == kNoActivation ? MX_OUT : kF32>;

constexpr int kRows = kRowTiles * 16;
constexpr int kCols = kColTiles * 8;
constexpr int kThreads = kWarps * kLanes;
using Rows = TileRows<kRows, kRows, kActivation != kNoActivation, MX_INTERLEAVED>;
using Walk = MoeWalk<kCols>;
constexpr int kCluster = MX_CLUSTER;
constexpr int kQuads = Rows::kFeatures / 4; // of features of a workgroup
constexpr int kBlockQuads = kBlock / 4;
static_assert(kActivation == kNoActivation || kQuads * kCluster == kBlockQuads,
              "a cluster has one block of 32 features");

// A slot of a ring. Scales of a row are the aligned words that hold its bytes.
constexpr int kScaleWords = kWhole ? 1 : 2;
constexpr int kXAt = kRows * kChunk;
constexpr int kWScalesAt = kXAt + kCols * kChunk;
constexpr int kXScalesAt = kWScalesAt + kRows * kScaleWords * 4;
constexpr int kSlotBytes = kXScalesAt + kCols * kScaleWords * 4;
constexpr int kRingBytes = kDepth * kSlotBytes; // of a warp
constexpr int kPitch = kRows + 4;               // of partial sums: keeps lanes on different banks
constexpr int kPartials = kCols * kPitch;       // of a warp
constexpr int kEntries = kDepth + 1;            // of a warp's queue

// A warp is to sum up some rows of x by a tile of w.
struct Entry {
    int t[kCols];         // routed rows, or -1
    float weights[kCols]; // of the routing
    int expert;
    unsigned tile;
    int rows;   // of x, up to the last one there is
    int unused; // keeps what follows aligned

    MX_MEMBER int col_tiles() const { return kColTiles == 1 ? 1 : (rows + 7) / 8; }
};

// The largest magnitude of each four features of the block, for each row of x. Two entries take
// turns.
struct Maxima {
    unsigned long barriers[2];
    unsigned of_quad[2][kCols][kBlockQuads];
};
constexpr int kMaximaBytes = kCluster > 1 ? sizeof(Maxima) : 0;
static_assert(
    kWarps * (kRingBytes + kPartials * 4 + kEntries * sizeof(Entry)) + kMaximaBytes ==
        MX_SHARED_BYTES,
    "the host lays shared memory out differently: aiter_mx/kernels/moe_gemm/mma_ring_sm90.py");

MX_DEVICE int blocks_of(const MoeArgs& a, int chunk) {
    return kWhole ? kBlocks : min(kBlocks, static_cast<int>(a.blocks()) - chunk * kBlocks);
}

// Copies the scales of one row's blocks of a chunk, of which `blocks` exist. Words are aligned, so
// that of a K that is not whole the bytes may begin anywhere in the first of two. Of the tensor's
// last word, which may go past its end, nothing but those bytes is read, one by one: a copy of part
// of a word leaves the others alone, too, but tools take it for one of the whole.
MX_DEVICE void copy_part(unsigned to, const unsigned char* word, int bytes,
                         const unsigned char* end) {
    if (bytes > 0 && word + 4 <= end) {
        copy_word_async(to, word, bytes);
    } else {
        unsigned scales = 0;
        for (int i = 0; i < bytes; ++i)
            scales |= static_cast<unsigned>(word[i]) << 8 * i;
        store_shared_4(to, scales);
    }
}
MX_DEVICE void copy_scales(unsigned to, const unsigned char* from, int blocks,
                           const unsigned char* end) {
    if constexpr (kWhole) {
        copy_word_async(to, from);
    } else {
        const int before = reinterpret_cast<unsigned long>(from) % 4;
        copy_part(to, from - before, min(before + blocks, 4), end);
        copy_part(to + 4, from - before + 4, before + blocks - 4, end);
    }
}
MX_DEVICE unsigned load_scales(unsigned at, const unsigned char* base, Offset first) {
    if constexpr (kWhole) {
        return load_shared_4(at);
    } else {
        const uint2 words = load_shared_8(at);
        const unsigned before = (reinterpret_cast<unsigned long>(base) + first) % 4;
        return __funnelshift_r(words.x, words.y, before * 8);
    }
}

// Brings chunks into a warp's ring, and opens one entry after another.
struct Filler {
    const MoeArgs& a;
    Walk& walk;
    const unsigned ring;
    Entry* const queue;
    const int lane, warp;
    unsigned a_div_inverse;              // times 2^32, rounded up; of 1, 0
    int opened = 0, slot = 0, entry = 0; // entries so far; the next slots of ring and queue
    int chunk;                           // the next one
    static constexpr int kScaleRows = (kRows + kLanes - 1) / kLanes;
    unsigned tile_of_rows, w_rows[kRows / 4], ws_rows[kScaleRows]; // of w, that this lane copies
    int x_rows[kCols / 4], xs_row; // that this lane copies of the open entry, or -1
    bool is_over = false;          // no entry is left
    long asked_at = -1;            // place of the item of ask_for_first(), until it is opened
    unsigned asked_tile;
    const unsigned char *xs_end, *ws_end; // of scales, unless K is whole

    MX_MEMBER Filler(const MoeArgs& a, Walk& walk, unsigned ring, Entry* queue, int lane, int warp)
        : a(a), walk(walk), ring(ring), queue(queue), lane(lane), warp(warp),
          a_div_inverse(a.a_div == 1 ? 0 : ~0u / static_cast<unsigned>(a.a_div) + 1) {
        if constexpr (!kWhole) {
            xs_end = a.xs + a.row_of_blocks(x_row(a.num_valid - 1) + 1);
            ws_end = a.ws + static_cast<Offset>(a.num_experts) * a.N * a.blocks();
        }
        find_w_rows(walk.next_tile);
    }
    // Those of w that this lane copies.
    MX_MEMBER void find_w_rows(unsigned tile) {
        tile_of_rows = tile;
#pragma unroll
        for (int i = 0; i < kRows / 4; ++i)
            w_rows[i] = Rows::row(a, tile, lane / 8 + 4 * i);
#pragma unroll
        for (int i = 0; i < kScaleRows; ++i)
            ws_rows[i] = Rows::row(a, tile, i * kLanes + lane);
    }

    // Asks for the first chunk of w as soon as its expert is known. Whether its block has rows is
    // found out meanwhile.
    MX_MEMBER void ask_for_first() {
        if (walk.next_begin >= walk.padded ||
            static_cast<unsigned>(walk.next_expert) >= static_cast<unsigned>(a.num_experts))
            return;
        walk.expert = walk.next_expert;
        chunk = warp;
        copy_w();
        asked_at = walk.next_begin + walk.next_in_block;
        asked_tile = walk.next_tile;
    }
    // Whether the entry that was just opened is the one whose first chunk has been asked for. If
    // there is another one, that copy must be over before the slot is filled anew.
    MX_MEMBER bool has_first() {
        if (asked_at >= 0 && walk.place == asked_at && walk.tile == asked_tile) {
            asked_at = -1;
            return true;
        }
        drop_first();
        return false;
    }
    MX_MEMBER void drop_first() {
        if (asked_at < 0)
            return;
        copy_commit();
        copy_wait<0>();
        __syncwarp();
        asked_at = -1;
    }
    MX_MEMBER bool open() {
        if (!walk.next(
                [&] {
                    store_zeros<Out, Rows::kFeatures, kActivation != kNoActivation>(a, walk, warp,
                                                                                    kWarps);
                },
                false))
            return false;
        if (walk.tile != tile_of_rows)
            find_w_rows(walk.tile);
        ++opened;
        chunk = warp;
        return true;
    }
    // t / a_div, without the long chain that a division is. The product is at most one too high.
    MX_MEMBER int x_row(unsigned t) const {
        const unsigned row = a_div_inverse == 0 ? t : __umulhi(t, a_div_inverse);
        return row - (row * static_cast<unsigned>(a.a_div) > t);
    }
    // Finds the rows of x of the entry that was opened, and puts it into the queue.
    MX_MEMBER void find_rows() {
        const int row = walk.row(lane % kCols);
        xs_row = row < 0 ? -1 : x_row(row);
#pragma unroll
        for (int i = 0; i < kCols / 4; ++i)
            x_rows[i] = __shfl_sync(~0u, xs_row, lane / 8 + 4 * i);
        Entry& to = queue[entry];
        if (lane < kCols) {
            to.t[lane] = row;
            if (a.weights != nullptr && row >= 0)
                copy_word_async(shared_address(to.weights + lane), walk.weight(lane, row));
        }
        if (lane == 0) {
            to.expert = walk.expert;
            to.tile = walk.tile;
            to.rows = walk.rows();
        }
        entry = entry + 1 == kEntries ? 0 : entry + 1;
    }
    // Where 16 bytes of a chunk that this lane copies begin in a row, and whether they exist.
    MX_MEMBER Offset place_in_row(bool& exists) const {
        const Offset k = static_cast<Offset>(chunk) * kChunk + lane % 8 * 16;
        exists = kWhole || k < static_cast<Offset>(a.K);
        return exists ? k : 0;
    }
    MX_MEMBER void copy_w() const {
        const unsigned to = ring + slot * kSlotBytes;
        bool exists;
        const Offset first_row = walk.expert * static_cast<Offset>(a.N);
        const unsigned char* w = a.wq + first_row * a.K + place_in_row(exists);
#pragma unroll
        for (int i = 0; i < kRows / 4; ++i)
            copy_once_in_lines_async(to + swizzled_for_mma(lane / 8, lane % 8) + i * 4 * kChunk,
                                     w + a.row_of_k(w_rows[i]), exists);
        const unsigned char* w_scales = a.ws + first_row * a.blocks() + chunk * kBlocks;
#pragma unroll
        for (int i = 0; i < kScaleRows; ++i) {
            const int r = i * kLanes + lane;
            if (r < kRows)
                copy_scales(to + kWScalesAt + r * kScaleWords * 4,
                            w_scales + a.row_of_blocks(ws_rows[i]), blocks_of(a, chunk), ws_end);
        }
    }
    MX_MEMBER void copy_x() const {
        const unsigned to = ring + slot * kSlotBytes;
        bool exists;
        const unsigned char* x = a.xq + place_in_row(exists);
#pragma unroll
        for (int i = 0; i < kCols / 4; ++i)
            if (x_rows[i] >= 0)
                copy_async(to + kXAt + swizzled_for_mma(lane / 8, lane % 8) + i * 4 * kChunk,
                           x + a.row_of_k(x_rows[i]), exists);
        if (lane < kCols) {
            const unsigned at = to + kXScalesAt + lane * kScaleWords * 4;
            if (xs_row >= 0) {
                copy_scales(at, a.xs + a.row_of_blocks(xs_row) + chunk * kBlocks,
                            blocks_of(a, chunk), xs_end);
            } else {
#pragma unroll
                for (int i = 0; i < kScaleWords; ++i)
                    store_shared_4(at + i * 4, 0x7f7f7f7f); // so that no sum looks unusual
            }
        }
    }
    // Brings this warp's next chunk, if there is one: of w, of x, or both.
    MX_MEMBER void fill(bool of_w, bool of_x) {
        const bool opens = opened == 0 || chunk >= a.chunks();
        if (!opens || open()) {
            if (of_w && !(opens && has_first()))
                copy_w();
            if (opens) // once the weights are asked for, to which all this makes no difference
                find_rows();
            if (of_x)
                copy_x();
            if (opens && walk.looks_ahead)
                walk.look_ahead();
            chunk += kWarps;
        } else if (of_x) {
            drop_first();
            is_over = true;
            launch_dependents(); // not before, else what comes next settles unevenly on the SMs
        }
        if (of_x)
            copy_commit();
        slot = slot + 1 == kDepth ? 0 : slot + 1;
    }
};

// How a warp adds up the chunks in its ring, and hands its sums to the others.

using Sums = float[kRowTiles][kColTiles][4];

constexpr int kFewRows = 2; // of x, whose blocks fit into the columns of one matrix

// Bit 7 of the byte is 0 for each of four scales that is not within 2^-63 .. 2^64.
MX_DEVICE unsigned usual_scales(unsigned word) { return word ^ word << 1; }
constexpr unsigned kAllUsual = 0x80808080;

// Adds a chunk of the first ColTiles tiles of x. Unless Any, scales are 2^-63 .. 2^64, which
// take fewer instructions.
template <int ColTiles, bool Any>
MX_DEVICE void add_blocks(Sums& sums, unsigned slot, const unsigned (&w_scales)[kRowTiles][2],
                          const unsigned (&x_scales)[ColTiles][2], int blocks, int lane) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
        if (!kWhole && b >= blocks)
            break;
        const unsigned in_row = slot + swizzled_block_for_mma(b, lane);
        f16x8 x[ColTiles];
        SplitScale x_scale[ColTiles][2];
#pragma unroll
        for (int j = 0; j < ColTiles; ++j) {
            x[j] = e4m3x8_to_f16(load_shared_8(in_row + kXAt + j * 8 * kChunk));
#pragma unroll
            for (int c = 0; c < 2; ++c)
                x_scale[j][c] = Any ? e8m0_split(x_scales[j][c] >> 8 * b & 255)
                                    : SplitScale{usual_scale(x_scales[j][c], b), 1.0f};
        }
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            const f16x8 w = e4m3x8_to_f16(load_shared_8(in_row + i * 16 * kChunk));
            const f16x8 w_8 = e4m3x8_to_f16(load_shared_8(in_row + (i * 16 + 8) * kChunk));
            float w_scale[2];
#pragma unroll
            for (int r = 0; r < 2; ++r)
                w_scale[r] = Any ? e8m0_to_f32(w_scales[i][r] >> 8 * b & 255)
                                 : usual_scale(w_scales[i][r], b);
#pragma unroll
            for (int j = 0; j < ColTiles; ++j) {
                float dots[4];
                mma_block(dots, w, w_8, x[j]);
#pragma unroll
                for (int d = 0; d < 4; ++d)
                    sums[i][j][d] =
                        Any ? add_scaled(sums[i][j][d], dots[d], x_scale[j][d % 2], w_scale[d / 2])
                            : mx::fma(dots[d] * x_scale[j][d % 2].first, w_scale[d / 2],
                                      sums[i][j][d]);
            }
        }
    }
}

// Adds a chunk of one or two rows of x in fewer instructions. Columns of the matrix are blocks of
// 32 k here: column 4 m + b of B has block b of row m, and zeros where w's blocks are others, so
// that one sum over the whole chunk keeps blocks apart. What a lane has of it takes scales once.
template <bool Any>
MX_DEVICE void add_few_blocks(Sums& sums, unsigned slot, const unsigned (&w_scales)[kRowTiles][2],
                              unsigned x_scales, int lane) {
    const int column = lane / 4, m = column / 4, own = column % 4;
    const f16x8 x =
        e4m3x8_to_f16(load_shared_8(slot + kXAt + m * kChunk + (own ^ m) * kBlock + lane % 4 * 8));
    float dots[kRowTiles][4] = {};
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
        const unsigned in_row = slot + swizzled_block_for_mma(b, lane);
        f16x8 of_block;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            of_block.words[i] = own == b ? x.words[i] : 0;
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
            add_block(dots[i], e4m3x8_to_f16(load_shared_8(in_row + i * 16 * kChunk)),
                      e4m3x8_to_f16(load_shared_8(in_row + (i * 16 + 8) * kChunk)), of_block);
    }
    const int shift = lane % 2 * 16; // of the scales of this lane's columns, 2 t and 2 t + 1
    SplitScale x_scale[2];
#pragma unroll
    for (int c = 0; c < 2; ++c)
        x_scale[c] = Any ? e8m0_split(x_scales >> shift >> 8 * c & 255)
                         : SplitScale{usual_scale(x_scales >> shift, c), 1.0f};
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int d = 0; d < 4; ++d) {
            const unsigned scales = w_scales[i][d / 2] >> shift;
            const float w_scale =
                Any ? e8m0_to_f32(scales >> 8 * (d % 2) & 255) : usual_scale(scales, d % 2);
            sums[i][0][d] =
                Any ? add_scaled(sums[i][0][d], dots[i][d], x_scale[d % 2], w_scale)
                    : mx::fma(dots[i][d] * x_scale[d % 2].first, w_scale, sums[i][0][d]);
        }
}

// The scales of a chunk of w that this lane takes, and which are usual in all of its rows.
MX_DEVICE unsigned load_w_scales(unsigned (&w_scales)[kRowTiles][2], const MoeArgs& a,
                                 const Entry& entry, unsigned slot, int lane) {
    unsigned usual = kAllUsual;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = i * 16 + r * 8 + lane / 4;
            const Offset first =
                kWhole ? 0
                       : (entry.expert * static_cast<Offset>(a.N) + Rows::row(a, entry.tile, row)) *
                             a.blocks();
            const unsigned word =
                load_scales(slot + kWScalesAt + row * kScaleWords * 4, a.ws, first);
            w_scales[i][r] = word;
            usual &= usual_scales(word);
        }
    return usual;
}

// Does so for one row of x.
MX_DEVICE unsigned load_x_scales(unsigned& word, const MoeArgs& a, const Entry& entry,
                                 unsigned slot, int col) {
    const int t = kWhole ? 0 : entry.t[col];
    const Offset first = kWhole || t < 0 ? 0 : t / a.a_div * a.blocks();
    word = load_scales(slot + kXScalesAt + col * kScaleWords * 4, a.xs, first);
    return usual_scales(word);
}

MX_DEVICE void add_few(Sums& sums, const MoeArgs& a, const Entry& entry, unsigned slot, int lane) {
    unsigned w_scales[kRowTiles][2], x_scales;
    const unsigned usual = load_w_scales(w_scales, a, entry, slot, lane) &
                           load_x_scales(x_scales, a, entry, slot, lane % 4 / 2);
    if (__all_sync(~0u, usual == kAllUsual))
        add_few_blocks<false>(sums, slot, w_scales, x_scales, lane);
    else
        add_few_blocks<true>(sums, slot, w_scales, x_scales, lane);
}

template <int ColTiles>
MX_DEVICE void add_chunk(Sums& sums, const MoeArgs& a, const Entry& entry, unsigned slot, int chunk,
                         int lane) {
    unsigned w_scales[kRowTiles][2], x_scales[ColTiles][2];
    unsigned usual = load_w_scales(w_scales, a, entry, slot, lane);
#pragma unroll
    for (int j = 0; j < ColTiles; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c)
            usual &= load_x_scales(x_scales[j][c], a, entry, slot, j * 8 + lane % 4 * 2 + c);
    const int blocks = blocks_of(a, chunk);
    if (__all_sync(~0u, usual == kAllUsual))
        add_blocks<ColTiles, false>(sums, slot, w_scales, x_scales, blocks, lane);
    else
        add_blocks<ColTiles, true>(sums, slot, w_scales, x_scales, blocks, lane);
}

// Puts what this warp has of an entry to where the others find it.
MX_DEVICE void store_partials(float* to, const Sums& sums, const Entry& entry, int lane) {
    if (entry.rows <= kFewRows) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float sum = sums[i][0][2 * r] + sums[i][0][2 * r + 1];
                sum += __shfl_xor_sync(~0u, sum, 1);
                if (lane % 2 == 0)
                    to[lane % 4 / 2 * kPitch + i * 16 + r * 8 + lane / 4] = sum;
            }
        return;
    }
#pragma unroll
    for (int j = 0; j < kColTiles; ++j)
        if (j < entry.col_tiles())
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
                for (int d = 0; d < 4; ++d)
                    to[(j * 8 + lane % 4 * 2 + d % 2) * kPitch + i * 16 + d / 2 * 8 + lane / 4] =
                        sums[i][j][d];
}

// Four consecutive values of row m of x, summed over warps.
MX_DEVICE void sum_of_warps(float (&sums)[4], const float* partials, int m, int r) {
    const float4* from = reinterpret_cast<const float4*>(partials + m * kPitch + r);
#pragma unroll
    for (int v = 0; v < kWarps; ++v) {
        const float4 part = from[v * (kPartials / 4)];
        sums[0] = v ? sums[0] + part.x : part.x;
        sums[1] = v ? sums[1] + part.y : part.y;
        sums[2] = v ? sums[2] + part.z : part.z;
        sums[3] = v ? sums[3] + part.w : part.w;
    }
}

MX_DEVICE void store_plain(const MoeArgs& a, const Entry& entry, const float* partials,
                           int thread) {
    constexpr int quads = kRows / 4;
    const bool aligned = a.N % 4 == 0;
#pragma unroll 1
    for (int i = thread; i < entry.rows * quads; i += kThreads) {
        const int m = i / quads, r = i % quads * 4;
        const long n = entry.tile * static_cast<long>(kRows) + r, t = entry.t[m];
        if (t < 0 || n >= a.N)
            continue;
        float sums[4];
        sum_of_warps(sums, partials, m, r);
        const float weight = a.weights == nullptr ? 1.0f : entry.weights[m];
        Out* const to = static_cast<Out*>(a.out) + t * a.N + n;
        struct alignas(4 * sizeof(Out)) Quad {
            Out values[4];
        } quad;
        if (a.bias_kind != kNone)
#pragma unroll
            for (int v = 0; v < 4; ++v)
                if (n + v < a.N)
                    sums[v] += load_bias(a.bias, a.bias_kind, entry.expert * a.N + n + v);
#pragma unroll
        for (int v = 0; v < 4; ++v)
            store(quad.values + v, sums[v] * weight);
        if (aligned) {
            *reinterpret_cast<Quad*>(to) = quad;
        } else {
#pragma unroll
            for (int v = 0; v < 4; ++v)
                if (n + v < a.N)
                    to[v] = quad.values[v];
        }
    }
}

// The largest magnitude of a block of row m of x, of which this thread has four features: from all
// fours of the block, which each workgroup of the cluster sends to each one.
[[maybe_unused]] MX_DEVICE unsigned largest_of_block(unsigned own, Maxima& maxima,
                                                     const Entry& entry, int done, int m, int quad,
                                                     bool is_inside) {
    const int turn = done % 2;
    const unsigned barrier = shared_address(maxima.barriers + turn);
    if (threadIdx.x == 0)
        barrier_arrive_expect(barrier, entry.rows * kBlockQuads * 4);
    if (is_inside) {
        const unsigned to =
            shared_address(&maxima.of_quad[turn][m][rank_in_cluster() * kQuads + quad]);
#pragma unroll
        for (int rank = 0; rank < kCluster; ++rank)
            store_async(address_in_cluster(to, rank), own, address_in_cluster(barrier, rank));
    }
    barrier_wait_cluster(barrier, done / 2 % 2);
    if (is_inside)
#pragma unroll
        for (unsigned of_quad : maxima.of_quad[turn][m])
            own = max(own, of_quad);
    return own;
}

// Four features of a routed row to a lane. Eight lanes have a block of 32 of them, in this
// workgroup or in the cluster.
template <int Activation>
MX_DEVICE void store_activated(const MoeArgs& a, const Entry& entry, const float* partials,
                               Maxima& maxima, int done, int thread) {
    constexpr int features = Rows::kFeatures;
    static_assert(kCluster == 1 || kCols * kQuads <= kThreads, "all send before one waits");
    const int count = entry.rows * kQuads;
    for (int i = thread; i < (count + kLanes - 1) / kLanes * kLanes; i += kThreads) {
        const bool is_inside = i < count;
        const int m = i / kQuads, first = i % kQuads * 4;
        const long t = is_inside ? entry.t[m] : -1;
        float gate[4] = {}, up[4] = {};
        if (t >= 0) {
            sum_of_warps(gate, partials, m, first);
            sum_of_warps(up, partials, m, first + features);
        }
#pragma unroll
        for (int v = 0; v < 4; ++v) {
            if (a.bias_kind != kNone) {
                const Offset expert = entry.expert * static_cast<Offset>(a.N);
                gate[v] +=
                    load_bias(a.bias, a.bias_kind, expert + Rows::row(a, entry.tile, first + v));
                up[v] += load_bias(a.bias, a.bias_kind,
                                   expert + Rows::row(a, entry.tile, first + v + features));
            }
            gate[v] = activate<Activation>(gate[v], up[v], a.activation);
        }
        unsigned largest = amax_bits(gate);
        if constexpr (kCluster > 1)
            largest = largest_of_block(largest, maxima, entry, done, m, i % kQuads, is_inside);
        else
            largest = max_of_lanes<kQuads>(largest);
        const BlockScale scale = block_scale<E4M3, kRoundUp>(largest);
        const unsigned word = to_e4m3x4<kRoundUp>(gate[0], gate[1], gate[2], gate[3], scale);
        const long n = t * (a.N / 2) + entry.tile * static_cast<long>(features) + first;
        if (t < 0)
            continue;
        *reinterpret_cast<unsigned*>(static_cast<unsigned char*>(a.out) + n) = word;
        if (n % kBlock == 0)
            a.out_scales[n / kBlock] = scale.byte;
    }
}

extern "C" __global__ void MX_CLUSTER_DIMS __launch_bounds__(kThreads, kGroups)
    aiter_mx_moe_gemm_mma_ring(MX_MOE_PARAMETERS) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    const MoeArgs a = MX_MOE_ARGS;
    const int thread = threadIdx.x, lane = thread % kLanes, warp = thread / kLanes;
    const unsigned ring = shared_address(dynamic) + warp * kRingBytes;
    float* const partials = reinterpret_cast<float*>(dynamic + kWarps * kRingBytes);
    Entry* const queue = reinterpret_cast<Entry*>(partials + kWarps * kPartials) + warp * kEntries;
    Maxima& maxima = *reinterpret_cast<Maxima*>(dynamic + MX_SHARED_BYTES - kMaximaBytes);

    if constexpr (kCluster > 1) {
        if (thread == 0) {
            for (unsigned long& barrier : maxima.barriers)
                barrier_init(shared_address(&barrier), 1);
            fence_barrier_init();
        }
        __syncwarp();
        cluster_arrive_relaxed();
    }
    Walk walk(a, Rows::count(a), lane, false);
    Filler filler(a, walk, ring, queue, lane, warp);
    if constexpr (kEarlyRouting) {
        walk.begin();
        Walk early_walk = walk;
        Filler early(a, early_walk, ring, queue, lane, warp);
        for (int d = 0; d < kDepth - 1; ++d)
            early.fill(true, false);
        wait_for_grid_ahead(); // which made x
    } else {
        if (warp == 0 && walk.next_tile == 0) // one workgroup for each block of ids
            walk.ask_for_lists();
        wait_for_grid_ahead();
        walk.begin();
        filler.ask_for_first();
    }
    Sums sums;
    const Entry* entry = queue;
    int done = 0, slot = 0, chunk = warp;
    for (int step = 0;; ++step) {
        __syncwarp(); // the slot to be filled is no longer read
        filler.fill(!kEarlyRouting || step >= kDepth - 1, true);
        if (step < kDepth - 1)
            continue;
        if (done == filler.opened)
            break;
        if (chunk == warp)
            for (auto& rows : sums)
                for (auto& tile : rows)
                    for (float& sum : tile)
                        sum = 0.0f;
        copy_wait<kDepth - 1>();
        __syncwarp();
        const unsigned at = ring + slot * kSlotBytes;
        if (entry->rows <= kFewRows)
            add_few(sums, a, *entry, at, lane);
        else if (entry->col_tiles() == 1)
            add_chunk<1>(sums, a, *entry, at, chunk, lane);
        else
            add_chunk<kColTiles>(sums, a, *entry, at, chunk, lane);
        slot = slot + 1 == kDepth ? 0 : slot + 1;
        chunk += kWarps;
        if (chunk < a.chunks())
            continue;

        if (done > 0)
            group_barrier(); // the partial sums of the entry before have been read
        store_partials(partials + warp * kPartials, sums, *entry, lane);
        group_barrier();
        if constexpr (kActivation == kNoActivation) {
            store_plain(a, *entry, partials, thread);
        } else {
            if (kCluster > 1 && done == 0)
                cluster_wait(); // all have set up their barriers
            store_activated<kActivation>(a, *entry, partials, maxima, done, thread);
        }
        entry = entry + 1 == queue + kEntries ? queue : entry + 1;
        chunk = warp;
        if (++done == filler.opened && filler.is_over)
            break;
    }
}
