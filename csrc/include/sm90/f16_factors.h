// Factors in fp16 that stand for the block scales of a row: the scales relative to the row's
// largest one, its top, which sums over all of the row's blocks are multiplied with instead.
#pragma once

#include "common/scale.h"
#include "common/target.h"
#include "sm90/memory.h"
#include "sm90/mma.h"

namespace mx {

constexpr int kNanFactor = 0x7e;
// A row's largest scale becomes 2^7 in fp16, with this exponent field; 2^-14 is the least.
constexpr int kTopExponent = 22;

// The upper byte of the fp16 that a block is multiplied with; 0 if it is too small.
MX_DEVICE unsigned factor_byte(unsigned scale, unsigned top) {
    const int exponent = static_cast<int>(scale - top) + kTopExponent;
    return scale == kNanScale ? kNanFactor : exponent < 1 ? 0 : exponent << 2;
}
// What a block is multiplied with, in both halves of a word, from four such bytes.
MX_DEVICE unsigned factor_of_block(unsigned factors, int block) {
    return __byte_perm(factors, 0, 0x0404 | block << 4 | block << 12);
}
// 16 k of a row of x times such a factor, to where wgmma's B is: the lower halves of the words of
// 16 k, and so many bytes behind them the upper ones.
MX_DEVICE void store_f16_times(unsigned to, int behind, const u32x4& words, unsigned factor) {
    unsigned low[4], high[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        e4m3x4_to_f16_times(words[i], factor, low[i], high[i]);
    store_shared_16(to, low);
    store_shared_16(to + behind, high);
}
// Sets the top bit of each of four such bytes that is 0.
MX_DEVICE unsigned zero_bytes(unsigned factors) { return (factors - 0x01010101) & 0x80808080; }

} // namespace mx
