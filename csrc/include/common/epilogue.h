// The bias is added to a sum before it is rounded and stored.
#pragma once

#include "common/target.h"

namespace mx {

// bias[n] of the dtype whose code is kind; 0 where there is no bias.
MX_DEVICE float load_bias(const void* bias, int kind, unsigned long n) {
    switch (kind) {
    case kF32:
        return static_cast<const float*>(bias)[n];
    case kBF16:
        return to_f32(static_cast<const bf16*>(bias)[n]);
    case kFP16:
        return to_f32(static_cast<const fp16*>(bias)[n]);
    default:
        return 0.0f;
    }
}

} // namespace mx
