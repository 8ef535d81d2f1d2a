"""The choice of a configuration by a model of its cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import inf

from aiter_mx.kernels.spec import Config, Param, Problem
from aiter_mx.target import Target

Values = tuple[int, ...]
Costed = tuple[float, tuple[float, ...], Values]
"""The cost of a configuration, what to have less of where costs are equal, and the values of its
parameters in their order, which decide where that is equal too."""


ROUNDED_OFF = 1 - 1e-9
"""Of a bound whose terms are added in another order than a cost's, so that it is one."""


@dataclass
class Least:
    """The least cost that was found so far."""

    cost: float = inf


@dataclass(frozen=True)
class Search:
    """Finds configurations of the least modelled cost.

    Attributes:
        params: of the kernel, each with its values in ascending order.
        costs: the configurations that fit a problem. It leaves out those that cost more than the
            third argument has, where a bound shows it early.
        most: of the candidates; 0 for any number.
        alike: the parameters in which two configurations agree that are alike.
        most_alike: of the candidates that are alike; 0 for any number.
    """

    params: tuple[Param, ...]
    costs: Callable[[Target, Problem, Least], Iterable[Costed]]
    most: int = 0
    alike: tuple[str, ...] = ()
    most_alike: int = 0

    def best(self, target: Target, problem: Problem) -> Config:
        """The configuration of the least cost. Raises ValueError where none fits the problem."""
        found = self.cheapest(target, problem)
        if found is None:
            raise ValueError(f"no configuration is known to fit {problem}")
        return found[1]

    def cheapest(
        self, target: Target, problem: Problem, most: float = inf
    ) -> tuple[float, Config] | None:
        """The least cost, and the configuration that has it; None where all cost more than ``most``
        or none fits."""
        least: Least = Least(most)
        best: Costed | None = None
        for found in self.costs(target, problem, least):
            if found[0] <= most and (best is None or found < best):
                best, least.cost = found, found[0]
        return None if best is None else (best[0], self._config(best[2]))

    def candidates(self, target: Target, problem: Problem) -> list[Config]:
        """Those that a tuner should time, the best first."""
        taken: Counter[Values] = Counter()
        chosen = []
        for _, _, values in sorted(self.costs(target, problem, Least())):
            config = self._config(values)
            kind = tuple(config[name] for name in self.alike)
            taken[kind] += 1
            if not self.most_alike or taken[kind] <= self.most_alike:
                chosen.append(config)
        return chosen[: self.most or None]

    def _config(self, values: Values) -> Config:
        return dict(zip((param.name for param in self.params), values, strict=True))


@lru_cache(maxsize=4096)
def without_waste(counts: tuple[int, ...], steps: int, unroll: int) -> tuple[tuple[int, int], ...]:
    """The numbers of waves that are the fewest for their rounds, and those rounds.

    Args:
        counts: of waves, in ascending order.
        steps: of a loop that waves take turns at.
        unroll: steps of a wave in a round.
    """
    least, found = steps + 1, []
    for waves in counts:
        rounds = -(-steps // (waves * unroll))
        if rounds < least and unroll <= -(-steps // waves):
            found.append((waves, rounds))
        least = min(least, rounds)
    return tuple(found)


def by_distance(values: Iterable[int], distance: Callable[[int], int]) -> list[tuple[int, ...]]:
    """The values in classes of equal distance, the nearest first.

    A product of such classes has configurations in the order of their distances without any of them
    being sorted, so that the first ones are found without the others.
    """
    ordered = sorted(values, key=distance)
    return [tuple(alike) for _, alike in groupby(ordered, distance)]
