// Hopper's warpgroup matrix instruction over fp8, wgmma.m64nNk32 of the PTX ISA manual (e4m3, fp32
// sums), with both operands in shared memory: A [64, 32] and B [N, 32], k fastest, in rows of 128
// bytes whose 16-byte pieces are turned as copy_box turns them. D as in sm90_wgmma.h.
//
// The products of an instruction are added with fewer bits than fp32 has, about 14.
#pragma once

#include "sm90_wgmma.h"

namespace mx {

// A matrix whose rows are 128 bytes apart and begin at a multiple of 1024 bytes, from a k on.
struct SwizzledDescriptor {
    static constexpr unsigned kEightRows = 1024 >> 4, kSwizzle128 = 1u << 30;
    unsigned low;

    MX_MEMBER explicit SwizzledDescriptor(unsigned address)
        : low((address & 0x3ffff) >> 4 | 1 << 16) {}
    MX_MEMBER unsigned long long at(unsigned bytes) const {
        return static_cast<unsigned long long>(kEightRows | kSwizzle128) << 32 |
               (low + (bytes >> 4));
    }
};

// d = A * B^T, whatever d was.
MX_DEVICE void wgmma_block(float (&d)[4], unsigned long long a, unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 "
                 "{%0, %1, %2, %3}, %4, %5, 0, 1, 1;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "l"(a), "l"(b));
}
MX_DEVICE void wgmma_block(float (&d)[8], unsigned long long a, unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, 0, 1, 1;"
                 : MX_SUMS_8(d, 0)
                 : "l"(a), "l"(b));
}
MX_DEVICE void wgmma_block(float (&d)[16], unsigned long long a, unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "%16, %17, 0, 1, 1;"
                 : MX_SUMS_16(d, 0)
                 : "l"(a), "l"(b));
}
MX_DEVICE void wgmma_block(float (&d)[32], unsigned long long a, unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
                 "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "%32, %33, 0, 1, 1;"
                 : MX_SUMS_32(d, 0)
                 : "l"(a), "l"(b));
}

} // namespace mx
