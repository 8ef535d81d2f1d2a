"""What every command prints with."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

_PLAIN_WIDTH = 4096  # of output that is not a terminal's: lines are for grep, nothing is wrapped


def make_console() -> Console:
    """A console on standard output; without control codes where that is no terminal."""
    width = None if sys.stdout.isatty() else _PLAIN_WIDTH
    return Console(width=width, markup=False, highlight=False)


def heading(console: Console, text: str) -> None:
    """A title above what follows."""
    console.print()
    console.print(text, style="bold")


def make_table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """An empty table; the columns in ``numbers`` are aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return table


def print_fields(console: Console, fields: dict[str, object]) -> None:
    """Names and values, one pair a line."""
    width = max(map(len, fields), default=0)
    for name, value in fields.items():
        console.print(f"{name:<{width}}  {value}", soft_wrap=True)


def make_progress(*counted: ProgressColumn) -> Progress:
    """A progress bar on standard error, shown on terminals only; by default it counts things."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *(counted or (MofNCompleteColumn(), TimeElapsedColumn())),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def format_bytes(size: int) -> str:
    """``size`` with a unit, as in ``3.2 MiB``."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"
