"""Which cache a line comes from: what workgroups of an XCD have in common, and what stays there."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from aiter_mx.sim.report import LaunchReport
from aiter_mx.sim.timing.model import Traced, predict, traced
from aiter_mx.sim.timing.sharing import L2_BYTES, MALL_BYTES, XCDS, Left, fresh
from op_tests.sim.tools import TRACED, Array, launch, program

GROUPS, STEPS = 64, 32
READ = """
KERNEL(64) read_rows(const u32* in, u32* out, int rows, int steps) {
    u32 sum = 0, row = group_id() % rows * steps;
    for (int i = 0; i < steps; i++)
        sum += in[64 * (row + i) + lane_id()];
    out[64 * group_id() + lane_id()] = sum;
}
"""


@cache
def operands(rows: int) -> tuple[Array, Array]:
    """The same for all workgroups, as traces number regions in the order of their addresses."""
    return np.zeros(64 * STEPS * rows, np.uint32), np.zeros(64 * GROUPS, np.uint32)


@cache
def run(number: int, rows: int) -> LaunchReport:
    """The workgroup of a number, or all by -1, of a launch that reads so many blocks of rows."""
    data, out = operands(rows)
    part = {"first_group": number, "group_count": 1} if number >= 0 else {}
    return launch(
        program(READ), "read_rows", GROUPS, 64, [data, out, rows, STEPS], access="rw",
        options=replace(TRACED, schedule="round-robin", **part),
    )  # fmt: skip


def read(rows: int) -> Traced:
    found = traced(run(-1, rows), program(READ).kernel("read_rows"), GROUPS, 64)
    return replace(found, fresh=fresh(lambda number: run(number, rows), GROUPS))


@pytest.mark.parametrize(
    ("rows", "new"),
    # Of the 8 workgroups of an XCD, which are 8 numbers apart: how many read rows of their own?
    [(GROUPS, 1.0), (32, 0.5), (16, 0.25), (XCDS, 0.125), (3, 0.375), (1, 0.125)],
)
def test_lines_that_workgroups_of_an_xcd_share_come_to_it_once(rows: int, new: float) -> None:
    found = read(rows)
    region = found.split.region_bytes.index(64 * STEPS * rows * 4)
    assert found.fresh[region] == new
    held = replace(found, left=Left(0, MALL_BYTES)).shares()
    assert (held.memory[region], held.mall[region]) == (0, new)


def test_what_is_nearer_comes_sooner_and_what_is_stored_goes_out_all_the_same() -> None:
    found = read(16)
    cold, in_mall, in_l2 = (
        predict(replace(found, left=left)).us
        for left in (Left(), Left(0, MALL_BYTES), Left(L2_BYTES, MALL_BYTES))
    )
    assert in_l2 < in_mall < cold
    shares = replace(found, left=Left(L2_BYTES, MALL_BYTES)).shares()
    stored = [i for i in range(len(shares.mall)) if found.split.is_stored_to(i)]
    assert [i for i, share in enumerate(shares.mall) if share] == stored


def test_operands_that_a_cache_has_no_room_for_are_not_in_it() -> None:
    found = read(GROUPS)
    assert replace(found, left=Left(4096, 4096)).shares() == found.shares()
    in_mall = replace(found, left=Left(4096, MALL_BYTES)).shares()
    assert in_mall == replace(found, left=Left(0, MALL_BYTES)).shares() != found.shares()
