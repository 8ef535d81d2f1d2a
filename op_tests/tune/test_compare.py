"""The comparison of two trees: its cells, what it says of them, and a run on the simulator."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def compare():
    sys.path.insert(0, str(ROOT / "tune"))
    spec = spec_from_file_location("compare", ROOT / "tune" / "compare.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.pop(0)
    return module


def test_cells_are_the_same_for_each_seed_and_cover_every_kind(compare) -> None:
    cells = compare.draw_cells(400, 40, 8, 12, seed=0)
    assert cells == compare.draw_cells(400, 40, 8, 12, 0) != compare.draw_cells(400, 40, 8, 12, 1)
    counts = {"linear": 400, "fused_moe": 40, "grouped_gemm": 8, "quantize": 12}
    assert Counter(cell["op"] for cell in cells) == counts
    linears = [cell for cell in cells if cell["op"] == "linear"]
    assert len({tuple(cell.items()) for cell in linears}) == 400
    assert len({(cell["N"], cell["K"]) for cell in linears}) == 40
    benched = compare.benched_cells()
    assert Counter(cell["op"] for cell in benched) == {"linear": 70, "fused_moe": 10}
    assert len({tuple(cell.items()) for cell in benched}) == 80
    for field, values in (("M", 7), ("out_dtype", 3), ("x_dtype", 2)):
        assert len({cell[field] for cell in linears}) == values


@pytest.mark.parametrize(
    ("ratios", "met"),
    [
        ((1.0, 1.0), True),
        ((1.04, 0.97), True),
        ((1.06, 0.9), False),
        ((1.03, 1.02), False),
    ],
)
def test_bars_are_for_groups_and_for_cells(compare, ratios, met) -> None:
    lines = [{"op": "linear", "M": 1, "ratio": ratio, "same_bits": True} for ratio in ratios]
    text, found = compare.summary(lines, 1.05)
    assert found == met
    assert f"worst {max(ratios):.3f}  of 2 cells" in text
    assert not compare.summary([*lines, {"op": "linear", "error": "new: no"}], 1.05)[1]


def test_cells_that_are_timed_anew_take_the_places_of_their_rows(compare, tmp_path: Path) -> None:
    cells = compare.where(compare.benched_cells(), ["N=1536", "K=6144", "pdl=True", "M=1,2,4,8"])
    assert [cell["M"] for cell in cells] == [1, 2, 4, 8]
    saved = ROOT / "docs" / "measured" / "nvidia_h200" / "compare.csv"
    out, rows = tmp_path / "compare.csv", compare.rows_of(saved)
    compare.write(out, [], rows)
    assert out.read_text() == saved.read_text(), "as it was"
    lines = [cell | {"base_us": 4.0, "new_us": 3.0, "ratio": 0.75} for cell in cells]
    compare.write(out, lines, rows)
    before, after = pd.read_csv(saved), pd.read_csv(out)
    other = ~(after.new_us.eq(before.new_us) | after.new_us.isna() & before.new_us.isna())
    assert len(after) == len(before) and other.sum() == len(cells)
    chosen = after[other].astype({"K": int})
    assert set(chosen.ratio) == {0.75} and chosen[list(cells[0])].to_dict("records") == cells


def test_a_tree_beside_itself_gives_the_same_bits(tmp_path: Path) -> None:
    out = tmp_path / "compare.csv"
    command = [sys.executable, ROOT / "tune" / "compare.py", ROOT, "--dry-run", "--cells", "2"]
    command += ["--grouped", "1", "--quantize", "2"]
    done = subprocess.run(
        [*map(str, command), "--moe", "1", "--rounds", "2", "--limit", "1000", "--out", str(out)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = pd.read_csv(out)
    assert len(lines) == 9, done.stderr
    assert lines.same_bits.all()
    assert sorted(lines[lines.timed == "host"].op) == ["fused_moe", "linear", "quantize"]
    assert (lines.base_us > 0).all() and (lines.new_us > 0).all()
    assert "9 cells: 0 above 1000, 0 failed, 0 with other bits" in done.stdout
