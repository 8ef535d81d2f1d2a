// Activations that a linear quantises itself: bf16 or fp16 in, what common/quantize.h makes of it
// out.
#pragma once

#include "common/packed.h"

namespace mx {

// Which activations a linear takes: MX_X is 0 where they are e4m3 with scales, else the code of
// their dtype.
template <int Code>
constexpr bool kIsQuantised = Code == kNone;

// 16 consecutive values, half a block, as loaded; the lane whose number differs in bit 0 has the
// other half.
template <int Code>
struct HalfBlock {
    u32x4 low, high;
};

struct QuantisedHalf {
    u32x4 payload; // 16 bytes of e4m3
    unsigned scale;
};

// All lanes of the wave take part; those with nothing have zeros.
template <int Code>
MX_DEVICE QuantisedHalf quantised(const HalfBlock<Code>& half) {
    using In = DType<kIsQuantised<Code> ? kBF16 : Code>; // any will do where this is not called
    const unsigned packed =
        packed_max<In>(packed_amax_of_piece<In>(half.low), packed_amax_of_piece<In>(half.high));
    const unsigned amax = largest_magnitude<In>(packed_max_of_lanes<In, 2>(packed));
    const BlockScale scale = block_scale<E4M3, kRoundUp>(amax);
    const Words<2> low = piece_to_payload<E4M3, kRoundUp, In>(half.low, scale);
    const Words<2> high = piece_to_payload<E4M3, kRoundUp, In>(half.high, scale);
    return {{low.word[0], low.word[1], high.word[0], high.word[1]}, scale.byte};
}

} // namespace mx
