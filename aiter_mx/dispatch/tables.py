"""Reads tuned tables and checks every row against the registry.

A table is a CSV. Its columns:

- ``gfx``, ``cu_num``, ``op``: what the row is for; an empty ``cu_num`` is any.
- the op's key columns, such as ``M, N, K, out_dtype``; a table that has none for a field with a
  default is for that default;
- ``backend``, ``kernel``, and ``config``, the kernel's parameters as ``rows=2 waves=1 unroll=1``;
- what was measured, for people: see ``INFORMATION``.

Where a row comes from is told in the file ``<table>.provenance.csv`` beside it, which dispatch
does not read (``aiter_mx/tuning/provenance.py``).
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path

from aiter_mx.errors import TableError
from aiter_mx.kernels.registry import (
    field_value,
    find_kernel,
    key_columns,
    ops,
    problem_type,
)
from aiter_mx.kernels.spec import Config, Problem
from aiter_mx.paths import configs_dir
from aiter_mx.target import hardware

SCOPE = ("gfx", "cu_num", "op")
SHAPE = "shape"  # of what AITER_MX_LOG_UNTUNED collects: all key columns, as ``M=1 N=2304 K=6144``
CHOICE = ("backend", "kernel", "config")
INFORMATION = ("us", "rel_err", "source")
SOURCES = ("measured", "model")
SIDE_FILES = ("provenance.csv", "runs.csv")
"""Ends of the names of files beside a table that are none themselves."""
INFORMATION_SUFFIX = "_us"  # one column for each peer's time


@dataclass(frozen=True)
class Row:
    """One row of a table.

    Attributes:
        where: ``file:line``.
        gfx: architecture.
        cu_num: compute units of the GPU it was tuned on, None for any.
        problem: what it is for; fields that are no key columns have their defaults.
        backend: of the kernel chosen.
        kernel: its name.
        config: its parameters.
        us: its time when tuned, in microseconds, if the table says.
        origin: ``measured`` or ``model``, if the table says.
    """

    where: str
    gfx: str
    cu_num: int | None
    problem: Problem
    backend: str
    kernel: str
    config: Config
    us: float | None
    origin: str


def table_files(arch: str, op: str) -> list[Path]:
    """The tables that may hold rows for an op on an architecture; later ones win.

    First the shipped table, then what the environment variable ``AITER_MX_CONFIG`` lists: files,
    or folders whose CSVs are taken in the order of their names, separated like a PATH.

    Raises:
        TableError: ``AITER_MX_CONFIG`` names something that does not exist.
    """
    shipped = configs_dir() / arch / f"{op}.csv"
    files = [shipped] if shipped.is_file() else []
    for entry in filter(None, os.environ.get("AITER_MX_CONFIG", "").split(os.pathsep)):
        path = Path(entry)
        if path.is_dir():
            files += sorted(p for p in path.glob("*.csv") if not p.name.endswith(SIDE_FILES))
        elif path.is_file():
            files.append(path)
        else:
            raise TableError(f"AITER_MX_CONFIG names {entry!r}, which does not exist")
    return files


def load_rows(arch: str, op: str) -> Mapping[Problem, tuple[Row, ...]]:
    """All rows for an op on an architecture, by problem, the row that wins last.

    Raises:
        TableError: a row that cannot be right, whichever op and architecture it is for.
    """
    return _rows_by_problem(tuple(table_files(arch, op)), arch, op)


@cache
def _rows_by_problem(
    files: tuple[Path, ...], arch: str, op: str
) -> Mapping[Problem, tuple[Row, ...]]:
    found: dict[Problem, tuple[Row, ...]] = {}
    for path in files:
        for row_op, row in read_table(path):
            if (row_op, row.gfx) == (op, arch):
                found[row.problem] = (*found.get(row.problem, ()), row)
    return found


def read_table(path: Path) -> Iterator[tuple[str, Row]]:
    """Each row of a table with the op it is for, checked against the registry.

    Raises:
        TableError: the file is no table, or a row names an unknown op, architecture, kernel or
            parameter, an illegal value, or a shape outside the kernel's envelope.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = csv.reader(file, strict=True)
            columns = next(lines, None)
            if columns is None:
                raise TableError(f"{path}: the file is empty; expected a header line")
            for column in (*SCOPE, *CHOICE):
                if column not in columns:
                    older = "config" not in columns and "kernel" in columns
                    raise TableError(
                        f"{path}:1: column {column!r} is missing"
                        + (
                            f"; aiter-mx tables convert {path} brings an older table up to date"
                            if older
                            else ""
                        )
                    )
            for fields in lines:
                if any(fields):
                    yield _parse(f"{path}:{lines.line_num}", columns, fields)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TableError(f"{path}: cannot be read as a table: {error}") from error


def _parse(where: str, columns: Sequence[str], fields: Sequence[str]) -> tuple[str, Row]:
    """The op of a row, and the row."""
    if len(fields) != len(columns):
        raise TableError(f"{where}: has {len(fields)} fields, the header has {len(columns)}")
    try:
        cells = {name: field.strip() for name, field in zip(columns, fields, strict=True)}
        return cells["op"], _checked_row(where, cells)
    except ValueError as error:
        raise TableError(f"{where}: {error}") from error


def _checked_row(where: str, cells: dict[str, str]) -> Row:
    op = cells["op"]
    if op not in ops():
        raise ValueError(f"unknown op {op!r}; there are {', '.join(ops())}")
    keys = key_columns(op)
    target = hardware(cells["gfx"])
    kernel = find_kernel(op, target.arch, cells["backend"], cells["kernel"])
    for column in cells:
        if column not in (*SCOPE, *CHOICE, *keys, *INFORMATION) and not column.endswith(
            INFORMATION_SUFFIX
        ):
            raise ValueError(f"unknown column {column!r}; those of {op!r} are {', '.join(keys)}")
    config = parse_config(cells["config"])
    kernel.check_config(config)
    problem = _problem(op, keys, cells)
    refusal = kernel.refusal(target, problem)
    if refusal is not None:
        raise ValueError(f"{kernel.backend}/{kernel.name} does not cover this row: {refusal}")
    return Row(
        where=where,
        gfx=cells["gfx"],
        cu_num=_integer("cu_num", cells["cu_num"]) if cells["cu_num"] else None,
        problem=problem,
        backend=kernel.backend,
        kernel=kernel.name,
        config=config,
        us=_number("us", cells["us"]) if cells.get("us") else None,
        origin=_one_of("source", cells.get("source", ""), ("", *SOURCES)),
    )


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
        found[name] = _integer(name, value)
    return found


def format_config(config: Config) -> str:
    """What ``parse_config`` reads."""
    return " ".join(f"{name}={value}" for name, value in config.items())


def _problem(op: str, keys: tuple[str, ...], cells: dict[str, str]) -> Problem:
    """A row's problem; a column that its table does not have at all is at its default."""
    of_type = problem_type(op)
    defaults = {f.name: f.default for f in fields(of_type) if f.default is not MISSING}
    values = {}
    for key in keys:
        if cells.get(key):
            values[key] = field_value(of_type, key, cells[key])
        elif key in cells or key not in defaults:
            raise ValueError(f"key column {key!r} is missing or empty")
    return of_type(**values)


def _number(column: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{column} must be a number, got {value!r}") from None
    if not 0 < number < float("inf"):
        raise ValueError(f"{column} must be above 0 and finite, got {value!r}")
    return number


def _one_of(column: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        raise ValueError(f"{column} must be {' or '.join(filter(None, known))}, got {value!r}")
    return value


def _integer(column: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{column} must be a whole number, got {value!r}") from None
