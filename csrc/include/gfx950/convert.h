// Conversions from fp32 that CDNA4 has instructions for (CDNA4 ISA manual, "VALU conversions").
#pragma once

#include "gfx950/target.h"

namespace mx {

MX_DEVICE f32x2 multiply(f32x2 pair, float by) { return pair * by; }

// The conversions below do not saturate by themselves: beyond the largest e4m3 they give NaN.
MX_DEVICE f32x2 clamp(f32x2 pair, float most) {
    return {__builtin_amdgcn_fmed3f(pair.x, -most, most),
            __builtin_amdgcn_fmed3f(pair.y, -most, most)};
}

// Four floats to e4m3 bytes, to nearest even, or to four NaNs. Without Saturating none may be above
// 448. A NaN's sign would depend on the order of operands, so NaN is asked for.
template <bool Saturating>
MX_DEVICE unsigned f32_to_e4m3x4(f32x2 low, f32x2 high, bool is_nan) {
    constexpr float largest = 448.0f;
    if constexpr (Saturating) {
        low = clamp(low, largest);
        high = clamp(high, largest);
    }
    int word = __builtin_amdgcn_cvt_pk_fp8_f32(low.x, low.y, 0, false);
    word = __builtin_amdgcn_cvt_pk_fp8_f32(high.x, high.y, word, true);
    return is_nan ? 0x7f7f7f7f : static_cast<unsigned>(word);
}

// Two floats to e2m1 in byte Byte of a word, to nearest even; NaN to anything.
template <bool Saturating, int Byte>
MX_DEVICE unsigned insert_e2m1x2(unsigned word, f32x2 pair) {
    constexpr float largest = 6.0f, no_scale = 1.0f;
    const f32x2 bounded = Saturating ? clamp(pair, largest) : pair;
    return __builtin_amdgcn_cvt_scalef32_pk_fp4_f32(word, bounded.x, bounded.y, no_scale, Byte);
}

// 2, 4 or 8 floats to e2m1; without Saturating none may be above 6.
template <bool Saturating, int Pairs>
MX_DEVICE unsigned f32_to_e2m1(const f32x2 (&pairs)[Pairs]) {
    unsigned word = insert_e2m1x2<Saturating, 0>(0, pairs[0]);
    if constexpr (Pairs > 1)
        word = insert_e2m1x2<Saturating, 1>(word, pairs[1]);
    if constexpr (Pairs > 2) {
        word = insert_e2m1x2<Saturating, 2>(word, pairs[2]);
        word = insert_e2m1x2<Saturating, 3>(word, pairs[3]);
    }
    return word;
}

} // namespace mx
