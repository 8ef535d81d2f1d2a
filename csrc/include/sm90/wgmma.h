// Hopper's warpgroup matrix instruction, wgmma.m64nNk16 of the PTX ISA manual (bf16 or fp16, fp32
// sums), with A in registers and B, [N, 16], k fastest, in shared memory without swizzle.
//
// Lane 4g + t of warp w holds rows 16w + g and 16w + g + 8 of A and D. Of A, words 0 and 1 are
// columns 2t, 2t + 1 of these two rows, words 2 and 3 columns 2t + 8, 2t + 9. Of D, values
// 4j .. 4j + 3 are columns 8j + 2t, 8j + 2t + 1 of the first row, then of the second.
#pragma once

#include "common/target.h"

// Operands of a wgmma: so many sums of d from d[i], and their names, which are numbers.
#define MX_SUMS_4(d, i) "+f"((d)[i]), "+f"((d)[i + 1]), "+f"((d)[i + 2]), "+f"((d)[i + 3])
#define MX_SUMS_8(d, i) MX_SUMS_4(d, i), MX_SUMS_4(d, i + 4)
#define MX_SUMS_12(d, i) MX_SUMS_8(d, i), MX_SUMS_4(d, i + 8)
#define MX_SUMS_16(d, i) MX_SUMS_8(d, i), MX_SUMS_8(d, i + 8)
#define MX_SUMS_20(d, i) MX_SUMS_16(d, i), MX_SUMS_4(d, i + 16)
#define MX_SUMS_24(d, i) MX_SUMS_16(d, i), MX_SUMS_8(d, i + 16)
#define MX_SUMS_28(d, i) MX_SUMS_24(d, i), MX_SUMS_4(d, i + 24)
#define MX_SUMS_32(d, i) MX_SUMS_16(d, i), MX_SUMS_16(d, i + 16)
#define MX_SUMS_36(d, i) MX_SUMS_32(d, i), MX_SUMS_4(d, i + 32)
#define MX_SUMS_40(d, i) MX_SUMS_32(d, i), MX_SUMS_8(d, i + 32)
#define MX_SUMS_44(d, i) MX_SUMS_40(d, i), MX_SUMS_4(d, i + 40)
#define MX_SUMS_48(d, i) MX_SUMS_32(d, i), MX_SUMS_16(d, i + 32)
#define MX_SUMS_52(d, i) MX_SUMS_48(d, i), MX_SUMS_4(d, i + 48)
#define MX_SUMS_56(d, i) MX_SUMS_48(d, i), MX_SUMS_8(d, i + 48)
#define MX_SUMS_64(d, i) MX_SUMS_32(d, i), MX_SUMS_32(d, i + 32)
#define MX_SUMS_68(d, i) MX_SUMS_64(d, i), MX_SUMS_4(d, i + 64)
#define MX_SUMS_72(d, i) MX_SUMS_64(d, i), MX_SUMS_8(d, i + 64)
#define MX_SUMS_80(d, i) MX_SUMS_64(d, i), MX_SUMS_16(d, i + 64)
#define MX_SUMS_88(d, i) MX_SUMS_80(d, i), MX_SUMS_8(d, i + 80)
#define MX_SUMS_96(d, i) MX_SUMS_64(d, i), MX_SUMS_32(d, i + 64)
#define MX_SUMS_104(d, i) MX_SUMS_96(d, i), MX_SUMS_8(d, i + 96)
#define MX_SUMS_112(d, i) MX_SUMS_96(d, i), MX_SUMS_16(d, i + 96)
#define MX_SUMS_128(d, i) MX_SUMS_96(d, i), MX_SUMS_32(d, i + 96)
#define MX_NAMES_4 "%0, %1, %2, %3"
#define MX_NAMES_8 MX_NAMES_4 ", %4, %5, %6, %7"
#define MX_NAMES_12 MX_NAMES_8 ", %8, %9, %10, %11"
#define MX_NAMES_16 MX_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define MX_NAMES_20 MX_NAMES_16 ", %16, %17, %18, %19"
#define MX_NAMES_24 MX_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define MX_NAMES_28 MX_NAMES_24 ", %24, %25, %26, %27"
#define MX_NAMES_32 MX_NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define MX_NAMES_36 MX_NAMES_32 ", %32, %33, %34, %35"
#define MX_NAMES_40 MX_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define MX_NAMES_44 MX_NAMES_40 ", %40, %41, %42, %43"
#define MX_NAMES_48 MX_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define MX_NAMES_52 MX_NAMES_48 ", %48, %49, %50, %51"
#define MX_NAMES_56 MX_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define MX_NAMES_64 MX_NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define MX_NAMES_68 MX_NAMES_64 ", %64, %65, %66, %67"
#define MX_NAMES_72 MX_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define MX_NAMES_80                                                                                \
    MX_NAMES_64                                                                                    \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define MX_NAMES_88 MX_NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define MX_NAMES_96                                                                                \
    MX_NAMES_80                                                                                    \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MX_NAMES_104 MX_NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define MX_NAMES_112                                                                               \
    MX_NAMES_96                                                                                    \
    ", %96, %97, %98, %99, %100, %101, %102, %103"                                                 \
    ", %104, %105, %106, %107, %108, %109, %110, %111"
#define MX_NAMES_128                                                                               \
    MX_NAMES_112                                                                                   \
    ", %112, %113, %114, %115, %116, %117, %118, %119"                                             \
    ", %120, %121, %122, %123, %124, %125, %126, %127"

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

// True if x is, in any of the four lanes that have values of the same rows of D.
MX_DEVICE bool any_of_row(bool x, int lane) { return __ballot_sync(~0u, x) >> lane / 4 * 4 & 15; }

// d += a * B, over bf16 and over fp16. d has `count`, N / 2, values; the names of a and of b are
// the numbers behind theirs.
#define MX_WGMMA(n, count, names_of_a, name_of_b)                                                  \
    MX_WGMMA_OVER(wgmma, "bf16", n, count, names_of_a, name_of_b)                                  \
    MX_WGMMA_OVER(wgmma_f16, "f16", n, count, names_of_a, name_of_b)
#define MX_WGMMA_OVER(function, type, n, count, names_of_a, name_of_b)                             \
    MX_DEVICE void function(float (&d)[count], const unsigned (&a)[4], unsigned long long b) {     \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type               \
                     " {" MX_NAMES_##count "}, {" names_of_a "}, " name_of_b ", 1, 1, 1, 0;"       \
                     : MX_SUMS_##count(d, 0)                                                       \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                        \
    }
MX_WGMMA(8, 4, "%4, %5, %6, %7", "%8")
MX_WGMMA(16, 8, "%8, %9, %10, %11", "%12")
MX_WGMMA(24, 12, "%12, %13, %14, %15", "%16")
MX_WGMMA(32, 16, "%16, %17, %18, %19", "%20")
MX_WGMMA(40, 20, "%20, %21, %22, %23", "%24")
MX_WGMMA(48, 24, "%24, %25, %26, %27", "%28")
MX_WGMMA(56, 28, "%28, %29, %30, %31", "%32")
MX_WGMMA(64, 32, "%32, %33, %34, %35", "%36")
MX_WGMMA(72, 36, "%36, %37, %38, %39", "%40")
MX_WGMMA(80, 40, "%40, %41, %42, %43", "%44")
MX_WGMMA(88, 44, "%44, %45, %46, %47", "%48")
MX_WGMMA(96, 48, "%48, %49, %50, %51", "%52")
MX_WGMMA(112, 56, "%56, %57, %58, %59", "%60")
MX_WGMMA(128, 64, "%64, %65, %66, %67", "%68")
MX_WGMMA(136, 68, "%68, %69, %70, %71", "%72")
MX_WGMMA(144, 72, "%72, %73, %74, %75", "%76")
MX_WGMMA(160, 80, "%80, %81, %82, %83", "%84")
MX_WGMMA(176, 88, "%88, %89, %90, %91", "%92")
MX_WGMMA(192, 96, "%96, %97, %98, %99", "%100")
MX_WGMMA(208, 104, "%104, %105, %106, %107", "%108")
MX_WGMMA(224, 112, "%112, %113, %114, %115", "%116")
MX_WGMMA(256, 128, "%128, %129, %130, %131", "%132")
#undef MX_WGMMA
#undef MX_WGMMA_OVER

// Multiplies over the first Columns of sums that have room for more.
template <int Columns, int Count>
MX_DEVICE void wgmma_f16_first(float (&d)[Count], const unsigned (&a)[4], unsigned long long b) {
    static_assert(Columns / 2 <= Count, "d has no room for so many columns");
    wgmma_f16(reinterpret_cast<float (&)[Columns / 2]>(d), a, b);
}

// Over fp8: wgmma.m64nNk32 (e4m3, fp32 sums), with both operands in shared memory: A [64, 32] and
// B [N, 32], k fastest, in rows of 128 bytes with the 128-byte swizzle of TMA. D as above.
//
// The products of an instruction are added with fewer bits than fp32 has, about 14.

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
MX_WGMMA_BLOCK(104, 52, "%52", "%53")
MX_WGMMA_BLOCK(112, 56, "%56", "%57")
MX_WGMMA_BLOCK(128, 64, "%64", "%65")
#undef MX_WGMMA_BLOCK

// d = A * B^T, or d += A * B^T where it adds.
#define MX_WGMMA_FP8(n, count, name_of_a, name_of_b, name_of_adds)                                 \
    template <bool Adds>                                                                           \
    MX_DEVICE void wgmma_fp8(float (&d)[count], unsigned long long a, unsigned long long b) {      \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3"                    \
                     " {" MX_NAMES_##count "}, " name_of_a ", " name_of_b ", " name_of_adds        \
                                           ", 1, 1;"                                               \
                     : MX_SUMS_##count(d, 0)                                                       \
                     : "l"(a), "l"(b), "n"(Adds));                                                 \
    }
MX_WGMMA_FP8(64, 32, "%32", "%33", "%34")
MX_WGMMA_FP8(128, 64, "%64", "%65", "%66")
#undef MX_WGMMA_FP8

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
MX_WGMMA_FACTORS(104, 52, "%52, %53", "%54", "%55")
MX_WGMMA_FACTORS(112, 56, "%56, %57", "%58", "%59")
MX_WGMMA_FACTORS(128, 64, "%64, %65", "%66", "%67")
#undef MX_WGMMA_FACTORS

} // namespace mx
