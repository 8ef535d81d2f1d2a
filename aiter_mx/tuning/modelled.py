"""Candidates judged without a GPU: traced in the simulator, their time predicted for an MI355X.

Some workgroups of a candidate's launch are traced on operands that are zero but for the indices:
what a launch does depends on nothing else. The model of ``aiter_mx.sim.timing`` makes a time of the
trace: floor 1, calibrated sums, prunes; floor 2, the replay, decides. Routings are drawn by fixed
numbers, those of fewer tokens being part of those of more, and times are means over them.

The kernel's own choice stays unless another configuration is predicted to be faster by the rules'
margin, and the mean of both floors puts it ahead in four of five draws of the model's constants.
What is chosen is then run on random operands, a part of the problem in strict mode, and
must give what the reference gives. These are no measurements: rows say so, with the model's error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, sqrt
from statistics import fmean, quantiles

from aiter_mx.dispatch.cells import MODEL
from aiter_mx.errors import AiterMxError
from aiter_mx.kernels.spec import Problem
from aiter_mx.sim.timing.constants import CUS, Constants, median_error, shipped
from aiter_mx.sim.timing.draws import drawn
from aiter_mx.sim.timing.floor import floor
from aiter_mx.sim.timing.model import Traced, predict
from aiter_mx.sim.timing.sample import ALIKE, UNLIKE
from aiter_mx.sim.timing.seen import outside
from aiter_mx.target import hardware
from aiter_mx.tuning.builds import Ahead, build_of
from aiter_mx.tuning.candidates import Admission, Bench, Built, Candidate, Unfit
from aiter_mx.tuning.meter import Meter
from aiter_mx.tuning.race import Failure, Outcome, Rules, Timing, in_turn, is_hopeless
from aiter_mx.tuning.traces import Alike, judged, traced_launch
from aiter_mx.workloads.workload import Operands, workload_of

ROUTINGS = 3
"""That times are means over, of problems whose indices are drawn."""
WINS = 0.8
"""Of the draws of constants, in which a configuration must win to take the place of the usual."""
BACKENDS = ("hip",)
RULES = Rules(most=5, of_next=(2,), tries=1, hopeless=1.2)
_SHARE = 0.0  # of the weights, that results are judged on: as few as a workload can do with
_LARGE_BLOCK = 48  # rows; such blocks are filled to any share
_BEST_US, _BEST_BYTES_A_US, _BEST_ROWS = 3.9, 6.3e6, 16
"""The lower envelope of all published times of fp8 GEMMs of so few rows, by bytes of weights."""


def modelled_meter(op: str, jobs: int) -> Meter:
    """A meter for gfx950, on any machine, with so many compilers at a time."""
    workload_of(op)  # an op that cannot be tried out raises here
    chosen: dict[str, dict[Candidate, float]] = {}

    @contextmanager
    def bench(problem: Problem) -> Iterator[Bench]:
        yield ModelBench(op, problem)

    return Meter(
        source=MODEL,
        backends=BACKENDS,
        ahead=lambda: Ahead(hardware("gfx950"), jobs),
        bench=bench,
        decide=partial(decide, chosen),
        rules=RULES,
    )


@dataclass
class ModelBench:
    """The candidates of one problem in the simulator and the model of time.

    Attributes:
        op, problem: what they compute.
    """

    op: str
    problem: Problem
    _hollow: list[Operands] = field(default_factory=list)
    _launches: dict[Candidate, list[Traced]] = field(default_factory=dict)
    _working: dict[Alike, int] = field(default_factory=dict)
    _us: dict[tuple[Candidate, Constants], float] = field(default_factory=dict)

    def launches(self, candidate: Candidate) -> list[Traced]:
        """Of one that was admitted: its launch on each draw of indices."""
        found = self._launches[candidate]
        with _unfit():
            for number in range(len(found), len(self._operands())):
                found.append(self._traced(candidate, number))
        return found

    def admit(self, candidate: Candidate) -> Admission:
        """Trace it on the first draw of indices; what is seen is floor 1."""
        spec, config = candidate.spec, candidate.config
        if spec.module is None or spec.parts(hardware("gfx950"), self.problem, config):
            raise Unfit("it is made of other ops, and only single kernels are modelled")
        with _unfit():
            first = self._traced(candidate, 0)
        self._launches[candidate] = [first]
        return Admission(floor(first).us, float("nan"))

    def sample_us(self, candidate: Candidate) -> float:
        """Floor 2."""
        return self.replay_us(candidate, shipped())

    def floor_us(self, candidate: Candidate, constants: Constants) -> float:
        """Floor 1 with these constants."""
        return fmean(floor(launch, constants).us for launch in self.launches(candidate))

    def replay_us(self, candidate: Candidate, constants: Constants) -> float:
        """Floor 2 with these constants."""
        known = self._us.get((candidate, constants))
        if known is None:
            launches = self.launches(candidate)
            known = fmean(predict(launch, constants).us for launch in launches)
            self._us[candidate, constants] = known
        return known

    def confirm(self, candidate: Candidate) -> None:
        """Raise Unfit unless it gives what the reference gives."""
        self.rel_err(candidate)

    def rel_err(self, candidate: Candidate) -> float:
        """Of its results on two draws of random operands; raises Unfit where they are wrong."""
        workload = workload_of(self.op)
        part, read_bytes = workload.sample(self.problem, _SHARE), workload.read_bytes
        share = read_bytes(part, None) / read_bytes(self.problem, None)
        with _unfit():
            verdict = judged(candidate, part, max(1, round(CUS * share)))
        if not verdict.right:
            raise Unfit(f"wrong: relative error {verdict.rel_err:.2e} in the simulator")
        return verdict.rel_err

    def drop(self, candidate: Candidate) -> None:
        self._launches.pop(candidate, None)

    def touched(self) -> float | None:
        return None

    def build_of(self, candidate: Candidate) -> Built:
        return build_of(hardware("gfx950"), self.problem, candidate)

    def source(self, candidate: Candidate) -> str:
        """What a row says of its time: the model's error, and whether the like was measured."""
        words = [MODEL, f"{median_error():.1%}"]
        if any(outside(launch) for launch in self._launches[candidate]):
            words.append("extrapolated")
        weights_us = workload_of(self.op).read_bytes(self.problem, None) / _BEST_BYTES_A_US
        few_rows = getattr(self.problem, "M", 0) <= _BEST_ROWS
        told_us = round(self.sample_us(candidate), 3)  # as a row has it
        if few_rows and told_us < _BEST_US + weights_us:
            words.append("unmeasured")
        return " ".join(words)

    def _traced(self, candidate: Candidate, number: int) -> Traced:
        operands = self._operands()[number]
        is_blocked = getattr(self.problem, "block_m", 0) >= _LARGE_BLOCK
        is_unlike = self.op == "grouped_gemm" or is_blocked
        count = UNLIKE if is_unlike else ALIKE
        return traced_launch(candidate, self.problem, operands, number, count, self._working)

    def _operands(self) -> list[Operands]:
        """Hollow ones, for each draw of indices."""
        if not self._hollow:
            workload = workload_of(self.op)
            draws = ROUTINGS if workload.indices is not None else 1
            self._hollow += [workload.hollow(self.problem, number) for number in range(draws)]
        return self._hollow


def decide(
    chosen: dict[str, dict[Candidate, float]],
    bench: Bench,
    candidates: Sequence[Candidate],
    incumbent: Candidate | None,
    rules: Rules,
) -> Outcome:
    """Choose by the model.

    Args:
        chosen: what was chosen for problems that differ in rows alone, and its least time, which
            are candidates too; this one's is added.
        bench: a ``ModelBench``.
        candidates: the first is what dispatch takes where no table decides.
        incumbent: what the table names so far; it is tried too, and stays unless the usual is
            faster, or what would take its place is no slower, and ahead in four of five draws.
        rules: which are hopeless, out at first look, and too little faster.
    """
    assert isinstance(bench, ModelBench)
    alike = chosen.setdefault(str(replace(bench.problem, M=0)), {})
    held = [] if incumbent is None else [incumbent]
    starters = list(dict.fromkeys([*in_turn(candidates, rules.tries), *alike, *held]))
    admitted: dict[Candidate, Admission] = {}
    failures: list[Failure] = []
    for place, candidate in enumerate(starters):
        if candidate not in held and is_hopeless(candidate, starters[:place], admitted, rules):
            continue
        try:
            admitted[candidate] = bench.admit(candidate)
        except Unfit as error:
            failures.append(Failure(candidate, str(error)))
    while admitted:
        usual = next(candidate for candidate in starters if candidate in admitted)
        least = min(admission.us for admission in admitted.values())
        limit = rules.first_look * least
        kept = [c for c, seen in admitted.items() if seen.us <= limit or c in held]
        running: dict[Candidate, float] = {}
        for candidate in dict.fromkeys([usual, *kept]):
            try:
                running[candidate] = bench.sample_us(candidate)
            except Unfit as error:
                failures.append(Failure(candidate, str(error)))
                del admitted[candidate]
        if usual not in running:
            continue
        order = sorted(running, key=lambda candidate: running[candidate])
        best = next(c for c in order if c == usual or beats(bench, c, usual, rules.margin))
        if incumbent in running and running[incumbent] <= running[usual]:
            best = best if beats(bench, best, incumbent, 0.0) else incumbent
        if running[best] > (1 + rules.margin) * min(alike.values(), default=inf):
            best = order[0]  # else more rows would take less
        try:
            admitted[best] = Admission(running[best], bench.rel_err(best))
        except Unfit as error:
            failures.append(Failure(best, str(error)))
            del admitted[best]
            continue
        timings = {c: Timing(c, us, 0.0, 1, admitted[c]) for c, us in running.items()}
        timings[best] = replace(timings[best], spread=_spread(bench, best))
        alike[best] = min(running[best], alike.get(best, inf))
        return Outcome(
            timings[best],
            tuple(timings[c] for c in [best, *(c for c in order if c != best)]),
            tuple(failures),
            bench.build_of(best),
            bench.source(best),
        )
    return Outcome(None, (), tuple(failures))


def beats(bench: ModelBench, challenger: Candidate, usual: Candidate, margin: float) -> bool:
    """Whether a configuration is to take the place of the usual one."""
    if bench.sample_us(challenger) > bench.sample_us(usual) * (1 - margin):
        return False
    losses = 0
    for draw in drawn():
        losses += _both_us(bench, challenger, draw) >= _both_us(bench, usual, draw)
        if losses > (1 - WINS) * len(drawn()):
            return False
    return True


def _both_us(bench: ModelBench, candidate: Candidate, constants: Constants) -> float:
    """The geometric mean of both floors."""
    return sqrt(bench.replay_us(candidate, constants) * bench.floor_us(candidate, constants))


def _spread(bench: ModelBench, candidate: Candidate) -> float:
    """The middle 80 % of the draws, relative to the time itself."""
    tenths = quantiles((bench.replay_us(candidate, draw) for draw in drawn()), n=10)
    return (tenths[-1] - tenths[0]) / bench.sample_us(candidate)


@contextmanager
def _unfit() -> Iterator[None]:
    """Whatever a candidate does wrong is said of it."""
    try:
        yield
    except Unfit:
        raise
    except (AiterMxError, ValueError) as error:
        raise Unfit(f"{type(error).__name__}: {error}") from None
