"""Which tile of gfx950's kernel with large tiles is fastest, and whether workgroups are to share K:
by a fit to the model of time."""

from __future__ import annotations

from functools import lru_cache
from math import inf
from typing import NamedTuple

from aiter_mx.kernels.linear.mfma_ways_gfx950 import row_kib
from aiter_mx.kernels.linear.problem import LinearProblem
from aiter_mx.numerics import BLOCK
from aiter_mx.target import Target

Tile = tuple[int, int]
"""Its rows and features."""


class Persistent(NamedTuple):
    """Cycles of the kernel with large tiles, by tune/fit_mfma.py.

    Attributes:
        once: all but its steps.
        once_in_parts: likewise, where compute units divide all tiles.
        step: of 128 k, of a compute unit's first tile.
        further: of each further tile.
        in_parts: of the last, where compute units divide it; 0 where they never do.
    """

    once: float
    once_in_parts: float
    step: float
    further: float
    in_parts: float


PERSISTENT = {
    (128, 128): Persistent(13600, 13600, 1410, 1160, 0),
    (160, 128): Persistent(15500, 15500, 1550, 1660, 0),
    (160, 256): Persistent(17600, 17600, 2400, 2550, 0),
    (256, 256): Persistent(19700, 17700, 3380, 3430, 2160),
}
"""Other tiles are left out, so that few code objects serve a weight."""
_MANY_FEATURES = 5120
"""From so many on a weight takes tiles of 160x256, and below 160x128: each would gain about one per
cent beside the other, for a code object."""
_OF_ROW = 1.8  # cycles of a step that a tile takes less for each row that it has not
_OF_WEIGHTS = 118  # cycles of a KiB of w and a compute unit, beside those steps


class Split(NamedTuple):
    """Cycles where two workgroups share the K of each tile, by tune/fit_mfma.py.

    Attributes:
        once: all but its steps and what follows.
        of_tile: for each tile of the result.
        step: of 128 k.
        of_row: of a step, less for each row that a tile has not.
        of_weights: of a KiB of w and a compute unit, beside those steps.
    """

    once: float
    of_tile: float
    step: float
    of_row: float
    of_weights: float


SPLIT = {
    (128, 128): Split(14300, 28, 1490, 2.9, 106),
    (160, 256): Split(16100, 114, 2290, 1.1, 128),
}
_DEEP = 5120
"""K from which on weights of many features share that of large tiles too: below it each gains less,
for a code object."""
_WORTH_SHARING = 0.95
"""Of what another kernel takes: nearer to it, the draws of the model's constants do not agree."""
LEAST_SPLIT_K = 3 * 128 + BLOCK
"""Each of two workgroups has two steps of 128 k at least."""


LAST = ((160, 128), (160, 256), (256, 256))
"""Tiles of which workgroups may share the last row's: with those of 128x128, two to a compute
unit, all take longer."""
MOST_SPLITS = 32
"""Workgroups that share the K of a tile of the last row."""
_SOME_FEATURES, _FEWEST_FEATURES, _K_OF_FEW = 2560, 1536, range(2560, 5120)
"""From so many features on it is worth its code object, and from fewer at some K: few features fill
a round at thousands of rows only, and deep ones have code objects more for few rows."""
_LEAST_K_OF_SMALL = 6400
"""From so much K on tiles of 160 rows are worth one too: below it the fastest at dozens of rows."""
_WORTH_SHARING_LAST = {160: 0.87, 256: 0.92}
"""Likewise, by rows of a tile: with smaller ones it gains less than the fit says."""
_OF_LAST = 6000  # cycles of such a row beside its parts' steps, which take what others do
_OF_SUMS = 105  # of a KiB of a part's sums


def persistent_cycles(target: Target, problem: LinearProblem) -> dict[Tile, float]:
    """What the kernel with large tiles takes with each, when rows are divided evenly among them."""
    left_out = _left_out(problem.N)
    return {
        tile: _whole_cycles(target, problem, tile, problem.M)
        for tile in PERSISTENT
        if tile != left_out
    }


def _left_out(N: int) -> Tile:
    return 160, 128 if N >= _MANY_FEATURES else 256


def _whole_cycles(target: Target, problem: LinearProblem, tile: Tile, M: int) -> float:
    """Of so many rows with a tile."""
    N, cu_num, chunks, fitted = problem.N, target.cu_num, -(-problem.K // 128), PERSISTENT[tile]
    memory = (_OF_WEIGHTS * N * row_kib(problem.K) / cu_num) ** 4
    down = -(-M // tile[0])
    whole, left = divmod(down * -(-N // tile[1]), cu_num)
    rounds = whole + (left > 0)
    once, step = fitted.once, fitted.step + (rounds - 1) * fitted.further
    if fitted.in_parts and 0 < 2 * left <= cu_num:
        step += fitted.in_parts - fitted.further
        once = once if whole else fitted.once_in_parts
    step -= rounds * _OF_ROW * (tile[0] - M / max(down, 1))
    return once + float(((step * chunks) ** 4 + memory) ** 0.25)


def split_cycles(target: Target, problem: LinearProblem) -> dict[Tile, float]:
    """What it takes where two workgroups share a tile: with those of which there are so few that
    each workgroup has a compute unit of its own."""
    M, N, K, found = problem.M, problem.N, problem.K, dict[Tile, float]()
    if K < LEAST_SPLIT_K:
        return found
    steps = (-(-K // 128) + 1) // 2
    weights = N * row_kib(K) / target.cu_num
    for tile, (once, of_tile, step, of_row, of_weights) in SPLIT.items():
        down = -(-M // tile[0])
        tiles = down * -(-N // tile[1])
        is_worth_it = tile[1] == 128 or (N >= _MANY_FEATURES and K >= _DEEP)
        if is_worth_it and 0 < 2 * tiles <= target.cu_num:
            of_steps = steps * (step - of_row * (tile[0] - M / down))
            both = float((of_steps**4 + (of_weights * weights) ** 4) ** 0.25)
            found[tile] = once + of_tile * tiles + both
    return found


def may_share_last(tile: Tile, problem: LinearProblem) -> bool:
    """Scales that are copied one by one, at odd numbers of a row's, leave the largest tile no
    registers for it."""
    return tile in LAST and (tile != (256, 256) or problem.K // BLOCK % 2 == 0)


def last_cycles(target: Target, problem: LinearProblem) -> dict[tuple[int, int, int], float]:
    """What it takes where workgroups share the K of the last row's tiles: each tile, and the number
    of those that share, with which it is the fastest of that tile."""
    found, chunks = dict[tuple[int, int, int], float](), -(-problem.K // 128)
    for tile in LAST:
        (down, rows), columns = divmod(problem.M - 1, tile[0]), -(-problem.N // tile[1])
        most = min(MOST_SPLITS, target.cu_num // columns, chunks // 2)
        if most < 2 or not may_share_last(tile, problem):
            continue
        steps = -(-chunks // most)
        splits = -(-chunks // steps)  # no more than make parts as short
        sums = (rows + 1) * tile[1] / 256
        of_parts = steps * PERSISTENT[tile].step + _OF_SUMS * sums
        # Where there is no other row of tiles, two that share K are the alternative.
        whole = _whole_cycles(target, problem, tile, down * tile[0]) if down else inf
        found[tile[0], tile[1], splits] = whole + _OF_LAST + of_parts
    return {last: found[last] for last in found if _has_last(last[:2], problem)} or found


def _has_last(tile: Tile, problem: LinearProblem) -> bool:
    """Whether a weight has a code object for it."""
    N, K = problem.N, problem.K
    if tile == _left_out(N) or (tile[0] == 160 and K < _LEAST_K_OF_SMALL):
        return False
    return N >= _SOME_FEATURES or (N >= _FEWEST_FEATURES and K in _K_OF_FEW)


def persistent_tile(target: Target, problem: LinearProblem) -> Tile:
    """The fastest of its tiles."""
    cycles = persistent_cycles(target, problem)
    return min(cycles, key=lambda tile: cycles[tile])


def split_tile(target: Target, problem: LinearProblem) -> Tile:
    """The fastest whose workgroups share K, or the smallest."""
    cycles = split_cycles(target, problem)
    return min(cycles, key=lambda tile: cycles[tile], default=min(SPLIT))


def least_large(target: Target, problem: LinearProblem) -> float:
    """What they take but where a last row is shared, with no more to gain where workgroups share
    K."""
    if problem.N % BLOCK:
        return inf
    found = (persistent_cycles(target, problem), split_cycles(target, problem))
    return min(cycles for each in found for cycles in each.values())


@lru_cache(maxsize=1024)
def fastest_large(target: Target, problem: LinearProblem) -> tuple[float, str]:
    """The fastest of ``persistent``, ``persistent_split`` and ``persistent_last``, and the cycles
    that others would have to stay below."""
    if problem.N % BLOCK:
        return inf, "persistent"
    whole = min(persistent_cycles(target, problem).values())
    split = min(split_cycles(target, problem).values(), default=inf)
    last = min(
        (
            cycles / _WORTH_SHARING_LAST[rows]
            for (rows, features, _), cycles in last_cycles(target, problem).items()
            if _has_last((rows, features), problem)
        ),
        default=inf,
    )
    return min(
        (whole, "persistent"),
        (split / _WORTH_SHARING, "persistent_split"),
        (last, "persistent_last"),
    )
