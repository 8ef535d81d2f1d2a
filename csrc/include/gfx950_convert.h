// Conversions from fp32 that CDNA4 has instructions for (CDNA4 ISA manual, "VALU conversions").
#pragma once

#include "mx_gfx950.h"

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

// Eight floats to e2m1, to nearest even; NaN to anything. Without Saturating none may be above 6.
template <bool Saturating>
MX_DEVICE unsigned f32_to_e2m1x8(const f32x2 (&pairs)[4]) {
    constexpr float largest = 6.0f;
    f32x2 bounded[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        bounded[i] = Saturating ? clamp(pairs[i], largest) : pairs[i];
    unsigned word = 0;
    word = __builtin_amdgcn_cvt_scalef32_pk_fp4_f32(word, bounded[0].x, bounded[0].y, 1.0f, 0);
    word = __builtin_amdgcn_cvt_scalef32_pk_fp4_f32(word, bounded[1].x, bounded[1].y, 1.0f, 1);
    word = __builtin_amdgcn_cvt_scalef32_pk_fp4_f32(word, bounded[2].x, bounded[2].y, 1.0f, 2);
    return __builtin_amdgcn_cvt_scalef32_pk_fp4_f32(word, bounded[3].x, bounded[3].y, 1.0f, 3);
}

} // namespace mx
