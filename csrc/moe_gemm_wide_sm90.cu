// Grouped GEMM over routed tokens on Hopper, for some tens of tokens an expert.
// aiter_mx/kernels/moe_gemm/problem.py defines what it computes and its arguments.
//
// A workgroup takes a tile of kRows rows of an expert's w, 32 for each warp, and up to kCols rows
// of x, those of a block of ids. It goes along K by kChunk, kDepth chunks ahead with its copies,
// across the ends of tiles:
//
//   w   each warp its own rows, e4m3, to fp16 as they go into the matrix instruction
//   x   all threads together: e4m3, then, a chunk before it is used, to fp16 in the order in which
//       lanes take it, once for all warps
//
// A 32-block is two matrix instructions, whose fp32 sums are then scaled. Scales of x go into its
// fp16, which has room for 22 of them: they are taken relative to a power of two for each row, the
// unit of the row's sums, which grows when a larger scale comes. That leaves one multiplication and
// addition for each sum and block. From the first chunk of a tile whose scales do not fit on, a
// warp takes x from its e4m3 and applies both scales.

#include "mx_epilogue.h"
#include "mx_moe.h"
#include "mx_quantize.h"
#include "mx_scale.h"
#include "mx_target.h"
#include "sm90_async.h"
#include "sm90_mma.h"
#include "sm90_moe.h"

using namespace mx;

constexpr int kWarps = MX_WARPS;        // of a workgroup
constexpr int kColTiles = MX_COL_TILES; // 8 rows of x each
constexpr int kDepth = MX_DEPTH;        // chunks in the ring
constexpr int kGroups = MX_GROUPS;      // workgroups that an SM must have room for
constexpr int kActivation = MX_ACTIVATION;
using Out = DType<kActivation == kNoActivation ? MX_OUT : kF32>;

constexpr int kThreads = kWarps * kLanes;
constexpr int kRowTiles = 2; // 16 rows of w each, of a warp
constexpr int kWarpRows = kRowTiles * 16;
constexpr int kRows = kWarps * kWarpRows;
constexpr int kCols = kColTiles * 8;
using Rows = TileRows<kRows, kWarpRows, kActivation != kNoActivation, MX_INTERLEAVED>;
using Walk = MoeWalk<kCols>;

// The threads of a row of x copy, and later convert, 16 of its k each, kParts times a chunk.
constexpr int kRowThreads = kThreads / kCols;
constexpr int kParts = 8 / kRowThreads;
static_assert(kRowThreads * kCols == kThreads && kParts * kRowThreads == 8,
              "threads share the rows of x evenly");

// A slot of the ring: w of each warp with its scales; x with its scales, for each thread its own.
constexpr int kWScalesAt = kWarpRows * kChunk;
constexpr int kWarpBytes = kWScalesAt + kWarpRows * 4;
constexpr int kXAt = kWarps * kWarpBytes;
constexpr int kXScalesAt = kXAt + kCols * kChunk;
constexpr int kSlotBytes = kXScalesAt + kThreads * 4;
// x in fp16, of the chunk in use and the next one: [block][tile of x][lane] 16 bytes.
constexpr int kHalvesBytes = kCols * kChunk * 2;
constexpr int kEntries = kDepth + 1;

// What the workgroup sums up: rows of x by a tile of w.
struct Entry {
    int t[kCols];         // routed rows, or -1
    float weights[kCols]; // of the routing
    int expert;
    unsigned tile;
    int col_tiles; // that have rows
    int unused;    // keeps what follows aligned
};
struct Shared {
    unsigned char ring[kDepth][kSlotBytes];
    unsigned char halves[2][kHalvesBytes];
    Entry queue[kEntries];
    unsigned amax[kWarps][kCols]; // of a warp's features, after the activation
    // Of a chunk, by its number modulo 4: the units of x's rows; whether some of them have grown;
    // whether scales of x do not fit into its fp16.
    float units[4][kCols];
    int grown[4], outside[4];
};
static_assert(
    sizeof(Shared) == MX_SHARED_BYTES,
    "the host lays shared memory out differently: aiter_mx/kernels/moe_gemm/wide_sm90.py");

// Units of sums, as e8m0 bytes, and the scales of w below which sums in them stay within fp32.
constexpr int kFirstUnit = 127 - 40, kLastUnit = 127 + 20;
constexpr unsigned kLastWScale = 127 + 60;
constexpr int kHeadroom = 2; // log2 of the largest scale of x over the unit, when that is chosen

MX_DEVICE void store_shared_16(unsigned address, const f16x8& v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.words[0]),
                 "r"(v.words[1]), "r"(v.words[2]), "r"(v.words[3])
                 : "memory");
}

struct Filler {
    const MoeArgs& a;
    Shared& shared;
    Walk& walk;
    const int thread, lane, warp;
    const int x_row_in_tile, x_part; // that this thread copies
    int slot = 0, entry = 0, chunk;  // the next ones
    int filled = 0;                  // chunks
    int x_row;                       // of the open entry, or -1

    MX_MEMBER bool open() {
        if (!walk.next([&] {
                store_zeros<Out, Rows::kFeatures, kActivation != kNoActivation>(a, walk, warp,
                                                                                kWarps);
            }))
            return false;
        const int own = walk.row(x_row_in_tile);
        x_row = own < 0 ? -1 : own / a.a_div;
        Entry& to = shared.queue[entry];
        if (warp == 0) {
#pragma unroll
            for (int i = 0; i < kCols; i += kLanes) {
                const int row = walk.row(i + lane);
                to.t[i + lane] = row;
                if (a.weights != nullptr && row >= 0)
                    copy_word_async(shared_address(to.weights + i + lane),
                                    walk.weight(i + lane, row));
            }
            if (lane == 0) {
                to.expert = walk.expert;
                to.tile = walk.tile;
                to.col_tiles = walk.col_tiles();
            }
        }
        entry = entry + 1 == kEntries ? 0 : entry + 1;
        chunk = 0;
        return true;
    }
    MX_MEMBER void copy_chunk() const {
        const unsigned to = shared_address(shared.ring[slot]);
        const Offset first_row = walk.expert * static_cast<Offset>(a.N);
        const Offset k = static_cast<Offset>(chunk) * kChunk;
        const int part = lane % 8, row_in_4 = lane / 8;
        const unsigned char* w = a.wq + k + part * 16;
        const unsigned place = to + warp * kWarpBytes + swizzled(row_in_4, part);
#pragma unroll
        for (int i = 0; i < kWarpRows / 4; ++i) {
            const int r = warp * kWarpRows + i * 4 + row_in_4;
            copy_once_async(place + i * 4 * kChunk,
                            w + (first_row + Rows::row(a, walk.tile, r)) * a.K, true);
        }
        const int r = warp * kWarpRows + lane;
        copy_word_async(to + warp * kWarpBytes + kWScalesAt + lane * 4,
                        a.ws + (first_row + Rows::row(a, walk.tile, r)) * a.blocks() +
                            chunk * kBlocks);
        const unsigned scales = to + kXScalesAt + thread * 4;
        if (x_row < 0) {
            store_shared_4(scales, 0x7f7f7f7f); // so that nothing about the row looks unusual
            return;
        }
        const unsigned char* x = a.xq + x_row * static_cast<Offset>(a.K) + k;
#pragma unroll
        for (int i = 0; i < kParts; ++i)
            copy_async(to + kXAt + swizzled(x_row_in_tile, x_part + i * kRowThreads),
                       x + (x_part + i * kRowThreads) * 16, true);
        copy_word_async(scales, a.xs + x_row * a.blocks() + chunk * kBlocks);
    }
    // Brings the next chunk, if there is one.
    MX_MEMBER void fill() {
        if ((filled > 0 && chunk < a.chunks()) || open()) {
            copy_chunk();
            ++chunk;
            ++filled;
        }
        copy_commit();
        slot = slot + 1 == kDepth ? 0 : slot + 1;
    }
};

// Makes fp16 of what this thread has copied of x.
struct Converter {
    const MoeArgs& a;
    Shared& shared;
    const int thread, x_row_in_tile, x_part;
    int converted = 0, slot = 0, chunk = 0; // chunks so far; the next ones
    int unit;                               // of the row's sums, an e8m0 byte

    MX_MEMBER void convert() {
        const unsigned from = shared_address(shared.ring[slot]);
        const unsigned scales = load_shared_4(from + kXScalesAt + thread * 4);
        const int most =
            max(max(scales & 255, scales >> 8 & 255), max(scales >> 16 & 255, scales >> 24));
        const int needed = min(max(most - kHeadroom, kFirstUnit), kLastUnit);
        if (chunk == 0) {
            unit = needed;
        } else if (most + 127 - unit > static_cast<int>(kLastF16Scale) && needed > unit) {
            unit = needed;
            shared.grown[converted % 4] = 1;
        }
        if (x_part == 0)
            shared.units[converted % 4][x_row_in_tile] = bits_to_float(unit << 23);
        const unsigned to = shared_address(shared.halves[converted % 2]);
        bool outside = false;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const int part = x_part + i * kRowThreads, b = part / 2;
            const uint4 payload = load_shared_16(from + kXAt + swizzled(x_row_in_tile, part));
            const unsigned byte = scales >> 8 * b & 255;
            const unsigned relative = byte + 127 - unit;
            outside |=
                relative - kFirstF16Scale > kLastF16Scale - kFirstF16Scale &&
                (byte == kNanScale || (payload.x | payload.y | payload.z | payload.w) & 0x7f7f7f7f);
            const unsigned factor = e8m0_to_f16x2(relative);
            const unsigned place = to + ((b * kColTiles + x_row_in_tile / 8) * kLanes +
                                         x_row_in_tile % 8 * 4 + part % 2 * 2) *
                                            16;
            store_shared_16(place, multiply(e4m3x8_to_f16({payload.x, payload.y}), factor));
            store_shared_16(place + 16, multiply(e4m3x8_to_f16({payload.z, payload.w}), factor));
        }
        if (outside)
            shared.outside[converted % 4] = 1;
        if (thread == 0)
            shared.outside[(converted + 1) % 4] = shared.grown[(converted + 1) % 4] = 0;
        ++converted;
        slot = slot + 1 == kDepth ? 0 : slot + 1;
        chunk = chunk + 1 == a.chunks() ? 0 : chunk + 1;
    }
};

using Sums = float[kRowTiles][kColTiles][4];

// The rows of w of a lane: of each tile of 16, two.
struct Weights {
    f16x8 rows[kRowTiles][2];

    MX_MEMBER Weights(unsigned w, int b, int lane) {
        const unsigned at = w + swizzled_block(b, lane);
#pragma unroll
        for (int i = 0; i < kRowTiles * 2; ++i)
            rows[i / 2][i % 2] = e4m3x8_to_f16(load_shared_8(at + i * 8 * kChunk));
    }
};

// Adds a chunk of the first ColTiles tiles of x, whose scales are in its fp16. Those of w are not
// NaN.
template <int ColTiles>
MX_DEVICE void add_scaled_x(Sums& sums, unsigned w, unsigned x,
                            const unsigned (&w_scales)[kRowTiles][2], int lane) {
#pragma unroll 1 // else more is loaded ahead than registers hold
    for (int b = 0; b < kBlocks; ++b) {
        const Weights weights(w, b, lane);
        float scales[kRowTiles][2];
#pragma unroll
        for (int i = 0; i < kRowTiles * 2; ++i)
            scales[i / 2][i % 2] = bits_to_float(
                max(w_scales[i / 2][i % 2] >> 8 * b << 23 & 0x7f800000, kTwoToMinus127));
#pragma unroll
        for (int j = 0; j < ColTiles; ++j) {
            const uint4 words = load_shared_16(x + ((b * kColTiles + j) * kLanes + lane) * 16);
            const f16x8 column = {{words.x, words.y, words.z, words.w}};
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
                float dots[4];
                mma_block(dots, weights.rows[i][0], weights.rows[i][1], column);
#pragma unroll
                for (int d = 0; d < 4; ++d)
                    sums[i][j][d] = mx::fma(dots[d], scales[i][d / 2], sums[i][j][d]);
            }
        }
    }
}

// The same from x in e4m3, with any scales.
MX_DEVICE void add_plain_x(Sums& sums, unsigned w, unsigned x, unsigned x_scales,
                           const unsigned (&w_scales)[kRowTiles][2], int col_tiles, int lane) {
    for (int b = 0; b < kBlocks; ++b) {
        const Weights weights(w, b, lane);
        const unsigned column_at = x + swizzled_block(b, lane);
#pragma unroll
        for (int j = 0; j < kColTiles; ++j) {
            if (j >= col_tiles)
                break;
            const f16x8 column = e4m3x8_to_f16(load_shared_8(column_at + j * 8 * kChunk));
            SplitScale scales[2];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int m = j * 8 + lane % 4 * 2 + c;
                scales[c] =
                    e8m0_split(load_shared_4(x_scales + m * kRowThreads * 4) >> 8 * b & 255);
            }
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
                float dots[4];
                mma_block(dots, weights.rows[i][0], weights.rows[i][1], column);
#pragma unroll
                for (int d = 0; d < 4; ++d)
                    sums[i][j][d] = add_scaled(sums[i][j][d], dots[d], scales[d % 2],
                                               e8m0_to_f32(w_scales[i][d / 2] >> 8 * b & 255));
            }
        }
    }
}

// Of value d of tile j of a lane: the row of x.
MX_DEVICE int column_of(int j, int d, int lane) { return j * 8 + lane % 4 * 2 + d % 2; }

// sums * from / to, for units of their rows of x.
template <class To>
MX_DEVICE void change_units(Sums& sums, const float* from, To to, int lane) {
#pragma unroll
    for (int j = 0; j < kColTiles; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int m = column_of(j, c, lane);
            const float ratio = from[m] * bits_to_float((254u << 23) - float_to_bits(to(m)));
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
                sums[i][j][c] *= ratio;
                sums[i][j][2 + c] *= ratio;
            }
        }
}

MX_DEVICE void add_bias(const MoeArgs& a, const Entry& entry, Sums& sums, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < kRowTiles * 2; ++i) {
        const int r = warp * kWarpRows + i * 8 + lane / 4;
        const float bias =
            load_bias(a.bias, a.bias_kind, entry.expert * a.N + Rows::row(a, entry.tile, r));
#pragma unroll
        for (int j = 0; j < kColTiles; ++j)
#pragma unroll
            for (int c = 0; c < 2; ++c)
                sums[i / 2][j][i % 2 * 2 + c] += bias;
    }
}

MX_DEVICE void store_plain(const MoeArgs& a, const Entry& entry, const Sums& sums, int warp,
                           int lane) {
    const long first = entry.tile * static_cast<long>(kRows) + warp * kWarpRows + lane / 4;
#pragma unroll
    for (int j = 0; j < kColTiles; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int m = column_of(j, c, lane);
            const long t = entry.t[m];
            if (t < 0)
                continue;
            const float weight = a.weights == nullptr ? 1.0f : entry.weights[m];
            Out* to = static_cast<Out*>(a.out) + t * a.N + first;
#pragma unroll
            for (int i = 0; i < kRowTiles * 2; ++i)
                if (first + i * 8 < a.N)
                    store(to + i * 8, sums[i / 2][j][i % 2 * 2 + c] * weight);
        }
}

// A warp has 16 features, gate in its first tile of rows and up in the second; two warps have a
// block of 32.
template <int Activation>
MX_DEVICE void store_activated(const MoeArgs& a, const Entry& entry, Sums& sums, Shared& shared,
                               int warp, int lane) {
    const long first = entry.tile * static_cast<long>(Rows::kFeatures) + warp * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < kColTiles; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            asm volatile("" ::: "memory"); // one after the other: registers are few
            unsigned amax = 0;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float& value = sums[0][j][r * 2 + c];
                value = activate<Activation>(value, sums[1][j][r * 2 + c], a.activation);
                amax = max(amax, magnitude_bits(value));
            }
#pragma unroll
            for (int distance = 4; distance < kLanes; distance *= 2)
                amax = max(amax, __shfl_xor_sync(~0u, amax, distance));
            if (lane < 4)
                shared.amax[warp][column_of(j, c, lane)] = amax;
        }
    group_barrier();
#pragma unroll
    for (int j = 0; j < kColTiles; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            asm volatile("" ::: "memory");
            const int m = column_of(j, c, lane);
            const long t = entry.t[m];
            if (t < 0 || first >= a.N / 2)
                continue;
            const BlockScale scale =
                block_scale<E4M3, kRoundUp>(max(shared.amax[warp][m], shared.amax[warp ^ 1][m]));
            const unsigned bytes =
                to_e4m3x4<kRoundUp>(sums[0][j][c], sums[0][j][2 + c], 0.0f, 0.0f, scale);
            const long n = t * (a.N / 2) + first;
            static_cast<unsigned char*>(a.out)[n] = bytes;
            static_cast<unsigned char*>(a.out)[n + 8] = bytes >> 8;
            if (warp % 2 == 0 && lane < 4)
                a.out_scales[n / kBlock] = scale.byte;
        }
}

extern "C" __global__ void __launch_bounds__(kThreads, kGroups)
    aiter_mx_moe_gemm(const unsigned char* xq, const unsigned char* xs, const unsigned char* wq,
                      const unsigned char* ws, const int* ids, const int* expert_ids,
                      const int* padded, const float* weights, const void* bias, void* out,
                      unsigned char* out_scales, long N, long K, int num_experts, int num_valid,
                      int a_div, int packed_top_k, int weights_by_place, int max_blocks,
                      int block_m, int bias_kind, float alpha, float beta, float limit) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic);
    const MoeArgs a{xq,
                    xs,
                    wq,
                    ws,
                    ids,
                    expert_ids,
                    padded,
                    weights,
                    bias,
                    out,
                    out_scales,
                    N,
                    K,
                    num_experts,
                    num_valid,
                    a_div,
                    packed_top_k,
                    weights_by_place,
                    max_blocks,
                    block_m,
                    bias_kind,
                    {alpha, beta, limit}};
    const int thread = threadIdx.x, lane = thread % kLanes, warp = thread / kLanes;
    const int x_row_in_tile = thread / kRowThreads, x_part = thread % kRowThreads;
    if (thread < 4)
        shared.outside[thread] = shared.grown[thread] = 0;
    Walk walk(a, Rows::count(a), lane);
    Filler filler{a, shared, walk, thread, lane, warp, x_row_in_tile, x_part};
    Converter converter{a, shared, thread, x_row_in_tile, x_part};
    group_barrier(); // the flags are set up

    Sums sums;
    bool in_units = true; // the sums; else they are plain
    int done = 0, slot = 0, chunk = 0;
    const Entry* entry = shared.queue;
    for (int step = 0;; ++step) {
        filler.fill();
        if (step < kDepth - 2)
            continue;
        copy_wait<kDepth - 2>();
        if (converter.converted < filler.filled)
            converter.convert();
        if (step >= kDepth - 1) {
            if (done == filler.filled)
                break;
            if (chunk == 0) {
                in_units = true;
#pragma unroll
                for (auto& rows : sums)
#pragma unroll
                    for (auto& tile : rows)
#pragma unroll
                        for (float& sum : tile)
                            sum = 0.0f;
            }
            const unsigned at = shared_address(shared.ring[slot]);
            const unsigned w = at + warp * kWarpBytes;
            unsigned w_scales[kRowTiles][2], most = 0;
#pragma unroll
            for (int i = 0; i < kRowTiles * 2; ++i) {
                const unsigned word = load_shared_4(w + kWScalesAt + (i * 8 + lane / 4) * 4);
                w_scales[i / 2][i % 2] = word;
                most = max(max(most, max(word & 255, word >> 8 & 255)),
                           max(word >> 16 & 255, word >> 24));
            }
            const float* units = shared.units[done % 4];
            const float* before = shared.units[(done + 3) % 4];
            const bool fits = __all_sync(~0u, most <= kLastWScale) && !shared.outside[done % 4];
            if (in_units && fits && shared.grown[done % 4])
                change_units(sums, before, [&](int m) { return units[m]; }, lane);
            if (in_units && !fits) {
                in_units = false;
                if (chunk > 0)
                    change_units(sums, before, [](int) { return 1.0f; }, lane);
            }
            if (!in_units)
                add_plain_x(sums, w, at + kXAt, at + kXScalesAt, w_scales, entry->col_tiles, lane);
            else if (entry->col_tiles > kColTiles / 2)
                add_scaled_x<kColTiles>(sums, w, shared_address(shared.halves[done % 2]), w_scales,
                                        lane);
            else
                add_scaled_x<kColTiles / 2>(sums, w, shared_address(shared.halves[done % 2]),
                                            w_scales, lane);
            ++done;
            ++chunk;
            slot = slot + 1 == kDepth ? 0 : slot + 1;
        }
        group_barrier(); // a chunk is converted, another one no longer read
        if (chunk < a.chunks())
            continue;
        if (in_units)
            change_units(sums, shared.units[(done + 3) % 4], [](int) { return 1.0f; }, lane);
        if (a.bias_kind != kNone)
            add_bias(a, *entry, sums, warp, lane);
        if constexpr (kActivation == kNoActivation)
            store_plain(a, *entry, sums, warp, lane);
        else
            store_activated<kActivation>(a, *entry, sums, shared, warp, lane);
        chunk = 0;
        entry = entry + 1 == shared.queue + kEntries ? shared.queue : entry + 1;
    }
}
