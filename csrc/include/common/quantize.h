// Block quantisation to MX formats (OCP MX v1.0, sections 5.2 and 6.3): fp32 values to e4m3, e5m2
// or e2m1 payloads under one e8m0 scale for each 32 values. Bit for bit what
// aiter_mx/ops/quantize.py defines, on both targets and for every input.
//
// A block usually lies over the lanes of an aligned group, each with some of its values:
//
//     float v[8];                                              // 4 lanes have a block of 32
//     const unsigned amax = max_of_lanes<4>(amax_bits(v));     // all four get the block's
//     const BlockScale scale = block_scale<E4M3, kRoundUp>(amax);
//     const unsigned word = to_e4m3x4<kRoundUp>(v[0], v[1], v[2], v[3], scale);
//     if (lane % 4 == 0)
//         scales[block] = scale.byte;
//
// max_of_lanes exchanges lanes, so the whole wave has to take part in it. Values that lie outside
// a tensor take part as zeros. Any two values may go into one word: a column of a tile is
// converted to consecutive bytes without being transposed first.
#pragma once

#include "common/scale.h"
#include "common/target.h"

#if defined(__AMDGCN__)
#include "gfx950/convert.h"
#else
#include "sm90/convert.h"
#endif

namespace mx {

// The scale of a block is found from its largest magnitude, amax, in one of three ways.
enum ScaleMode {
    kRoundUp =
        0, // "rceil": the least power of two that keeps amax in the format: nothing saturates
    kRoundDown = 1, // "floor": 2^(floor(log2(amax)) - the format's largest exponent): may saturate
    kToEven = 2,    // "even": as floor, but the next one from 1.75 times a power of two on
};

// What is added to the bits of amax, and carries into the exponent where the scale is the next one.
template <class Format, ScaleMode Mode>
constexpr unsigned kScaleRounding = Mode == kRoundUp  ? 0x7fffff - Format::kMaxMantissa
                                    : Mode == kToEven ? 0x200000
                                                      : 0;

// Payload formats: bits, largest exponent, and mantissa of the largest number as fp32 has it.
struct E4M3 {
    static constexpr int kBits = 8;
    static constexpr unsigned kMaxExponent = 8, kMaxMantissa = 0x600000; // 448 = 1.75 * 2^8
};
struct E5M2 {
    static constexpr int kBits = 8;
    static constexpr unsigned kMaxExponent = 15, kMaxMantissa = 0x600000; // 57344 = 1.75 * 2^15
};
struct E2M1 {
    static constexpr int kBits = 4;
    static constexpr unsigned kMaxExponent = 2, kMaxMantissa = 0x400000; // 6 = 1.5 * 2^2
};

#ifndef MX_E5M2
#define MX_E5M2 0
#endif
// The format with so many bits; of 8, that of MX_E5M2.
template <int Bits, bool Wide = MX_E5M2>
struct FormatOfBits {
    using type = E4M3;
};
template <>
struct FormatOfBits<8, true> {
    using type = E5M2;
};
template <>
struct FormatOfBits<4, MX_E5M2> {
    using type = E2M1;
};

constexpr unsigned kInfinityBits = 0x7f800000;

// Bits of a magnitude order as the magnitude does, with infinity and NaN on top.
MX_DEVICE unsigned magnitude_bits(float x) { return float_to_bits(x) & 0x7fffffff; }

template <int Count>
MX_DEVICE unsigned amax_bits(const float (&values)[Count]) {
    unsigned amax = magnitude_bits(values[0]);
#pragma unroll
    for (int i = 1; i < Count; ++i)
        amax = max(amax, magnitude_bits(values[i]));
    return amax;
}

// The largest x of each aligned group of Lanes lanes, up to 16, in all of them.
template <int Lanes>
MX_DEVICE unsigned max_of_lanes(unsigned x) {
    static_assert(Lanes == 1 || Lanes == 2 || Lanes == 4 || Lanes == 8 || Lanes == 16);
    if constexpr (Lanes > 1) {
        const unsigned other = float_to_bits(across<Lanes / 2>(bits_to_float(x)));
        return max_of_lanes<Lanes / 2>(max(x, other));
    }
    return x;
}

// A block's scale. A block with an infinity or a NaN is NaN as a whole.
struct BlockScale {
    unsigned byte; // e8m0
    float inverse; // 2^(127 - byte), normal for every format; NaN where byte is 255
};

// amax: magnitude_bits of the block's largest magnitude.
template <class Format, ScaleMode Mode>
MX_DEVICE BlockScale block_scale(unsigned amax) {
    constexpr unsigned round_up = kScaleRounding<Format, Mode>;
    constexpr unsigned least = Format::kMaxExponent << 23;
    const unsigned exponent = max((amax + round_up) & kInfinityBits, least);
    const bool finite = amax < kInfinityBits;
    return {finite ? (exponent - least) >> 23 : kNanScale,
            bits_to_float(finite ? (254 << 23) + least - exponent : kNanBits)};
}

// Four values of one block to e4m3 bytes, the first one lowest: to nearest even, saturating.
template <ScaleMode Mode>
MX_DEVICE unsigned to_e4m3x4(float a, float b, float c, float d, BlockScale scale) {
    const f32x2 low = multiply(f32x2{a, b}, scale.inverse);
    const f32x2 high = multiply(f32x2{c, d}, scale.inverse);
    return f32_to_e4m3x4<Mode != kRoundUp>(low, high, scale.byte == kNanScale);
}

// The same in e5m2.
template <ScaleMode Mode>
MX_DEVICE unsigned to_e5m2x4(float a, float b, float c, float d, BlockScale scale) {
    const f32x2 low = multiply(f32x2{a, b}, scale.inverse);
    const f32x2 high = multiply(f32x2{c, d}, scale.inverse);
    return f32_to_e5m2x4<Mode != kRoundUp>(low, high, scale.byte == kNanScale);
}

template <class Format, ScaleMode Mode>
MX_DEVICE unsigned to_fp8x4(float a, float b, float c, float d, BlockScale scale) {
    if constexpr (Format::kMaxExponent == E5M2::kMaxExponent)
        return to_e5m2x4<Mode>(a, b, c, d, scale);
    else
        return to_e4m3x4<Mode>(a, b, c, d, scale);
}

// Up to eight values of one block to e2m1, the first one in the lowest bits: to nearest even,
// saturating. The format has no NaN: a NaN block's payload is 0, and its scale says NaN.
template <ScaleMode Mode, int Count>
MX_DEVICE unsigned to_e2m1(const float (&values)[Count], BlockScale scale) {
    static_assert(Count % 2 == 0 && Count <= 8);
    f32x2 scaled[Count / 2];
#pragma unroll
    for (int i = 0; i < Count / 2; ++i)
        scaled[i] = multiply(f32x2{values[2 * i], values[2 * i + 1]}, scale.inverse);
    const unsigned word = f32_to_e2m1<Mode != kRoundUp>(scaled);
    return scale.byte == kNanScale ? 0 : word;
}

} // namespace mx
