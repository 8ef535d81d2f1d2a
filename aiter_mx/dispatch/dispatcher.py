"""Routes a problem: the tuned table's exact row first, then the kernels' envelopes."""

from __future__ import annotations

import csv
import io
import os
import threading

from aiter_mx.dispatch.route import Route
from aiter_mx.dispatch.tables import SCOPE, Row, load_rows
from aiter_mx.kernels.registry import find_kernel, kernels_of, key_columns, problem_key
from aiter_mx.kernels.spec import KernelSpec, Problem
from aiter_mx.target import Target

_logged: set[tuple[str, Target, Problem]] = set()
_logged_lock = threading.Lock()


def route(
    op: str, target: Target, problem: Problem, skip: frozenset[tuple[str, str]] = frozenset()
) -> Route:
    """Who computes ``problem`` on ``target``.

    Args:
        op: name of the op.
        target: what it runs on.
        problem: shape and dtypes.
        skip: (backend, kernel) pairs that are out of the question, each because it failed.

    Raises:
        TableError: a table that applies here is malformed.
        ValueError: nothing covers the problem.
    """
    key = problem_key(op, problem)
    row, why_no_row = _find_row(op, target, key)
    if row is not None and (row.backend, row.kernel) not in skip:
        kernel = find_kernel(op, row.backend, row.kernel)
        refusal = kernel.refusal(target, problem)
        if refusal is None:
            return Route(op, row.backend, row.kernel, row.config, _row_reason(row), row.where)
        why_no_row = f"{row.where} names {row.backend}/{row.kernel}, but {refusal}"
    elif row is None and target.runtime != "none":
        _log_miss(op, target, key)

    refusals: list[str] = []
    for kernel in kernels_of(op):
        if (kernel.backend, kernel.name) in skip:
            refusals.append(f"{kernel.backend}/{kernel.name} failed before")
            continue
        refusal = kernel.refusal(target, problem)
        if refusal is None:
            reason = "; ".join([why_no_row, *refusals, _choice_reason(kernel, bool(refusals))])
            config = kernel.configure(target, problem)
            return Route(op, kernel.backend, kernel.name, config, reason, "envelope")
        refusals.append(refusal)
    raise ValueError(f"nothing computes {op} of {problem} on {target.name}: {'; '.join(refusals)}")


def _row_reason(row: Row) -> str:
    timed = f" in {row.us:g} us" if row.us is not None else ""
    origin = f" ({row.origin})" if row.origin else ""
    return f"tuned row {row.where} chooses {row.backend}/{row.kernel}{timed}{origin}"


def _choice_reason(kernel: KernelSpec, after_refusals: bool) -> str:
    verb = "is next and covers it" if after_refusals else "covers it"
    return f"{kernel.backend}/{kernel.name} {verb}"


def _find_row(op: str, target: Target, key: Problem) -> tuple[Row | None, str]:
    """The row that wins for ``key``, or None and why there is none."""
    if target.runtime == "none":
        return None, "no GPU"
    rows = load_rows(target.arch, op)
    same_shape = rows.get(key, ())
    # A row for this very CU count beats one for any; among equals the later file wins.
    fitting = [row for row in same_shape if row.cu_num in (None, target.cu_num)]
    fitting.sort(key=lambda row: row.cu_num is not None)
    if fitting:
        return fitting[-1], ""
    if same_shape:
        counts = ", ".join(str(row.cu_num) for row in same_shape)
        return None, f"the tuned rows of this shape are for {counts} CUs, not {target.cu_num}"
    shapes = f"none of the {len(rows)} tuned shapes for {target.arch} is this one"
    return None, shapes if rows else f"no tuned table for {op} on {target.arch}"


def _log_miss(op: str, target: Target, key: Problem) -> None:
    """Append a shape without a row to the CSV that ``AITER_MX_LOG_UNTUNED`` names, once."""
    path = os.environ.get("AITER_MX_LOG_UNTUNED")
    if not path:
        return
    with _logged_lock:
        if (op, target, key) in _logged:
            return
        _logged.add((op, target, key))
        columns = key_columns(op)
        line = _csv_line(target.arch, target.cu_num, op, *(getattr(key, name) for name in columns))
        # One write to a file opened for appending: ranks that share it do not cut lines in two.
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            is_new = os.fstat(handle).st_size == 0
            os.write(handle, (_csv_line(*SCOPE, *columns) if is_new else b"") + line)
        finally:
            os.close(handle)


def _csv_line(*cells: object) -> bytes:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue().encode()
