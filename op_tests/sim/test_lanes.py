"""Data moving between lanes in the simulator: DPP, permutes, swaps, lane reads."""

from __future__ import annotations

import numpy as np
import pytest

from op_tests.sim.tools import Array, launch, program

L = np.arange(64)
ROW, AT = L & ~15, L & 15


@pytest.fixture
def values() -> Array:
    return np.random.default_rng(1).integers(-(2**31), 2**31, 64).astype(np.int32)


def test_dpp_moves_and_keeps_the_right_lanes(values: Array) -> None:
    out = np.zeros((10, 64), np.int32)
    launch(program("lanes.cu"), "dpp", 1, 64, [values, out], access="rw")
    old = -1 - L

    def moved(source: Array, valid: Array) -> Array:
        return np.where(valid, values[source % 64], old)

    everywhere = np.ones(64, bool)
    want = [
        moved(L - 1, AT >= 1),
        np.where(AT + 3 < 16, values[(L + 3) % 64], 0),
        moved(ROW + (AT - 5) % 16, everywhere),
        moved(L ^ 3, everywhere),
        moved(ROW + 15 - AT, everywhere),
        moved(L ^ 7, everywhere),
        moved(ROW - 1, np.isin(L // 16, [1, 3])),
        moved(np.full(64, 31), L >= 32),
        moved(L - 4, (AT >= 4) & np.isin(L // 4 % 4, [0, 2])),
        moved(ROW + 2, everywhere),
    ]
    np.testing.assert_array_equal(out, np.array(want))


def test_permutes_swaps_and_lane_reads(values: Array) -> None:
    index = np.random.default_rng(2).permutation(64).astype(np.int32)
    out = np.zeros((18, 64), np.int32)
    launch(program("lanes.cu"), "permutes", 1, 64, [values, index, out], access="rrw")
    scattered = np.zeros(64, np.int32)
    scattered[index] = values
    turned = np.array([int(f"{lane & 31:05b}"[::-1], 2) for lane in L])
    upper32, upper16 = L >= 32, L // 16 % 2 == 1
    written = values.copy()
    written[9] = index[3]
    want = [
        values[index],
        scattered,
        values[L ^ 2],
        values[(L & 32) + ((L & 0x0C | 0x03) ^ 0x11)],
        np.where(upper32, index[L - 32], values),
        np.where(upper32, index, values[(L + 32) % 64]),
        np.where(upper16, index[L - 16], values),
        np.where(upper16, index, values[(L + 16) % 64]),
        np.full(64, values[index[5] & 63]),
        np.full(64, values[0]),
        L + 7,
        written,
        (values < 0).astype(np.int32),
        np.where(L % 3, index - 3 * values, values - 3 * index),
        values[(L & 0x30) + (L + 5 & 0x0F)],
        values[(L & 0x28) + (L - 3 & 0x17)],
        values[(L & 32) + turned],
        values[(L & 32) + (turned >> 2 | L & 0x11)],
    ]
    np.testing.assert_array_equal(out, np.array(want))


def test_an_inactive_lane_gives_zero(values: Array) -> None:
    out = np.zeros(64, np.int32)
    launch(program("lanes.cu"), "inactive", 1, 64, [values, out], access="rw")
    np.testing.assert_array_equal(out, np.where(L & 1, 0, 5))
