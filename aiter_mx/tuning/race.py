"""The race between the candidates for one problem: a gate, heats, a final, and the incumbent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from aiter_mx.tuning.candidates import Admission, Bench, Candidate, Unfit


@dataclass(frozen=True)
class Rules:
    """How a race is run.

    Attributes:
        most: candidates of each kernel that start.
        heats: candidates that are left for each heat, fewer each time; the last is the final.
        rounds: times that each is timed in a heat, all in turns.
        final_rounds: the same in the final.
        margin: by how much the winner must beat the incumbent, or by the spread of either if that
            is larger.
    """

    most: int = 24
    heats: tuple[int, ...] = (10, 5)
    rounds: int = 2
    final_rounds: int = 7
    margin: float = 0.03


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
        build: the hash that the chosen one's code object is stored under.
    """

    chosen: Timing | None
    timings: tuple[Timing, ...]
    failures: tuple[Failure, ...]
    build: str = ""


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
    starters = dict.fromkeys([*candidates, *([incumbent] if incumbent else [])])
    for candidate in starters:
        try:
            admitted[candidate] = bench.admit(candidate)
        except Unfit as error:
            failures.append(Failure(candidate, str(error)))
            bench.drop(candidate)
    samples: dict[Candidate, list[float]] = {c: [a.us] for c, a in admitted.items()}

    def us(candidate: Candidate) -> float:
        return median(samples[candidate])

    running = sorted(admitted, key=us)
    for heat, size in enumerate(rules.heats):
        kept = _kept(running, size, incumbent)
        for candidate in running:
            if candidate not in kept:
                bench.drop(candidate)
        running = kept
        rounds = rules.final_rounds if heat == len(rules.heats) - 1 else rules.rounds
        for candidate in running:
            samples[candidate].clear()
        for turn in range(rounds):
            # Each round starts with another one: none always runs after the same neighbour.
            first = turn % max(len(running), 1)
            for candidate in running[first:] + running[:first]:
                if candidate in admitted:
                    try:
                        samples[candidate].append(bench.sample_us(candidate))
                    except Unfit as error:
                        failures.append(Failure(candidate, str(error)))
                        del admitted[candidate]
        running = sorted((candidate for candidate in running if candidate in admitted), key=us)

    finalists = []
    for candidate in running:
        try:
            bench.confirm(candidate)
            finalists.append(candidate)
        except Unfit as error:
            failures.append(Failure(candidate, str(error)))
            del admitted[candidate]
    if admitted and not finalists:  # those that were dropped get their turn
        again = race(bench, list(admitted), None, rules)
        return replace(again, failures=(*failures, *again.failures))
    rest = sorted((c for c in admitted if c not in finalists), key=us)
    timings = tuple(
        Timing(c, us(c), (max(samples[c]) - min(samples[c])) / us(c), len(samples[c]), admitted[c])
        for c in [*finalists, *rest]
    )
    chosen = _chosen(timings[: len(finalists)], incumbent, rules.margin)
    build = bench.build_of(chosen.candidate) if chosen else ""
    return Outcome(chosen, timings, tuple(failures), build)


def _kept(running: list[Candidate], size: int, incumbent: Candidate | None) -> list[Candidate]:
    """The fastest, the incumbent, and the fastest of each backend, which tables list beside."""
    firsts = {candidate.backend: candidate for candidate in reversed(running)}
    wanted = {*running[:size], *firsts.values(), incumbent}
    return [candidate for candidate in running if candidate in wanted]


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
