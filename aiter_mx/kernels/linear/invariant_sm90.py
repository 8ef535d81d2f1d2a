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
from aiter_mx.kernels.linear.problem import LinearProblem
from aiter_mx.kernels.sm90 import CHUNK, GROUP_ROWS, most_clusters
from aiter_mx.kernels.spec import Config
from aiter_mx.target import Target

_PARTS = (1, 2, 3, 4, 6)
_MANY, _WEIGHT_OF_FEW = (512, 2048, 8192), 3  # rows that have a say in the parts, beside one row
_ONE_TILE_M = 64
_MOST_OF_ROUNDS = 16  # tokens of a tile of few, of which CTAs may come after others
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
        if of_sm > 1 and features * split > target.cu_num:
            unit *= FITTED_FEW.shared
        yield FITTED_FEW.start + rounds * (units * unit + FITTED_FEW.tile), config


def _costs_of_many(target: Target, problem: LinearProblem, parts: int) -> Iterator[Costed]:
    units = -(-problem.K // (CHUNK * parts)) * _UNITS
    for tile in many.tiles_of_splits():
        config = {"tile_m": tile.tile_m, "tile_n": tile.tile_n, "split": parts, "pairs": 0}
        if many.layout(target, problem, config) is None:
            continue
        tiles = -(-problem.M // tile.tile_m) * -(-problem.N // tile.tile_n)
        rounds = -(-tiles // most_clusters(target, parts))
        yield rounds * many.cycles_of_part(tile, parts, units), config


def _best(costs: Iterator[Costed]) -> Costed:
    return min(costs, key=lambda costed: costed[0], default=(inf, {}))


@cache
def parts_of(target: Target, N: int, K: int) -> int:
    """Into how many parts K is divided, which is the order in which a row is added up."""

    def cost(parts: int) -> float:
        few_rows = _best(_costs_of_few(target, LinearProblem(1, N, K), parts))[0]
        return _WEIGHT_OF_FEW * log(few_rows) + sum(
            log(_best(_costs_of_many(target, LinearProblem(M, N, K), parts))[0]) for M in _MANY
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
    if problem.M <= _ONE_TILE_M:
        tile_m = next(tokens for tokens in many.PARAMS[0].values if tokens >= problem.M)
        return {"tile_m": tile_m, "tile_n": GROUP_ROWS, "split": parts, "pairs": 0}
    return _best(_costs_of_many(target, problem, parts))[1]
