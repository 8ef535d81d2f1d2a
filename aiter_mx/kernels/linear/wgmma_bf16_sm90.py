"""The Hopper linear for tens to thousands of rows, csrc/linear/wgmma_bf16_sm90.cu."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import NamedTuple

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.linear.clusters_sm90 import w_map, x_map
from aiter_mx.kernels.linear.fitted_sm90 import WgmmaBf16
from aiter_mx.kernels.linear.problem import (
    MATRIX_ARGS,
    LinearProblem,
    matrix_scalars,
)
from aiter_mx.kernels.search import ROUNDED_OFF, Costed, Least, Search
from aiter_mx.kernels.sm90 import CHUNK, GROUP_ROWS, SHARED_BYTES, most_clusters
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    MAX_INT,
    Config,
    Geometry,
    Param,
    TensorMap,
    where_it_fits,
)
from aiter_mx.target import Target

PARAMS = (
    Param("tile_m", (80, 96, 112, 128, 160, 192, 224, 256), "tokens of a tile"),
    Param("tile_n", (64, 128, 192), "features of a tile, 64 for each warpgroup that multiplies"),
    Param("split", (1, 2, 3, 4, 5, 6, 7, 8), "CTAs of a cluster, which share K"),
)

MIN_M = 65
_UNIT = 64  # k that are multiplied at a time
_MOST_TOKENS = {64: 256, 128: 256, 192: 128}  # of a tile, by its features: registers for sums
_FLAG_BYTES = 1024  # barriers, and which tokens and features have scales that bf16 does not cover
_OWN = ((192, 6144), (256, 4096))  # most M and N for which it comes first without a table
FITTED = WgmmaBf16()
_MOST_GRID = (1 << 31) - 1


class Layout(NamedTuple):
    """What the host works out of a configuration: see the constants of the kernel.

    Attributes:
        x_stages: stages of x in bf16.
        raw_stages: stages of x as it is in memory.
        w_stages: stages of w.
        shared_bytes: shared memory of a CTA.
        clusters: tiles, each of which a cluster computes.
    """

    x_stages: int
    raw_stages: int
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
    unit, raw, w = tile_m * _UNIT * 2, tile_m * CHUNK, tile_n * CHUNK
    x_stages = 3
    left = most - x_stages * unit
    raw_stages = 2 if left < 3 * raw + 6 * w else 3
    w_stages = min((left - raw_stages * raw) // w, 8)
    stages = x_stages * unit + raw_stages * raw + w_stages * w
    sums = tile_m * (tile_n + 4) * 4
    clusters = _tiles(problem, tile_m, tile_n)
    return Layout(x_stages, raw_stages, w_stages, max(stages, sums) + _FLAG_BYTES, clusters)


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


def _costs(target: Target, problem: LinearProblem, least: Least) -> Iterator[Costed]:
    """A model of a call's time beyond its start, see ``FITTED``."""
    chunks = _chunks(problem)
    for tile_m, tile_n in product(PARAMS[0].values, PARAMS[1].values):
        if tile_m > _MOST_TOKENS[tile_n]:
            continue
        unit = FITTED.group * (tile_n // GROUP_ROWS) + FITTED.row * tile_m
        if tile_m > 96:  # whoever expands so many tokens spills registers
            unit *= FITTED.spilled if tile_m <= 128 else FITTED.much_spilled
        clusters = _tiles(problem, tile_m, tile_n)
        if clusters / target.cu_num * chunks * 2 * unit * ROUNDED_OFF > least.cost:
            continue
        stored = tile_m * tile_n / FITTED.sums_a_cycle + FITTED.store
        for split in PARAMS[2].values[:chunks]:
            units = -(-chunks // split) * 2
            rounds = -(-clusters // most_clusters(target, split))
            reduced = 0.0
            if split > 1:
                sent = tile_m * tile_n * 4 * (split - 1) / split
                reduced = sent / FITTED.sums_a_cycle + FITTED.exchange
            cycles = rounds * (units * unit + reduced + stored + FITTED.tile)
            yield cycles, (), (tile_m, tile_n, split)


_search = Search(PARAMS, _costs, most=12)


def _yields(target: Target, problem: LinearProblem) -> str | None:
    if any(problem.M <= M and problem.N <= N for M, N in _OWN):
        return None
    return "persistent has the larger tiles, and enough of them for all SMs"


def _defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    found = _layout(target, problem, config)
    return {
        "MX_TILE_M": config["tile_m"],
        "MX_GROUPS": config["tile_n"] // GROUP_ROWS,
        "MX_SPLIT": config["split"],
        "MX_X_STAGES": found.x_stages,
        "MX_RAW_STAGES": found.raw_stages,
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
        overlaps=problem.pdl,
    )


def _scalars(target: Target, problem: LinearProblem, config: Config) -> tuple[int | float, ...]:
    return matrix_scalars(problem)


def _weights(target: Target, problem: LinearProblem, config: Config) -> TensorMap:
    return w_map(problem, config["tile_n"])


def _x(target: Target, problem: LinearProblem, config: Config) -> TensorMap:
    return x_map(problem, config["tile_m"])


WGMMA_BF16 = declare(
    "linear",
    "wgmma_bf16",
    {"sm_90a": "linear/wgmma_bf16_sm90.cu"},
    args=MATRIX_ARGS,
    defines=_defines,
    geometry=_geometry,
    scalars=_scalars,
    tensor_maps=(_weights, _x),
    refusal=_refusal,
    search=_search,
    yields=_yields,
)
