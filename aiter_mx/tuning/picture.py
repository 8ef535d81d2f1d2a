"""A table as a picture: which kernel wins where, and how far ahead of the next backend it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from random import Random
from typing import Any

from aiter_mx.dispatch.tables import read_table
from aiter_mx.kernels.registry import key_columns, problem_type
from aiter_mx.tuning.table import read_rows

_MOST_ROWS = 60  # of a picture; more would not be legible
_COLOURS = ("#3b6fb6", "#d98032", "#4f9d69", "#a4508b", "#8c8c8c", "#c8b13a")


def draw(path: Path, folder: Path) -> Path | None:
    """Draw a table into ``folder`` as PNG; None where it has no rows.

    Left: the kernel that the table names, by colour, with its time. Right: the time of the fastest
    other backend over that of the one chosen, where the table has it.

    Raises:
        TableError: a row that cannot be right.
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ValueError("pictures need matplotlib: pip install 'aiter-mx[report]'") from None
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    op = next((op for op, _ in read_table(path)), None)
    if op is None:
        return None
    rows = list(read_rows(path, op).values())
    across = sorted({int(row["M"]) for row in rows})
    labels = list(dict.fromkeys(_label(op, row) for row in rows))
    # By lot: every so many would be of one kind, where each N and K has as many kinds of rows.
    drawn = Random(0).sample(range(len(labels)), min(len(labels), _MOST_ROWS))
    down = [labels[index] for index in sorted(drawn)]
    cut = f", {len(down)} of {len(labels)} shapes" if len(down) < len(labels) else ""
    kernels = sorted({f"{row['backend']}/{row['kernel']}" for row in rows})
    height = 1.6 + 0.28 * len(down)
    figure, (left, right) = plt.subplots(1, 2, figsize=(3 + 1.5 * len(across), height))
    _axes(left, across, down)
    _axes(right, across, [""] * len(down))
    for row in rows:
        label = _label(op, row)
        if label not in down:
            continue
        x, y = across.index(int(row["M"])), down.index(label)
        colour = _COLOURS[kernels.index(f"{row['backend']}/{row['kernel']}") % len(_COLOURS)]
        _cell(plt, left, x, y, colour, row["us"])
        ahead = _ahead(row)
        if ahead is not None:
            _cell(plt, right, x, y, plt.get_cmap("RdYlGn")(min(ahead / 4, 1.0)), f"{ahead:.2f}")
    for name, colour in zip(kernels, _COLOURS * len(kernels), strict=False):
        left.plot([], [], "s", color=colour, label=name)
    left.legend(loc="lower left", bbox_to_anchor=(0, 1.02), ncols=len(kernels), frameon=False)
    sources = ", ".join(sorted({row.get("source", "") for row in rows}))
    left.set_title(f"{op}, {rows[0]['gfx']}: us ({sources}{cut})", loc="right", fontsize=9, pad=42)
    right.set_title("next backend's time over the chosen one's", fontsize=9)
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / f"{rows[0]['gfx']}_{path.stem}.png"
    figure.savefig(picture, dpi=110, bbox_inches="tight")
    plt.close(figure)
    return picture


def _label(op: str, row: dict[str, str]) -> str:
    usual = {field.name: str(field.default) for field in fields(problem_type(op))}
    names = [name for name in key_columns(op) if name != "M" and row[name] != usual[name]]
    return " ".join(f"{name}={row[name]}" for name in names)


def _ahead(row: dict[str, str]) -> float | None:
    own = f"{row['backend']}_us"
    others = [float(us) for name, us in row.items() if name.endswith("_us") and us and name != own]
    return min(others) / float(row["us"]) if others and row["us"] else None


def _axes(axes: Any, across: Sequence[int], down: Sequence[str]) -> None:
    axes.set_xlim(-0.5, len(across) - 0.5)
    axes.set_ylim(len(down) - 0.5, -0.5)
    axes.set_xticks(range(len(across)), [f"M={M}" for M in across], fontsize=7)
    axes.set_yticks(range(len(down)), down, fontsize=7)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(length=0)


def _cell(plt: Any, axes: Any, x: int, y: int, colour: Any, text: str) -> None:
    axes.add_patch(plt.Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=colour))
    axes.text(x, y, text, ha="center", va="center", fontsize=6)
