"""A compute unit's timeline as a picture: each wave's life, and what it waits for when."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiter_mx.sim.timing.cu import REASONS, Span
from aiter_mx.sim.timing.report import MEANINGS

_COLOURS = {
    "issue": "#c9a227",
    "matrix": "#7b4fa3",
    "address": "#d9782d",
    "lds": "#4f9d69",
    "memory": "#1f5fa8",
    "scalar": "#6fa8dc",
    "barrier": "#b23a48",
}
_ALIVE = "#dcdcdc"
_MOST_WAVES = 64


def draw_timeline(path: Path, spans: Sequence[Span], cycles_a_us: float, title: str) -> None:
    """Write a picture of what the waves of a unit do, one line each, by SIMD.

    Args:
        path: of the picture; its suffix says the format.
        spans: as ``aiter_mx.sim.timing.model.timeline`` gives them.
        cycles_a_us: to have microseconds.
        title: what is drawn.

    Raises:
        ValueError: matplotlib is not installed, or knows no such format.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ValueError("--plot needs matplotlib: pip install 'aiter-mx[report]'") from None
    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    waves = sorted({_place(span) for span in spans})
    shown = {place: row for row, place in enumerate(waves[:_MOST_WAVES])}
    size = (10, 1.6 + 0.14 * len(shown))
    figure, axis = pyplot.subplots(figsize=size, layout="constrained")
    for what, colour in (("wave", _ALIVE), *_COLOURS.items()):
        for place, row in shown.items():
            bars = [
                (span.begin / cycles_a_us, (span.end - span.begin) / cycles_a_us)
                for span in spans
                if span.what == what and _place(span) == place
            ]
            axis.broken_barh(bars, (row - 0.4, 0.8), color=colour, linewidth=0)
    axis.set_yticks(*_ticks(list(shown)))
    axis.set_ylim(len(shown) - 0.5, -0.5)
    axis.set_xlabel("us after the launch")
    axis.set_title(title, fontsize=9)
    named = [Patch(color=_ALIVE, label="runs"), *(_patch(Patch, reason) for reason in REASONS)]
    figure.legend(handles=named, loc="outside lower center", ncols=4, fontsize=7)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _place(span: Span) -> tuple[int, int, int]:
    return span.simd, span.slot, span.wave


def _ticks(places: Sequence[tuple[int, int, int]]) -> tuple[list[float], list[str]]:
    """A label for each SIMD, at the middle of its waves."""
    rows: dict[int, list[int]] = {}
    for row, (simd, *_) in enumerate(places):
        rows.setdefault(simd, []).append(row)
    return [sum(of) / len(of) for of in rows.values()], [f"SIMD {simd}" for simd in rows]


def _patch(make: Any, reason: str) -> Any:
    return make(color=_COLOURS[reason], label=f"waits for {MEANINGS[reason]}")
