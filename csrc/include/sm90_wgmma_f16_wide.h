// wgmma.m64nNk16 over fp16 for wide N, and over sums that have room for more than N columns.
#pragma once

#include "sm90_wgmma_f16.h"

namespace mx {

MX_DEVICE void wgmma_f16(float (&d)[40], const unsigned (&a)[4], unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17,"
                 " %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33,"
                 " %34, %35, %36, %37, %38, %39}, "
                 "{%40, %41, %42, %43}, %44, 1, 1, 1, 0;"
                 : MX_SUMS_32(d, 0), MX_SUMS_8(d, 32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
MX_DEVICE void wgmma_f16(float (&d)[48], const unsigned (&a)[4], unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17,"
                 " %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33,"
                 " %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "
                 "{%48, %49, %50, %51}, %52, 1, 1, 1, 0;"
                 : MX_SUMS_32(d, 0), MX_SUMS_16(d, 32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Over the first Columns of them.
template <int Columns, int Count>
MX_DEVICE void wgmma_f16_first(float (&d)[Count], const unsigned (&a)[4], unsigned long long b) {
    static_assert(Columns / 2 <= Count, "d has no room for so many columns");
    wgmma_f16(reinterpret_cast<float (&)[Columns / 2]>(d), a, b);
}

} // namespace mx
