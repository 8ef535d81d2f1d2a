"""Scalar arithmetic of the simulator, with its condition code, against Python's integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from aiter_mx.sim.faults import MemoryFault
from op_tests.sim.tools import Array, launch, program

SAMPLES = 192
M32, M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
NONZERO = "nonzero"
Expected = Callable[..., "int | tuple[int, int | bool]"]


@dataclass(frozen=True)
class Case:
    """An instruction; its oracle gives the result, or the result and SCC."""

    asm: str
    result: str
    sources: str
    expected: Expected
    scc: str = ""


def signed(x: int, bits: int = 32) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def overflows(x: int) -> bool:
    return x != signed(x)


def leading(x: int, bits: int) -> int:
    return bits - x.bit_length() if x else -1


def field(x: int, spec: int, bits: int, sign: bool) -> int:
    offset, width = spec & (bits - 1), spec >> 16 & 127
    width = min(width, bits - offset)
    x = x >> offset & (1 << width) - 1
    return signed(x, width) if sign and width else x


def both(name: str, function: Callable[[int, int], int], scc: str = NONZERO) -> list[Case]:
    """A logic instruction in its 32 and 64-bit forms."""
    return [
        Case(f"s_{name}_b32 {{d}}, {{a}}, {{b}}", "u", "uu", function, scc),
        Case(f"s_{name}_b64 {{d}}, {{a}}, {{b}}", "U", "UU", function, scc),
    ]


def compare(verb: str, function: Callable[[int, int], bool]) -> list[Case]:
    return [
        Case(f"s_cmp_{verb}_u32 {{a}}, {{b}}\n s_mov_b32 {{d}}, 0", "u", "uu",
             lambda a, b: (0, function(a, b))),
        Case(f"s_cmp_{verb}_i32 {{a}}, {{b}}\n s_mov_b32 {{d}}, 0", "u", "uu",
             lambda a, b: (0, function(signed(a), signed(b)))),
        Case(f"s_cmpk_{verb}_i32 {{a}}, 0xfff3\n s_mov_b32 {{d}}, 0", "u", "u",
             lambda a: (0, function(signed(a), -13))),
        Case(f"s_cmpk_{verb}_u32 {{a}}, 0xfff3\n s_mov_b32 {{d}}, 0", "u", "u",
             lambda a: (0, function(a, 0xFFF3))),
    ]  # fmt: skip


CASES = [
    *both("and", lambda a, b: a & b), *both("or", lambda a, b: a | b),
    *both("xor", lambda a, b: a ^ b), *both("andn2", lambda a, b: a & ~b),
    *both("orn2", lambda a, b: a | ~b), *both("nand", lambda a, b: ~(a & b)),
    *both("nor", lambda a, b: ~(a | b)), *both("xnor", lambda a, b: ~(a ^ b)),
    *compare("eq", lambda a, b: a == b), *compare("lg", lambda a, b: a != b),
    *compare("gt", lambda a, b: a > b), *compare("ge", lambda a, b: a >= b),
    *compare("lt", lambda a, b: a < b), *compare("le", lambda a, b: a <= b),
    Case("s_cmp_eq_u64 {a}, {b}\n s_mov_b32 {d}, 0", "u", "UU", lambda a, b: (0, a == b)),
    Case("s_cmp_lg_u64 {a}, {b}\n s_mov_b32 {d}, 0", "u", "UU", lambda a, b: (0, a != b)),
    Case("s_not_b32 {d}, {a}", "u", "u", lambda a: ~a, NONZERO),
    Case("s_lshl_b32 {d}, {a}, {b}", "u", "uu", lambda a, b: a << (b & 31), NONZERO),
    Case("s_lshl_b64 {d}, {a}, {b}", "U", "Uu", lambda a, b: a << (b & 63), NONZERO),
    Case("s_lshr_b32 {d}, {a}, {b}", "u", "uu", lambda a, b: a >> (b & 31), NONZERO),
    Case("s_lshr_b64 {d}, {a}, {b}", "U", "Uu", lambda a, b: a >> (b & 63), NONZERO),
    Case("s_ashr_i32 {d}, {a}, {b}", "u", "uu", lambda a, b: signed(a) >> (b & 31), NONZERO),
    Case("s_ashr_i64 {d}, {a}, {b}", "U", "Uu", lambda a, b: signed(a, 64) >> (b & 63), NONZERO),
    Case("s_bfm_b32 {d}, {a}, {b}", "u", "uu", lambda a, b: ((1 << (a & 31)) - 1) << (b & 31)),
    Case("s_bfe_u32 {d}, {a}, {b}", "u", "uu", lambda a, b: field(a, b, 32, False), NONZERO),
    Case("s_bfe_i32 {d}, {a}, {b}", "u", "uu", lambda a, b: field(a, b, 32, True), NONZERO),
    Case("s_bfe_u64 {d}, {a}, {b}", "U", "Uu", lambda a, b: field(a, b, 64, False), NONZERO),
    Case("s_bfe_i64 {d}, {a}, {b}", "U", "Uu", lambda a, b: field(a, b, 64, True), NONZERO),
    Case("s_ff1_i32_b32 {d}, {a}", "u", "u", lambda a: (a & -a).bit_length() - 1),
    Case("s_ff1_i32_b64 {d}, {a}", "u", "U", lambda a: (a & -a).bit_length() - 1),
    Case("s_flbit_i32_b32 {d}, {a}", "u", "u", lambda a: leading(a, 32)),
    Case("s_flbit_i32_b64 {d}, {a}", "u", "U", lambda a: leading(a, 64)),
    Case("s_flbit_i32_i64 {d}, {a}", "u", "U", lambda a: leading(a ^ M64 * (a >> 63), 64)),
    Case("s_ff0_i32_b32 {d}, {a}", "u", "u", lambda a: (~a & M32 & -(~a & M32)).bit_length() - 1),
    Case("s_ff0_i32_b64 {d}, {a}", "u", "U", lambda a: (~a & M64 & -(~a & M64)).bit_length() - 1),
    Case("s_bcnt1_i32_b32 {d}, {a}", "u", "u", lambda a: bin(a).count("1"), NONZERO),
    Case("s_bcnt1_i32_b64 {d}, {a}", "u", "U", lambda a: bin(a).count("1"), NONZERO),
    Case("s_bcnt0_i32_b32 {d}, {a}", "u", "u", lambda a: 32 - bin(a).count("1"), NONZERO),
    Case("s_brev_b32 {d}, {a}", "u", "u", lambda a: int(f"{a:032b}"[::-1], 2)),
    Case("s_brev_b64 {d}, {a}", "U", "U", lambda a: int(f"{a:064b}"[::-1], 2)),
    Case("s_mov_b32 {d}, {a}\n s_bitset1_b32 {d}, {b}", "u", "uu", lambda a, b: a | 1 << (b & 31)),
    Case("s_mov_b32 {d}, {a}\n s_bitset0_b32 {d}, {b}", "u", "uu",
         lambda a, b: a & ~(1 << (b & 31))),
    Case("s_bitcmp1_b32 {a}, {b}\n s_mov_b32 {d}, 0", "u", "uu",
         lambda a, b: (0, a >> (b & 31) & 1)),
    Case("s_bitcmp0_b64 {a}, {b}\n s_mov_b32 {d}, 0", "u", "Uu",
         lambda a, b: (0, 1 - (a >> (b & 63) & 1))),
    Case("s_add_u32 {d}, {a}, {b}", "u", "uu", lambda a, b: (a + b, a + b > M32)),
    Case("s_sub_u32 {d}, {a}, {b}", "u", "uu", lambda a, b: (a - b, a < b)),
    Case("s_add_i32 {d}, {a}, {b}", "u", "uu",
         lambda a, b: (a + b, overflows(signed(a) + signed(b)))),
    Case("s_sub_i32 {d}, {a}, {b}", "u", "uu",
         lambda a, b: (a - b, overflows(signed(a) - signed(b)))),
    Case("s_add_u32 {d}, {a}, {b}\n s_addc_u32 {d}, {b}, {c}", "u", "uuu",
         lambda a, b, c: (x := b + c + (a + b > M32), x > M32)),
    Case("s_sub_u32 {d}, {a}, {b}\n s_subb_u32 {d}, {b}, {c}", "u", "uuu",
         lambda a, b, c: (x := b - c - (a < b), x < 0)),
    Case("s_mov_b32 {d}, {a}\n s_addk_i32 {d}, 0x8001", "u", "u",
         lambda a: (a - 32767, overflows(signed(a) - 32767))),
    Case("s_mov_b32 {d}, {a}\n s_mulk_i32 {d}, 0x8001", "u", "u", lambda a: a * -32767),
    Case("s_movk_i32 {d}, 0x9234", "u", "", lambda: 0xFFFF9234),
    Case("s_mul_i32 {d}, {a}, {b}", "u", "uu", lambda a, b: a * b),
    Case("s_mul_hi_u32 {d}, {a}, {b}", "u", "uu", lambda a, b: a * b >> 32),
    Case("s_mul_hi_i32 {d}, {a}, {b}", "u", "uu", lambda a, b: signed(a) * signed(b) >> 32),
    Case("s_min_i32 {d}, {a}, {b}", "u", "uu",
         lambda a, b: (min(signed(a), signed(b)), signed(a) < signed(b))),
    Case("s_max_i32 {d}, {a}, {b}", "u", "uu",
         lambda a, b: (max(signed(a), signed(b)), signed(a) > signed(b))),
    Case("s_min_u32 {d}, {a}, {b}", "u", "uu", lambda a, b: (min(a, b), a < b)),
    Case("s_max_u32 {d}, {a}, {b}", "u", "uu", lambda a, b: (max(a, b), a > b)),
    Case("s_abs_i32 {d}, {a}", "u", "u", lambda a: abs(signed(a)), NONZERO),
    Case("s_lshl3_add_u32 {d}, {a}, {b}", "u", "uu",
         lambda a, b: ((a << 3) + b, (a << 3) + b > M32)),
    Case("s_sext_i32_i8 {d}, {a}", "u", "u", lambda a: signed(a, 8)),
    Case("s_sext_i32_i16 {d}, {a}", "u", "u", lambda a: signed(a, 16)),
    Case("s_pack_ll_b32_b16 {d}, {a}, {b}", "u", "uu", lambda a, b: a & 0xFFFF | b << 16),
    Case("s_pack_lh_b32_b16 {d}, {a}, {b}", "u", "uu", lambda a, b: a & 0xFFFF | b >> 16 << 16),
    Case("s_pack_hh_b32_b16 {d}, {a}, {b}", "u", "uu", lambda a, b: a >> 16 | b >> 16 << 16),
    Case("s_cmp_lt_u32 {a}, {b}\n s_cselect_b64 {d}, {c}, -1", "U", "uuU",
         lambda a, b, c: c if a < b else -1),
    Case("s_mov_b32 {d}, 5\n s_cmp_lt_u32 {a}, {b}\n s_cmov_b32 {d}, {a}", "u", "uu",
         lambda a, b: a if a < b else 5),
    *(Case(f"s_mov_b64 vcc, exec\n s_mov_b64 exec, {{b}}\n s_{name}_saveexec_b64 {{d}}, {{a}}\n "
           "s_mov_b64 {d}, exec\n s_mov_b64 exec, vcc", "U", "UU", function, NONZERO)
      for name, function in (("and", lambda a, e: a & e), ("or", lambda a, e: a | e),
                             ("xor", lambda a, e: a ^ e), ("andn2", lambda a, e: a & ~e),
                             ("andn1", lambda a, e: ~a & e), ("orn2", lambda a, e: a | ~e))),
]  # fmt: skip


def source() -> str:
    blocks = []
    for n, case in enumerate(CASES):
        types = ["u64" if letter == "U" else "u32" for letter in case.sources]
        loads = "".join(
            f"const {t} {'abc'[i]} = in[({3 * n + i}) * {SAMPLES} + at]; "
            for i, t in enumerate(types)
        )
        names = {"d": "%0"} | {x: f"%{i + 2}" for i, x in enumerate("abc"[: len(types)])}
        inputs = ", ".join(f'"s"({x})' for x in "abc"[: len(types)])
        text = case.asm.format(**names).replace("\n", "\\n")
        blocks.append(
            f"{{ {loads}{'u64' if case.result == 'U' else 'u32'} d; u32 scc; "
            f'asm volatile("s_cmp_lg_u32 0, 0\\n{text}\\ns_cselect_b32 %1, 1, 0" : "=&s"(d), '
            f'"=s"(scc) : {inputs} : "scc", "vcc"); '
            f"out[{2 * n} * {SAMPLES} + at] = d; out[{2 * n + 1} * {SAMPLES} + at] = scc; }}"
        )
    body = "\n  ".join(blocks)
    arguments = "const u64 *__restrict in, u64 *__restrict out"
    return f"KERNEL(64) k({arguments}) {{\n  const int at = group_id();\n  {body}\n}}"


@pytest.fixture(scope="module")
def results() -> tuple[Array, Array]:
    rng = np.random.default_rng(11)
    inputs = rng.integers(0, 2**64, (len(CASES), 3, SAMPLES), dtype=np.uint64)
    inputs >>= rng.integers(0, 64, inputs.shape, dtype=np.uint64) * (rng.random(inputs.shape) < 0.3)
    inputs[..., :8] = [0, 1, M32, M64, 0x80000000, 0x7FFFFFFF, 1 << 63, 0xFFFFFFF3]
    inputs[:, 1, 8:24] = inputs[:, 0, 8:24]
    out = np.zeros((len(CASES), 2, SAMPLES), np.uint64)
    launch(program(source()), "k", SAMPLES, 64, [inputs, out], access="rw")
    return inputs, out


@pytest.mark.parametrize("n", range(len(CASES)), ids=lambda n: CASES[n].asm.replace("\n", ";"))
def test_scalar_instruction_matches_its_definition(n: int, results: tuple[Array, Array]) -> None:
    case, (inputs, out) = CASES[n], results
    mask = M64 if case.result == "U" else M32
    for at in range(SAMPLES):
        widths = [M64 if letter == "U" else M32 for letter in case.sources]
        sources = [int(inputs[n, i, at]) & width for i, width in enumerate(widths)]
        want = case.expected(*sources)
        value, scc = want if isinstance(want, tuple) else (want, None)
        if case.scc:
            scc = value & mask != 0
        assert int(out[n, 0, at]) == value & mask, (case.asm, sources)
        if scc is not None:
            assert int(out[n, 1, at]) == scc, ("SCC", case.asm, sources)


def test_hardware_registers_say_the_xcc_and_the_float_mode() -> None:
    source = """KERNEL(64) k(u32 *out) {
        u32 xcc, mode;
        asm volatile("s_getreg_b32 %0, hwreg(HW_REG_XCC_ID, 0, 4)\\n"
                     "s_getreg_b32 %1, hwreg(HW_REG_MODE, 4, 4)" : "=s"(xcc), "=s"(mode));
        out[group_id() * 64 + lane_id()] = xcc | mode << 8;
    }"""
    out = np.zeros((20, 64), np.uint32)
    launch(program(source), "k", 20, 64, [out])
    flushes_nothing = 15 << 8  # denormal modes as clang leaves them
    np.testing.assert_array_equal(out, (np.arange(20) % 8 | flushes_nothing)[:, None] + 0 * out)


SCALAR_WRITES = """
KERNEL(64) scalar_writes(u32* counters, u32* out, u32 value) {
    u32 seen;
    asm volatile("s_store_dword %1, %2, 0x4 glc\\n\\t"
                 "s_atomic_dec %1, %2, 0x8\\n\\t"
                 "s_atomic_inc %1, %2, 0xc\\n\\t"
                 "s_atomic_add %1, %2, 0x10\\n\\t"
                 "s_waitcnt lgkmcnt(0)\\n\\t"
                 "s_load_dword %0, %2, 0x4 glc\\n\\t"
                 "s_waitcnt lgkmcnt(0)"
                 : "=s"(seen) : "s"(value), "s"(counters) : "memory");
    out[lane_id()] = seen;
}
"""


@pytest.mark.parametrize(
    ("before", "decreased", "increased"), [(0, 7, 1), (1, 0, 2), (7, 6, 0), (9, 7, 0)]
)
def test_scalar_stores_and_atomics_write_memory(
    before: int, decreased: int, increased: int
) -> None:
    """Counters wrap: down from 0 or from above the limit to it, up from the limit to 0."""
    counters, out = np.full(6, before, np.uint32), np.zeros(64, np.uint32)
    launch(program(SCALAR_WRITES), "scalar_writes", 1, 64, [counters, out, 7], access="bw")
    assert counters.tolist() == [before, 7, decreased, increased, before + 7, before]
    assert (out == 7).all()


def test_a_scalar_store_outside_of_memory_is_found() -> None:
    counters, out = np.zeros(6, np.uint32), np.zeros(64, np.uint32)
    with pytest.raises(MemoryFault, match="not writable"):
        launch(program(SCALAR_WRITES), "scalar_writes", 1, 64, [counters, out, 7], access="rw")
