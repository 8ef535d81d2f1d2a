"""Draws the saved tables of the benchmarks, each as a picture beside it; no GPU is needed.

    python -m op_tests.bench.pictures [docs/measured/nvidia_h200]

A panel is a shape and has few lines, each with its name at its end: time over what the panel names,
ours beside each peer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from op_tests.bench.common import MEASURED

Line = tuple[str, str, str]
"""Column, name and colour."""
OURS, OVERLAPPED, TRITON, BF16, FP8 = "#1f5fa8", "#6fa8dc", "#d9782d", "#7a7a7a", "#4f9d69"
_LABEL_GAP = 0.085
"""Between two names at the right of a panel, in parts of its height."""


def panels(count: int, across: int, height: float = 2.5) -> tuple[Any, list[Any]]:
    """A figure as wide as a page with so many axes, so many in a row."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    down = -(-count // across)
    size = (3.25 * across, height * down + 0.5)
    figure, axes = pyplot.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
    flat = list(axes.flat)
    for spare in flat[count:]:
        spare.axis("off")
    return figure, flat[:count]


def draw_lines(
    axis: Any, cells: pd.DataFrame, x: str, lines: Sequence[Line], over: str, title: str
) -> None:
    """One panel: each column over that of the yardstick, by ``x``, with its name at its end."""
    places = range(len(cells))
    ends = []
    for column, name, colour in lines:
        ratio = cells[column] / cells[over] if column in cells else pd.Series(dtype=float)
        if ratio.notna().any():
            axis.plot(places, ratio, "o-", color=colour, markersize=3.5, linewidth=1.6)
            ends.append((float(ratio.dropna().iloc[-1]), name, colour))
    axis.axhline(1, color="black", linewidth=0.9)
    axis.set_yscale("log", base=2)
    axis.set_xlim(-0.3, len(cells) - 0.7 + 0.34 * len(cells))
    every = 1 + len(cells) // 9
    axis.set_xticks(list(places)[::every], [str(value) for value in cells[x]][::every], fontsize=7)
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, 0.8), max(high, 2.2))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axis.tick_params(axis="y", labelsize=7)
    axis.grid(alpha=0.25)
    axis.set_title(title, fontsize=9)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    _name_ends(axis, ends, len(cells) - 0.85)


def _name_ends(axis: Any, ends: list[tuple[float, str, str]], x: float) -> None:
    """Write names beside the ends of lines, moved up where they would touch."""
    from math import log2

    low, high = map(log2, axis.get_ylim())
    taken = -1.0
    for value, name, colour in sorted(ends):
        place = max((log2(value) - low) / (high - low), taken + _LABEL_GAP)
        taken = place
        axis.annotate(
            name,
            (x, place),
            xycoords=("data", "axes fraction"),
            color=colour,
            fontsize=7.5,
            va="center",
        )


def draw_linear(frame: pd.DataFrame) -> Any:
    """The decode linear by rows of x, a panel a shape."""
    lines = (("ours_us", "ours", OURS), ("pdl_us", "ours, overlapped", OVERLAPPED))
    lines += (("triton_us", "Triton", TRITON), ("bf16_us", "torch bf16", BF16))
    shapes = list(frame[["N", "K"]].drop_duplicates().itertuples(index=False, name=None))
    figure, axes = panels(len(shapes), across=3)
    for axis, (N, K) in zip(axes, shapes, strict=True):
        cells = frame[(frame.N == N) & (frame.K == K)].sort_values("M")
        draw_lines(axis, cells, "M", lines, "floor_us", f"N={N}, K={K}")
        axis.set_xlabel("M", fontsize=8)
    axes[0].set_ylabel("time over reading the weights", fontsize=8)
    return figure


def draw_moe(frame: pd.DataFrame) -> Any:
    """The experts' GEMMs and layer by tokens, a panel a part and routing."""
    lines = (("ours_us", "ours", OURS), ("triton_us", "Triton", TRITON))
    lines += (("bf16_us", "torch bf16", BF16),)
    kinds = list(frame[["part", "routing"]].drop_duplicates().itertuples(index=False, name=None))
    kinds.sort(key=lambda kind: kind[0])
    figure, axes = panels(len(kinds), across=2)
    for axis, (part, routing) in zip(axes, kinds, strict=True):
        cells = frame[(frame.part == part) & (frame.routing == routing)].sort_values("M")
        draw_lines(axis, cells, "M", lines, "floor_us", f"{part.replace('_', ', ')}, {routing}")
        axis.set_xlabel("tokens", fontsize=8)
    for axis in axes[::2]:
        axis.set_ylabel("time over reading the weights", fontsize=8)
    return figure


def draw_grouped(frame: pd.DataFrame) -> Any:
    """The grouped GEMM by how even its groups are, a panel a shape."""
    lines = (("ours_us", "ours", OURS), ("triton_us", "Triton", TRITON))
    lines += (("torch_fp8_us", "torch fp8, by rows", FP8),)
    keys = ["G", "M", "N", "K"]
    shapes = list(frame[keys].drop_duplicates().itertuples(index=False, name=None))
    figure, axes = panels(len(shapes), across=2)
    for axis, shape in zip(axes, shapes, strict=True):
        cells = frame[(frame[keys] == list(shape)).all(axis=1)]
        title = ", ".join(f"{key}={value}" for key, value in zip(keys, shape, strict=True))
        draw_lines(axis, cells, "mode", lines, "torch_bf16_us", title)
        axis.set_xlabel("sizes of groups", fontsize=8)
    for axis in axes[::2]:
        axis.set_ylabel("time over torch bf16", fontsize=8)
    return figure


def draw_quantize(frame: pd.DataFrame) -> Any:
    """Quantisation: time over a device copy of as many bytes, a panel an amount."""
    sizes = sorted(frame.mb.unique())
    figure, axes = panels(len(sizes), across=len(sizes), height=4.2)
    for axis, size in zip(axes, sizes, strict=True):
        cells = frame[frame.mb == size]
        ratio = cells.ours_us / cells.copy_us
        axis.barh(range(len(cells)), ratio, height=0.65, color=OURS)
        for place, value in enumerate(ratio):
            axis.text(value + 0.02, place, f"{value:.2f}", va="center", fontsize=7)
        axis.axvline(1, color="black", linewidth=0.9)
        axis.set_yticks(range(len(cells)), cells.case, fontsize=7)
        axis.tick_params(axis="x", labelsize=7)
        axis.set_xlim(0, 1.15 * ratio.max())
        axis.invert_yaxis()
        axis.set_title(f"x of {size} MB", fontsize=9)
        axis.set_xlabel("time over a device copy of as many bytes", fontsize=8)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    return figure


def draw_model(frame: pd.DataFrame) -> Any:
    """Whole models: time of a step over bf16, a panel for decode by batch and one for prefill."""
    lines = (("ours", "ours", OURS), ("torchao", "torchao fp8", FP8))
    kinds = [
        (model, phase, tokens, cells)
        for (model, phase), of_phase in frame.groupby(["model", "phase"], sort=False)
        for tokens, cells in (
            of_phase.groupby("tokens") if phase == "decode" else [("tokens", of_phase)]
        )
    ]
    figure, axes = panels(len(kinds), across=2)
    for axis, (model, phase, tokens, cells) in zip(axes, kinds, strict=True):
        by = "batch" if phase == "decode" else "tokens"
        wide = cells.pivot(index=by, columns="side", values="ms").reset_index()
        layers = "" if (cells.layers == cells.of_layers).all() else f", {cells.layers.max()} layers"
        title = f"decode at {tokens} tokens" if phase == "decode" else "prefill"
        draw_lines(axis, wide, by, lines, "bf16", f"{model}{layers}, {title}")
        axis.set_xlabel("sequences" if phase == "decode" else "tokens", fontsize=8)
    for axis in axes[::2]:
        axis.set_ylabel("time over compiled bf16", fontsize=8)
    return figure


DRAWN: dict[str, Callable[[pd.DataFrame], Any]] = {
    "linear": draw_linear,
    "moe": draw_moe,
    "grouped": draw_grouped,
    "quantize": draw_quantize,
    "model": draw_model,
}


def draw(table: Path) -> Path:
    """The picture of a saved table, beside it.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot
    except ImportError:
        raise SystemExit("pictures need matplotlib: pip install 'aiter-mx[report]'") from None

    frame = pd.read_csv(table)
    figure = DRAWN[table.stem](frame)
    commits, dates = (", ".join(sorted(set(frame[of].astype(str)))) for of in ("commit", "date"))
    what = f"{table.stem}, {table.parent.name}, commit {commits}, {dates}"
    figure.suptitle(what, fontsize=10)
    picture = table.with_suffix(".png")
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
    return picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="*", help="by default all of docs/measured")
    for folder in parser.parse_args().folder or sorted(MEASURED.iterdir()):
        for name in DRAWN:
            if (folder / f"{name}.csv").is_file():
                print(draw(folder / f"{name}.csv"))


if __name__ == "__main__":
    main()
