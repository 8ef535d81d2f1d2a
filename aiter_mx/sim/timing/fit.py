"""Fits the constants of the model to published times, within their physical ranges."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aiter_mx.sim.timing.constants import Constants, described, with_values
from aiter_mx.sim.timing.model import Traced, predict

_STEP = 0.03  # of a range, for slopes
_MOST = 0.3  # of a range, that a step may go
_TRIES = 6  # shorter steps before the fit ends
_LEAST_GAIN = 2e-4
_BLUNT = 0.02  # an error below it counts by its square
Vector = npt.NDArray[np.float64]


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
    """Where a fit starts that must not know what is fitted already: halfway by factors."""
    return _Ranges.of_constants().values(np.full(len(fitted_names()), 0.5))


def loss(observations: Sequence[Observation], constants: Constants) -> float:
    """The mean of |log(modelled / published)|, each group weighing the same."""
    return float(_weights(observations) @ np.abs(_errors(observations, constants)))


def fit(
    observations: Sequence[Observation],
    start: Mapping[str, float],
    steps: int,
    report: Callable[[int, float], None] = lambda step, error: None,
) -> dict[str, float]:
    """Constants that bring the loss down from those at the start.

    Gauss and Newton's steps on errors that are weighed by their inverse, so that outliers count
    no more than others; constants move by factors and stop at the ends of their ranges.
    """
    ranges, weights = _Ranges.of_constants(), _weights(observations)

    def errors_at(place: Vector) -> Vector:
        return _errors(observations, with_values(ranges.values(place)))

    def blunt(errors: Vector) -> float:
        return float(weights @ np.sqrt(errors**2 + _BLUNT**2 / 4))

    place = ranges.place(start)
    errors = errors_at(place)
    best, damping = blunt(errors), 1e-2
    for step in range(steps):
        slopes = np.stack([_slope(errors_at, place, errors, i) for i in range(len(place))], axis=1)
        pull = weights / np.sqrt(errors**2 + _BLUNT**2)
        curvature, gradient = slopes.T @ (pull[:, None] * slopes), slopes.T @ (pull * errors)
        before = best
        for _ in range(_TRIES):
            tried = np.clip(place + _move(place, curvature, gradient, damping), 0, 1)
            found = errors_at(tried)
            if blunt(found) < best:
                place, errors, best = tried, found, blunt(found)
                damping = max(damping / 4, 1e-4)
                break
            damping *= 4
        if before - best < _LEAST_GAIN:
            break
        report(step, best)
    return ranges.values(place)


def at_the_edge(values: Mapping[str, float]) -> list[str]:
    """Constants that the fit left at the end of their range, where physics or the model is off."""
    found = []
    for name in fitted_names():
        low, high = described()[name]["low"], described()[name]["high"]
        if min(values[name] - low, high - values[name]) < 0.01 * (high - low):
            found.append(name)
    return found


@dataclass(frozen=True)
class _Ranges:
    """The fitted constants as places in their ranges, 0 to 1 by factors."""

    low: Vector
    high: Vector

    @classmethod
    def of_constants(cls) -> _Ranges:
        entries = [described()[name] for name in fitted_names()]
        low, high = (np.array([float(each[end]) for each in entries]) for end in ("low", "high"))
        return cls(low, high)

    def values(self, place: Vector) -> dict[str, float]:
        found = self.low * (self.high / self.low) ** place
        return dict(zip(fitted_names(), map(float, found), strict=True))

    def place(self, values: Mapping[str, float]) -> Vector:
        wanted = np.array([values[name] for name in fitted_names()])
        return np.clip(np.log(wanted / self.low) / np.log(self.high / self.low), 0, 1)


def _weights(observations: Sequence[Observation]) -> Vector:
    counts = Counter(each.group for each in observations)
    return np.array([1 / counts[each.group] / len(counts) for each in observations])


def _errors(observations: Sequence[Observation], constants: Constants) -> Vector:
    return np.array([
        math.log(modelled_us(each.launches, constants) / each.us) for each in observations
    ])  # fmt: skip


def _slope(errors_at: Callable[[Vector], Vector], place: Vector, errors: Vector, i: int) -> Vector:
    moved, step = place.copy(), _STEP if place[i] + _STEP <= 1 else -_STEP
    moved[i] += step
    return (errors_at(moved) - errors) / step


def _move(place: Vector, curvature: Vector, gradient: Vector, damping: float) -> Vector:
    """The step, without constants that would leave their range."""
    size, free = len(place), np.ones(len(place), bool)
    least = damping * max(1e-3, float(np.trace(curvature)) / size)
    move = np.zeros(size)
    while free.any():
        move[:] = 0
        some = curvature[np.ix_(free, free)] + least * np.eye(int(free.sum()))
        move[free] = -np.linalg.solve(some, gradient[free])
        leaving = free & (((place <= 0) & (move < 0)) | ((place >= 1) & (move > 0)))
        if not leaving.any():
            break
        free &= ~leaving
    return np.clip(move, -_MOST, _MOST)
