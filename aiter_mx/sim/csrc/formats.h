// Small floats: tables of what their codes mean, and rounding into them.
#pragma once
#include "machine.h"
#include "numbers.h"

static double decode_small(u32 code, int e, int m, int bias, int nan_code, int specials) {
    u32 magnitude = code & ((1u << (e + m)) - 1), exponent = magnitude >> m;
    u32 mantissa = magnitude & ((1u << m) - 1), top = (1u << e) - 1;
    double x;
    if (nan_code && magnitude == (1u << (e + m)) - 1)
        x = NAN;
    else if (specials && exponent == top)
        x = mantissa ? NAN : INFINITY;
    else if (!exponent)
        x = ldexp(mantissa, 1 - bias - m);
    else
        x = ldexp(mantissa + (1u << m), (int)exponent - bias - m);
    return code >> (e + m) & 1 ? -x : x;
}
double decoded[5][256];
float decoded_f32[5][256];
__attribute__((constructor)) static void fill_decoded(void) {
    for (u32 i = 0; i < 256; i++) {
        decoded[E4M3][i] = decode_small(i, 4, 3, 7, 1, 0);
        decoded[E5M2][i] = decode_small(i, 5, 2, 15, 0, 1);
        decoded[E2M3][i] = decode_small(i, 2, 3, 1, 0, 0);
        decoded[E3M2][i] = decode_small(i, 3, 2, 3, 0, 0);
        decoded[E2M1][i] = decode_small(i, 2, 1, 1, 0, 0);
        for (int f = 0; f < 5; f++)
            decoded_f32[f][i] = (float)decoded[f][i];
    }
}
// Round to nearest even into e2m1. There is nothing beyond 6, and no NaN: that it becomes 6 is a
// guess.
API u32 encode_fp4(double x) {
    double a = fabs(x), unit = a < 2 ? 0.5 : a < 4 ? 1 : 2, rounded = rint(a / unit) * unit;
    u32 code = !(rounded < 6) ? 7 : (u32)(rounded < 2 ? rounded * 2 : rounded + 2);
    return (signbit(x) ? 8 : 0) | code;
}
// Round to nearest even into fp8; saturates when `saturate`, else overflow is NaN or infinity.
API u32 encode_fp8(double x, Format format, int saturate) {
    int m = format == E4M3 ? 3 : 2, bias = format == E4M3 ? 7 : 15;
    double largest = format == E4M3 ? 448.0 : 57344.0;
    u32 sign = signbit(x) ? 0x80 : 0;
    if (isnan(x))
        return sign | 0x7f;
    double a = fabs(x);
    if (isinf(a))
        return saturate ? sign | (format == E4M3 ? 0x7e : 0x7b)
                        : sign | (format == E4M3 ? 0x7f : 0x7c);
    int exponent = a == 0 ? 1 - bias : ilogb(a);
    if (exponent < 1 - bias)
        exponent = 1 - bias;
    double unit = ldexp(1, exponent - m), rounded = rint(a / unit) * unit;
    if (rounded > largest)
        return sign | (format == E4M3 ? (saturate ? 0x7e : 0x7f) : (saturate ? 0x7b : 0x7c));
    if (rounded == 0)
        return sign;
    exponent = ilogb(rounded);
    if (exponent < 1 - bias)
        return sign | (u32)(rounded / ldexp(1, 1 - bias - m));
    u32 mantissa = (u32)(rounded / ldexp(1, exponent - m)) - (1u << m);
    return sign | (u32)(exponent + bias) << m | mantissa;
}

__thread int saturating, finite_scales, sum_order;
__thread u32 perturbing;
API void set_float_mode(u32 mode) {
    saturating = mode >> 23 & 1;
#if defined(__x86_64__)
    u32 csr = __builtin_ia32_stmxcsr() & ~0x8040u;
    if (!(mode >> 5 & 1))
        csr |= 0x8000; // results flushed
    if (!(mode >> 4 & 1))
        csr |= 0x0040; // sources flushed
    __builtin_ia32_ldmxcsr(csr);
#endif
}
