"""What gfx950's linear is chosen from without a table.

To 64 rows it is the fastest of all configurations. Beyond, each tile is a code object, and a weight
has a menu of them: of ``mfma``, ``mfma_split`` and the kernels with large tiles together the few
that lose the least over numbers of rows by the fits to the model of time. A call takes the one
that is the fastest for its number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aiter_mx.kernels.linear.mfma_choice_gfx950 import (
    Code,
    Codes,
    InBlocks,
    code_cycles,
    every_code,
    fastest_of_codes,
    fastest_of_few,
    in_blocks,
    tuned_for,
)
from aiter_mx.kernels.linear.mfma_ways_gfx950 import BLOCK_M, MAX_M, has_odd_blocks
from aiter_mx.kernels.linear.persistent_choice_gfx950 import (
    LARGE,
    SMALLEST,
    WORTH,
    Large,
    Rows,
    config_of_large,
    fastest_large,
    in_rows,
    large_cycles,
)
from aiter_mx.kernels.linear.problem import LinearProblem
from aiter_mx.kernels.spec import Config
from aiter_mx.target import Target

Array = npt.NDArray[np.float64]

MOST_CODES = 7
"""Of a menu: beside five for fewer rows, the most that weights of tables have, they are twelve."""
_NEAR_BEST = 1.005  # times the best, at some number of rows: others are not weighed
_WORTH_A_CODE = 1e-5  # of a menu's squares of what it takes longer than the best, on average
_EVENLY = [2**octave * part // 4 for octave in range(6, 15) for part in (4, 5, 6, 7)]
_ROWS = np.array(sorted({M for each in _EVENLY for M in (each, each + 16) if M > BLOCK_M}))
"""Numbers of rows that have a say in a menu, as many between each and twice as many: such as fill
blocks and tiles, and with a row more than those."""
_SAYS = 1.0 + (_ROWS <= 2 * BLOCK_M) + 2 * (_ROWS == BLOCK_M + 16)
"""How much: up to 128 there are half as many, of which the first is the next after few rows."""
_AMONG_CODES = np.array([M for M in _ROWS if M <= MAX_M])
_NEVER = 1e6
LARGEST = Large("persistent", (256, 256))
"""Nearly every menu has it, and it is the fastest of all for nine of ten problems of many rows:
these are not to wait for a menu."""
_OF_LARGEST = LARGE.index(LARGEST)


class Menu(NamedTuple):
    """The code objects of a weight for more rows than BLOCK_M.

    Attributes:
        codes: those of ``mfma`` and ``mfma_split``.
        large: those with large tiles.
    """

    codes: tuple[Code, ...]
    large: tuple[Large, ...]


@cache
def _on_the_grid(is_odd: bool) -> tuple[Codes, InBlocks, Rows]:
    codes = every_code(is_odd)
    return codes, in_blocks(codes, _AMONG_CODES), in_rows(_ROWS)


@lru_cache(maxsize=1024)
def menu(target: Target, N: int, K: int) -> Menu:
    """The few that lose the least."""
    codes, in_codes, in_large = _on_the_grid(has_odd_blocks(K))
    first, every = len(LARGE), len(LARGE) + len(codes.held)
    costs = np.full((every, len(_ROWS)), inf)
    costs[:first] = large_cycles(target, in_large, N, K) / WORTH
    costs[first:, : len(_AMONG_CODES)] = code_cycles(target, codes, in_codes, N, K)
    best, says = np.minimum.reduce(costs), _SAYS
    covered = best < inf
    if not covered.all():
        costs, best, says = costs[:, covered], best[covered], says[covered]
    (near,) = np.logical_or.reduce(costs < _NEAR_BEST * best, axis=1).nonzero()
    lost = _lost(costs[near], best, says)
    chosen = near[_fewest(lost, MOST_CODES)].tolist()
    lacks_largest = _OF_LARGEST not in chosen and costs[_OF_LARGEST, 0] < inf
    if len(chosen) == MOST_CODES and lacks_largest:  # which calls take all the same
        lost = np.minimum(lost, _lost(costs[_OF_LARGEST], best, says))
        chosen = [_OF_LARGEST, *near[_fewest(lost, MOST_CODES - 1)].tolist()]
    return Menu(
        tuple(codes.code(at - first) for at in chosen if at >= first),
        tuple(LARGE[at] for at in chosen if at < first),
    )


def _lost(costs: Array, best: Array, says: Array) -> Array:
    """Squares of what is lost beside the best."""
    lost = costs / best - 1
    return np.minimum(lost * lost * says, _NEVER, out=lost)


def _fewest(lost: Array, most: int) -> list[int]:
    """Those that lose the least together: one after the other, then each anew beside the others."""
    chosen, had, left = list[int](), inf, lost
    while len(chosen) < most:
        at, least = _least(left)
        if had - least <= _WORTH_A_CODE * lost.shape[1]:
            break
        chosen.append(at)
        left, had = np.minimum(left, left[at]), least
    before = np.full(lost.shape[1], _NEVER)  # what is lost beside those ahead in turn, and behind
    behind = [before]
    for at in chosen[:0:-1]:
        behind.append(np.minimum(behind[-1], lost[at]))
    for place in range(len(chosen)):
        chosen[place], _ = _least(np.minimum(lost, np.minimum(before, behind.pop())))
        before = np.minimum(before, lost[chosen[place]])
    return chosen


def _least(lost: Array) -> tuple[int, float]:
    """Which loses the least, and how much."""
    sums = np.add.reduce(lost, axis=1)
    at = int(sums.argmin())
    return at, float(sums[at])


@lru_cache(maxsize=1024)
def _fastest(target: Target, M: int, N: int, K: int) -> tuple[str, Config]:
    if M <= BLOCK_M:
        return fastest_of_few(target, M, N, K)
    problem = LinearProblem(M, N, K)
    if M > MAX_M:  # no code of mfma is for so many rows
        _, large = fastest_large(target, LARGE, problem)
        if large == LARGEST:
            return large.kernel, config_of_large(large)
    codes, larges = menu(target, N, K)
    cycles, kernel, config = fastest_of_codes(target, codes, problem)
    least, large = fastest_large(target, larges or (SMALLEST,), problem)
    if cycles < least:
        return kernel, config
    return large.kernel, config_of_large(large)


def fastest_of(target: Target, problem: LinearProblem) -> tuple[str, Config]:
    """The kernel that is, and its configuration. What is chosen for so many rows serves fewer of
    them too."""
    return _fastest(target, tuned_for(problem.M), problem.N, problem.K)


def configuring(
    kernel: str, otherwise: Callable[[Target, LinearProblem], Config]
) -> Callable[[Target, LinearProblem], Config]:
    """Has a kernel take what is chosen of it, or another configuration where it is not."""

    def configure(target: Target, problem: LinearProblem) -> Config:
        fastest, config = fastest_of(target, problem)
        return dict(config if fastest == kernel else otherwise(target, problem))

    return configure


def yielding(kernel: str) -> Callable[[Target, LinearProblem], str | None]:
    """Has a kernel give way to a faster one."""

    def yields(target: Target, problem: LinearProblem) -> str | None:
        fastest, _ = fastest_of(target, problem)
        return None if fastest == kernel else f"{fastest} is faster here by the model of time"

    return yields
