"""Steps of gfx950's linear by the model of time: how they are made, and the saved table."""

from __future__ import annotations

import pandas as pd
import pytest

from aiter_mx.kernels.linear import LinearProblem
from op_tests.bench.common import MEASURED
from op_tests.bench.decode_gfx950 import row_of
from op_tests.bench.every_m import drawn, shapes
from op_tests.bench.steps_gfx950 import BAR, EVERY, SEED, steps_of, summary


def test_a_step_is_what_one_row_more_takes() -> None:
    steps = {row["M"]: row for row in steps_of((1536, 384), 257)}
    assert {64, 128, 192, 256} <= set(steps)
    for M in (64, 128):
        us, next_us = (
            row_of(LinearProblem(rows, 1536, 384))["predicted_us"] for rows in (M, M + 1)
        )
        assert (steps[M]["us"], steps[M]["next_us"]) == (us, next_us)
        assert isinstance(us, float) and isinstance(next_us, float)
        assert steps[M]["step"] == pytest.approx(next_us / us)


def test_rows_of_the_same_launches_are_kept() -> None:
    steps = steps_of((1536, 384), 129)
    marked: list[dict[str, object]] = [{**row, "us": 0.0} for row in steps]
    marked[0]["next_config"] = "another"
    again = steps_of((1536, 384), 129, marked)
    assert [row["us"] for row in again] == [steps[0]["us"], *(0.0 for _ in steps[1:])]
    assert again[0]["next_config"] == steps[0]["next_config"]


def test_steps_are_counted_by_rows() -> None:
    frame = pd.DataFrame({"M": [64, 64, 128, 200, 8191], "step": [1.0, 1.2, BAR, 0.9, 2.0]})
    told = summary(frame)
    assert told.cells.tolist() == [2, 1, 1, 1] and told.met.tolist() == [0.5, 1.0, 1.0, 0.0]
    assert told.largest.tolist() == [1.2, BAR, 0.9, 2.0]


def test_the_saved_table_has_every_drawn_shape() -> None:
    saved = pd.read_csv(MEASURED / "gfx950_simulated" / "steps.csv")
    assert {*zip(saved.N, saved.K, strict=True)} == {*drawn(shapes(), EVERY, SEED)}
    assert (saved.step - saved.next_us / saved.us).abs().max() < 0.01
