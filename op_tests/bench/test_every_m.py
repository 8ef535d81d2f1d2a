"""What decides which cells are measured, how often, and which of them a later run measures."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest
import torch

import aiter_mx
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.target import hardware
from op_tests.bench import common, every_m

FACTS = {"gpu": "a GPU", "commit": "0123456"}


def test_every_shape_has_the_grid_and_as_many_rows_of_its_own() -> None:
    own = {shape: set(every_m.rows_of(*shape)) for shape in every_m.shapes()[::9]}
    for rows in own.values():
        assert rows > set(every_m.GRID) and len(rows) == len(every_m.GRID) + every_m.DRAWN
        assert max(rows) == 32768
    assert len({frozenset(rows) for rows in own.values()}) == len(own)
    assert every_m.rows_of(2304, 6144) == every_m.rows_of(2304, 6144)


def test_a_share_of_the_shapes_is_drawn_by_its_seed() -> None:
    every = every_m.shapes()
    assert (2304, 6144) in every and len(every) == len(set(every))
    tenth = every_m.drawn(every, 10, 22)
    assert tenth == every_m.drawn(every, 10, 22) != every_m.drawn(every, 10, 23)
    assert len(tenth) == -(-len(every) // 10) == len(set(tenth)) and set(tenth) < set(every)
    third = every_m.drawn(every, 3, 22)
    assert len(third) == -(-len(every) // 3) and third[: len(tenth)] == tenth


@pytest.mark.parametrize(
    ("M", "bf16", "rounds"),
    [(128, 9.8, 4), (128, 9.6, 1), (128, 10.0, 1), (161, 9.3, 4), (161, 9.6, 1), (161, 9.1, 1)],
)
def test_only_what_just_misses_its_bar_is_timed_again(M: int, bf16: float, rounds: int) -> None:
    timed = [(10.0, bf16), (9.0, 1.0), (8.0, 2.0), (7.0, 30.0)]
    left = iter(timed)
    times = every_m.measured(lambda: dict(zip(("ours_us", "bf16_us"), next(left), strict=True)), M)
    assert len(timed) - len(list(left)) == rounds
    if rounds == 1:
        assert times == {"ours_us": 10.0, "bf16_us": bf16}
    else:
        assert times == {"ours_us": 8.5, "bf16_us": (2.0 + bf16) / 2, "rounds": 4}


def test_a_run_goes_on_where_another_of_the_same_commit_ended(tmp_path: Path) -> None:
    path, shape = tmp_path / "h200" / "linear_every_m.csv", (768, 512)
    first = common.Saved(path, every_m.CELL, FACTS)
    rows = every_m.rows_of(*shape)
    wanted = [(shape, rows)]
    assert list(every_m.cells(wanted, first)) == [(shape, rows)]
    for M in rows[:-2]:
        first.add({"M": M, "N": shape[0], "K": shape[1], "ours_us": M + 0.25})
    assert list(every_m.cells(wanted, common.Saved(path, every_m.CELL, FACTS))) == [
        (shape, rows[-2:])
    ]
    for M in rows[-2:]:
        first.add({"M": M, "N": shape[0], "K": shape[1], "ours_us": M + 0.25})
    assert list(every_m.cells(wanted, common.Saved(path, every_m.CELL, FACTS))) == []
    other = common.Saved(path, every_m.CELL, FACTS | {"commit": "7654321"})
    assert list(every_m.cells(wanted, other)) == [(shape, rows)]
    other.add({"M": rows[0], "N": shape[0], "K": shape[1], "ours_us": 1.0})
    table = pd.read_csv(path, dtype={"commit": str})
    assert list(table["M"]) == rows and (table["gpu"] == "a GPU").all()
    assert list(table["commit"]) == ["7654321", *["0123456"] * (len(rows) - 1)]
    assert list(table["ours_us"][1:]) == pytest.approx([M + 0.25 for M in rows[1:]], rel=1e-4)


def test_a_cell_names_what_ran_and_the_better_of_hummings_two_kinds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = {"ours_us": 10.0, "ours_bf16_x_us": 12.5, "bf16_us": 15.0}
    problem = LinearProblem(400, 9216, 6144)
    row = every_m.row_of(hardware("sm_90a"), problem, times)
    assert row["kernel"] == "wgmma_bf16" and "x" in str(row["config"])
    assert row["over_bf16"] == 1.5 and row["bf16_x_over_bf16"] == 1.2
    assert float(str(row["workspace_mb"])) >= 400 * 6144 * 2 / 1e6
    assert "over_humming" not in row
    monkeypatch.setattr(every_m, "version", lambda name: f"{name} 1.2")
    humming = {"humming_us": 14.0, "humming_fp8_us": 13.0}
    row = every_m.row_of(hardware("sm_90a"), problem, times | humming | {"fp8_us": 9.0})
    assert row["over_fp8"] == 0.9
    assert row["over_humming"] == 1.3 and row["humming"] == "humming-kernels 1.2"
    assert row["bf16_x_over_humming"] == 13.0 / 12.5


def test_what_humming_refuses_or_gets_wrong_is_measured_without_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def humming(N: int, K: int, wq: torch.Tensor, ws: torch.Tensor, x_dtype: str | None) -> object:
        if N == 96:
            raise RuntimeError("shape is invalid")

        def product(x: torch.Tensor) -> torch.Tensor:
            if x_dtype and len(x) == 3:
                raise RuntimeError("no kernel compiles")
            return aiter_mx.linear(x, None, wq, ws) * (2 if x_dtype and len(x) == 4 else 1)

        return product

    monkeypatch.setattr(every_m, "HUMMING", object())
    monkeypatch.setattr(every_m, "humming", humming)
    monkeypatch.setattr(every_m, "copies_to_stay_cold", lambda size: 2)
    device = torch.device("cpu")
    assert every_m.Weights(96, 64, device).humming == {}
    assert "humming_fp8_us is left out at 96x64: RuntimeError" in capsys.readouterr().out
    weights = every_m.Weights(64, 96, device)
    theirs = {M: [n for n in weights.calls(M) if "humming" in n] for M in (2, 3, 4)}
    assert theirs == {2: ["humming_us", "humming_fp8_us"], 3: ["humming_us"], 4: ["humming_us"]}
    told = capsys.readouterr().out
    assert "humming_fp8_us is left out at 3x64x96: RuntimeError('no kernel compiles')" in told
    assert re.search(
        r"humming_fp8_us is left out at 4x64x96: its result is off by (0\.9|1\.)", told
    )


def test_contenders_compute_the_same_product_over_cold_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(every_m, "copies_to_stay_cold", lambda size: 3)
    weights = every_m.Weights(64, 96, torch.device("cpu"))
    quantised, own, dense, fp8 = timed = list(weights.calls(5).values())
    assert [len(calls) for calls in timed] == [3, 3, 3, 3]
    places = [{call.args[i].data_ptr() for call in of} for of in (quantised, fp8) for i in (2, 3)]
    assert [len(place) for place in places] == [3, 3, 3, 3]
    out = own[1]()
    x, _, *w = own[1].args
    assert torch.equal(out, aiter_mx.linear(x, None, *w))
    results = [of[2]().float().clone() for of in (quantised, dense, fp8)]
    for result in results:  # of the same values, in bf16 and by either rounding to fp8
        assert (result - results[1]).norm() < 0.06 * results[1].norm()


def test_what_a_run_says_of_humming_outlasts_one_without_it(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.csv" for name in ("every_m", "humming")]
    row = {"M": 8, "N": 768, "K": 512, "ours_us": 2.0, "over_humming": 1.5}
    every_m.keep(*(common.Saved(each, every_m.CELL, FACTS) for each in files), row)
    later = FACTS | {"commit": "7654321"}
    without = {"M": 8, "N": 768, "K": 512, "ours_us": 3.0}
    every_m.keep(*(common.Saved(each, every_m.CELL, later) for each in files), without)
    every, humming = (pd.read_csv(each, dtype={"commit": str}) for each in files)
    assert (every.ours_us[0], every.commit[0]) == (3.0, "7654321")
    assert (humming.ours_us[0], humming.over_humming[0], humming.commit[0]) == (2.0, 1.5, "0123456")
