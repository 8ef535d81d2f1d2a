// Hopper's warp-wide matrix instruction, mma.m16n8k16 of the PTX ISA manual, over fp16 with fp32
// sums, and how e4m3 gets into it. Any e4m3 is an fp16, NaN included, and so is any e4m3 times
// 2^-14 to 2^7. Products are exact in fp32.
//
// Lane 4g + t holds of A [16, 16] rows g (words 0 and 2) and g + 8 (words 1 and 3), of B [16, 8]
// column g, each word two k. Of D [16, 8] it holds columns 2t and 2t + 1 of row g (values 0, 1) and
// of row g + 8 (values 2, 3).
//
// Which k a word holds does not matter as long as A and B agree. So a lane takes 8 adjacent bytes
// of a row, bytes 8t to 8t + 7 of a block of 32, and the words that these become feed two mma:
// words 0 and 1 of f16x8 the first, 2 and 3 the second.
#pragma once

#include "common/target.h"

namespace mx {

// Four e4m3 to fp16: bytes 0 and 1, then 2 and 3.
MX_DEVICE void e4m3x4_to_f16(unsigned word, unsigned& low, unsigned& high) {
    asm("{\n"
        ".reg .b16 lower, upper;\n"
        "mov.b32 {lower, upper}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, lower;\n"
        "cvt.rn.f16x2.e4m3x2 %1, upper;\n"
        "}"
        : "=r"(low), "=r"(high)
        : "r"(word));
}

// Eight adjacent e4m3 of a row, as mma takes them.
struct f16x8 {
    unsigned words[4];
};

MX_DEVICE f16x8 e4m3x8_to_f16(uint2 bytes) {
    f16x8 v;
    e4m3x4_to_f16(bytes.x, v.words[0], v.words[1]);
    e4m3x4_to_f16(bytes.y, v.words[2], v.words[3]);
    return v;
}

MX_DEVICE unsigned multiply_f16x2(unsigned a, unsigned b) {
    unsigned product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

// The four, each times a factor, which both halves of a word have.
MX_DEVICE void e4m3x4_to_f16_times(unsigned word, unsigned factor, unsigned& low, unsigned& high) {
    e4m3x4_to_f16(word, low, high);
    low = multiply_f16x2(low, factor);
    high = multiply_f16x2(high, factor);
}

MX_DEVICE f16x8 multiply(f16x8 v, unsigned factor) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        v.words[i] = multiply_f16x2(v.words[i], factor);
    return v;
}

// fp16 takes a power of two of 22 along with any payload: 2^-14 to 2^7. Which block scales, times
// which constant, these are is up to the caller: e8m0 bytes lowest + 1 to lowest + 22.
constexpr unsigned kF16Scales = 22, kUsualLowest = 112; // of scales times 1

constexpr unsigned kF16x2Exponent = 0x04000400; // the lowest bits of the exponents of two fp16

// Scale i of four, none of them near the ends of e8m0.
MX_DEVICE float usual_scale(unsigned scales, int i) {
    return bits_to_float((i < 3 ? scales << (23 - 8 * i) : scales >> 1) & 0x7f800000);
}

// Where a 16-byte piece of a row of 128 bytes lies in shared memory: blocks of 32 bytes take turns,
// so that 4 rows have the same block on different banks.
MX_DEVICE unsigned swizzled_for_mma(int row, int piece) {
    return row * 128 + ((piece / 2 ^ row % 4) * 2 + piece % 2) * 16;
}
// Where a lane finds its 8 bytes of block b of its row of eight, or of eights further on.
MX_DEVICE unsigned swizzled_block_for_mma(int b, int lane) {
    return lane / 4 * 128 + (b ^ lane / 4 % 4) * 32 + lane % 4 * 8;
}

// d += a * b, 16 rows by 8 columns over 16 k.
MX_DEVICE void mma(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                   unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// d += the products of one block of 32 k: rows g and g + 8 of A, column g of B.
MX_DEVICE void add_block(float (&d)[4], const f16x8& row, const f16x8& row_8, const f16x8& column) {
    mma(d, row.words[0], row_8.words[0], row.words[1], row_8.words[1], column.words[0],
        column.words[1]);
    mma(d, row.words[2], row_8.words[2], row.words[3], row_8.words[3], column.words[2],
        column.words[3]);
}

// The products of one block alone.
MX_DEVICE void mma_block(float (&d)[4], const f16x8& row, const f16x8& row_8, const f16x8& column) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        d[i] = 0.0f;
    add_block(d, row, row_8, column);
}

} // namespace mx
