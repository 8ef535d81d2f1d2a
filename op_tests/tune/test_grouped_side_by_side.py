"""Our grouped products beside published ones: cells, how their lines are made, the saved table."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from aiter_mx.sim.timing.constants import shipped
from aiter_mx.sim.timing.fit import modelled_us
from aiter_mx.tuning.traces import sampled
from tune.grouped_side_by_side import (
    SAVED,
    Cell,
    cells,
    launch_of,
    line,
    lines,
    ours,
    saved,
    theirs,
)
from tune.published import sample

SMALL = Cell("forward", "balanced", 2, 64, 128, 512)


def test_cells_keep_their_rows_whatever_the_groups() -> None:
    for cell in cells():
        sizes = cell.sizes()
        assert len(sizes) == cell.groups and sum(sizes) <= cell.groups * cell.rows
        assert sum(sizes) > cell.groups * cell.rows - 128 * cell.groups
        if cell.what == "wgrad":
            assert not any(size % 128 for size in sizes)


def test_lines_compare_even_groups_with_the_others_and_uneven_ones_with_even_ones() -> None:
    launches, words = ours(SMALL)
    us = modelled_us(launches, shipped())
    uneven = Cell("forward", "mild", 2, 64, 128, 512)
    even, mild = lines([SMALL, uneven], lambda cell: launches * 2)
    assert even == line(SMALL, launches, words, launches * 2, None)
    assert (float(str(even["times_as_fast"])), float(str(even["wins_of_draws"]))) == (2.0, 1.0)
    assert abs(float(str(mild["share_of_even"])) - us / float(str(mild["ours_us"]))) < 0.01


def test_published_workgroups_are_traced_all_over_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles of one do not tell those of others: its time alone may be below the launch's."""
    launch, _ = launch_of(SMALL)
    report = SimpleNamespace(instructions=9, trace=sampled(launch, 1, launch.groups).trace)
    numbers: list[int] = []

    def traced(run: object, launch: object, number: int) -> SimpleNamespace:
        numbers.append(number)
        return report

    monkeypatch.setattr(sample, "_traced", traced)
    monkeypatch.setattr(sample, "resident", lambda *of_kernel: 1)
    program = SimpleNamespace(kernel=str)
    whole = SimpleNamespace(
        program=program, kernel="", grid=(256, 1, 1), block=(256, 1, 1), shared_bytes=0
    )
    product = SimpleNamespace(launches=[whole])
    published: Any = SimpleNamespace(product=lambda *sizes: product)
    (found,) = theirs(published, SMALL)
    assert min(numbers) < 64 and max(numbers) >= 192 and len(numbers) >= 4
    assert (found.split.groups, found.groups) == (len(numbers), 256)


def test_the_saved_table_has_every_cell() -> None:
    table = pd.read_csv(SAVED)
    found = [Cell(*row) for row in table[list(vars(SMALL))].itertuples(index=False)]
    assert found == list(cells()) and set(found) >= set(saved()) & set(cells())
    balanced = table[table["mode"] == "balanced"]
    assert (balanced.times_as_fast >= 1).all()
    assert (table[table["mode"] != "balanced"].share_of_even >= 0.9).all()
