"""A way of finding out how long candidates take, as a sweep uses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TypeAlias

from aiter_mx.kernels.spec import Problem
from aiter_mx.tuning.candidates import Ahead, Bench, Candidate
from aiter_mx.tuning.race import Outcome, Rules, race

Decide: TypeAlias = Callable[[Bench, Sequence[Candidate], Candidate | None, Rules], Outcome]
"""Finds the best of the candidates, given what the table names so far."""


@dataclass(frozen=True)
class Meter:
    """A way of finding out how long candidates take.

    Attributes:
        source: what tables say of its times: ``measured`` or ``model``.
        backends: whose kernels it can judge.
        ahead: what compiles candidates while others are raced.
        bench: where the candidates for one problem are tried.
        decide: how the best of them is found: a race, or by what the bench knows.
        rules: of its races, where nobody asks for others.
        aside: where candidates are worked out, if not where they are wanted: cost models would
            hold up the thread that times.
    """

    source: str
    backends: tuple[str, ...]
    ahead: Callable[[], AbstractContextManager[Ahead]]
    bench: Callable[[Problem], AbstractContextManager[Bench]]
    aside: Callable[[], AbstractContextManager[Executor]] | None = None
    decide: Decide = race
    rules: Rules = field(default_factory=Rules)
