"""Which tiles wgmma_bf16 is chosen from on Hopper where no table decides.

Each tile is a code object. A server meets all numbers of rows, so a weight has two or three tiles,
its menu, which lose the least to the best of all that are weighed. Of the menu that tile is taken
which is the fastest for the rows there are; how many pairs share them is no constant of the code.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

from aiter_mx.kernels.linear import wgmma_bf16_sm90 as kernel
from aiter_mx.kernels.linear.problem import LinearProblem
from aiter_mx.kernels.linear.wgmma_fp8_sm90 import most_own_rows
from aiter_mx.kernels.sm90 import CHUNK, most_clusters
from aiter_mx.kernels.spec import Config
from aiter_mx.target import Target

_ROWS = (80, 112, 176, 240, 320, 448, 640, 896, 1280, 1792, 2560, 3584)
"""Numbers of rows that have a say in a menu, in steps of equal weight."""
_SPLITS = {
    (128, 64): (2, 3, 4),
    (192, 64): (1,),
    (256, 64): (1, 2, 3),
    (128, 128): (1, 2, 3),
    (160, 128): (1,),
    (192, 128): (3,),
    (256, 128): (1,),
    (128, 192): (1,),
}
"""The tiles that are weighed of CTAs that share no x, and for each the parts of K that are."""
_PAIRED = ((192, 128), (256, 128))
_LAUNCHES = 7300
"""Cycles of a call beyond what the model has: two launches of an H200."""
_POWER = 4  # of a loss, so that the worst count
_WORTH_A_TILE = 0.03  # of what is so lost, on average
_NAMES = tuple(param.name for param in kernel.PARAMS)


class Code(NamedTuple):
    """A tile as code objects tell them apart: its cost, and the parts of K, 0 where pairs stay."""

    tile: kernel.Tile
    split: int


def _codes(chunks: int) -> list[Code]:
    codes = [
        Code(tile, split)
        for tile in kernel.tiles_of_splits()
        for split in _SPLITS.get((tile.tile_m, tile.tile_n), ())
        if split <= chunks
    ]
    paired = [Code(t, 0) for t in kernel.tiles_of_pairs() if (t.tile_m, t.tile_n) in _PAIRED]
    return codes + paired


def _costs(
    target: Target, M: int, N: int, K: int, code: Code
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """The model's cycles and the configuration, for each number of pairs that suits the tiles."""
    tile, split = code
    if split:
        tiles = -(-M // tile.tile_m) * -(-N // tile.tile_n)
        units = -(-K // (CHUNK * split)) * 2
        part = kernel.cycles_of_part(tile, split, units)
        cycles = -(-tiles // most_clusters(target, split)) * part
        yield cycles, (tile.tile_m, tile.tile_n, split, 0)
        return
    for cycles, _, values in kernel.costs_of_pairs(target, LinearProblem(M, N, K), tile):
        yield cycles, values


def _least(target: Target, M: int, N: int, K: int, code: Code) -> float:
    return min(cycles for cycles, _ in _costs(target, M, N, K, code))


@lru_cache(maxsize=1024)
def menu(target: Target, N: int, K: int, first: int) -> tuple[Code, ...]:
    """The tiles of a weight whose rows are ``first`` or more."""
    rows = [M for M in _ROWS if first <= M]
    codes = _codes(-(-K // CHUNK))
    costs = {c: [_LAUNCHES + _least(target, M, N, K, c) for M in rows] for c in codes}
    best = [min(of_rows) for of_rows in zip(*costs.values(), strict=True)]
    lost = {
        c: [(cost / least) ** _POWER for cost, least in zip(costs[c], best, strict=True)]
        for c in codes
    }

    def of_both(some: list[float], more: list[float]) -> float:
        return sum(map(min, some, more))

    found = min(combinations(codes, 2), key=lambda both: of_both(lost[both[0]], lost[both[1]]))
    left = list(map(min, lost[found[0]], lost[found[1]]))
    third = min(codes, key=lambda code: of_both(left, lost[code]))
    gain = sum(left) - of_both(left, lost[third])
    return (*found, third) if gain > _WORTH_A_TILE * len(rows) else found


def cycles_by_config(target: Target, problem: LinearProblem) -> dict[tuple[int, ...], float]:
    """The model's, of the menu: ``tile_m``, ``tile_n``, ``split`` and ``pairs``."""
    M, N, K = problem.M, problem.N, problem.K
    first = most_own_rows(target, problem) + 1
    return {
        values: cycles
        for code in menu(target, N, K, first)
        for cycles, values in _costs(target, M, N, K, code)
    }


def configure(target: Target, problem: LinearProblem) -> Config:
    """The fastest of the menu, by the model."""
    by_config = cycles_by_config(target, problem)
    values, _ = min(by_config.items(), key=lambda found: found[1])
    return dict(zip(_NAMES, values, strict=True))


def candidates(target: Target, problem: LinearProblem) -> list[Config]:
    """The choice of the menu, then the best of all."""
    chosen, best = configure(target, problem), kernel.WGMMA_BF16.candidates(target, problem)
    return [chosen, *(config for config in best if config != chosen)]


def least_cycles(target: Target, problem: LinearProblem) -> float:
    """Of the menu, by the model."""
    return min(cycles_by_config(target, problem).values())
