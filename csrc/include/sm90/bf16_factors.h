// Block scales as bf16, which kernels over fp8 have the matrix unit multiply: of a row of x and one
// of w, by wgmma_factors.
#pragma once

#include "common/target.h"

namespace mx {

// Of four scales in a word those of blocks 0 and 1, or of blocks 2 and 3, but for the ends of e8m0,
// which bf16 does not have.
MX_DEVICE unsigned e8m0x2_to_bf16(unsigned scales, int pair) {
    return __byte_perm(scales, 0, pair ? 0x4342 : 0x4140) << 7;
}

// The top bit of a byte is set unless that scale is in 2^-62 to 2^62: then the product of two, and
// times a sum of a block, is in fp32.
MX_DEVICE unsigned far_scales(unsigned scales) {
    return (__vabsdiffu4(scales, 0x7f7f7f7f) + 0x41414141) & 0x80808080;
}

} // namespace mx
