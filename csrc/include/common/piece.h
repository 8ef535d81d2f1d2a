// 16 bytes of a tensor of any input dtype, and columns of 8 of them, to payload bytes.
#pragma once

#include "common/packed.h"
#include "common/slice.h"

#if !defined(__AMDGCN__)
#include "sm90/pairs.h"
#endif

namespace mx {

// On Hopper, whether e2m1 is made of two numbers at a time, for want of an instruction, and whether
// numbers are scaled two at a time, which leaves no floats to keep.
#if defined(__AMDGCN__)
template <class Format, class T>
constexpr bool kInPairs = false;
template <class T>
constexpr bool kScaledInPairs = false;
template <class T, bool Saturating>
MX_DEVICE unsigned words_to_e2m1(const u32x4&, float);
template <class T, bool Saturating>
MX_DEVICE void columns_to_e2m1(const unsigned (&)[8], float, float, unsigned&, unsigned&);
MX_DEVICE unsigned scaled_pair(bf16, unsigned, float, float);
#else
template <class Format, class T>
constexpr bool kInPairs = Format::kBits == 4 && sizeof(T) == 2;
template <class T>
constexpr bool kScaledInPairs = sizeof(T) == 2 && !kIsFP16<T>;
#endif

// Whether scales are found two at a time, where no NaN or infinity is about.
template <class T>
constexpr bool kScalesInPairs = kScaledInPairs<T>;

// Of two finite packed magnitudes in bf16, what block_scale finds for each.
template <class Format, ScaleMode Mode>
MX_DEVICE void finite_block_scales(unsigned amax, BlockScale (&scales)[2]) {
    constexpr unsigned both = 0x00010001, exponent = 0x7f80;
    constexpr unsigned round_up = Mode == kRoundUp ? 0x7f - (Format::kMaxMantissa >> 16) : 0;
    constexpr unsigned least = Format::kMaxExponent << 7;
    const unsigned exponents =
        max_halves((amax + round_up * both) & (exponent * both), least * both);
    const unsigned bytes = (exponents - least * both) >> 7;
    const unsigned inverses = ((254 << 7) + least) * both - exponents;
    scales[0] = {bytes & 0xff, bits_to_float(inverses << 16)};
    scales[1] = {bytes >> 16, bits_to_float(inverses & 0xffff0000)};
}

// Whether a packed magnitude in bf16 is not finite.
MX_DEVICE bool has_not_finite(unsigned packed) { return ((packed + 0x00800080) & 0x80008000) != 0; }

template <class T>
constexpr int kPieceValues = 16 / sizeof(T);

template <class T>
MX_DEVICE void piece_to_f32(u32x4 piece, float (&values)[kPieceValues<T>]) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if constexpr (sizeof(T) == 4) {
            values[i] = bits_to_float(piece[i]);
        } else {
            values[2 * i] = value_of_word<T, 0>(piece[i]);
            values[2 * i + 1] = value_of_word<T, 1>(piece[i]);
        }
}

// Payload bytes of 16 bytes of one block: 8 or 4 of e4m3, 4 or 2 of e2m1.
template <class Format, ScaleMode Mode, class T, bool Finite = false>
MX_DEVICE auto piece_to_payload(u32x4 piece, BlockScale scale) {
    constexpr int count = kPieceValues<T>;
    if constexpr (kInPairs<Format, T>) {
        const unsigned word = words_to_e2m1<T, Mode == kRoundDown>(piece, scale.inverse);
        return Words<1>{!Finite && scale.byte == kNanScale ? 0 : word};
    } else {
        if constexpr (kScaledInPairs<T>) {
            piece = {scaled_pair(T{}, piece[0], scale.inverse, scale.inverse),
                     scaled_pair(T{}, piece[1], scale.inverse, scale.inverse),
                     scaled_pair(T{}, piece[2], scale.inverse, scale.inverse),
                     scaled_pair(T{}, piece[3], scale.inverse, scale.inverse)};
            scale.inverse = 1.0f;
        }
        float v[count];
        piece_to_f32<T>(piece, v);
        if constexpr (Format::kBits == 8) {
            Words<count / 4> words;
#pragma unroll
            for (int i = 0; i < count; i += 4)
                words.word[i / 4] = to_e4m3x4<Mode>(v[i], v[i + 1], v[i + 2], v[i + 3], scale);
            return words;
        } else if constexpr (count == 4) {
            return static_cast<unsigned short>(to_e2m1<Mode>(v, scale));
        } else {
            return Words<1>{to_e2m1<Mode>(v, scale)};
        }
    }
}

// Payload bytes of 8 rows of a column: number Half of a word of each.
template <class Format, ScaleMode Mode, class T, int Half>
MX_DEVICE Words<Format::kBits / 4> column_to_payload(const unsigned (&words)[8], BlockScale scale) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
        v[i] = value_of_word<T, Half>(words[i]);
    if constexpr (Format::kBits == 4)
        return {to_e2m1<Mode>(v, scale)};
    else
        return {to_e4m3x4<Mode>(v[0], v[1], v[2], v[3], scale),
                to_e4m3x4<Mode>(v[4], v[5], v[6], v[7], scale)};
}

// Payload bytes of 8 rows of a column of words, which is two columns of 16-bit numbers, each with
// its scale.
template <class Format, ScaleMode Mode, class T, bool Finite = false>
MX_DEVICE void columns_to_payload(const u32x4 (&pieces)[8], int word, BlockScale (&scales)[2],
                                  Words<Format::kBits / 4> (&payload)[4 / sizeof(T)]) {
    unsigned words[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
        words[i] = pieces[i][word];
    if constexpr (kInPairs<Format, T>) {
        unsigned low, high;
        const bool low_nan = !Finite && scales[0].byte == kNanScale;
        const bool high_nan = !Finite && scales[1].byte == kNanScale;
        // What becomes of a NaN must not reach the other column.
        constexpr bool saturating = Mode == kRoundDown || !Finite;
        columns_to_e2m1<T, saturating>(words, scales[0].inverse, scales[1].inverse, low, high);
        payload[0].word[0] = low_nan ? 0 : low;
        payload[1].word[0] = high_nan ? 0 : high;
    } else {
        if constexpr (kScaledInPairs<T>) {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                words[i] = scaled_pair(T{}, words[i], scales[0].inverse, scales[1].inverse);
            scales[0].inverse = scales[1].inverse = 1.0f;
        }
        payload[0] = column_to_payload<Format, Mode, T, 0>(words, scales[0]);
        if constexpr (sizeof(T) == 2)
            payload[1] = column_to_payload<Format, Mode, T, 1>(words, scales[1]);
    }
}

} // namespace mx
