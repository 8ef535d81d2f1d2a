"""Vector arithmetic: one lane at a time."""

from __future__ import annotations

from aiter_mx.sim.isa.tables import Rule, family, table

_F32 = """
v_add_f32 f ff a + b
v_sub_f32 f ff a - b
v_subrev_f32 f ff b - a
v_mul_f32 f ff a * b
v_mul_legacy_f32 f ff a == 0 || b == 0 ? 0 : a * b
v_fma_f32 f fff fmaf(a, b, c)
v_mad_f32 f fff a * b + c
v_fmac_f32 f ff fmaf(a, b, d)
v_fmamk_f32 f fff fmaf(a, b, c)
v_fmaak_f32 f fff fmaf(a, b, c)
v_min_f32 f ff min_f32(a, b)
v_max_f32 f ff max_f32(a, b)
v_min3_f32 f fff min3_f32(a, b, c)
v_max3_f32 f fff max3_f32(a, b, c)
v_minimum3_f32 f fff isnan(a) || isnan(b) || isnan(c) ? NAN : min3_f32(a, b, c)
v_maximum3_f32 f fff isnan(a) || isnan(b) || isnan(c) ? NAN : max3_f32(a, b, c)
v_med3_f32 f fff med3_f32(a, b, c)
v_rcp_f32 f f approximate(1.0f / flushed(a))
v_rcp_iflag_f32 f f approximate(1.0f / flushed(a))
v_rsq_f32 f f approximate(1.0f / sqrtf(flushed(a)))
v_sqrt_f32 f f approximate(sqrtf(flushed(a)))
v_exp_f32 f f approximate(exp2f(flushed(a)))
v_log_f32 f f approximate(log2f(flushed(a)))
v_sin_f32 f f of_turns(sin, a)
v_cos_f32 f f of_turns(cos, a)
v_floor_f32 f f floorf(a)
v_ceil_f32 f f ceilf(a)
v_trunc_f32 f f truncf(a)
v_rndne_f32 f f rintf(a)
v_fract_f32 f f fract_f32(a)
v_ldexp_f32 f fi ldexpf(a, b)
v_frexp_mant_f32 f f isnan(a) || isinf(a) ? a : frexpf(a, &(int){0})
v_frexp_exp_i32_f32 i f isnan(a) || isinf(a) || a == 0 ? 0 : ilogbf(a) + 1
v_div_scale_f32 fk fff div_scale_f32(a, b, c, &k)
v_div_fmas_f32 f fffm m ? fmaf(a, b, c) * 0x1p32f : fmaf(a, b, c)
v_div_fixup_f32 f fff div_fixup_f32(a, b, c)
"""

_F64 = """
v_add_f64 d dd a + b
v_mul_f64 d dd a * b
v_fma_f64 d ddd fma(a, b, c)
v_fmac_f64 d dd fma(a, b, d)
v_min_f64 d dd fmin(a, b)
v_max_f64 d dd fmax(a, b)
v_rcp_f64 d d coarse(1.0 / a)
v_rsq_f64 d d coarse(1.0 / sqrt(a))
v_sqrt_f64 d d coarse(sqrt(a))
v_floor_f64 d d floor(a)
v_ceil_f64 d d ceil(a)
v_trunc_f64 d d trunc(a)
v_rndne_f64 d d rint(a)
v_fract_f64 d d fract_f64(a)
v_ldexp_f64 d di ldexp(a, b)
v_frexp_mant_f64 d d isnan(a) || isinf(a) ? a : frexp(a, &(int){0})
v_frexp_exp_i32_f64 i d isnan(a) || isinf(a) || a == 0 ? 0 : ilogb(a) + 1
v_div_scale_f64 dk ddd div_scale_f64(a, b, c, &k)
v_div_fmas_f64 d dddm m ? fma(a, b, c) * 0x1p64 : fma(a, b, c)
v_div_fixup_f64 d ddd div_fixup_f64(a, b, c)
"""

_F16 = """
v_add_f16 h hh a + b
v_sub_f16 h hh a - b
v_subrev_f16 h hh b - a
v_mul_f16 h hh a * b
v_fma_f16 h hhh odd_f32(fma((double)a, b, c))
v_fmac_f16 h hh odd_f32(fma((double)a, b, d))
v_min_f16 h hh min_f32(a, b)
v_max_f16 h hh max_f32(a, b)
v_med3_f16 h hhh med3_f32(a, b, c)
v_min3_f16 h hhh min3_f32(a, b, c)
v_max3_f16 h hhh max3_f32(a, b, c)
v_rcp_f16 h h 1.0f / a
v_rsq_f16 h h 1.0f / sqrtf(a)
v_sqrt_f16 h h sqrtf(a)
v_exp_f16 h h exp2f(a)
v_log_f16 h h log2f(a)
v_floor_f16 h h floorf(a)
v_ceil_f16 h h ceilf(a)
v_trunc_f16 h h truncf(a)
v_rndne_f16 h h rintf(a)
v_ldexp_f16 h hx ldexpf(a, b)
v_frexp_mant_f16 h h isnan(a) || isinf(a) ? a : frexpf(a, &(int){0})
v_frexp_exp_i16_f16 w h isnan(a) || isinf(a) || a == 0 ? 0 : (u32)(ilogbf(a) + 1)
v_sin_f16 h h of_turns(sin, a)
v_cos_f16 h h of_turns(cos, a)
v_div_fixup_f16 h hhh div_fixup_f16(a, b, c)
"""

_CONVERT = """
v_cvt_f32_i32 f i (float)a
v_cvt_f32_u32 f u (float)a
v_cvt_i32_f32 i f to_i32(a)
v_cvt_u32_f32 u f to_u32(a)
v_cvt_flr_i32_f32 i f to_i32(floorf(a))
v_cvt_rpi_i32_f32 i f to_i32(floorf(a + 0.5f))
v_cvt_f64_i32 d i (double)a
v_cvt_f64_u32 d u (double)a
v_cvt_i32_f64 i d to_i32(a)
v_cvt_u32_f64 u d to_u32(a)
v_cvt_f32_f64 f d (float)a
v_cvt_f64_f32 d f (double)a
v_cvt_f16_f32 h f a
v_cvt_f32_f16 f h a
v_cvt_f16_u16 h w (float)a
v_cvt_f16_i16 h x (float)a
v_cvt_u16_f16 w h saturate(to_u32(a), 0, 65535)
v_cvt_i16_f16 w h saturate(to_i32(a), -32768, 32767)
v_cvt_f32_bf16 f b a
v_cvt_f32_ubyte0 f u (float)(a & 255)
v_cvt_f32_ubyte1 f u (float)(a >> 8 & 255)
v_cvt_f32_ubyte2 f u (float)(a >> 16 & 255)
v_cvt_f32_ubyte3 f u (float)(a >> 24)
v_cvt_pkrtz_f16_f32 u ff f32_to_f16_rtz(a) | (u32)f32_to_f16_rtz(b) << 16
v_cvt_pk_f16_f32 u ff f32_to_f16(a) | (u32)f32_to_f16(b) << 16
v_cvt_pk_bf16_f32 u ff f32_to_bf16(a) | (u32)f32_to_bf16(b) << 16
v_pack_b32_f16 u hh f32_to_f16(a) | (u32)f32_to_f16(b) << 16
v_cvt_pk_u16_u32 u uu saturate(a, 0, 65535) | saturate(b, 0, 65535) << 16
v_cvt_pk_i16_i32 u ii (saturate(a, -32768, 32767) & 0xffff) | saturate(b, -32768, 32767) << 16
v_cvt_pk_u8_f32 u fuu insert_byte(c, b, saturate(to_i32(rintf(a)), 0, 255))
v_cvt_f32_fp8 f u decoded_f32[E4M3][a & 255]
v_cvt_f32_bf8 f u decoded_f32[E5M2][a & 255]
v_cvt_pk_f32_fp8 F w decoded_f32[E4M3][a & 255]; r2 = decoded_f32[E4M3][a >> 8]
v_cvt_pk_f32_bf8 F w decoded_f32[E5M2][a & 255]; r2 = decoded_f32[E5M2][a >> 8]
v_cvt_pk_fp8_f32 W ff encode_fp8(a, E4M3, saturating) | encode_fp8(b, E4M3, saturating) << 8
v_cvt_pk_bf8_f32 W ff encode_fp8(a, E5M2, saturating) | encode_fp8(b, E5M2, saturating) << 8
"""

# `LOW` and `HIGH` are the two small numbers of the source, `16` the half-width type it packs.
_DECODE = """
v_cvt_scalef32_pk_f32_{t} F {s}u scaled_f32(LOW, b); r2 = scaled_f32(HIGH, b)
v_cvt_scalef32_pk_f16_{t} u {s}u scaled_f16(LOW, b) | (u32)scaled_f16(HIGH, b) << 16
v_cvt_scalef32_pk_bf16_{t} u {s}u scaled_bf16(LOW, b) | (u32)scaled_bf16(HIGH, b) << 16
"""
_ENCODE = """
v_cvt_scalef32_pk_{t}_f32 {d} ffu unscaled(a, c, {T}) | unscaled(b, c, {T}) << {bits}
v_cvt_scalef32_pk_{t}_f16 {d} uu unscaled(F16L, b, {T}) | unscaled(F16H, b, {T}) << {bits}
v_cvt_scalef32_pk_{t}_bf16 {d} uu unscaled(BF16L, b, {T}) | unscaled(BF16H, b, {T}) << {bits}
"""
_ENCODE = (
    _ENCODE.replace("BF16L", "f32(a << 16)").replace("BF16H", "f32(a & 0xffff0000u)")
    .replace("F16L", "f16_to_f32((u16)a)").replace("F16H", "f16_to_f32((u16)(a >> 16))")
)  # fmt: skip
_SCALED_CONVERT = "\n".join(
    (
        family(
            _DECODE.replace("LOW", "decoded[{T}][a & {mask}]").replace(
                "HIGH", "decoded[{T}][a >> {bits}]"
            ),
            t="fp8|bf8|fp4",
            T="E4M3|E5M2|E2M1",
            s="w|w|y",
            mask="255|255|15",
            bits="8|8|4",
        ),
        family(_ENCODE, t="fp8|bf8|fp4", T="E4M3|E5M2|E2M1", d="W|W|Y", bits="8|8|4"),
        family(
            """
v_cvt_scalef32_f32_{t} f yu scaled_f32(decoded[{T}][a], b)
v_cvt_scalef32_f16_{t} H yu (float)(decoded[{T}][a] * scale_of_f32(b))
""",
            t="fp8|bf8",
            T="E4M3|E5M2",
        ),
    )
)

_INTEGER = """
v_mov_b32 u u a
v_mov_b64 U U a
v_accvgpr_read_b32 u u a
v_accvgpr_write_b32 u u a
v_accvgpr_mov_b32 u u a
v_not_b32 u u ~a
v_and_b32 u uu a & b
v_or_b32 u uu a | b
v_xor_b32 u uu a ^ b
v_xnor_b32 u uu ~(a ^ b)
v_and_or_b32 u uuu (a & b) | c
v_or3_b32 u uuu a | b | c
v_add_u32 u uu a + b
v_sub_u32 u uu a - b
v_subrev_u32 u uu b - a
v_add3_u32 u uuu a + b + c
v_add_i32 u uu a + b
v_sub_i32 u uu a - b
v_add_co_u32 uk uu a + b; k = r < a
v_sub_co_u32 uk uu a - b; k = a < b
v_subrev_co_u32 uk uu b - a; k = b < a
v_addc_co_u32 uk uum a + b + m; k = (u64)a + b + m >> 32 != 0
v_subb_co_u32 uk uum a - b - m; k = (u64)a < (u64)b + m
v_subbrev_co_u32 uk uum b - a - m; k = (u64)b < (u64)a + m
v_lshlrev_b32 u uu b << (a & 31)
v_lshrrev_b32 u uu b >> (a & 31)
v_ashrrev_i32 i ui b >> (a & 31)
v_lshlrev_b64 U uU b << (a & 63)
v_lshrrev_b64 U uU b >> (a & 63)
v_ashrrev_i64 I uI b >> (a & 63)
v_lshl_add_u32 u uuu (a << (b & 31)) + c
v_add_lshl_u32 u uuu (a + b) << (c & 31)
v_lshl_or_b32 u uuu (a << (b & 31)) | c
v_xad_u32 u uuu (a ^ b) + c
v_lshl_add_u64 U UuU (a << (b & 7)) + c
v_mul_lo_u32 u uu a * b
v_mul_hi_u32 u uu (u32)((u64)a * b >> 32)
v_mul_hi_i32 u ii (u32)((i64)a * b >> 32)
v_mul_u32_u24 u uu (a & 0xffffff) * (b & 0xffffff)
v_mul_hi_u32_u24 u uu (u32)((u64)(a & 0xffffff) * (b & 0xffffff) >> 32)
v_mul_i32_i24 u uu (u32)(signed24(a) * signed24(b))
v_mul_hi_i32_i24 u uu (u32)(signed24(a) * signed24(b) >> 32)
v_mad_u32_u24 u uuu (a & 0xffffff) * (b & 0xffffff) + c
v_mad_i32_i24 u uuu (u32)(signed24(a) * signed24(b)) + c
v_mad_u64_u32 Uk uuU (u64)a * b + c; k = r < c
v_mad_i64_i32 Ik iiI (i64)a * b + c; k = __builtin_add_overflow((i64)a * b, c, &(i64){0})
v_min_u32 u uu a < b ? a : b
v_max_u32 u uu a > b ? a : b
v_min_i32 i ii a < b ? a : b
v_max_i32 i ii a > b ? a : b
v_min3_u32 u uuu a < b ? (a < c ? a : c) : (b < c ? b : c)
v_max3_u32 u uuu a > b ? (a > c ? a : c) : (b > c ? b : c)
v_min3_i32 i iii a < b ? (a < c ? a : c) : (b < c ? b : c)
v_max3_i32 i iii a > b ? (a > c ? a : c) : (b > c ? b : c)
v_med3_u32 u uuu med3_u32(a, b, c)
v_med3_i32 i iii med3_i32(a, b, c)
v_bfe_u32 u uuu (u32)extract(a, b & 31, c & 31)
v_bfe_i32 u uuu (u32)extract_signed(a, b & 31, c & 31, 32)
v_bfi_b32 u uuu (a & b) | (~a & c)
v_bfm_b32 u uu ((1u << (a & 31)) - 1) << (b & 31)
v_bfrev_b32 u u reverse_bits(a)
v_ffbh_u32 u u a ? (u32)__builtin_clz(a) : ~0u
v_ffbl_b32 u u a ? (u32)__builtin_ctz(a) : ~0u
v_bcnt_u32_b32 u uu (u32)__builtin_popcount(a) + b
v_mbcnt_lo_u32_b32 u uu (u32)__builtin_popcount(a & (l >= 32 ? ~0u : (1u << l) - 1)) + b
v_mbcnt_hi_u32_b32 u uu (u32)__builtin_popcount(l < 32 ? 0 : a & ((1u << (l - 32)) - 1)) + b
v_alignbit_b32 u uuu (u32)(((u64)a << 32 | b) >> (c & 31))
v_alignbyte_b32 u uuu (u32)(((u64)a << 32 | b) >> (8 * (c & 3)))
v_perm_b32 u uuu permute_bytes(a, b, c)
v_cndmask_b32 u uum m ? b : a
v_sad_u8 u uuu sad_u8(a, b) + c
v_sad_u32 u uuu (a > b ? a - b : b - a) + c
v_add_u16 w ww a + b
v_sub_u16 w ww a - b
v_subrev_u16 w ww b - a
v_add_i16 w ww a + b
v_sub_i16 w ww a - b
v_mul_lo_u16 w ww a * b
v_mad_u16 w www a * b + c
v_mad_i16 w www a * b + c
v_mad_legacy_u16 w www a * b + c
v_min_u16 w ww a < b ? a : b
v_max_u16 w ww a > b ? a : b
v_min_i16 w xx (u32)(a < b ? a : b)
v_max_i16 w xx (u32)(a > b ? a : b)
v_min3_u16 w www a < b ? (a < c ? a : c) : (b < c ? b : c)
v_max3_u16 w www a > b ? (a > c ? a : c) : (b > c ? b : c)
v_med3_u16 w www med3_u32(a, b, c)
v_min3_i16 w xxx (u32)(a < b ? (a < c ? a : c) : (b < c ? b : c))
v_max3_i16 w xxx (u32)(a > b ? (a > c ? a : c) : (b > c ? b : c))
v_med3_i16 w xxx (u32)med3_i32(a, b, c)
v_lshlrev_b16 w ww b << (a & 15)
v_lshrrev_b16 w ww b >> (a & 15)
v_ashrrev_i16 w wx (u32)(b >> (a & 15))
v_mad_u32_u16 u wwu a * b + c
v_mad_i32_i16 u xxu (u32)(a * b) + c
v_bitop3_b32 u uuu bitop3(a, b, c, BITOP3)
v_bitop3_b16 w www bitop3(a, b, c, BITOP3)
v_dot4_i32_i8 u uuu dot_i8(a, b) + c
v_dot4c_i32_i8 u uu dot_i8(a, b) + d
v_dot2_f32_f16 f uuf dot_f16(a, b, c)
v_dot2c_f32_f16 f uu dot_f16(a, b, d)
v_dot2_f32_bf16 f uuf dot_bf16(a, b, c)
v_dot2c_f32_bf16 f uu dot_bf16(a, b, d)
"""

VALU: dict[str, Rule] = table("\n".join((_F32, _F64, _F16, _CONVERT, _SCALED_CONVERT, _INTEGER)))

# Conversions of two values into one register; code that wants one leaves the other undefined.
PACKS = {
    name
    for name, rule in VALU.items()
    if name.startswith(("v_cvt_pk", "v_cvt_scalef32_pk")) and rule.sources[:2] in ("ff", "uu", "ii")
}
# The low half of the result depends on the low halves of the sources alone.
LOW_FROM_LOW = {"v_mad_u64_u32", "v_mad_i64_i32", "v_lshl_add_u64", "v_lshlrev_b64", "v_mov_b64"}
# 16-bit instructions that keep the register's other half; the rest clear it (gfx9).
KEEPS_HIGH = {"v_fma_f16", "v_div_fixup_f16", "v_mad_u16", "v_mad_i16", "v_bitop3_b16"} | {
    f"v_{name}3_{kind}16" for name in ("min", "max", "med") for kind in "fiu"
}

PACKED: dict[str, Rule] = table("""
v_pk_fma_f32 f fff fmaf(a, b, c)
v_pk_mul_f32 f ff a * b
v_pk_add_f32 f ff a + b
v_pk_mov_b32 u uu half ? b : a
v_pk_fma_f16 h hhh odd_f32(fma((double)a, b, c))
v_pk_add_f16 h hh a + b
v_pk_mul_f16 h hh a * b
v_pk_min_f16 h hh min_f32(a, b)
v_pk_max_f16 h hh max_f32(a, b)
v_pk_minimum3_f16 h hhh isnan(a) || isnan(b) || isnan(c) ? NAN : min3_f32(a, b, c)
v_pk_maximum3_f16 h hhh isnan(a) || isnan(b) || isnan(c) ? NAN : max3_f32(a, b, c)
v_pk_add_u16 w ww a + b
v_pk_sub_u16 w ww a - b
v_pk_add_i16 w ww a + b
v_pk_sub_i16 w ww a - b
v_pk_mul_lo_u16 w ww a * b
v_pk_mad_u16 w www a * b + c
v_pk_mad_i16 w www a * b + c
v_pk_min_u16 w ww a < b ? a : b
v_pk_max_u16 w ww a > b ? a : b
v_pk_min_i16 w xx (u32)(a < b ? a : b)
v_pk_max_i16 w xx (u32)(a > b ? a : b)
v_pk_lshlrev_b16 w ww b << (a & 15)
v_pk_lshrrev_b16 w ww b >> (a & 15)
v_pk_ashrrev_i16 w wx (u32)(b >> (a & 15))
""")

# Integer operations whose result the clamp bit saturates: the expression with it.
SATURATING = {
    "v_add_u32": "saturate((i64)a + b, 0, 0xffffffff)",
    "v_sub_u32": "saturate((i64)a - b, 0, 0xffffffff)",
    "v_add_i32": "saturate((i64)(i32)a + (i32)b, INT32_MIN, INT32_MAX)",
    "v_sub_i32": "saturate((i64)(i32)a - (i32)b, INT32_MIN, INT32_MAX)",
} | {
    f"v_{pk}{operation}_{kind}16": f"saturate({cast}a {sign} {cast}b, {low}, {high})"
    for pk in ("", "pk_")
    for operation, sign in (("add", "+"), ("sub", "-"))
    for kind, cast, low, high in (("u", "(i64)", 0, 65535), ("i", "(i16)", -32768, 32767))
}

_ORDER = {"lt": "a < b", "eq": "a == b", "le": "a <= b", "gt": "a > b", "ge": "a >= b"}
_FLOAT_TESTS = _ORDER | {
    "f": "0",
    "lg": "a < b || a > b",
    "o": "!isnan(a) && !isnan(b)",
    "u": "isnan(a) || isnan(b)",
    "nge": "!(a >= b)",
    "nlg": "!(a < b || a > b)",
    "ngt": "!(a > b)",
    "nle": "!(a <= b)",
    "neq": "!(a == b)",
    "nlt": "!(a < b)",
    "tru": "1",
}
_INTEGER_TESTS = _ORDER | {"f": "0", "ne": "a != b", "t": "1"}
_TEST_TYPES = {
    "f16": "h", "f32": "f", "f64": "d", "i16": "x", "u16": "w", "i32": "i", "u32": "u", "i64": "I",
    "u64": "U",
}  # fmt: skip
COMPARE: dict[str, Rule] = {
    name: Rule(name, "k", 2 * letter, test)
    for suffix, letter in _TEST_TYPES.items()
    for verb, test in (_FLOAT_TESTS if suffix[0] == "f" else _INTEGER_TESTS).items()
    for name in (f"v_cmp_{verb}_{suffix}", f"v_cmpx_{verb}_{suffix}")
} | table("""
v_cmp_class_f32 k uu (class_f32(a) & b) != 0
v_cmp_class_f64 k Uu (class_f64(a) & b) != 0
v_cmp_class_f16 k wu (class_f16(a) & b) != 0
v_cmpx_class_f32 k uu (class_f32(a) & b) != 0
""")
