"""``wgmma_fp8`` for more rows of few weights: csrc/linear/wgmma_fp8_sm90.cu.

x comes in tiles of 64 tokens, wgmma's A; nothing is launched ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from itertools import compress, product
from math import inf
from typing import NamedTuple

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.linear import wgmma_bf16_sm90
from aiter_mx.kernels.linear import wgmma_fp8_sm90 as untiled
from aiter_mx.kernels.linear.clusters_sm90 import ARGS, operand_maps, scalars
from aiter_mx.kernels.linear.fitted_sm90 import START_OF_BF16, START_OF_FP8
from aiter_mx.kernels.linear.fitted_sm90 import START_OF_FP8_TILED as START
from aiter_mx.kernels.linear.fitted_sm90 import WGMMA_FP8_TILED as FITTED
from aiter_mx.kernels.linear.problem import LinearProblem, Sizes
from aiter_mx.kernels.linear.wgmma_fp8_layout_sm90 import Layout, chunks_of, laid_out
from aiter_mx.kernels.search import ROUNDED_OFF, Costed, Least, Search
from aiter_mx.kernels.sm90 import CHUNK, GROUP_ROWS, most_clusters, up
from aiter_mx.kernels.spec import Config, Geometry, Param, where_it_fits
from aiter_mx.numerics import BLOCK
from aiter_mx.target import Target

PARAMS = (
    Param("tile_m", (GROUP_ROWS, 2 * GROUP_ROWS), "tokens of a tile, 64 for a warpgroup"),
    Param("tile_n", tuple(range(32, 241, 8)), "features of a tile"),
    Param("row_groups", (1, 2, 3), "warpgroups side by side along the tokens and the features"),
    Param("k_groups", (1, 2), "warpgroups that take turns along K"),
    Param("split", (1, 2, 3, 4), "workgroups of a cluster, which share K"),
)
_COLUMNS = range(32, 97, 8)  # of a wgmma
_TILES: tuple[tuple[int, int, int, int], ...] = (
    *((64, columns, 1, 2) for columns in _COLUMNS if columns >= 48),
    *((64, 2 * columns, 2, 1) for columns in _COLUMNS if columns >= 40),
    *((64, 3 * columns, 3, 1) for columns in _COLUMNS if columns <= 80),
    *((128, columns, 2, 1) for columns in _COLUMNS),
)
"""Those that are weighed: all but the last parameter."""
_MOST_SUMS = max(tile_m * tile_n for tile_m, tile_n, *_ in _TILES)
_OWN_SPLITS = (1, 2)  # without a table: more are seldom faster
_MOST_CODES = 7  # of a weight
_WORTH_A_CODE = 0.012  # times their number: of fourth powers of times beside the best, on average
_DEPTH = 3  # chunks of 128 k that are under way; 4 and 6 take as long
_NAMES = tuple(param.name for param in PARAMS)
MIN_M = GROUP_ROWS + 1
_MIN_OWN_M = 81  # without a table
_MOST_TILES_M = 65_535  # of a grid's y
_MOST_OWN_M = 2048  # without a table: its products take longer than wgmma_bf16's
_ALIKE = 32  # rows, of which all sizes of tiles are multiples
_ROWS = range(2 * GROUP_ROWS, _MOST_OWN_M + 1, GROUP_ROWS)  # that a menu is made for
_LESS_TILES = {tile_m: [-M // tile_m for M in _ROWS] for tile_m in PARAMS[0].values}
"""Tiles of these rows, below zero, as division rounds down."""


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
    of_tile, (along_n, left_over) = _of_tile(tile_m, N, K), divmod(row_groups, tile_m // GROUP_ROWS)
    if left_over or tile_n % along_n or tile_n // along_n not in _COLUMNS:
        return None
    if chunks_of(of_tile) // split < k_groups:
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

    def costs(self) -> list[float]:
        """Likewise, for ``_ROWS``."""
        (tile_m, *_), clusters, most, cycles = self
        return [START - (tiles * clusters // most) * cycles for tiles in _LESS_TILES[tile_m]]


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


@lru_cache(maxsize=1024)
def menu(target: Target, N: int, K: int) -> tuple[Code, ...]:
    """What a weight's rows are chosen from: the few of all that lose the least together, as each is
    a code object."""
    codes = own_codes(target, N, K)
    of_all = [code.costs() for code in codes]
    least = list(map(min, zip(*of_all, strict=True)))
    is_own = [_is_least(target, M, N, K, c) for M, c in zip(_ROWS, least, strict=True)]
    rows, best = list(compress(_ROWS, is_own)), list(compress(least, is_own))
    roots = [M**0.5 for M in rows]  # small numbers of rows count as much as large ones
    lost = [
        [(c / b) ** 4 / r for c, b, r in zip(compress(cycles, is_own), best, roots, strict=True)]
        for cycles in of_all
    ]
    found: list[Code] = []
    left, worth_of_one = [inf] * len(rows), _WORTH_A_CODE * sum(1 / root for root in roots)
    weighed = list(zip(codes, lost, strict=True))
    while len(found) < _MOST_CODES:
        had, sums = sum(left), [sum(map(min, left, of_code)) for _, of_code in weighed]
        least_sum, worth = min(sums), worth_of_one * (len(found) + 1)
        if found and had - least_sum <= worth:
            break
        chosen, then = weighed[sums.index(least_sum)]
        found.append(chosen)
        left = list(map(min, left, then))
        # What gains too little beside some gains no more beside others too.
        weighed = [each for each, s in zip(weighed, sums, strict=True) if had - s >= worth]
    return tuple(found)


def _costs(target: Target, problem: LinearProblem, least: Least) -> Iterator[Costed]:
    for code in _codes(target, problem.N, problem.K, PARAMS[-1].values):
        yield code.cost(problem.M), (), code.values


_search = Search(PARAMS, _costs, most=8)


def _configure(target: Target, problem: LinearProblem) -> Config:
    if not _is_own(target, _rows_alike(problem.M), problem.N, problem.K):
        return _search.best(target, problem)
    best = min(menu(target, problem.N, problem.K), key=lambda code: code.cost(problem.M))
    return dict(zip(_NAMES, best.values, strict=True))


def _candidates(target: Target, problem: LinearProblem) -> list[Config]:
    chosen = _configure(target, problem)
    others = [found for found in _search.candidates(target, problem) if found != chosen]
    return [chosen, *others]


def _rows_alike(M: int) -> int:
    """The most rows for which the models have what they have for M."""
    return up(M, _ALIKE)


@lru_cache(maxsize=1 << 14)
def _is_own(target: Target, M: int, N: int, K: int) -> bool:
    """Whether it takes less than wgmma_fp8 and wgmma_bf16, by the models of all."""
    if not _MIN_OWN_M <= M <= _MOST_OWN_M:
        return False
    return (
        _is_least(target, M, N, K, least_cycles(target, M, N, K))
        and _is_least(target, M, N, K, _least(own_codes(target, N, K), M))
        and _is_least(target, M, N, K, _least(menu(target, N, K), M))
    )


def _least(codes: Iterable[Code], M: int) -> float:
    return min(code.cost(M) for code in codes)


def least_cycles(target: Target, M: int, N: int, K: int) -> float:
    """What any configuration takes at least, were all SMs equally busy, without laying one out."""
    sums = up(M, GROUP_ROWS) * N / target.cu_num
    passes = max(1, sums / _MOST_SUMS)
    at_least = sums * (-(-K // CHUNK) * _least_of_chunk() + FITTED.kept)
    return START + (at_least + passes * FITTED.between_passes) * ROUNDED_OFF


@cache
def _least_of_chunk() -> float:
    """Of a sum's products in 128 k."""
    found = []
    for tile_m, tile_n, row_groups, k_groups in _TILES:
        columns = tile_m // GROUP_ROWS * tile_n // row_groups
        of_block = FITTED.block + FITTED.column * columns + FITTED.sharing / row_groups / k_groups
        copied = (tile_m + tile_n) * CHUNK / FITTED.bytes_a_cycle
        cycles = untiled.together(FITTED, copied, 4 * row_groups * of_block)
        found.append(cycles / (tile_m * tile_n))
    return min(found)


def _is_least(target: Target, M: int, N: int, K: int, cycles: float) -> bool:
    """Whether neither wgmma_fp8 nor wgmma_bf16 takes less."""
    if wgmma_bf16_sm90.takes_less(target, Sizes(M, N, K), cycles - START_OF_BF16):
        return False
    if M > untiled.MAX_M:
        return True
    return not untiled.takes_less(target, LinearProblem(M, N, K), cycles - START_OF_FP8)


def _yields(target: Target, problem: LinearProblem) -> str | None:
    if problem.M < _MIN_OWN_M:
        return f"one tile of wgmma_fp8 has all of M={problem.M}"
    M = _rows_alike(problem.M)
    if M > _MOST_OWN_M or not _is_own(target, M, problem.N, problem.K):
        return f"others multiply M={problem.M} rows in less time"
    return None


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
    configure=_configure,
    candidates=_candidates,
    yields=_yields,
)
