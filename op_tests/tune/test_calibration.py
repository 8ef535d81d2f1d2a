"""The calibration of the model of time, from what is saved of it alone."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from shutil import copy

import pandas as pd
import pytest

from aiter_mx.sim.timing.constants import described, shipped, with_values
from aiter_mx.sim.timing.fit import Observation, at_the_edge, fit, fitted_names, loss, modelled_us
from tune.calibrate import FOLDER, spearman
from tune.published.picture import draw, errors
from tune.published.rows import LEAST_TESTS, Row, drawn, read
from tune.published.saved import load

ROWS = 24


@pytest.fixture(scope="module")
def observations() -> list[Observation]:
    return [Observation((row.family, row.stratum), row.us, launches)
            for row, launches in islice(load(FOLDER / "traces.xz"), ROWS)]  # fmt: skip


def test_saved_traces_give_the_saved_predictions() -> None:
    with (FOLDER / "predictions.csv").open(newline="") as file:
        saved = list(islice(csv.DictReader(file), ROWS))
    for line, (row, launches) in zip(saved, load(FOLDER / "traces.xz"), strict=False):
        assert (line["kernel"], int(line["M"])) == (row.kernel, row.M)
        found = modelled_us(launches, shipped())
        assert found == pytest.approx(float(line["modelled_us"]), rel=0.01)


def test_the_stated_error_is_that_of_the_test_rows() -> None:
    with (FOLDER / "predictions.csv").open(newline="") as file:
        errors = sorted(abs(float(line["modelled_us"]) / float(line["us"]) - 1)
                        for line in csv.DictReader(file) if line["role"] == "test")  # fmt: skip
    middle = (errors[(len(errors) - 1) // 2] + errors[len(errors) // 2]) / 2
    assert described()["error"]["median"] == pytest.approx(middle, abs=0.002)


def test_the_picture_shows_the_errors_that_are_saved(tmp_path: Path) -> None:
    rows = pd.read_csv(FOLDER / "predictions.csv")
    drawn_errors = errors(rows[rows["role"] == "test"])
    saved = pd.read_csv(FOLDER / "errors.csv")
    saved = saved[saved["predictor"] == "model, family left out"]
    saved = saved[(saved["family"] != "all") & (saved["rows of"] != "all")]
    assert len(drawn_errors) == len(saved) == 20
    assert sorted(drawn_errors["median"]) == pytest.approx(sorted(saved["median"]), abs=0.002)
    copy(FOLDER / "predictions.csv", tmp_path)
    assert draw(tmp_path).stat().st_size > 20_000


def test_a_family_that_was_left_out_is_predicted_and_better_than_without_a_replay() -> None:
    saved = pd.read_csv(FOLDER / "errors.csv").set_index(["predictor", "family", "rows of"])
    families = set(saved.index.get_level_values("family")) - {"all"}
    assert len(families) == 5
    left_out = saved.loc["model, family left out"]
    for family in families:
        whole = left_out.loc[(family, "all")]
        assert whole["median"] <= 0.15 and whole["p90"] <= 0.4, family
        assert (left_out.loc[family]["median"] <= 0.2).all(), family
    for other in ("sums without a replay", "bytes and launch", "regression"):
        least = saved.loc[(other, "all", "all"), "median"]
        assert left_out.loc[("all", "all"), "median"] <= least * 2 / 3, other


def test_rows_of_few_m_are_ranked_as_published_and_others_are_off_by_half_as_much_again() -> None:
    bars = pd.read_csv(FOLDER / "bars.csv").set_index(["what", "of"])
    share = bars.loc["share of the median error"]
    assert set(share.index) == {"sums without a replay", "bytes and launch", "regression"}
    assert (share["value"] <= 0.667).all()
    rows = pd.read_csv(FOLDER / "predictions.csv")
    rows = rows[(rows["role"] == "test") & (rows["M"] <= 64)]
    ranks = bars.loc["Spearman, M <= 64"]
    for family, line in ranks.iterrows():
        part = rows[(rows["family"] == family) | (family == "all")]
        assert len(part) == line["rows"]
        found = spearman(list(part["us"]), list(part["family_left_out_us"]))
        assert found == pytest.approx(line["value"], abs=0.001)
    assert ranks.loc["all", "value"] >= 0.95
    # Times of the block scale family lie closer together, so that errors reorder more of them.
    assert (ranks["value"].drop("block_scale_asm") >= 0.95).all()
    assert ranks.loc["block_scale_asm", "value"] >= 0.9


def test_ranks_of_equal_values_are_shared() -> None:
    assert spearman([1, 2, 3], [10, 20, 90]) == pytest.approx(1)
    assert spearman([1, 2, 3], [30, 20, 10]) == pytest.approx(-1)
    assert spearman([1, 1, 3], [10, 20, 30]) == pytest.approx(3**0.5 / 2)


def test_a_fit_finds_a_constant_again(observations: list[Observation]) -> None:
    """Times that the model gave for one constant lead a fit from another back to it."""
    true = with_values({"launch_us": 3.5})
    made = [replace(each, us=modelled_us(each.launches, true)) for each in observations]
    present = {name: getattr(shipped(), name) for name in fitted_names()}
    found = fit(made, present, steps=60)
    assert loss(made, with_values(found)) < loss(made, shipped()) / 2
    for name in fitted_names():
        assert described()[name]["low"] <= found[name] <= described()[name]["high"]


def test_constants_at_the_end_of_their_range_are_named() -> None:
    values = {name: getattr(shipped(), name) for name in fitted_names()}
    low, high = described()["deal_us"]["low"], described()["deal_us"]["high"]
    assert "deal_us" in at_the_edge({**values, "deal_us": high})
    assert "deal_us" not in at_the_edge({**values, "deal_us": (low + high) / 2})


def test_the_manifest_has_enough_test_rows_and_it_is_said_what_became_of_each() -> None:
    rows = read(FOLDER / "manifest.csv")
    tests = Counter(row.family for row in rows if row.role == "test")
    assert all(count >= LEAST_TESTS for family, count in tests.items() if family != "mxfp8_moe")
    assert len({replace(row, role="") for row in rows}) == len(rows)  # none is fit and test
    with (FOLDER / "traced.csv").open(newline="") as file:
        states = {
            (line["kernel"], line["M"], line["N"], line["K"]) for line in csv.DictReader(file)
        }
    assert {(row.kernel, str(row.M), str(row.N), str(row.K)) for row in rows} == states


def test_rows_are_spread_over_the_strata_of_m() -> None:
    rows = [Row("bf16", M, 64, 64, "k", 0, 0, 0, float(M)) for M in range(1, 600)]
    found = Counter((row.role, row.stratum) for row in drawn(rows))
    assert found == {
        ("test", 0): 16, ("test", 1): 27, ("test", 2): 27, ("test", 3): 30,
        ("fit", 1): 15, ("fit", 2): 15, ("fit", 3): 15,
    }  # fmt: skip
