"""Routes a problem: its tuned row, else the row of a stand-in, else the kernels' envelopes."""

from __future__ import annotations

import csv
import io
import logging
import math
import os
import threading
from collections.abc import Mapping

from aiter_mx.dispatch.route import Route
from aiter_mx.dispatch.tables import SCOPE, SHAPE, Row, load_rows
from aiter_mx.kernels.registry import (
    find_kernel,
    in_line,
    key_columns,
    problem_key,
    stand_ins,
)
from aiter_mx.kernels.spec import Config, KernelSpec, Problem
from aiter_mx.target import Target

_logged: set[tuple[str, Target, Problem]] = set()
_logged_lock = threading.Lock()
_unwritable: set[str] = set()
_misfits: set[str] = set()
_LOG = logging.getLogger("aiter_mx")


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
    if getattr(problem, "is_empty", False):
        reason = "the result is empty, so nothing is launched"
        return Route(op, "torch", "reference", {}, reason, "envelope")
    key = problem_key(op, problem)
    passed_over: list[str] = []
    for stand_in in dict.fromkeys((key, *stand_ins(op, key))):
        row, why_none = _find_row(op, target, stand_in)
        if row is None:
            if stand_in == key:
                passed_over.append(why_none)
                _log_miss(op, target, key)
            continue
        kernel = find_kernel(op, target.arch, row.backend, row.kernel)
        refusal = _refusal(kernel, target, problem, skip)
        if refusal is None:
            refusal = _misfit(row, kernel, target, problem)
        if refusal is None:
            reason = _row_reason(row, stand_in, key) + _in_parts(
                kernel, target, problem, row.config
            )
            return Route(op, row.backend, row.kernel, row.config, reason, row.where)
        passed_over.append(f"{row.where} names {row.backend}/{row.kernel}, but {refusal}")

    line = in_line(op, target, problem)
    passed_over += [
        why
        for kernel in line
        if _refusal(kernel, target, problem, skip) is None
        and (why := kernel.yields(target, problem))
    ]
    for kernel in line:
        refusal = _refusal(kernel, target, problem, skip)
        if refusal is None:
            covers = f"{kernel.backend}/{kernel.name} covers it"
            reason = "; ".join(dict.fromkeys([*passed_over, covers]))
            config = kernel.configure(target, problem)
            reason += _in_parts(kernel, target, problem, config)
            return Route(op, kernel.backend, kernel.name, config, reason, "envelope")
        passed_over.append(refusal)
    raise ValueError(
        f"nothing computes {op} of {problem} on {target.name}: {'; '.join(passed_over)}"
    )


def _in_parts(kernel: KernelSpec, target: Target, problem: Problem, config: Config) -> str:
    parts = []
    for op, part in kernel.parts(target, problem, config):
        same = vars(problem) if op == kernel.op else vars(part)
        changes = [f"{name}={value}" for name, value in vars(part).items() if same[name] != value]
        parts.append(f"{op} with {' and '.join(changes)}" if changes else op)
    return f"; it is {' and then '.join(parts)}" if parts else ""


def _refusal(
    kernel: KernelSpec, target: Target, problem: Problem, skip: frozenset[tuple[str, str]]
) -> str | None:
    if (kernel.backend, kernel.name) in skip:
        return f"{kernel.backend}/{kernel.name} failed before"
    return kernel.refusal(target, problem)


def _misfit(row: Row, kernel: KernelSpec, target: Target, problem: Problem) -> str | None:
    """Why a row's configuration cannot be launched; said once a row, as it is the table's fault."""
    misfit = kernel.misfit(target, problem, row.config)
    if misfit is not None:
        with _logged_lock:
            is_new = row.where not in _misfits
            _misfits.add(row.where)
        if is_new:
            _LOG.warning(
                "tuned row %s names %s/%s and is passed over: %s",
                *(row.where, row.backend, row.kernel, misfit),
            )
    return misfit


def _row_reason(row: Row, stand_in: Problem, key: Problem) -> str:
    timed = f" in {row.us:g} us" if row.us is not None else ""
    origin = f" ({row.origin})" if row.origin else ""
    reason = f"tuned row {row.where} chooses {row.backend}/{row.kernel}{timed}{origin}"
    changes = [f"{k}={v}" for k, v in vars(stand_in).items() if getattr(key, k) != v]
    if changes:
        reason += f"; it is for {' and '.join(changes)}, the nearest that is tuned"
    return reason


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
    return None, _why_none(op, target, key, rows)


def _why_none(
    op: str, target: Target, key: Problem, rows: Mapping[Problem, tuple[Row, ...]]
) -> str:
    if not rows:
        return f"no tuned table for {op} on {target.arch}"
    if key in rows:
        counts = ", ".join(str(row.cu_num) for row in rows[key])
        return f"the tuned rows of this shape are for {counts} CUs, not {target.cu_num}"
    shapes = [
        shape
        for shape, of_it in rows.items()
        if {row.cu_num for row in of_it} & {None, target.cu_num}
    ]
    if not shapes:
        counts = ", ".join(sorted({str(row.cu_num) for of_it in rows.values() for row in of_it}))
        return f"all tuned rows for {target.arch} are for {counts} CUs, not {target.cu_num}"
    nearest = min(shapes, key=lambda shape: _distance(shape, key))
    shown = " ".join(f"{name}={getattr(nearest, name)}" for name in key_columns(op))
    return (
        f"none of the {len(shapes)} tuned shapes for {target.arch} is this one, "
        f"the nearest is {shown}"
    )


def _distance(shape: Problem, key: Problem) -> float:
    """How unlike two shapes are: factors between their sizes, and more for each other dtype."""
    distance = 0.0
    for name, value in vars(key).items():
        other = getattr(shape, name)
        if isinstance(value, int):
            distance += abs(math.log2(max(other, 0.5) / max(value, 0.5)))
        else:
            distance += 100.0 * (other != value)
    return distance


def _log_miss(op: str, target: Target, key: Problem) -> None:
    """Append a shape without a row to the CSV that ``AITER_MX_LOG_UNTUNED`` names, once.

    Its columns are the same for all ops, as they share the file.
    """
    path = os.environ.get("AITER_MX_LOG_UNTUNED")
    if not path or target.runtime == "none":
        return
    with _logged_lock:
        if (op, target, key) in _logged:
            return
        _logged.add((op, target, key))
        shape = " ".join(f"{name}={getattr(key, name)}" for name in key_columns(op))
        line = _csv_line(target.arch, target.cu_num, op, shape)
        # One write to a file opened for appending: ranks that share it do not cut lines in two.
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                is_new = os.fstat(handle).st_size == 0
                os.write(handle, (_csv_line(*SCOPE, SHAPE) if is_new else b"") + line)
            finally:
                os.close(handle)
        except OSError as error:  # a full disk ends the list of shapes, not the server
            if path not in _unwritable:
                _unwritable.add(path)
                _LOG.warning(
                    "AITER_MX_LOG_UNTUNED names %r, which cannot be written (%s): shapes without "
                    "a tuned row are missing from it",
                    path,
                    error.strerror,
                )


def _csv_line(*cells: object) -> bytes:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue().encode()
