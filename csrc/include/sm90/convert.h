// Conversions from fp32 on Hopper: e4m3 by instruction (PTX ISA, cvt), e2m1 by arithmetic, as its
// instructions begin with Blackwell.
#pragma once

#include "sm90/target.h"

namespace mx {

MX_DEVICE f32x2 multiply(f32x2 pair, float by) { return {pair.x * by, pair.y * by}; }

// Four floats to e4m3 bytes, to nearest even, saturating; NaN to 0x7f, whatever its sign. cvt puts
// its first operand above its second one.
template <bool Saturating>
MX_DEVICE unsigned f32_to_e4m3x4(f32x2 low, f32x2 high, bool) {
    unsigned word;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n"
        "}"
        : "=r"(word)
        : "f"(low.x), "f"(low.y), "f"(high.x), "f"(high.y));
    return word;
}

// One float below 8 to e2m1. Numbers of e2m1 with exponent e are 2^(e-1) apart, those below 1 as
// far as those above it. So a number 2^(e+22) has bits of that weight last, and adding x to it
// rounds x; these bits then count up to 4 units, and each exponent above 0 begins two codes later.
MX_DEVICE unsigned one_to_e2m1(float x) {
    constexpr unsigned one = 0x3f800000, to_units = 22u << 23;
    const unsigned bits = __float_as_uint(x);
    const unsigned power = ::max(bits & 0x7f800000, one); // 2^e
    const unsigned unit = power + to_units;
    const float sum = __uint_as_float(bits & 0x7fffffff) + __uint_as_float(unit);
    const unsigned code = __float_as_uint(sum) - unit + ((power - one) >> 22);
    return ::min(code, 7u) | (bits >> 28 & 8);
}

// Floats below 8 to e2m1, to nearest even, saturating; NaN to anything.
template <bool, int Pairs>
MX_DEVICE unsigned f32_to_e2m1(const f32x2 (&pairs)[Pairs]) {
    unsigned word = 0;
#pragma unroll
    for (int i = 0; i < Pairs; ++i)
        word |= one_to_e2m1(pairs[i].x) << 8 * i | one_to_e2m1(pairs[i].y) << (8 * i + 4);
    return word;
}

} // namespace mx
