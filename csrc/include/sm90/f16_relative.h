// Rows in fp16 whose block scales are applied relative to the row's reference: to its largest
// scale, or, where finding that takes too long, to the largest of some all over the row. With any
// payload fp16 has room for 22 powers of two, so that it covers scales from 2^21 times smaller than
// the largest, and 2^12 times smaller to 2^9 times larger than that of some, exactly. A sum over
// two rows then takes what both references stand for.
#pragma once

#include "common/scale.h"
#include "common/target.h"
#include "sm90/convert.h"
#include "sm90/expand.h"
#include "sm90/mma.h"

namespace mx {

constexpr unsigned kOfLargest = 22, kOfSampled = 13; // exponent field of a reference's own factor
// References whose products fp32 covers.
constexpr unsigned kFirstReference = 64, kLastReference = 188;

// Which block is the i-th of `Samples` that say what a row's reference is.
template <int Samples>
MX_DEVICE long sampled_block(int i, long blocks) {
    return (2 * i + 1) * blocks / (2 * Samples);
}
// What a sampled scale says of it.
MX_DEVICE unsigned sample_of(unsigned scale) { return scale == kNanScale ? 0 : scale; }
MX_DEVICE unsigned reference_from(unsigned largest_sample) {
    return min(max(largest_sample, kFirstReference), kLastReference);
}

// Whether fp16 covers a scale that is not NaN. exponent: kOfLargest or kOfSampled.
MX_DEVICE bool is_covered(unsigned scale, unsigned reference, unsigned exponent) {
    return scale - reference + exponent - 1 < kF16Scales;
}

// Whether any of 16 e4m3 is not zero.
MX_DEVICE bool has_values(const u32x4& payload) {
    return (payload[0] | payload[1] | payload[2] | payload[3]) & 0x7f7f7f7f;
}

// Factors of scales in the halves of a word. Those of scales that are not covered are finite, so
// that zeros stay zeros.
class F16Factors {
  public:
    MX_MEMBER F16Factors(unsigned reference, unsigned exponent)
        : lowest((reference - exponent) * 0x00010001),
          highest(lowest + (kF16Scales + 1) * 0x00010001) {}
    MX_MEMBER unsigned operator()(unsigned scales) const {
        return (max_halves(min_halves(scales, highest), lowest) - lowest) * 0x400;
    }

  private:
    unsigned lowest, highest; // those of 0 and of 2^8, in both halves
};

// What a reference stands for, given its own factor.
MX_DEVICE float reference_value(unsigned reference, unsigned exponent) {
    return bits_to_float((reference + 15 - exponent) << 23);
}

// Bytes 0 and 1, then 2 and 3, of four e4m3 times the factor in a half of factors. NaN stays NaN.
template <int Half>
MX_DEVICE void e4m3x4_to_f16(unsigned word, unsigned factors, unsigned& low, unsigned& high) {
    e4m3x4_to_f16_times(word, twice_half<Half>(factors), low, high);
}

} // namespace mx
