"""wgmma_bf16 over fp16, for tiles of up to 128 tokens on Hopper: csrc/linear/wgmma_bf16_sm90.cu.

Making fp16 of weights takes half of the instructions that bf16 takes, which is what such tiles wait
for. It covers fewer scales, so that which outputs are computed again depends on the tile: where
bits may not depend on the number of rows, ``wgmma_bf16`` computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.linear import wgmma_bf16_sm90 as over_bf16
from aiter_mx.kernels.linear.fitted_sm90 import WGMMA_F16_PAIRS, WGMMA_F16_SPLITS, WgmmaBf16
from aiter_mx.kernels.linear.problem import QUANTISED_MEANWHILE, LinearProblem, Sizes
from aiter_mx.kernels.linear.wgmma_bf16_layout_sm90 import FEW, MOST_F16
from aiter_mx.kernels.linear.wgmma_bf16_layout_sm90 import PARAMS as ALL_PARAMS
from aiter_mx.kernels.search import Costed, Least, Search
from aiter_mx.kernels.spec import Config, Geometry, Module, Param, numbers
from aiter_mx.target import Target

_TOKENS = tuple(tokens for tokens in ALL_PARAMS[0].values if FEW < tokens <= MOST_F16)
PARAMS = (Param("tile_m", _TOKENS, "tokens of a tile"), *ALL_PARAMS[1:])
MOST_OWN_M = 1024  # beyond, expanding x takes longer than what is gained
_MOST_M = 1 << 23  # the launch ahead has 256 threads for each, and counts them in 32 bits
_PARTS = 8  # of K: CTAs of a cluster of the launch ahead, see ``XWorkspace``
FITTED, FITTED_PAIRS = WGMMA_F16_SPLITS, WGMMA_F16_PAIRS


@cache
def _tiles_of(splits: WgmmaBf16, pairs: WgmmaBf16) -> tuple[over_bf16.Tile, ...]:
    return over_bf16.tiles_of(_TOKENS, splits, pairs, f16=True)


def every_tile() -> tuple[over_bf16.Tile, ...]:
    """Those that are weighed."""
    return _tiles_of(FITTED, FITTED_PAIRS)


def _costs(target: Target, problem: LinearProblem | Sizes, least: Least) -> Iterator[Costed]:
    return over_bf16.costs_of_tiles(target, problem, every_tile())


_search = Search(PARAMS, _costs, most=12)


def others_of(target: Target, problem: LinearProblem, chosen: Config) -> list[Config]:
    """What a tuner should time beside a choice."""
    return [found for found in _search.candidates(target, problem) if found != chosen]


def _defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    return {**over_bf16.defines(target, problem, config), "MX_F16": 1}


def _workspace_bytes(target: Target, problem: LinearProblem, config: Config) -> int:
    """See ``XWorkspace`` in csrc/linear/wgmma_bf16_x_sm90.h."""
    tokens = over_bf16.tiles_down(problem, config) * config["tile_m"]
    return over_bf16.bytes_with_flags(target, problem, config, 2 * tokens)


def _refusal(target: Target, problem: LinearProblem) -> str | None:
    if problem.M <= FEW:
        return f"M={problem.M} is not above {FEW}: the other kernels have tiles of so few rows"
    if problem.M > _MOST_M:
        return f"M={problem.M} is above {_MOST_M}: the launch ahead counts its threads in 32 bits"
    return over_bf16.WGMMA_BF16.refusal(target, problem)


def _x_scalars(target: Target, problem: LinearProblem, config: Config) -> tuple[int | float, ...]:
    return problem.M, problem.K, config["tile_m"]


def _x_geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
    """A cluster for each eight tokens."""
    octets = over_bf16.tiles_down(problem, config) * config["tile_m"] // 8
    return Geometry(grid=(octets * _PARTS, 1, 1), block=(256, 1, 1), overlaps=problem.pdl)


EXPAND_X = Module(
    over_bf16.EXPAND_X.sources,
    "aiter_mx_linear_wgmma_f16_x",
    (*over_bf16.WITH_WORKSPACE, *numbers("i64", "M", "K"), *numbers("i32", "tile_tokens")),
    over_bf16.x_defines,
    _x_geometry,
    _x_scalars,
)


WGMMA_F16_TILED = declare(
    "linear",
    "wgmma_f16_tiled",
    {"sm_90a": "linear/wgmma_bf16_sm90.cu"},
    symbol="aiter_mx_linear_wgmma_bf16",
    args=over_bf16.ARGS,
    defines=_defines,
    geometry=over_bf16.geometry,
    scalars=over_bf16.scalars,
    tensor_maps=(over_bf16.weights,),
    before=(EXPAND_X,),
    workspace_bytes=_workspace_bytes,
    refusal=_refusal,
    params=PARAMS,
    search=_search,
    composed=replace(QUANTISED_MEANWHILE, parts=over_bf16.parts),
)
