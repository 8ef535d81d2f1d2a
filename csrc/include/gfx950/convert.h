// Quantisation needs these of CDNA4: conversions from fp32 (CDNA4 ISA manual, "VALU conversions"),
// exchanges between lanes of a wave, and arithmetic on two 16-bit numbers at once.
#pragma once

#include "gfx950/target.h"

namespace mx {

MX_DEVICE f32x2 multiply(f32x2 pair, float by) { return pair * by; }

// The conversions below do not saturate by themselves: beyond the largest e4m3 they give NaN, and
// beyond the largest e5m2 infinity.
MX_DEVICE f32x2 clamp(f32x2 pair, float most) {
    return {__builtin_amdgcn_fmed3f(pair.x, -most, most),
            __builtin_amdgcn_fmed3f(pair.y, -most, most)};
}

// Four floats to e4m3 bytes, to nearest even, or to four NaNs. Without Saturating none may be above
// 448. A NaN's sign would depend on the order of operands, so NaN is asked for.
template <bool Saturating>
MX_DEVICE unsigned f32_to_e4m3x4(f32x2 low, f32x2 high, bool is_nan) {
    constexpr float largest = 448.0f;
    if constexpr (Saturating) {
        low = clamp(low, largest);
        high = clamp(high, largest);
    }
    int word = __builtin_amdgcn_cvt_pk_fp8_f32(low.x, low.y, 0, false);
    word = __builtin_amdgcn_cvt_pk_fp8_f32(high.x, high.y, word, true);
    return is_nan ? 0x7f7f7f7f : static_cast<unsigned>(word);
}

// Likewise to e5m2, whose largest is 57344.
template <bool Saturating>
MX_DEVICE unsigned f32_to_e5m2x4(f32x2 low, f32x2 high, bool is_nan) {
    constexpr float largest = 57344.0f;
    if constexpr (Saturating) {
        low = clamp(low, largest);
        high = clamp(high, largest);
    }
    int word = __builtin_amdgcn_cvt_pk_bf8_f32(low.x, low.y, 0, false);
    word = __builtin_amdgcn_cvt_pk_bf8_f32(high.x, high.y, word, true);
    return is_nan ? 0x7f7f7f7f : static_cast<unsigned>(word);
}

// Two floats to e2m1 in byte Byte of a word, to nearest even; NaN to anything.
template <bool Saturating, int Byte>
MX_DEVICE unsigned insert_e2m1x2(unsigned word, f32x2 pair) {
    constexpr float largest = 6.0f, no_scale = 1.0f;
    const f32x2 bounded = Saturating ? clamp(pair, largest) : pair;
    return __builtin_amdgcn_cvt_scalef32_pk_fp4_f32(word, bounded.x, bounded.y, no_scale, Byte);
}

// 2, 4 or 8 floats to e2m1; without Saturating none may be above 6.
template <bool Saturating, int Pairs>
MX_DEVICE unsigned f32_to_e2m1(const f32x2 (&pairs)[Pairs]) {
    unsigned word = insert_e2m1x2<Saturating, 0>(0, pairs[0]);
    if constexpr (Pairs > 1)
        word = insert_e2m1x2<Saturating, 1>(word, pairs[1]);
    if constexpr (Pairs > 2) {
        word = insert_e2m1x2<Saturating, 2>(word, pairs[2]);
        word = insert_e2m1x2<Saturating, 3>(word, pairs[3]);
    }
    return word;
}

// x of lane `from`.
MX_DEVICE unsigned from_lane(int from, unsigned x) {
    return __builtin_amdgcn_ds_bpermute(4 * from, x);
}

// True if x is, in any lane.
MX_DEVICE bool any_lane(bool x) { return __builtin_amdgcn_ballot_w64(x) != 0; }

// x here and in the lane whose number differs in the bit Distance, in either order.
struct LanePair {
    unsigned one, other;
};
template <int Distance>
MX_DEVICE LanePair pair_of_lanes(unsigned x) {
    static_assert(Distance == 8 || Distance == 16);
    if constexpr (Distance == 16) {
        const auto halves = __builtin_amdgcn_permlane16_swap(x, x, false, false);
        return {halves[0], halves[1]};
    } else {
        constexpr int row_ror_8 = 0x128;
        return {x, static_cast<unsigned>(__builtin_amdgcn_mov_dpp(x, row_ror_8, 0xf, 0xf, true))};
    }
}

// The larger of the low halves and the larger of the high halves.
MX_DEVICE unsigned max_halves(unsigned a, unsigned b) {
    using u16x2 = unsigned short __attribute__((ext_vector_type(2)));
    return __builtin_bit_cast(unsigned, __builtin_elementwise_max(__builtin_bit_cast(u16x2, a),
                                                                  __builtin_bit_cast(u16x2, b)));
}

// True where one instruction compares magnitudes.
template <class T>
constexpr bool kComparesMagnitudes = false;

// The low halves of two words, the first one's below; and the high ones.
MX_DEVICE unsigned low_halves(unsigned a, unsigned b) {
    return __builtin_amdgcn_perm(b, a, 0x05040100);
}
MX_DEVICE unsigned high_halves(unsigned a, unsigned b) {
    return __builtin_amdgcn_perm(b, a, 0x07060302);
}

// x, the same in all lanes; what is computed from it is computed here, and not before a loop to be
// kept in registers.
MX_DEVICE unsigned afresh(unsigned x) {
    asm volatile("" : "+s"(x));
    return x;
}

// fp16 of the low or the high half of a word.
template <int Half>
MX_DEVICE float half_to_f32(unsigned word) {
    return static_cast<float>(
        __builtin_bit_cast(_Float16, static_cast<unsigned short>(word >> 16 * Half)));
}

} // namespace mx
