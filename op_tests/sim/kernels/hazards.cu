// Wait states, as clang provides them and as it cannot: it does not look into assembly.

typedef _Float16 f16x4 __attribute__((ext_vector_type(4)));
typedef _Float16 f16x8 __attribute__((ext_vector_type(8)));
typedef __bf16 bf16x8 __attribute__((ext_vector_type(8)));
typedef int i32x4 __attribute__((ext_vector_type(4)));
typedef int i32x16 __attribute__((ext_vector_type(16)));
typedef float f32x32 __attribute__((ext_vector_type(32)));

// A matrix product whose result is used at once: clang fills the gap with s_nop.
#define PRODUCT(name, Operand, Sum, ...)                                                           \
    KERNEL(64) name(const Operand* a, const Sum* c, float* out) {                                  \
        const int l = lane_id();                                                                   \
        const Operand x = a[l], y = a[l + 64];                                                     \
        const Sum z = c[l];                                                                        \
        const Sum sum = __VA_ARGS__;                                                               \
        out[l] = sum[0] * 3;                                                                       \
    }
#define PLAIN(name, Operand, Sum)                                                                  \
    PRODUCT(p_##name, Operand, Sum, __builtin_amdgcn_mfma_##name(x, y, z, 0, 0, 0))
PLAIN(f32_16x16x32_f16, f16x8, f32x4)
PLAIN(f32_32x32x16_f16, f16x8, f32x16)
PLAIN(f32_16x16x32_bf16, bf16x8, f32x4)
PLAIN(f32_16x16x16f16, f16x4, f32x4)
PLAIN(f32_32x32x8f16, f16x4, f32x16)
PLAIN(f32_4x4x4f16, f16x4, f32x4)
PLAIN(f32_16x16x4f16, f16x4, f32x16)
PLAIN(f32_32x32x4f16, f16x4, f32x32)
PLAIN(f32_16x16x4f32, float, f32x4)
PLAIN(f32_32x32x2f32, float, f32x16)
PLAIN(f32_4x4x1f32, float, f32x4)
PLAIN(f32_16x16x1f32, float, f32x16)
PLAIN(f32_32x32x1f32, float, f32x32)
PLAIN(f32_16x16x32_fp8_fp8, long, f32x4)
PLAIN(f32_32x32x16_fp8_bf8, long, f32x16)
PLAIN(i32_16x16x64_i8, i32x4, i32x4)
PLAIN(i32_32x32x32_i8, i32x4, i32x16)
PLAIN(i32_4x4x4i8, int, i32x4)
PLAIN(i32_16x16x32_i8, long, i32x4)
#define SCALED(shape, Sum, of_a, of_b)                                                             \
    PRODUCT(s_##shape##_##of_a##_##of_b, i32x8, Sum,                                               \
            __builtin_amdgcn_mfma_scale_f32_##shape##_f8f6f4(x, y, z, of_a, of_b, 0, 7, 0, 7))
SCALED(16x16x128, f32x4, 0, 0)
SCALED(16x16x128, f32x4, 1, 4)
SCALED(16x16x128, f32x4, 4, 4)
SCALED(16x16x128, f32x4, 2, 4)
SCALED(32x32x64, f32x16, 0, 0)
SCALED(32x32x64, f32x16, 4, 0)
SCALED(32x32x64, f32x16, 4, 4)
SCALED(32x32x64, f32x16, 3, 3)

// Assembly that owes its reader two wait states, and leaves `STATES`.
#define TOO_SOON(text)                                                                             \
    asm volatile("v_add_u32 %0, 1, %1\n" text                                                      \
                 "v_mov_b32_dpp %0, %0 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf"             \
                 : "=&v"(x)                                                                        \
                 : "v"(in[l]))
KERNEL(64) too_soon(const u32* in, u32* out) {
    const int l = lane_id();
    u32 x;
    TOO_SOON("s_nop 0\n");
    out[l] = x;
}
KERNEL(64) in_time(const u32* in, u32* out) {
    const int l = lane_id();
    u32 x;
    TOO_SOON("s_nop 1\n");
    out[l] = x;
}
KERNEL(64) not_reached(const u32* in, u32* out, int reach) {
    const int l = lane_id();
    u32 x = 7;
    if (reach)
        TOO_SOON("");
    out[l] = x;
}
