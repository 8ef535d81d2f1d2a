"""The Hopper linear for tens to thousands of rows, csrc/linear/wgmma_bf16_sm90.cu."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.linear.clusters_sm90 import w_map
from aiter_mx.kernels.linear.fitted_sm90 import WgmmaBf16
from aiter_mx.kernels.linear.problem import (
    POINTERS,
    LinearProblem,
    matrix_scalars,
)
from aiter_mx.kernels.search import ROUNDED_OFF, Costed, Least, Search
from aiter_mx.kernels.sm90 import CHUNK, GROUP_ROWS, SHARED_BYTES, most_clusters, up
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    MAX_INT,
    Arg,
    Config,
    Geometry,
    Module,
    Param,
    TensorMap,
    where_it_fits,
)
from aiter_mx.target import Target

PARAMS = (
    Param("tile_m", (96, 128, 160, 192, 256), "tokens of a tile"),
    Param("tile_n", (64, 128, 192), "features of a tile, 64 for each warpgroup that multiplies"),
    Param("split", (1, 2, 3, 4, 6, 8), "CTAs of a cluster, which share K"),
)

MIN_M = 65
_UNIT = 64  # k that are multiplied at a time
_MOST_TOKENS = {64: 256, 128: 256, 192: 128}  # of a tile, by its features: registers for sums
_FLAG_BYTES = 1024  # barriers, and which tokens and features have scales that bf16 does not cover
_MOST_OWN_M = 2048  # without a table
FITTED = WgmmaBf16()
_MOST_GRID = (1 << 31) - 1


class Layout(NamedTuple):
    """What the host works out of a configuration: see the constants of the kernel.

    Attributes:
        x_stages: stages of x in bf16.
        w_stages: stages of w.
        shared_bytes: shared memory of a CTA.
        clusters: tiles, each of which a cluster computes.
    """

    x_stages: int
    w_stages: int
    shared_bytes: int
    clusters: int


def _chunks(problem: LinearProblem) -> int:
    return -(-problem.K // CHUNK)


def layout(target: Target, problem: LinearProblem, config: Config) -> Layout | None:
    """How a configuration is laid out, or None where it does not fit."""
    tile_m, tile_n, split = config["tile_m"], config["tile_n"], config["split"]
    if tile_m > _MOST_TOKENS[tile_n] or split > _chunks(problem):
        return None
    most = SHARED_BYTES - _FLAG_BYTES
    unit, w = tile_m * _UNIT * 2, tile_n * CHUNK
    pairs = min(most // (2 * unit + w), 6)  # of two stages of x and one of w: 128 k of both
    x_stages, w_stages = 2 * pairs, pairs
    stages = pairs * (2 * unit + w)
    sums = tile_m * (tile_n + 4) * 4
    clusters = _tiles(problem, tile_m, tile_n)
    return Layout(x_stages, w_stages, max(stages, sums) + _FLAG_BYTES, clusters)


def _tiles(problem: LinearProblem, tile_m: int, tile_n: int) -> int:
    return -(-problem.M // tile_m) * -(-problem.N // tile_n)


_layout = where_it_fits(layout)


def _refusal(target: Target, problem: LinearProblem) -> str | None:
    if problem.M < MIN_M:
        return f"M={problem.M} is below {MIN_M}: the other kernels have tiles of so few rows"
    for name in ("M", "N", "K"):
        if (value := getattr(problem, name)) > MAX_INT:
            return f"{name}={value}: wgmma_bf16 counts it in 31 bits"
    smallest = PARAMS[0].values[0], PARAMS[1].values[0], PARAMS[2].values[-1]
    blocks = -(-problem.M // smallest[0]) * -(-problem.N // smallest[1]) * smallest[2]
    if blocks > _MOST_GRID:
        return f"there are up to {blocks} CTAs, and their numbers have 31 bits"
    return None


def _unit_cycles(tile_m: int, tile_n: int) -> float:
    """What 64 k of a tile take."""
    computed = tile_n // GROUP_ROWS * max(FITTED.group, FITTED.product * tile_m)
    copied = (tile_m * 2 + tile_n) * _UNIT / FITTED.bytes_a_cycle
    power = FITTED.together
    both: float = (computed**power + copied**power) ** (1 / power)
    return both


def _costs(target: Target, problem: LinearProblem, least: Least) -> Iterator[Costed]:
    """A model of a call's time beyond its start, see ``FITTED``."""
    chunks = _chunks(problem)
    splits = [
        (split, most_clusters(target, split), -(-chunks // split) * 2)
        for split in PARAMS[2].values
        if split <= chunks
    ]
    for tile_m, tile_n in product(PARAMS[0].values, PARAMS[1].values):
        if tile_m > _MOST_TOKENS[tile_n]:
            continue
        unit = _unit_cycles(tile_m, tile_n)
        clusters = _tiles(problem, tile_m, tile_n)
        if clusters / target.cu_num * chunks * 2 * unit * ROUNDED_OFF > least.cost:
            continue
        of_tile = FITTED.tile + tile_m * tile_n * 4 / FITTED.stored
        for split, side_by_side, units in splits:
            rounds = -(-clusters // side_by_side)
            exchange = 0.0
            if split > 1:
                received = tile_m * tile_n * 4 * (split - 1) / split
                exchange = received / FITTED.exchanged + FITTED.exchange
            cycles = rounds * (units * unit + of_tile + exchange)
            yield cycles, (), (tile_m, tile_n, split)


_search = Search(PARAMS, _costs, most=12)


def rows_chosen_for(M: int) -> int:
    """The most rows of those that have one configuration, without a table: few code objects serve
    all numbers of rows."""
    return up(M, 32 if M <= 160 else 64 if M <= 512 else 256 if M <= 1024 else 1024)


def _configure(target: Target, problem: LinearProblem) -> Config:
    return _search.best(target, replace(problem, M=rows_chosen_for(problem.M)))


def _candidates(target: Target, problem: LinearProblem) -> list[Config]:
    """The choice for this number of rows and those near it, then the best for this one alone."""
    chosen = _configure(target, problem)
    others = [found for found in _search.candidates(target, problem) if found != chosen]
    return [chosen, *others]


def _yields(target: Target, problem: LinearProblem) -> str | None:
    if problem.M <= _MOST_OWN_M:
        return None
    return "persistent has the larger tiles, and enough of them for all SMs"


def _defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    found = _layout(target, problem, config)
    return {
        "MX_TILE_M": config["tile_m"],
        "MX_GROUPS": config["tile_n"] // GROUP_ROWS,
        "MX_SPLIT": config["split"],
        "MX_X_STAGES": found.x_stages,
        "MX_W_STAGES": found.w_stages,
        "MX_OUT": DTYPE_CODES[problem.out_dtype],
        "MX_SHARED_BYTES": found.shared_bytes,
    }


def _geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
    found = _layout(target, problem, config)
    return Geometry(
        grid=(found.clusters * config["split"], 1, 1),
        block=(128 * (config["tile_n"] // GROUP_ROWS + 1), 1, 1),
        shared_bytes=found.shared_bytes,
        overlaps=True,  # with the launch that expands x
    )


def _scalars(target: Target, problem: LinearProblem, config: Config) -> tuple[int | float, ...]:
    return matrix_scalars(problem)


def _weights(target: Target, problem: LinearProblem, config: Config) -> TensorMap:
    return w_map(problem, config["tile_n"])


def _units(problem: LinearProblem, config: Config) -> int:
    """Of x, in all tiles of tokens, each of which a CTA of the launch ahead expands."""
    return -(-problem.M // config["tile_m"]) * -(-problem.K // _UNIT)


def _workspace_bytes(target: Target, problem: LinearProblem, config: Config) -> int:
    """See ``XWorkspace`` in csrc/linear/wgmma_bf16_x_sm90.h."""
    units = _units(problem, config)
    return -(-4 * units // 1024) * 1024 + units * config["tile_m"] * _UNIT * 2


def _x_defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    return {}


def _x_scalars(target: Target, problem: LinearProblem, config: Config) -> tuple[int | float, ...]:
    return problem.M, problem.K, config["tile_m"]


def _x_geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
    return Geometry(grid=(_units(problem, config), 1, 1), block=(256, 1, 1), overlaps=problem.pdl)


_POINTERS = (*POINTERS, Arg("workspace", "pointer", "rw"))
EXPAND_X = Module(
    {"sm_90a": "linear/wgmma_bf16_x_sm90.cu"},
    "aiter_mx_linear_wgmma_bf16_x",
    (*_POINTERS, Arg("M", "i64"), Arg("K", "i64"), Arg("tile_tokens", "i32")),
    _x_defines,
    _x_geometry,
    _x_scalars,
)


WGMMA_BF16 = declare(
    "linear",
    "wgmma_bf16",
    {"sm_90a": "linear/wgmma_bf16_sm90.cu"},
    args=(*_POINTERS, *(Arg(name, "i64") for name in ("M", "N", "K")), Arg("bias_kind", "i32")),
    defines=_defines,
    geometry=_geometry,
    scalars=_scalars,
    tensor_maps=(_weights,),
    before=(EXPAND_X,),
    workspace_bytes=_workspace_bytes,
    refusal=_refusal,
    params=PARAMS,
    configure=_configure,
    candidates=_candidates,
    yields=_yields,
)
