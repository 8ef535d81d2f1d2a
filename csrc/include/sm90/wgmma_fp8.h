// Hopper's warpgroup matrix instruction over fp8, wgmma.m64nNk32 of the PTX ISA manual (e4m3, fp32
// sums), with both operands in shared memory: A [64, 32] and B [N, 32], k fastest, in rows of 128
// bytes whose 16-byte pieces are turned as copy_box turns them. D as in sm90/wgmma.h.
//
// The products of an instruction are added with fewer bits than fp32 has, about 14.
#pragma once

#include "sm90/wgmma.h"

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
MX_WGMMA_BLOCK(24, 12, "%12", "%13")
MX_WGMMA_BLOCK(32, 16, "%16", "%17")
MX_WGMMA_BLOCK(40, 20, "%20", "%21")
MX_WGMMA_BLOCK(48, 24, "%24", "%25")
MX_WGMMA_BLOCK(56, 28, "%28", "%29")
MX_WGMMA_BLOCK(64, 32, "%32", "%33")
MX_WGMMA_BLOCK(72, 36, "%36", "%37")
MX_WGMMA_BLOCK(80, 40, "%40", "%41")
MX_WGMMA_BLOCK(88, 44, "%44", "%45")
MX_WGMMA_BLOCK(96, 48, "%48", "%49")
#undef MX_WGMMA_BLOCK

// d = A * B^T over bf16 of 16 k, whatever d was: A's first 8 k in registers, the others 0. Names as
// above, those of a first.
#define MX_WGMMA_FACTORS(n, count, names_of_a, name_of_zero, name_of_b)                            \
    MX_DEVICE void wgmma_factors(float (&d)[count], unsigned a, unsigned a8, unsigned zero,        \
                                 unsigned long long b) {                                           \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16"                    \
                     " {" MX_NAMES_##count "}, {" names_of_a ", " name_of_zero ", " name_of_zero   \
                                           "}, " name_of_b ", 0, 1, 1, 0;"                         \
                     : MX_SUMS_##count(d, 0)                                                       \
                     : "r"(a), "r"(a8), "r"(zero), "l"(b));                                        \
    }
MX_WGMMA_FACTORS(8, 4, "%4, %5", "%6", "%7")
MX_WGMMA_FACTORS(16, 8, "%8, %9", "%10", "%11")
MX_WGMMA_FACTORS(24, 12, "%12, %13", "%14", "%15")
MX_WGMMA_FACTORS(32, 16, "%16, %17", "%18", "%19")
MX_WGMMA_FACTORS(40, 20, "%20, %21", "%22", "%23")
MX_WGMMA_FACTORS(48, 24, "%24, %25", "%26", "%27")
MX_WGMMA_FACTORS(56, 28, "%28, %29", "%30", "%31")
MX_WGMMA_FACTORS(64, 32, "%32, %33", "%34", "%35")
MX_WGMMA_FACTORS(72, 36, "%36, %37", "%38", "%39")
MX_WGMMA_FACTORS(80, 40, "%40, %41", "%42", "%43")
MX_WGMMA_FACTORS(88, 44, "%44, %45", "%46", "%47")
MX_WGMMA_FACTORS(96, 48, "%48, %49", "%50", "%51")
#undef MX_WGMMA_FACTORS

} // namespace mx
