"""The Hopper grouped GEMM: csrc/grouped/list_sm90.h, then csrc/grouped/persistent_sm90.cu."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.grouped_gemm.problem import (
    ARGS,
    GroupedGemmProblem,
    scalars,
    unpad_defines,
)
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    Arg,
    Config,
    Geometry,
    Module,
    Param,
    TensorMap,
    numbers,
    place_of,
)
from aiter_mx.numerics import BLOCK
from aiter_mx.target import Target

PARAMS = (Param("order", (2, 4, 8, 16), "tiles of tokens that share a tile of b before the next"),)

TILE_N = 256  # of the two workgroups of a cluster
SLAB_ROWS = 64
MOST_SLABS = 4  # of a tile
UNIT_K = 64
BOX_K = 2 * UNIT_K  # of b, that is copied at a time
_STAGES = 5
_STAGE_BYTES = MOST_SLABS * SLAB_ROWS * UNIT_K * 2
_W_STAGES = 3
_W_STAGE_BYTES = TILE_N // 2 * BOX_K
_STAGING_BYTES = 2 * 8 << 10  # results on their way out, of each consumer
SHARED_BYTES = _STAGES * _STAGE_BYTES + _W_STAGES * _W_STAGE_BYTES + _STAGING_BYTES
BOX_ROWS = 32  # of results
THREADS = 3 * 128
_LIST_THREADS = 256
HEADER_BYTES = 256
_TILE_ENTRY_BYTES = 24
CHUNKS_OF_WORD = 16  # of 128 k, that 8 bytes tell of
CHUNK_K = 128
_MORE_TILES = 16  # that come of cutting full ones
MAX_TURNS = 1 << 31
MAX_K = 1 << 24  # of a tile: places of its pieces of a in bf16 have 31 bits


def _refusal(target: Target, problem: GroupedGemmProblem) -> str | None:
    if problem.N % BLOCK:
        return f"N={problem.N} is not a multiple of {BLOCK}"
    if problem.K >= MAX_K:
        return f"K={problem.K} is not below {MAX_K}, as 32-bit offsets within a tile demand"
    turns = _most_tiles(problem) * pairs(problem)
    if turns >= MAX_TURNS or _most_slabs(problem) >= MAX_TURNS:
        return f"there are up to {turns} tiles, and their numbers have 31 bits"
    if problem.G * problem.N > MAX_TURNS - TILE_N:  # boxes may start past the last one
        return f"b has {problem.G * problem.N} rows, and their numbers have 31 bits"
    if problem.N * result_bytes(problem) >= MAX_TURNS:
        return f"N={problem.N}: places in a row of results, in bytes, have 31 bits"
    return None


def result_bytes(problem: GroupedGemmProblem) -> int:
    return 4 if problem.out_dtype == "fp32" else 2


def pairs(problem: GroupedGemmProblem) -> int:
    return -(-problem.N // TILE_N)


def _most_tiles(problem: GroupedGemmProblem) -> int:
    return problem.most_tiles(MOST_SLABS * SLAB_ROWS) + _MORE_TILES


def _most_slabs(problem: GroupedGemmProblem) -> int:
    return max(1, problem.most_tiles(SLAB_ROWS))


def _clusters(target: Target, problem: GroupedGemmProblem) -> int:
    return max(1, min(target.cu_num // 2, _most_slabs(problem) * pairs(problem)))


def _configure(target: Target, problem: GroupedGemmProblem) -> Config:
    """Clusters begin with little more than 8 tiles of x where features are 7 or 8 tiles. Order 8
    expands 16 ahead of them, and where x is deep these leave the L2 before they are used."""
    return {"order": 4 if pairs(problem) in (7, 8) and problem.K > 4096 else 8}


def _candidates(target: Target, problem: GroupedGemmProblem) -> list[Config]:
    """The few that were within 5 % of the best anywhere."""
    first = _configure(target, problem)
    return [first, *({"order": order} for order in (8, 4, 16) if order != first["order"])]


def _round_up(size: int, to: int) -> int:
    return -(-size // to) * to


def _workspace_bytes(target: Target, problem: GroupedGemmProblem, config: Config) -> int:
    """See ``Workspace`` in csrc/grouped/tiles_sm90.h."""
    words = -(-problem.K // (CHUNK_K * CHUNKS_OF_WORD))
    before_x = HEADER_BYTES + _most_tiles(problem) * (_TILE_ENTRY_BYTES + 8 * words)
    slab_bytes = SLAB_ROWS * _round_up(problem.K, UNIT_K) * 2
    before_x += problem.G * problem.N // 8  # a bit for each row of b
    return _round_up(before_x, 1024) + _most_slabs(problem) * slab_bytes


def _scalars(
    target: Target, problem: GroupedGemmProblem, config: Config
) -> tuple[int | float, ...]:
    return (
        *scalars(problem),
        _most_tiles(problem),
        _most_slabs(problem),
        pairs(problem),
        _clusters(target, problem),
    )


_POINTERS = sum(arg.kind == "pointer" for arg in ARGS)
_ARGS = (
    # The first row's scales begin at an even address, as MX_SCALES_APART takes for granted.
    *(replace(arg, align=2 if arg.name == "ws" else 1) for arg in ARGS[:_POINTERS]),
    Arg("workspace", "pointer", "rw"),
    *ARGS[_POINTERS:],
    *numbers("i64", "most_tiles", "most_slabs", "pairs"),
    Arg("clusters", "i32"),
)


def _list_geometry(target: Target, problem: GroupedGemmProblem, config: Config) -> Geometry:
    return Geometry(grid=(1, 1, 1), block=(_LIST_THREADS, 1, 1), overlaps=True)


def defines(target: Target, problem: GroupedGemmProblem, config: Config) -> Mapping[str, int]:
    wide = {"MX_X_E5M2": 1} if problem.a_format == "e5m2" else {}
    return (wide | unpad_defines(problem)) | {
        "MX_OUT": DTYPE_CODES[problem.out_dtype],
        "MX_ORDER": config["order"],
        "MX_STAGES": _STAGES,
        "MX_W_STAGES": _W_STAGES,
        "MX_SHARED_BYTES": SHARED_BYTES,
        # Scales of w are loaded in pairs where those of each row are even in number. The first
        # row's then begin at an even address, whatever the caller's: see _ARGS.
        "MX_SCALES_APART": problem.K // BLOCK % 2,
    }


def _weights(target: Target, problem: GroupedGemmProblem, config: Config) -> TensorMap:
    """What the product copies of b at a time: a workgroup's rows of 128 k."""
    return TensorMap(place_of(ARGS, "wq"), problem.G * problem.N, problem.K, TILE_N // 2, BOX_K)


def _results(target: Target, problem: GroupedGemmProblem, config: Config) -> TensorMap:
    """What it stores at a time of 16-bit results: 64 features of 32 tokens."""
    row_bytes = problem.N * result_bytes(problem)
    return TensorMap(place_of(ARGS, "y"), problem.rows_of_out, row_bytes, BOX_ROWS, 128, True)


def _geometry(target: Target, problem: GroupedGemmProblem, config: Config) -> Geometry:
    return Geometry(
        grid=(2 * _clusters(target, problem), 1, 1),
        block=(THREADS, 1, 1),
        shared_bytes=SHARED_BYTES,
        overlaps=True,
    )


_SOURCES = {"sm_90a": "grouped/persistent_sm90.cu"}
LIST = Module(
    sources=_SOURCES,  # of the product's code object
    symbol="aiter_mx_grouped_gemm_list",
    args=_ARGS,
    defines=defines,
    geometry=_list_geometry,
    scalars=_scalars,
)

PERSISTENT = declare(
    "grouped_gemm",
    "persistent",
    _SOURCES,
    args=_ARGS,
    defines=defines,
    geometry=_geometry,
    scalars=_scalars,
    tensor_maps=(_weights, _results),
    refusal=_refusal,
    params=PARAMS,
    configure=_configure,
    candidates=_candidates,
    before=(LIST,),
    workspace_bytes=_workspace_bytes,
)
