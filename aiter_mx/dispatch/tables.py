"""Finds the rows of tuned tables. A line is read when a call asks for its shape.

A table is a CSV. Its columns:

- ``gfx``, ``cu_num``, ``op``: what the row is for; an empty ``cu_num`` is any.
- the op's key columns, such as ``M, N, K, out_dtype``; a table that has none for a field with a
  default is for that default;
- ``backend``, ``kernel``, and ``config``, the kernel's parameters as ``rows=2 waves=1 unroll=1``;
- what was measured, for people: see ``INFORMATION``.

Where a row comes from is told in the file ``<table>.provenance.csv`` beside it, which dispatch
does not read (``aiter_mx/tuning/provenance.py``).

The shipped tables were proven when they were made, and ``digests.json`` beside them says which
bytes were: ``aiter-mx tables check`` proves them again. Of any other file every row's shape, kernel
and parameters are checked when it is loaded, and whether the kernel covers the shape when the row
is taken.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from aiter_mx.errors import TableError
from aiter_mx.kernels.registry import (
    field_value,
    find_kernel,
    key_columns,
    ops,
    problem_type,
)
from aiter_mx.kernels.spec import Config, KernelSpec, Key, Problem
from aiter_mx.paths import configs_dir
from aiter_mx.target import Target, hardware

SCOPE = ("gfx", "cu_num", "op")
SHAPE = "shape"  # of what AITER_MX_LOG_UNTUNED collects: all key columns, as ``M=1 N=2304 K=6144``
CHOICE = ("backend", "kernel", "config")
INFORMATION = ("us", "rel_err", "source")
SOURCES = ("measured", "model")
SIDE_FILES = ("provenance.csv", "runs.csv")
"""Ends of the names of files beside a table that are none themselves."""
INFORMATION_SUFFIX = "_us"  # one column for each peer's time
DIGESTS = "digests.json"
"""The file in the folder of shipped tables that has each one's SHA-256."""


@dataclass(frozen=True)
class Row:
    """One row of a table.

    Attributes:
        where: ``file:line``.
        gfx: architecture.
        cu_num: compute units of the GPU it was tuned on, None for any.
        problem: what it is for; fields that are no key columns have their defaults.
        spec: the declaration of the kernel chosen.
        config: its parameters.
        us: its time when tuned, in microseconds, if the table says.
        origin: ``measured`` or ``model``, if the table says.
    """

    where: str
    gfx: str
    cu_num: int | None
    problem: Problem
    spec: KernelSpec
    config: Config
    us: float | None
    origin: str

    @property
    def backend(self) -> str:
        """Of the kernel chosen."""
        return self.spec.backend

    @property
    def kernel(self) -> str:
        """Its name."""
        return self.spec.name

    @property
    def target(self) -> Target:
        """What the row was tuned on."""
        usual = hardware(self.gfx)
        return replace(usual, cu_num=self.cu_num or usual.cu_num)

    @cached_property
    def refusal(self) -> str | None:
        """Why its kernel does not cover its shape, or None."""
        return self.spec.refusal(hardware(self.gfx), self.problem)


class Rows:
    """The rows of an op's tables for one architecture, by key, those of later tables last."""

    def __init__(self, op: str, arch: str, files: Sequence[Path]) -> None:
        self._lines: dict[Key, list[tuple[int | None, _Form, int, list[str]]]] = {}
        self._taken: dict[tuple[Path, int], Row] = {}
        for path in files:
            columns, lines = _read(path)
            if not _is_shipped(path):
                for op_of_line, number, cells in lines:
                    _form(path, columns, op_of_line, number).row(number, cells)
            gfx_at, cu_num_at = columns.index("gfx"), columns.index("cu_num")
            mine = [line for line in lines if line[0] == op and line[2][gfx_at] == arch]
            if not mine:
                continue
            form = _form(path, columns, op, 1)
            found = zip(form.keys([cells for *_, cells in mine]), mine, strict=True)
            for key, (_, number, cells) in found:
                cu_num = int(cells[cu_num_at]) if cells[cu_num_at] else None
                self._lines.setdefault(key, []).append((cu_num, form, number, cells))

    def __iter__(self) -> Iterator[Key]:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)

    def cu_nums(self, key: Key) -> list[int | None]:
        """Compute units that the rows with this key are for."""
        return [line[0] for line in self._lines.get(key, ())]

    def problems(self) -> list[Problem]:
        """What there are rows for."""
        return [lines[0][1].row(*lines[0][2:]).problem for lines in self._lines.values()]

    def find(self, key: Key, cu_num: int) -> Row | None:
        """The row that wins for a key: one for this very CU count, else one for any; the last.

        Raises:
            TableError: its kernel does not cover its shape.
        """
        lines = self._lines.get(key)
        if lines is None:
            return None
        for wanted in (cu_num, None):
            for of_line, form, number, cells in reversed(lines):
                if of_line == wanted:
                    return self._take(form, number, cells)
        return None

    def _take(self, form: _Form, number: int, cells: list[str]) -> Row:
        place = (form.path, number)
        if place not in self._taken:
            row = form.row(number, cells)
            if not _is_shipped(form.path):
                _refuse_uncovered(row)
            self._taken[place] = row
        return self._taken[place]


NO_ROWS = Rows("", "", ())


def table_files(arch: str, op: str) -> tuple[Path, ...]:
    """The tables that may hold rows for an op on an architecture; later ones win.

    First the shipped table, then what the environment variable ``AITER_MX_CONFIG`` lists: files,
    or folders whose CSVs are taken in the order of their names, separated like a PATH.

    Raises:
        TableError: ``AITER_MX_CONFIG`` names something that does not exist.
    """
    return _files(configs_dir(), arch, op, os.environ.get("AITER_MX_CONFIG", ""))


@cache
def _files(shipped: Path, arch: str, op: str, listed: str) -> tuple[Path, ...]:
    own = shipped / arch / f"{op}.csv"
    files = [own] if own.is_file() else []
    for entry in filter(None, listed.split(os.pathsep)):
        path = Path(entry)
        if path.is_dir():
            files += sorted(p for p in path.glob("*.csv") if not p.name.endswith(SIDE_FILES))
        elif path.is_file():
            files.append(path)
        else:
            raise TableError(f"AITER_MX_CONFIG names {entry!r}, which does not exist")
    return tuple(files)


def load_rows(arch: str, op: str) -> Rows:
    """All rows for an op on an architecture.

    Raises:
        TableError: a file is no table, or one of ours has a row that cannot be right, whichever op
            and architecture it is for.
    """
    return _rows(table_files(arch, op), arch, op)


@cache
def _rows(files: tuple[Path, ...], arch: str, op: str) -> Rows:
    return Rows(op, arch, files)


def read_table(path: Path) -> Iterator[tuple[str, Row]]:
    """Each row of a table with the op it is for, proven against the registry.

    Raises:
        TableError: the file is no table, or a row names an unknown op, architecture, kernel or
            parameter, an illegal value, or a shape outside the kernel's envelope.
    """
    columns, lines = _read(path)
    for op, number, cells in lines:
        row = _form(path, columns, op, number).row(number, cells)
        _refuse_uncovered(row)
        yield op, row


def digest_of(path: Path) -> str:
    """SHA-256 of a table, as ``digests.json`` has it."""
    return sha256(path.read_bytes()).hexdigest()


def shipped_digests() -> dict[str, str]:
    """SHA-256 of each shipped table when it was proven, by its path below ``configs``."""
    path = configs_dir() / DIGESTS
    digests: dict[str, str] = json.loads(path.read_text()) if path.is_file() else {}
    return digests


@cache
def _is_shipped(path: Path) -> bool:
    """Whether a file is a shipped table, byte for byte."""
    try:
        name = path.relative_to(configs_dir()).as_posix()
        return shipped_digests().get(name) == digest_of(path)
    except (OSError, ValueError):  # it lies elsewhere
        return False


def _refuse_uncovered(row: Row) -> None:
    if row.refusal is not None:
        raise TableError(
            f"{row.where}: {row.backend}/{row.kernel} does not cover this row: {row.refusal}"
        )


def _read(path: Path) -> tuple[tuple[str, ...], list[tuple[str, int, list[str]]]]:
    """The header of a table, and each line's op, number and cells."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.reader(file, strict=True, skipinitialspace=True)
            header = next(reader, None)
            if header is None:
                raise TableError(f"{path}: the file is empty; expected a header line")
            for column in (*SCOPE, *CHOICE):
                if column not in header:
                    older = "config" not in header and "kernel" in header
                    hint = f"; aiter-mx tables convert {path} brings an older table up to date"
                    raise TableError(
                        f"{path}:1: column {column!r} is missing{hint if older else ''}"
                    )
            op_at, lines = header.index("op"), []
            for cells in reader:
                if len(cells) != len(header):
                    if not any(cells):
                        continue
                    raise TableError(
                        f"{path}:{reader.line_num}: has {len(cells)} fields, the header has "
                        f"{len(header)}"
                    )
                lines.append((cells[op_at].strip(), reader.line_num, cells))
            return tuple(header), lines
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TableError(f"{path}: cannot be read as a table: {error}") from error


class _Form:
    """How the lines of a table read that are for one op."""

    def __init__(self, path: Path, columns: tuple[str, ...], op: str) -> None:
        if op not in ops():
            raise ValueError(f"unknown op {op!r}; there are {', '.join(ops())}")
        self.path, self.op, self.type = path, op, problem_type(op)
        self.at = {name: place for place, name in enumerate(columns)}
        self.key_columns = key_columns(op)
        self.defaults = {f.name: f.default for f in fields(self.type) if f.default is not MISSING}
        self.choices: dict[tuple[str, ...], tuple[KernelSpec, Config]] = {}
        for column in columns:
            known = (*SCOPE, *CHOICE, *self.key_columns, *INFORMATION)
            if column not in known and not column.endswith(INFORMATION_SUFFIX):
                raise ValueError(
                    f"unknown column {column!r}; those of {op!r} are {', '.join(self.key_columns)}"
                )

    def keys(self, lines: list[list[str]]) -> Iterator[Key]:
        """What lines are for, all at once."""
        return zip(*(self._values(name, lines) for name in self.key_columns), strict=True)

    def _values(self, name: str, lines: list[list[str]]) -> Sequence[Any]:
        if name not in self.at:
            return [self.defaults[name]] * len(lines)
        texts = [cells[self.at[name]] for cells in lines]
        read: dict[str, Any] = {text: field_value(self.type, name, text) for text in set(texts)}
        return [read[text] for text in texts]

    def row(self, number: int, cells: list[str]) -> Row:
        """One line, checked but for whether the kernel covers its shape."""
        where = f"{self.path}:{number}"
        try:
            return self._row(where, [cell.strip() for cell in cells])
        except ValueError as error:
            raise TableError(f"{where}: {error}") from error

    def _row(self, where: str, cells: list[str]) -> Row:
        def cell(name: str) -> str:
            return cells[self.at[name]] if name in self.at else ""

        arch, cu_num = hardware(cell("gfx")).arch, cell("cu_num")
        spec, config = self._choice(arch, cells)
        return Row(
            where=where,
            gfx=arch,
            cu_num=_integer("cu_num", cu_num) if cu_num else None,
            problem=self._problem(cells),
            spec=spec,
            config=config,
            us=_number("us", cell("us")) if cell("us") else None,
            origin=_one_of("source", cell("source"), ("", *SOURCES)),
        )

    def _choice(self, arch: str, cells: list[str]) -> tuple[KernelSpec, Config]:
        """A line's kernel and configuration; many lines have the same."""
        backend, name, text = (cells[self.at[column]] for column in CHOICE)
        choice = (arch, backend, name, text)
        if choice not in self.choices:
            spec, config = find_kernel(self.op, arch, backend, name), parse_config(text)
            spec.check_config(config)
            self.choices[choice] = spec, config
        return self.choices[choice]

    def _problem(self, cells: list[str]) -> Problem:
        """A line's problem; a column that its table does not have at all is at its default."""
        values = {}
        for name in self.key_columns:
            if name in self.at and cells[self.at[name]]:
                values[name] = field_value(self.type, name, cells[self.at[name]])
            elif name in self.at or name not in self.defaults:
                raise ValueError(f"key column {name!r} is missing or empty")
        return self.type(**values)


_forms = cache(_Form)


def _form(path: Path, columns: tuple[str, ...], op: str, number: int) -> _Form:
    """How a table's lines of an op read; ``number`` is one such line."""
    try:
        return _forms(path, columns, op)
    except ValueError as error:
        raise TableError(f"{path}:{number}: {error}") from error


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
