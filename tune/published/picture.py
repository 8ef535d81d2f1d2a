"""Draws the model's times beside published ones: predicted.png, from predictions.csv."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from tune.published.rows import STRATA

COLOURS = {"bf16": "#7a7a7a", "block_scale_asm": "#d9782d", "fp4_asm": "#1f5fa8",
           "fp8_rowwise_flydsl": "#4f9d69", "mxfp8_moe": "#a4508b"}  # fmt: skip
STRATUM_NAMES = ("M to 16", "17 to 64", "65 to 256", "above")


def draw(folder: Path) -> Path:
    """Each test row by constants that were fitted without its family, and errors by M."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = pd.read_csv(folder / "predictions.csv")
    rows = rows[rows["role"] == "test"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
    _draw_times(left, rows)
    _draw_errors(right, rows)
    path = folder / "predicted.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def errors(rows: pd.DataFrame) -> pd.DataFrame:
    """Median and ninth tenth of the relative error, by family and stratum of M."""
    error = (rows["family_left_out_us"] / rows["us"] - 1).abs()
    stratum = pd.cut(rows["M"], [0, *STRATA], labels=STRATUM_NAMES)
    grouped = error.groupby([rows["family"], stratum], observed=True)
    return grouped.agg(median="median", p90=lambda each: each.quantile(0.9)).reset_index()


def _draw_times(axis: Any, rows: pd.DataFrame) -> None:
    ends = rows["us"].min(), rows["us"].max()
    axis.fill_between(ends, [0.8 * x for x in ends], [1.2 * x for x in ends], color="0.93")
    axis.plot(ends, ends, color="black", linewidth=0.8)
    for family, part in rows.groupby("family"):
        axis.plot(part["us"], part["family_left_out_us"], "o", markersize=3, alpha=0.7,
                  color=COLOURS[str(family)], label=f"{family} ({len(part)})")  # fmt: skip
    axis.set(xscale="log", yscale="log", xlabel="published us", ylabel="modelled us")
    axis.set_title("test rows, by constants fitted without their family; 20 % in grey", fontsize=9)
    axis.legend(fontsize=8, frameon=False)


def _draw_errors(axis: Any, rows: pd.DataFrame) -> None:
    table, width = errors(rows), 0.8 / len(COLOURS)
    for place, (family, colour) in enumerate(COLOURS.items()):
        part = table[table["family"] == family]
        at = [STRATUM_NAMES.index(name) + width * (place - 2) for name in part["M"]]
        axis.bar(at, part["median"], width=0.9 * width, color=colour)
        axis.vlines(at, part["median"], part["p90"], color=colour, linewidth=1)
    axis.set_xticks(range(len(STRATUM_NAMES)), STRATUM_NAMES)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.set_title("error: median (bar) and 90 % of rows (line)", fontsize=9)
