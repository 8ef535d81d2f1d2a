"""Matrix instructions of the simulator against float64: layouts, scales, special values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aiter_mx.sim.program import SCHEDULES, SimOptions
from op_tests.sim.tools import Array, dequantise, e4m3_to_f64, launch, program, random_e4m3

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def scale_words(rng: np.random.Generator, rows: int, blocks: int) -> Array:
    """Four different random e8m0 scales in each word."""
    return rng.integers(100, 150, (rows, blocks, 4), dtype=np.uint8)


def assert_rounded(got: Array, want: Array, magnitude: Array) -> None:
    """Equal to float64 but for one rounding to f32 and the order of a double sum."""
    assert np.all(np.abs(got - want) <= magnitude * 2.0**-23), np.abs(got - want).max()


@pytest.mark.parametrize("side", [16, 32])
def test_scaled_fp8_layouts_and_scale_bytes(side: int) -> None:
    rng = np.random.default_rng(side)
    depth, blocks = (128, 4) if side == 16 else (64, 2)
    a, b = random_e4m3(rng, side, depth), random_e4m3(rng, side, depth)
    sa, sb = scale_words(rng, side, blocks), scale_words(rng, side, blocks)
    c = rng.normal(0, 2.0**12, (side, side)).astype(np.float32)
    picks = [(0, 0), (1, 2), (2, 3), (3, 1)] if side == 16 else [(2, 1)]
    out = np.zeros((len(picks), side, side), np.float32)
    arguments = [a, sa, b, sb, c, out] if side == 16 else [a, sa, b, sb, out]
    launch(program("matrix.cu"), f"scaled{side}", 1, 64, arguments)
    for got, (pa, pb) in zip(out, picks, strict=True):
        x = dequantise(a, np.ascontiguousarray(sa[..., pa]))
        y = dequantise(b, np.ascontiguousarray(sb[..., pb]))
        start = c if side == 16 else np.zeros_like(c)
        assert_rounded(got, x @ y.T + start, np.abs(x) @ np.abs(y.T) + np.abs(start))


def test_scaled_fp8_nans_stay_in_their_row_column_and_block() -> None:
    rng = np.random.default_rng(5)
    a, b = random_e4m3(rng, 16, 128), random_e4m3(rng, 16, 128)
    sa, sb = scale_words(rng, 16, 4), scale_words(rng, 16, 4)
    a[3, 77], b[9, 5] = 0x7F, 0xFF
    a[6, 32:64], sa[6, 1, 0], sb[12, 3, 0] = 0, 255, 255
    c, out = np.zeros((16, 16), np.float32), np.zeros((4, 16, 16), np.float32)
    launch(program("matrix.cu"), "scaled16", 1, 64, [a, sa, b, sb, c, out])
    x, y = (dequantise(q, np.ascontiguousarray(s[..., 0])) for q, s in ((a, sa), (b, sb)))
    want = x @ y.T
    np.testing.assert_array_equal(np.isnan(out[0]), np.isnan(want))
    assert np.isnan(out[0]).sum() == 64 - 4  # two rows and two columns, and nothing else
    good = ~np.isnan(want)
    assert_rounded(out[0][good], want[good], (np.abs(x) @ np.abs(y.T))[good])


def test_a_scale_of_255_is_finite_where_the_options_say_so() -> None:
    rng = np.random.default_rng(9)
    a, b = random_e4m3(rng, 16, 128), random_e4m3(rng, 16, 128)
    sa, sb = scale_words(rng, 16, 4), scale_words(rng, 16, 4)
    sa[6, 1, 0] = 255
    sb -= 80  # sums stay below f32's largest
    c, out = np.zeros((16, 16), np.float32), np.zeros((4, 16, 16), np.float32)
    options = SimOptions(finite_scales=True)
    launch(program("matrix.cu"), "scaled16", 1, 64, [a, sa, b, sb, c, out], options=options)
    factors = np.exp2(sa[..., 0] - 127.0).repeat(32, axis=1)
    x, y = e4m3_to_f64(a) * factors, dequantise(b, np.ascontiguousarray(sb[..., 0]))
    assert_rounded(out[0], x @ y.T, np.abs(x) @ np.abs(y.T))


def test_scaled_fp4_takes_32_consecutive_k_low_nibble_first() -> None:
    rng = np.random.default_rng(6)
    packed = rng.integers(0, 256, (2, 16, 64), dtype=np.uint8)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(2, 16, 128)
    scales = [scale_words(rng, 16, 4) for _ in range(2)]
    out = np.zeros((16, 16), np.float32)
    a, b = np.ascontiguousarray(packed[0]), np.ascontiguousarray(packed[1])
    launch(program("matrix.cu"), "scaled_fp4", 1, 64, [a, scales[0], b, scales[1], out])
    x, y = (
        FP4[q] * np.repeat(np.exp2(s[..., 0] - 127.0), 32, axis=1)
        for q, s in zip(codes, scales, strict=True)
    )
    assert_rounded(out, x @ y.T, np.abs(x) @ np.abs(y.T))


def test_unscaled_f16_bf16_and_fp8() -> None:
    rng = np.random.default_rng(8)
    ah, bh = rng.normal(0, 3, (2, 16, 32)).astype(np.float16)
    brain = torch.from_numpy(rng.normal(0, 3, (2, 32, 16))).bfloat16()
    ab, bb = (x.view(torch.int16).numpy() for x in brain)
    a8, b8 = random_e4m3(rng, 16, 32), random_e4m3(rng, 16, 32)
    out = np.zeros(256 + 1024 + 256, np.float32)
    arguments = [np.ascontiguousarray(x) for x in (ah, bh, ab, bb, a8, b8)]
    launch(program("matrix.cu"), "plain", 1, 64, [*arguments, out])
    exact = (
        [x.astype(np.float64) for x in (ah, bh)],
        [*brain.double().numpy()],
        [
            e4m3_to_f64(a8),
            e4m3_to_f64(b8),
        ],
    )
    for (x, y), got in zip(exact, np.split(out, [256, 1280]), strict=True):
        want = x @ y.T
        assert_rounded(got.reshape(want.shape), want, np.abs(x) @ np.abs(y.T))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("M", "N", "K"), [(64, 64, 128), (100, 136, 384)])
def test_tiled_gemm_through_lds_matches_float64(M: int, N: int, K: int, schedule: str) -> None:
    rng = np.random.default_rng(M + K)
    a, b = random_e4m3(rng, M, K), random_e4m3(rng, N, K)
    sa, sb = (rng.integers(107, 147, (rows, K // 32), dtype=np.uint8) for rows in (M, N))
    out = np.full((M, N), 7.0, np.float32)
    report = launch(
        program("matrix.cu"),
        "gemm",
        (-(-M // 64), -(-N // 64), 1),
        256,
        [a, sa, b, sb, out, M, N, K],
        access="rrrrw",
        options=SimOptions(schedule=schedule, seed=M),
    )
    x, y = dequantise(a, sa), dequantise(b, sb)
    assert_rounded(out, x @ y.T, (np.abs(x) @ np.abs(y.T)) * (1 + K // 128))
    tiles = -(-M // 64) * -(-N // 64)
    assert report.mfma == {"v_mfma_scale_f32_16x16x128_f8f6f4": tiles * 4 * 4 * K // 128}
    assert report.bytes_written == 4 * M * N
