// The bias is asked for ahead of the sum that it is added to.
#pragma once

#include "common/target.h"
#include "gfx950/memory.h"

namespace mx {

// The bias of one output. It is under way during all of the sum: waiting for it at the end would
// cost a latency of memory.
struct BiasLoad {
    unsigned low, high; // 16 bits each
    int kind;

    BiasLoad() = default;
    MX_MEMBER BiasLoad(const void* bias, int kind, unsigned long first, unsigned rows, unsigned row)
        : kind(kind) {
        const unsigned size = kind == kF32 ? 4 : 2;
        const Buffer values(static_cast<const unsigned char*>(bias) + first * size,
                            kind == kNone ? 0 : rows * size);
        low = values.load_two_bytes(row * size);
        high = values.load_two_bytes(kind == kF32 ? row * size + 2 : kNowhere);
    }
    // Without a branch, which a wave waits for.
    MX_MEMBER float to_f32() const {
        const float half = mx::to_f32(__builtin_bit_cast(fp16, static_cast<unsigned short>(low)));
        const unsigned bits = (kind == kF32 ? high : low) << 16 | (kind == kF32 ? low : 0);
        return bits_to_float(kind == kFP16 ? float_to_bits(half) : bits);
    }
};

} // namespace mx
