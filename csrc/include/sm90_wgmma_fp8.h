// Hopper's warpgroup matrix instruction over fp8, wgmma.m64nNk32 of the PTX ISA manual (e4m3, fp32
// sums), with both operands in shared memory: A [64, 32] and B [N, 32], k fastest, in rows of 128
// bytes whose 16-byte pieces are turned as copy_box turns them. D as in sm90_wgmma.h.
//
// The products of an instruction are added with fewer bits than fp32 has, about 14.
#pragma once

#include "sm90_wgmma.h"

namespace mx {

// A matrix whose rows are 128 bytes apart and begin at a multiple of 1024 bytes.
struct SwizzledDescriptor {
    static constexpr unsigned kEightRows = 1024 >> 4, kSwizzle128 = 1u << 30;
    unsigned low;

    MX_MEMBER explicit SwizzledDescriptor(unsigned address)
        : low((address & 0x3ffff) >> 4 | 1 << 16) {}
    // From `low`, or that of a k further on: it is in units of 16 bytes.
    MX_MEMBER static unsigned long long of(unsigned low) {
        return static_cast<unsigned long long>(kEightRows | kSwizzle128) << 32 | low;
    }
};

// d = A * B^T, whatever d was. d has `count`, N / 2, values; a and b have the numbers behind
// theirs.
#define MX_WGMMA_BLOCK(n, count, name_of_a, name_of_b)                                             \
    MX_DEVICE void wgmma_block(float (&d)[count], unsigned long long a, unsigned long long b) {    \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3"                    \
                     " {" MX_NAMES_##count "}, " name_of_a ", " name_of_b ", 0, 1, 1;"             \
                     : MX_SUMS_##count(d, 0)                                                       \
                     : "l"(a), "l"(b));                                                            \
    }
MX_WGMMA_BLOCK(8, 4, "%4", "%5")
MX_WGMMA_BLOCK(16, 8, "%8", "%9")
MX_WGMMA_BLOCK(32, 16, "%16", "%17")
MX_WGMMA_BLOCK(64, 32, "%32", "%33")
#undef MX_WGMMA_BLOCK

} // namespace mx
