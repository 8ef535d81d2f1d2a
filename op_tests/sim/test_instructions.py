"""Vector and scalar arithmetic of the simulator, instruction by instruction, against numpy."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from op_tests.sim.cases import (
    E4M3,
    E5M2,
    B,
    Case,
    big,
    check_case,
    decoded,
    f16_word,
    halves,
    high_f32,
    low_f32,
    pair,
    run_cases,
    scale_of,
    to_bf16,
    to_e4m3,
)
from op_tests.sim.tools import Array, launch, program


def fma32(a: Array, b: Array, c: Array) -> Array:
    """Exactly rounded a * b + c, through integers where double is not enough."""
    wide = a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)
    return wide.astype(np.float32)


def ieee_max(a: Array, b: Array) -> Array:
    return np.where(np.isnan(a), b, np.where(np.isnan(b), a, np.maximum(a, b)))


def _compares() -> list[Case]:
    """Every compare of every type but f16."""
    order = {"lt": np.less, "eq": np.equal, "le": np.less_equal, "gt": np.greater,
             "ge": np.greater_equal}  # fmt: skip
    ints = order | {"ne": np.not_equal}
    floats = order | {
        f"n{verb}": lambda a, b, test=test: ~test(a, b) for verb, test in order.items()
    }
    floats |= {
        "lg": lambda a, b: (a < b) | (a > b),
        "nlg": lambda a, b: ~((a < b) | (a > b)),
        "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
        "u": lambda a, b: np.isnan(a) | np.isnan(b),
    }
    letters = {"i32": "i", "u32": "u", "i64": "I", "u64": "U", "f32": "f", "f64": "d"}
    return [
        Case(f"v_cmp_{verb}_{kind} vcc, {{a}}, {{b}}\n v_cndmask_b32 {{d}}, 3, 5, vcc", "u",
             2 * letter, lambda a, b, test=test: np.where(test(a, b), 5, 3))
        for kind, letter in letters.items()
        for verb, test in (floats if kind[0] == "f" else ints).items()
    ]  # fmt: skip


def flushing(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """A function of float64 as an instruction that takes and gives no denormals of f32."""

    def flushed(x: Array) -> Array:
        return np.where(np.abs(x) < 2.0**-126, np.copysign(0, x), x)

    return lambda a: flushed(function(flushed(a.astype(np.float64))))


CASES = [
    Case("v_add_f32 {d}, {a}, {b}", "f", "ff", lambda a, b: a + b),
    Case("v_sub_f32 {d}, {a}, -{b}", "f", "ff", lambda a, b: a + b),
    Case("v_subrev_f32 {d}, {a}, {b}", "f", "ff", lambda a, b: b - a),
    Case("v_mul_f32_e64 {d}, |{a}|, -{b}", "f", "ff", lambda a, b: np.abs(a) * -b),
    Case("v_mul_f32_e64 {d}, {a}, {b} mul:2", "f", "ff", lambda a, b: (a * b) * np.float32(2)),
    Case("v_add_f32_e64 {d}, {a}, {b} clamp", "f", "ff",
         lambda a, b: np.where((a + b) > 0, np.minimum(a + b, 1), 0)),
    Case("v_fma_f32 {d}, {a}, {b}, {c}", "f", "fff", fma32),
    Case("v_max_f32 {d}, {a}, {b}", "f", "ff", ieee_max),
    Case("v_min_f32 {d}, {a}, {b}", "f", "ff", lambda a, b: -ieee_max(-a, -b)),
    Case("v_max3_f32 {d}, {a}, {b}, {c}", "f", "fff",
         lambda a, b, c: ieee_max(ieee_max(a, b), c)),
    Case("v_rcp_f32 {d}, {a}", "f", "f", flushing(lambda a: 1 / a), 1),
    Case("v_sqrt_f32 {d}, {a}", "f", "f", flushing(np.sqrt), 1),
    Case("v_rsq_f32 {d}, {a}", "f", "f", flushing(lambda a: 1 / np.sqrt(a)), 2),
    Case("v_exp_f32 {d}, {a}", "f", "f", flushing(np.exp2), 1),
    Case("v_mov_b32 {d}, 0xc2fe0000\n v_exp_f32 {d}, {d}", "f", "f", np.zeros_like),  # 2^-127
    Case("v_log_f32 {d}, {a}", "f", "f", flushing(np.log2), 2),
    Case("v_floor_f32 {d}, {a}", "f", "f", np.floor),
    Case("v_ceil_f32 {d}, {a}", "f", "f", np.ceil),
    Case("v_trunc_f32 {d}, {a}", "f", "f", np.trunc),
    Case("v_rndne_f32 {d}, {a}", "f", "f", np.rint),
    Case("v_fract_f32 {d}, {a}", "f", "f", lambda a: np.minimum(a - np.floor(a), _below_1(a))),
    Case("v_fract_f64 {d}, {a}", "d", "d", lambda a: np.minimum(a - np.floor(a), _below_1(a))),
    Case("v_sin_f32 {d}, {a}", "f", "f", lambda a: _of_turns(np.sin, a), 1),
    Case("v_cos_f32 {d}, {a}", "f", "f", lambda a: _of_turns(np.cos, a), 1),
    Case("v_sin_f16 {d}, {a}", "u", "u", lambda a: f16_word(_of_turns(np.sin, halves(a)[0]))),
    Case("v_ldexp_f32 {d}, {a}, {b}", "f", "fe",
         lambda a, b: np.ldexp(a.astype(np.float64), b).astype(np.float32)),
    Case("v_ldexp_f64 {d}, {a}, {b}", "d", "de", np.ldexp),
    Case("v_fma_f64 {d}, {a}, {b}, {c}", "d", "ddd",
         lambda a, b, c: np.array([_fma64(*x) for x in zip(a, b, c, strict=True)])),
    Case("v_add_f64 {d}, {a}, {b}", "d", "dd", lambda a, b: a + b),
    Case("v_mul_f64 {d}, {a}, {b}", "d", "dd", lambda a, b: a * b),
    Case("v_cvt_f32_i32 {d}, {a}", "f", "i", lambda a: a.astype(np.float32)),
    Case("v_cvt_f32_u32 {d}, {a}", "f", "u", lambda a: a.astype(np.float32)),
    Case("v_cvt_f64_u32 {d}, {a}", "d", "u", lambda a: a.astype(np.float64)),
    Case("v_cvt_f32_f64 {d}, {a}", "f", "d", lambda a: a.astype(np.float32)),
    Case("v_cvt_f64_f32 {d}, {a}", "d", "f", lambda a: a.astype(np.float64)),
    Case("v_cvt_u32_f32 {d}, {a}", "u", "f",
         lambda a: np.clip(np.nan_to_num(np.trunc(a.astype(np.float64)), posinf=2.0**40,
                                         neginf=0), 0, 2**32 - 1).astype(np.uint32)),
    Case("v_cvt_i32_f32 {d}, {a}", "i", "f",
         lambda a: np.clip(np.nan_to_num(np.trunc(a.astype(np.float64)), posinf=2.0**40,
                                         neginf=-(2.0**40)), -(2**31), 2**31 - 1
                           ).astype(np.int64).astype(np.int32)),
    Case("v_cvt_f16_f32 {d}, {a}", "u", "f", f16_word),
    Case("v_cvt_f32_f16 {d}, {a}", "f", "u", lambda a: halves(a)[0].astype(np.float32)),
    Case("v_pack_b32_f16 {d}, {a}, {b}", "u", "kk", lambda a, b: (a & 0xFFFF) | b << 16),
    Case("v_pack_b32_f16 {d}, -{a}, {b} op_sel:[1,0,0]", "u", "kk",
         lambda a, b: (a >> 16 ^ 0x8000) | b << 16),
    Case("v_cvt_pk_bf16_f32 {d}, {a}, {b}", "u", "nn",
         lambda a, b: to_bf16(a) | to_bf16(b) << 16),
    Case("v_cvt_pk_f32_fp8 {d}, {a}", "U", "u",
         lambda a: pair(decoded(E4M3, a & 255), decoded(E4M3, a >> 8 & 255))),
    Case("v_cvt_pk_f32_bf8 {d}, {a}", "U", "u",
         lambda a: pair(decoded(E5M2, a & 255), decoded(E5M2, a >> 8 & 255))),
    Case("v_cvt_pk_f32_fp8_sdwa {d}, {a} src0_sel:WORD_1", "U", "u",
         lambda a: pair(decoded(E4M3, a >> 16 & 255), decoded(E4M3, a >> 24))),
    *(Case(f"v_cvt_f32_fp8_sdwa {{d}}, {{a}} src0_sel:BYTE_{n}", "f", "u",
           lambda a, n=n: decoded(E4M3, a >> 8 * n & 255)) for n in range(4)),
    Case("v_cvt_scalef32_pk_f32_fp8 {d}, {a}, {b}", "U", "ug",
         lambda a, b: pair(*(decoded(E4M3, a >> 8 * n & 255) * scale_of(b) for n in (0, 1)))),
    Case("v_cvt_scalef32_pk_f32_fp8 {d}, {a}, {b} op_sel:[1,0,0]", "U", "ug",
         lambda a, b: pair(*(decoded(E4M3, a >> 8 * n & 255) * scale_of(b) for n in (2, 3)))),
    Case("v_mov_b32 {d}, 0x11223344\n v_cvt_pk_fp8_f32 {d}, {a}, {b} op_sel:[0,0,1]", "u", "qq",
         lambda a, b: 0x3344 | to_e4m3(a) << 16 | to_e4m3(b) << 24),
    Case("v_mov_b32 {d}, 0x11223344\n v_cvt_pk_fp8_f32 {d}, {a}, {b}", "u", "qq",
         lambda a, b: 0x11220000 | to_e4m3(a) | to_e4m3(b) << 8),
    Case("v_add_u32 {d}, {a}, {b}", "u", "uu", lambda a, b: a + b),
    Case("v_subrev_u32 {d}, {a}, {b}", "u", "uu", lambda a, b: b - a),
    Case("v_mul_lo_u32 {d}, {a}, {b}", "u", "uu", lambda a, b: a * b),
    Case("v_mul_hi_u32 {d}, {a}, {b}", "u", "uu", big(lambda a, b: a * b >> 32)),
    Case("v_mul_hi_i32 {d}, {a}, {b}", "u", "ii", big(lambda a, b: a * b >> 32)),
    Case("v_mul_u32_u24 {d}, {a}, {b}", "u", "uu",
         big(lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF))),
    Case("v_mul_i32_i24 {d}, {a}, {b}", "u", "uu",
         big(lambda a, b: _signed(a, 24) * _signed(b, 24))),
    Case("v_mad_u64_u32 {d}, vcc, {a}, {b}, {c}", "U", "uuU", big(lambda a, b, c: a * b + c)),
    Case("v_mad_i64_i32 {d}, vcc, {a}, {b}, {c}", "U", "iiI", big(lambda a, b, c: a * b + c)),
    Case("v_lshl_add_u64 {d}, {a}, 3, {b}", "U", "UU", big(lambda a, b: (a << 3) + b)),
    Case("v_lshlrev_b64 {d}, {a}, {b}", "U", "uU", big(lambda a, b: b << (a & 63))),
    Case("v_lshrrev_b64 {d}, {a}, {b}", "U", "uU", big(lambda a, b: b >> (a & 63))),
    Case("v_ashrrev_i64 {d}, {a}, {b}", "U", "uI", big(lambda a, b: b >> (a & 63))),
    Case("v_ashrrev_i32 {d}, {a}, {b}", "u", "ui", big(lambda a, b: b >> (a & 31))),
    Case("v_lshl_or_b32 {d}, {a}, {b}, {c}", "u", "uuu", big(lambda a, b, c: a << (b & 31) | c)),
    Case("v_xad_u32 {d}, {a}, {b}, {c}", "u", "uuu", lambda a, b, c: (a ^ b) + c),
    Case("v_add3_u32 {d}, {a}, {b}, {c}", "u", "uuu", lambda a, b, c: a + b + c),
    Case("v_and_or_b32 {d}, {a}, {b}, {c}", "u", "uuu", lambda a, b, c: a & b | c),
    Case("v_bfi_b32 {d}, {a}, {b}, {c}", "u", "uuu", lambda a, b, c: a & b | ~a & c),
    Case("v_bitop3_b32 {d}, {a}, {b}, {c} bitop3:0x1b", "u", "uuu",
         big(lambda a, b, c: sum((0x1B >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1)
                                 << i for i in range(32)))),
    Case("v_bfe_u32 {d}, {a}, {b}, {c}", "u", "uuu",
         big(lambda a, b, c: a >> (b & 31) & (1 << (c & 31)) - 1)),
    Case("v_bfe_i32 {d}, {a}, 5, 9", "u", "u", big(lambda a: _signed(a >> 5, 9))),
    Case("v_bfrev_b32 {d}, {a}", "u", "u", big(lambda a: int(f"{a:032b}"[::-1], 2))),
    Case("v_ffbh_u32 {d}, {a}", "u", "u", big(lambda a: 32 - a.bit_length() if a else -1)),
    Case("v_ffbl_b32 {d}, {a}", "u", "u", big(lambda a: (a & -a).bit_length() - 1)),
    Case("v_bcnt_u32_b32 {d}, {a}, {b}", "u", "uu", big(lambda a, b: bin(a).count("1") + b)),
    Case("v_alignbit_b32 {d}, {a}, {b}, {c}", "u", "uuu",
         big(lambda a, b, c: (a << 32 | b) >> (c & 31))),
    Case("v_perm_b32 {d}, {a}, {b}, {c}", "u", "uus",
         big(lambda a, b, c: sum(((a << 32 | b) >> 8 * (c >> 8 * i & 7) & 255) << 8 * i
                                 for i in range(4)))),
    Case("v_med3_i32 {d}, {a}, {b}, {c}", "i", "iii",
         lambda a, b, c: np.median([a, b, c], axis=0).astype(np.int32)),
    Case("v_add_co_u32 {d}, vcc, {a}, {b}\n v_addc_co_u32 {d}, vcc, {a}, 0, vcc", "u", "uu",
         big(lambda a, b: a + (a + b >> 32))),
    Case("v_sub_co_u32 {d}, vcc, {a}, {b}\n v_subb_co_u32 {d}, vcc, 0, {d}, vcc", "u", "uu",
         big(lambda a, b: -(a - b) - (a < b))),
    Case("v_cmp_lt_i32 vcc, {a}, {b}\n v_cndmask_b32 {d}, {a}, {b}, vcc", "i", "ii",
         lambda a, b: np.where(a < b, b, a)),
    Case("v_cmp_nle_f32 vcc, {a}, {b}\n v_cndmask_b32 {d}, 3, 5, vcc", "u", "ff",
         lambda a, b: np.where(~(a <= b), 5, 3)),
    Case("v_cmp_class_f32 vcc, {a}, {b}\n v_cndmask_b32 {d}, 3, 5, vcc", "u", "fu",
         lambda a, b: np.where(_class_bit(a) & b, 5, 3)),
    Case("v_pk_fma_f32 {d}, {a}, {b}, {c} op_sel:[1,0,0] op_sel_hi:[0,1,1] neg_lo:[0,1,0]", "U",
         "UUU",
         lambda a, b, c: pair(fma32(high_f32(a), -low_f32(b), low_f32(c)),
                              fma32(low_f32(a), high_f32(b), high_f32(c)))),
    Case("v_pk_mul_f32 {d}, {a}, {b}", "U", "UU",
         lambda a, b: pair(low_f32(a) * low_f32(b), high_f32(a) * high_f32(b))),
    Case("v_pk_add_f16 {d}, {a}, {b} op_sel:[1,0] op_sel_hi:[0,1]", "u", "hh",
         lambda a, b: f16_word(halves(a)[1] + halves(b)[0], halves(a)[0] + halves(b)[1])),
    Case("v_add_u32_sdwa {d}, {a}, {b} dst_sel:DWORD src0_sel:BYTE_2 src1_sel:WORD_1", "u", "uu",
         lambda a, b: (a >> 16 & 255) + (b >> 16)),
    Case("v_mov_b32 {d}, -1\n v_add_u32_sdwa {d}, {a}, sext({b}) dst_sel:BYTE_1 "
         "dst_unused:UNUSED_PRESERVE src0_sel:BYTE_3 src1_sel:BYTE_1", "u", "uu",
         big(lambda a, b: 0xFFFF00FF | ((a >> 24) + (b >> 8 & 255) & 255) << 8)),
    Case("v_add_u32_e64 {d}, {a}, {b} clamp", "u", "uu", big(lambda a, b: min(a + b, 2**32 - 1))),
    Case("v_sub_u32_e64 {d}, {a}, {b} clamp", "u", "uu", big(lambda a, b: max(a - b, 0))),
    Case("v_add_i32 {d}, {a}, {b} clamp", "u", "ii", big(lambda a, b: _clip(a + b, 32))),
    Case("v_pk_add_u16 {d}, {a}, -1", "u", "u",
         lambda a: ((a & 0xFFFF) - 1 & 0xFFFF) | ((a >> 16) - 1 & 0xFFFF) << 16),
    Case("v_pk_add_u16 {d}, {a}, 7", "u", "u",
         lambda a: ((a & 0xFFFF) + 7 & 0xFFFF) | a >> 16 << 16),
    Case("v_pk_mul_lo_u16 {d}, {a}, 1.0", "u", "u", lambda a: (a >> 16) * 0x3F80 << 16),
    Case("v_pk_mul_f16 {d}, {a}, 2.0", "u", "h",
         lambda a: f16_word(halves(a)[0] * np.float16(2), halves(a)[1] * np.float16(0))),
    Case("v_pk_sub_i16 {d}, {a}, {b} clamp", "u", "uu",
         big(lambda a, b: sum((_clip(_signed(a >> n, 16) - _signed(b >> n, 16), 16) & 0xFFFF) << n
                              for n in (0, 16)))),
    Case("v_sad_u8 {d}, {a}, {b}, {c}", "u", "uuu",
         big(lambda a, b, c: c + sum(abs((a >> n & 255) - (b >> n & 255)) for n in B))),
    Case("v_min3_u32 {d}, {a}, {b}, {c}", "u", "uuu",
         lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    Case("v_mul_hi_i32_i24 {d}, {a}, {b}", "u", "uu",
         big(lambda a, b: _signed(a, 24) * _signed(b, 24) >> 32)),
    Case("v_mbcnt_lo_u32_b32 {d}, {a}, {b}", "u", "uu",
         lambda a, b: b + np.array([bin(int(x) & (1 << min(n % 64, 32)) - 1).count("1")
                                    for n, x in enumerate(a)], np.uint32)),
    Case("v_mov_b32 {d}, 0\n v_div_fixup_f16 {d}, {a}, {b}, {c}", "u", "hhh",
         lambda *abc: _fixed(*(halves(x)[0] for x in abc))),
    *_compares(),
]  # fmt: skip


def _below_1(x: Array) -> Array:
    return np.nextafter(x.dtype.type(1), x.dtype.type(0))


def _of_turns(wave: Callable[[Array], Array], x: Array) -> Array:
    """A sine or cosine in turns; beyond 256 of them, which hardware does not reduce, that of 0."""
    turns = x.astype(np.float64)
    waves = wave(np.where(np.abs(turns) <= 256, turns, 0) * 2 * np.pi)
    return np.where(np.isfinite(turns), waves, np.nan).astype(x.dtype)


def _clip(x: int, bits: int) -> int:
    return max(-(1 << bits - 1), min((1 << bits - 1) - 1, x))


def _fixed(quotient: Array, below: Array, above: Array) -> Array:
    """Finite operands: the quotient with the sign of above / below, or what zeros make of it."""
    negative = np.signbit(below) ^ np.signbit(above)
    size = np.where(below == 0, np.inf, np.where(above == 0, 0, np.abs(quotient)))
    return f16_word(np.where(negative, -size, size).astype(np.float16))


def _fma64(a: float, b: float, c: float) -> float:
    from fractions import Fraction

    if not all(map(math.isfinite, (a, b, c))):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    try:
        return float(exact) if exact else a * b + c
    except OverflowError:
        return math.copysign(math.inf, exact)


def _signed(x: int, bits: int) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def _class_bit(x: Array) -> Array:
    bits = x.view(np.uint32)
    negative = bits >> 31 == 1
    tiny = np.abs(x) < np.finfo(np.float32).tiny
    order = [np.isnan(x) & (bits >> 22 & 1 == 0), np.isnan(x), np.isinf(x), x == 0, tiny]
    positive = np.select(order, [1, 2, 0x200, 0x40, 0x80], 0x100)
    below = np.select(order, [1, 2, 4, 0x20, 0x10], 8)
    return np.where(negative, below, positive).astype(np.uint32)


@pytest.fixture(scope="module")
def results() -> list[tuple[list[Array], Array]]:
    return run_cases(CASES)


@pytest.mark.parametrize("n", range(len(CASES)), ids=lambda n: CASES[n].asm.replace("\n", ";"))
def test_instruction_matches_its_definition(
    n: int, results: list[tuple[list[Array], Array]]
) -> None:
    check_case(CASES[n], *results[n])


FUSED = """
typedef _Float16 f16x2 __attribute__((ext_vector_type(2)));
KERNEL(64) fused(const f16x2* in, f16x2* out) {
    f16x2 a = in[lane_id()], b = in[64 + lane_id()], c = in[128 + lane_id()], d = c;
    out[lane_id()] = __builtin_elementwise_fma(a, b, c);
    asm volatile("v_fma_f16 %0, %1, %2, %3" : "=v"(d) : "v"(a), "v"(b), "v"(c));
    out[64 + lane_id()] = f16x2{d.x, 0};
}
"""


def test_sums_that_round_to_the_middle_between_two_f16_are_rounded_once() -> None:
    below_half = np.float16(2.0**-11 - 2.0**-21)  # times 1 + 2^-10: 2^-31 below half an ulp of 1
    ones = np.float16(1) + np.arange(128).astype(np.float16) * np.float16(2.0**-10)
    x = np.stack([np.full(128, 1 + 2.0**-10), np.full(128, below_half), ones]).astype(np.float16)
    out = np.zeros((2, 128), np.float16)
    launch(program(FUSED), "fused", 1, 64, [x, out], access="rw")
    np.testing.assert_array_equal(out[0], ones)
    np.testing.assert_array_equal(out[1, ::2], ones[::2])
