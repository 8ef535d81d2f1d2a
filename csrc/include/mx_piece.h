// 16 bytes of a tensor of any input dtype: their magnitudes, and their values.
//
// Magnitudes stay packed as the values are, two 16-bit numbers a word, while maxima are taken: bits
// of magnitudes order as the magnitudes do in every format.
#pragma once

#include "mx_quantize.h"
#include "mx_slice.h"

#if defined(__AMDGCN__)
#include "gfx950_lanes.h"
#else
#include "sm90_lanes.h"
#endif

namespace mx {

template <class T>
constexpr int kPieceValues = 16 / sizeof(T);

template <class T>
constexpr bool kIsFP16 = false;
template <>
constexpr bool kIsFP16<fp16> = true;

template <class T>
MX_DEVICE unsigned packed_magnitude(unsigned word) {
    return word & (sizeof(T) == 2 ? 0x7fff7fff : 0x7fffffff);
}

template <class T>
MX_DEVICE unsigned packed_max(unsigned a, unsigned b) {
    if constexpr (sizeof(T) == 2)
        return max_halves(a, b);
    else
        return max(a, b);
}

// The largest magnitudes over lanes that differ in the bit Distance.
template <class T, int Distance>
MX_DEVICE unsigned packed_max_across(unsigned x) {
    const LanePair pair = pair_of_lanes<Distance>(x);
    return packed_max<T>(pair.one, pair.other);
}

// Number Index of a word.
template <class T, int Index>
MX_DEVICE float value_of_word(unsigned word) {
    if constexpr (sizeof(T) == 4)
        return bits_to_float(word);
    else if constexpr (kIsFP16<T>)
        return half_to_f32<Index>(word);
    else
        return bits_to_float(Index == 0 ? word << 16 : word & 0xffff0000);
}

// Of packed magnitudes number Index, as magnitude_bits has it.
template <class T, int Index>
MX_DEVICE unsigned unpacked_magnitude(unsigned word) {
    return float_to_bits(value_of_word<T, Index>(word));
}

// The largest of a word's packed magnitudes.
template <class T>
MX_DEVICE unsigned largest_magnitude(unsigned word) {
    if constexpr (sizeof(T) == 4)
        return word;
    else
        return max(unpacked_magnitude<T, 0>(word), unpacked_magnitude<T, 1>(word));
}

template <class T>
MX_DEVICE unsigned packed_amax_of_piece(u32x4 piece) {
    unsigned amax = packed_magnitude<T>(piece[0]);
#pragma unroll
    for (int i = 1; i < 4; ++i)
        amax = packed_max<T>(amax, packed_magnitude<T>(piece[i]));
    return amax;
}

template <class T>
MX_DEVICE unsigned amax_of_piece(u32x4 piece) {
    return largest_magnitude<T>(packed_amax_of_piece<T>(piece));
}

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

// Payload bytes of 16 bytes of input: 8 or 4 of e4m3, 4 or 2 of e2m1.
template <class Format, ScaleMode Mode, class T>
MX_DEVICE auto piece_to_payload(u32x4 piece, BlockScale scale) {
    constexpr int count = kPieceValues<T>;
    float v[count];
    piece_to_f32<T>(piece, v);
    if constexpr (Format::kBits == 4 && count == 4) {
        return static_cast<unsigned short>(to_e2m1<Mode>(v, scale));
    } else if constexpr (Format::kBits == 4) {
        return Words<1>{to_e2m1<Mode>(v, scale)};
    } else {
        Words<count / 4> words;
#pragma unroll
        for (int i = 0; i < count; i += 4)
            words.word[i / 4] = to_e4m3x4<Mode>(v[i], v[i + 1], v[i + 2], v[i + 3], scale);
        return words;
    }
}

} // namespace mx
