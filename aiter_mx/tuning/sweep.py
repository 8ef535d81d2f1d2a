"""A sweep: races over many problems, journaled as they end, and the table that comes out of them.

A kill at any moment loses the race that was being run; the same command goes on from there. The
table is written by the first worker, whole and in one step each time, from its rows before the
sweep and from what all workers have found.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from aiter_mx.dispatch.cells import MEASURED, MODEL
from aiter_mx.kernels.registry import key_columns, problem_key, problem_type
from aiter_mx.kernels.spec import Problem
from aiter_mx.target import Target
from aiter_mx.tuning.candidates import Ahead, Candidate, ContextLost, candidates_of
from aiter_mx.tuning.journal import Journal, Record, folder_of, merge, read_folder
from aiter_mx.tuning.meter import Meter
from aiter_mx.tuning.origin import commit, sources_hash, today, versions
from aiter_mx.tuning.race import Outcome, Rules, openers
from aiter_mx.tuning.share import Share
from aiter_mx.tuning.table import (
    Cells,
    Rows,
    incumbent_of,
    key_of,
    problem_cells,
    read_rows,
    row_of,
    write_table,
)

_WRITE_EVERY_S = 5.0
"""Between two tables of an unfinished sweep: the journal has all, and they are only to look at."""

_MOST_AHEAD = 32
"""Problems whose candidates are worked out and compiled before their turn: where all are compiled
already, working out those of a whole catalogue would hold up the first race."""

_FEWEST_GROUPS = 2
"""Of problems alike for each worker: with fewer, some would have no part of their own."""

_FED_A_RACE = 3
"""Of these, before each race whose own kernels are ready."""

OnRaced = Callable[[Record, int, int, float], None]
"""Called after each race of this worker: its record, problems done, of how many, seconds left."""


@dataclass(frozen=True)
class Plan:
    """What is swept.

    Attributes:
        op: name of the op.
        target: what it is tuned for.
        problems: those to tune; fields that tables do not choose by are at their defaults.
        table: where the rows go; rows of other problems are kept.
        source: ``measured`` or ``model``.
        rules: of each race.
    """

    op: str
    target: Target
    problems: tuple[Problem, ...]
    table: Path
    source: str
    rules: Rules = field(default_factory=Rules)

    @property
    def fingerprint(self) -> str:
        """The same for a sweep that is gone on with: same problems, rules, kernels, versions."""
        parts = (self.op, self.target, self.problems, self.source, self.rules)
        whole = "\0".join(map(repr, (*parts, sources_hash(), versions())))
        return hashlib.sha256(whole.encode()).hexdigest()[:16]


def make_plan(
    op: str,
    target: Target,
    problems: Iterable[Problem],
    table: Path,
    source: str,
    rules: Rules | None = None,
) -> Plan:
    """A plan, each problem once, as tables have it."""
    once = dict.fromkeys(problem_key(op, problem) for problem in problems)
    return Plan(op, target, tuple(once), table, source, rules or Rules())


def name_of(op: str, problem: Problem) -> str:
    """A problem as text, by which workers and journals know it."""
    return " ".join(f"{name}={value}" for name, value in problem_cells(op, problem).items())


def discard(plan: Plan) -> None:
    """Delete the journal beside the table, of all workers."""
    folder = folder_of(plan.table)
    for path in folder.glob("*.jsonl"):
        path.unlink()
    if folder.is_dir():
        folder.rmdir()


def run(
    plan: Plan,
    meter: Meter,
    share: Share,
    on_raced: OnRaced | None = None,
    budget_s: float | None = None,
) -> list[Record]:
    """Tune what is left of a plan and write its table.

    Args:
        plan: what to tune.
        meter: how.
        share: this worker's part of it.
        on_raced: called after each race of this worker.
        budget_s: begin no race after so many seconds. Problems are raced in the plan's order then,
            else the largest first, so that the workers end together.

    Returns:
        The record of each problem that is done, in that order.

    Raises:
        ContextLost: a candidate broke the connection to the GPU. It is journaled: the same call in
            a fresh process passes it over.
        ValueError: the journal beside the table is of another sweep.
        TableError: the table has a row that cannot be right.
    """
    ends_at = math.inf if budget_s is None else time.monotonic() + budget_s
    before = read_rows(plan.table, plan.op)
    journal = Journal(folder_of(plan.table), share.name, plan.fingerprint)
    try:
        records = _tune(plan, meter, share, before, journal, on_raced, ends_at)
    finally:
        journal.close()
    if share.local_rank == 0 and len(records) == len(plan.problems):
        discard(plan)
    return records


def _tune(
    plan: Plan,
    meter: Meter,
    share: Share,
    before: Rows,
    journal: Journal,
    on_raced: OnRaced | None,
    ends_at: float,
) -> list[Record]:
    by_name = {name_of(plan.op, problem): problem for problem in plan.problems}
    names = list(by_name)
    if ends_at == math.inf:
        names.sort(key=lambda name: -_size(plan.op, by_name[name]))
    earlier = read_folder(folder_of(plan.table), plan.fingerprint)
    lost = {(r["problem"], r["candidate"]): r["why"] for r in earlier if r["kind"] == "lost"}
    if share.local_rank == 0:  # a host's workers have their journals in one folder
        share.publish(earlier)
    share.meet("start")
    done = {record["problem"] for record in share.found(names)}
    parts = parts_of(plan, [by_name[name] for name in names], share.workers)
    upcoming = deque(name for name in parts[share.rank] if name not in done)
    own = set(upcoming)
    started = time.monotonic()
    written_at = 0.0
    with ExitStack() as stack:
        aside = stack.enter_context(meter.aside()) if meter.aside else None
        starters = _Starters(plan, meter, before, by_name, lost, aside, upcoming)
        ahead = stack.enter_context(meter.ahead())
        for raced, name in enumerate(share.claim(parts), 1):
            if name in own:  # else this worker's are all taken
                _feed(ahead, upcoming, starters, name, len(own) - raced - _MOST_AHEAD)
            record = _race(plan, meter, ahead, journal, starters, name)
            journal.append(record)
            share.publish([record])
            done.add(name)
            if share.rank == 0 and time.monotonic() - written_at > _WRITE_EVERY_S:
                found = share.found(names)
                done |= {each["problem"] for each in found}
                _write(plan, before, found)
                written_at = time.monotonic()
            if on_raced is not None:
                rate = (time.monotonic() - started) / raced / share.workers
                seconds_left = min(rate * (len(names) - len(done)), ends_at - time.monotonic())
                on_raced(record, len(done), len(names), max(seconds_left, 0.0))
            if time.monotonic() >= ends_at:
                break
    share.meet("raced")
    found = share.found(names)
    if share.rank == 0:
        _write(plan, before, found)
    share.meet("written")
    share.leave()
    return found


def parts_of(plan: Plan, problems: Sequence[Problem], workers: int) -> list[list[str]]:
    """The names of the problems that each of so many workers begins with.

    Problems that differ in rows and in dtypes alone go to one worker, as they have many kernels in
    common: of 540 linears that need 1775 variants, each of two workers would need 1640 of them if
    every other problem were its own, and needs 1220 so. Where there are few such groups, each
    problem is one.
    """
    types = problem_type(plan.op).__annotations__
    sizes = [n for n in key_columns(plan.op) if n != "M" and types[n] in (int, "int")]
    groups = [tuple(getattr(problem, name) for name in sizes) for problem in problems]
    turns = {group: turn for turn, group in enumerate(dict.fromkeys(groups))}
    if len(turns) < _FEWEST_GROUPS * workers:
        turns = {}
    parts: list[list[str]] = [[] for _ in range(workers)]
    for place, (problem, group) in enumerate(zip(problems, groups, strict=True)):
        parts[turns.get(group, place) % workers].append(name_of(plan.op, problem))
    return parts


class _Starters:
    """The candidates of each problem, without those that a process was lost to."""

    def __init__(
        self,
        plan: Plan,
        meter: Meter,
        before: Rows,
        by_name: Mapping[str, Problem],
        lost: Mapping[tuple[str, str], str],
        aside: Executor | None,
        first: Iterable[str],
    ) -> None:
        """Those of ``first`` are worked out aside, in this order, before they are wanted."""
        self.by_name, self.lost = by_name, lost
        self._plan, self._backends, self._before = plan, meter.backends, before
        self._found: dict[str, list[Candidate]] = {}
        self._coming: dict[str, Future[list[Candidate]]] = {}
        if aside is not None:
            self._coming = {
                name: aside.submit(candidates_of, *self._wanted(name)) for name in first
            }

    def of(self, name: str) -> list[Candidate]:
        """Worked out by now, or when they are wanted: cost models take a part of a race's time."""
        if name not in self._found:
            coming = self._coming.pop(name, None)
            found = coming.result() if coming else candidates_of(*self._wanted(name))
            self._found[name] = [c for c in found if (name, str(c)) not in self.lost]
        return self._found[name]

    def _wanted(self, name: str) -> tuple[Any, ...]:
        plan, rules = self._plan, self._plan.rules
        wanted = plan.op, plan.target, self.by_name[name], self._backends
        return (*wanted, rules.most, rules.of_next, rules.only)

    def incumbent(self, name: str) -> Candidate | None:
        """What the table names so far, unless a process was lost to it."""
        plan = self._plan
        problem = self.by_name[name]
        found = incumbent_of(self._before, plan.op, plan.target, problem, plan.source)
        return None if (name, str(found)) in self.lost else found

    def to_compile(self, name: str) -> list[Candidate]:
        """Those that can be sure of a turn, or are ours, whose kernels are rarely given up."""
        every, incumbent = self.of(name), self.incumbent(name)
        begin = openers(every, self._plan.rules.tries)
        chosen = [c for c in every if c.spec.module is not None or c in begin]
        return chosen if incumbent is None or incumbent in chosen else [*chosen, incumbent]


def _feed(ahead: Ahead, upcoming: deque[str], starters: _Starters, turn: str, least: int) -> None:
    """Have as much compiled ahead as keeps the compilers busy, but leave some for later, and while
    what is raced now is ready, no more than a few."""
    problem, candidates = starters.by_name[turn], starters.to_compile(turn)
    fed = 0
    while len(upcoming) > max(least, 0) and not ahead.is_busy:
        if fed >= _FED_A_RACE and ahead.is_ready(problem, candidates):
            break
        name = upcoming.popleft()
        ahead.add(starters.by_name[name], starters.to_compile(name))
        fed += 1


def _race(
    plan: Plan,
    meter: Meter,
    ahead: Ahead,
    journal: Journal,
    starters: _Starters,
    name: str,
) -> Record:
    """The record of one race."""
    problem, incumbent = starters.by_name[name], starters.incumbent(name)
    begun = time.monotonic()
    try:
        with meter.bench(problem) as bench:  # operands are made while the last kernels compile
            ahead.wait(problem, starters.to_compile(name))
            outcome = meter.decide(bench, starters.of(name), incumbent, plan.rules)
            held_up = outcome.chosen is not None and outcome.chosen.spread > plan.rules.unsteady
            if held_up and plan.source == MEASURED:
                ahead.settle()  # most often it was compilers that held its rounds up
                outcome = meter.decide(bench, starters.of(name), incumbent, plan.rules)
            touched = bench.touched()
    except ContextLost as error:
        candidate = str(error.args[1]) if len(error.args) > 1 else ""
        why = str(error.args[0])
        journal.append({"kind": "lost", "problem": name, "candidate": candidate, "why": why})
        raise
    seconds = time.monotonic() - begun
    record = _record(plan, problem, outcome, touched, journal.worker, seconds)
    record["failures"] += [
        {"candidate": candidate, "why": why}
        for (where, candidate), why in starters.lost.items()
        if where == name
    ]
    return record


def _size(op: str, problem: Problem) -> float:
    """About how much work a problem is, in no unit: workers take the largest first."""
    sizes = (getattr(problem, name) for name in key_columns(op))
    return math.prod(size for size in sizes if isinstance(size, int) and size > 0)


def _record(
    plan: Plan,
    problem: Problem,
    outcome: Outcome,
    touched: float | None,
    worker: str,
    seconds: float,
) -> Record:
    row: Cells | None = None
    if outcome.chosen is not None:
        origin = {
            **asdict(outcome.built),
            "versions": versions(),
            "commit": commit(),
            "date": today(),
            "source": outcome.source or plan.source,
            "touched": "" if touched is None else f"{touched:.1f}",
        }
        row = row_of(plan.target, plan.op, problem, outcome.chosen, outcome.timings, origin)
    return {
        "kind": "problem",
        "problem": name_of(plan.op, problem),
        "worker": worker,
        "at": time.time(),
        "seconds": round(seconds, 3),
        "row": row,
        "chosen": str(outcome.chosen.candidate) if outcome.chosen else None,
        "timings": [
            {
                "candidate": str(timing.candidate),
                **asdict(timing.admission),
                "us": timing.us,
                "spread": timing.spread,
                "rounds": timing.rounds,
            }
            for timing in outcome.timings
        ],
        "failures": [{"candidate": str(f.candidate), "why": f.why} for f in outcome.failures],
    }


def _write(plan: Plan, before: Rows, records: Sequence[Record]) -> None:
    rows = dict(before)
    for record in merge(records).values():
        row = record["row"]
        if row is not None and plan.source == MODEL:
            measured = before.get(key_of(plan.op, row), {}).get("source") == MEASURED
            row = before[key_of(plan.op, row)] if measured else row
        if row is not None:
            rows[key_of(plan.op, row)] = row
        else:  # nothing was right, what the table named so far included
            for problem in plan.problems:
                if name_of(plan.op, problem) == record["problem"]:
                    rows.pop(_key(plan, problem), None)
    write_table(plan.table, plan.op, rows.values())


def _key(plan: Plan, problem: Problem) -> tuple[str, ...]:
    cells = {"gfx": plan.target.arch, "cu_num": str(plan.target.cu_num)}
    return key_of(plan.op, {**cells, **problem_cells(plan.op, problem)})


def timings_text(records: Sequence[Record]) -> str:
    """What every candidate of a sweep took, or why it was out, as CSV."""
    lines = [
        {"problem": record["problem"], **entry}
        for record in records
        for entry in (*record["timings"], *record["failures"])
    ]
    columns = ["problem", "candidate", "us", "spread", "rounds", "rel_err", "why"]
    frame = pd.DataFrame(lines, columns=columns).astype({"rounds": "Int64"})
    text: str = frame.to_csv(index=False, float_format="%.5g", lineterminator="\n")
    return text
