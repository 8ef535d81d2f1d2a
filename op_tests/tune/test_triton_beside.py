"""Triton's predicted time beside ours: all launches of a call count, and losses are counted."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.sim.timing.constants import shipped
from aiter_mx.sim.timing.fit import modelled_us
from tune.triton_beside import GFX950, SAVED, problems_of, rows_of, summary, triton_launches_of


def test_every_launch_of_a_call_is_traced() -> None:
    problem = LinearProblem(3, 64, 512)
    configs = find_kernel("linear", "gfx950", "triton", "dot_scaled").candidates(GFX950, problem)
    split = next(config for config in configs if config["SPLIT_K"] > 1)
    product, sums = triton_launches_of("linear", problem, split)
    assert product.groups == split["SPLIT_K"] * -(-64 // split["BLOCK_N"])
    assert sums.groups == 1
    assert modelled_us([product, sums], shipped()) > modelled_us([product], shipped()) > 2


def test_rows_of_tables_are_the_problems_that_they_are_of() -> None:
    assert LinearProblem(1, 2304, 6144) in problems_of("linear")


def test_losses_are_counted_up_to_64_rows() -> None:
    found = [
        {"op": "linear", "M": M, "times_as_fast": fast, "unmeasured": mark}
        for M, fast, mark in ((1, 1.5, 1), (64, 0.95, 0), (128, 0.9, 0), (2, 1.0, 1))
    ]
    told = summary(found)
    assert "faster in 1 of 3 rows" in told and "least 0.90 times" in told and "; 2 are" in told


OPS = ("linear", "moe_gemm")


def test_enough_rows_of_each_op_are_saved() -> None:
    for op in OPS:
        assert sum(row["op"] == op for row in rows_of(SAVED)) > 40


@pytest.mark.parametrize("op", OPS)
def test_saved_rows_keep_to_what_is_asked(op: str) -> None:
    found = [row for row in rows_of(SAVED) if row["op"] == op]
    few = [row for row in found if int(row["M"]) <= 64]
    lost = [row for row in few if float(row["times_as_fast"]) < 1]
    assert len(lost) <= 0.02 * len(few)
    assert all(float(row["times_as_fast"]) > 0.9 for row in found)
