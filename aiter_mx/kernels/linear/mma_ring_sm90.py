"""The Hopper kernel of the linear over warps' mma, for up to 64 rows of x,
csrc/linear/mma_ring_sm90.cu."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aiter_mx.kernels.linear.clusters_sm90 import (
    CHUNK,
    PART_ARGS,
    most_clusters,
    part_scalars,
)
from aiter_mx.kernels.linear.problem import MATRIX_ARGS, LinearProblem, matrix_scalars
from aiter_mx.kernels.linear.wide_sm90 import WIDE
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    Arg,
    Config,
    Geometry,
    KernelSpec,
    Module,
    Param,
    cheapest_of,
    first_of,
    where_it_fits,
)
from aiter_mx.target import Target

PARAMS = (
    Param("split", (1, 2, 4, 8), "workgroups of a cluster, which share K"),
    Param("row_tiles", (1, 2, 3, 4, 5), "tiles of 16 rows of w of a warp"),
    Param("row_warps", (1, 2, 3), "warps of a workgroup side by side along the rows of w"),
    Param("k_warps", (1, 2, 3, 4, 6, 8, 12, 16), "warps of a workgroup that take turns along K"),
    Param("depth", (1, 2, 3), "chunks of 128 k of a warp that are in flight"),
    Param("per_sm", (1, 2), "workgroups that an SM is to hold"),
)

MAX_M = 64
MAX_SIZE = (1 << 31) - 1
_MOST_CANDIDATES = 20
_MOST_ALIKE = 2
_MOST_OWN_ROWS = 16  # above, wide is faster on one H200
_TILE_BYTES = 512  # sums of a tile of 16 rows of w by 8 of x
_SHARED_BYTES = 227 * 1024  # that the workgroups of an SM may have, compute capability 9.0
_STATIC_BYTES = 1024 + 128  # of a workgroup: what the system takes, and barriers


@dataclass(frozen=True)
class Layout:
    """What the host works out of a configuration: see the constants of the kernel.

    Attributes:
        tiles_m: tiles of 8 rows of x.
        clusters: how many share the rows of w.
        passes: in which the busiest cluster takes its rows.
        turns: in which a pass's sums are exchanged.
        chunks: of K in the largest part.
        shared_bytes: of a workgroup.
    """

    tiles_m: int
    clusters: int
    passes: int
    turns: int
    chunks: int
    shared_bytes: int


def layout(target: Target, problem: LinearProblem, config: Config) -> Layout | None:
    """How a configuration is laid out, or None where it does not fit."""
    split, k_warps, row_warps = config["split"], config["k_warps"], config["row_warps"]
    tiles_m = -(-problem.M // 8)
    warp_rows = 16 * config["row_tiles"]
    pass_rows = row_warps * warp_rows
    clusters = _clusters(target, problem, split, pass_rows, config["per_sm"])
    most_rows = -(-problem.N // clusters)
    passes = -(-most_rows // pass_rows)
    chunks = -(-problem.K // (CHUNK * split))
    stage_rows = warp_rows + 8 * tiles_m
    stage_bytes = -(-stage_rows * (CHUNK + 8) // 128) * 128
    ring = row_warps * k_warps * config["depth"] * stage_bytes
    most_bytes = _SHARED_BYTES // config["per_sm"] - _STATIC_BYTES
    for turns in range(1, tiles_m + 1):
        tiles = row_warps * config["row_tiles"] * tiles_m // turns
        one_turn = passes * turns == 1
        if tiles_m % turns or (tiles < split and not one_turn):
            continue
        inbox = -(-tiles // split) * split * _TILE_BYTES if split > 1 else 0
        inboxes = inbox if one_turn else 2 * inbox
        partials = k_warps * tiles * _TILE_BYTES if k_warps > 1 else 0
        shared_bytes = inboxes + (ring + partials if passes > 1 else max(ring, partials))
        if shared_bytes <= most_bytes:
            return Layout(tiles_m, clusters, passes, turns, chunks, shared_bytes)
    return None


def _clusters(
    target: Target, problem: LinearProblem, split: int, pass_rows: int, per_sm: int
) -> int:
    most = most_clusters(target, split)
    needed = -(-problem.N // pass_rows)
    if needed <= most:
        return min(most, -(-problem.N // 16))
    return min(needed, most * per_sm)


_layout = where_it_fits(layout)


def _refusal(target: Target, problem: LinearProblem) -> str | None:
    if target.arch not in MODULE.sources:
        return f"no mma_ring kernel for {target.arch}, only for {' and '.join(MODULE.sources)}"
    if problem.M > MAX_M:
        return f"M={problem.M} is above {MAX_M}, the most rows of a tile of mma_ring"
    if max(problem.N, problem.K) > MAX_SIZE:
        return f"N={problem.N}, K={problem.K}: mma_ring counts both in 31 bits"
    return None


def _fits(target: Target, problem: LinearProblem, config: Config) -> bool:
    """Whether registers, shared memory and K leave the configuration something to do."""
    found = layout(target, problem, config)
    if found is None:
        return False
    warps = config["row_warps"] * config["k_warps"] * config["per_sm"]
    registers = min(65536 // (32 * warps), 255)
    steps = -(-found.chunks // config["k_warps"])
    return (
        4 * config["row_tiles"] * found.tiles_m + 8 * found.tiles_m + 80 <= registers
        and 4 <= warps <= 18
        and (config["depth"] <= steps * found.passes or config["depth"] == 1)
    )


def _cycles(target: Target, problem: LinearProblem, config: Config) -> float:
    """A model of what a call takes beyond reading: fitted to sweeps on one H200."""
    found = _layout(target, problem, config)
    M, K, split, row_tiles = problem.M, problem.K, config["split"], config["row_tiles"]
    warps = config["row_warps"] * config["k_warps"] * config["per_sm"]
    groups = found.clusters * split
    rounds = -(-groups // (target.cu_num * config["per_sm"]))
    idle = rounds * target.cu_num * config["per_sm"] / groups
    pass_rows = 16 * row_tiles * config["row_warps"]
    chunks = -(-found.chunks // config["k_warps"])  # of a warp in a pass
    steps = chunks * config["k_warps"] / (K / CHUNK / split)
    padding = found.passes * pass_rows * found.clusters / problem.N * steps * idle
    a_unit = 22 + 6 * found.tiles_m + 12 * found.tiles_m / row_tiles  # 16 rows by 32 k
    stall = {1: 2.6, 2: 2.2, 3: 2.0}.get(round(warps / 4), 1.9)
    units = problem.N * K / (512 * 4 * target.cu_num)
    x_bytes = M * K * found.clusters * found.passes * config["row_warps"]
    in_flight = warps * config["depth"] * row_tiles * 16 * CHUNK
    starved = 0 if in_flight >= 40e3 else 1e4
    return (
        padding * units * max(a_unit * stall, 12.5 * found.tiles_m)
        + {1: 0, 2: 500, 4: 900, 8: 2500}[split]
        + 0.012 * x_bytes / target.cu_num
        + 50 * warps
        + 800 * (found.passes - 1)  # sums are exchanged once more
        # With one chunk in flight nothing is copied while it is computed.
        + 1200 * (config["depth"] == 1) * chunks * found.passes
        + 400 * (config["per_sm"] - 1)
        + starved
        + (_overlap_cycles(target, found, groups) if problem.pdl else 0)
    )


def _overlap_cycles(target: Target, found: Layout, groups: int) -> float:
    """What a launch loses or wins beside others that start before it ends: fitted as above."""
    alone = 2 * (found.shared_bytes + _STATIC_BYTES) > _SHARED_BYTES
    shares = target.cu_num < groups <= 1.5 * target.cu_num  # leaves the next one a place on an SM
    return 600 * alone - 800 * shares


_candidates = cheapest_of(
    PARAMS,
    _fits,
    _cycles,
    alike=("split", "row_tiles", "row_warps"),
    most_alike=_MOST_ALIKE,
    most=_MOST_CANDIDATES,
)


def _yields(target: Target, problem: LinearProblem) -> str | None:
    if problem.M > _MOST_OWN_ROWS and WIDE.refusal(target, problem) is None:
        return f"wide is faster above M={_MOST_OWN_ROWS}"
    return None


def _defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    found = _layout(target, problem, config)
    return {
        "MX_TILES_M": found.tiles_m,
        "MX_OUT": DTYPE_CODES[problem.out_dtype],
        "MX_SPLIT": config["split"],
        "MX_ROW_TILES": config["row_tiles"],
        "MX_ROW_WARPS": config["row_warps"],
        "MX_K_WARPS": config["k_warps"],
        "MX_DEPTH": config["depth"],
        "MX_PER_SM": config["per_sm"],
        "MX_TURNS": found.turns,
        "MX_ONE_PASS": int(found.passes == 1),
        "MX_SHARED_BYTES": found.shared_bytes,
    }


def _geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
    found = _layout(target, problem, config)
    return Geometry(
        grid=(found.clusters * config["split"], 1, 1),
        block=(config["row_warps"] * config["k_warps"] * 32, 1, 1),
        shared_bytes=found.shared_bytes,
        overlaps=problem.pdl,
    )


def _scalars(target: Target, problem: LinearProblem, config: Config) -> tuple[int | float, ...]:
    found = _layout(target, problem, config)
    rows, clusters_with_one_more = divmod(problem.N, found.clusters)
    return (
        *matrix_scalars(problem),
        *(rows, clusters_with_one_more),
        *part_scalars(problem, config["split"]),
    )


MODULE = Module(
    sources={"sm_90a": "linear/mma_ring_sm90.cu"},
    symbol="aiter_mx_linear_mma_ring",
    args=(
        *MATRIX_ARGS,
        Arg("cluster_rows", "i64"),
        Arg("clusters_with_one_more", "i32"),
        *PART_ARGS,
    ),
    defines=_defines,
    geometry=_geometry,
    scalars=_scalars,
)

MMA_RING = KernelSpec(
    op="linear",
    backend="hip",
    name="mma_ring",
    params=PARAMS,
    refusal=_refusal,
    configure=first_of(_candidates),
    candidates=_candidates,
    module=MODULE,
    yields=_yields,
)
