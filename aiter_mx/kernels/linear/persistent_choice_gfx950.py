"""What gfx950's kernels with large tiles take: a fit to the model of time."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, inf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aiter_mx.kernels.grouped_gemm.persistent_gfx950 import config_of
from aiter_mx.kernels.linear.mfma_ways_gfx950 import row_kib
from aiter_mx.kernels.linear.problem import LinearProblem
from aiter_mx.kernels.spec import Config
from aiter_mx.numerics import BLOCK
from aiter_mx.target import Target

Array = npt.NDArray[np.float64]
Tile = tuple[int, int]
"""Its rows and features."""


class Persistent(NamedTuple):
    """Cycles of the kernel with large tiles, by tune/fit_mfma.py.

    Attributes:
        once: all but its steps.
        once_in_parts: likewise, where compute units divide all tiles.
        step: of 128 k, of a compute unit's first tile.
        further: of each further tile.
        in_parts: of the last, where compute units divide it; as a further one where they never do.
    """

    once: float
    once_in_parts: float
    step: float
    further: float
    in_parts: float


PERSISTENT = {
    (128, 128): Persistent(13600, 13600, 1410, 1160, 1160),
    (160, 128): Persistent(15500, 15500, 1550, 1660, 1660),
    (160, 256): Persistent(17600, 17600, 2400, 2550, 2550),
    (256, 256): Persistent(19700, 17700, 3380, 3430, 2160),
}
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
    (160, 128): Split(17300, 0, 1620, 2.8, 142),
    (160, 256): Split(16100, 114, 2290, 1.1, 128),
}
_WORTH_SHARING = 0.95
"""Of what another kernel takes: nearer to it, the draws of the model's constants do not agree."""
LEAST_SPLIT_K = 3 * 128 + BLOCK
"""Each of two workgroups has two steps of 128 k at least."""


class Large(NamedTuple):
    """A code object."""

    kernel: str
    tile: Tile


LARGE = (
    *(Large("persistent", tile) for tile in PERSISTENT),
    *(Large("persistent_split", tile) for tile in SPLIT),
)
SMALLEST = Large("persistent", (128, 128))


def worth_of(large: Large) -> float:
    """What it may take of the time of others that are taken in its place."""
    return _WORTH_SHARING if large.kernel == "persistent_split" else 1.0


WORTH = np.array([[worth_of(large)] for large in LARGE])


class InRows(NamedTuple):
    """How so many rows of x are divided evenly among tiles: numbers, or a row of an array for each
    tile.

    Attributes:
        down: rows of tiles.
        lacking: rows that a tile has not.
    """

    down: Any
    lacking: Any


def _in_rows(M: Any, tile_m: Any) -> InRows:
    down = -(-M // tile_m)
    return InRows(down, tile_m - M / down)


class Rows(NamedTuple):
    """Numbers of rows of x, in tiles.

    Attributes:
        whole: in those of ``persistent``.
        split: in those of ``persistent_split``.
    """

    whole: InRows
    split: InRows


def in_rows(rows: Array) -> Rows:
    """Numbers of rows of x in all tiles."""
    return Rows(*(_in_rows(rows, _columns(tiles)[0]) for tiles in (PERSISTENT, SPLIT)))


def _columns(of: Iterable[tuple[float, ...]]) -> tuple[Any, ...]:
    """Of an array with a row for each."""
    return tuple(np.array([*of], float).T[..., None])


_WHOLE_N, _SPLIT_N = (_columns(tiles)[1] for tiles in (PERSISTENT, SPLIT))
_WHOLE, _SPLIT = Persistent(*_columns(PERSISTENT.values())), Split(*_columns(SPLIT.values()))


def _whole_cycles(target: Target, rows: InRows, tile_n: Any, of: Persistent, N: int, K: int) -> Any:
    rounds_of_tiles = rows.down * -(-N // tile_n) / target.cu_num
    is_one = isinstance(rounds_of_tiles, float)
    rounds = ceil(rounds_of_tiles) if is_one else np.ceil(rounds_of_tiles)
    has_parts = rounds - rounds_of_tiles >= 0.5
    step = of.step + (rounds - 1) * of.further - has_parts * (of.further - of.in_parts)
    step -= rounds * rows.lacking * _OF_ROW
    once = of.once - (has_parts & (rounds == 1)) * (of.once - of.once_in_parts)
    return once + _together(step * -(-K // 128), _OF_WEIGHTS * N * row_kib(K) / target.cu_num)


def _may_split(target: Target, rows: InRows, tile_n: Any, N: int, K: int) -> Any:
    """Whether each of two workgroups has a compute unit of its own."""
    return (2 * rows.down * -(-N // tile_n) <= target.cu_num) & (K >= LEAST_SPLIT_K)


def _split_cycles(target: Target, rows: InRows, tile_n: Any, of: Split, N: int, K: int) -> Any:
    tiles, steps = rows.down * -(-N // tile_n), (-(-K // 128) + 1) // 2
    of_steps = steps * (of.step - of.of_row * rows.lacking)
    both = _together(of_steps, of.of_weights * (N * row_kib(K) / target.cu_num))
    return of.once + of.of_tile * tiles + both


def _together(steps: Any, weights: Any) -> Any:
    """Of what goes on at the same time."""
    steps, weights = steps * steps, weights * weights
    return ((steps * steps + weights * weights) ** 0.5) ** 0.5


def large_cycles(target: Target, rows: Rows, N: int, K: int) -> Array:
    """What each of ``LARGE`` takes, with a column for each number of rows of x; infinitely long
    where it is not to be taken."""
    if N % BLOCK:
        return np.full((len(LARGE), rows.whole.down.shape[1]), inf)
    whole = _whole_cycles(target, rows.whole, _WHOLE_N, _WHOLE, N, K)
    may_split = _may_split(target, rows.split, _SPLIT_N, N, K)
    split = np.where(may_split, _split_cycles(target, rows.split, _SPLIT_N, _SPLIT, N, K), inf)
    return np.concatenate((whole, split))


def cycles_of(target: Target, large: Large, problem: LinearProblem) -> float:
    """What one of them takes."""
    (tile_m, tile_n), M, N, K = large.tile, problem.M, problem.N, problem.K
    if N % BLOCK:
        return inf
    if large.kernel == "persistent_split":
        rows = _in_rows(M, tile_m)
        if not _may_split(target, rows, tile_n, N, K):
            return inf
        return float(_split_cycles(target, rows, tile_n, SPLIT[large.tile], N, K))
    of = PERSISTENT[large.tile]
    return float(_whole_cycles(target, _in_rows(M, tile_m), tile_n, of, N, K))


def config_of_large(large: Large) -> Config:
    """Its configuration."""
    tile_m, tile_n = large.tile
    if large.kernel == "persistent":
        return config_of(tile_m, tile_n)
    return {"tile_m": tile_m, "tile_n": tile_n, "splits": 2}


def fastest_large(
    target: Target, larges: Iterable[Large], problem: LinearProblem
) -> tuple[float, Large]:
    """The fastest of some, and the cycles that others would have to stay below."""
    return min((cycles_of(target, large, problem) / worth_of(large), large) for large in larges)


def fastest_first(kernel: str, target: Target, problem: LinearProblem) -> list[Config]:
    """The configurations of one of these kernels."""
    own = [large for large in LARGE if large.kernel == kernel]
    ordered = sorted((cycles_of(target, large, problem), large) for large in own)
    return [config_of_large(large) for _, large in ordered]
