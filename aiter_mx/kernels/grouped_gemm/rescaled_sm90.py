"""The Hopper grouped GEMM over fp8 with a scale for 128 k.

csrc/grouped/rescale_groups_sm90.h is ahead of csrc/grouped/rescaled_sm90.cu. A launch lists tiles
of x, and another puts four blocks of 32 k of x under one scale where none of them loses by it what
a result would show. The third does so to w, tile after tile, while it multiplies both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.grouped_gemm.problem import ARGS as POINTERS_AND_SIZES
from aiter_mx.kernels.grouped_gemm.problem import GroupedGemmProblem
from aiter_mx.kernels.grouped_gemm.problem import scalars as problem_scalars
from aiter_mx.kernels.sm90 import CHUNK, up
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    MAX_INT,
    Arg,
    Config,
    Geometry,
    Module,
    Param,
    TensorMap,
    combinations,
    numbers,
    place_of,
)
from aiter_mx.numerics import BLOCK
from aiter_mx.target import Target

PARAMS = (Param("ring_mib", (16, 32, 64, 128), "of w that is rescaled ahead of the products"),)

MAX_GROUPS = 4096
# From where on rescaling pays on an H200: rows of a group on average, and the least N and K that
# were measured to gain.
LEAST_ROWS, _LEAST_N, _LEAST_K = 512, 1536, 2048
_LONG_K, _LEAST_ROWS_OF_SHORT_K = 2560, 1024  # of plain groups: routed rows gain from 512 on
ROWS = 128  # of a tile, of x and of w
_STAGES, _RAW_BLOCKS = 5, 4  # what shared memory has room for
_SHARED_BYTES = (2 * _STAGES + _RAW_BLOCKS) * ROWS * CHUNK
_THREADS, _RESCALE_THREADS, _LIST_THREADS = 4 * 128, 256, 256
_MOST_CTAS = 132
_USUAL_MIB = 64
_TILE_BYTES = 8  # of the list's
_PANEL = 16  # tiles of w that share tiles of x: with 8 of these about as many as there are CTAs


def across(problem: GroupedGemmProblem) -> int:
    """Tiles of w of a group; those of 64 features of gate and up each have 128 rows as well."""
    return -(-problem.N // ROWS)


def _room_for(ring_mib: int, K: int) -> int:
    """Tiles of w whose payload the ring has room for."""
    return max(2, (ring_mib << 20) // (ROWS * K))


def ring_tiles(problem: GroupedGemmProblem, config: Config) -> int:
    """Tiles of w in the ring."""
    return min(problem.G * across(problem), _room_for(config["ring_mib"], problem.K))


def panel_tiles(problem: GroupedGemmProblem, config: Config) -> int:
    """Tiles of w of a panel: while one is multiplied, there is room for the next one."""
    return max(1, min(_PANEL, ring_tiles(problem, config) // 2))


def most_tiles(problem: GroupedGemmProblem) -> int:
    """The most tiles of x that there can be."""
    return problem.most_tiles(ROWS)


def steps_of(problem: GroupedGemmProblem) -> int:
    """Of 128 k."""
    return -(-problem.K // CHUNK)


def _operand_tiles(problem: GroupedGemmProblem, config: Config) -> int:
    """Of 128 rows, of x and of the ring."""
    return most_tiles(problem) + ring_tiles(problem, config)


def workspace_bytes(target: Target, problem: GroupedGemmProblem, config: Config) -> int:
    """See ``GroupWorkspace`` in csrc/grouped/rescaled_groups_sm90.h."""
    tiles = _operand_tiles(problem, config)
    words = steps_of(problem) * up(tiles * (ROWS + 2), 4)
    words += up(4 * problem.G + 1, 2) + 2 + 2 * problem.G * across(problem)
    return tiles * ROWS * problem.K + 4 * words + _TILE_BYTES * most_tiles(problem)


def refusal(target: Target, problem: GroupedGemmProblem) -> str | None:
    """Why the kernel does not cover a problem, or None."""
    if target.exact_sums:
        return "the fp8 matrix unit adds with about 14 bits"
    if problem.out_dtype == "fp32":
        return "the fp8 matrix unit adds with about 14 bits, which fp32 results would show"
    if problem.a_format != "e4m3":
        return f"rows in {problem.a_format} are not rescaled, only those in e4m3"
    if problem.layout not in ("jagged", "masked"):
        return f"its groups have one range of rows each, the same in out, not {problem.layout} ones"
    return _size_refusal(problem)


def _size_refusal(problem: GroupedGemmProblem) -> str | None:
    M, N, G = problem.M, problem.N, problem.G
    if not M or not N:
        return f"M={M} and N={N}: there is nothing to multiply"
    if G > MAX_GROUPS:
        return f"G={G} is above {MAX_GROUPS}, the most groups that it lists"
    if N % BLOCK:
        return f"N={N} is not a multiple of {BLOCK}"
    if M > MAX_INT:
        return f"M={M}: rows are counted in 31 bits"
    of_x, of_w = most_tiles(problem), G * across(problem)
    most = of_x + max(ring_tiles(problem, config) for config in combinations(PARAMS))
    if most * (ROWS + 2) * steps_of(problem) > MAX_INT:
        return "the scales of both operands are counted in 31 bits"
    if of_w * max(2, steps_of(problem)) > MAX_INT - _MOST_CTAS or G * N > MAX_INT - ROWS:
        return f"b has {of_w} tiles of {steps_of(problem)} steps, and these are counted in 31 bits"
    results = of_x * across(problem)
    if results > MAX_INT - _MOST_CTAS:
        return f"there are up to {results} tiles of results, and they are counted in 31 bits"
    if G * -(-M // ROWS) > MAX_INT:  # of groups that overlap, which are counted before they are cut
        return f"{G} groups of up to {M} rows: tiles are counted in 31 bits"
    return None


def why_not(rows: float, N: int, K: int, least: int = LEAST_ROWS) -> str | None:
    """Why rescaling does not pay for so many rows of a group, or None."""
    if N < _LEAST_N:
        return f"N={N} is below {_LEAST_N}, too few features for x to be rescaled first"
    if K < _LEAST_K:
        return f"K={K} is below {_LEAST_K}, and what tiles begin and end with takes too long"
    if rows < least:
        return f"{rows:.0f} rows of a group are fewer than the {least} that pay for rescaling"
    return None


def yields(target: Target, problem: GroupedGemmProblem) -> str | None:
    """Why other kernels come first."""
    least = LEAST_ROWS if problem.K >= _LONG_K else _LEAST_ROWS_OF_SHORT_K
    return why_not(problem.M / problem.G, problem.N, problem.K, least)


def configure(target: Target, problem: object) -> Config:
    """Without a table."""
    return {"ring_mib": _USUAL_MIB}


def candidates(target: Target, problem: GroupedGemmProblem) -> list[Config]:
    """One for each number of tiles, the usual one first."""
    values = sorted(PARAMS[0].values, key=lambda mib: (mib != _USUAL_MIB, mib))
    found = {ring_tiles(problem, {"ring_mib": mib}): mib for mib in reversed(values)}
    return [{"ring_mib": mib} for mib in sorted(found.values(), key=values.index)]


SIZES_OF_TILES = numbers("i32", "most_tiles", "room", "panel")
_POINTERS = sum(arg.kind == "pointer" for arg in POINTERS_AND_SIZES)
# Where K is a multiple of 128, four scales of a row are loaded at once.
SCALE_ALIGNMENT = 4
ARGS = (
    *(
        replace(arg, align=SCALE_ALIGNMENT) if arg.name == "ws" else arg
        for arg in POINTERS_AND_SIZES[:_POINTERS]
    ),
    Arg("workspace", "pointer", "rw"),
    *POINTERS_AND_SIZES[_POINTERS:],
    *SIZES_OF_TILES,
)


def sizes_of_tiles(problem: GroupedGemmProblem, config: Config) -> tuple[int, ...]:
    """The values of ``SIZES_OF_TILES``."""
    return most_tiles(problem), ring_tiles(problem, config), panel_tiles(problem, config)


def defines(target: Target, problem: GroupedGemmProblem, config: Config) -> Mapping[str, int]:
    """Of the code object that all launches share."""
    return {
        "MX_OUT": DTYPE_CODES[problem.out_dtype],
        "MX_STAGES": _STAGES,
        "MX_RAW_BLOCKS": _RAW_BLOCKS,
        "MX_SHARED_BYTES": _SHARED_BYTES,
    }


def _scalars(
    target: Target, problem: GroupedGemmProblem, config: Config
) -> tuple[int | float, ...]:
    return *problem_scalars(problem), *sizes_of_tiles(problem, config)


def _list_geometry(target: Target, problem: GroupedGemmProblem, config: Config) -> Geometry:
    return Geometry(grid=(1, 1, 1), block=(_LIST_THREADS, 1, 1), overlaps=True)


def _rescale_geometry(target: Target, problem: GroupedGemmProblem, config: Config) -> Geometry:
    grid = (most_tiles(problem) * steps_of(problem), 1, 1)
    return Geometry(grid=grid, block=(_RESCALE_THREADS, 1, 1), overlaps=True)


def _geometry(target: Target, problem: GroupedGemmProblem, config: Config) -> Geometry:
    tiles = most_tiles(problem) * across(problem)  # a row of x is of one group
    return Geometry(
        grid=(max(1, min(target.cu_num, _MOST_CTAS, tiles)), 1, 1),
        block=(_THREADS, 1, 1),
        shared_bytes=_SHARED_BYTES,
        overlaps=True,
    )


def _operands(target: Target, problem: GroupedGemmProblem, config: Config) -> TensorMap:
    rows = _operand_tiles(problem, config) * ROWS
    return TensorMap(place_of(ARGS, "workspace"), rows, problem.K, ROWS, CHUNK)


def _weights(target: Target, problem: GroupedGemmProblem, config: Config) -> TensorMap:
    return TensorMap(place_of(ARGS, "wq"), problem.G * problem.N, problem.K, ROWS, CHUNK)


_SOURCES = {"sm_90a": "grouped/rescaled_sm90.cu"}
LAUNCHES = (
    Module(_SOURCES, "aiter_mx_grouped_rescale_list", ARGS, defines, _list_geometry, _scalars),
    Module(_SOURCES, "aiter_mx_grouped_rescale", ARGS, defines, _rescale_geometry, _scalars),
    Module(
        _SOURCES,
        "aiter_mx_grouped_rescaled",
        ARGS,
        defines,
        _geometry,
        _scalars,
        (_operands, _weights),
    ),
)
_PRODUCT = LAUNCHES[-1]
RESCALED = declare(
    "grouped_gemm",
    "rescaled",
    _PRODUCT.sources,
    symbol=_PRODUCT.symbol,
    args=ARGS,
    defines=defines,
    geometry=_PRODUCT.geometry,
    scalars=_PRODUCT.scalars,
    tensor_maps=_PRODUCT.tensor_maps,
    before=LAUNCHES[:-1],
    workspace_bytes=workspace_bytes,
    refusal=refusal,
    params=PARAMS,
    configure=configure,
    candidates=candidates,
    yields=yields,
)
