"""The Hopper kernel of the linear over wgmma and fp16, for up to 64 rows of x,
csrc/linear/wide_sm90.cu."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aiter_mx.kernels.linear.clusters_sm90 import (
    CHUNK,
    PART_ARGS,
    most_clusters,
    part_scalars,
)
from aiter_mx.kernels.linear.problem import (
    MATRIX_ARGS,
    W_POINTER,
    X_POINTER,
    LinearProblem,
    matrix_scalars,
)
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    Config,
    Geometry,
    KernelSpec,
    Module,
    Param,
    TensorMap,
    cheapest_of,
    combinations,
    first_of,
    where_it_fits,
)
from aiter_mx.target import Target

PARAMS = (
    Param("split", (1, 2, 3, 4, 5, 6, 7, 8), "workgroups of a cluster, which share K"),
    Param("rows", tuple(range(32, 257, 16)), "of w that a cluster takes at a time"),
    Param("depth", (1, 2, 3, 4, 5, 6, 7, 8), "times 128 k of them that are in flight"),
)

MAX_M = 64
MAX_N = (1 << 31) - 1
_MOST_CANDIDATES = 16
_MOST_ALIKE = 2
_MOST_OF_OTHERS = 16  # rows of x up to which mma_ring is faster on one H200
_TILES_M = (8, 16, 32, 48, 64)
_MOST_CHUNKS = 16  # of a part of K, whose scales are in registers for a while
_BYTES_A_CYCLE = 2090  # of an H200's memory
_BUSY_CHUNKS = 4  # of a pass of which sums are sent in the next, with them and with other work
_TILE_BYTES = 512  # sums of a tile of 16 rows of w by 8 of x
_SHARED_BYTES = 226 * 1024  # of a workgroup, static shared memory apart: compute capability 9.0


@dataclass(frozen=True)
class Layout:
    """What the host works out of a configuration: see the constants of the kernel.

    Attributes:
        tile_m: rows of x with padding.
        clusters: how many share the rows of w.
        passes: in which the busiest cluster takes its rows.
        chunks: of K in the largest part.
        shared_bytes: of a workgroup.
        spare_bytes: of them, that only x takes, before it is fp16.
        late: whether the loop runs on from pass to pass, and sums are sent in the next.
    """

    tile_m: int
    clusters: int
    passes: int
    chunks: int
    shared_bytes: int
    spare_bytes: int
    late: bool


def _threads(rows: int) -> int:
    return max(-(-rows // 64) + 1, 4) * 128


def layout(target: Target, problem: LinearProblem, config: Config) -> Layout | None:
    """How a configuration is laid out, or None where it does not fit."""
    split, rows = config["split"], config["rows"]
    tile_m = next(tile for tile in _TILES_M if tile >= problem.M)
    tiles = -(-problem.N // rows)
    most = most_clusters(target, split)
    passes = -(-tiles // most)
    chunks = -(-problem.K // (CHUNK * split))
    sums = rows // 16 * tile_m // 8
    if chunks > _MOST_CHUNKS or (passes > 1 and sums < split):
        return None  # who owns no sums would let the others send theirs too early
    inbox = -(-sums // split) * split * _TILE_BYTES if split > 1 else 0
    late = passes > 1 and _runs_on(problem, split, rows, chunks, tile_m)
    ring, slot = config["depth"] * rows * CHUNK, CHUNK * tile_m
    shared_bytes = ring + chunks * 2 * slot + inbox + (1 + late) * rows * ((chunks + 1) | 1) * 4
    # x, before it is fp16, takes the ring's end and the inbox, or what else there is.
    left = _SHARED_BYTES - shared_bytes
    spare = min(max(chunks * slot - inbox, 0), left) // 1024 * 1024
    slots = (ring + inbox + spare) // slot
    if left < 0 or slots < min(chunks, _threads(rows) * 16 // slot):
        return None
    shared_bytes += spare
    return Layout(tile_m, -(-tiles // passes), passes, chunks, shared_bytes, spare, late)


def _runs_on(problem: LinearProblem, split: int, rows: int, chunks: int, tile_m: int) -> bool:
    """Whether the loop of several passes runs on from one to the next: kLate of the kernel."""
    whole = problem.K % (CHUNK * split) == 0
    return split > 1 and 64 < rows <= 128 and tile_m > 32 and chunks > _BUSY_CHUNKS and whole


_layout = where_it_fits(layout)


_SMALLEST = [c for c in combinations(PARAMS) if c["split"] == 8 and c["depth"] == 1]
"""One of these fits where any configuration does: they have the shortest parts of K and rings."""


def _refusal(target: Target, problem: LinearProblem) -> str | None:
    if target.arch not in MODULE.sources:
        return f"no wide kernel for {target.arch}, only for {' and '.join(MODULE.sources)}"
    if problem.M > MAX_M:
        return f"M={problem.M} is above {MAX_M}, the most rows of a tile of wide"
    if problem.N > MAX_N:
        return f"N={problem.N}: wide counts rows of w in 31 bits"
    if not any(_fits(target, problem, config) for config in _SMALLEST):
        return f"M={problem.M}, K={problem.K}: wide has no room for an eighth of x"
    return None


def _fits(target: Target, problem: LinearProblem, config: Config) -> bool:
    """Whether registers, shared memory and K leave the configuration something to do."""
    found = layout(target, problem, config)
    if found is None or config["depth"] > max(found.chunks * found.passes, 1):
        return False
    if found.tile_m <= 16:
        return True
    # Sums, x on its way and scales share the registers: of these, none are spilled.
    most_chunks = 8 if config["rows"] > 192 else 12
    return found.chunks <= most_chunks and (config["rows"] <= 192 or found.tile_m <= 32)


def _cycles(target: Target, problem: LinearProblem, config: Config) -> float:
    """A model of a call's time: fitted to a sweep on one H200."""
    found = _layout(target, problem, config)
    rows, split, depth, tile_m = config["rows"], config["split"], config["depth"], found.tile_m
    groups = found.clusters * split
    rounds = -(-groups // target.cu_num)
    computed = found.chunks * rounds * (300 + -(-rows // 64) * (147 + 1.9 * tile_m))
    copied = rounds * min(groups, target.cu_num) * rows * found.chunks * CHUNK / _BYTES_A_CYCLE
    exchanged = 1000 + (0.34 * rows * tile_m if split > 1 else 0)
    if found.passes > 1:  # copies go on while sums are exchanged, as far as the ring is long
        copied *= 1 + 0.29 * max(0.0, 1 - depth * rows * CHUNK / 80e3)
    a_pass = max(copied, computed + exchanged)
    last = max(copied, computed) + exchanged
    depths = 1290 * max(0, 4 - depth) + 60 * max(0, depth - 5)
    cluster = {1: 130, 2: 260, 8: 0}.get(split, 340)
    started = 3930 + 6.6 * tile_m * found.chunks
    return started + (found.passes - 1) * a_pass + last + depths + cluster


_candidates = cheapest_of(
    PARAMS,
    _fits,
    _cycles,
    alike=("split", "rows"),
    most_alike=_MOST_ALIKE,
    most=_MOST_CANDIDATES,
)


def _yields(target: Target, problem: LinearProblem) -> str | None:
    if problem.M <= _MOST_OF_OTHERS:
        return f"mma_ring is faster up to M={_MOST_OF_OTHERS}"
    return None


def _defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    found = _layout(target, problem, config)
    return {
        "MX_TILE_M": found.tile_m,
        "MX_OUT": DTYPE_CODES[problem.out_dtype],
        "MX_SPLIT": config["split"],
        "MX_ROWS": config["rows"],
        "MX_DEPTH": config["depth"],
        "MX_CHUNKS": found.chunks,
        "MX_ONE_PASS": int(found.passes == 1),
        "MX_WHOLE": int(problem.K % (CHUNK * config["split"]) == 0),
        "MX_LATE": int(found.late),
        "MX_SPARE": found.spare_bytes,
        "MX_SHARED_BYTES": found.shared_bytes,
    }


def _geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
    found = _layout(target, problem, config)
    return Geometry(
        grid=(found.clusters * config["split"], 1, 1),
        block=(_threads(config["rows"]), 1, 1),
        shared_bytes=found.shared_bytes,
        overlaps=problem.pdl,
    )


def _scalars(target: Target, problem: LinearProblem, config: Config) -> tuple[int | float, ...]:
    return (*matrix_scalars(problem), *part_scalars(problem, config["split"]))


def _weights(target: Target, problem: LinearProblem, config: Config) -> TensorMap:
    return TensorMap(W_POINTER, problem.N, problem.K, config["rows"], CHUNK, fetch_bytes=128)


def _x(target: Target, problem: LinearProblem, config: Config) -> TensorMap:
    tile_m = _layout(target, problem, config).tile_m
    return TensorMap(X_POINTER, problem.M, problem.K, tile_m, CHUNK)


MODULE = Module(
    sources={"sm_90a": "linear/wide_sm90.cu"},
    symbol="aiter_mx_linear_wide",
    args=(*MATRIX_ARGS, *PART_ARGS),
    defines=_defines,
    geometry=_geometry,
    scalars=_scalars,
    tensor_maps=(_weights, _x),
)

WIDE = KernelSpec(
    op="linear",
    backend="hip",
    name="wide",
    params=PARAMS,
    refusal=_refusal,
    configure=first_of(_candidates),
    candidates=_candidates,
    module=MODULE,
    yields=_yields,
)
