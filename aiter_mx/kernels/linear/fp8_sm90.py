"""The Hopper kernel of the linear that multiplies fp8 as it is, csrc/linear/fp8_sm90.cu."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from aiter_mx.kernels.linear.clusters_sm90 import (
    CHUNK,
    PART_ARGS,
    most_clusters,
    part_scalars,
)
from aiter_mx.kernels.linear.problem import (
    MATRIX_ARGS,
    W_POINTER,
    W_SCALES_POINTER,
    LinearProblem,
    matrix_scalars,
)
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    Arg,
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
    Param("split", (1, 2, 4, 8), "workgroups of a cluster, which share K"),
    Param("row_groups", (1, 2), "warpgroups of 64 rows of w side by side"),
    Param("k_groups", (1, 2, 3, 4), "warpgroups that take turns along K"),
    Param(
        "depth", (4, 6, 8, 9, 10, 11, 12, 15, 16, 24), "chunks of 128 k that are under way at most"
    ),
    Param("per_sm", (1, 2, 3, 4), "workgroups that an SM is to hold"),
)

MAX_M = 32
MAX_SIZE = (1 << 31) - 1
ACCUMULATION_ERROR = 2.0**-10
"""Of a sum, relative to the sum of its products' magnitudes. The matrix unit adds the 32 products
of a block with some 14 bits; random payloads were at most half as far off."""
_MOST_OWN_ROWS = 16  # up to which it gains most where launches overlap, on an H200
_FEWEST_WEIGHTS, _MOST_WEIGHTS = 9_000_000, 30_000_000  # between which that was measured
_FEW_ROWS, _MOST_WEIGHTS_OF_MORE_ROWS = 8, 60_000_000
_MOST_CANDIDATES = 20
_MOST_ALIKE = 4
_MANY_WEIGHTS = 50_000_000  # from which all places are taken, if more than so many of them are
_FULL = 0.7
_ALONE_WEIGHTS, _FEWEST_BOXES = range(300_000, 600_000), 8  # of an SM, where that was faster
_TILE_BYTES = 512  # sums of a tile of 16 rows of w by 8 of x
_GROUP_ROWS = 64
_BLOCKS = CHUNK // 32
_MOST_PITCH = 256  # bytes of a row of a box that is not turned
_ALIGNMENT_BYTES = 1024  # of boxes in shared memory, which the kernel's first byte may not have
_SHARED_BYTES = 228 * 1024  # of an SM, compute capability 9.0
_SYSTEM_BYTES = 1024  # of a workgroup's part of it
_MOST_WARPS = 32  # of a workgroup


@dataclass(frozen=True)
class Layout:
    """What the host works out of a configuration: see the constants of the kernel.

    Attributes:
        tiles_m: tiles of 8 rows of x.
        clusters: how many share the rows of w.
        passes: in which each takes them.
        tile_rows: of w in a pass.
        chunks: of K in the largest part.
        depth: stages of the ring.
        refills: whether they are used more than once.
        alone: whether an SM's other workgroup is the next launch's.
        scale_pitch: bytes of a row of a box of w's scales; 0 where warps copy their own.
        scale_buffers: for so many passes.
        shared_bytes: of a workgroup.
    """

    tiles_m: int
    clusters: int
    passes: int
    tile_rows: int
    chunks: int
    depth: int
    refills: bool
    alone: bool
    scale_pitch: int
    scale_buffers: int
    shared_bytes: int

    @property
    def stage_bytes(self) -> int:
        return -(-self.tile_rows // 8) * 8 * CHUNK


def layout(target: Target, problem: LinearProblem, config: Config) -> Layout | None:
    """How a configuration is laid out, or None where it does not fit."""
    split, row_groups, k_groups = config["split"], config["row_groups"], config["k_groups"]
    tiles_m = 1 << (-(-problem.M // 8) - 1).bit_length()
    fewest_chunks, more = divmod(problem.K // CHUNK, split)
    chunks = fewest_chunks + (more > 0)
    resident = most_clusters(target, split) * config["per_sm"]
    needed = -(-problem.N // (_GROUP_ROWS * row_groups))
    alone = _is_alone(target, problem, config) and needed > resident
    if alone:
        resident //= 2
    passes = -(-needed // resident)
    # An SM that holds one workgroup is to have one; else the next launch may share it. Of many
    # weights each SM is to have as much, where they leave few places.
    shares = passes == 1 and config["per_sm"] > 1
    if not problem.pdl and problem.N * problem.K >= _MANY_WEIGHTS and needed > _FULL * resident:
        shares = False
    wanted = needed if shares else resident
    tile_rows = -(-problem.N // (wanted * passes))
    clusters = -(-problem.N // (tile_rows * passes))
    depth, total = min(config["depth"], chunks * passes), chunks * passes
    refills = total > depth
    tiles = 4 * row_groups * tiles_m
    if fewest_chunks < k_groups or (refills and (depth % k_groups or depth < 2 * k_groups)):
        return None
    if passes > 1 and tiles < split:
        return None  # who owns no sums would not know which pass the others are at
    found = Layout(
        tiles_m, clusters, passes, tile_rows, chunks, depth, refills, alone, 0, min(passes, 2), 0
    )
    # Scales of w by boxes, where there is room: a box begins at a multiple of 16 bytes.
    starts_between = more or fewest_chunks * _BLOCKS % 16
    pitch = -(-(chunks * _BLOCKS + (16 - _BLOCKS) * bool(starts_between)) // 16) * 16
    boxed = replace(found, scale_pitch=pitch, scale_buffers=1 + -(-depth // fewest_chunks))
    for each in (boxed, found):
        if each.scale_pitch and (passes == 1 or problem.K % (16 * 32) or pitch > _MOST_PITCH):
            continue
        each = replace(each, shared_bytes=_shared_bytes(each, config))
        if (
            _warps(each, config) <= _MOST_WARPS
            and (each.shared_bytes + _SYSTEM_BYTES) * config["per_sm"] <= _SHARED_BYTES
        ):
            return each
    return None


def _is_alone(target: Target, problem: LinearProblem, config: Config) -> bool:
    """Whether an SM holds one workgroup each of two launches, where there are several passes."""
    deep = config["per_sm"] == 2 and config["depth"] >= _FEWEST_BOXES
    weights = problem.N * problem.K // target.cu_num
    return problem.pdl and deep and weights in _ALONE_WEIGHTS


def _shared_bytes(found: Layout, config: Config) -> int:
    split, row_groups, k_groups = config["split"], config["row_groups"], config["k_groups"]
    tiles = 4 * row_groups * found.tiles_m
    inboxes = min(found.passes, 2)
    inbox = -(-tiles // split) * split * k_groups * _TILE_BYTES if split * k_groups > 1 else 0
    scales = row_groups * _GROUP_ROWS * found.scale_pitch
    if not scales:  # each warp's
        scales = 4 * row_groups * k_groups * ((-(-found.chunks // k_groups) + 1) // 2 * 128)
    behind = (
        found.chunks * 8 * found.tiles_m * (CHUNK + 16)  # x and its scales
        + found.scale_buffers * scales
        + inboxes * inbox
        + (2 * found.depth + 2 * inboxes + found.scale_buffers) * 8
    )
    # The last stage is read as if it had all rows.
    room = max(behind, row_groups * _GROUP_ROWS * CHUNK - found.stage_bytes)
    return -(-(_ALIGNMENT_BYTES + found.depth * found.stage_bytes + room) // 16) * 16


_layout = where_it_fits(layout)


def _refusal(target: Target, problem: LinearProblem) -> str | None:
    if target.arch not in MODULE.sources:
        return f"no fp8 kernel for {target.arch}, only for {' and '.join(MODULE.sources)}"
    if problem.M > MAX_M:
        return f"M={problem.M} is above {MAX_M}, the most rows of a tile of fp8"
    if problem.out_dtype != "bf16":
        return f"fp8 sums a block with 14 bits: enough for bf16, not for {problem.out_dtype}"
    if problem.K % CHUNK:
        return f"K={problem.K} is no multiple of {CHUNK}, which fp8 takes at a time"
    if max(problem.N, problem.K) > MAX_SIZE:
        return f"N={problem.N}, K={problem.K}: fp8 counts both in 31 bits"
    if not any(_fits(target, problem, config) for config in combinations(PARAMS)):
        return f"K={problem.K} has no configuration whose part of x fits shared memory"
    return None


def _warps(found: Layout, config: Config) -> int:
    """Of a workgroup: consumers, the producer, and where there are several passes a helper."""
    helped = found.passes > 1 and config["split"] * config["k_groups"] > 1
    return 4 * config["row_groups"] * config["k_groups"] + 1 + helped


def _fits(target: Target, problem: LinearProblem, config: Config) -> bool:
    """Whether registers, shared memory and K leave the configuration something to do."""
    found = layout(target, problem, config)
    if found is None:
        return False
    groups = config["row_groups"] * config["k_groups"]
    registers = 65536 // (_warps(found, config) * 32 * config["per_sm"])
    shorter = [depth for depth in _DEPTHS if found.depth <= depth < config["depth"]]
    return (
        not shorter
        and groups * config["per_sm"] <= 4
        and 20 * found.tiles_m + 48 <= registers
        and (config["row_groups"] == 1 or found.tile_rows > _GROUP_ROWS)
    )


_DEPTHS = next(param.values for param in PARAMS if param.name == "depth")


def _cycles(target: Target, problem: LinearProblem, config: Config) -> float:
    """A model of what a call takes beyond reading: fitted to sweeps on one H200."""
    found = _layout(target, problem, config)
    split, row_groups, per_sm = config["split"], config["row_groups"], config["per_sm"]
    warpgroups, workgroups = row_groups * config["k_groups"], found.clusters * split
    of_busiest = -(-workgroups // target.cu_num)
    resident = warpgroups * min(per_sm, of_busiest)
    small = warpgroups == 1 and per_sm > 1
    exchange = {1: 0, 2: 600, 4: 1600, 8: 900 if small else 4700}[split]
    rounds: float = of_busiest
    overlap = 0
    if problem.pdl:  # the next launch takes what SMs have to spare, if there is room for it
        rounds, resident = max(workgroups / target.cu_num, 1), max(resident, 3)
        exchange = {1: 0, 2: 300, 4: 0, 8: 1900 * (not found.alone)}[split]
        shares = per_sm > 1 and found.passes == 1
        overlap = 1900 * found.refills - 1500 * shares - 600 * small - 7000 * found.alone
    units = rounds * found.passes * found.chunks * row_groups  # 64 rows by 128 k
    latency = 450 + 90 * found.tiles_m if problem.pdl else 240 + 60 * found.tiles_m
    a_unit = max(60 + 55 * found.tiles_m, latency / resident)
    x_bytes = problem.M * problem.K / split * workgroups
    ring = found.depth * found.stage_bytes * min(per_sm, of_busiest)
    return (
        1.4 * units * a_unit
        + exchange
        + 0.03 * x_bytes / target.cu_num
        + 300 * (found.passes - 1) * (not found.alone)
        + 0.01 * max(0, 170e3 - ring)
        + overlap
    )


_candidates = cheapest_of(
    PARAMS,
    _fits,
    _cycles,
    alike=("split", "row_groups", "per_sm"),
    most_alike=_MOST_ALIKE,
    most=_MOST_CANDIDATES,
)


def _yields(target: Target, problem: LinearProblem) -> str | None:
    most = _MOST_WEIGHTS if problem.M <= _FEW_ROWS else _MOST_WEIGHTS_OF_MORE_ROWS
    weights = range(_FEWEST_WEIGHTS, most + 1)
    if problem.pdl and problem.M <= _MOST_OWN_ROWS and problem.N * problem.K in weights:
        return None
    return "fp8 keeps fewer bits of sums than the others, and gains little without a table"


def _defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    found = _layout(target, problem, config)
    return {
        "MX_TILES_M": found.tiles_m,
        "MX_OUT": DTYPE_CODES[problem.out_dtype],
        "MX_SPLIT": config["split"],
        "MX_ROW_GROUPS": config["row_groups"],
        "MX_K_GROUPS": config["k_groups"],
        "MX_DEPTH": found.depth,
        "MX_PER_SM": config["per_sm"],
        "MX_ONE_PASS": int(found.passes == 1),
        "MX_REFILLS": int(found.refills),
        "MX_MOST_CHUNKS": found.chunks,
        "MX_STAGE_BYTES": found.stage_bytes,
        "MX_SCALE_PITCH": found.scale_pitch,
        "MX_SCALE_BUFFERS": found.scale_buffers,
        "MX_ALONE": int(found.alone),
        "MX_SHARED_BYTES": found.shared_bytes,
    }


def _geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
    found = _layout(target, problem, config)
    return Geometry(
        grid=(found.clusters * config["split"], 1, 1),
        block=(32 * _warps(found, config), 1, 1),
        shared_bytes=found.shared_bytes,
        overlaps=problem.pdl,
    )


def _scalars(target: Target, problem: LinearProblem, config: Config) -> tuple[int | float, ...]:
    found = _layout(target, problem, config)
    return (
        *matrix_scalars(problem),
        *(found.tile_rows, found.passes),
        *part_scalars(problem, config["split"]),
    )


def _weights(target: Target, problem: LinearProblem, config: Config) -> TensorMap:
    """What is copied of w at a time: a pass's rows of a chunk."""
    found = _layout(target, problem, config)
    return TensorMap(W_POINTER, problem.N, problem.K, found.tile_rows, CHUNK, fetch_bytes=128)


def _weight_scales(target: Target, problem: LinearProblem, config: Config) -> TensorMap:
    """Of a pass's rows, those of the workgroup's part of K; else any map, which is not used."""
    found = _layout(target, problem, config)
    if not found.scale_pitch:
        return _weights(target, problem, config)
    blocks, rows, pitch = problem.K // 32, found.tile_rows, found.scale_pitch
    return TensorMap(
        W_SCALES_POINTER, problem.N, blocks, rows, pitch, only_aligned=True, turned=False
    )


MODULE = Module(
    sources={"sm_90a": "linear/fp8_sm90.cu"},
    symbol="aiter_mx_linear_fp8",
    args=(
        *MATRIX_ARGS,
        Arg("tile_rows", "i32"),
        Arg("passes", "i32"),
        *PART_ARGS,
    ),
    defines=_defines,
    geometry=_geometry,
    scalars=_scalars,
    tensor_maps=(_weights, _weight_scales),
)

FP8 = KernelSpec(
    op="linear",
    backend="hip",
    name="fp8",
    params=PARAMS,
    refusal=_refusal,
    configure=first_of(_candidates),
    candidates=_candidates,
    module=MODULE,
    yields=_yields,
)
