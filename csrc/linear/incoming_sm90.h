// Activations that a launch ahead of a linear brings, and quantises where they are yet to be.
#pragma once

#include "common/target.h"
#include "fused.h"

namespace mx {

// 16 k of a token as loaded, and what they are quantised to.
template <int Code>
struct Incoming {
    static constexpr bool kQuantises = !kIsQuantised<Code>;
    static constexpr int kBlock = 32;
    QuantisedHalf quantised = {{}, 127};
    HalfBlock<Code> half = {};

    MX_MEMBER void load_from(const unsigned char* x, const unsigned char* xs, long at) {
        if constexpr (kQuantises)
            half = {load(x + at * 2), load(x + at * 2 + 16)};
        else
            quantised = {load(x + at), load_byte(xs + at / kBlock)};
    }
    // All lanes of a warp take part.
    MX_MEMBER const QuantisedHalf& result() {
        if constexpr (kQuantises)
            quantised = mx::quantised(half);
        return quantised;
    }
};

} // namespace mx
