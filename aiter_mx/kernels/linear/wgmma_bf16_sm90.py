"""The Hopper linear for tens to thousands of rows, csrc/linear/wgmma_bf16_sm90.cu."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from itertools import product
from typing import NamedTuple

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.linear.clusters_sm90 import w_map
from aiter_mx.kernels.linear.fitted_sm90 import (
    WGMMA_BF16_MANY,
    WGMMA_BF16_PAIRS,
    WgmmaBf16,
)
from aiter_mx.kernels.linear.many_rows_sm90 import (
    Work,
    cycles_of_pairs,
    pairs_that_suit,
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
from aiter_mx.kernels.search import Costed, Least, Search
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
MANY = 256  # tokens of a tile beyond MOST_OWN_M rows, and of one in every menu
_COUNTERS = 1024  # of parts of tiles that have ended, see ``XWorkspace``
MOST_OWN_M = 4096  # of a menu: beyond, models of it and persistent are asked
_MOST_BEYOND_X = 64 << 20  # bytes of a workspace, beside x in bf16
FITTED, FITTED_PAIRS = WgmmaBf16(), WGMMA_BF16_PAIRS
MILLION = 1e6
MOST_CROWDED = 15.0  # millions of values of x: the model has no more

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
    """A tile of a CTA, and what the model takes.

    Attributes:
        tile_m, tile_n: tokens and features.
        f16: whether it is of ``wgmma_f16_tiled``.
        pairs: whether it is of CTAs of which two share x.
        computed: cycles to compute 64 k of it, to the power ``together``.
        of_w, of_x: to copy w and x of them.
        itself: what it takes beside its k.
        sums: bytes of its sums.
        fitted: the numbers that say so.
    """

    tile_m: int
    tile_n: int
    f16: bool
    pairs: bool
    computed: float
    of_w: float
    of_x: float
    itself: float
    sums: int
    fitted: WgmmaBf16

    def unit(self, sizes: LinearProblem | Sizes) -> float:
        """Of 64 k, where all x is so large that some of the L2 is too far away."""
        return self.unit_at(min(sizes.M * sizes.K / MILLION, MOST_CROWDED))

    def unit_at(self, millions: float) -> float:
        """Likewise, of so many values of x."""
        of = self.fitted
        copied = self.of_w + self.of_x * (1 + of.crowded * (millions / 10) ** 2)
        cycles: float = (self.computed + copied**of.together) ** (1 / of.together)
        return cycles


def tiles_of(
    tiles_m: tuple[int, ...], splits: WgmmaBf16, pairs: WgmmaBf16, f16: bool = False
) -> tuple[Tile, ...]:
    """Those of so many tokens that fit, whose times these numbers say."""
    return tuple(
        _tile(tile_m, tile_n, of, of is pairs, f16)
        for tile_m, tile_n in product(tiles_m, PARAMS[1].values)
        if tile_m <= MOST_TOKENS[tile_n]
        for of in ((splits, pairs) if tile_n <= MOST_PAIRED else (splits,))
    )


def _tile(tile_m: int, tile_n: int, of: WgmmaBf16, pairs: bool, f16: bool = False) -> Tile:
    groups = tile_n // GROUP_ROWS
    if groups == 1:
        computed = max(of.group_alone, of.product_alone * tile_m)
    else:
        computed = groups * max(of.group, of.product * tile_m)
    of_w, of_x = (
        values * UNIT / of.bytes_a_cycle for values in (tile_n, tile_m * (1 if pairs else 2))
    )
    sums = tile_m * tile_n * 4
    itself = of.tile + sums / of.stored
    power = computed**of.together
    return Tile(tile_m, tile_n, f16, pairs, power, of_w, of_x, itself, sums, of)


@cache
def _tiles_of(splits: WgmmaBf16, pairs: WgmmaBf16) -> tuple[Tile, ...]:
    return tiles_of(_TILES_M, splits, pairs)


def every_tile() -> tuple[Tile, ...]:
    """Those that are weighed."""
    return _tiles_of(FITTED, FITTED_PAIRS)


def expanding(rows: int, K: int) -> float:
    """Cycles of the launch ahead for an operand of so many rows."""
    return rows * K / MILLION * FITTED.expanded


def costs_of(
    target: Target, sizes: LinearProblem | Sizes, tile: Tile, split: int
) -> Iterator[Costed]:
    """A model of a call's time beyond its start, see ``FITTED``: of a tile of pairs with each of
    the numbers of them that suit it, of another with its parts of K."""
    expanded = expanding(sizes.M, sizes.K)
    if tile.pairs:
        for cycles, more, values in costs_of_pairs(target, sizes, tile):
            yield cycles + expanded, more, values
    elif split <= (chunks := chunks_of(sizes)):
        rounds = -(-tile_count(sizes, tile.tile_m, tile.tile_n) // most_clusters(target, split))
        part = cycles_of_part(tile, tile.unit(sizes), split, -(-chunks // split) * 2)
        yield rounds * part + expanded, (), (tile.tile_m, tile.tile_n, split, 0)


def _costs(target: Target, problem: LinearProblem | Sizes, least: Least) -> Iterator[Costed]:
    return costs_of_tiles(target, problem, every_tile())


def costs_of_tiles(
    target: Target, problem: LinearProblem | Sizes, tiles: Iterable[Tile]
) -> Iterator[Costed]:
    """Likewise of each of some, with all that it may come with."""
    for tile in tiles:
        for split in PARAMS[2].values[:1] if tile.pairs else PARAMS[2].values:
            yield from costs_of(target, problem, tile, split)


def cycles_of_part(tile: Tile, unit: float, split: int, units: int) -> float:
    """Of a CTA that computes so many times 64 k of a tile, each for as long as ``unit``, and of its
    exchange with the others."""
    return units * unit + beside_k(tile, split)


def beside_k(tile: Tile, split: int) -> float:
    """Of a tile's part, and of its exchange with the others."""
    received = tile.sums * (split - 1) / split
    exchange = received / tile.fitted.exchanged + (split > 1) * tile.fitted.exchange
    return tile.itself + exchange


def tiles_of_splits(tiles_m: tuple[int, ...]) -> list[Tile]:
    """Those of so many tokens, of CTAs that share no x."""
    return [t for t in every_tile() if t.tile_m in tiles_m and not t.pairs]


def tile_of_pairs(tile_m: int, tile_n: int) -> Tile:
    """One of these."""
    return _tile(tile_m, tile_n, FITTED_PAIRS, True)


def tiles_of_pairs(tiles_m: tuple[int, ...]) -> list[Tile]:
    """Those of CTAs of which two share x."""
    return [t for t in every_tile() if t.tile_m in tiles_m and t.pairs]


def costs_of_pairs(target: Target, sizes: LinearProblem | Sizes, tile: Tile) -> Iterator[Costed]:
    """Of a tile of pairs, with the numbers of them that suit it."""
    chunks, tiles = chunks_of(sizes), tile_count(sizes, tile.tile_m, PAIR * tile.tile_n)
    unit = tile.unit(sizes)
    for pairs in {*pairs_that_suit(target, chunks, tiles)}:
        cycles = cycles_of_work(tile, unit, work_of(chunks, tiles, pairs))
        yield cycles, (), (tile.tile_m, tile.tile_n, 1, pairs)


def cycles_of_work(tile: Tile, unit: float, work: Work) -> float:
    """Of the busiest pair's."""
    of = tile.fitted
    join = work.parts * of.exchange + work.others * tile.sums / of.exchanged
    return of.start + (2 * work.chunks * unit + work.segments * tile.itself + join)


_search = Search(PARAMS, _costs, most=12)


@lru_cache(maxsize=1024)
def cheapest_of_many(target: Target, sizes: Sizes) -> tuple[float, Config]:
    """The choice beyond MOST_OWN_M rows without a table, by numbers of their own, and its
    cycles."""
    found = cycles_of_pairs(WGMMA_BF16_MANY, target, sizes, MANY)
    pairs = min(found, key=found.__getitem__)
    return found[pairs], {"tile_m": MANY, "tile_n": MOST_PAIRED, "split": 1, "pairs": pairs}


def others_of(target: Target, problem: LinearProblem, chosen: Config) -> list[Config]:
    """What a tuner should time beside a choice."""
    if problem.M < _MIN_TIMED_M:
        return []
    return [found for found in _search.candidates(target, problem) if found != chosen]


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
        "MX_F16": 0,
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


def scalars(target: Target, problem: LinearProblem, config: Config) -> tuple[int | float, ...]:
    return *matrix_scalars(problem), *schedule(target, problem, config)


def weights(target: Target, problem: LinearProblem, config: Config) -> TensorMap:
    return w_map(problem, config["tile_n"])


def _units(problem: LinearProblem, config: Config) -> int:
    """Of x, in all tiles of tokens, each of which a CTA of the launch ahead expands."""
    return tiles_down(problem, config) * -(-problem.K // UNIT)


def tiles_down(problem: LinearProblem, config: Config) -> int:
    """Tiles of tokens."""
    return -(-problem.M // config["tile_m"])


def workspace_bytes(target: Target, problem: LinearProblem, config: Config) -> int:
    """See ``XWorkspace`` in csrc/linear/wgmma_bf16_x_sm90.h."""
    return bytes_with_flags(target, problem, config, _units(problem, config))


def bytes_with_flags(target: Target, problem: LinearProblem, config: Config, flags: int) -> int:
    """Likewise with so many words of flags."""
    units, tile_m = _units(problem, config), config["tile_m"]
    found = _layout(target, problem, config)
    parts = 2 * config["pairs"] if found.part or found.parts_with_one_more else 0
    kept = problem.M * problem.K // BLOCK * (BLOCK + 1) if problem.x_dtype != "e4m3" else 0
    return (
        4 * _COUNTERS
        + up(4 * flags, 1024)
        + units * tile_m * UNIT * 2
        + up(kept, 1024)
        + parts * PAIR * tile_m * config["tile_n"] * 4
    )


def parts(target: Target, problem: LinearProblem, config: Config) -> Parts:
    """None for x that the launch ahead quantises."""
    room = 2 * problem.M * problem.K + _MOST_BEYOND_X
    if problem.x_dtype == "e4m3" or layout(target, problem, config) is None:
        return ()
    if workspace_bytes(target, problem, config) <= room:
        return ()
    return quantised_meanwhile(target, problem, config)


def x_defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    return {"MX_X": X_CODES[problem.x_dtype]}


def _x_scalars(target: Target, problem: LinearProblem, config: Config) -> tuple[int | float, ...]:
    return problem.M, problem.K, config["tile_m"], 0


def x_geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
    threads = max(256, 256 + (config["tile_m"] - 256) * 4)  # a warp for each octet beyond
    return Geometry(
        grid=(_units(problem, config), 1, 1), block=(threads, 1, 1), overlaps=problem.pdl
    )


SCHEDULE = ("rounds", "part", "parts_with_one_more")
"""Scalars, see ``Layout``."""
WITH_WORKSPACE = (*POINTERS, Arg("workspace", "pointer", "rw"))
ARGS = (
    *WITH_WORKSPACE,
    *numbers("i64", "M", "N", "K"),
    Arg("bias_kind", "i32"),
    *numbers("i32", *SCHEDULE),
)
EXPAND_X = Module(
    {"sm_90a": "linear/wgmma_bf16_x_sm90.cu"},
    "aiter_mx_linear_wgmma_bf16_x",
    (*WITH_WORKSPACE, *numbers("i64", "M", "K"), *numbers("i32", "tile_tokens", "swapped")),
    x_defines,
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
    scalars=scalars,
    tensor_maps=(weights,),
    before=(EXPAND_X,),
    workspace_bytes=workspace_bytes,
    refusal=_refusal,
    params=PARAMS,
    search=_search,
    composed=replace(QUANTISED_MEANWHILE, parts=parts),
)
