// wgmma.m64nNk16 (sm90_wgmma.h) over the first N columns of sums that have room for more.
#pragma once

#include "sm90_wgmma.h"

#define MX_SUMS_8(d, i)                                                                            \
    "+f"((d)[i]), "+f"((d)[i + 1]), "+f"((d)[i + 2]), "+f"((d)[i + 3]), "+f"((d)[i + 4]),          \
        "+f"((d)[i + 5]), "+f"((d)[i + 6]), "+f"((d)[i + 7])
#define MX_SUMS_16(d, i) MX_SUMS_8(d, i), MX_SUMS_8(d, i + 8)
#define MX_SUMS_32(d, i) MX_SUMS_16(d, i), MX_SUMS_16(d, i + 16)

namespace mx {

template <int Columns>
struct FirstColumns;
template <>
struct FirstColumns<16> {
    template <int Count>
    MX_MEMBER static void wgmma(float (&d)[Count], const unsigned (&a)[4], unsigned long long b) {
        static_assert(Count >= 8);
        asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
                     "{%0, %1, %2, %3, %4, %5, %6, %7}, "
                     "{%8, %9, %10, %11}, %12, 1, 1, 1, 0;"
                     : MX_SUMS_8(d, 0)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};
template <>
struct FirstColumns<32> {
    template <int Count>
    MX_MEMBER static void wgmma(float (&d)[Count], const unsigned (&a)[4], unsigned long long b) {
        static_assert(Count >= 16);
        asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                     "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                     "{%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
                     : MX_SUMS_16(d, 0)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};
template <>
struct FirstColumns<48> {
    template <int Count>
    MX_MEMBER static void wgmma(float (&d)[Count], const unsigned (&a)[4], unsigned long long b) {
        static_assert(Count >= 24);
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17,"
            " %18, %19, %20, %21, %22, %23}, "
            "{%24, %25, %26, %27}, %28, 1, 1, 1, 0;"
            : MX_SUMS_16(d, 0), MX_SUMS_8(d, 16)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};
template <>
struct FirstColumns<64> {
    template <int Count>
    MX_MEMBER static void wgmma(float (&d)[Count], const unsigned (&a)[4], unsigned long long b) {
        static_assert(Count >= 32);
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17,"
            " %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
            "{%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
            : MX_SUMS_32(d, 0)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};
template <>
struct FirstColumns<80> {
    template <int Count>
    MX_MEMBER static void wgmma(float (&d)[Count], const unsigned (&a)[4], unsigned long long b) {
        static_assert(Count >= 40);
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17,"
            " %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33,"
            " %34, %35, %36, %37, %38, %39}, "
            "{%40, %41, %42, %43}, %44, 1, 1, 1, 0;"
            : MX_SUMS_32(d, 0), MX_SUMS_8(d, 32)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};
template <>
struct FirstColumns<96> {
    template <int Count>
    MX_MEMBER static void wgmma(float (&d)[Count], const unsigned (&a)[4], unsigned long long b) {
        static_assert(Count >= 48);
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17,"
            " %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33,"
            " %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "
            "{%48, %49, %50, %51}, %52, 1, 1, 1, 0;"
            : MX_SUMS_32(d, 0), MX_SUMS_16(d, 32)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};
template <>
struct FirstColumns<128> {
    template <int Count>
    MX_MEMBER static void wgmma(float (&d)[Count], const unsigned (&a)[4], unsigned long long b) {
        static_assert(Count >= 64);
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17,"
            " %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33,"
            " %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49,"
            " %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
            "{%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
            : MX_SUMS_32(d, 0), MX_SUMS_32(d, 32)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};

} // namespace mx

#undef MX_SUMS_32
#undef MX_SUMS_16
#undef MX_SUMS_8
