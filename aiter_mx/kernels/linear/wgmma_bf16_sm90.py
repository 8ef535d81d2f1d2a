"""The Hopper linear for tens to thousands of rows, csrc/linear/wgmma_bf16_sm90.cu."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import product
from typing import NamedTuple

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.linear.clusters_sm90 import w_map
from aiter_mx.kernels.linear.fitted_sm90 import (
    WGMMA_BF16_LARGE,
    WGMMA_BF16_MANY,
    WGMMA_BF16_PAIRS,
    WGMMA_BF16_PAIRS_LARGE,
    WgmmaBf16,
)
from aiter_mx.kernels.linear.many_rows_sm90 import (
    cycles_of_pairs,
    pairs_that_suit,
    persistent_cycles,
    work_of,
)
from aiter_mx.kernels.linear.problem import (
    POINTERS,
    QUANTISED_MEANWHILE,
    X_CODES,
    LinearProblem,
    Sizes,
    matrix_scalars,
    quantised_meanwhile,
)
from aiter_mx.kernels.linear.wgmma_bf16_layout_sm90 import (
    FEW,
    MOST_PAIRED,
    MOST_TOKENS,
    PAIR,
    PARAMS,
    UNIT,
    chunks_of,
    layout,
    tile_count,
)
from aiter_mx.kernels.search import ROUNDED_OFF, Costed, Least, Search
from aiter_mx.kernels.sm90 import (
    GROUP_ROWS,
    most_clusters,
    up,
)
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    MAX_INT,
    Arg,
    Config,
    Geometry,
    Module,
    Parts,
    TensorMap,
    numbers,
    where_it_fits,
)
from aiter_mx.numerics import BLOCK
from aiter_mx.target import Target

MIN_M = 17
_MIN_TIMED_M = 33
_TILES_M = tuple(tokens for tokens in PARAMS[0].values if tokens > FEW)
_MIN_OWN_M = 65  # without a table: the other kernels have tiles of so few rows
# Without a table, tiles are any up to so many rows. Above, those of pairs are large, and up to
# MOST_OWN_M rows there are these, of tokens and features, of clusters of so many.
_FEW_TOKENS, _LARGE = 128, 160
_OWN_WIDE_SPLITS = (1, 2)  # of tiles of 192 features, of few tokens
_OWN_SPLITS = {
    (192, 64): (1, 2),
    (256, 64): (1, 2),
    (160, 128): (1,),
    (256, 128): (1,),
}
_OWN_SPLITS_OF_MANY = {**_OWN_SPLITS, (192, 64): (1,)}  # from _MIN_MANY rows on
_COUNTERS = 1024  # of parts of tiles that have ended, see ``XWorkspace``
MOST_OWN_M = 4096  # without a table: beyond, models of it and persistent are asked
_MOST_BEYOND_X = 64 << 20  # bytes of a workspace, beside x in bf16
FITTED, FITTED_PAIRS = WgmmaBf16(), WGMMA_BF16_PAIRS
_MIN_MANY = 768  # rows: from here to MOST_OWN_M the model has other numbers
_MILLION = 1e6


_layout = where_it_fits(layout)


def _refusal(target: Target, problem: LinearProblem | Sizes) -> str | None:
    if problem.M < MIN_M:
        return f"M={problem.M} is below {MIN_M}: the other kernels have tiles of so few rows"
    for name in ("M", "N", "K"):
        if (value := getattr(problem, name)) > MAX_INT:
            return f"{name}={value}: wgmma_bf16 counts it in 31 bits"
    tiles = tile_count(problem, _TILES_M[0], PARAMS[1].values[0])
    if tiles * chunks_of(problem) > MAX_INT:
        return f"there are up to {tiles} tiles, and the chunks of K of all are counted in 31 bits"
    return None


class Tile(NamedTuple):
    """A tile of a CTA, and what the model takes for 64 k of it, itself, and its sums' bytes; and
    the numbers that say so."""

    tile_m: int
    tile_n: int
    pairs: bool
    unit: float
    itself: float
    sums: int
    fitted: WgmmaBf16


@cache
def _tiles_of(splits: WgmmaBf16, pairs: WgmmaBf16) -> tuple[Tile, ...]:
    return tuple(
        _tile(tile_m, tile_n, of, of is pairs)
        for tile_m, tile_n in product(_TILES_M, PARAMS[1].values)
        if tile_m <= MOST_TOKENS[tile_n]
        for of in ((splits, pairs) if tile_n <= MOST_PAIRED else (splits,))
    )


def _tile(tile_m: int, tile_n: int, of: WgmmaBf16, pairs: bool) -> Tile:
    computed = tile_n // GROUP_ROWS * max(of.group, of.product * tile_m)
    copied = (tile_m * (1 if pairs else 2) + tile_n) * UNIT / of.bytes_a_cycle
    unit = (computed**of.together + copied**of.together) ** (1 / of.together)
    sums = tile_m * tile_n * 4
    return Tile(tile_m, tile_n, pairs, unit, of.tile + sums / of.stored, sums, of)


Tiles = tuple[tuple[Tile, tuple[int, ...]], ...]
"""Tiles that are weighed, each with the splits of K that are."""


def _fitted_for(M: int) -> tuple[WgmmaBf16, WgmmaBf16]:
    """The numbers of CTAs that share no x, and of pairs."""
    if _MIN_MANY <= M <= MOST_OWN_M:
        return WGMMA_BF16_LARGE, WGMMA_BF16_PAIRS_LARGE
    return FITTED, FITTED_PAIRS


def expanding(rows: int, K: int, fitted: WgmmaBf16) -> float:
    """Cycles of the launch ahead for an operand of so many rows."""
    return rows * K / _MILLION * fitted.expanded


def _every_tile(M: int) -> Tiles:
    return tuple((tile, PARAMS[2].values) for tile in _tiles_of(*_fitted_for(M)))


def _own_tiles(M: int) -> Tiles:
    """What is chosen from without a table: few tiles, so that few code objects serve all numbers of
    rows."""
    return _own_tiles_of(*_fitted_for(M), M <= _FEW_TOKENS, M <= MOST_OWN_M)


@cache
def _own_tiles_of(splits: WgmmaBf16, pairs: WgmmaBf16, few: bool, many: bool) -> Tiles:
    every: tuple[int, ...] = PARAMS[2].values
    found = []
    own_splits = _OWN_SPLITS_OF_MANY if splits is WGMMA_BF16_LARGE else _OWN_SPLITS
    for tile in _tiles_of(splits, pairs):
        if few:
            own = every if tile.tile_n <= MOST_PAIRED else _OWN_WIDE_SPLITS
        elif tile.pairs:
            own = every if tile.tile_n == MOST_PAIRED and tile.tile_m > _LARGE else ()
        else:
            own = own_splits.get((tile.tile_m, tile.tile_n), ()) if many else ()
        if own:
            found.append((tile, own))
    return tuple(found)


def _costs(
    tiles_for: Callable[[int], Tiles],
    target: Target,
    problem: LinearProblem | Sizes,
    least: Least,
) -> Iterator[Costed]:
    """A model of a call's time beyond its start, see ``FITTED``."""
    M, N, chunks = problem.M, problem.N, chunks_of(problem)
    most = target.cu_num // PAIR
    bounds = []
    for tile, splits in tiles_for(M):
        features = tile.tile_n * (PAIR if tile.pairs else 1)
        tiles = -(-M // tile.tile_m) * -(-N // features)
        side_by_side = most if tile.pairs else target.cu_num
        multiplied = tiles * tile.unit / side_by_side * 2 * chunks
        bound = (multiplied + expanding(M, problem.K, tile.fitted)) * ROUNDED_OFF
        bounds.append((bound, tiles, tile, splits))
    for bound, tiles, tile, splits in sorted(bounds):
        if bound > least.cost:
            return
        expanded = expanding(M, problem.K, tile.fitted)
        if tile.pairs:
            for cycles, more, values in _costs_of_pairs(target, chunks, tiles, tile):
                yield cycles + expanded, more, values
            continue
        for split in splits:
            if split <= chunks:
                part = cycles_of_part(tile, split, -(-chunks // split) * 2)
                cycles = -(-tiles // most_clusters(target, split)) * part + expanded
                yield cycles, (), (tile.tile_m, tile.tile_n, split, 0)


def cycles_of_part(tile: Tile, split: int, units: int) -> float:
    """Of a CTA that computes so many times 64 k of a tile, and of its exchange with the others."""
    exchange = 0.0
    if split > 1:
        received = tile.sums * (split - 1) / split
        exchange = received / tile.fitted.exchanged + tile.fitted.exchange
    return units * tile.unit + tile.itself + exchange


def tiles_of_splits() -> tuple[Tile, ...]:
    """Those of CTAs that share no x."""
    return tuple(tile for tile in _tiles_of(FITTED, FITTED_PAIRS) if not tile.pairs)


def tile_of_pairs(tile_m: int, tile_n: int, M: int) -> Tile:
    """One of these, of a call of so many rows."""
    return _tile(tile_m, tile_n, _fitted_for(M)[1], True)


def tiles_of_pairs() -> tuple[Tile, ...]:
    """Those of CTAs of which two share x."""
    return tuple(tile for tile in _tiles_of(FITTED, FITTED_PAIRS) if tile.pairs)


def costs_of_pairs(target: Target, sizes: Sizes, tile: Tile) -> Iterator[Costed]:
    """Of a tile of pairs, with the numbers of them that suit it."""
    tiles = tile_count(sizes, tile.tile_m, PAIR * tile.tile_n)
    return _costs_of_pairs(target, chunks_of(sizes), tiles, tile)


def _costs_of_pairs(target: Target, chunks: int, tiles: int, tile: Tile) -> Iterator[Costed]:
    for pairs in pairs_that_suit(target, chunks, tiles):
        work = work_of(chunks, tiles, pairs)
        of = tile.fitted
        join = work.parts * of.exchange + work.others * tile.sums / of.exchanged
        cycles = 2 * work.chunks * tile.unit + work.segments * tile.itself + join
        yield of.start + cycles, (), (tile.tile_m, tile.tile_n, 1, pairs)


_search = Search(PARAMS, partial(_costs, _every_tile), most=12)
_own_search = Search(PARAMS, partial(_costs, _own_tiles), most=1)


def _costs_of_many(target: Target, sizes: LinearProblem | Sizes, least: Least) -> Iterator[Costed]:
    """Beyond MOST_OWN_M rows, where what is launched ahead counts too."""
    for tile, _ in _own_tiles(sizes.M):
        found = cycles_of_pairs(WGMMA_BF16_MANY, target, sizes, tile.tile_m)
        for pairs, cycles in found.items():
            yield cycles, (), (tile.tile_m, tile.tile_n, 1, pairs)


_many_search = Search(PARAMS, _costs_of_many, most=1)


@lru_cache(maxsize=1024)
def cheapest(target: Target, sizes: Sizes) -> tuple[float, Config]:
    """The choice without a table, and its cycles."""
    search = _own_search if sizes.M <= MOST_OWN_M else _many_search
    found = search.cheapest(target, sizes)
    assert found is not None  # any tile fits where K is not shared
    return found


def takes_less(target: Target, sizes: Sizes, cycles: float) -> bool:
    """Whether these are fewer cycles, found without the least where others are fewer too."""
    return _own_search.has_less(target, sizes, cycles)


def rows_chosen_for(M: int) -> int:
    """The most rows of those that have one configuration, without a table."""
    return up(M, 32) if M <= _FEW_TOKENS else M


def _configure(target: Target, problem: LinearProblem) -> Config:
    return cheapest(target, Sizes(rows_chosen_for(problem.M), problem.N, problem.K))[1]


def _candidates(target: Target, problem: LinearProblem) -> list[Config]:
    """The choice for this number of rows and those near it, then the best for this one alone."""
    chosen = _configure(target, problem)
    if problem.M < _MIN_TIMED_M:
        return [chosen]
    others = [found for found in _search.candidates(target, problem) if found != chosen]
    return [chosen, *others]


def _yields(target: Target, problem: LinearProblem) -> str | None:
    if problem.M < _MIN_OWN_M:
        return "the other kernels have tiles of so few rows"
    if problem.M <= MOST_OWN_M:
        return None
    sizes = Sizes(problem.M, problem.N, problem.K)
    if cheapest(target, sizes)[0] < persistent_cycles(target, sizes):
        return None
    return "persistent expands x while it multiplies"


def defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    found = _layout(target, problem, config)
    return {
        "MX_TILE_M": config["tile_m"],
        "MX_GROUPS": config["tile_n"] // GROUP_ROWS,
        "MX_K_GROUPS": 1,
        "MX_SPLIT": config["split"],
        "MX_PAIRS": int(config["pairs"] > 0),
        "MX_OWN_X": 0,
        "MX_SWAPPED": 0,
        "MX_HELPERS": 1,
        "MX_X_STAGES": found.x_stages,
        "MX_W_STAGES": found.w_stages,
        "MX_OUT": DTYPE_CODES[problem.out_dtype],
        "MX_SHARED_BYTES": found.shared_bytes,
    }


def geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
    found = _layout(target, problem, config)
    return Geometry(
        grid=(found.clusters * (PAIR if config["pairs"] else config["split"]), 1, 1),
        block=(128 * (config["tile_n"] // GROUP_ROWS + 1), 1, 1),
        shared_bytes=found.shared_bytes,
        overlaps=True,  # with the launch that expands x
    )


def schedule(target: Target, problem: LinearProblem, config: Config) -> tuple[int, ...]:
    """The values of ``SCHEDULE``."""
    found = _layout(target, problem, config)
    return found.rounds, found.part, found.parts_with_one_more


def _scalars(target: Target, problem: LinearProblem, config: Config) -> tuple[int | float, ...]:
    return *matrix_scalars(problem), *schedule(target, problem, config)


def _weights(target: Target, problem: LinearProblem, config: Config) -> TensorMap:
    return w_map(problem, config["tile_n"])


def _units(problem: LinearProblem, config: Config) -> int:
    """Of x, in all tiles of tokens, each of which a CTA of the launch ahead expands."""
    return -(-problem.M // config["tile_m"]) * -(-problem.K // UNIT)


def _workspace_bytes(target: Target, problem: LinearProblem, config: Config) -> int:
    """See ``XWorkspace`` in csrc/linear/wgmma_bf16_x_sm90.h."""
    units, tile_m = _units(problem, config), config["tile_m"]
    found = _layout(target, problem, config)
    parts = 2 * config["pairs"] if found.part or found.parts_with_one_more else 0
    kept = problem.M * problem.K // BLOCK * (BLOCK + 1) if problem.x_dtype != "e4m3" else 0
    return (
        4 * _COUNTERS
        + up(4 * units, 1024)
        + units * tile_m * UNIT * 2
        + up(kept, 1024)
        + parts * PAIR * tile_m * config["tile_n"] * 4
    )


def _parts(target: Target, problem: LinearProblem, config: Config) -> Parts:
    """None for x that the launch ahead quantises."""
    room = 2 * problem.M * problem.K + _MOST_BEYOND_X
    if problem.x_dtype == "e4m3" or layout(target, problem, config) is None:
        return ()
    if _workspace_bytes(target, problem, config) <= room:
        return ()
    return quantised_meanwhile(target, problem, config)


def _x_defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    return {"MX_X": X_CODES[problem.x_dtype]}


def _x_scalars(target: Target, problem: LinearProblem, config: Config) -> tuple[int | float, ...]:
    return problem.M, problem.K, config["tile_m"], 0


def x_geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
    return Geometry(grid=(_units(problem, config), 1, 1), block=(256, 1, 1), overlaps=problem.pdl)


SCHEDULE = ("rounds", "part", "parts_with_one_more")
"""Scalars, see ``Layout``."""
_POINTERS = (*POINTERS, Arg("workspace", "pointer", "rw"))
ARGS = (
    *_POINTERS,
    *numbers("i64", "M", "N", "K"),
    Arg("bias_kind", "i32"),
    *numbers("i32", *SCHEDULE),
)
EXPAND_X = Module(
    {"sm_90a": "linear/wgmma_bf16_x_sm90.cu"},
    "aiter_mx_linear_wgmma_bf16_x",
    (*_POINTERS, *numbers("i64", "M", "K"), *numbers("i32", "tile_tokens", "swapped")),
    _x_defines,
    x_geometry,
    _x_scalars,
)


WGMMA_BF16 = declare(
    "linear",
    "wgmma_bf16",
    {"sm_90a": "linear/wgmma_bf16_sm90.cu"},
    args=ARGS,
    defines=defines,
    geometry=geometry,
    scalars=_scalars,
    tensor_maps=(_weights,),
    before=(EXPAND_X,),
    workspace_bytes=_workspace_bytes,
    refusal=_refusal,
    params=PARAMS,
    configure=_configure,
    candidates=_candidates,
    composed=replace(QUANTISED_MEANWHILE, parts=_parts),
    yields=_yields,
)
