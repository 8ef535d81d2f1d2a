"""The CDNA4 gradient of a grouped GEMM's weights: csrc/grouped/persistent_gfx950.cu, MX_WGRAD."""

from __future__ import annotations

from collections.abc import Mapping

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.grouped_gemm import persistent_gfx950 as forward
from aiter_mx.kernels.grouped_gemm.problem import GroupedGemmProblem
from aiter_mx.kernels.grouped_wgrad.problem import (
    ARGS,
    INDEX_BYTES,
    GroupedWgradProblem,
    in_pieces,
)
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    Composition,
    Config,
    Geometry,
    Parts,
    first_of,
    numbers,
)
from aiter_mx.layouts import LAYOUTS
from aiter_mx.target import Target

PARAMS = forward.PARAMS
_LEAST_COLUMNS = 8192  # which take the smallest tiles some 10 us


def _product(problem: GroupedWgradProblem) -> GroupedGemmProblem:
    """A grouped product with the same tiles, each of an average group's steps."""
    depth = max(128, problem.M // problem.G // 128 * 128)
    return GroupedGemmProblem(
        M=problem.G * problem.N, N=problem.K, K=depth, G=problem.G, out_dtype=problem.out_dtype
    )


def _refusal(target: Target, problem: GroupedWgradProblem) -> str | None:
    for name, value, limit in (
        ("M", problem.M, forward.MAX_K),
        ("K", problem.K, forward.MAX_N),
        ("N", problem.N, forward.MAX_N),
        ("G", problem.G, forward.MAX_ROWS),
    ):
        if value >= limit:
            return f"{name}={value} is not below {limit}, as 32-bit offsets within a tile demand"
    tiles = _tiles(problem, {"tile_m": 32, "tile_n": 128})
    if tiles >= forward.MAX_TILES:
        return f"there are {tiles} tiles, and their numbers have 31 bits"
    return None


def _tiles(problem: GroupedWgradProblem, config: Config) -> int:
    return problem.G * -(-problem.N // config["tile_m"]) * -(-problem.K // config["tile_n"])


def _candidates(target: Target, problem: GroupedWgradProblem) -> list[Config]:
    """Those of the grouped product with the same tiles."""
    return forward.candidates_of(target, _product(problem))


def _defines(target: Target, problem: GroupedWgradProblem, config: Config) -> Mapping[str, int]:
    row_major = LAYOUTS["row_major"].code
    wide = {"MX_X_E5M2": 1} if problem.grad_format == "e5m2" else {}
    pieces = {"MX_PIECES": problem.pieces} if problem.pieces > 1 else {}
    return (
        wide
        | pieces
        | {
            "MX_WGRAD": 1,
            "MX_ACCUMULATE": problem.accumulate,
            "MX_TILE_M": config["tile_m"],
            "MX_TILE_N": config["tile_n"],
            "MX_SWATH": config["swath"],
            "MX_XCDS": config["xcds"],
            "MX_SCALE_BYTES": 4,
            "MX_X_RUNS": 0,
            "MX_X_SCALES": row_major,
            "MX_W_SCALES": row_major,
            "MX_WHOLE_STEPS": 0,
            "MX_OUT": DTYPE_CODES[problem.out_dtype],
            "MX_BIAS": DTYPE_CODES["none"],
        }
    )


def _at_once(target: Target, problem: GroupedWgradProblem, config: Config) -> int:
    return target.cu_num * forward.resident(_product(problem), config)


def _parts(target: Target, problem: GroupedWgradProblem, config: Config) -> Parts:
    at_once = _at_once(target, problem, config)
    return in_pieces(problem, _tiles(problem, config), at_once, _LEAST_COLUMNS)


def _workgroups(target: Target, problem: GroupedWgradProblem, config: Config) -> int:
    parts = _tiles(problem, config) * forward.parts_of_last(config)
    return max(1, min(parts, _at_once(target, problem, config)))


def _geometry(target: Target, problem: GroupedWgradProblem, config: Config) -> Geometry:
    return Geometry(
        grid=(_workgroups(target, problem, config), 1, 1), block=(4 * target.wave_size, 1, 1)
    )


def _scalars(
    target: Target, problem: GroupedWgradProblem, config: Config
) -> tuple[int | float, ...]:
    """The forward kernel's, to which grad is x, x is w, and the rows of all groups are K."""
    sizes = (problem.N, problem.K, problem.M, problem.G)
    options = (0, INDEX_BYTES[problem.index], DTYPE_CODES["none"])
    return (*sizes, *options, 0, _workgroups(target, problem, config), config["tile_m"])


PERSISTENT = declare(
    "grouped_wgrad",
    "persistent",
    {"gfx950": "grouped/persistent_gfx950.cu"},
    args=(
        *ARGS,
        *numbers("i64", "M", "N", "K", "G"),
        *numbers(
            "i32", "layout", "index_bytes", "bias_kind", "rows_each", "workgroups", "tile_rows"
        ),
    ),
    defines=_defines,
    geometry=_geometry,
    scalars=_scalars,
    refusal=_refusal,
    params=PARAMS,
    configure=first_of(_candidates),
    candidates=_candidates,
    symbol="aiter_mx_grouped_gemm_persistent",
    composed=Composition(_parts, "aiter_mx.joined:added_up"),
)
