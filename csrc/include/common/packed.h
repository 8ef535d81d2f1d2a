// Tensors of any input dtype, 16 bytes at a time: slices of memory with bounds, the largest
// magnitudes of blocks, and their conversion to payload bytes.
//
// Magnitudes stay packed as the values are, two 16-bit numbers a word, while maxima are taken: bits
// of magnitudes order as the magnitudes do in every format.
#pragma once

#include "common/quantize.h"

namespace mx {

// A slice is a range of memory with bounds: loads beyond its end give zeros, stores there do
// nothing. On CDNA4 a buffer descriptor does that (ISA manual, section 9.1), without a branch.
template <int Count>
struct alignas(4 * Count) Words {
    unsigned word[Count];
};

// An offset that is beyond the end of every slice, with room for another to be added.
constexpr unsigned kBeyond = 1u << 31;

#if defined(__AMDGCN__)
constexpr bool kBoundsCostNothing = true;

template <bool Bounded = true>
class Slice {
  public:
    // first and size_bytes, which is below kBeyond, are the same in all lanes.
    MX_MEMBER Slice(const void* first, unsigned size_bytes)
        : buffer(__builtin_amdgcn_make_buffer_rsrc(const_cast<void*>(first), kRaw,
                                                   static_cast<int>(size_bytes), kFormat)) {}

    // 16 bytes that no one reads again.
    MX_MEMBER u32x4 load_once(unsigned offset) const {
        return __builtin_amdgcn_raw_buffer_load_b128(buffer, offset, 0, kNonTemporal);
    }
    MX_MEMBER void store(unsigned offset, Words<4> x) const {
        __builtin_amdgcn_raw_buffer_store_b128(u32x4{x.word[0], x.word[1], x.word[2], x.word[3]},
                                               buffer, offset, 0, 0);
    }
    MX_MEMBER void store(unsigned offset, Words<2> x) const {
        using u32x2 = unsigned __attribute__((ext_vector_type(2)));
        __builtin_amdgcn_raw_buffer_store_b64(u32x2{x.word[0], x.word[1]}, buffer, offset, 0, 0);
    }
    MX_MEMBER void store(unsigned offset, Words<1> x) const {
        __builtin_amdgcn_raw_buffer_store_b32(x.word[0], buffer, offset, 0, 0);
    }
    MX_MEMBER void store(unsigned offset, unsigned short x) const {
        __builtin_amdgcn_raw_buffer_store_b16(x, buffer, offset, 0, 0);
    }
    MX_MEMBER void store(unsigned offset, unsigned char x) const {
        __builtin_amdgcn_raw_buffer_store_b8(x, buffer, offset, 0, 0);
    }

  private:
    static constexpr short kRaw = 0;           // stride: none
    static constexpr int kFormat = 0x00027000; // 32-bit words, no swizzle
    static constexpr int kNonTemporal = 2;
    __amdgpu_buffer_rsrc_t buffer;
};
#else
constexpr bool kBoundsCostNothing = false;

// Without Bounded, all offsets must be below size_bytes.
template <bool Bounded = true>
class Slice {
  public:
    MX_MEMBER Slice(const void* first, unsigned size_bytes)
        : first(static_cast<const unsigned char*>(first)), size_bytes(size_bytes) {}

    // 16 bytes that no one reads again.
    MX_MEMBER u32x4 load_once(unsigned offset) const {
        return !Bounded || offset < size_bytes ? mx::load_once(first + offset) : u32x4{};
    }
    MX_MEMBER const unsigned char* address(unsigned offset) const { return first + offset; }
    template <class T>
    MX_MEMBER void store(unsigned offset, T x) const {
        if (!Bounded || offset < size_bytes)
            *reinterpret_cast<T*>(const_cast<unsigned char*>(first) + offset) = x;
    }

  private:
    const unsigned char* first;
    unsigned size_bytes;
};
#endif

// Bytes left of total from offset on, at most `most`.
MX_DEVICE unsigned bytes_left(unsigned long total, unsigned long offset, unsigned most) {
    const unsigned long left = total > offset ? total - offset : 0;
    return left < most ? left : most;
}

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

// Number Index of a word of packed magnitudes, as magnitude_bits has it.
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

// The larger half of each of two words, packed.
MX_DEVICE unsigned larger_halves(unsigned a, unsigned b) {
    return max_halves(low_halves(a, b), high_halves(a, b));
}

// The largest magnitudes of two pieces of 16-bit numbers, packed.
template <class T>
MX_DEVICE unsigned packed_amax_of_two(u32x4 one, u32x4 other) {
    return larger_halves(packed_amax_of_piece<T>(one), packed_amax_of_piece<T>(other));
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
// The same where each lane has two pieces of a block.
template <class T, int Lanes>
MX_DEVICE void amax_of_blocks(const u32x4 (&one)[2], const u32x4 (&other)[2], unsigned& amax_one,
                              unsigned& amax_other) {
    const unsigned a =
        packed_max<T>(packed_amax_of_piece<T>(one[0]), packed_amax_of_piece<T>(one[1]));
    const unsigned b =
        packed_max<T>(packed_amax_of_piece<T>(other[0]), packed_amax_of_piece<T>(other[1]));
    if constexpr (sizeof(T) == 4) {
        amax_one = max_of_lanes<Lanes>(a);
        amax_other = max_of_lanes<Lanes>(b);
    } else {
        const unsigned amax = packed_max_of_lanes<T, Lanes>(larger_halves(a, b));
        amax_one = unpacked_magnitude<T, 0>(amax);
        amax_other = unpacked_magnitude<T, 1>(amax);
    }
}
template <class T, int Lanes>
MX_DEVICE void amax_of_blocks(const u32x4 (&one)[1], const u32x4 (&other)[1], unsigned& amax_one,
                              unsigned& amax_other) {
    amax_of_blocks<T, Lanes>(one[0], other[0], amax_one, amax_other);
}

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

// True if scales are found two at a time where no NaN or infinity is about.
template <class T>
constexpr bool kScalesInPairs = kScaledInPairs<T>;

// Finds what block_scale does, for each of two finite packed magnitudes in bf16.
template <class Format, ScaleMode Mode>
MX_DEVICE void finite_block_scales(unsigned amax, BlockScale (&scales)[2]) {
    constexpr unsigned both = 0x00010001, exponent = 0x7f80;
    constexpr unsigned round_up = kScaleRounding<Format, Mode> >> 16;
    constexpr unsigned least = Format::kMaxExponent << 7;
    const unsigned exponents =
        max_halves((amax + round_up * both) & (exponent * both), least * both);
    const unsigned bytes = (exponents - least * both) >> 7;
    const unsigned inverses = ((254 << 7) + least) * both - exponents;
    scales[0] = {bytes & 0xff, bits_to_float(inverses << 16)};
    scales[1] = {bytes >> 16, bits_to_float(inverses & 0xffff0000)};
}

// True if a packed magnitude in bf16 is not finite.
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

// Payload bytes of 16 bytes of one block: 8 or 4 of e4m3 or e5m2, 4 or 2 of e2m1.
template <class Format, ScaleMode Mode, class T, bool Finite = false>
MX_DEVICE auto piece_to_payload(u32x4 piece, BlockScale scale) {
    constexpr int count = kPieceValues<T>;
    if constexpr (kInPairs<Format, T>) {
        const unsigned word = words_to_e2m1<T, Mode != kRoundUp>(piece, scale.inverse);
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
                words.word[i / 4] =
                    to_fp8x4<Format, Mode>(v[i], v[i + 1], v[i + 2], v[i + 3], scale);
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
        return {to_fp8x4<Format, Mode>(v[0], v[1], v[2], v[3], scale),
                to_fp8x4<Format, Mode>(v[4], v[5], v[6], v[7], scale)};
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
        constexpr bool saturating = Mode != kRoundUp || !Finite;
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

// Payload bytes of two pieces, one after the other.
template <int Count>
MX_DEVICE Words<2 * Count> joined(Words<Count> one, Words<Count> other) {
    Words<2 * Count> both;
#pragma unroll
    for (int i = 0; i < Count; ++i) {
        both.word[i] = one.word[i];
        both.word[Count + i] = other.word[i];
    }
    return both;
}
MX_DEVICE Words<1> joined(unsigned short one, unsigned short other) {
    return {static_cast<unsigned>(other) << 16 | one};
}

} // namespace mx
