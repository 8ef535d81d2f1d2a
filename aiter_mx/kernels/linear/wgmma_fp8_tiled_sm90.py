"""``wgmma_fp8`` for more rows of few weights: csrc/linear/wgmma_fp8_sm90.cu.

x comes in tiles of 64 tokens, wgmma's A; nothing is launched ahead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache, partial
from itertools import product
from math import inf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.linear import wgmma_fp8_sm90 as untiled
from aiter_mx.kernels.linear.clusters_sm90 import ARGS, operand_maps, scalars
from aiter_mx.kernels.linear.fitted_sm90 import START_OF_FP8_TILED as START
from aiter_mx.kernels.linear.fitted_sm90 import WGMMA_FP8_TILED as FITTED
from aiter_mx.kernels.linear.problem import LinearProblem
from aiter_mx.kernels.linear.wgmma_fp8_layout_sm90 import (
    MOST_GROUPS,
    Layout,
    chunks_of,
    laid_out,
)
from aiter_mx.kernels.search import Costed, Least, Search
from aiter_mx.kernels.sm90 import CHUNK, GROUP_ROWS, most_clusters
from aiter_mx.kernels.spec import Config, Geometry, Param, where_it_fits
from aiter_mx.target import Target

_TOKENS_AS_B = (72, 88, 96, 104)  # of tiles in which w is wgmma's A
PARAMS = (
    Param("tile_m", (64, *_TOKENS_AS_B, 128), "tokens of a tile"),
    Param("tile_n", tuple(range(32, 241, 8)), "features of a tile"),
    Param("row_groups", (1, 2, 3), "warpgroups side by side"),
    Param("k_groups", (1, 2), "warpgroups that take turns along K"),
    Param("split", (1, 2, 3, 4), "workgroups of a cluster, which share K"),
)
_COLUMNS = range(32, 97, 8)  # of a wgmma
_TILES: tuple[tuple[int, int, int, int], ...] = (
    *((64, columns, 1, 2) for columns in _COLUMNS if columns >= 48),
    *((64, 2 * columns, 2, 1) for columns in _COLUMNS if columns >= 40),
    *((64, 3 * columns, 3, 1) for columns in _COLUMNS if columns <= 80),
    *((128, columns, 2, 1) for columns in _COLUMNS),
    *((tokens, GROUP_ROWS, 1, 2) for tokens in _TOKENS_AS_B),
    *((tokens, 2 * GROUP_ROWS, 2, 1) for tokens in _TOKENS_AS_B),
    (_TOKENS_AS_B[0], 3 * GROUP_ROWS, 3, 1),
)
"""Those that are weighed: all but the last parameter."""
_OWN_SPLITS = (1, 2)  # without a table: more are seldom faster
_DEPTH = 3  # chunks of 128 k that are under way; 4 and 6 take as long
_NAMES = tuple(param.name for param in PARAMS)
MIN_M = GROUP_ROWS + 1
_MOST_CHUNKS = 192  # of a part of K: so many have no room for the scales of any tile
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_MOST_TILES_M = 65_535  # of a grid's y
MOST_OWN_M = 2048  # without a table: its products take longer than wgmma_bf16's


def layout(target: Target, problem: LinearProblem, config: Config) -> Layout | None:
    """How a configuration is laid out, or None where it does not fit."""
    return _layout_of(problem.N, problem.K, *(config[name] for name in _NAMES))


@lru_cache(maxsize=64)
def _of_tile(tile_m: int, N: int, K: int) -> LinearProblem:
    """The problem of the rows of x in a tile."""
    return LinearProblem(tile_m, N, K)


def _layout_of(
    N: int, K: int, tile_m: int, tile_n: int, row_groups: int, k_groups: int, split: int
) -> Layout | None:
    of_tile = _of_tile(tile_m, N, K)
    if row_groups * k_groups > MOST_GROUPS or chunks_of(of_tile) // split < k_groups:
        return None
    if tile_m in _TOKENS_AS_B:
        if tile_n != GROUP_ROWS * row_groups:
            return None
        return laid_out(of_tile, split, row_groups, k_groups, False, 1, tile_n, rows_m=tile_m)
    along_n, left_over = divmod(row_groups, tile_m // GROUP_ROWS)
    if left_over or tile_n % along_n or tile_n // along_n not in _COLUMNS:
        return None
    return laid_out(of_tile, split, row_groups, k_groups, True, 1, tile_n)


_layout = where_it_fits(layout)


def _tiles_m(problem: LinearProblem, tile_m: int) -> int:
    return -(-problem.M // tile_m)


class _Tiles(NamedTuple):
    """Those that are weighed with splits of K, and what does not depend on N, in arrays.

    Attributes:
        values: of their configurations.
        tile_m: tokens of each.
        rows_w: features.
        split: parts of K.
        cycles: of a pass and what is between two, by whether the last chunk of K is whole, its
            chunks, and the tile; infinitely many where it does not fit.
    """

    values: tuple[tuple[int, ...], ...]
    tile_m: Ints
    rows_w: Ints
    split: Ints
    cycles: Floats


@cache
def _tiles(splits: tuple[int, ...]) -> _Tiles:
    found = []
    for tile, split in product(_TILES, splits):
        fewest = tile[-1] * split
        one = _layout_of(1, fewest * CHUNK, *tile, split)
        if one is not None:
            is_long = partial(_is_long, tile, split)
            fitting = bisect_left(range(fewest, _MOST_CHUNKS * split), True, key=is_long)
            all_chunks: Any = np.arange(fewest, fewest + fitting)
            chunks, cycles = -(-all_chunks // split), np.full((2, _MOST_CHUNKS * splits[-1]), inf)
            for whole in (0, 1):  # without words, scales are of two chunks or more
                vectors: Any = 1 + (all_chunks % (2 * split) == 0) * whole
                of_any = one._replace(chunks=chunks, scale_chunks=vectors)
                passing = untiled.cycles_of_pass(FITTED, of_any, split, *tile[2:])
                cycles[whole, all_chunks] = passing + FITTED.between_passes
            found.append(((*tile, split), tile[0], one.rows_w, split, cycles))
    values, tiles_m, rows_w, of_k, cycles_of = zip(*found, strict=True)
    by_chunks = np.ascontiguousarray(np.array(cycles_of).transpose(1, 2, 0))
    return _Tiles(values, np.array(tiles_m), np.array(rows_w), np.array(of_k), by_chunks)


def _is_long(tile: tuple[int, int, int, int], split: int, chunks: int) -> bool:
    """Whether a tile has no room for so many chunks of K."""
    return _layout_of(1, chunks * CHUNK, *tile, split) is None


def _passes(K: int, splits: tuple[int, ...]) -> Floats:
    """What each of the tiles takes."""
    of_chunks: Floats = _tiles(splits).cycles[int(K % CHUNK == 0)]
    found: Floats = of_chunks[min(-(-K // CHUNK), len(of_chunks) - 1)]
    return found


@lru_cache(maxsize=1024)
def _fits(K: int) -> bool:
    return any(_passes(K, splits).min() < inf for splits in (_OWN_SPLITS, PARAMS[-1].values))


def _refusal(target: Target, problem: LinearProblem) -> str | None:
    if problem.M < MIN_M:
        return f"M={problem.M} is below {MIN_M}: wgmma_fp8 has all of x in one tile"
    if _tiles_m(problem, GROUP_ROWS) > _MOST_TILES_M:
        return f"M={problem.M} is more than {_MOST_TILES_M} tiles of {GROUP_ROWS} rows"
    refused = untiled.refusal_of_any_rows(target, problem)
    if refused is not None:
        return refused
    if not _fits(problem.K):
        return f"K={problem.K}: no room for the scales of a tile in shared memory"
    return None


class Code(NamedTuple):
    """A configuration, and what does not depend on the rows of x."""

    values: tuple[int, ...]
    clusters: int
    side_by_side: int
    cycles: float

    def cost(self, M: int) -> float:
        """A model of what a call with so many rows of x takes: see ``FITTED``."""
        rounds = -(-M // self.values[0] * self.clusters // self.side_by_side)
        return START + rounds * self.cycles


class Codes(NamedTuple):
    """All configurations of a weight, in columns of arrays.

    Attributes:
        splits: of K that they have.
        clusters, side_by_side: as of ``Code``.
        cycles: likewise, infinitely many where one does not fit.
    """

    splits: tuple[int, ...]
    clusters: Floats
    side_by_side: Floats
    cycles: Floats

    def costs(self, down: Floats) -> Floats:
        """What calls take that have so many tiles of tokens."""
        found: Floats = np.ceil(down * self.clusters / self.side_by_side)
        found *= self.cycles
        found += START
        return found

    def code(self, index: int) -> Code:
        """One of them."""
        clusters, side_by_side, cycles = (column.item(index) for column in self[1:])
        values = _tiles(self.splits).values[index]
        return Code(values, int(clusters), int(side_by_side), cycles)


@cache
def _tiles_down(splits: tuple[int, ...], rows: tuple[int, ...]) -> Floats:
    """Tiles of tokens: a row for each of tiles, and a column for each number of rows; infinitely
    many beyond ``MOST_OWN_M``."""
    every = np.array([rows if rows <= MOST_OWN_M else inf for rows in rows])
    return np.ceil(every / _tiles(splits).tile_m[:, None])


@cache
def _side_by_side(target: Target, splits: tuple[int, ...]) -> Floats:
    of_each = [most_clusters(target, split) for split in _tiles(splits).split.tolist()]
    return np.array(of_each, float)[:, None]


def _codes(target: Target, N: int, K: int, splits: tuple[int, ...]) -> Codes:
    clusters = np.ceil(N / _tiles(splits).rows_w)[:, None]
    return Codes(splits, clusters, _side_by_side(target, splits), _passes(K, splits)[:, None])


def costs_of_codes(target: Target, rows: tuple[int, ...], N: int, K: int) -> tuple[Codes, Floats]:
    """What a menu may have, and what each takes: a row of an array, with a column for each number
    of rows of x; infinitely long beyond ``MOST_OWN_M``."""
    fits = _passes(K, _OWN_SPLITS).min() < inf
    codes = _codes(target, N, K, _OWN_SPLITS if fits else PARAMS[-1].values)
    return codes, codes.costs(_tiles_down(codes.splits, rows))


def _costs(target: Target, problem: LinearProblem, least: Least) -> Iterator[Costed]:
    tiles = _tiles(PARAMS[-1].values)
    codes = _codes(target, problem.N, problem.K, PARAMS[-1].values)
    costs = codes.costs(np.ceil(problem.M / tiles.tile_m)[:, None])
    each = zip(costs[:, 0].tolist(), tiles.values, strict=True)
    return ((cost, (), values) for cost, values in each if cost < inf)


_search = Search(PARAMS, _costs, most=8)


def _defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    of_tile = {**config, "depth": _DEPTH, "per_sm": 1}
    del of_tile["tile_m"], of_tile["tile_n"]
    return untiled.defines_of(_layout(target, problem, config), problem, of_tile, tiled=True)


def _geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
    found = _layout(target, problem, config)
    return Geometry(
        grid=(found.clusters * config["split"], _tiles_m(problem, config["tile_m"]), 1),
        block=(128 * (config["row_groups"] * config["k_groups"] + 1), 1, 1),
        shared_bytes=found.shared_bytes,
        overlaps=problem.pdl,
    )


WGMMA_FP8_TILED = declare(
    "linear",
    "wgmma_fp8_tiled",
    {"sm_90a": "linear/wgmma_fp8_sm90.cu"},
    symbol="aiter_mx_linear_wgmma_fp8",
    args=ARGS,
    defines=_defines,
    geometry=_geometry,
    scalars=scalars,
    tensor_maps=operand_maps(lambda target, problem, config: (config["tile_n"], config["tile_m"])),
    refusal=_refusal,
    params=PARAMS,
    search=_search,
)
