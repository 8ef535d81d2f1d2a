"""A GPU that is none: candidates' times come out of a hash, and some of them misbehave.

    python -m op_tests.tune.fakes TABLE [--pause S]

is ``aiter-mx tune`` with it over a few shapes, for tests that kill the process.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path

from aiter_mx.cli import tune
from aiter_mx.cli.main import main as command_line
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.spec import Problem
from aiter_mx.target import hardware
from aiter_mx.tuning.candidates import (
    Admission,
    Built,
    Candidate,
    ContextLost,
    Unfit,
    candidates_of,
)
from aiter_mx.tuning.meter import Meter
from aiter_mx.tuning.race import Rules
from aiter_mx.tuning.share import Share, join
from aiter_mx.tuning.sweep import Plan, make_plan, name_of, run

TARGET = hardware("gfx950")
AXES = {"M": (1, 2, 4, 8, 16), "N": (32, 64, 96, 128), "K": (96,)}
PROBLEMS = tuple(LinearProblem(*shape) for shape in product(*AXES.values()))
RULES = Rules(most=6)
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
"""Of processes that tests start."""
Noise = Callable[[Candidate, int], float]


def draw(*of: object) -> float:
    """A number from 0 to 1 that depends on nothing else."""
    digest = hashlib.sha256(repr(of).encode()).digest()
    return int.from_bytes(digest[:7], "big") / 2**56


def starters(problem: LinearProblem = PROBLEMS[0]) -> list[Candidate]:
    return candidates_of("linear", TARGET, problem, ("hip",), RULES.most, RULES.of_next)


class FakeBench:
    """Candidates of 2 to 3 us; ``poisoned`` ones are wrong, ``late`` ones take 1 us and are wrong
    in the end, ``flaky`` ones take 1 us and fail in a later round."""

    def __init__(self, problem: Problem, meter: FakeMeter) -> None:
        self.problem, self.meter = problem, meter
        self.turns: dict[Candidate, int] = {}
        self.admitted: set[Candidate] = set()

    def admit(self, candidate: Candidate) -> Admission:
        self.meter.tried.append((self.problem, candidate))
        time.sleep(self.meter.pause_s)
        if (self.problem, candidate) in self.meter.poisoned:
            raise Unfit("wrong: relative error 1.00e+00")
        if self.meter.loses(self.problem, candidate):
            raise ContextLost("an illegal memory access", candidate)
        self.admitted.add(candidate)
        return Admission(self.sample_us(candidate), 1e-3)

    def sample_us(self, candidate: Candidate) -> float:
        assert candidate in self.admitted, f"{candidate} is timed, but was never found right"
        turn = self.turns[candidate] = self.turns.get(candidate, -1) + 1
        if (self.problem, candidate) in self.meter.flaky and turn == 3:
            raise Unfit("LaunchError: out of luck")
        if (self.problem, candidate) in self.meter.late | self.meter.flaky:
            return 1.0
        return (2 + draw(name_of("linear", self.problem), str(candidate))) * self.meter.noise(
            candidate, turn
        )

    def confirm(self, candidate: Candidate) -> None:
        if (self.problem, candidate) in self.meter.late:
            raise Unfit("wrong after 100 launches")

    def drop(self, candidate: Candidate) -> None:
        self.admitted.discard(candidate)

    def touched(self) -> float | None:
        return 3.5

    def build_of(self, candidate: Candidate) -> Built:
        digest = hashlib.sha256(str(candidate).encode()).hexdigest()
        return Built(digest[:16], digest[16:32])


class FakeAhead:
    """Compilers that have all done at once, and note what they were told of ahead."""

    is_busy = False

    def __init__(self, meter: FakeMeter) -> None:
        self.meter = meter

    def add(self, problem: Problem, candidates: Iterable[Candidate]) -> None:
        self.meter.prepared.extend((problem, candidate) for candidate in candidates)

    def wait(self, problem: Problem, candidates: Iterable[Candidate]) -> None:
        return

    def is_ready(self, problem: Problem, candidates: Iterable[Candidate]) -> bool:
        return True

    def settle(self) -> None:
        self.meter.settled += 1


class FakeMeter:
    """What a FakeBench does with whom."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.pause_s = pause_s
        self.poisoned: set[tuple[Problem, Candidate]] = set()
        self.late: set[tuple[Problem, Candidate]] = set()
        self.flaky: set[tuple[Problem, Candidate]] = set()
        self.noise: Noise = lambda candidate, turn: 1.0
        self.loses: Callable[[Problem, Candidate], bool] = lambda problem, candidate: False
        self.tried: list[tuple[Problem, Candidate]] = []
        self.prepared: list[tuple[Problem, Candidate]] = []
        self.settled = 0

    def meter(self) -> Meter:
        @contextmanager
        def bench(problem: Problem) -> Iterator[FakeBench]:
            yield FakeBench(problem, self)

        return Meter("measured", ("hip",), lambda: nullcontext(FakeAhead(self)), bench)


def plan_for(table: Path, problems: tuple[Problem, ...] = PROBLEMS) -> Plan:
    return make_plan("linear", TARGET, problems, table, "measured", RULES)


def sweep(table: Path, fake: FakeMeter, share: Share | None = None) -> None:
    run(plan_for(table), fake.meter(), share or join())


def tune_into(table: Path, pause_s: float) -> None:
    """What ``aiter-mx tune`` does, but with a FakeMeter; it ends the process."""
    tune.the_meter = lambda *of: (TARGET, FakeMeter(pause_s).meter())
    shape = [f"--{name}={','.join(map(str, of))}" for name, of in AXES.items()]
    sys.argv = ["aiter-mx", "tune", "linear", *shape, f"--most={RULES.most}", "--table", str(table)]
    command_line()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--pause", type=float, default=0.0)
    arguments = parser.parse_args()
    tune_into(arguments.table, arguments.pause)


if __name__ == "__main__":
    main()
