// What the warps of wgmma_f16_sm90.cu that add do with their sums.
#pragma once

#include "boxes_sm90.h"
#include "common/epilogue.h"
#include "common/quantize.h"
#include "common/scale.h"
#include "moe.h"
#include "sm90/tma.h"
#include "sm90/wgmma.h"

namespace mx {

// Makes results of the sums of a part of a tile, of which a lane has two rows in some columns.
struct Finisher {
    const MoeArgs& a;
    const int group, warp, lane; // warp: of the group

    // Applies what the rows are relative to.
    MX_MEMBER void scale_sums(const Entry& entry, const float (&by_w)[2],
                              float (&sums)[kCols / 2]) const {
#pragma unroll
        for (int j = 0; j < kColTiles; ++j) {
            const float2 by_x =
                *reinterpret_cast<const float2*>(entry.x_power + column_of(j, 0, lane));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                sums[j * 4 + i * 2] *= by_w[i] * by_x.x;
                sums[j * 4 + i * 2 + 1] *= by_w[i] * by_x.y;
            }
        }
    }

    // Computes again what has been left out.
    MX_MEMBER void mend(const Entry& entry, unsigned tile, int part, unsigned outside,
                        float (&sums)[kCols / 2]) const {
        unsigned again = 0; // a bit for each of the two rows, for all lanes of it
#pragma unroll
        for (int i = 0; i < 2; ++i)
            again |= (any_of_row(outside >> i & 1, lane) ? 1u : 0u) << i;
#pragma unroll 1
        for (int at = 0; at < kCols / 2; ++at) {
            const int i = at / 2 % 2, m = column_of(at / 4, at % 2, lane), t = entry.t[m];
            if (t < 0 || !(again >> i & 1 || entry.x_outside[m]))
                continue;
            const Offset x = t / a.a_div, w = entry.expert * static_cast<Offset>(a.N) +
                                              row_of_w(a, tile, part, row_of(warp, lane, i));
            const float value = exact_output(a.xq + x * a.K, a.xs + x * a.blocks(), a.wq + w * a.K,
                                             a.ws + w * a.blocks(), a.K);
#pragma unroll
            for (int n = 0; n < kCols / 2; ++n)
                sums[n] = n == at ? value : sums[n];
        }
    }

    MX_MEMBER void add_bias(const Entry& entry, unsigned tile, int part,
                            float (&sums)[kCols / 2]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned row = row_of_w(a, tile, part, row_of(warp, lane, i));
            const float bias =
                load_bias(a.bias, a.bias_kind, entry.expert * static_cast<Offset>(a.N) + row);
#pragma unroll
            for (int j = 0; j < kColTiles; ++j)
#pragma unroll
                for (int c = 0; c < 2; ++c)
                    sums[j * 4 + i * 2 + c] += bias;
        }
    }
    // Which of a lane's two rows comes first, where they are neighbours.
    MX_MEMBER int first_row() const { return kHalves ? 0 : lane / 16; }

    // room: for so many of a lane's two features. Pairs: for both, which are one store.
    template <bool Pairs>
    MX_MEMBER void store_rows(const Entry& entry, Out* out, int room,
                              const float (&sums)[kCols / 2]) const {
        const unsigned row_bytes = static_cast<unsigned>(a.N) * sizeof(Out);
        const bool turned = first_row();
#pragma unroll
        for (int j = 0; j < kColTiles; ++j) {
            if (j >= entry.col_tiles)
                break;
            const int m = column_of(j, 0, lane);
            const int2 rows = *reinterpret_cast<const int2*>(entry.t + m);
            const float2 weights = *reinterpret_cast<const float2*>(entry.weights + m);
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int t = c ? rows.y : rows.x;
                const float weight = c ? weights.y : weights.x;
                const float one = sums[j * 4 + c], other = sums[j * 4 + 2 + c];
                const float first = (turned ? other : one) * weight;
                const float second = (turned ? one : other) * weight;
                Out* const to = reinterpret_cast<Out*>(
                    reinterpret_cast<unsigned char*>(out) +
                    static_cast<Offset>(static_cast<unsigned>(t)) * row_bytes);
                if constexpr (Pairs) {
                    store_pair(to, first, second, t);
                } else {
                    if (t >= 0 && room > 0)
                        store(to, first);
                    if (t >= 0 && room > 1)
                        store(to + 1, second);
                }
            }
        }
    }
    MX_MEMBER void store_plain(const Entry& entry, unsigned tile, int part,
                               const float (&sums)[kCols / 2]) const {
        const long of_part = (tile * static_cast<long>(kParts) + part) * kGroupRows;
        const long first = of_part + warp * 16 + lane / 4 * 2;
        Out* const out = static_cast<Out*>(a.out) + first;
        if (of_part + kGroupRows <= a.N && a.N % 2 == 0 &&
            reinterpret_cast<unsigned long>(a.out) % (2 * sizeof(Out)) == 0)
            store_rows<true>(entry, out, 2, sums);
        else
            store_rows<false>(entry, out, max(0L, min(2L, a.N - first)), sums);
    }

    // Row t of what begins at `first`; of a negative t, anything.
    template <class T>
    MX_MEMBER static T* row_of_result(T* first, int t, unsigned row_bytes) {
        unsigned long place;
        asm volatile("mad.wide.u32 %0, %1, %2, %3;"
                     : "=l"(place)
                     : "r"(t), "r"(row_bytes), "l"(first));
        return reinterpret_cast<T*>(place);
    }
    // A lane has gate and up of one feature; a warpgroup has a block of 32 features. Once all have
    // noted their largest magnitudes a thread finds the scale of each column, in whose place it
    // then leaves what values are to be multiplied with.
    template <int Count>
    MX_MEMBER void store_activated(const Entry& entry, unsigned tile, int part,
                                   float (&sums)[Count],
                                   unsigned (&amaxes)[kGroupWarps][kActivated ? kCols : 2]) const {
        static_assert(kCols <= kGroupThreads, "a thread has the scale of one column");
        const unsigned features = static_cast<unsigned>(a.N) / 2;
        const unsigned of_part = (tile * kParts + part) * kBlock;
        const bool exists = of_part < features; // blocks are whole
#pragma unroll
        for (int j = 0; j < kColTiles; ++j)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float one = sums[j * 4 + c], other = sums[j * 4 + 2 + c];
                const float value = activate<Count == 0 ? 0 : kActivation>(
                    first_row() ? other : one, first_row() ? one : other, a.activation);
                sums[j * 4 + c] = value;
                note_largest(amaxes, value, column_of(j, c, lane), warp, lane);
            }
        named_barrier(1 + group, kGroupThreads);
        if (const int m = warp * kLanes + lane; m < kCols) {
            const BlockScale scale = block_scale<E4M3, kRoundUp>(largest_of(amaxes, m));
            const int t = entry.t[m];
            amaxes[0][m] = float_to_bits(scale.inverse);
            if (exists && t >= 0)
                *(row_of_result(a.out_scales, t, features / kBlock) + of_part / kBlock) =
                    scale.byte;
        }
        named_barrier(1 + group, kGroupThreads);
        if (!exists)
            return;
        unsigned char* const out =
            static_cast<unsigned char*>(a.out) + (of_part + warp * 8 + lane / 4);
        unsigned words[kColTiles]; // of two columns
        int2 rows[kColTiles];
#pragma unroll
        for (int j = 0; j < kColTiles; ++j) {
            const int m = column_of(j, 0, lane);
            rows[j] = *reinterpret_cast<const int2*>(entry.t + m);
            const uint2 by = *reinterpret_cast<const uint2*>(amaxes[0] + m);
            words[j] = f32_to_e4m3x4<false>(
                {sums[j * 4] * bits_to_float(by.x), sums[j * 4 + 1] * bits_to_float(by.y)}, {},
                false);
        }
#pragma unroll
        for (int j = 0; j < kColTiles; ++j) {
            store_byte(row_of_result(out, rows[j].x, features), words[j], rows[j].x);
            store_byte(row_of_result(out, rows[j].y, features), words[j] >> 8, rows[j].y);
        }
    }
    // Stores the lowest byte if `exists` is not negative.
    MX_MEMBER static void store_byte(unsigned char* to, unsigned byte, int exists) {
        asm volatile("{\n"
                     ".reg .pred p;\n"
                     "setp.ge.s32 p, %2, 0;\n"
                     "@p st.global.u8 [%0], %1;\n"
                     "}" ::"l"(to),
                     "r"(byte), "r"(exists));
    }

    // by_w: what the lane's two rows' sums are to be multiplied with. outside: a bit for each of
    // the two: whether its scales are too far apart, as far as the lane sees it.
    MX_MEMBER void run(const Entry& entry, unsigned tile, int part, const float (&by_w)[2],
                       unsigned outside, float (&sums)[kCols / 2],
                       unsigned (&amaxes)[kGroupWarps][kActivated ? kCols : 2]) const {
        scale_sums(entry, by_w, sums);
        run_scaled(entry, tile, part, outside, sums, amaxes);
    }
    // The same for sums that are not relative to anything.
    MX_MEMBER void run_scaled(const Entry& entry, unsigned tile, int part, unsigned outside,
                              float (&sums)[kCols / 2],
                              unsigned (&amaxes)[kGroupWarps][kActivated ? kCols : 2]) const {
        if (__builtin_expect(__any_sync(~0u, outside | entry.any_x_outside), false))
            mend(entry, tile, part, outside, sums);
        if (a.bias_kind != kNone)
            add_bias(entry, tile, part, sums);
        if constexpr (kActivated)
            store_activated(entry, tile, part, sums, amaxes);
        else
            store_plain(entry, tile, part, sums);
    }
};

} // namespace mx
