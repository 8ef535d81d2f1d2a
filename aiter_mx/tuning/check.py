"""Checks a table against the kernels there are: rows, builds, and what has changed since."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from aiter_mx.dispatch.route import Route
from aiter_mx.dispatch.tables import Row, read_table
from aiter_mx.errors import TableError
from aiter_mx.jit.build import BuildRequest, sources_key
from aiter_mx.kernels.registry import problem_key
from aiter_mx.kernels.spec import Problem
from aiter_mx.plan import build_requests
from aiter_mx.tuning.builds import HASH_DIGITS, built, own_request
from aiter_mx.tuning.table import Rows, key_of, problem_cells, read_origins

_MOST_NAMED = 8


@dataclass(frozen=True)
class Changed:
    """A row that was tuned with other sources than those here.

    Attributes:
        row: the row.
        request: what its kernel is built from now.
        code: hash of the machine code that it was tuned with, if that is known.
    """

    row: Row
    request: BuildRequest
    code: str


@dataclass(frozen=True)
class CheckedTable:
    """A table all of whose rows can be.

    Attributes:
        path: the file.
        rows: how many.
        requests: the builds that they need, with a row that needs each.
        changed: rows that were tuned with other sources than those here.
    """

    path: Path
    rows: int
    requests: dict[BuildRequest, str]
    changed: tuple[Changed, ...]


def check_table(path: Path, on_row: Callable[[], object] = lambda: None) -> CheckedTable:
    """Check the rows of a table; nothing is compiled. ``on_row`` is called after each.

    Raises:
        TableError: a row cannot be right, or is for the same shape as another.
    """
    seen: dict[tuple[object, ...], str] = {}
    origins: dict[str, Rows] = {}
    requests: dict[BuildRequest, str] = {}
    changed: list[Changed] = []
    for op, row in read_table(path):
        key = (op, row.gfx, row.cu_num, row.problem)
        if key in seen:
            raise TableError(f"{row.where}: is for the same shape as {seen[key]}")
        seen[key] = row.where
        target = row.target
        misfit = row.spec.misfit(target, row.problem, row.config)
        if misfit is not None:
            raise TableError(f"{row.where}: {row.backend}/{row.kernel}: {misfit}")
        chosen = Route(row.spec, row.config, row.where)
        for request in build_requests(target, [row.problem], [chosen]):
            requests[request] = row.where
        own = own_request(target, row.problem, chosen)
        if op not in origins:
            origins[op] = read_origins(path, op)
        cells = {"gfx": row.gfx, "cu_num": str(row.cu_num or ""), **problem_cells(op, row.problem)}
        origin = origins[op].get(key_of(op, cells), {})
        build = origin.get("build")
        if own is not None and build and sources_key(own)[:HASH_DIGITS] != build:
            changed.append(Changed(row, own, origin.get("code", "")))
        on_row()
    return CheckedTable(path, len(seen), requests, tuple(changed))


def age_of(table: CheckedTable, can_build: Callable[[str], bool]) -> list[str]:
    """What to say of rows that were tuned with other sources than those here.

    Args:
        table: what was checked.
        can_build: whether code for an architecture is to be compared, which needs a compiler.
    """
    if not table.changed:
        return []
    lines = [
        f"{table.path}: the sources of {_kernels([one.row for one in table.changed])} have changed "
        "since these rows were tuned"
    ]
    compared = [
        (one.row, built(one.request).code == one.code)
        for one in table.changed
        if one.code and can_build(one.row.gfx)
    ]
    others = [row for row, is_same in compared if not is_same]
    if len(compared) > len(others):
        lines.append(f"  {len(compared) - len(others)} of them compile to the same machine code")
    if others:
        named = ", ".join(row.where.rpartition(":")[2] for row in others[:_MOST_NAMED])
        more = ", ..." if len(others) > _MOST_NAMED else ""
        lines.append(
            f"  {len(others)} of them compile to other machine code, or did so with another "
            f"compiler: what they say of times may no longer hold, and aiter-mx tune measures "
            f"them again (lines {named}{more})"
        )
    if len(compared) < len(table.changed):
        count = len(table.changed) - len(compared)
        lines.append(f"  {count} of them are not known to compile to the same machine code still")
    return lines


def stale_of(path: Path, op: str, problems: Sequence[Problem]) -> list[Problem]:
    """Those of the problems that a table has no row for, or one whose machine code has changed.

    Raises:
        TableError: a row cannot be right.
    """
    if not path.is_file():
        return list(problems)
    fresh = {problem_key(op, row.problem) for row_op, row in read_table(path) if row_op == op}
    for one in check_table(path).changed:
        if built(one.request).code != one.code:
            fresh.discard(problem_key(op, one.row.problem))
    return [problem for problem in problems if problem_key(op, problem) not in fresh]


def _kernels(rows: Sequence[Row]) -> str:
    """Which kernels rows name, and how often: ``gemv (12 rows), mma_ring (1 row)``."""
    counts = Counter(row.kernel for row in rows)
    return ", ".join(f"{name} ({n} row{'s' * (n > 1)})" for name, n in counts.most_common())
