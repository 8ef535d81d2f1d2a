// Quantisation needs these of Hopper: conversions from fp32, exchanges between lanes of a warp, and
// arithmetic on two 16-bit numbers at once. fp8 is made by instruction (PTX ISA manual, cvt), e2m1
// by arithmetic, as its instructions begin with Blackwell.
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

// Likewise to e5m2, NaN to 0x7f.
template <bool Saturating>
MX_DEVICE unsigned f32_to_e5m2x4(f32x2 low, f32x2 high, bool) {
    unsigned word;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "cvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n"
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

// x of lane `from`.
MX_DEVICE unsigned from_lane(int from, unsigned x) { return __shfl_sync(0xffffffffu, x, from); }

// True if x is, in any lane.
MX_DEVICE bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }

// x here and in the lane whose number differs in the bit Distance, in either order.
struct LanePair {
    unsigned one, other;
};
template <int Distance>
MX_DEVICE LanePair pair_of_lanes(unsigned x) {
    return {x, __shfl_xor_sync(0xffffffffu, x, Distance)};
}

// The larger of the low halves and the larger of the high halves.
MX_DEVICE unsigned max_halves(unsigned a, unsigned b) {
    unsigned larger;
    asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

MX_DEVICE unsigned min_halves(unsigned a, unsigned b) {
    unsigned smaller;
    asm("min.u16x2 %0, %1, %2;" : "=r"(smaller) : "r"(a), "r"(b));
    return smaller;
}

// True where one instruction compares magnitudes.
template <class T>
constexpr bool kComparesMagnitudes = sizeof(T) == 2;

// Takes two 16-bit floats of each word, and of each pair the larger magnitude, with either sign,
// or NaN.
MX_DEVICE unsigned larger_magnitudes(bf16, unsigned a, unsigned b) {
    unsigned larger;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}
MX_DEVICE unsigned larger_magnitudes(fp16, unsigned a, unsigned b) {
    unsigned larger;
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

// The low halves of two words, the first one's below; and the high ones.
MX_DEVICE unsigned low_halves(unsigned a, unsigned b) { return __byte_perm(a, b, 0x5410); }
MX_DEVICE unsigned high_halves(unsigned a, unsigned b) { return __byte_perm(a, b, 0x7632); }

// x, the same in all lanes; what is computed from it is computed here, and not before a loop to be
// kept in registers.
MX_DEVICE unsigned afresh(unsigned x) {
    asm volatile("" : "+r"(x));
    return x;
}
// A pointer then is not kept in registers as parts of addresses either.
MX_DEVICE unsigned char* afresh(unsigned char* p) {
    asm volatile("" : "+l"(p));
    return p;
}

// fp16 of the low or the high half of a word.
template <int Half>
MX_DEVICE float half_to_f32(unsigned word) {
    return to_f32(fp16{static_cast<unsigned short>(word >> 16 * Half)});
}

// Two 16-bit numbers at once to e2m1, in their own precision.
//
// The code of a magnitude x, of which each exponent but the first has two, is min(2x, x + 2,
// x/2 + 4), rounded; ties go to the even code, as they should. Rounding does not change which of
// the three is least, so that an fma makes each of them an integer: by adding it to a number whose
// last bit weighs 1.

template <class T>
constexpr bool kIsHalfPrecision = false;
template <>
constexpr bool kIsHalfPrecision<fp16> = true;

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

MX_DEVICE unsigned fma_pair(bf16, unsigned a, unsigned b, unsigned c) {
    unsigned sum;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}
MX_DEVICE unsigned fma_pair(fp16, unsigned a, unsigned b, unsigned c) {
    unsigned sum;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}
MX_DEVICE unsigned min_pair(unsigned a, unsigned b) {
    unsigned least;
    asm("min.u16x2 %0, %1, %2;" : "=r"(least) : "r"(a), "r"(b));
    return least;
}

// Makes e2m1 codes of pairs under two factors: of a sum's halves, codes are the lower bytes,
// without sign. Sums are 2 and a little: then no bit of the exponent is in those bytes.
template <class T, bool Saturating>
class PairRounding {
  public:
    MX_MEMBER PairRounding(float low_factor, float high_factor)
        : low_factor(low_factor), high_factor(high_factor) {
        if constexpr (!kIsHalf) {
            const unsigned factors =
                __float_as_uint(low_factor) >> 16 | (__float_as_uint(high_factor) & 0xffff0000);
            twice = multiply_pair(factors, 0x3d003d00); // by 2^-5
            once = multiply_pair(factors, 0x3c803c80);
            half = multiply_pair(factors, 0x3c003c00);
        }
    }
    MX_MEMBER unsigned sums(unsigned numbers) const {
        // fp16 does not have all factors, so that its numbers are scaled first.
        if constexpr (kIsHalf)
            numbers = scaled_pair(T{}, numbers, low_factor, high_factor);
        numbers &= 0x7fff7fff;
        unsigned sum = fma_pair(T{}, numbers, twice, 0x40004000);
        sum = min_pair(sum, fma_pair(T{}, numbers, once, 0x40024002));
        sum = min_pair(sum, fma_pair(T{}, numbers, half, 0x40044004));
        return Saturating ? min_pair(sum, 0x40074007) : sum;
    }

  private:
    static constexpr bool kIsHalf = kIsHalfPrecision<T>;
    float low_factor, high_factor;
    unsigned twice = 0x1c001c00, once = 0x18001800, half = 0x14001400; // 2^-8, 2^-9, 2^-10
};

// Bytes of two words; a selector above 7 gives eight times the sign of the byte.
template <unsigned Selectors>
MX_DEVICE unsigned bytes_of(unsigned a, unsigned b) {
    unsigned bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "n"(Selectors));
    return bytes;
}

// Words of a nibble in each byte: those of `high` go above those of `low`.
MX_DEVICE unsigned merge_nibbles(unsigned low, unsigned high) { return high * 16 + low; }

// Eight numbers of one block, in words of two, to e2m1.
template <class T, bool Saturating>
MX_DEVICE unsigned words_to_e2m1(const u32x4& words, float factor) {
    const PairRounding<T, Saturating> rounding(factor, factor);
    unsigned both[2]; // of four numbers: the low halves' in the low half
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const unsigned a = words[2 * i], b = words[2 * i + 1];
        both[i] = bytes_of<0x6240>(rounding.sums(a), rounding.sums(b)) |
                  (bytes_of<0xfbd9>(a, b) & 0x08080808);
    }
    return merge_nibbles(bytes_of<0x5410>(both[0], both[1]), bytes_of<0x7632>(both[0], both[1]));
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
        both[i] = merge_nibbles(even, odd) | (bytes_of<0xfbd9>(a, c) & 0x08080808) |
                  (bytes_of<0xfbd9>(b, d) & 0x80808080);
    }
    low = bytes_of<0x5410>(both[0], both[1]);
    high = bytes_of<0x7632>(both[0], both[1]);
}

} // namespace mx
