"""What judges the model of time: how ranks are counted, and that what is saved is the model's."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from aiter_mx.sim.timing.constants import shipped
from aiter_mx.sim.timing.fit import modelled_us
from tune.published.judges import (
    FOLDER,
    GROUPED,
    PAIR,
    SWEEP,
    eager_us,
    grouped,
    pairs,
    rank_of_winner,
    sweep,
    trend_us,
    verdicts,
)
from tune.published.rows import Row
from tune.published.saved import REPEATED, load

ROWS = 16


def row(family: str, role: str = "", kernel: str = "k", us: float = 0.0, M: int = 8) -> Row:
    return Row(family, M, 2304, 6144, kernel, 1, 0, 0, us, role)


def test_saved_traces_give_the_saved_times() -> None:
    with (FOLDER / "judges.csv").open(newline="") as file:
        saved = list(islice(csv.DictReader(file), ROWS))
    for line, (found, launches) in zip(saved, load(FOLDER / "judges.xz", REPEATED), strict=False):
        assert (line["kernel"], int(line["k_splits"])) == (found.kernel, found.split_k)
        us = modelled_us(launches, shipped())
        assert us == pytest.approx(float(line["modelled_us"]), rel=0.01)


def test_a_tie_gives_the_winner_the_worst_place() -> None:
    cell = {
        row(SWEEP, "winner", "a"): 8.0,
        row(SWEEP, kernel="b"): 8.0,
        row(SWEEP, kernel="c"): 9.0,
    }
    assert rank_of_winner(cell) == 2


def test_eager_calls_take_what_the_host_takes_for_their_launches() -> None:
    alone, added = row(SWEEP), replace(row(SWEEP), split_k=8)
    assert [eager_us(alone, 5), eager_us(added, 5)] == [7.2, 14.4]
    assert eager_us(added, 20) == 20


def test_each_cell_of_the_sweep_has_its_valid_configurations_and_one_winner(
    tmp_path: Path,
) -> None:
    table = tmp_path / "tuned.csv"
    lines = (
        "K,N,M,kernel,n_sub,k_splits,use_hip",
        "6144,2304,8,mfma,1,8,1",
        "1536,6144,16,mfma,2,1,1",
        "2048,6144,1,gemv,0,0,1",
    )
    table.write_text("\n".join(lines))
    found = list(sweep(table))
    assert [sum(each.M == M for each in found) for M in (8, 16, 1)] == [12, 9, 0]
    winners = [each for each in found if each.role == "winner"]
    assert [(each.M, each.kernel, each.split_k) for each in winners] == [
        (8, "n_sub 1", 8), (16, "n_sub 2", 1),
    ]  # fmt: skip


def test_the_line_of_the_grouped_kernel_meets_a_published_cell() -> None:
    published = next(each for each in grouped() if each.role == "published")
    assert trend_us(16, 4096, 4096, 7168) == pytest.approx(published.us, rel=0.02)


def test_pairs_are_of_one_shape_and_differ_by_over_a_tenth() -> None:
    rows = [row("bf16", kernel="a", us=10), row("bf16", kernel="b", us=11.5)]
    rows += [row("bf16", kernel="a", us=10, M=16), row("bf16", kernel="b", us=10.5, M=16)]
    assert pairs(rows) == rows[:2]


def test_verdicts_count_what_is_right() -> None:
    modelled = {
        row(SWEEP, "winner", "a"): 20.0, row(SWEEP, kernel="b"): 24.0, row(SWEEP, kernel="c"): 16.0,
        row(GROUPED, "trend", us=100.0): 110.0, row(GROUPED, "trend", us=100.0, M=16): 130.0,
        row("bf16", PAIR, "a", 10.0): 9.0, row("bf16", PAIR, "b", 12.0): 8.0,
    }  # fmt: skip
    assert verdicts(modelled) == [
        "sweep: winner in the first three in 1 of 1 cells",
        "sweep: winner within 10 % of the model's best in 0 of 1 cells",
        "grouped: 1 of 2 cells within 20 %, median error 20.0%",
        "pairs: the faster kernel named in 0 of 1",
    ]


def test_the_saved_times_rank_configurations_and_pairs_and_follow_the_grouped_kernel() -> None:
    modelled = {}
    with (FOLDER / "judges.csv").open(newline="") as file:
        for line in csv.DictReader(file):
            sizes = [int(line[name]) for name in ("M", "N", "K")]
            groups, us = int(line["groups"] or 0), float(line["published_us"] or 0)
            split_k = int(line["k_splits"])
            found = Row(
                line["set"], *sizes, line["kernel"], split_k, groups, 0, us, line["published"]
            )
            modelled[found] = float(line["modelled_us"])
    told = "\n".join(verdicts(modelled))
    near, cells, median = re.findall(r"(\d+) of (\d+) cells within 20 %, median error (.+)%", told)[
        0
    ]
    assert (int(near) >= 20, int(cells), float(median) <= 12) == (True, 24, True)
    first, apart = map(int, re.findall(r"first three in (\d+) of (\d+)", told)[0])
    near_best, whole = map(int, re.findall(r"model's best in (\d+) of (\d+)", told)[0])
    assert first >= 0.8 * apart > 0.8 * 16 and near_best >= 0.8 * whole == 0.8 * 60
    right, pairs_in_all = map(int, re.findall(r"faster kernel named in (\d+) of (\d+)", told)[0])
    assert right >= 0.8 * pairs_in_all >= 0.8 * 18
