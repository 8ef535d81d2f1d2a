// Exchanges between lanes of a warp, and arithmetic on two 16-bit numbers at once: Hopper.
#pragma once

#include "sm90/target.h"

namespace mx {

// x of lane `from`.
MX_DEVICE unsigned from_lane(int from, unsigned x) { return __shfl_sync(0xffffffffu, x, from); }

// Whether x is true in any lane.
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

// Whether one instruction compares magnitudes.
template <class T>
constexpr bool kComparesMagnitudes = sizeof(T) == 2;

// Of two 16-bit floats each, the one with the larger magnitude, with either sign; or NaN.
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
// The same of a pointer, which then is not kept in registers as parts of addresses either.
MX_DEVICE unsigned char* afresh(unsigned char* p) {
    asm volatile("" : "+l"(p));
    return p;
}

// fp16 of the low or the high half of a word.
template <int Half>
MX_DEVICE float half_to_f32(unsigned word) {
    return to_f32(fp16{static_cast<unsigned short>(word >> 16 * Half)});
}

} // namespace mx
