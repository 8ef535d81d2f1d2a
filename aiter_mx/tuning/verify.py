"""Measures a table again: is what it names still the fastest?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aiter_mx.dispatch.tables import read_table
from aiter_mx.kernels.spec import Problem
from aiter_mx.target import Target
from aiter_mx.tuning.candidates import Candidate, candidate_of, candidates_of
from aiter_mx.tuning.meter import Meter
from aiter_mx.tuning.race import Outcome, Rules, race
from aiter_mx.tuning.table import problem_cells


@dataclass(frozen=True)
class Check:
    """A row, measured again beside all candidates.

    Attributes:
        problem: what the row is for.
        chosen: what it names.
        chosen_us: its time, None where it no longer computes the right thing.
        best: the fastest.
        best_us: its time.
        spread: the larger of the spreads of both.
        candidates: that were right.
    """

    problem: Problem
    chosen: Candidate
    chosen_us: float | None
    best: Candidate | None
    best_us: float | None
    spread: float
    candidates: int

    @property
    def slower(self) -> float:
        """By which part of the best time the row's choice is slower; infinite where it is wrong."""
        if self.chosen_us is None or self.best_us is None:
            return float("inf")
        return self.chosen_us / self.best_us - 1


def named_by(path: Path, op: str, target: Target) -> list[tuple[Problem, Candidate]]:
    """What the rows of a table that are for ``target`` name.

    Raises:
        TableError: the table has a row that cannot be right.
    """
    found = []
    for row_op, row in read_table(path):
        if row_op == op and row.gfx == target.arch and row.cu_num in (None, target.cu_num):
            found.append((row.problem, candidate_of(row.spec, target.arch, row.config)))
    return found


def verify(
    rows: list[tuple[Problem, Candidate]],
    op: str,
    target: Target,
    meter: Meter,
    rules: Rules,
    on_check: Callable[[Check], None],
) -> list[Check]:
    """Race each row's choice against all candidates; nothing is written."""
    checks = []
    with meter.ahead() as ahead:
        fields = {p: candidates_of(op, target, p, meter.backends, rules.most) for p, _ in rows}
        for problem, starters in fields.items():
            ahead.add(problem, starters)
        for problem, starters in fields.items():  # compilers would hold up the thread that times
            ahead.wait(problem, starters)
        for problem, chosen in rows:
            with meter.bench(problem) as bench:
                outcome = race(bench, fields[problem], chosen, rules.thorough)
            check = _check(problem, chosen, outcome)
            checks.append(check)
            on_check(check)
    return checks


def _check(problem: Problem, chosen: Candidate, outcome: Outcome) -> Check:
    of_chosen = next((t for t in outcome.timings if t.candidate == chosen), None)
    best = outcome.timings[0] if outcome.timings else None
    return Check(
        problem=problem,
        chosen=chosen,
        chosen_us=of_chosen.us if of_chosen else None,
        best=best.candidate if best else None,
        best_us=best.us if best else None,
        spread=max((t.spread for t in (of_chosen, best) if t), default=0.0),
        candidates=len(outcome.timings),
    )


def check_cells(op: str, check: Check) -> dict[str, object]:
    """A check as a line of a CSV."""
    return {
        **problem_cells(op, check.problem),
        "chosen": str(check.chosen),
        "chosen_us": "" if check.chosen_us is None else f"{check.chosen_us:.3f}",
        "best": str(check.best or ""),
        "best_us": "" if check.best_us is None else f"{check.best_us:.3f}",
        "slower": f"{check.slower:.4f}",
        "spread": f"{check.spread:.4f}",
        "candidates": check.candidates,
    }
