// Exact application of two e8m0 block scales (OCP MX v1.0, section 5.4.1: 2^(byte - 127), 255 is
// NaN) to a sum of e4m3 products.
//
// Their product spans 2^-254..2^254, more than fp32, though the scaled sum may be moderate. One
// scale is therefore applied in two halves, around the other: no order of magnitudes then overflows
// or loses bits before the end unless the result itself does.
#pragma once

#include "mx_target.h"

namespace mx {

constexpr unsigned kNanScale = 255;
constexpr unsigned kNanBits = 0x7fc00000;
constexpr unsigned kTwoToMinus127 = 0x00400000; // subnormal: not an exponent field of 0

MX_DEVICE float e8m0_to_f32(unsigned byte) {
    const unsigned bits = byte == 0 ? kTwoToMinus127 : byte << 23;
    return bits_to_float(byte == kNanScale ? kNanBits : bits);
}

struct HalfScales {
    float first, second;
};

// 2^(byte - 127) as a product of two powers of two of nearly half its exponent.
MX_DEVICE HalfScales e8m0_to_halves(unsigned byte) {
    const unsigned biased = byte + 127;
    const unsigned half = biased >> 1;
    const unsigned first = byte == kNanScale ? kNanBits : half << 23;
    return {bits_to_float(first), bits_to_float((biased - half) << 23)};
}

// sum + dot * (one scale) * (other scale)
MX_DEVICE float add_scaled(float sum, float dot, HalfScales one, float other) {
    return fma(dot * one.first * other, one.second, sum);
}

} // namespace mx
