// Two 16-bit numbers at once to e2m1, by arithmetic in their own precision: Hopper has no
// instruction for it.
//
// A number of exponent e is rounded by adding a number whose last bit weighs one unit of e2m1 at
// that exponent. Numbers of e2m1 with exponent e are 2^(e-1) apart, those below 1 as far as those
// above it, so units count up to 4, and each exponent above 0 begins two codes later. These two are
// part of what is added: then the sum's last bits are the code, and ties go to even as they did.
#pragma once

#include "mx_sm90.h"

namespace mx {

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

// a + b, but at least `least`, of each half; signed.
MX_DEVICE unsigned add_at_least(unsigned a, unsigned b, unsigned least) {
    unsigned sum;
    asm("{\n"
        ".reg .b32 sum;\n"
        "add.s16x2 sum, %1, %2;\n"
        "max.s16x2 %0, sum, %3;\n"
        "}"
        : "=r"(sum)
        : "r"(a), "r"(b), "r"(least));
    return sum;
}

// Makes e2m1 codes of pairs under two factors: of a sum of so many bits, codes are the last four
// bits of each half, without sign.
template <class T, bool Saturating>
class PairRounding;

// bf16: numbers are scaled as they are added, by factors / 8, which makes the sums 8 to 64 and the
// exponents' bits zeros where they meet the codes.
template <bool Saturating>
class PairRounding<bf16, Saturating> {
  public:
    MX_MEMBER PairRounding(float low_factor, float high_factor) {
        const unsigned factors =
            __float_as_uint(low_factor) >> 16 | (__float_as_uint(high_factor) & 0xffff0000);
        scale = multiply_pair(factors, 0x3e003e00);
        asm("add.s16x2 %0, %1, %2;" : "=r"(exponent) : "r"(factors), "r"(0xc100c100));
    }
    MX_MEMBER unsigned sums(unsigned numbers) const {
        // 128 + e as an exponent, and the sum's as 130 + e.
        const unsigned power = add_at_least(numbers & 0x7f807f80, exponent, 0x40004000);
        unsigned sum;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;"
            : "=r"(sum)
            : "r"(numbers & 0x7fff7fff), "r"(scale), "r"(power + (power >> 6)));
        if (Saturating)
            asm("min.u16x2 %0, %0, %1;" : "+r"(sum) : "r"(0x42074207));
        return sum;
    }

  private:
    unsigned scale, exponent;
};

// fp16: the factors are beyond it, so numbers are scaled first.
template <bool Saturating>
class PairRounding<fp16, Saturating> {
  public:
    MX_MEMBER PairRounding(float low_factor, float high_factor)
        : low_factor(low_factor), high_factor(high_factor) {}
    MX_MEMBER unsigned sums(unsigned numbers) const {
        const unsigned scaled = scaled_pair(fp16{}, numbers, low_factor, high_factor);
        // 24 + e as an exponent; the sum's last bits are 48 more than the code.
        const unsigned power = add_at_least(scaled & 0x7c007c00, 0x24002400, 0x60006000);
        unsigned sum;
        asm("add.rn.f16x2 %0, %1, %2;"
            : "=r"(sum)
            : "r"(scaled & 0x7fff7fff), "r"(power + (power >> 9)));
        if (Saturating)
            asm("min.u16x2 %0, %0, %1;" : "+r"(sum) : "r"(0x68376837));
        return sum;
    }

  private:
    float low_factor, high_factor;
};

// Bytes of two words; a selector above 7 gives eight times the sign of the byte.
template <unsigned Selectors>
MX_DEVICE unsigned bytes_of(unsigned a, unsigned b) {
    unsigned bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "n"(Selectors));
    return bytes;
}

// Bits of a where the mask is set, else of b.
MX_DEVICE unsigned select_bits(unsigned mask, unsigned a, unsigned b) {
    return (a & mask) | (b & ~mask);
}

// Eight numbers of one block, in words of two, to e2m1.
template <class T, bool Saturating>
MX_DEVICE unsigned words_to_e2m1(const u32x4& words, float factor) {
    const PairRounding<T, Saturating> rounding(factor, factor);
    unsigned bytes[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const unsigned a = words[2 * i], b = words[2 * i + 1];
        const unsigned codes =
            select_bits(0x07070707, bytes_of<0x6420>(rounding.sums(a), rounding.sums(b)),
                        bytes_of<0xfdb9>(a, b));
        bytes[i] = select_bits(0x0f0f0f0f, codes, codes >> 4); // in every other byte
    }
    return bytes_of<0x6420>(bytes[0], bytes[1]);
}

// Columns of eight words of two numbers, each half with its own factor: the low halves' e2m1, and
// the high halves'.
template <class T, bool Saturating>
MX_DEVICE void columns_to_e2m1(const unsigned (&words)[8], float low_factor, float high_factor,
                               unsigned& low, unsigned& high) {
    const PairRounding<T, Saturating> rounding(low_factor, high_factor);
    unsigned both[2]; // of four rows: the low halves' in the low half
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const unsigned a = words[4 * i], b = words[4 * i + 1], c = words[4 * i + 2],
                       d = words[4 * i + 3];
        const unsigned even = bytes_of<0x6240>(rounding.sums(a), rounding.sums(c));
        const unsigned odd = bytes_of<0x6240>(rounding.sums(b), rounding.sums(d));
        both[i] = select_bits(0x0f0f0f0f, even, odd << 4) | (bytes_of<0xfbd9>(a, c) & 0x08080808) |
                  (bytes_of<0xfbd9>(b, d) & 0x80808080);
    }
    low = bytes_of<0x5410>(both[0], both[1]);
    high = bytes_of<0x7632>(both[0], both[1]);
}

} // namespace mx
