// A step of 128 k of operands whose blocks of 32 k are under one scale where they can be: its
// products by 64 rows of x and 128 of w, by wgmma over fp8, which adds them with about 14 bits, and
// what becomes of them where rows or blocks are apart.
#pragma once

#include "common/target.h"
#include "rescaled_sm90.h"
#include "sm90/tma.h"
#include "sm90/wgmma.h"

namespace mx {

struct RescaledStep {
    static constexpr int kColumns = RescaledOperands::kRows;
    static constexpr int kBlocks = RescaledOperands::kStepK / 32;
    static constexpr int kValues = kColumns / 2; // of a thread
    using Values = float[kValues];

    // Which of the sums is that of a value of wgmma's. Parts leave four sums at a time, for which
    // these lie in neighbouring registers as products do. Where one of the two is odd and the other
    // even, FFMA reads both at once.
    MX_MEMBER static constexpr int place(int value) { return value ^ 1; }

    // The products of so many blocks of 32 k, from these descriptors on.
    template <int Blocks>
    MX_MEMBER static void multiply(Values& products, unsigned x_at, unsigned w_at) {
        wgmma_fence();
        wgmma_fp8<false>(products, SwizzledDescriptor::of(x_at), SwizzledDescriptor::of(w_at));
#pragma unroll
        for (int k = 1; k < Blocks; ++k)
            wgmma_fp8<true>(products, SwizzledDescriptor::of(x_at + 2 * k),
                            SwizzledDescriptor::of(w_at + 2 * k));
        wgmma_commit();
    }

    // Adds up a step in which not all have a scale in common, but what `kind` says. Scales are
    // words of four blocks: of a lane's upper and lower row of x, and of its two columns of each
    // eight, of_piece(i).
    template <class OfPiece>
    MX_MEMBER static void add_apart(Values& sums, unsigned x_at, unsigned w_at, unsigned upper,
                                    unsigned lower, const OfPiece& of_piece, float kind) {
        if (__any_sync(~0u, kind == kRowsApart))
            add_rows(sums, x_at, w_at, upper, lower, of_piece);
        else if (__any_sync(~0u, kind == kBlocksApart))
            add_blocks(sums, x_at, w_at, upper, lower, of_piece);
        else
            add_far_blocks(sums, x_at, w_at, upper, lower, of_piece);
    }

  private:
    static constexpr int kPieces = kColumns / 8;

    // What four scales that are alike stand for, none of which is 0 or NaN.
    MX_MEMBER static float e8m0_to_normal(unsigned scales) {
        return bits_to_float((scales & 0xff) << 23);
    }
    // Adds products of which each row and each column has a scale, `shift` bits up in its word.
    template <class OfPiece>
    MX_MEMBER static void add_scaled(Values& sums, Values& products, unsigned upper, unsigned lower,
                                     const OfPiece& of_piece, int shift) {
        const float of_rows[2] = {e8m0_to_normal(upper >> shift), e8m0_to_normal(lower >> shift)};
        wgmma_wait<0>();
        keep_in_order(products);
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
            const uint2 scales = of_piece(piece);
            const float of_columns[2] = {e8m0_to_normal(scales.x >> shift),
                                         e8m0_to_normal(scales.y >> shift)};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& sum = sums[place(4 * piece + i)];
                sum = mx::fma(products[4 * piece + i] * of_columns[i % 2], of_rows[i / 2], sum);
            }
        }
    }
    // Adds the products of a step whose rows have scales of their own.
    template <class OfPiece>
    MX_MEMBER static void add_rows(Values& sums, unsigned x_at, unsigned w_at, unsigned upper,
                                   unsigned lower, const OfPiece& of_piece) {
        Values products;
        multiply<kBlocks>(products, x_at, w_at);
        add_scaled(sums, products, upper, lower, of_piece, 0);
    }
    // Adds the products of a step whose blocks have scales of their own.
    template <class OfPiece>
    MX_MEMBER static void add_blocks(Values& sums, unsigned x_at, unsigned w_at, unsigned upper,
                                     unsigned lower, const OfPiece& of_piece) {
#pragma unroll 1
        for (int k = 0; k < kBlocks; ++k, x_at += 2, w_at += 2) {
            Values products;
            multiply<1>(products, x_at, w_at);
            add_scaled(sums, products, upper, lower, of_piece, 8 * k);
        }
    }
    // Likewise where the product of two scales may be out of fp32, though what it makes of a
    // product is not.
    template <class OfPiece>
    MX_MEMBER static void add_far_blocks(Values& sums, unsigned x_at, unsigned w_at, unsigned upper,
                                         unsigned lower, const OfPiece& of_piece) {
#pragma unroll 1
        for (int k = 0; k < kBlocks; ++k, x_at += 2, w_at += 2) {
            Values products;
            multiply<1>(products, x_at, w_at);
            const unsigned of_rows[2] = {upper >> 8 * k & 0xff, lower >> 8 * k & 0xff};
            wgmma_wait<0>();
            keep_in_order(products);
#pragma unroll
            for (int piece = 0; piece < kPieces; ++piece) {
                const uint2 scales = of_piece(piece);
                const unsigned of_columns[2] = {scales.x >> 8 * k & 0xff, scales.y >> 8 * k & 0xff};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const unsigned both = of_rows[i / 2] + of_columns[i % 2]; // 2^(both - 254)
                    const unsigned half = both / 2;
                    float& sum = sums[place(4 * piece + i)];
                    sum = mx::fma(products[4 * piece + i] * bits_to_float(half << 23),
                                  bits_to_float(both - half << 23), sum);
                }
            }
        }
    }
};

} // namespace mx
