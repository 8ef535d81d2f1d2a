"""The text of a table: its lines, and what cells say that do not depend on the op."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from aiter_mx.errors import TableError
from aiter_mx.kernels.registry import whole_number
from aiter_mx.kernels.spec import Config

SCOPE = ("gfx", "cu_num", "op")
SHAPE = "shape"  # of what AITER_MX_LOG_UNTUNED collects: all key columns, as ``M=1 N=2304 K=6144``
CHOICE = ("backend", "kernel", "config")
INFORMATION = ("us", "rel_err", "source")
MEASURED, MODEL = "measured", "model"
SIDE_FILES = ("provenance.csv", "runs.csv")
"""Ends of the names of files beside a table that are none themselves."""
INFORMATION_SUFFIX = "_us"  # one column for each peer's time

Line: TypeAlias = tuple[str, int, tuple[str, ...]]
"""A line's op, its number, and its cells."""
Lines: TypeAlias = tuple[tuple[str, ...], list[Line]]
"""The columns of a table, and its lines."""


def read_lines(path: Path) -> Lines:
    """The header of a table, and each line's op, number and cells.

    Raises:
        TableError: as ``read_cells``, or a column is missing.
    """
    header, numbered = read_cells(path)
    for column in (*SCOPE, *CHOICE):
        if column not in header:
            older = "config" not in header and "kernel" in header
            hint = f"; aiter-mx tables convert {path} brings an older table up to date"
            raise TableError(f"{path}:1: column {column!r} is missing{hint if older else ''}")
    op_at = header.index("op")
    return header, [(texts[op_at], number, texts) for number, texts in numbered]


def read_cells(path: Path) -> tuple[tuple[str, ...], list[tuple[int, tuple[str, ...]]]]:
    """The header of a CSV, and each line's number and cells.

    Raises:
        TableError: it cannot be read, or its lines are not of one length.
    """
    if path.exists() and not path.is_file():  # opening a pipe would wait for somebody to write
        raise TableError(f"{path}: cannot be read as a table: it is no regular file")
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.reader(file, strict=True, skipinitialspace=True)
            header = next(reader, None)
            if not header:
                raise TableError(f"{path}: the file is empty; expected a header line")
            header = [name.strip() for name in header]
            if header[0].startswith("\ufeff"):
                raise TableError(
                    f"{path}:1: begins with a byte order mark; save it as UTF-8 without one"
                )
            if doubled := next((name for name in header if header.count(name) > 1), None):
                raise TableError(f"{path}:1: column {doubled!r} is there twice")
            lines = []
            for cells in reader:
                if len(cells) != len(header):
                    if not any(cells):
                        continue
                    raise TableError(
                        f"{path}:{reader.line_num}: has {len(cells)} fields, the header has "
                        f"{len(header)}"
                    )
                lines.append((reader.line_num, tuple(map(str.strip, cells))))
            return tuple(header), lines
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TableError(f"{path}: cannot be read as a table: {error}") from error


def parse_config(text: str) -> dict[str, int]:
    """A kernel's parameters as a table has them: ``rows=2 waves=1 unroll=1``.

    Raises:
        ValueError: something that is not a name and a whole number.
    """
    found: dict[str, int] = {}
    for part in text.split():
        name, equals, value = part.partition("=")
        if not equals or not name or name in found:
            raise ValueError(f"config must be like 'rows=2 waves=1', each once, got {text!r}")
        found[name] = whole_number(name, value)
    return found


def format_config(config: Config) -> str:
    """What ``parse_config`` reads."""
    return " ".join(f"{name}={value}" for name, value in config.items())


def _cu_num(text: str) -> int | None:
    number = whole_number("cu_num", text) if text else None
    if number == 0:
        raise ValueError("cu_num must be at least 1, or empty for any, got '0'")
    return number


def _us(text: str) -> float | None:
    if not text:
        return None
    try:
        number = float(text) if text.isascii() and "_" not in text else None
    except ValueError:
        number = None
    if number is None:
        raise ValueError(f"us must be a number, got {text!r}")
    if not 0 < number < float("inf"):
        raise ValueError(f"us must be above 0 and finite, got {text!r}")
    return number


_SOURCE = re.compile(
    rf"{MEASURED}|{MODEL}(?: (?P<error>\d+(?:\.\d+)?)%)?"
    r"(?P<extrapolated> extrapolated)?(?P<unmeasured> unmeasured)?"
)


def _source(text: str) -> str:
    if text and not _SOURCE.fullmatch(text):
        raise ValueError(f"source must be {MEASURED} or {MODEL}, got {text!r}")
    return text


def told_source(text: str) -> str:
    """A row's source in words: ``model 8.3%`` is ``modelled, median error 8.3 %``."""
    match = _SOURCE.fullmatch(text)
    if match is None or text == MEASURED:
        return text
    words = ["modelled"]
    if match["error"]:
        words.append(f"median error {match['error']} %")
    if match["extrapolated"]:
        words.append("an extrapolation")
    if match["unmeasured"]:
        words.append("faster than anything measured")
    return ", ".join(words)


READERS: dict[str, Callable[[str], Any]] = {"cu_num": _cu_num, "us": _us, "source": _source}
"""How the cells are read that say neither what a row is for nor what it chooses."""
