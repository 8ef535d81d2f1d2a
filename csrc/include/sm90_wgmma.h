// Hopper's warpgroup matrix instruction, wgmma.m64nNk16 of the PTX ISA manual (bf16, fp32 sums),
// with A in registers and B, [N, 16], k fastest, in shared memory without swizzle.
//
// Lane 4g + t of warp w holds rows 16w + g and 16w + g + 8 of A and D. Of A, words 0 and 1 are
// columns 2t, 2t + 1 of these two rows, words 2 and 3 columns 2t + 8, 2t + 9. Of D, values
// 4j .. 4j + 3 are columns 8j + 2t, 8j + 2t + 1 of the first row, then of the second.
#pragma once

#include "mx_target.h"

// Operands of a wgmma: so many sums of d from d[i].
#define MX_SUMS_8(d, i)                                                                            \
    "+f"((d)[i]), "+f"((d)[i + 1]), "+f"((d)[i + 2]), "+f"((d)[i + 3]), "+f"((d)[i + 4]),          \
        "+f"((d)[i + 5]), "+f"((d)[i + 6]), "+f"((d)[i + 7])
#define MX_SUMS_16(d, i) MX_SUMS_8(d, i), MX_SUMS_8(d, i + 8)
#define MX_SUMS_32(d, i) MX_SUMS_16(d, i), MX_SUMS_16(d, i + 16)

namespace mx {

// B as 8x16-byte pieces, each contiguous: k_stride bytes from k to k + 8, n_stride from n to n + 8.
// Of the address only the place in the workgroup's memory counts; in a cluster the rank is above
// it.
struct MatrixDescriptor {
    unsigned low, high;

    MX_MEMBER MatrixDescriptor(unsigned address, unsigned k_stride, unsigned n_stride)
        : low((address & 0x3ffff) >> 4 | k_stride >> 4 << 16), high(n_stride >> 4) {}
    MX_MEMBER void advance(unsigned bytes) { low += bytes >> 4; }
    MX_MEMBER unsigned long long at(unsigned bytes) const {
        return static_cast<unsigned long long>(high) << 32 | (low + (bytes >> 4));
    }
};

MX_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
MX_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most Pending committed groups are still running.
template <int Pending>
MX_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// d += a * B. d has N / 2 values.
MX_DEVICE void wgmma(float (&d)[4], const unsigned (&a)[4], unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, %8, 1, 1, 1, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
MX_DEVICE void wgmma(float (&d)[8], const unsigned (&a)[4], unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7}, "
                 "{%8, %9, %10, %11}, %12, 1, 1, 1, 0;"
                 : MX_SUMS_8(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
MX_DEVICE void wgmma(float (&d)[16], const unsigned (&a)[4], unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "{%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
                 : MX_SUMS_16(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
MX_DEVICE void wgmma(float (&d)[32], const unsigned (&a)[4], unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
                 "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
                 : MX_SUMS_32(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

} // namespace mx
