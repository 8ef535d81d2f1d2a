"""Fits the constants of the model to published times, within their physical ranges."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from aiter_mx.sim.timing.constants import Constants, described, with_values
from aiter_mx.sim.timing.model import Traced, predict

_MOST = 0.4  # of a range, that one step may go
_LEAST = 0.005


@dataclass(frozen=True)
class Observation:
    """A published time.

    Attributes:
        group: family and stratum of M; each group weighs the same.
        us: the time.
        launches: what was timed.
    """

    group: tuple[str, int]
    us: float
    launches: Sequence[Traced]


def modelled_us(launches: Sequence[Traced], constants: Constants) -> float:
    """The time of launches that follow each other."""
    return sum(predict(launch, constants).us for launch in launches)


def fitted_names() -> list[str]:
    """Constants that are fitted."""
    return [name for name, entry in described().items() if entry.get("fitted")]


def middle_of_ranges() -> dict[str, float]:
    """Where a fit starts that must not know what is fitted already."""
    return {name: (described()[name]["low"] + described()[name]["high"]) / 2
            for name in fitted_names()}  # fmt: skip


def loss(observations: Sequence[Observation], constants: Constants) -> float:
    """The mean of |log(modelled / published)|, each group weighing the same."""
    counts = Counter(each.group for each in observations)
    total = sum(
        abs(math.log(modelled_us(each.launches, constants) / each.us)) / counts[each.group]
        for each in observations
    )
    return total / len(counts)


def fit(
    observations: Sequence[Observation],
    start: Mapping[str, float],
    steps: int,
    seed: int = 0,
    report: Callable[[int, float], None] = lambda step, error: None,
) -> dict[str, float]:
    """Constants that bring the loss down from those at the start.

    A random search: a step moves some of the constants, by as much as such steps paid before, and
    stays where the loss falls.
    """
    names, draw = fitted_names(), random.Random(seed)
    ranges = {name: (described()[name]["low"], described()[name]["high"]) for name in names}
    best, sizes = dict(start), dict.fromkeys(names, 0.12)
    error = loss(observations, with_values(best))
    for step in range(steps):
        moved = [name for name in names if draw.random() < 2.5 / len(names)] or [draw.choice(names)]
        tried = dict(best)
        for name in moved:
            low, high = ranges[name]
            to = best[name] + draw.gauss(0, sizes[name]) * (high - low)
            tried[name] = min(high, max(low, to))
        found = loss(observations, with_values(tried))
        for name in moved:
            factor = 1.6 if found < error else 0.92
            sizes[name] = min(_MOST, max(_LEAST, sizes[name] * factor))
        if found < error:
            best, error = tried, found
            report(step, error)
    return best


def at_the_edge(values: Mapping[str, float]) -> list[str]:
    """Constants that the fit left at the end of their range, where physics or the model is off."""
    found = []
    for name in fitted_names():
        low, high = described()[name]["low"], described()[name]["high"]
        if min(values[name] - low, high - values[name]) < 0.01 * (high - low):
            found.append(name)
    return found
