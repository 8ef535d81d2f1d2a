"""wgmma_bf16 for more rows than features on Hopper: csrc/linear/wgmma_bf16_sm90.cu.

x and w change places, so that the launch ahead expands w, the smaller operand, once, and x is made
bf16 by the kernel itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.linear import wgmma_bf16_sm90 as unswapped
from aiter_mx.kernels.linear.clusters_sm90 import x_map
from aiter_mx.kernels.linear.fitted_sm90 import WGMMA_BF16_SWAPPED_MANY
from aiter_mx.kernels.linear.many_rows_sm90 import cycles_of_pairs
from aiter_mx.kernels.linear.problem import LinearProblem, Sizes, matrix_scalars
from aiter_mx.kernels.search import Costed, Least, Search
from aiter_mx.kernels.sm90 import up
from aiter_mx.kernels.spec import (
    Config,
    Geometry,
    Module,
    Param,
    TensorMap,
)
from aiter_mx.target import Target

PARAMS = (
    Param("tile_n", (192, 256), "features of a tile"),
    Param("pairs", tuple(range(1, 67)), "of CTAs that stay and share all tiles"),
)
_TILE_M = 128  # tokens of a CTA
MIN_OWN_M = 1025  # without a table
_MARGIN_OF_MANY = 1.01  # beyond MOST_OWN_M rows: less is not worth its code object


@lru_cache(maxsize=64)
def _swapped(problem: LinearProblem) -> LinearProblem:
    """What wgmma_bf16 takes the problem for."""
    return replace(problem, M=problem.N, N=problem.M, x_dtype="e4m3")


def _sizes(problem: LinearProblem) -> Sizes:
    return Sizes(problem.N, problem.M, problem.K)


def _config(config: Config) -> Config:
    return {"tile_m": config["tile_n"], "tile_n": _TILE_M, "split": 1, "pairs": config["pairs"]}


def _refusal(target: Target, problem: LinearProblem) -> str | None:
    if problem.M < problem.N:
        return f"M={problem.M} is below N={problem.N}: w takes more to expand than x"
    if problem.N < unswapped.MIN_M:
        return f"N={problem.N} is below {unswapped.MIN_M}: its tiles have many more features"
    if problem.bias != "none":
        return "its sums leave no registers for a bias"
    return unswapped.WGMMA_BF16.refusal(target, _sizes(problem))


def _costs_of(tiles_n: Sequence[int], target: Target, problem: LinearProblem) -> Iterator[Costed]:
    for tile_n in tiles_n:
        tile = unswapped.tile_of_pairs(tile_n, _TILE_M)
        for cycles, more, values in unswapped.costs_of_pairs(target, _sizes(problem), tile):
            yield cycles, more, (tile_n, values[-1])


def _costs(target: Target, problem: LinearProblem, least: Least) -> Iterator[Costed]:
    return _costs_of(PARAMS[0].values, target, problem)


def _own_tile(N: int) -> int:
    """That which leaves the fewest features over, so that M chooses no code object."""
    return min(PARAMS[0].values, key=lambda tile: (up(N, tile), tile))


def _own_costs(target: Target, problem: LinearProblem, least: Least) -> Iterator[Costed]:
    return _costs_of((_own_tile(problem.N),), target, problem)


_search = Search(PARAMS, _costs, most=4)
_own_search = Search(PARAMS, _own_costs, most=1)


def _candidates(target: Target, problem: LinearProblem) -> list[Config]:
    chosen = _own_search.best(target, problem)
    return [chosen, *(c for c in _search.candidates(target, problem) if c != chosen)]


def _workspace_bytes(target: Target, problem: LinearProblem, config: Config) -> int:
    return unswapped.WGMMA_BF16.workspace_bytes(target, _swapped(problem), _config(config))


def _defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    found = unswapped.defines(target, _swapped(problem), _config(config))
    return {**found, "MX_SWAPPED": 1}


def _geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
    return unswapped.geometry(target, _swapped(problem), _config(config))


def _scalars(target: Target, problem: LinearProblem, config: Config) -> tuple[int | float, ...]:
    schedule = unswapped.schedule(target, _swapped(problem), _config(config))
    return *matrix_scalars(problem), *schedule


def _x(target: Target, problem: LinearProblem, config: Config) -> TensorMap:
    return x_map(problem, _TILE_M)


def _ahead_geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
    return unswapped.x_geometry(target, _swapped(problem), _config(config))


def takes_less(target: Target, problem: LinearProblem, others: float) -> bool:
    """Whether it takes fewer cycles than others do, by its model."""
    if problem.M <= unswapped.MOST_OWN_M:
        own = _own_search.cheapest(target, problem)
        return own is not None and own[0] + unswapped.expanding(problem.N, problem.K) < others
    tile_n = _own_tile(problem.N)
    of_pairs = cycles_of_pairs(WGMMA_BF16_SWAPPED_MANY, target, _sizes(problem), tile_n)
    own_pairs = _own_search.best(target, problem)["pairs"]
    return max(min(of_pairs.values()), of_pairs[own_pairs]) * _MARGIN_OF_MANY < others


WGMMA_BF16_SWAPPED = declare(
    "linear",
    "wgmma_bf16_swapped",
    {"sm_90a": "linear/wgmma_bf16_sm90.cu"},
    symbol="aiter_mx_linear_wgmma_bf16",
    args=unswapped.ARGS,
    defines=_defines,
    geometry=_geometry,
    scalars=_scalars,
    tensor_maps=(_x,),
    before=(
        Module(
            unswapped.EXPAND_X.sources,
            unswapped.EXPAND_X.symbol,
            unswapped.EXPAND_X.args,
            lambda target, problem, config: {"MX_X": 0},
            _ahead_geometry,
            lambda target, problem, config: (problem.N, problem.K, config["tile_n"], 1),
        ),
    ),
    workspace_bytes=_workspace_bytes,
    refusal=_refusal,
    params=PARAMS,
    configure=_own_search.best,
    candidates=_candidates,
)
