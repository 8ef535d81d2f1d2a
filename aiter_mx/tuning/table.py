"""Tables as files: read as they stand, and written whole, sorted and in one step."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TypeAlias

from aiter_mx.dispatch.tables import CHOICE, SCOPE, read_table
from aiter_mx.kernels.registry import find_kernel, kernels_of, key_columns, problem_type
from aiter_mx.kernels.spec import Problem
from aiter_mx.target import Target
from aiter_mx.tuning.candidates import NO_CANDIDATES, Candidate, candidate_of
from aiter_mx.tuning.race import Timing

Cells: TypeAlias = "dict[str, str]"
"""A row as it stands in a table, by column."""
Rows: TypeAlias = "dict[tuple[str, ...], Cells]"
"""A table's rows by ``key_of``."""


def columns_of(op: str, arch: str) -> list[str]:
    """The columns of a table, in their order."""
    kernels = [k for k in kernels_of(op) if k.is_for(arch) and k.backend not in NO_CANDIDATES]
    params = dict.fromkeys(param.name for kernel in kernels for param in kernel.params)
    backends = dict.fromkeys(f"{kernel.backend}_us" for kernel in kernels)
    measured = ("us", *backends, "rel_err", "spread")
    origin = ("build", "code", "versions", "commit", "date", "source")
    return [*SCOPE, *key_columns(op), *CHOICE, *params, *measured, *origin]


def key_of(op: str, row: Mapping[str, str]) -> tuple[str, ...]:
    """What a row is for: it replaces another of the same key."""
    return tuple(row[name] for name in ("gfx", "cu_num", *key_columns(op)))


def _whole(op: str, row: Cells) -> Cells:
    """A row of a table that may be older than some of its key columns."""
    defaults = {f.name: str(f.default) for f in fields(problem_type(op))}
    return {**{name: defaults[name] for name in key_columns(op)}, **row}


def problem_cells(op: str, problem: Problem) -> Cells:
    """The key columns of a problem."""
    return {name: str(getattr(problem, name)) for name in key_columns(op)}


def read_rows(path: Path, op: str) -> Rows:
    """The rows of a table as they stand; none where there is no table.

    Raises:
        TableError: a row that cannot be right, or one of another op.
    """
    if not path.is_file():
        return {}
    for row_op, row in read_table(path):
        if row_op != op:
            raise ValueError(f"{row.where} is a row of {row_op!r}; the table is for {op!r}")
    with path.open(newline="", encoding="utf-8") as file:
        rows = [_whole(op, row) for row in csv.DictReader(file)]
    return {key_of(op, row): row for row in rows}


def incumbent_of(rows: Rows, op: str, target: Target, problem: Problem) -> Candidate | None:
    """What a table names for a problem on this target, if that was measured."""
    key = {"gfx": target.arch, "cu_num": str(target.cu_num), **problem_cells(op, problem)}
    row = rows.get(key_of(op, key))
    if row is None or row.get("source") == "model":
        return None
    kernel = find_kernel(op, target.arch, row["backend"], row["kernel"])
    config = {param.name: int(row[param.name]) for param in kernel.params}
    return candidate_of(kernel, target.arch, config)


def row_of(
    target: Target,
    op: str,
    problem: Problem,
    chosen: Timing,
    timings: tuple[Timing, ...],
    origin: Mapping[str, str],
) -> Cells:
    """The row that names ``chosen``; ``timings`` are of all that computed the problem, as a race
    orders them."""
    candidate = chosen.candidate
    best: dict[str, float] = {}
    for timing in timings:  # finalists first: times of earlier heats do not compare with theirs
        best.setdefault(timing.candidate.backend, timing.us)
    return {
        "gfx": target.arch,
        "cu_num": str(target.cu_num),
        "op": op,
        **problem_cells(op, problem),
        "backend": candidate.backend,
        "kernel": candidate.kernel,
        **{name: str(value) for name, value in candidate.values},
        "us": f"{chosen.us:.3f}",
        **{f"{backend}_us": f"{us:.3f}" for backend, us in best.items()},
        "rel_err": f"{chosen.admission.rel_err:.2e}",
        "spread": f"{chosen.spread:.4f}",
        **origin,
    }


def table_text(op: str, arch: str, rows: Rows) -> str:
    """A table as CSV, its rows sorted by shape, in which M counts last, then by CU count."""
    known = columns_of(op, arch)
    others = {column: None for row in rows.values() for column in row if column not in known}
    text = io.StringIO()
    writer = csv.DictWriter(text, [*known, *others], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(sorted(rows.values(), key=lambda row: _order(op, row)))
    return text.getvalue()


def _order(op: str, row: Mapping[str, str]) -> tuple[object, ...]:
    types = problem_type(op).__annotations__
    numbers = [name for name in key_columns(op) if types[name] in (int, "int")]
    numbers.sort(key=lambda name: name == "M")
    words = [row[name] for name in key_columns(op) if name not in numbers]
    return (row["gfx"], *(int(row[n]) for n in numbers), *words, int(row["cu_num"] or 0))


def write_text(path: Path, text: str) -> None:
    """Put a file in place of the old one in one step: no reader ever sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
