// Exact application of two e8m0 block scales (OCP MX v1.0, section 5.4.1: 2^(byte - 127), 255 is
// NaN) to a sum of e4m3 products.
//
// The two scales' product spans 2^-254..2^254, more than fp32, though the scaled sum may be
// moderate. So they are applied one after the other, in an order that neither overflows nor rounds
// before the last step unless the result does. A sum p of up to 2^17 e4m3 products is below 2^35
// and a multiple of 2^-18; times 2^-127 it is still a multiple of fp32's smallest number, hence
// exact; times 2^64 it is still far from overflow. What one scale has above 2^64 is applied last,
// after the other scale.
#pragma once

#include "common/target.h"

namespace mx {

constexpr unsigned kNanScale = 255;
constexpr unsigned kNanBits = 0x7fc00000;
constexpr unsigned kTwoToMinus127 = 0x00400000; // subnormal: not an exponent field of 0

MX_DEVICE float e8m0_to_f32(unsigned byte) {
    const unsigned bits = max(byte << 23, kTwoToMinus127);
    return bits_to_float(byte == kNanScale ? kNanBits : bits);
}

// A scale as a product of two powers of two.
struct SplitScale {
    float first, last;
};

// 2^(byte - 127) as a product: all of it in first up to 2^64, what is left in last.
MX_DEVICE SplitScale e8m0_split(unsigned byte) {
    constexpr unsigned most = 127 + 64;
    const unsigned bits = max(min(byte, most) << 23, kTwoToMinus127);
    return {bits_to_float(byte == kNanScale ? kNanBits : bits),
            bits_to_float((max(byte, most) - 64) << 23)};
}

// sum + dot * (one scale) * (other scale)
MX_DEVICE float add_scaled(float sum, float dot, SplitScale one, float other) {
    return fma(dot * one.first * other, one.last, sum);
}

// Sum over K of x[k] * w[k], given the rows' payloads and scales. Some pieces are loaded at once,
// as nothing else hides latency.
template <int AtOnce = 4>
MX_DEVICE float exact_output(const unsigned char* xq, const unsigned char* xs,
                             const unsigned char* wq, const unsigned char* ws, long K) {
    constexpr int block = 32, piece = 16, at_once = AtOnce;
    float sum = 0.0f;
#pragma unroll 1
    for (long first = 0; first < K; first += at_once * piece) {
        u32x4 x_words[at_once], w_words[at_once];
        unsigned x_scale[at_once], w_scale[at_once];
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            const long k = first + i * piece < K ? first + i * piece : K - piece;
            x_words[i] = load(xq + k);
            w_words[i] = load(wq + k);
            x_scale[i] = load_byte(xs + k / block);
            w_scale[i] = load_byte(ws + k / block);
        }
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            if (first + i * piece >= K)
                break;
            f32x2 x[8], w[8];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                e4m3x4_to_f32(x_words[i][j], x[2 * j], x[2 * j + 1]);
                e4m3x4_to_f32(w_words[i][j], w[2 * j], w[2 * j + 1]);
            }
            sum = add_scaled(sum, dot(x, w), e8m0_split(x_scale[i]), e8m0_to_f32(w_scale[i]));
        }
    }
    return sum;
}

// A scale is stored row-major, or in tiles whose order suits matrix instructions. The same
// layouts as in aiter_mx/layouts.py; their tiles follow each other row by row.

enum ScaleLayout { kRowMajor = 0, k16x4 = 1, k32x8 = 2, k128x4 = 3 };

template <ScaleLayout Layout>
struct ScaleTile {
    static constexpr unsigned kRows = Layout == k16x4 ? 16 : Layout == k32x8 ? 32 : 128;
    static constexpr unsigned kColumns = Layout == k32x8 ? 8 : 4;
};

// Offset of a scale within a matrix of so many columns, both as padded to whole tiles.
template <ScaleLayout Layout>
MX_DEVICE unsigned long scale_offset(unsigned long row, unsigned long column,
                                     unsigned long columns) {
    if constexpr (Layout == kRowMajor)
        return row * columns + column;
    using Tile = ScaleTile<Layout>;
    const unsigned long tile =
        row / Tile::kRows * (columns / Tile::kColumns) + column / Tile::kColumns;
    const unsigned r = row % Tile::kRows, c = column % Tile::kColumns;
    const unsigned inside = Layout == k16x4   ? c * 16 + r
                            : Layout == k32x8 ? c % 4 * 64 + r % 16 * 4 + c / 4 * 2 + r / 16
                                              : r % 32 * 16 + r / 32 * 4 + c;
    return tile * (Tile::kRows * Tile::kColumns) + inside;
}

} // namespace mx
