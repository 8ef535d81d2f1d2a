// Number formats and the arithmetic that C has no operator for.
#pragma once
#include "core.h"
#include <math.h>
#include <stdlib.h>

INLINE float f16_to_f32(u16 x) {
    _Float16 h;
    memcpy(&h, &x, 2);
    return (float)h;
}
INLINE u16 f64_to_f16(double x) {
    _Float16 h = (_Float16)x;
    u16 bits;
    memcpy(&bits, &h, 2);
    return bits;
}
INLINE u16 f32_to_f16(float x) {
    _Float16 h = (_Float16)x;
    u16 bits;
    memcpy(&bits, &h, 2);
    return bits;
}
INLINE u16 f32_to_f16_rtz(float x) {
    u16 h = f32_to_f16(x);
    float back = f16_to_f32(h);
    return fabsf(back) > fabsf(x) && !isnan(x) && !isinf(x) ? (u16)(h - 1) : h;
}
INLINE u16 f32_to_bf16(float x) {
    u32 u = bits32(x);
    u32 rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
    return (u16)((u & 0x7fffffff) > 0x7f800000 ? (u >> 16 | 0x40) : rounded);
}

// A small float of 1 + e + m bits. `nan_code` is the e4m3 rule (all ones is NaN, no infinity);
// `specials` the IEEE one (top exponent is infinity and NaN); fp6 and fp4 have neither.
typedef enum { E4M3, E5M2, E2M3, E3M2, E2M1 } Format;
extern double decoded[5][256];
extern float decoded_f32[5][256];
u32 encode_fp4(double x);
u32 encode_fp8(double x, Format format, int saturate);

extern __thread int saturating;    // MODE.FP16_OVFL: conversions to fp8 saturate
extern __thread int finite_scales; // whether e8m0 255 is 2^128, not NaN
extern __thread int sum_order;     // of the sums inside a matrix instruction
extern __thread u32 perturbing;    // approximations are off by up to one ulp, by this seed

// v_rcp, v_rsq, v_sqrt, v_exp and v_log of f32 take denormals for zero and give none, in any mode.
INLINE float flushed(float x) { return f32(bits32(x) & (fabsf(x) < 0x1p-126f ? 1u << 31 : ~0u)); }
// One of the three results that an error of one ulp allows, by seed and value.
INLINE float approximate(float x) {
    u32 u = bits32(flushed(x)), e = u >> 23 & 255, hash = (u ^ perturbing) * 0x9e3779b1u;
    u32 change = (hash >> 16) % 3 - 1;
    return f32(perturbing && e && e != 255 ? u + change : u);
}

// Of f64 hardware promises 2^29 ulp: f32's bits of the mantissa, and Newton steps for the others.
INLINE double coarse(double x) { return isnan(x) ? x : f64(bits64(x) & ~0ull << 29); }
// Turns, not radians: beyond 256 of them hardware gives what it gives for 0.
INLINE float of_turns(double (*wave)(double), float x) {
    return isfinite(x) ? (float)wave(fabsf(x) <= 256 ? 6.283185307179586 * x : 0) : NAN;
}
// The part above a whole number, which rounding must not make 1; NaN of what is not finite.
INLINE float fract_f32(float x) {
    float part = x - floorf(x);
    return part >= 1 ? 0x1.fffffep-1f : part;
}
INLINE double fract_f64(double x) {
    double part = x - floor(x);
    return part >= 1 ? 0x1.fffffffffffffp-1 : part;
}
// Rounded to odd, so that rounding once more, to f16, gives what rounding once would have.
INLINE float odd_f32(double x) {
    float nearest = (float)x;
    u32 u = bits32(nearest) - (fabs((double)nearest) > fabs(x));
    return nearest == x || isnan(x) ? nearest : f32(u | 1);
}

// The scale of v_cvt_scalef32_*: the exponent of an f32, its mantissa ignored.
INLINE double scale_of_f32(u32 bits) {
    u32 e = bits >> 23 & 0xff;
    return e == 0xff ? NAN : ldexp(1, (int)e - 127);
}
INLINE double scale_of_e8m0(u32 e) {
    return e == 0xff && !finite_scales ? NAN : f64((u64)(e + 1023 - 127) << 52);
}

INLINE float min_f32(float a, float b) {
    return isnan(a) ? b : isnan(b) ? a : a == b ? (signbit(a) ? a : b) : a < b ? a : b;
}
INLINE float max_f32(float a, float b) {
    return isnan(a) ? b : isnan(b) ? a : a == b ? (signbit(a) ? b : a) : a > b ? a : b;
}
INLINE float max3_f32(float a, float b, float c) { return max_f32(max_f32(a, b), c); }
INLINE float min3_f32(float a, float b, float c) { return min_f32(min_f32(a, b), c); }
INLINE float med3_f32(float a, float b, float c) {
    if (isnan(a) || isnan(b) || isnan(c))
        return min3_f32(a, b, c);
    return max_f32(min_f32(a, b), min_f32(max_f32(a, b), c));
}
#define MEDIAN(type)                                                                               \
    INLINE type med3_##type(type a, type b, type c) {                                              \
        type low = a < b ? a : b, high = a < b ? b : a;                                            \
        return c < low ? low : c > high ? high : c;                                                \
    }
MEDIAN(u32)
MEDIAN(i32)
INLINE float clamp_f32(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; } // NaN gives 0
INLINE double clamp_f64(double x) { return x > 0 ? (x < 1 ? x : 1.0) : 0.0; }

INLINE i32 to_i32(double x) {
    return isnan(x) ? 0 : x >= 2147483647.0 ? INT32_MAX : x <= -2147483648.0 ? INT32_MIN : (i32)x;
}
INLINE u32 to_u32(double x) {
    return isnan(x) || x <= 0 ? 0 : x >= 4294967295.0 ? UINT32_MAX : (u32)x;
}
INLINE u32 saturate(i64 x, i64 low, i64 high) { return (u32)(x < low ? low : x > high ? high : x); }

// v_cmp_class: bit 0 signalling NaN, 1 quiet NaN, 2-9 -inf -normal -denormal -0 +0 +denormal
// +normal +inf.
INLINE u32 class_of(double x, int quiet, int denormal) {
    if (isnan(x))
        return quiet ? 2 : 1;
    int negative = signbit(x) != 0;
    if (isinf(x))
        return negative ? 4 : 0x200;
    if (x == 0)
        return negative ? 0x20 : 0x40;
    if (denormal)
        return negative ? 0x10 : 0x80;
    return negative ? 8 : 0x100;
}
INLINE u32 class_f32(u32 bits) {
    u32 e = bits >> 23 & 0xff;
    return class_of(f32(bits), bits >> 22 & 1, e == 0);
}
INLINE u32 class_f16(u32 bits) {
    u32 e = bits >> 10 & 0x1f;
    return class_of(f16_to_f32((u16)bits), bits >> 9 & 1, e == 0);
}
INLINE u32 class_f64(u64 bits) {
    u64 e = bits >> 52 & 0x7ff;
    return class_of(f64(bits), bits >> 51 & 1, e == 0);
}

// Division: scale both into range, divide by Newton steps, undo, patch the special cases.
#define EXP32(x) ((int)(bits32(x) >> 23 & 0xff))
#define EXP64(x) ((int)(bits64(x) >> 52 & 0x7ff))
#define DIVISION(T, name, EXP, LD, FAR, STEP, SMALL, TOP, UNDER)                                   \
    INLINE T div_scale_##name(T s0, T s1, T s2, u32* flag) {                                       \
        int e1 = EXP(s1), e2 = EXP(s2);                                                            \
        T least = LD((T)1, 2 - TOP / 2 - 1);                                                       \
        *flag = 0;                                                                                 \
        if (s1 == 0 || s2 == 0)                                                                    \
            return (T)NAN;                                                                         \
        int one_is_denormal = fabs((double)((T)1 / s1)) < (double)least;                           \
        int ratio_is_denormal = fabs((double)(s2 / s1)) < (double)least;                           \
        if (e2 - e1 >= FAR) {                                                                      \
            *flag = 1;                                                                             \
            return s0 == s1 ? LD(s0, STEP) : s0;                                                   \
        }                                                                                          \
        if (e1 == 0)                                                                               \
            return LD(s0, STEP);                                                                   \
        if (one_is_denormal && ratio_is_denormal) {                                                \
            *flag = 1;                                                                             \
            return s0 == s1 ? LD(s0, STEP) : s0;                                                   \
        }                                                                                          \
        if (one_is_denormal)                                                                       \
            return LD(s0, -STEP);                                                                  \
        if (ratio_is_denormal) {                                                                   \
            *flag = 1;                                                                             \
            return s0 == s2 ? LD(s0, STEP) : s0;                                                   \
        }                                                                                          \
        return e2 <= SMALL ? LD(s0, STEP) : s0;                                                    \
    }                                                                                              \
    INLINE T div_fixup_##name(T s0, T s1, T s2) {                                                  \
        int negative = (signbit(s1) != 0) ^ (signbit(s2) != 0);                                    \
        T x;                                                                                       \
        if (isnan(s2))                                                                             \
            return s2;                                                                             \
        if (isnan(s1))                                                                             \
            return s1;                                                                             \
        if ((s1 == 0 && s2 == 0) || (isinf(s1) && isinf(s2)))                                      \
            return -(T)NAN;                                                                        \
        if (s1 == 0 || isinf(s2))                                                                  \
            x = (T)INFINITY;                                                                       \
        else if (isinf(s1) || s2 == 0)                                                             \
            x = 0;                                                                                 \
        else if (EXP(s2) - EXP(s1) < UNDER)                                                        \
            x = 0;                                                                                 \
        else                                                                                       \
            x = (T)fabs((double)s0);                                                               \
        return negative ? -x : x;                                                                  \
    }
// Half has no scaling step, so nothing to undo for numbers that are far apart.
#define EXP_ALIKE(x) 0
DIVISION(float, f16, EXP_ALIKE, ldexpf, 1, 0, -1, 256, 0)
DIVISION(float, f32, EXP32, ldexpf, 96, 64, 23, 256, -150)
DIVISION(double, f64, EXP64, ldexp, 768, 128, 53, 2048, -1075)

INLINE float scaled_f32(double x, u32 scale) { return (float)(x * scale_of_f32(scale)); }
INLINE u16 scaled_f16(double x, u32 scale) { return f64_to_f16(x * scale_of_f32(scale)); }
INLINE u16 scaled_bf16(double x, u32 scale) {
    return f32_to_bf16((float)(x * scale_of_f32(scale)));
}
INLINE u32 unscaled(float x, u32 scale, Format format) {
    double y = (double)x / scale_of_f32(scale);
    return format == E2M1 ? encode_fp4(y) : encode_fp8(y, format, saturating);
}
// Selectors 0-3 are bytes of b, 4-7 of a, 8-11 the sign of a 16-bit half, 12 zero, above 255.
INLINE u32 permute_bytes(u32 a, u32 b, u32 selectors) {
    u64 both = (u64)a << 32 | b;
    u32 out = 0;
    for (int i = 0; i < 4; i++) {
        u32 s = selectors >> (8 * i) & 255, byte;
        if (s >= 13)
            byte = 255;
        else if (s == 12)
            byte = 0;
        else if (s >= 8)
            byte = both >> (16 * (s - 8) + 15) & 1 ? 255 : 0;
        else
            byte = (u32)(both >> (8 * s)) & 255;
        out |= byte << (8 * i);
    }
    return out;
}
// Bit 4a + 2b + c of the table is the result.
INLINE u32 bitop3(u32 a, u32 b, u32 c, u32 table) {
    u32 out = 0;
    for (u32 i = 0; i < 8; i++)
        if (table >> i & 1)
            out |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return out;
}
INLINE u32 dot_i8(u32 a, u32 b) {
    i32 sum = 0;
    for (int i = 0; i < 4; i++)
        sum += (i8)(a >> (8 * i)) * (i8)(b >> (8 * i));
    return (u32)sum;
}
INLINE float dot_f16(u32 a, u32 b, float c) {
    return (float)((double)f16_to_f32((u16)a) * f16_to_f32((u16)b) +
                   (double)f16_to_f32((u16)(a >> 16)) * f16_to_f32((u16)(b >> 16)) + c);
}
INLINE float dot_bf16(u32 a, u32 b, float c) {
    return (float)((double)f32(a << 16) * f32(b << 16) +
                   (double)f32(a & 0xffff0000u) * f32(b & 0xffff0000u) + c);
}
INLINE i64 signed24(u32 x) { return (i32)(x << 8) >> 8; }
INLINE u32 insert_byte(u32 word, u32 at, u32 byte) {
    u32 shift = 8 * (at & 3);
    return (word & ~(255u << shift)) | byte << shift;
}
INLINE u32 sad_u8(u32 a, u32 b) {
    u32 sum = 0;
    for (int i = 0; i < 32; i += 8)
        sum += (u32)abs((int)(a >> i & 255) - (int)(b >> i & 255));
    return sum;
}
