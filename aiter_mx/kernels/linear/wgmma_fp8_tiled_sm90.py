"""``wgmma_fp8`` for more rows of few weights: csrc/linear/wgmma_fp8_sm90.cu.

x comes in tiles of 64 tokens, wgmma's A; nothing is launched ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import product
from math import inf
from typing import NamedTuple

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.linear import wgmma_fp8_sm90 as untiled
from aiter_mx.kernels.linear.clusters_sm90 import ARGS, operand_maps, scalars
from aiter_mx.kernels.linear.fitted_sm90 import WGMMA_FP8_TILED as FITTED
from aiter_mx.kernels.linear.problem import LinearProblem
from aiter_mx.kernels.linear.wgmma_fp8_layout_sm90 import Layout, chunks_of, laid_out
from aiter_mx.kernels.search import Costed, Least, Search
from aiter_mx.kernels.sm90 import GROUP_ROWS, most_clusters, up
from aiter_mx.kernels.spec import Config, Geometry, Param, where_it_fits
from aiter_mx.target import Target

PARAMS = (
    Param("tile_n", (64, 96, 120, 128, 144, 160, 192), "features of a tile"),
    Param("row_groups", (1, 2, 3), "warpgroups side by side along the features"),
    Param("k_groups", (1, 2), "warpgroups that take turns along K"),
    Param("split", (1, 2, 3, 4), "workgroups of a cluster, which share K"),
)
_TILES = ((64, 1, 2), (96, 1, 2), (120, 3, 1), (128, 2, 1), (144, 3, 1), (160, 2, 1), (192, 2, 1))
"""Those that are weighed: all but the last parameter."""
_OWN_SPLITS = (1, 2)  # without a table: more are seldom faster
_WORTH_A_CODE = 0.06  # of the fourth powers of times beside the best, on average
_START = 3900  # cycles of a call beyond what the model has
_DEPTH = 3  # chunks of 128 k that are under way; 4 and 6 take as long
_NAMES = tuple(param.name for param in PARAMS)
MIN_M = GROUP_ROWS + 1
_MIN_OWN_M = 129  # without a table: up to 128 rows one tile of wgmma_fp8 has all of x
_MOST_TILES_M = 65_535  # of a grid's y
_OF_STORING = 1000
_MOST_OWN = 4_500_000_000
"""Without a table, it is chosen while rows, in whole tiles, times N times K and ``_OF_STORING`` are
at most so many, from 81 cells timed on an H200: its products take longer than wgmma_bf16's, which
begin later."""


def layout(target: Target, problem: LinearProblem, config: Config) -> Layout | None:
    """How a configuration is laid out, or None where it does not fit."""
    of_tile = _of_tile(problem.N, problem.K)
    return _layout_of(of_tile, *(config[name] for name in _NAMES))


@lru_cache(maxsize=64)
def _of_tile(N: int, K: int) -> LinearProblem:
    """The problem of the rows of x in a tile."""
    return LinearProblem(GROUP_ROWS, N, K)


def _layout_of(
    of_tile: LinearProblem, tile_n: int, row_groups: int, k_groups: int, split: int
) -> Layout | None:
    if tile_n % (8 * row_groups) or chunks_of(of_tile) // split < k_groups:
        return None
    return laid_out(of_tile, split, row_groups, k_groups, True, 1, tile_n)


_layout = where_it_fits(layout)


def _tiles_m(problem: LinearProblem) -> int:
    return -(-problem.M // GROUP_ROWS)


def _layouts(
    N: int, K: int, splits: tuple[int, ...] = PARAMS[3].values
) -> Iterator[tuple[tuple[int, int, int], int, Layout]]:
    """Those of the tiles that are weighed, with them and with splits of K."""
    of_tile = _of_tile(N, K)
    for tile, split in product(_TILES, splits):
        found = _layout_of(of_tile, *tile, split)
        if found is not None:
            yield tile, split, found


def _refusal(target: Target, problem: LinearProblem) -> str | None:
    if problem.M < MIN_M:
        return f"M={problem.M} is below {MIN_M}: wgmma_fp8 has all of x in one tile"
    if _tiles_m(problem) > _MOST_TILES_M:
        return f"M={problem.M} is more than {_MOST_TILES_M} tiles of {GROUP_ROWS} rows"
    refused = untiled.refusal_of_any_rows(target, problem)
    if refused is not None:
        return refused
    if not any(_layouts(problem.N, problem.K)):
        return f"K={problem.K}: no room for the scales of a tile in shared memory"
    return None


class Code(NamedTuple):
    """A configuration, and what does not depend on the rows of x."""

    values: tuple[int, ...]
    clusters: int
    side_by_side: int
    cycles: float

    def costs(self, tiles_m: Iterable[int]) -> list[float]:
        """A model of what calls with so many tiles of x take beyond their start: see ``FITTED``."""
        _, clusters, most, cycles = self
        return [-(-tiles * clusters // most) * cycles for tiles in tiles_m]

    def cost(self, M: int) -> float:
        return self.costs((-(-M // GROUP_ROWS),))[0]


@lru_cache(maxsize=1024)
def _codes(target: Target, N: int, K: int, splits: tuple[int, ...]) -> tuple[Code, ...]:
    found = []
    for tile, split, one in _layouts(N, K, splits):
        cycles = untiled.cycles_of_pass(FITTED, one, split, *tile[1:]) + FITTED.between_passes
        found.append(Code((*tile, split), one.clusters, most_clusters(target, split), cycles))
    return tuple(found)


@lru_cache(maxsize=1024)
def menu(target: Target, N: int, K: int) -> tuple[Code, ...]:
    """What a weight's rows are chosen from: the few of all that lose the least together, as each is
    a code object."""
    rows = [M for M in range(3 * GROUP_ROWS, 33 * GROUP_ROWS, GROUP_ROWS) if _is_own(M, N, K)]
    codes = _codes(target, N, K, _OWN_SPLITS) or _codes(target, N, K, PARAMS[3].values)
    tiles_m = [M // GROUP_ROWS for M in rows]
    took = [code.costs(tiles_m) for code in codes]
    best = [min(each) + _START for each in zip(*took, strict=True)]
    lost = {  # small numbers of rows count as much as large ones
        code: [((c + _START) / b) ** 4 / M for c, b, M in zip(cycles, best, rows, strict=True)]
        for code, cycles in zip(codes, took, strict=True)
    }
    found: list[Code] = []
    left = [inf] * len(rows)
    worth = _WORTH_A_CODE * sum(1 / M for M in rows)
    while True:
        more = min(codes, key=lambda code: sum(map(min, left, lost[code])))
        then = list(map(min, left, lost[more]))
        if found and sum(left) - sum(then) <= worth:
            return tuple(found)
        found.append(more)
        left = then


def _costs(target: Target, problem: LinearProblem, least: Least) -> Iterator[Costed]:
    for code in _codes(target, problem.N, problem.K, PARAMS[3].values):
        yield code.cost(problem.M), (), code.values


_search = Search(PARAMS, _costs, most=8)


def _configure(target: Target, problem: LinearProblem) -> Config:
    if not _is_own(problem.M, problem.N, problem.K):
        return _search.best(target, problem)
    best = min(menu(target, problem.N, problem.K), key=lambda code: code.cost(problem.M))
    return dict(zip(_NAMES, best.values, strict=True))


def _candidates(target: Target, problem: LinearProblem) -> list[Config]:
    chosen = _configure(target, problem)
    others = [found for found in _search.candidates(target, problem) if found != chosen]
    return [chosen, *others]


def _is_own(M: int, N: int, K: int) -> bool:
    return up(M, GROUP_ROWS) * N * (K + _OF_STORING) <= _MOST_OWN


def _yields(target: Target, problem: LinearProblem) -> str | None:
    if problem.M < _MIN_OWN_M:
        return f"one tile has all of M={problem.M}"
    if not _is_own(problem.M, problem.N, problem.K):
        return f"wgmma_bf16 multiplies M={problem.M} rows in less time"
    return None


def _defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    of_tile = {**config, "depth": _DEPTH, "per_sm": 1}
    del of_tile["tile_n"]
    return untiled.defines_of(_layout(target, problem, config), problem, of_tile, tiled=True)


def _geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
    found = _layout(target, problem, config)
    return Geometry(
        grid=(found.clusters * config["split"], _tiles_m(problem), 1),
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
    tensor_maps=operand_maps(lambda target, problem, config: (config["tile_n"], GROUP_ROWS)),
    refusal=_refusal,
    params=PARAMS,
    configure=_configure,
    candidates=_candidates,
    yields=_yields,
)
