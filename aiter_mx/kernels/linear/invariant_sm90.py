"""Which of wgmma_bf16's configurations give a row the same bits in every batch on Hopper.

A wgmma adds 16 k of each output at a time, whatever its tile is. So the order of addition is that
of K within a part, then of the parts: into how many K is divided is chosen by N and K alone, and
the tiles are free to suit the number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from math import inf, log

from aiter_mx.kernels.linear import wgmma_bf16_few_sm90 as few
from aiter_mx.kernels.linear import wgmma_bf16_sm90 as many
from aiter_mx.kernels.linear.fitted_sm90 import WGMMA_BF16_FEW as FITTED_FEW
from aiter_mx.kernels.linear.fitted_sm90 import WGMMA_BF16_ONE as FITTED_ONE
from aiter_mx.kernels.linear.problem import LinearProblem
from aiter_mx.kernels.linear.wgmma_bf16_layout_sm90 import PARAMS, layout
from aiter_mx.kernels.sm90 import CHUNK, GROUP_ROWS, most_clusters
from aiter_mx.kernels.spec import Config
from aiter_mx.target import Target

_PARTS = (1, 2, 3, 4, 6)
_MANY, _WEIGHT_OF_FEW = (
    (64, 128, 512, 2048, 8192),
    2,
)  # rows that have a say in the parts, beside one
_ONE_TILE_M = 64
_TILES_M = (96, 128, 160, 192, 256)  # of more, few, so that few code objects serve all rows
_MIN_PAIRS_M = 1025  # for fewer rows the model prefers pairs that were slower
_MOST_OF_ROUNDS = 16  # tokens of a tile of few, of which CTAs may come after others
_KEPT_BYTES = 50  # of sums that an SM puts away or gets back in a cycle
_UNITS = CHUNK // few.UNIT  # of a chunk

Costed = tuple[float, Config]


def _costs_of_few(target: Target, problem: LinearProblem, parts: int) -> Iterator[Costed]:
    """A model of a call's cycles, see ``FITTED_FEW``."""
    features = -(-problem.N // GROUP_ROWS)
    units = -(-problem.K // (CHUNK * parts)) * _UNITS
    splits, k_groups, ctas = (param.values for param in few.PARAMS[1:])
    for split, groups, of_sm in product(splits, k_groups, ctas):
        config = few.config(problem.M, split, groups, of_sm)
        if split * groups != parts or few.layout(target, problem, config) is None:
            continue
        rounds = -(-features // (most_clusters(target, split) * of_sm))
        if rounds > 1 and config["tile_m"] > _MOST_OF_ROUNDS:
            continue
        unit = FITTED_FEW.unit + FITTED_FEW.another * (groups - 1)
        resident = min(of_sm, -(-features * split // target.cu_num))
        unit *= 1 + (FITTED_FEW.shared - 1) * (resident - 1)
        yield FITTED_FEW.start + rounds * (units * unit + FITTED_FEW.tile), config


def _costs_of_one_tile(target: Target, problem: LinearProblem, parts: int) -> Iterator[Costed]:
    """Of wgmma_bf16 with one tile of tokens, see ``FITTED_ONE``. Two CTAs of 64 features fit an SM,
    one of more."""
    tile_m = next(tokens for tokens in PARAMS[0].values if tokens >= problem.M)
    units = -(-problem.K // (CHUNK * parts)) * _UNITS
    for tile_n in PARAMS[1].values:
        config = {"tile_m": tile_m, "tile_n": tile_n, "split": parts, "pairs": 0}
        if layout(target, problem, config) is None:
            continue
        groups, of_sm = tile_n // GROUP_ROWS, 2 if tile_n == GROUP_ROWS else 1
        ctas = -(-problem.N // tile_n) * parts
        rounds = -(-ctas // (target.cu_num * of_sm))
        together = groups * min(of_sm, -(-ctas // target.cu_num))
        unit = FITTED_ONE.unit + FITTED_ONE.another * (together - 1)
        yield rounds * (units * unit + FITTED_ONE.tile), config


def _costs_of_many(target: Target, problem: LinearProblem, parts: int) -> Iterator[Costed]:
    units = -(-problem.K // (CHUNK * parts)) * _UNITS
    for tile in many.tiles_of_splits(_TILES_M):
        config = {"tile_m": tile.tile_m, "tile_n": tile.tile_n, "split": parts, "pairs": 0}
        if layout(target, problem, config) is None:
            continue
        tiles = -(-problem.M // tile.tile_m) * -(-problem.N // tile.tile_n)
        rounds = -(-tiles // most_clusters(target, parts))
        yield rounds * many.cycles_of_part(tile, tile.unit(problem), parts, units), config


def _costs_of_pairs(target: Target, problem: LinearProblem, parts: int) -> Iterator[Costed]:
    """Of pairs of CTAs that compute whole tiles, all parts of K in turn."""
    units = -(-problem.K // CHUNK) * _UNITS
    for tile in many.tiles_of_pairs(_TILES_M):
        tiles = -(-problem.M // tile.tile_m) * -(-problem.N // (2 * tile.tile_n))
        most = target.cu_num // 2
        rounds = -(-tiles // most)
        pairs = -(-tiles // rounds)
        if parts == 1:  # as many tiles each, as others are shared
            pairs = next(pairs for pairs in range(min(most, tiles), 0, -1) if tiles % pairs == 0)
            rounds = tiles // pairs
        config = {"tile_m": tile.tile_m, "tile_n": tile.tile_n, "split": parts, "pairs": pairs}
        if layout(target, problem, config) is None:
            continue
        kept = 2 * (parts - 1) * tile.sums / _KEPT_BYTES
        yield rounds * (units * tile.unit(problem) + tile.itself + kept), config


def _costs(target: Target, problem: LinearProblem, parts: int) -> Iterator[Costed]:
    if problem.M <= _ONE_TILE_M:
        yield from _costs_of_one_tile(target, problem, parts)
        return
    yield from _costs_of_many(target, problem, parts)
    if problem.M >= _MIN_PAIRS_M:
        yield from _costs_of_pairs(target, problem, parts)


def _best(costs: Iterator[Costed]) -> Costed:
    return min(costs, key=lambda costed: costed[0], default=(inf, {}))


@cache
def parts_of(target: Target, N: int, K: int) -> int:
    """Into how many parts K is divided, which is the order in which a row is added up."""

    def cost(parts: int) -> float:
        few_rows = _best(_costs_of_few(target, LinearProblem(1, N, K), parts))[0]
        return _WEIGHT_OF_FEW * log(few_rows) + sum(
            log(_best(_costs(target, LinearProblem(M, N, K), parts))[0]) for M in _MANY
        )

    return min(_PARTS, key=cost)


def configure_few(target: Target, problem: LinearProblem) -> Config:
    """The least modelled cost of wgmma_bf16_few with the parts of N and K; empty where it has too
    many CTAs for its tile."""
    parts = parts_of(target, problem.N, problem.K)
    return _best(_costs_of_few(target, problem, parts))[1]


def configure(target: Target, problem: LinearProblem) -> Config:
    """The least modelled cost of wgmma_bf16 with the parts of N and K. Up to 64 rows one tile of
    tokens was the fastest."""
    parts = parts_of(target, problem.N, problem.K)
    return _best(_costs(target, problem, parts))[1]
