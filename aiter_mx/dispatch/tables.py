"""Finds the rows of tuned tables. A line is read when a call asks for its shape.

A table is a CSV. Its columns:

- ``gfx``, ``cu_num``, ``op``: what the row is for; an empty ``cu_num`` is any.
- the op's key columns, such as ``M, N, K, out_dtype``; a table that has none for a field with a
  default is for that default;
- ``backend``, ``kernel``, and ``config``, the kernel's parameters as ``rows=2 waves=1 unroll=1``;
- what was measured, for people: see ``INFORMATION``.

A process reads a file once, when it first needs a row of it: later changes to the file are for
processes that start later.

Where a row comes from is told in the file ``<table>.provenance.csv`` beside it, which dispatch
does not read (``aiter_mx/tuning/table.py``).

The shipped tables were proven when they were made, and ``digests.json`` beside them says which
bytes were: ``aiter-mx tables check`` proves them again. Of any other file every row's shape, kernel
and parameters are checked when it is loaded, and whether the kernel covers the shape when the row
is taken.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache, cached_property
from hashlib import sha256
from operator import itemgetter
from pathlib import Path
from typing import Any

from aiter_mx.dispatch.cells import (
    CHOICE,
    INFORMATION,
    INFORMATION_SUFFIX,
    READERS,
    SCOPE,
    SIDE_FILES,
    Line,
    Lines,
    parse_config,
    read_lines,
)
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
from aiter_mx.target import ENVIRONMENT, Target, environment_key, hardware

_CONFIG = environment_key("AITER_MX_CONFIG")
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
        origin: ``measured``, or ``model`` with the model's error, if the table says.
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
        self._lines: list[Line] = []
        self._forms: list[_Form] = []  # how each of them reads
        # Numbers and no rows, as Python's garbage collector does not look into dicts of those.
        self._places: dict[Key, dict[int | None, int]] = {}
        self._taken: dict[int, Row] = {}
        self.keys = self._places.keys()
        for path in files:
            columns, lines = _proven(path)
            gfx_at, cu_num_at = columns.index("gfx"), columns.index("cu_num")
            mine = [line for line in lines if line[0] == op and line[2][gfx_at] == arch]
            if not mine:
                continue
            form = _form(path, columns, op, 1)
            keyed = zip(form.keys([cells for *_, cells in mine]), mine, strict=True)
            for place, (key, (_, _, cells)) in enumerate(keyed, start=len(self._lines)):
                if key not in self._places:
                    self._places[key] = {}
                cu_num = int(cells[cu_num_at]) if cells[cu_num_at] else None
                self._places[key][cu_num] = place
            self._lines += mine
            self._forms += [form] * len(mine)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def cu_nums(self, key: Key) -> list[int | None]:
        """Compute units that the rows with this key are for."""
        return list(self._places.get(key, ()))

    def problems(self) -> list[Problem]:
        """What there are rows for."""
        return [self._row(next(iter(of_key.values()))).problem for of_key in self._places.values()]

    def find(self, key: Key, cu_num: int) -> Row | None:
        """The row that wins for a key: one for this very CU count, else one for any; the last.

        Raises:
            TableError: its kernel does not cover its shape.
        """
        of_key = self._places.get(key, {})
        place = of_key.get(cu_num, of_key.get(None))
        return None if place is None else self._take(place)

    def _row(self, place: int) -> Row:
        _, number, cells = self._lines[place]
        return self._forms[place].row(number, cells)

    def _take(self, place: int) -> Row:
        if place not in self._taken:
            row = self._row(place)
            if not _is_shipped(self._forms[place].path):
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
    return (*((own,) if own.is_file() else ()), *_listed(listed))


@cache
def _listed(listed: str) -> tuple[Path, ...]:
    """The files that a list names: looked for once a process, as they are read once."""
    files: list[Path] = []
    for entry in filter(None, listed.split(os.pathsep)):
        path = Path(entry)
        if path.is_dir():
            files += sorted(p for p in path.glob("*.csv") if not p.name.endswith(SIDE_FILES))
        elif path.is_file():
            files.append(path)
        else:
            what = "is neither a file nor a folder" if path.exists() else "does not exist"
            raise TableError(f"AITER_MX_CONFIG names {entry!r}, which {what}")
    return tuple(files)


def load_rows(arch: str, op: str) -> Rows:
    """All rows for an op on an architecture.

    Raises:
        TableError: a file is no table, or one of ours has a row that cannot be right, whichever op
            and architecture it is for.
    """
    return _rows(configs_dir(), arch, op, ENVIRONMENT.get(_CONFIG))


@cache
def _rows(shipped: Path, arch: str, op: str, listed: object) -> Rows:
    return Rows(op, arch, table_files(arch, op))


@cache
def _proven(path: Path) -> Lines:
    """The lines of a table. Those of one that is not shipped are checked, of whichever op."""
    columns, lines = read_lines(path)
    if not _is_shipped(path):
        by_op: dict[str, list[Line]] = {}
        for line in lines:
            by_op.setdefault(line[0], []).append(line)
        for op, of_op in by_op.items():
            _form(path, columns, op, of_op[0][1]).refuse_wrong(of_op)
    return columns, lines


def read_table(path: Path) -> Iterator[tuple[str, Row]]:
    """Each row of a table with the op it is for, proven against the registry.

    Raises:
        TableError: the file is no table, or a row names an unknown op, architecture, kernel or
            parameter, an illegal value, or a shape outside the kernel's envelope.
    """
    columns, lines = read_lines(path)
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

    def refuse_wrong(self, lines: Sequence[Line]) -> None:
        """Raise TableError for the first line that cannot be right.

        Cells are read once for each text that a column has: of 100,000 rows most are alike.
        """
        rows = [cells for *_, cells in lines]
        choice_of = itemgetter(*(self.at[name] for name in ("gfx", *CHOICE)))
        try:
            for choice in set(map(choice_of, rows)):
                self._choice(*choice)
            for name, read in READERS.items():
                for text in set(self._texts(name, rows)):
                    read(text)
            for key in set(self.keys(rows)):
                self.type(**dict(zip(self.key_columns, key, strict=True)))
        except ValueError:
            for _, number, cells in lines:
                self.row(number, cells)
            raise

    def keys(self, rows: Sequence[Sequence[str]]) -> Iterator[Key]:
        """What lines are for, all at once."""
        return zip(*(self._values(name, rows) for name in self.key_columns), strict=True)

    def _values(self, name: str, rows: Sequence[Sequence[str]]) -> Sequence[Any]:
        if name not in self.at and name in self.defaults:
            return [self.defaults[name]] * len(rows)
        texts = self._texts(name, rows)
        read = {text: self._value(name, text) for text in set(texts)}
        return [read[text] for text in texts]

    def _texts(self, name: str, rows: Sequence[Sequence[str]]) -> Sequence[str]:
        """A column, empty where the table does not have it."""
        return [*map(itemgetter(self.at[name]), rows)] if name in self.at else [""] * len(rows)

    def _value(self, name: str, text: str) -> Any:
        if not text:
            raise ValueError(f"key column {name!r} is missing or empty")
        return field_value(self.type, name, text)

    def row(self, number: int, cells: Sequence[str]) -> Row:
        """One line, checked but for whether the kernel covers its shape."""
        where = f"{self.path}:{number}"
        try:
            return self._row(where, dict(zip(self.at, cells, strict=True)))
        except ValueError as error:
            raise TableError(f"{where}: {error}") from error

    def _row(self, where: str, cells: Mapping[str, str]) -> Row:
        spec, config = self._choice(*(cells[name] for name in ("gfx", *CHOICE)))
        facts = {name: read(cells.get(name, "")) for name, read in READERS.items()}
        return Row(
            where=where,
            gfx=cells["gfx"],
            cu_num=facts["cu_num"],
            problem=self._problem(cells),
            spec=spec,
            config=config,
            us=facts["us"],
            origin=facts["source"],
        )

    def _choice(self, gfx: str, backend: str, name: str, text: str) -> tuple[KernelSpec, Config]:
        """A line's kernel and configuration; many lines have the same."""
        choice = (gfx, backend, name, text)
        if choice not in self.choices:
            arch = hardware(gfx).arch
            spec, config = find_kernel(self.op, arch, backend, name), parse_config(text)
            spec.check_config(config)
            self.choices[choice] = spec, config
        return self.choices[choice]

    def _problem(self, cells: Mapping[str, str]) -> Problem:
        """A line's problem; a column that its table does not have at all is at its default."""
        told = (name for name in self.key_columns if name in cells or name not in self.defaults)
        return self.type(**{name: self._value(name, cells.get(name, "")) for name in told})


_forms = cache(_Form)


def _form(path: Path, columns: tuple[str, ...], op: str, number: int) -> _Form:
    """How a table's lines of an op read; ``number`` is one such line."""
    try:
        return _forms(path, columns, op)
    except ValueError as error:
        raise TableError(f"{path}:{number}: {error}") from error
