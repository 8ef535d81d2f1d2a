// Grouped GEMM over routed tokens on Hopper, for some tens of tokens an expert.
// aiter_mx/kernels/moe_gemm/problem.py defines what it computes and its arguments.
//
// A workgroup takes a tile of kRows rows of an expert's w, 32 for each of its adding warps, and up
// to kCols rows of x, those of a block of ids, and goes along K by kChunk. Its warps share the work
// so that none of them waits for memory while it could add:
//
//   copying     4 warps bring w and x, both e4m3, into a ring, as far ahead as there is room,
//               across the ends of tiles
//   converting  4 warps make fp16 of x, in the order in which lanes take it, once for all
//   adding      kWarps warps take w from the ring and x from what was converted
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
#include "sm90_moe_wide.h"

using namespace mx;

using Sums = float[kRowTiles][kColTiles][4];

// The rows of w of a lane: of each tile of 16, two.
struct Weights {
    uint2 payload[kRowTiles][2];

    MX_MEMBER void load(unsigned w, int b, int lane) {
        const unsigned at = w + swizzled_block(b, lane);
#pragma unroll
        for (int i = 0; i < kRowTiles * 2; ++i)
            payload[i / 2][i % 2] = load_shared_8(at + i * 8 * kChunk);
    }
    MX_MEMBER void convert(f16x8 (&rows)[kRowTiles][2]) const {
#pragma unroll
        for (int i = 0; i < kRowTiles * 2; ++i)
            rows[i / 2][i % 2] = e4m3x8_to_f16(payload[i / 2][i % 2]);
    }
};

// Adds a chunk of the first ColTiles tiles of x, whose scales are in its fp16. Those of w are not
// NaN. What a block begins with is loaded while the one before is added.
template <int ColTiles>
MX_DEVICE void add_scaled_x(Sums& sums, unsigned w, unsigned x,
                            const unsigned (&w_scales)[kRowTiles][2], int lane) {
    constexpr int ahead = 2; // tiles of x
    const auto load_x = [&](int b, int j) {
        return load_shared_16(x + ((b * kColTiles + j) * kLanes + lane) * 16);
    };
    Weights weights;
    uint4 columns[ahead];
    weights.load(w, 0, lane);
#pragma unroll
    for (int j = 0; j < ahead; ++j)
        columns[j] = load_x(0, j);
#pragma unroll 1 // else more is loaded ahead than registers hold
    for (int b = 0; b < kBlocks; ++b) {
        f16x8 rows[kRowTiles][2];
        weights.convert(rows);
        uint4 all[ColTiles];
#pragma unroll
        for (int j = 0; j < ColTiles; ++j)
            all[j] = j < ahead ? columns[j] : load_x(b, j);
        const int next = b + 1 < kBlocks ? b + 1 : 0; // the last time it is not used
        weights.load(w, next, lane);
#pragma unroll
        for (int j = 0; j < ahead; ++j)
            columns[j] = load_x(next, j);
        float scales[kRowTiles][2];
#pragma unroll
        for (int i = 0; i < kRowTiles * 2; ++i)
            scales[i / 2][i % 2] = bits_to_float(
                max(w_scales[i / 2][i % 2] >> 8 * b << 23 & 0x7f800000, kTwoToMinus127));
#pragma unroll
        for (int j = 0; j < ColTiles; ++j) {
            const f16x8 column = {{all[j].x, all[j].y, all[j].z, all[j].w}};
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
                float dots[4];
                mma_block(dots, rows[i][0], rows[i][1], column);
#pragma unroll
                for (int d = 0; d < 4; ++d)
                    sums[i][j][d] = mx::fma(dots[d], scales[i][d / 2], sums[i][j][d]);
            }
        }
    }
}

// The same from x in e4m3, with any scales.
MX_DEVICE void add_plain_x(Sums& sums, unsigned w, unsigned x, const unsigned (&x_scales)[kCols],
                           const unsigned (&w_scales)[kRowTiles][2], int col_tiles, int lane) {
    for (int b = 0; b < kBlocks; ++b) {
        Weights weights;
        f16x8 rows[kRowTiles][2];
        weights.load(w, b, lane);
        weights.convert(rows);
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
                scales[c] = e8m0_split(x_scales[m] >> 8 * b & 255);
            }
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
                float dots[4];
                mma_block(dots, rows[i][0], rows[i][1], column);
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
MX_DEVICE void store_activated(const MoeArgs& a, const Entry& entry, Sums& sums,
                               unsigned (&amaxes)[kWarps][kCols], int warp, int lane) {
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
                amaxes[warp][column_of(j, c, lane)] = amax;
        }
    named_barrier(1 + warp / 2, 2 * kLanes);
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
                block_scale<E4M3, kRoundUp>(max(amaxes[warp][m], amaxes[warp ^ 1][m]));
            const unsigned bytes =
                to_e4m3x4<kRoundUp>(sums[0][j][c], sums[0][j][2 + c], 0.0f, 0.0f, scale);
            const long n = t * (a.N / 2) + first;
            static_cast<unsigned char*>(a.out)[n] = bytes;
            static_cast<unsigned char*>(a.out)[n + 8] = bytes >> 8;
            if (warp % 2 == 0 && lane < 4)
                a.out_scales[n / kBlock] = scale.byte;
        }
}

// Adds chunks and stores what they come to.
struct Adder {
    const MoeArgs& a;
    Shared& shared;
    const int lane, warp;

    MX_MEMBER void run() const {
        Sums sums;
        bool in_units = true; // the sums; else they are plain
        unsigned number = 0, entries = 0;
        const int chunks = a.chunks();
        int chunk = 0, at = 0, col_tiles = 0; // of the entry, and its place in the queue
        Scales held[kRowTiles * 2];
        Turn<kHalves> from;
        for (Turn<kDepth> turn;; turn.next(), from.next(), ++number) {
            barrier_wait(shared_address(shared.copied + turn.at), turn.parity);
            const unsigned slot = shared_address(shared.ring[turn.at]);
            const unsigned w = slot + warp * kWarpRows * kChunk;
            unsigned w_scales[kRowTiles][2], most = 0;
#pragma unroll
            for (int i = 0; i < kRowTiles * 2; ++i) {
                if (chunk % kScaleChunks == 0)
                    held[i].load(slot + kWScalesAt +
                                 (warp * kWarpRows + i * 8 + lane / 4) * kScaleBytes);
                const unsigned word = held[i].words[0];
                held[i].next();
                w_scales[i / 2][i % 2] = word;
                most = max(max(most, max(word & 255, word >> 8 & 255)),
                           max(word >> 16 & 255, word >> 24));
            }
            if (chunk == 0) {
                at = shared.chunks[turn.at].entry;
                if (at < 0)
                    break;
                col_tiles = shared.queue[at].col_tiles;
                in_units = true;
#pragma unroll
                for (auto& rows : sums)
#pragma unroll
                    for (auto& tile : rows)
#pragma unroll
                        for (float& sum : tile)
                            sum = 0.0f;
            }
            const bool few = __all_sync(~0u, most <= kLastWScale);
            barrier_wait(shared_address(shared.converted + from.at), from.parity);
            const unsigned flags = load_shared_4(shared_address(shared.flags[from.at]));
            const float* units = shared.units[number % 4];
            const float* before = shared.units[(number + 3) % 4];
            if (in_units && (flags != 0 || !few)) {
                if (!few || flags & kOutside * 0x01010101) {
                    in_units = false;
                    if (chunk > 0)
                        change_units(sums, before, [](int) { return 1.0f; }, lane);
                } else {
                    change_units(sums, before, [&](int m) { return units[m]; }, lane);
                }
            }
            const unsigned halves = shared_address(shared.halves[from.at]);
            if (!in_units)
                add_plain_x(sums, w, slot + kXAt, shared.scales[from.at], w_scales, col_tiles,
                            lane);
            else if (col_tiles > kColTiles / 2)
                add_scaled_x<kColTiles>(sums, w, halves, w_scales, lane);
            else
                add_scaled_x<kColTiles / 2>(sums, w, halves, w_scales, lane);
            if (++chunk == chunks) {
                chunk = 0;
                const Entry& entry = shared.queue[at];
                if (in_units)
                    change_units(sums, units, [](int) { return 1.0f; }, lane);
                if (a.bias_kind != kNone)
                    add_bias(a, entry, sums, warp, lane);
                if constexpr (kActivation == kNoActivation)
                    store_plain(a, entry, sums, warp, lane);
                else
                    store_activated<kActivation>(a, entry, sums, shared.amax[entries % 2], warp,
                                                 lane);
                ++entries;
            }
            __syncwarp();
            if (lane == 0) {
                barrier_arrive(shared_address(shared.taken + turn.at));
                barrier_arrive(shared_address(shared.used + from.at));
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
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
    wait_for_grid_ahead();
    if (thread < kDepth) {
        barrier_init(shared_address(shared.copied + thread), 2 * kCopying * kLanes);
        barrier_init(shared_address(shared.taken + thread), kWarps);
    }
    if (thread < kHalves) {
        barrier_init(shared_address(shared.converted + thread), kConverting * kLanes);
        barrier_init(shared_address(shared.used + thread), kWarps);
    }
    group_barrier();
    if (warp < kWarps) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kAddingRegisters));
        Adder{a, shared, lane, warp}.run();
    } else if (warp < kWarps + kCopying) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCopyingRegisters));
        Copier{a, shared, lane, warp - kWarps}.run();
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kConvertingRegisters));
        Converter{shared, lane, warp - kWarps - kCopying}.run();
    }
}
