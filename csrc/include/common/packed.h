// Words of a tensor of any input dtype: their values, and largest magnitudes of blocks.
//
// Magnitudes stay packed as the values are, two 16-bit numbers a word, while maxima are taken: bits
// of magnitudes order as the magnitudes do in every format.
#pragma once

#include "common/quantize.h"

#if defined(__AMDGCN__)
#include "gfx950/lanes.h"
#else
#include "sm90/lanes.h"
#endif

namespace mx {

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

// The largest magnitudes of words. Where one instruction compares magnitudes, signs stay until the
// end.
template <class T>
class PackedAmax {
  public:
    MX_MEMBER explicit PackedAmax(unsigned word) : amax(word) {
        if constexpr (!kComparesMagnitudes<T>)
            amax = packed_magnitude<T>(word);
    }
    MX_MEMBER void add(unsigned word) {
        if constexpr (kComparesMagnitudes<T>)
            amax = larger_magnitudes(T{}, amax, word);
        else
            amax = packed_max<T>(amax, packed_magnitude<T>(word));
    }
    MX_MEMBER unsigned found() const {
        return kComparesMagnitudes<T> ? packed_magnitude<T>(amax) : amax;
    }

  private:
    unsigned amax;
};

// Packed maxima of each aligned group of Lanes lanes, up to 16, in all of them.
template <class T, int Lanes>
MX_DEVICE unsigned packed_max_of_lanes(unsigned x) {
    if constexpr (Lanes > 1) {
        const unsigned other = float_to_bits(across<Lanes / 2>(bits_to_float(x)));
        return packed_max_of_lanes<T, Lanes / 2>(packed_max<T>(x, other));
    }
    return x;
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
    PackedAmax<T> amax(piece[0]);
#pragma unroll
    for (int i = 1; i < 4; ++i)
        amax.add(piece[i]);
    return amax.found();
}

// The largest magnitudes of two pieces of 16-bit numbers, packed.
template <class T>
MX_DEVICE unsigned packed_amax_of_two(u32x4 one, u32x4 other) {
    const unsigned a = packed_amax_of_piece<T>(one), b = packed_amax_of_piece<T>(other);
    return max_halves(low_halves(a, b), high_halves(a, b));
}

// The largest magnitudes of two blocks, of which each of Lanes neighbouring lanes has a piece of 16
// bytes, in all these lanes, as magnitude_bits has it.
template <class T, int Lanes>
MX_DEVICE void amax_of_blocks(u32x4 one, u32x4 other, unsigned& amax_one, unsigned& amax_other) {
    if constexpr (sizeof(T) == 4) {
        amax_one = max_of_lanes<Lanes>(packed_amax_of_piece<T>(one));
        amax_other = max_of_lanes<Lanes>(packed_amax_of_piece<T>(other));
    } else {
        // Both blocks share the words that are exchanged.
        const unsigned amax = packed_max_of_lanes<T, Lanes>(packed_amax_of_two<T>(one, other));
        amax_one = unpacked_magnitude<T, 0>(amax);
        amax_other = unpacked_magnitude<T, 1>(amax);
    }
}

} // namespace mx
