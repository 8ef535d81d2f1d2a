"""Tables of figures, from made-up runs: each cell is of its row, and cells that lack are empty."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from tune import figures_kernels, figures_uses


@pytest.fixture(autouse=True)
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in (figures_kernels, figures_uses):
        monkeypatch.setattr(module, "MEASURED", tmp_path)
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
    head, _, *rows = lines(figures_kernels.moe_layers())
    assert head == ["", "M=1", "M=2048"]
    assert rows == [
        ["a, uniform", "3.00 (2.00)", "1.20 (0.90)"],
        ["a, skewed", "", "0.30 (0.40)"],
        ["geometric mean", "3.00 (2.00)", "0.60 (0.60)"],
        ["our time over our launches', and worst", "1.00 (1.00)", "0.99 (1.10)"],
    ]
    timed = [dict(zip(columns, cell, strict=True)) for cell in cells]
    save(
        [timed[0], *(row | {"over_humming": row["M"] / 2048} for row in timed[1:])],
        measured / "moe_layers.csv",
    )
    assert lines(figures_kernels.moe_layers())[-2][1:] == ["", "1.00 (1.00)"]


def test_steps_are_counted_by_the_rows_that_they_come_after(measured: Path) -> None:
    cells = [(16, 2.0, 1.0, 1.8), (17, 0.8, 1.0, 0.7), (64, 1.25, 1.25, 0.95)]
    columns = ("M", "step", "bf16_step", "over_bar")
    rows = [dict(zip(columns, cell, strict=True)) for cell in cells]
    save(rows, measured / "linear_hand_overs.csv")
    _, _, *shown = lines(figures_kernels.hand_overs())
    assert shown == [
        ["1 to 16", "1", "2.000", "1.000", "2.00", "2.00", "1", "0"],
        ["17 to 64", "2", "1.000", "1.118", "1.25", "0.80", "0", "1"],
    ]


def test_variants_count_where_they_were_timed(measured: Path) -> None:
    whole = {"fp16_over_usual": 1.0, "bias_over_usual": 1.1, "fp32_over_usual": 1.5}
    whole |= {"fp16_x_over_bf16_x": 1.0, "other_cus_over_usual": 2.0}
    other = dict.fromkeys(whole, 1.0) | {"fp32_over_usual": 6.0}
    save([whole | {"no_table_over_usual": 1.2}, other], measured / "linear_variants.csv")
    rows = {row[0]: row[1:] for row in lines(figures_kernels.variants())[2:]}
    assert rows["fp32 results"] == ["2", "3.000", "6.00"]
    assert rows["no table"] == ["1", "1.200", "1.20"]


def test_few_rows_blocks_and_values_are_means_with_their_worst(measured: Path) -> None:
    columns = ("rows", "spread", "over_bf16", "masked_over_bf16")
    cells = [(1, "skewed", 2.0, 1.0), (1, "skewed", 8.0, 4.0), (64, "skewed", 0.9, 1.5)]
    save([dict(zip(columns, c, strict=True)) for c in cells], measured / "grouped_few_rows.csv")
    head, _, *rows = lines(figures_kernels.few_rows())
    assert head == ["rows a group", "1", "64"]
    assert rows == [
        ["skewed", "4.00 (2.00)", "0.90 (0.90)"],
        ["skewed, masked", "2.00 (1.00)", "1.50 (1.50)"],
    ]
    columns = ("part", "routing", "M", "over_own")
    cells = [
        ("first", "uniform", 8, 1.0),
        ("first", "uniform", 8, 1.21),
        ("second", "skewed", 1, 3),
    ]
    save([dict(zip(columns, c, strict=True)) for c in cells], measured / "moe_blocks.csv")
    _, _, *rows = lines(figures_kernels.blocks())
    assert rows == [
        ["first GEMM, uniform", "1.10 (1.21)", ""],
        ["second GEMM, skewed", "", "3.00 (3.00)"],
    ]
    columns = ("op", "place", "kind", "ratio")
    cells = [
        ("linear", "x", "not a number", 1.0),
        ("linear", "x", "2^127", 2.0),
        ("linear", "w", "not a number", 4),
    ]
    save([dict(zip(columns, c, strict=True)) for c in cells], measured / "values.csv")
    head, _, *rows = lines(figures_kernels.values())
    assert head == ["a row of", "not a number", "2^127"]
    assert rows == [
        ["`linear`, in x", "1.00 (1.00)", "2.00 (2.00)"],
        ["`linear`, in w", "4.00 (4.00)", ""],
    ]


def test_means_leave_empty_what_was_not_timed() -> None:
    cells = [(64, 2.0, 1.5), (64, 8.0, 6.0), (65, 0.5, None)]
    linears = [{"M": M, "over_bf16": a, "over_fp8": b} for M, a, b in cells]
    of_layers = [("skewed", 8192, 1.25), ("uniform", 8192, 0.8), ("uniform", 16384, 0.2)]
    layers = [{"routing": of, "M": M, "over_bf16": ratio} for of, M, ratio in of_layers]
    theirs = pd.DataFrame([{"M": 64, "over_humming": 1.5}])
    table = figures_kernels.means(pd.DataFrame(linears), theirs, pd.DataFrame(layers))
    shown = {row[0]: row[1:] for row in lines(table)[2:]}
    assert shown["1 to 64"] == ["4.00", "3.00", "1.50", "", ""]
    assert shown["65 to 256"] == ["0.50", "", "", "", ""]
    assert shown["2049 to 32768"] == ["", "", "", "0.40", "1.25"]


def test_warming_up_says_what_rows_compile_afterwards(measured: Path) -> None:
    row = {"op": "linear", "shape": "N=64 K=32", "cores": 16, "warmup_s": 41.6, "objects": 19}
    save([row | {"compiled_after": 2}], measured / "warmup.csv")
    head, _, only = lines(figures_uses.warmup())
    assert head[1] == "s, 16 cores" and only == ["`linear` N=64 K=32", "42", "19", "2"]


def test_scales_for_128_k_stand_beside_deep_gemm(measured: Path) -> None:
    whole = {"shape": "2x8x64x128", "over_deep_gemm": 0.8, "over_torch_fp8": 0.9}
    few = {"weights": "2x64x128", "rows": 4, "over_deep_gemm": 1.1, "over_reading": 1.25}
    save([whole], measured / "promoted.csv")
    save([few], measured / "promoted_masked.csv")
    assert lines(figures_kernels.promoted())[2:] == [
        ["2x8x64x128, whole groups", "0.80", "0.90", ""],
        ["2x64x128, 4 rows of each", "1.10", "", "1.25"],
    ]
