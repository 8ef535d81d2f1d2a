"""The race between the candidates for one problem: a gate, heats, a final, and the incumbent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from aiter_mx.tuning.candidates import Admission, Bench, Built, Candidate, Unfit

_FEWEST_ROUNDS = 3  # of a final, also where one candidate is left


@dataclass(frozen=True)
class Rules:
    """How a race is run.

    Attributes:
        most: candidates of each kernel that start.
        of_next: the most of a backend's second kernel, third, and so on, as ``candidates_of`` has
            it: a guess that the order in which kernels are preferred is about right.
        only: kernels that are wanted, as ``candidates_of`` has it; what a table names so far is in
            the race too.
        tries: of these, those that each kernel begins with.
        hopeless: a kernel is given up when all that it began with take more than so many times the
            fastest of all.
        first_look: a candidate is out when it takes more than so many times the fastest then.
        heats: candidates that are left for each heat, fewer each time; the last is the final.
        rounds: times that each is timed in a heat, all in turns.
        final_rounds: the most of them in the final.
        margin: by how much the winner must beat the incumbent, or by the spread of either if that
            is larger. A candidate is out when its fastest round is slower than the leader's slowest
            by more.
        unsteady: a final is run again, once, where the rounds of one in it are spread by more: it
            may have been held up.
    """

    most: int = 24
    of_next: tuple[int, ...] = (8,)
    only: tuple[str, ...] = ()
    tries: int = 3
    hopeless: float = 1.5
    first_look: float = 1.25
    heats: tuple[int, ...] = (10, 5)
    rounds: int = 2
    final_rounds: int = 7
    margin: float = 0.03
    unsteady: float = 0.1

    @property
    def thorough(self) -> Rules:
        """Without the guesses that save time: of kernels by their order or a few of each, and of
        times by one look."""
        return replace(self, of_next=(), hopeless=math.inf, first_look=math.inf)


@dataclass(frozen=True)
class Timing:
    """A candidate's time: median of its rounds, and (max - min) / median."""

    candidate: Candidate
    us: float
    spread: float
    rounds: int
    admission: Admission


@dataclass(frozen=True)
class Failure:
    """A candidate that was not in the race, and why."""

    candidate: Candidate
    why: str


@dataclass(frozen=True)
class Outcome:
    """What a race found.

    Attributes:
        chosen: what the table should name; None where nothing was right.
        timings: of all that were right; those of the final first, the fastest first.
        failures: of the others.
        built: what is known of the chosen one's code object.
        source: what the row says of its time, if not what the meter says of all.
    """

    chosen: Timing | None
    timings: tuple[Timing, ...]
    failures: tuple[Failure, ...]
    built: Built = field(default_factory=Built)
    source: str = ""


def race(
    bench: Bench, candidates: Sequence[Candidate], incumbent: Candidate | None, rules: Rules
) -> Outcome:
    """Find the fastest of the candidates that compute the right thing.

    Args:
        bench: where to try them.
        candidates: those to try; among equals the first wins.
        incumbent: what the table names so far; it is tried too, and stays unless it is beaten.
        rules: how.
    """
    failures: list[Failure] = []
    admitted: dict[Candidate, Admission] = {}
    starters = in_turn(candidates, rules.tries)
    if incumbent is not None and incumbent not in starters:
        starters.append(incumbent)
    for place, candidate in enumerate(starters):
        if candidate != incumbent and is_hopeless(candidate, starters[:place], admitted, rules):
            continue
        try:
            admitted[candidate] = bench.admit(candidate)
        except Unfit as error:
            failures.append(Failure(candidate, str(error)))
            bench.drop(candidate)
    samples: dict[Candidate, list[float]] = {c: [a.us] for c, a in admitted.items()}

    def us(candidate: Candidate) -> float:
        return median(samples[candidate])

    def spread(candidate: Candidate) -> float:
        return (max(samples[candidate]) - min(samples[candidate])) / us(candidate)

    def keep(kept: list[Candidate]) -> list[Candidate]:
        for candidate in running:
            if candidate not in kept and candidate != incumbent:
                bench.drop(candidate)
        return [candidate for candidate in running if candidate in kept or candidate == incumbent]

    running = sorted(admitted, key=us)
    running = keep([c for c in running if us(c) <= rules.first_look * us(running[0])])
    rounds_of = [(size, rules.rounds) for size in rules.heats[:-1]]
    rounds_of += 2 * [(rules.heats[-1], rules.final_rounds)]  # the last where it is needed
    for heat, (size, rounds) in enumerate(rounds_of):
        if heat == len(rules.heats) and all(spread(c) <= rules.unsteady for c in running):
            break
        running = keep(running[:size])
        for candidate in running:
            samples[candidate].clear()
        for turn in range(rounds):
            # Each round starts with another one: none always runs after the same neighbour.
            first = turn % max(len(running), 1)
            for candidate in running[first:] + running[:first]:
                try:
                    samples[candidate].append(bench.sample_us(candidate))
                except Unfit as error:
                    failures.append(Failure(candidate, str(error)))
                    del admitted[candidate]
            running = sorted((c for c in running if c in admitted), key=us)
            if turn and running:  # each has two times at least
                slowest = max(samples[running[0]]) * (1 + rules.margin)
                running = keep([c for c in running if min(samples[c]) <= slowest])
            if turn + 1 >= _FEWEST_ROUNDS and len(running) < 2:
                break

    finalists = []
    for candidate in running:
        try:
            bench.confirm(candidate)
            finalists.append(candidate)
        except Unfit as error:
            failures.append(Failure(candidate, str(error)))
            del admitted[candidate]
    if not finalists:  # those that were given up for one that is wrong get their turn
        failed = {failure.candidate for failure in failures}
        others = [candidate for candidate in starters if candidate not in failed]
        if others:
            again = race(bench, others, incumbent if incumbent in others else None, rules)
            return replace(again, failures=(*failures, *again.failures))
    rest = sorted((c for c in admitted if c not in finalists), key=us)
    timings = tuple(
        Timing(c, us(c), spread(c), len(samples[c]), admitted[c]) for c in [*finalists, *rest]
    )
    chosen = _chosen(timings[: len(finalists)], incumbent, rules.margin)
    built = bench.build_of(chosen.candidate) if chosen else Built()
    return Outcome(chosen, timings, tuple(failures), built)


def in_turn(candidates: Sequence[Candidate], tries: int) -> list[Candidate]:
    """Those that each kernel begins with, and then the others."""
    begun = openers(candidates, tries)
    return [*begun, *(candidate for candidate in candidates if candidate not in begun)]


def openers(candidates: Sequence[Candidate], tries: int) -> list[Candidate]:
    """Those that each kernel begins with."""
    places: Counter[tuple[str, str]] = Counter()
    found = []
    for candidate in dict.fromkeys(candidates):
        places[candidate.backend, candidate.kernel] += 1
        if places[candidate.backend, candidate.kernel] <= tries:
            found.append(candidate)
    return found


def is_hopeless(
    candidate: Candidate,
    before: Sequence[Candidate],
    admitted: Mapping[Candidate, Admission],
    rules: Rules,
) -> bool:
    """Whether enough of a candidate's kernel were tried to know that it is far too slow."""
    tried = [c for c in before if (c.backend, c.kernel) == (candidate.backend, candidate.kernel)]
    times = [admitted[c].us for c in tried if c in admitted]
    if len(tried) < rules.tries or not times:
        return False
    return min(times) > rules.hopeless * min(admission.us for admission in admitted.values())


def _chosen(
    finalists: Sequence[Timing], incumbent: Candidate | None, margin: float
) -> Timing | None:
    if not finalists:
        return None
    best = finalists[0]
    for holder in finalists:
        needed = max(margin, best.spread, holder.spread)
        if holder.candidate == incumbent and best.us > holder.us * (1 - needed):
            return holder
    return best
