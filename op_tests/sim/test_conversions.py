"""Conversions between fp8, fp4, half widths and f32 in the simulator, against torch and numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from op_tests.sim.cases import (
    E4M3,
    E5M2,
    Case,
    check_case,
    decoded,
    f16_word,
    halves,
    pair,
    run_cases,
    scale_of,
    to_bf16,
    to_e4m3,
    to_e5m2,
)
from op_tests.sim.tools import Array

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
OLD = 0x11223344  # what a destination holds before
DTYPES = {"fp8": E4M3, "bf8": E5M2}
TO_FP8 = {"fp8": to_e4m3, "bf8": to_e5m2}


def to_fp4(x: Array) -> Array:
    """Nearest e2m1 with ties to an even code; too large, and NaN, become the largest."""
    magnitude = np.minimum(np.nan_to_num(np.abs(x), nan=6.0), 6.0)[:, None]
    distance = np.abs(magnitude - FP4[:8]) + np.where(np.arange(8) % 2, 1e-12, 0) * magnitude
    return (distance.argmin(axis=1) | np.signbit(x) * 8).astype(np.uint32)


def bf16_halves(x: Array) -> list[Array]:
    return [(x << 16).view(np.float32), (x & 0xFFFF0000).view(np.float32)]


def f16_halves(x: Array) -> list[Array]:
    return [half.astype(np.float32) for half in halves(x)]


def bf16_word(low: Array, high: Array) -> Array:
    return to_bf16(low.astype(np.float32)) | to_bf16(high.astype(np.float32)) << 16


def byte(word: Array, at: int) -> Array:
    return word >> 8 * at & 255


def put(codes: Array, at: int, bits: int) -> Array:
    """A register of ``OLD`` with some bits replaced."""
    return (OLD & ~(((1 << bits) - 1) << at)) | codes << at


def _scaled_to_fp8() -> list[Case]:
    """Two numbers divided by a scale, into either half of a register."""

    def packed(name: str, halves_of: Callable[..., list[Array]], at: int) -> Callable[..., Array]:
        def expected(*sources: Array) -> Array:
            numbers, scale = halves_of(*sources[:-1]), scale_of(sources[-1])
            low, high = (TO_FP8[name]((x / scale).astype(np.float32)) for x in numbers)
            return put(low | high << 8, at, 16)

        return expected

    start = f"v_mov_b32 {{d}}, {OLD:#x}\n v_cvt_scalef32_pk_"
    cases = []
    for name in TO_FP8:
        for high in (0, 1):
            pick = (f"op_sel:[0,0,0,{high}]", f"op_sel:[0,0,{high}]")
            cases += [
                Case(f"{start}{name}_f32 {{d}}, {{a}}, {{b}}, {{c}} {pick[0]}", "u", "qqt",
                     packed(name, lambda a, b: [a, b], 16 * high)),
                Case(f"{start}{name}_f16 {{d}}, {{a}}, {{b}} {pick[1]}", "u", "kt",
                     packed(name, f16_halves, 16 * high)),
                Case(f"{start}{name}_bf16 {{d}}, {{a}}, {{b}} {pick[1]}", "u", "lt",
                     packed(name, bf16_halves, 16 * high)),
            ]  # fmt: skip
    return cases


def _scaled_to_fp4() -> list[Case]:
    """Two numbers divided by a scale, into one of four bytes."""

    def packed(halves_of: Callable[..., list[Array]], at: int) -> Callable[..., Array]:
        def expected(*sources: Array) -> Array:
            numbers, scale = halves_of(*sources[:-1]), scale_of(sources[-1])
            low, high = (to_fp4(x / scale) for x in numbers)
            return put(low | high << 4, 8 * at, 8)

        return expected

    start = f"v_mov_b32 {{d}}, {OLD:#x}\n v_cvt_scalef32_pk_fp4_"
    return [
        case
        for at in range(4)
        for pick in [f"op_sel:[0,0,{at & 1},{at >> 1}]"]
        for case in (
            Case(f"{start}f32 {{d}}, {{a}}, {{b}}, {{c}} {pick}", "u", "fft",
                 packed(lambda a, b: [a, b], at)),
            Case(f"{start}f16 {{d}}, {{a}}, {{b}} {pick}", "u", "kt",
                 packed(f16_halves, at)),
            Case(f"{start}bf16 {{d}}, {{a}}, {{b}} {pick}", "u", "lt",
                 packed(bf16_halves, at)),
        )
    ]  # fmt: skip


def _scaled_from_fp8() -> list[Case]:
    """One of four codes times a scale."""
    return [
        case
        for name, dtype in DTYPES.items()
        for at in range(4)
        for case in (
            Case(f"v_cvt_scalef32_f32_{name} {{d}}, {{a}}, {{b}} op_sel:[{at & 1},{at >> 1},0]",
                 "f", "ug",
                 lambda a, b, at=at, dtype=dtype: decoded(dtype, byte(a, at)) * scale_of(b)),
            Case(f"v_mov_b32 {{d}}, {OLD:#x}\n v_cvt_scalef32_f16_{name} {{d}}, {{a}}, {{b}} "
                 f"op_sel:[{at & 1},{at >> 1},{at & 1}]", "u", "mt",
                 lambda a, b, at=at, dtype=dtype: put(
                     f16_word(decoded(dtype, byte(a, at)) * scale_of(b)), 16 * (at & 1), 16)),
        )
    ]  # fmt: skip


def _scaled_from_fp4() -> list[Case]:
    """The two codes of one of four bytes times a scale."""

    def numbers(a: Array, b: Array, at: int) -> list[Array]:
        return [FP4[byte(a, at) >> shift & 15] * scale_of(b) for shift in (0, 4)]

    return [
        Case(f"v_cvt_scalef32_pk_{kind}_fp4 {{d}}, {{a}}, {{b}} op_sel:[{at & 1},{at >> 1},0]",
             result, "ut", lambda a, b, at=at, pack=pack: pack(*numbers(a, b, at)))
        for at in range(4)
        for kind, result, pack in (("f32", "U", pair), ("f16", "u", f16_word),
                                   ("bf16", "u", bf16_word))
    ]  # fmt: skip


def middle(unsigned: bool, pick: Callable[..., Array]) -> Callable[..., Array]:
    """Of the low halves as integers; the high half of the destination stays."""
    dtype = np.uint16 if unsigned else np.int16
    return lambda *abc: put(
        pick([(x & 0xFFFF).astype(np.uint16).view(dtype) for x in abc], axis=0)
        .astype(dtype).view(np.uint16).astype(np.uint32), 0, 16,
    )  # fmt: skip


CASES = [
    *_scaled_to_fp8(),
    *_scaled_to_fp4(),
    Case(f"v_mov_b32 {{d}}, {OLD:#x}\n v_cvt_scalef32_pk_fp4_f32 {{d}}, {{a}}, {{b}}, "
         "2.0 op_sel:[0,0,1,1]", "u", "qq",
         lambda a, b: put(to_fp4(a / 2) | to_fp4(b / 2) << 4, 24, 8)),
    *_scaled_from_fp8(),
    *_scaled_from_fp4(),
    *(Case(f"v_mov_b32 {{d}}, {OLD:#x}\n v_{name}3_{kind}16 {{d}}, {{a}}, {{b}}, {{c}}", "u",
           "uuu", middle(kind == "u", pick))
      for kind in "ui"
      for name, pick in (("min", np.min), ("max", np.max), ("med", np.median))),
    Case("v_frexp_mant_f16 {d}, {a}", "u", "k",
         lambda a: f16_word(np.frexp(halves(a)[0])[0])),
    Case("v_frexp_exp_i16_f16 {d}, {a}", "u", "k",
         lambda a: np.frexp(halves(a)[0])[1].astype(np.uint16).astype(np.uint32)),
    Case("v_pk_maximum3_f16 {d}, {a}, {b}, {c}", "u", "kkk",
         lambda *abc: f16_word(*(np.max(x, axis=0) for x in zip(*map(halves, abc), strict=True)))),
    Case("v_pk_minimum3_f16 {d}, {a}, {b}, {c} op_sel:[1,0,0] op_sel_hi:[0,1,1]", "u", "kkk",
         lambda a, b, c: f16_word(*(np.min(x, axis=0) for x in zip(
             halves(a)[::-1], halves(b), halves(c), strict=True)))),
]  # fmt: skip


@pytest.fixture(scope="module")
def results() -> list[tuple[list[Array], Array]]:
    return run_cases(CASES)


@pytest.mark.parametrize("n", range(len(CASES)), ids=lambda n: CASES[n].asm.replace("\n", ";"))
def test_conversion_matches_its_definition(
    n: int, results: list[tuple[list[Array], Array]]
) -> None:
    check_case(CASES[n], *results[n])


def test_the_definition_of_fp4_is_that_of_torch_where_torch_has_one() -> None:
    exact = torch.from_numpy(FP4[:8]).float().numpy()
    np.testing.assert_array_equal(to_fp4(exact), np.arange(8))
    middles = (exact[:-1] + exact[1:]) / 2
    np.testing.assert_array_equal(to_fp4(middles), [0, 2, 2, 4, 4, 6, 6])
