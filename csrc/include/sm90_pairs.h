// Two 16-bit numbers at once to e2m1, by arithmetic in their own precision: Hopper has no
// instruction for it. The rounding is that of f32_to_e2m1, see sm90_convert.h: adding a number
// whose last bit weighs one unit of e2m1.
#pragma once

#include "mx_sm90.h"

namespace mx {

// Of two numbers: bits of the exponent, of 1, of the factor between a number and its units, and how
// far the exponent is above two codes.
template <class T>
struct Pair;
template <>
struct Pair<bf16> {
    static constexpr unsigned kExponent = 0x7f807f80, kOne = 0x3f803f80, kToUnits = 6 * 0x00800080,
                              kToCode = 6;
    static MX_MEMBER unsigned add(unsigned a, unsigned b) {
        unsigned sum;
        asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
        return sum;
    }
};
template <>
struct Pair<fp16> {
    static constexpr unsigned kExponent = 0x7c007c00, kOne = 0x3c003c00, kToUnits = 9 * 0x04000400,
                              kToCode = 9;
    static MX_MEMBER unsigned add(unsigned a, unsigned b) {
        unsigned sum;
        asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
        return sum;
    }
};

// Two numbers below 8 to codes in the low bits of each half, saturating if asked to.
template <class T, bool Saturating>
MX_DEVICE unsigned pair_to_e2m1(unsigned numbers) {
    using P = Pair<T>;
    unsigned power, codes;
    asm("max.u16x2 %0, %1, %2;" : "=r"(power) : "r"(numbers & P::kExponent), "r"(P::kOne));
    const unsigned sum = P::add(numbers & 0x7fff7fff, power + P::kToUnits);
    // Exponents of 0, 1 and 2 add as many pairs of codes. No half borrows from the other.
    codes = sum - power + (power >> P::kToCode) - (P::kToUnits + (P::kOne >> P::kToCode));
    if (Saturating)
        asm("min.u16x2 %0, %0, %1;" : "+r"(codes) : "r"(0x00070007));
    return codes | (numbers >> 12 & 0x00080008);
}

MX_DEVICE unsigned multiply_pair(unsigned a, unsigned b) {
    unsigned product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

// Two numbers times their factors, which are powers of two; exact unless they are too small for
// e2m1 by far.
MX_DEVICE unsigned scaled_pair(bf16, unsigned word, float low_factor, float high_factor) {
    return multiply_pair(word, __float_as_uint(low_factor) >> 16 |
                                   (__float_as_uint(high_factor) & 0xffff0000));
}
MX_DEVICE unsigned scaled_pair(fp16, unsigned word, float low_factor, float high_factor) {
    unsigned scaled; // the factors are beyond fp16
    const float low = to_f32(fp16{static_cast<unsigned short>(word)}) * low_factor;
    const float high = to_f32(fp16{static_cast<unsigned short>(word >> 16)}) * high_factor;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(scaled) : "f"(high), "f"(low));
    return scaled;
}

// Eight numbers of one block, in words of two, to e2m1.
template <class T, bool Saturating>
MX_DEVICE unsigned words_to_e2m1(const u32x4& words, float factor) {
    unsigned codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        codes[i] = pair_to_e2m1<T, Saturating>(scaled_pair(T{}, words[i], factor, factor));
    // Halves of two words side by side: codes 0, 2 and 1, 3, which then move together.
    unsigned low = codes[0] + (codes[1] << 8), high = codes[2] + (codes[3] << 8);
    low |= low >> 12;
    high |= high >> 12;
    return __byte_perm(low, high, 0x5410);
}

// Columns of eight words of two numbers, each half with its own factor: the low halves' e2m1, and
// the high halves'.
template <class T, bool Saturating>
MX_DEVICE void columns_to_e2m1(const unsigned (&words)[8], float low_factor, float high_factor,
                               unsigned& low, unsigned& high) {
    unsigned codes[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
        codes[i] = pair_to_e2m1<T, Saturating>(scaled_pair(T{}, words[i], low_factor, high_factor));
    const unsigned first = codes[0] + (codes[1] << 4) + (codes[2] << 8) + (codes[3] << 12);
    const unsigned last = codes[4] + (codes[5] << 4) + (codes[6] << 8) + (codes[7] << 12);
    low = __byte_perm(first, last, 0x5410);
    high = __byte_perm(first, last, 0x7632);
}

} // namespace mx
