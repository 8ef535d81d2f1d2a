"""Instructions one by one: a kernel that executes each on random operands, and what they mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from op_tests.sim.tools import Array, launch, program

LANES = 1024
np.seterr(all="ignore")


@dataclass(frozen=True)
class Case:
    """An instruction: operand types as in ``TYPES``, and what it computes of whole arrays."""

    asm: str
    result: str
    sources: str
    expected: Callable[..., Array]
    ulps: int = 0


TYPES = {"u": np.uint32, "i": np.int32, "f": np.float32, "U": np.uint64, "I": np.int64,
         "d": np.float64}  # fmt: skip
_U64 = 0xFFFFFFFFFFFFFFFF
B = range(0, 32, 8)  # where the bytes of a word begin


def big(function: Callable[..., int]) -> Callable[..., Array]:
    """An oracle in Python's unbounded integers, taken modulo the result's width afterwards."""
    return lambda *arrays: np.array(
        [function(*map(int, values)) & _U64 for values in zip(*arrays, strict=True)], np.uint64
    )


def halves(x: Array) -> tuple[Array, Array]:
    low, high = (x & 0xFFFF).astype(np.uint16), (x >> 16).astype(np.uint16)
    return low.view(np.float16), high.view(np.float16)


def f16_word(low: Array, high: Array | None = None) -> Array:
    low = low.astype(np.float16).view(np.uint16).astype(np.uint32)
    return low if high is None else low | f16_word(high) << 16


def rounded(dtype: torch.dtype) -> Callable[[Array], Array]:
    """Bits of float32 values rounded by torch to a 16 or 8-bit type."""
    bits = torch.uint8 if dtype.itemsize == 1 else torch.int16
    return lambda x: (
        torch.from_numpy(x).to(dtype).view(bits).numpy().astype(np.uint32)
        & ((1 << 8 * dtype.itemsize) - 1)
    )


def decoded(dtype: torch.dtype, codes: Array) -> Array:
    return torch.from_numpy(codes.astype(np.uint8)).view(dtype).float().numpy()


_EXPONENTS = np.array([1 << 7, 1 << 23], np.uint32)
to_bf16, to_e4m3 = rounded(torch.bfloat16), rounded(torch.float8_e4m3fn)
to_e5m2 = rounded(torch.float8_e5m2)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def scale_of(bits: Array) -> Array:
    exponent = (bits >> 23 & 255).astype(np.float64)
    return np.where(exponent == 255, np.nan, np.exp2(exponent - 127))


def pair(low: Array, high: Array) -> Array:
    words = [x.astype(np.float32).view(np.uint32).astype(np.uint64) for x in (low, high)]
    return words[0] | words[1] << 32


def low_f32(x: Array) -> Array:
    return (x & 0xFFFFFFFF).astype(np.uint32).view(np.float32)


def high_f32(x: Array) -> Array:
    return (x >> 32).astype(np.uint32).view(np.float32)


def draw(rng: np.random.Generator, letter: str) -> Array:
    """Random operands of a type, its special values among them."""
    if letter in "uishklm":
        values = rng.integers(0, 1 << 32, LANES, dtype=np.uint32)
        values[::7] >>= rng.integers(0, 32, LANES, dtype=np.uint32)[::7]
        values[6::40] = rng.integers(0, 4, values[6::40].shape)  # equal operands now and then
        values[3::50] = rng.choice(np.array([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF], np.uint32))
        if letter == "s":  # byte selectors of v_perm
            values &= 0x07070707
        if letter == "h":
            values = f16_word(*rng.normal(0, 30, (2, LANES)))
        if letter == "k":  # two f16 around fp8's and fp4's ranges
            values = f16_word(*rng.normal(0, 1, (2, LANES)) * np.exp2(rng.integers(-9, 6, LANES)))
        if letter == "l":  # two bf16, likewise
            values = rng.integers(0, 1 << 32, LANES, dtype=np.uint32) & 0x807F807F
            values |= rng.integers(115, 134, (2, LANES), dtype=np.uint32).T @ _EXPONENTS
        if letter == "m":  # codes of fp8 that are numbers in e4m3 and in e5m2
            values = values & 0xBFBFBFBF
        return values.view(TYPES.get(letter, np.uint32))
    if letter in "UI":
        values = rng.integers(0, 1 << 64, LANES, dtype=np.uint64)
        values[6::40] = rng.integers(0, 4, values[6::40].shape)
        return values.view(TYPES[letter])
    if letter == "e":
        return rng.integers(-300, 300, LANES, dtype=np.int32)
    if letter == "t":  # as g, from 1 to 63, with mantissas, which do not count
        exponents = rng.integers(127, 133, LANES, dtype=np.uint32)
        return exponents << 23 | rng.integers(0, 1 << 23, LANES, dtype=np.uint32)
    if letter == "g":  # bits of a float32 scale
        return np.exp2(rng.integers(-60, 60, LANES)).astype(np.float32).view(np.uint32)
    values = rng.normal(0, 1, LANES) * np.exp2(rng.integers(-40, 40, LANES))
    if letter == "q":  # around fp8's range: its values, midpoints, subnormals
        values = rng.normal(0, 1, LANES) * np.exp2(rng.integers(-13, 9, LANES))
        values[:512] = np.repeat(decoded(E4M3, np.arange(256)), 2) * 1.03125
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-45, 3e38, 1.0, -0.5])
    values[5::64] = np.resize(special, values[5::64].shape)
    if letter == "n":
        values = np.nan_to_num(values, nan=-3.7, posinf=np.inf, neginf=-np.inf)
    if letter == "q":  # overflow depends on modes that compilers leave alone
        values = np.clip(values, -463.9, 463.9)
    return values.astype(np.float64 if letter == "d" else np.float32)


_WIDE = {"U": "u64", "I": "u64", "d": "u64"}


def source_of(cases: list[Case]) -> str:
    lines = []
    for n, case in enumerate(cases):
        wide = [_WIDE.get(letter, "u32") for letter in case.sources]
        loads = "".join(
            f"{t} {'abc'[i]} = in[{3 * n + i} * {LANES} + at]; " for i, t in enumerate(wide)
        )
        names = {"d": "%0"} | {x: f"%{i + 1}" for i, x in enumerate("abc"[: len(wide)])}
        inputs = ", ".join(f'"v"({x})' for x in "abc"[: len(wide)])
        apart = "\\ns_nop 4\\n"  # as many wait states as any of these owe each other
        text = case.asm.format(**names).replace("\n", apart)
        lines.append(
            f'{{ {loads} {_WIDE.get(case.result, "u32")} d; asm volatile("{text}" : "=&v"(d) : '
            f'{inputs} : "vcc"); out[{n} * {LANES} + at] = d; }}'
        )
    return (
        "KERNEL(64) k(const u64 *in, u64 *out) {\n  u32 at = group_id() * 64 + lane_id();\n  "
        + "\n  ".join(lines)
        + "\n}"
    )


def run_cases(cases: list[Case]) -> list[tuple[list[Array], Array]]:
    """Every case's inputs and simulated outputs, from one launch."""
    rng = np.random.default_rng(7)
    inputs = np.zeros((len(cases), 3, LANES), np.uint64)
    drawn = []
    for n, case in enumerate(cases):
        drawn.append([draw(rng, letter) for letter in case.sources])
        for i, values in enumerate(drawn[-1]):
            inputs[n, i] = values.view(np.uint64 if values.itemsize == 8 else np.uint32)
    out = np.zeros((len(cases), LANES), np.uint64)
    launch(program(source_of(cases)), "k", LANES // 64, 64, [inputs, out], access="rw")
    return list(zip(drawn, out, strict=True))


def check_case(case: Case, sources: list[Array], out: Array) -> None:
    """Compare a case's outputs with its definition."""
    dtype = TYPES[case.result]
    width = np.uint64 if np.dtype(dtype).itemsize == 8 else np.uint32
    got = out.astype(width).view(dtype)
    want = np.asarray(case.expected(*sources))
    want = want.astype(width).view(dtype) if want.dtype == np.uint64 else want.astype(dtype)
    if case.result in "fd":
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        same |= np.abs(got - want) <= case.ulps * np.spacing(np.abs(want))
    else:
        same = got == want
        if case.result == "U" and "f32" in case.asm:  # pairs of floats: any NaN is as good
            pairs = [(x(got), x(want)) for x in (low_f32, high_f32)]
            same = np.all([(g == w) | (np.isnan(g) & np.isnan(w)) for g, w in pairs], axis=0)
    wrong = np.flatnonzero(~same)
    assert not wrong.size, (
        f"{wrong.size} lanes wrong; lane {wrong[0]}: {[s[wrong[0]] for s in sources]} gave "
        f"{got[wrong[0]]!r}, expected {want[wrong[0]]!r}"
    )
