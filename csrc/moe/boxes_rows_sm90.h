// Rows of x and of scales, for the warps of wgmma_f16_sm90.cu and of kernels in its frame that
// copy them.
#pragma once

#include "boxes_sm90.h"
#include "sm90/tma.h"

namespace mx {

// Where a row begins. Worked out where it is used: all rows' places would not fit the registers.
MX_DEVICE const unsigned char* row_at(const unsigned char* first, int row, unsigned row_bytes) {
    unsigned long place;
    asm volatile("mad.wide.u32 %0, %1, %2, %3;"
                 : "=l"(place)
                 : "r"(max(row, 0)), "r"(row_bytes), "l"(first));
    return reinterpret_cast<const unsigned char*>(place);
}

// Starts copies of kScaleChunks words, or of zeros.
MX_DEVICE void copy_scales(unsigned to, const unsigned char* from, bool exists) {
    if (kLongScales && reinterpret_cast<unsigned long>(from) % 16 == 0)
        return copy_async(to, from, exists);
#pragma unroll
    for (int i = 0; i < kScaleChunks; ++i)
        copy_word_async(to + i * 4, from + i * 4, exists ? 4 : 0);
}

} // namespace mx
