// Exchanges between lanes of a wave, and arithmetic on two 16-bit numbers at once: CDNA4.
#pragma once

#include "gfx950/target.h"

namespace mx {

// x of lane `from`.
MX_DEVICE unsigned from_lane(int from, unsigned x) {
    return __builtin_amdgcn_ds_bpermute(4 * from, x);
}

// Whether x is true in any lane.
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

// Whether one instruction compares magnitudes.
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
