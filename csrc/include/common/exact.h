// One output in fp32 from payloads and scales, whatever the scales.
#pragma once

#include "common/scale.h"
#include "common/target.h"

namespace mx {

// Sum over K of x[k] * w[k], given the rows' payloads and scales.
MX_DEVICE float exact_output(const unsigned char* xq, const unsigned char* xs,
                             const unsigned char* wq, const unsigned char* ws, long K) {
    constexpr int block = 32, piece = 16;
    float sum = 0.0f;
    for (long k = 0; k < K; k += piece) {
        f32x2 x[8], w[8];
        const u32x4 x_words = load(xq + k), w_words = load(wq + k);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            e4m3x4_to_f32(x_words[i], x[2 * i], x[2 * i + 1]);
            e4m3x4_to_f32(w_words[i], w[2 * i], w[2 * i + 1]);
        }
        sum = add_scaled(sum, dot(x, w), e8m0_split(load_byte(xs + k / block)),
                         e8m0_to_f32(load_byte(ws + k / block)));
    }
    return sum;
}

} // namespace mx
