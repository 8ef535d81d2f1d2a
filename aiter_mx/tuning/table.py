"""Tables as files: read as they stand, and written whole, sorted, each file in one step.

A table is three files, of which dispatch reads the first alone:

- ``linear.csv``: what was chosen, and what people compare, see ``aiter_mx/dispatch/tables.py``;
- ``linear.provenance.csv``: for each row how far its rounds were spread, hashes of its kernel's
  sources (``build``) and machine code (``code``), and the run that measured it;
- ``runs.csv``: for each run its commit, date and versions, for all tables of the folder.

In memory a row has the cells of all three.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TypeAlias

import pandas as pd

from aiter_mx.dispatch.cells import (
    CHOICE,
    MEASURED,
    MODEL,
    SCOPE,
    SIDE_FILES,
    format_config,
    parse_config,
    read_cells,
)
from aiter_mx.dispatch.tables import read_table
from aiter_mx.errors import TableError
from aiter_mx.kernels.registry import find_kernel, key_columns, problem_type
from aiter_mx.kernels.spec import Problem
from aiter_mx.target import Target
from aiter_mx.tuning.candidates import Candidate, candidate_of
from aiter_mx.tuning.digests import record_digest
from aiter_mx.tuning.race import Timing

Cells: TypeAlias = "dict[str, str]"
"""A row as it stands in a table, by column."""
Rows: TypeAlias = "dict[tuple[str, ...], Cells]"
"""A table's rows by ``key_of``."""

PEERS = ("hip_us", "triton_us", "vendor_us")
"""The best time of each backend that was not chosen; a table has those that any row has."""
RUN = ("date", "commit", "versions")


def columns_of(op: str, peers: Iterable[str] = PEERS) -> list[str]:
    """The columns of a table, in their order."""
    return [*SCOPE, *key_columns(op), *CHOICE, "us", *peers, "rel_err", "source"]


def provenance_columns(op: str) -> list[str]:
    """The columns of the file that says where a table's rows come from."""
    return [*SCOPE, *key_columns(op), "spread", "touched", "build", "code", "run"]


def side_files(path: Path) -> tuple[Path, Path]:
    """Where a table's provenance stands, and the runs that it names."""
    provenance, runs = SIDE_FILES
    return path.with_name(f"{path.stem}.{provenance}"), path.with_name(runs)


def key_of(op: str, row: Mapping[str, str]) -> tuple[str, ...]:
    """What a row is for: it replaces another of the same key."""
    return tuple(row[name] for name in ("gfx", "cu_num", *key_columns(op)))


def problem_cells(op: str, problem: Problem) -> Cells:
    """The key columns of a problem."""
    return {name: str(getattr(problem, name)) for name in key_columns(op)}


def read_csv(path: Path) -> pd.DataFrame:
    """A CSV with every cell as the text that stands there; no rows where there is no file, or an
    empty one, as a kill may leave.

    Raises:
        TableError: it cannot be read, or its lines are not of one length.
    """
    if not path.is_file() or not path.stat().st_size:
        return pd.DataFrame(dtype=str)
    header, lines = read_cells(path)
    return pd.DataFrame([cells for _, cells in lines], columns=list(header), dtype=str)


def _read_keyed(path: Path, op: str) -> pd.DataFrame:
    """``read_csv``, with the columns that say what rows are for.

    Raises:
        TableError: one of them is missing that is no newer than the table.
    """
    rows = read_csv(path)
    defaults = {field.name: field.default for field in fields(problem_type(op))}
    for name in ("gfx", "cu_num", *key_columns(op)) if len(rows.columns) else ():
        if name not in rows:  # a table that is older than a key column is for its default
            default = defaults.get(name, MISSING)
            if default is MISSING:
                raise TableError(f"{path}: column {name!r} is missing")
            rows[name] = str(default)
    return rows


def read_frame(path: Path, op: str) -> pd.DataFrame:
    """A table with its provenance, every cell as text; no rows where there is no table.

    Raises:
        TableError: a row that cannot be right.
        ValueError: a row of another op.
    """
    if not path.is_file():
        return pd.DataFrame(columns=columns_of(op), dtype=str)
    for row_op, row in read_table(path):
        if row_op != op:
            raise ValueError(f"{row.where} is a row of {row_op!r}; the table is for {op!r}")
    return with_provenance(path, op)


def with_provenance(path: Path, op: str) -> pd.DataFrame:
    """``read_frame`` without a look at what the rows say."""
    rows, (provenance_path, runs_path) = _read_keyed(path, op), side_files(path)
    provenance, runs = _read_keyed(provenance_path, op), read_csv(runs_path)
    keys = ["gfx", "cu_num", *key_columns(op)]
    if len(provenance.columns):
        facts = provenance.drop(columns="op", errors="ignore").drop_duplicates(keys)
        rows = rows.merge(facts, "left", keys)
        if "run" in runs and "run" in facts:
            rows = rows.merge(runs.drop_duplicates("run"), "left", "run").drop(columns="run")
    return rows.fillna("")


def read_rows(path: Path, op: str) -> Rows:
    """The rows of ``read_frame``, by what they are for."""
    records: list[Cells] = read_frame(path, op).to_dict("records")
    return {key_of(op, row): row for row in records}


def read_origins(path: Path, op: str) -> Rows:
    """What stands in a table's provenance alone, by what the rows are for."""
    records: list[Cells] = _read_keyed(side_files(path)[0], op).to_dict("records")
    return {key_of(op, row): row for row in records}


def incumbent_of(
    rows: Rows, op: str, target: Target, problem: Problem, source: str = MEASURED
) -> Candidate | None:
    """What a table names for a problem on this target, if that was measured, or else if a model is
    the ``source`` of what is to be held against it."""
    key = {"gfx": target.arch, "cu_num": str(target.cu_num), **problem_cells(op, problem)}
    row = rows.get(key_of(op, key))
    if row is None or (row.get("source", "").startswith(MODEL) and source != MODEL):
        return None
    kernel = find_kernel(op, target.arch, row["backend"], row["kernel"])
    return candidate_of(kernel, target.arch, parse_config(row["config"]))


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
        if timing.candidate.backend != candidate.backend:
            best.setdefault(timing.candidate.backend, timing.us)
    return {
        "gfx": target.arch,
        "cu_num": str(target.cu_num),
        "op": op,
        **problem_cells(op, problem),
        "backend": candidate.backend,
        "kernel": candidate.kernel,
        "config": format_config(candidate.config),
        "us": f"{chosen.us:.3f}",
        **{f"{backend}_us": f"{us:.3f}" for backend, us in best.items()},
        "rel_err": f"{chosen.admission.rel_err:.2e}",
        "spread": f"{chosen.spread:.4f}",
        **origin,
    }


def write_table(path: Path, op: str, rows: Iterable[Cells]) -> None:
    """Replace a table and its provenance; runs are added to those of the folder.

    Rows are sorted by shape, in which M counts last, then by CU count. The table itself comes last:
    a kill before leaves the rows of before, beside facts of some that are not there yet.
    """
    rows = sorted(rows, key=lambda row: order_of(op, row))
    frame = pd.DataFrame(
        rows,
        columns=list(dict.fromkeys([*columns_of(op), *provenance_columns(op), *RUN])),
        dtype=str,
    ).fillna("")
    frame["run"] = [_run_id(row) for row in frame[list(RUN)].itertuples(index=False)]
    provenance, runs = side_files(path)
    _add_runs(runs, frame[["run", *RUN]])
    write_csv(provenance, frame[_with_values(frame, provenance_columns(op), ["touched"])])
    write_csv(path, frame[_with_values(frame, columns_of(op), PEERS)])
    record_digest(path)


def _with_values(frame: pd.DataFrame, columns: list[str], optional: Sequence[str]) -> list[str]:
    """The columns, without the optional ones that no row has a value for."""
    return [name for name in columns if name not in optional or frame[name].any()]


def _run_id(run: Sequence[str]) -> str:
    """The name of a run, the same wherever its facts are; none for rows of which none is known."""
    return "r" + hashlib.sha256("\0".join(run).encode()).hexdigest()[:6] if any(run) else ""


def _add_runs(path: Path, named: pd.DataFrame) -> None:
    """Append runs that a file lacks: one write, so that sweeps of two ops lose none of them."""
    known = set(read_csv(path).get("run", ()))
    new = named[(named.run != "") & ~named.run.isin(known)].drop_duplicates()
    if not new.empty:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = new.to_csv(index=False, header=not known, lineterminator="\n")
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(handle, text.encode())
        finally:
            os.close(handle)


def drop_unnamed_runs(folder: Path) -> None:
    """Take runs that no row names any more out of a folder's file.

    A sweep adds its run ahead of the rows that name it, so all stay while a journal is there.

    Raises:
        TableError: a file cannot be read.
    """
    if any(folder.glob("*.journal")):
        return
    provenance, runs_name = SIDE_FILES
    named: set[str] = set()
    for path in folder.glob(f"*.{provenance}"):
        named.update(read_csv(path).get("run", ()))
    runs = read_csv(folder / runs_name)
    kept = runs[runs["run"].isin(named)] if "run" in runs else runs
    if len(kept) < len(runs):
        write_csv(folder / runs_name, kept)


def order_of(op: str, row: Mapping[str, str]) -> tuple[object, ...]:
    """Where a row stands in a table.

    Raises:
        ValueError: a size is no whole number.
    """
    types = problem_type(op).__annotations__
    numbers = [name for name in key_columns(op) if types[name] in (int, "int")]
    numbers.sort(key=lambda name: name == "M")
    words = [row[name] for name in key_columns(op) if name not in numbers]
    return (row["gfx"], *(int(row[n]) for n in numbers), *words, int(row["cu_num"] or 0))


def write_csv(path: Path, frame: pd.DataFrame) -> None:
    """Put a table in place of the old one in one step."""
    write_text(path, frame.to_csv(index=False, lineterminator="\n"))


def write_text(path: Path, text: str) -> None:
    """Put a file in place of the old one in one step: no reader ever sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
