"""``wgmma_fp8`` for more rows of few weights: csrc/linear/wgmma_fp8_sm90.cu.

x comes in tiles of 64 tokens, wgmma's A; nothing is launched ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.linear import wgmma_fp8_sm90 as untiled
from aiter_mx.kernels.linear.clusters_sm90 import ARGS, operand_maps, scalars
from aiter_mx.kernels.linear.fitted_sm90 import START_OF_FP8_TILED as START
from aiter_mx.kernels.linear.fitted_sm90 import WGMMA_FP8_TILED as FITTED
from aiter_mx.kernels.linear.problem import LinearProblem
from aiter_mx.kernels.linear.wgmma_fp8_layout_sm90 import Layout, chunks_of, laid_out
from aiter_mx.kernels.search import Costed, Least, Search
from aiter_mx.kernels.sm90 import CHUNK, GROUP_ROWS, most_clusters, up
from aiter_mx.kernels.spec import Config, Geometry, Param, where_it_fits
from aiter_mx.numerics import BLOCK
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
    if chunks_of(of_tile) // split < k_groups:
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


def _layouts(
    N: int, K: int, splits: tuple[int, ...] = PARAMS[-1].values
) -> Iterator[tuple[tuple[int, int, int, int], int, Layout]]:
    """Those of the tiles that are weighed, with them and with splits of K."""
    for tile, split in product(_TILES, splits):
        found = _layout_of(N, K, *tile, split)
        if found is not None:
            yield tile, split, found


def _refusal(target: Target, problem: LinearProblem) -> str | None:
    if problem.M < MIN_M:
        return f"M={problem.M} is below {MIN_M}: wgmma_fp8 has all of x in one tile"
    if _tiles_m(problem, GROUP_ROWS) > _MOST_TILES_M:
        return f"M={problem.M} is more than {_MOST_TILES_M} tiles of {GROUP_ROWS} rows"
    refused = untiled.refusal_of_any_rows(target, problem)
    if refused is not None:
        return refused
    if not _fits(_k_alike(problem.K)):
        return f"K={problem.K}: no room for the scales of a tile in shared memory"
    return None


@lru_cache(maxsize=1024)
def _fits(K: int) -> bool:
    return any(_layouts(1, K))


class Code(NamedTuple):
    """A configuration, and what does not depend on the rows of x."""

    values: tuple[int, ...]
    clusters: int
    side_by_side: int
    cycles: float

    def cost(self, M: int) -> float:
        """A model of what a call with so many rows of x takes: see ``FITTED``."""
        return START - (-M // self.values[0] * self.clusters // self.side_by_side) * self.cycles


@lru_cache(maxsize=1024)
def _passes(K: int, splits: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], int, float], ...]:
    """Of each configuration that fits: its values, the features of its tile, and its cycles."""
    found = []
    for tile, split, one in _layouts(1, K, splits):
        cycles = untiled.cycles_of_pass(FITTED, one, split, *tile[2:]) + FITTED.between_passes
        found.append(((*tile, split), one.rows_w, cycles))
    return tuple(found)


@lru_cache(maxsize=1024)
def _codes(target: Target, N: int, K: int, splits: tuple[int, ...]) -> tuple[Code, ...]:
    most = {split: most_clusters(target, split) for split in splits}
    return tuple(
        Code(values, -(-N // rows_w), most[values[-1]], cycles)
        for values, rows_w, cycles in _passes(_k_alike(K), splits)
    )


def _k_alike(K: int) -> int:
    """A K that has the layouts of this one: as many chunks, the last of them whole or not."""
    return up(K, CHUNK) - (BLOCK if K % CHUNK else 0)


def own_codes(target: Target, N: int, K: int) -> tuple[Code, ...]:
    return _codes(target, N, K, _OWN_SPLITS) or _codes(target, N, K, PARAMS[-1].values)


def _costs(target: Target, problem: LinearProblem, least: Least) -> Iterator[Costed]:
    for code in _codes(target, problem.N, problem.K, PARAMS[-1].values):
        yield code.cost(problem.M), (), code.values


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
