"""Tables of figures, from made-up runs: each cell is of its row, and cells that lack are empty."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from tune import figures


@pytest.fixture(autouse=True)
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(figures, "MEASURED", tmp_path)
    return tmp_path


def save(rows: list[dict[str, object]], path: Path) -> None:
    pd.DataFrame([row | {"commit": "0123456"} for row in rows]).to_csv(path, index=False)


def lines(text: str) -> list[list[str]]:
    table = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_layers_stand_beside_bf16s_by_tokens(measured: Path) -> None:
    cells = [("a", "uniform", 1, 3.0, 2.0, 1.0), ("a", "uniform", 2048, 1.2, 0.9, 1.1)]
    cells += [("a", "skewed", 2048, 0.3, 0.4, 0.9)]
    columns = ("layer", "routing", "M", "over_bf16", "over_gemms", "over_launches")
    save([dict(zip(columns, cell, strict=True)) for cell in cells], measured / "moe_layers.csv")
    head, _, *rows = lines(figures.moe_layers())
    assert head == ["", "M=1", "M=2048"]
    assert rows == [
        ["a, uniform", "3.00 (2.00)", "1.20 (0.90)"],
        ["a, skewed", "", "0.30 (0.40)"],
        ["geometric mean", "3.00 (2.00)", "0.60 (0.60)"],
        ["our time over our launches', and worst", "1.00 (1.00)", "0.99 (1.10)"],
    ]


def test_steps_are_counted_by_the_rows_that_they_come_after(measured: Path) -> None:
    cells = [(16, 2.0, 1.0, 1.8), (17, 0.8, 1.0, 0.7), (64, 1.25, 1.25, 0.95)]
    columns = ("M", "step", "bf16_step", "over_bar")
    rows = [dict(zip(columns, cell, strict=True)) for cell in cells]
    save(rows, measured / "linear_hand_overs.csv")
    _, _, *shown = lines(figures.hand_overs())
    assert shown == [
        ["1 to 16", "1", "2.000", "1.000", "2.00", "2.00", "1", "0"],
        ["17 to 64", "2", "1.000", "1.118", "1.25", "0.80", "0", "1"],
    ]


def test_variants_count_where_they_were_timed(measured: Path) -> None:
    whole = {"fp16_over_usual": 1.0, "bias_over_usual": 1.1, "fp32_over_usual": 1.5}
    whole |= {"fp16_x_over_bf16_x": 1.0, "other_cus_over_usual": 2.0}
    other = dict.fromkeys(whole, 1.0) | {"fp32_over_usual": 6.0}
    save([whole | {"no_table_over_usual": 1.2}, other], measured / "linear_variants.csv")
    rows = {row[0]: row[1:] for row in lines(figures.variants())[2:]}
    assert rows["fp32 results"] == ["2", "3.000", "6.00"]
    assert rows["no table"] == ["1", "1.200", "1.20"]
