"""Routes a problem: its tuned row, else the row of a stand-in, else the kernels' envelopes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

from aiter_mx import invariance
from aiter_mx.dispatch import misses
from aiter_mx.dispatch.cells import told_source
from aiter_mx.dispatch.route import Clause, Route
from aiter_mx.dispatch.tables import NO_ROWS, Row, Rows, load_rows
from aiter_mx.forks import Lock
from aiter_mx.kernels.registry import (
    by_backend,
    find_kernel,
    kernels_of,
    key_columns,
    key_of,
    stand_ins,
)
from aiter_mx.kernels.spec import Config, KernelSpec, Key, Problem
from aiter_mx.target import ENVIRONMENT, Target, environment_key

_logged: set[tuple[str, str, int, Key]] = set()
_logged_lock = Lock()
_misfits: set[str] = set()
_LOG = logging.getLogger("aiter_mx")
_LOG_UNTUNED = environment_key("AITER_MX_LOG_UNTUNED")
_OF_16_BITS = ("bf16", "fp16")


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
        reference = find_kernel(op, target.arch, "torch", "reference")
        return Route(reference, {}, "envelope", ("the result is empty, so nothing is launched",))
    if getattr(problem, "expected", 0) and hasattr(problem, "as_expected"):
        chosen = _as_expected(op, target, problem, skip)
        if chosen is not None:
            return chosen
    if op in _INVARIANT and invariance.is_on():
        return _invariant(op, target, problem, skip)
    key, passed_over, why_none = key_of(op)(problem), list[Clause](), list[Clause]()
    rows = NO_ROWS if target.runtime == "none" else load_rows(target.arch, op)
    for stand_in in _keys(op, target, key):
        row = rows.find(stand_in, target.cu_num) if stand_in in rows.keys else None
        if row is None:
            if stand_in == key:
                why_none.append(partial(_why_none, op, target, key, rows))
                _log_miss(op, target, key)
            continue
        refusal = _refusal(row.spec, target, problem, skip) or _misfit(row, target, problem)
        if refusal is None:
            decided = partial(_row_reason, op, row, stand_in, key)
            in_parts = partial(_in_parts, row.spec, target, problem, row.config)
            return Route(row.spec, row.config, row.where, (*passed_over, decided, in_parts))
        passed_over.append(f"{row.where} names {row.backend}/{row.kernel}, but {refusal}")
    return _from_envelope(op, target, problem, skip, why_none + passed_over)


def _keys(op: str, target: Target, key: Key) -> dict[Key, None]:
    """Whose rows serve a problem, in turn: its own key, those that stand in for it, and for exact
    sums then those of fp32 results, whose kernels add no less exactly."""
    keys = [key, *stand_ins(op)(key)]
    if target.exact_sums and "out_dtype" in key_columns(op):
        place = key_columns(op).index("out_dtype")
        keys += [(*k[:place], "fp32", *k[place + 1 :]) for k in keys if k[place] in _OF_16_BITS]
    return dict.fromkeys(keys)


def _as_expected(
    op: str, target: Target, problem: Any, skip: frozenset[tuple[str, str]]
) -> Route | None:
    """The route of what is expected of a problem that has room for more, if it does for all."""
    expected = problem.as_expected()
    chosen = route(op, target, expected, skip)
    if _refusal(chosen.spec, target, problem, skip) is not None:
        return None
    if chosen.spec.misfit(target, problem, chosen.config) is not None:
        return None
    clause = f"M={expected.M} is expected where there is room for {problem.M}"
    return replace(chosen, clauses=(clause, *chosen.clauses))


_INVARIANT = {
    "linear": ("wgmma_bf16_few", "wgmma_bf16", "persistent"),
    "grouped_gemm": ("persistent",),
    "moe_gemm": ("wgmma_f16", "grouped"),
}
"""The kernels of each op that add up a row's products in an order that N and K alone decide, and
cover a problem whatever M is, the fastest first."""


def _invariant(
    op: str, target: Target, problem: Problem, skip: frozenset[tuple[str, str]]
) -> Route:
    """The kernel whose results do not depend on the batch, else the reference, row by row."""
    clauses: list[Clause] = ["batch invariance asks for one order of addition"]
    own = [k for k in kernels_of(op) if k.backend == "hip" and k.is_for(target.arch)]
    for name, kernel in product(_INVARIANT[op], own):
        if kernel.name == name:
            refusal = _refusal(kernel, target, problem, skip)
            if refusal is None:
                return _covering(kernel, target, problem, clauses, kernel.invariant)
            clauses.append(f"{kernel.backend}/{kernel.name}: {refusal}")
    reference = find_kernel(op, target.arch, "torch", "reference")
    return _covering(reference, target, problem, clauses)


def _from_envelope(
    op: str,
    target: Target,
    problem: Problem,
    skip: frozenset[tuple[str, str]],
    clauses: list[Clause],
) -> Route:
    """The first kernel in line that covers a problem."""
    for of_backend in by_backend(op, target.arch):
        yielding: KernelSpec | None = None
        for kernel in of_backend:
            refusal = _refusal(kernel, target, problem, skip)
            if refusal is not None:
                clauses.append(f"{kernel.backend}/{kernel.name}: {refusal}")
                continue
            why = kernel.yields(target, problem)
            if why is None:
                return _covering(kernel, target, problem, clauses)
            clauses.append(f"{kernel.backend}/{kernel.name}: {why}")
            yielding = yielding or kernel
        if yielding is not None:
            return _covering(yielding, target, problem, clauses)
    told = Route(find_kernel(op, target.arch, "torch", "reference"), {}, "", tuple(clauses)).reason
    raise ValueError(f"nothing computes {op} of {problem} on {target.name}: {told}")


def _covering(
    kernel: KernelSpec,
    target: Target,
    problem: Problem,
    clauses: list[Clause],
    configure: Callable[[Target, Problem], Config] | None = None,
) -> Route:
    config = (configure or kernel.configure)(target, problem)
    in_parts = partial(_in_parts, kernel, target, problem, config)
    covers = f"{kernel.backend}/{kernel.name} covers it"
    return Route(kernel, config, "envelope", (*clauses, covers, in_parts))


def _in_parts(kernel: KernelSpec, target: Target, problem: Problem, config: Config) -> str:
    parts = []
    for op, part in kernel.parts(target, problem, config):
        same = vars(problem) if op == kernel.op else vars(part)
        changes = [f"{name}={value}" for name, value in vars(part).items() if same[name] != value]
        parts.append(f"{op} with {' and '.join(changes)}" if changes else op)
    return f"it is {' and then '.join(parts)}" if parts else ""


def _refusal(
    kernel: KernelSpec, target: Target, problem: Problem, skip: frozenset[tuple[str, str]]
) -> str | None:
    if skip and (kernel.backend, kernel.name) in skip:
        return "it failed before"
    return kernel.refusal(target, problem)


def _misfit(row: Row, target: Target, problem: Problem) -> str | None:
    """Why a row's configuration cannot be launched; said once a row, as it is the table's fault."""
    misfit = row.spec.misfit(target, problem, row.config)
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


def _row_reason(op: str, row: Row, stand_in: Key, key: Key) -> str:
    timed = f" in {row.us:g} us" if row.us is not None else ""
    origin = f" ({told_source(row.origin)})" if row.origin else ""
    reason = f"tuned row {row.where} chooses {row.backend}/{row.kernel}{timed}{origin}"
    each = zip(key_columns(op), stand_in, key, strict=True)
    changes = [f"{name}={value}" for name, value, asked in each if value != asked]
    if changes:
        reason += f"; it is for {' and '.join(changes)}, the nearest that is tuned"
    return reason


def _why_none(op: str, target: Target, key: Key, rows: Rows) -> str:
    """Why no row of a table is for a key."""
    if target.runtime == "none":
        return "no GPU"
    if not rows:
        return f"no tuned table for {op} on {target.arch}"
    if of_key := rows.cu_nums(key):
        counts = ", ".join(map(str, of_key))
        return f"the tuned rows of this shape are for {counts} CUs, not {target.cu_num}"
    shapes = [shape for shape in rows if {*rows.cu_nums(shape)} & {None, target.cu_num}]
    if not shapes:
        every = {str(cu_num) for shape in rows for cu_num in rows.cu_nums(shape)}
        counts = ", ".join(sorted(every))
        return f"all tuned rows for {target.arch} are for {counts} CUs, not {target.cu_num}"
    nearest = min(shapes, key=lambda shape: _distance(shape, key))
    return (
        f"none of the {len(shapes)} tuned shapes for {target.arch} is this one, "
        f"the nearest is {_shown(op, nearest)}"
    )


def _shown(op: str, key: Key) -> str:
    return _form_of_keys(op) % key


@cache
def _form_of_keys(op: str) -> str:
    return " ".join(f"{name}=%s" for name in key_columns(op))


def _distance(shape: Key, key: Key) -> float:
    """How unlike two shapes are: factors between their sizes, and more for each other dtype."""
    distance = 0.0
    for other, value in zip(shape, key, strict=True):
        if isinstance(value, int):
            distance += abs(math.log2(max(other, 0.5) / max(value, 0.5)))
        else:
            distance += 100.0 * (other != value)
    return distance


def _log_miss(op: str, target: Target, key: Key) -> None:
    """Append a shape without a row to the CSV that ``AITER_MX_LOG_UNTUNED`` names, once.

    Its columns are the same for all ops, as they share the file.
    """
    path = ENVIRONMENT.get(_LOG_UNTUNED)
    if not path or target.runtime == "none":
        return
    asked = (op, target.arch, target.cu_num, key)
    with _logged_lock:
        if asked in _logged:
            return
        _logged.add(asked)
        misses.append(path, f"{target.arch},{target.cu_num},{op},{_shown(op, key)}\n")
