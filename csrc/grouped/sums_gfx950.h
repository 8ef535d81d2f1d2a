// Sums of 16 x 16 products in accumulation registers that the source names: a[4 i .. 4 i + 3] is
// fragment i. LLVM cannot keep 128 or 256 sums of a lane where they are: with no register to spare
// it moves them about, by way of memory. So it is not told of them, but that all are in use.
//
// What it does not know of it cannot protect: settle() waits until the last product is in its
// registers (ISA manual, section 4.5: 8 passes, and a margin), and no vector instruction may write
// an operand in the two wait states before the product that takes it. The simulator checks both.
#pragma once

#include "gfx950/mfma.h"

namespace mx {

#define MX_TEN(t)                                                                                  \
    "a" #t "0", "a" #t "1", "a" #t "2", "a" #t "3", "a" #t "4", "a" #t "5", "a" #t "6",            \
        "a" #t "7", "a" #t "8", "a" #t "9"
#define MX_ALL_SUMS                                                                                \
    MX_TEN(), MX_TEN(1), MX_TEN(2), MX_TEN(3), MX_TEN(4), MX_TEN(5), MX_TEN(6), MX_TEN(7),         \
        MX_TEN(8), MX_TEN(9), MX_TEN(10), MX_TEN(11), MX_TEN(12), MX_TEN(13), MX_TEN(14),          \
        MX_TEN(15), MX_TEN(16), MX_TEN(17), MX_TEN(18), MX_TEN(19), MX_TEN(20), MX_TEN(21),        \
        MX_TEN(22), MX_TEN(23), MX_TEN(24), "a250", "a251", "a252", "a253", "a254", "a255"

// Fragments by their numbers, which must be constants once loops are unrolled. At most 64.
template <int Count>
struct NamedSums {
    // No value of the compiler's lives in these registers across this.
    MX_MEMBER static void reserve() { asm volatile("" ::: "memory", MX_ALL_SUMS); }

#define MX_ADD(before, to)                                                                         \
    asm volatile(before "v_mfma_scale_f32_16x16x128_f8f6f4 a[%c4:%c5], %0, %1, " to ", %2, %3 "    \
                        "op_sel_hi:[0,0,0]"                                                        \
                 :                                                                                 \
                 : "v"(a), "v"(b), "v"(a_scales), "v"(b_scales), "i"(4 * i), "i"(4 * i + 3)        \
                 : "memory")
    // A product of operands that come from loads; the first begins the sum.
    template <bool IsFirst>
    MX_MEMBER static void add(int i, u32x8 a, unsigned a_scales, u32x8 b, unsigned b_scales) {
        if constexpr (IsFirst)
            MX_ADD("", "0");
        else
            MX_ADD("", "a[%c4:%c5]");
    }
    // Of operands that vector instructions may have written just now.
    MX_MEMBER static void add_fresh(int i, u32x8 a, unsigned a_scales, u32x8 b, unsigned b_scales) {
        MX_ADD("s_nop 1\n\t", "a[%c4:%c5]");
    }
#undef MX_ADD
    MX_MEMBER static void settle() { asm volatile("s_nop 15\n\ts_nop 7" ::: "memory"); }
    MX_MEMBER static f32x4 read(int i) {
        return {read_one(4 * i), read_one(4 * i + 1), read_one(4 * i + 2), read_one(4 * i + 3)};
    }

  private:
    MX_MEMBER static float read_one(int i) {
        float part;
        asm volatile("v_accvgpr_read_b32 %0, a%c1" : "=v"(part) : "i"(i) : "memory");
        return part;
    }
};

// The same, in registers of the compiler's choice, for as many as it can hold.
template <int Count>
struct PlainSums {
    f32x4 of[Count];

    MX_MEMBER static void reserve() {}
    template <bool IsFirst>
    MX_MEMBER void add(int i, u32x8 a, unsigned a_scales, u32x8 b, unsigned b_scales) {
        of[i] = multiply_scaled<0>(a, a_scales, b, b_scales, IsFirst ? f32x4{} : of[i]);
        // LLVM would move the product, which touches no memory, away from the reads it is to hide.
        asm volatile("" : "+v"(of[i])::"memory");
    }
    MX_MEMBER void add_fresh(int i, u32x8 a, unsigned a_scales, u32x8 b, unsigned b_scales) {
        add<false>(i, a, a_scales, b, b_scales);
    }
    MX_MEMBER static void settle() {}
    MX_MEMBER f32x4 read(int i) const { return of[i]; }
};

template <bool IsNamed, int Count>
struct SumsOf {
    using type = NamedSums<Count>;
};
template <int Count>
struct SumsOf<false, Count> {
    using type = PlainSums<Count>;
};

#undef MX_ALL_SUMS
#undef MX_TEN

} // namespace mx
