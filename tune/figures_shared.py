"""What the tables of figures share: where what was measured lies, and how it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ROOT / "docs" / "measured" / "nvidia_h200"


def shown_us(value: float | None) -> str:
    return "" if value is None or pd.isna(value) else f"{value:.1f}"


def geometric(ratios: Iterable[float]) -> float:
    logs = pd.Series(ratios, dtype=float)
    return float(logs.prod() ** (1 / len(logs)))


def by_column(head: str, lines: Mapping[str, Any], extreme: Callable[..., float]) -> str:
    """A line for each name: the geometric mean of each of its groups, and the extreme."""
    columns = list(dict.fromkeys(name for groups in lines.values() for name, _ in groups))
    rows = []
    for name, groups in lines.items():
        of = dict(iter(groups))
        shown = (
            f"{geometric(of[c]):.2f} ({extreme(of[c]):.2f})" if c in of else "" for c in columns
        )
        rows.append([name, *shown])
    return table([head, *map(str, columns)], rows)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def origin(run: pd.DataFrame, how: str = "cold operands, graph replay, medians") -> str:
    commits = ", ".join(sorted(set(run.commit.astype(str))))
    return f"\nOne H200, {how}; commit {commits}.\n"
