"""The shipped tables that the model of time has made: what their rows say, and how times grow."""

from __future__ import annotations

import pandas as pd
import pytest

from aiter_mx.dispatch.cells import told_source
from aiter_mx.dispatch.tables import read_table, table_files
from aiter_mx.kernels.registry import key_columns
from aiter_mx.paths import configs_dir
from aiter_mx.workloads import workload_of

FALL = 0.03  # that a time may fall by where there are more rows
TABLES = sorted(
    path for path in (configs_dir() / "gfx950").glob("*.csv") if path.name.count(".") == 1
    and path.stem != "runs"
)  # fmt: skip


@pytest.fixture(params=TABLES, ids=lambda path: path.stem)
def table(request: pytest.FixtureRequest) -> pd.DataFrame:
    found = pd.read_csv(request.param, keep_default_na=False)
    if not found.source.str.contains("%").any():
        pytest.skip("it is older than the model's error")
    found.attrs["op"] = request.param.stem
    return found


def test_every_row_tells_the_model_and_its_error(table: pd.DataFrame) -> None:
    modelled = table[table.source != "measured"]
    for source in modelled.source.unique():
        assert told_source(source).startswith("modelled, median error "), source
    assert (modelled.us > 2).all()  # no launch takes less


@pytest.mark.parametrize("op", [path.stem for path in TABLES])
def test_times_below_all_that_was_measured_are_marked_and_no_others(op: str) -> None:
    """Of fp8 and at most 16 rows nothing takes less than 3.9 us and the weights at 6.3 TB/s."""
    told = []
    for path in table_files("gfx950", op):
        for row_op, row in read_table(path):
            weights_us = workload_of(row_op).read_bytes(row.problem, None) / 6.3e6
            assert row.us is not None
            is_below = row.problem.M <= 16 and row.us < 3.9 + weights_us
            assert is_below == ("faster than anything" in told_source(row.origin)), row.where
            told.append(is_below)
    assert told and not all(told)


def test_times_do_not_fall_as_rows_grow(table: pd.DataFrame) -> None:
    apart = [name for name in ("cu_num", *key_columns(table.attrs["op"])) if name != "M"]
    falls = []
    for shape, of_shape in table.groupby(apart):
        ordered = of_shape.sort_values("M")
        most = ordered.us.cummax()
        falls += [(shape, M) for M in ordered.M[ordered.us < most * (1 - FALL)]]
    assert not falls
