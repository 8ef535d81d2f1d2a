"""Which tiles wgmma_bf16 is chosen from on Hopper where no table decides.

Each tile is a code object. A server meets all numbers of rows, so a weight has a menu: two tiles of
pairs, and up to two more that lose the least to the best of all that are weighed. That tile is
taken which is the fastest for the rows there are; how many pairs share them is no constant of
the code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

from aiter_mx.kernels.linear import wgmma_bf16_sm90 as kernel
from aiter_mx.kernels.linear.fitted_sm90 import WgmmaBf16
from aiter_mx.kernels.linear.problem import LinearProblem
from aiter_mx.kernels.linear.wgmma_fp8_sm90 import most_own_rows
from aiter_mx.kernels.sm90 import CHUNK, most_clusters
from aiter_mx.kernels.spec import Config
from aiter_mx.target import Target

_ROWS = (80, 112, 176, 240, 320, 448, 640, 896, 1280, 1792)
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
_PAIRED = ((256, 128), (192, 128))
_MANY = 2048  # rows beyond which these do for all weights
_LAUNCHES = 7300
"""Cycles of a call beyond what the model has: two launches of an H200."""
_MOST_MORE = 2  # tiles of a menu beside those
_MOST_SPLIT = 4
_WORTH_A_TILE = 0.15  # of the fourth powers of times beside the best, on average
_NAMES = tuple(param.name for param in kernel.PARAMS)


class Code(NamedTuple):
    """A tile as code objects tell them apart: its cost, and the parts of K, 0 where pairs stay."""

    tile: kernel.Tile
    split: int


@cache
def _codes(splits: WgmmaBf16, pairs: WgmmaBf16, chunks: int) -> tuple[Code, ...]:
    """Those that so many chunks of K can be divided for, by these numbers of the model."""
    codes = [
        Code(tile, split)
        for tile in kernel.tiles_of_splits()
        for split in _SPLITS.get((tile.tile_m, tile.tile_n), ())
        if split <= chunks
    ]
    of_pairs = {(tile.tile_m, tile.tile_n): tile for tile in kernel.tiles_of_pairs()}
    paired = [Code(of_pairs[sides], 0) for sides in _PAIRED]
    return *paired, *codes


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
    for cycles, _, values in kernel.costs_of_pairs_of(target, M, N, -(-K // CHUNK), tile):
        yield cycles, values


def _of_rows(target: Target, rows: Sequence[int], N: int, K: int, code: Code) -> list[float]:
    """The model's cycles for each number of rows, launches among them."""
    tile, split = code
    if not split:
        return [
            _LAUNCHES + min(cycles for cycles, _ in _costs(target, M, N, K, code)) for M in rows
        ]
    part = kernel.cycles_of_part(tile, split, -(-K // (CHUNK * split)) * 2)
    features, side_by_side = -(-N // tile.tile_n), most_clusters(target, split)
    return [_LAUNCHES + -(-(-(-M // tile.tile_m) * features) // side_by_side) * part for M in rows]


@lru_cache(maxsize=1024)
def menu(target: Target, N: int, K: int, first: int) -> tuple[Code, ...]:
    """The tiles of a weight, whose rows are ``first`` or more."""
    rows = [M for M in _ROWS if first <= M]
    codes = _codes_of(K)
    costs = [_of_rows(target, rows, N, K, code) for code in codes]
    best = list(map(min, *costs))
    lost = []  # in fourth powers, so that the worst count the most
    for of_code in costs:
        ratios = [cost / least for cost, least in zip(of_code, best, strict=True)]
        lost.append([ratio * ratio * ratio * ratio for ratio in ratios])
    found = list(codes[: len(_PAIRED)])
    left = list(map(min, *lost[: len(_PAIRED)]))
    for _ in range(_MOST_MORE):
        sums = [sum(map(min, left, of_code)) for of_code in lost]
        least = min(sums)
        if sum(left) - least < _WORTH_A_TILE * len(rows):
            break
        at = sums.index(least)
        found.append(codes[at])
        left = list(map(min, left, lost[at]))
    return tuple(found)


def _codes_of(K: int) -> tuple[Code, ...]:
    return _codes(kernel.FITTED, kernel.FITTED_PAIRS, min(-(-K // CHUNK), _MOST_SPLIT))


def cycles_by_config(target: Target, problem: LinearProblem) -> dict[tuple[int, ...], float]:
    """The model's, of the menu: ``tile_m``, ``tile_n``, ``split`` and ``pairs``."""
    M, N, K = problem.M, problem.N, problem.K
    if M > _MANY:
        codes = _codes_of(K)[: len(_PAIRED)]
    else:
        codes = menu(target, N, K, most_own_rows(target, problem) + 1)
    return {values: cycles for code in codes for cycles, values in _costs(target, M, N, K, code)}


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
