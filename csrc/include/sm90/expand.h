// e4m3 times its e8m0 scale to bf16, exactly, for scales that bf16 covers.
//
// Weights are held as w * 2^-60 and activations as x * 2^60: with these, bf16 covers scales of w
// from 2^-64 to 2^67 and of x up to 2^59, whatever the payload, and products are as they should be.
#pragma once

#include "common/scale.h"
#include "common/target.h"
#include "sm90/convert.h"

namespace mx {

constexpr unsigned kFirstWScale = 63, kLastWScale = 194, kLastXScale = 186;

// a where mask is set, else b. Left to the compiler, constants would make it two instructions.
MX_DEVICE unsigned select_bits(unsigned mask, unsigned a, unsigned b) {
    unsigned chosen;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(chosen) : "r"(mask), "r"(a), "r"(b));
    return chosen;
}

// A half of a word in both halves.
template <int Half>
MX_DEVICE unsigned twice_half(unsigned word) {
    unsigned twice;
    if constexpr (Half == 0)
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {low, low};\n}"
            : "=r"(twice)
            : "r"(word));
    else
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {high, high};\n}"
            : "=r"(twice)
            : "r"(word));
    return twice;
}

// Both halves of a times the low half of b, or the high one.
template <int Half>
MX_DEVICE unsigned multiply_by_half(unsigned a, unsigned b) {
    return multiply_pair(a, twice_half<Half>(b));
}

// The factors of two scales, in the halves of a word. A factor makes a weight's bits at the place
// of a bf16's, which are 2^-120 of its value, the weight times a scale that bf16 covers.
MX_DEVICE unsigned w_factors(unsigned scales) {
    return scales * 0x80 + ((120 - 60) << 7) * 0x00010001u;
}

// Bytes 0 and 2, then 1 and 3, of four e4m3 times the factor in a half of factors. NaN payloads are
// not NaN here. magnitude is kMagnitude, in a register.
constexpr unsigned kMagnitude = 0x07f007f0; // where a payload without its sign is put
template <int Half>
MX_DEVICE void e4m3x4_to_bf16(unsigned word, unsigned factors, unsigned magnitude, unsigned& even,
                              unsigned& odd) {
    unsigned signs;
    asm("and.b32 %0, %1, 0x80808080;" : "=r"(signs) : "r"(word)); // else it is found twice
    even = multiply_by_half<Half>(select_bits(magnitude, word << 4, signs << 8), factors);
    odd = multiply_by_half<Half>(select_bits(magnitude, word >> 4, signs), factors);
}

// Four activations times factor, rounded where they need it: bytes 0 and 2, then 1 and 3.
MX_DEVICE void e4m3x4_to_bf16(unsigned word, float factor, unsigned& even, unsigned& odd) {
    f32x2 low, high;
    e4m3x4_to_f32(word, low, high);
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(even) : "f"(high.x * factor), "f"(low.x * factor));
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(odd) : "f"(high.y * factor), "f"(low.y * factor));
}

} // namespace mx
