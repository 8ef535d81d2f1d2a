// The scaled matrix instruction of CDNA4: 16 x 16 sums over 128 k, a scale for each 32 k of a row.
//
// Each lane holds 32 bytes of one row of an operand: the halves 16 g .. 16 g + 15 and
// 64 + 16 g .. 64 + 16 g + 15 of the row's k.
//
//   row = lane % 16, g = lane / 16
//   k ->   |  0: g 0 |  16: g 1 |  32: g 2 |  48: g 3 |  64: g 0 |  80: g 1 |  96: g 2 | 112: g 3 |
//   scale  |     of lane g 0    |    of lane g 1      |    of lane g 2      |    of lane g 3      |
//
// A lane's scale is thus that of k = 32 g .. 32 g + 31 of its row, not of the bytes it holds. Of
// the product a lane holds column lane % 16, and rows 4 g to 4 g + 3.
#pragma once

#include "gfx950/target.h"

namespace mx {

using f32x4 = float __attribute__((ext_vector_type(4)));
using u32x8 = unsigned __attribute__((ext_vector_type(8)));

constexpr int kSide = 16;            // rows and columns of a product
constexpr int kDepth = 128;          // k of an instruction
constexpr unsigned kUnitScale = 127; // e8m0 of 1

// c + a * b^T of e4m3 rows; the e8m0 scales are byte Byte of their words.
template <int Byte>
MX_DEVICE f32x4 multiply_scaled(u32x8 a, unsigned a_scales, u32x8 b, unsigned b_scales, f32x4 c) {
    constexpr int e4m3 = 0;
    return __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(a, b, c, e4m3, e4m3, Byte, a_scales,
                                                            Byte, b_scales);
}

} // namespace mx
