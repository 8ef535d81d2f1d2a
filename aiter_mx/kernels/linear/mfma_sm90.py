"""The Hopper kernel of the linear over wgmma and bf16, for up to 64 rows of x,
csrc/linear/mfma_sm90.cu."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aiter_mx.kernels.linear.clusters_sm90 import most_clusters
from aiter_mx.kernels.linear.problem import MATRIX_ARGS, LinearProblem, matrix_scalars
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    Config,
    Geometry,
    KernelSpec,
    Module,
    Param,
    combinations,
    first_of,
    where_it_fits,
)
from aiter_mx.target import Target

PARAMS = (
    Param("split", (1, 2, 3, 4, 5, 6, 7, 8), "workgroups of a cluster, which share K"),
    Param("row_groups", (1, 2, 3, 4), "tiles of 64 rows of w that a cluster takes at a time"),
    Param("k_groups", (1, 2, 3, 4), "warpgroups of a workgroup that share a tile, and its K"),
    Param("depth", (2, 4, 6), "times 64 k that are in flight"),
)

MAX_M = 64
_TILES_M = (8, 16, 32, 64)
_MOST_CANDIDATES = 48  # the best of every shape measured is among them
_UNIT = 64  # k of the four wgmmas that a 16-byte load of each lane feeds
_ROWS = 64  # of w in a tile
_GROUP_THREADS = 128
_SLOTS = 2  # tiles whose partial sums are kept
_SHARED_BYTES = 226 * 1024  # of a workgroup, static shared memory apart: compute capability 9.0


@dataclass(frozen=True)
class Layout:
    """What the host works out of a configuration: see the constants of the kernel.

    Attributes:
        tile_m: rows of x with padding.
        x_units: units of x that a part of K has room for: all of it, or what fits.
        shared_bytes: of a workgroup.
    """

    tile_m: int
    x_units: int
    shared_bytes: int


def layout(problem: LinearProblem, config: Config) -> Layout | None:
    """The layout of shared memory, or None where a configuration does not fit."""
    split, k_groups, depth = config["split"], config["k_groups"], config["depth"]
    tile_m = next(tile for tile in _TILES_M if tile >= problem.M)
    pairs = -(-(tile_m // 4) // split)
    partials = _SLOTS * config["row_groups"] * pairs * split * k_groups * _GROUP_THREADS * 8
    steps = -(-problem.K // (_UNIT * split * k_groups * depth))
    step_bytes = k_groups * depth * _UNIT * tile_m * 2
    steps = min(steps, (_SHARED_BYTES - partials) // step_bytes)
    if steps < 1:
        return None
    return Layout(tile_m, steps * depth, partials + steps * step_bytes)


_layout = where_it_fits(layout)


def _refusal(target: Target, problem: LinearProblem) -> str | None:
    if target.arch not in MODULE.sources:
        return f"no wgmma kernel for {target.arch}, only for {' and '.join(MODULE.sources)}"
    if problem.M > MAX_M:
        return f"M={problem.M} is above {MAX_M}, the most rows of a tile of mfma"
    return None


def _fits(problem: LinearProblem, config: Config) -> bool:
    most_groups = 4 if problem.M <= 16 else 3  # what the sums leave of the registers
    return (
        config["row_groups"] * config["k_groups"] <= most_groups
        and layout(problem, config) is not None
    )


def _cycles(target: Target, problem: LinearProblem, config: Config) -> float:
    """A model of a call's time, fitted to traces on one H200: see docs/kernels.md."""
    found = _layout(problem, config)
    groups = config["row_groups"] * config["k_groups"]
    units = -(-problem.K // (_UNIT * config["split"] * config["k_groups"]))
    clusters = _clusters(target, problem, config)
    rounds = -(-problem.N // (_ROWS * config["row_groups"] * clusters))
    unit = groups * (220 + 1.5 * found.tile_m)
    epilogue = 2500 + 16 * found.tile_m
    expansion = 15 * units * found.tile_m / config["row_groups"]
    expansions = 1 if found.x_units >= units else rounds
    away = not 6 <= groups * config["depth"] <= 8  # from the units under way that did best
    return rounds * (units * unit + epilogue) + expansions * expansion + 500 * away


def _candidates(target: Target, problem: LinearProblem) -> list[Config]:
    """Those of the least modelled time, which order them."""
    fitting = (config for config in combinations(PARAMS) if _fits(problem, config))
    ordered = sorted(fitting, key=lambda config: _cycles(target, problem, config))
    return ordered[:_MOST_CANDIDATES]


def _defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    found = _layout(problem, config)
    return {
        "MX_TILE_M": found.tile_m,
        "MX_OUT": DTYPE_CODES[problem.out_dtype],
        "MX_SPLIT": config["split"],
        "MX_ROW_GROUPS": config["row_groups"],
        "MX_K_GROUPS": config["k_groups"],
        "MX_DEPTH": config["depth"],
        "MX_X_UNITS": found.x_units,
        "MX_SHARED_BYTES": found.shared_bytes,
    }


def _clusters(target: Target, problem: LinearProblem, config: Config) -> int:
    """As many as the GPU holds at once, or fewer that take no more rounds."""
    split = config["split"]
    tiles = -(-problem.N // (_ROWS * config["row_groups"]))
    most = most_clusters(target, split)
    rounds = -(-tiles // most)
    return -(-tiles // rounds)


def _geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
    return Geometry(
        grid=(_clusters(target, problem, config) * config["split"], 1, 1),
        block=(config["row_groups"] * config["k_groups"] * _GROUP_THREADS, 1, 1),
        shared_bytes=_layout(problem, config).shared_bytes,
    )


def _scalars(target: Target, problem: LinearProblem, config: Config) -> tuple[int | float, ...]:
    return matrix_scalars(problem)


MODULE = Module(
    sources={"sm_90a": "linear/mfma_sm90.cu"},
    symbol="aiter_mx_linear_mfma",
    args=MATRIX_ARGS,
    defines=_defines,
    geometry=_geometry,
    scalars=_scalars,
)

MFMA = KernelSpec(
    op="linear",
    backend="hip",
    name="mfma",
    params=PARAMS,
    refusal=_refusal,
    configure=first_of(_candidates),
    candidates=_candidates,
    module=MODULE,
    yields=lambda target, problem: "mma_ring is faster up to M=32" if problem.M <= 32 else None,
)
