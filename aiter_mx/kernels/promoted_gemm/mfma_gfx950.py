"""The CDNA4 kernel of products with scales for 128 k: csrc/grouped/promoted_gfx950.cu."""

from __future__ import annotations

from collections.abc import Mapping

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.gfx950 import LDS_BYTES
from aiter_mx.kernels.promoted_gemm.problem import ARGS, PromotedGemmProblem, scalars
from aiter_mx.kernels.spec import DTYPE_CODES, Arg, Config, Geometry, Param, first_of
from aiter_mx.numerics import BLOCK
from aiter_mx.target import Target

PARAMS = (Param("tile_m", (64, 128, 256), "rows of a in a tile, of 128 rows of b"),)

_TILE_N, _STEP, _STAGES, _WAVES = 128, 128, 3, 4
_SCALE_BYTES = 1024  # of a stage
_MOST_K = (1 << 31) // 512  # offsets within a tile have 31 bits
_MOST_ROWS = 1 << 31


def _refusal(target: Target, problem: PromotedGemmProblem) -> str | None:
    if problem.N % BLOCK:
        return f"N={problem.N} is not a multiple of {BLOCK}"
    if problem.K >= _MOST_K:
        return f"K={problem.K} is not below {_MOST_K}, as 32-bit offsets within a tile demand"
    if problem.M >= _MOST_ROWS or _tiles(problem, {"tile_m": 64}) >= _MOST_ROWS:
        return f"numbers of rows and tiles have 31 bits, and a has {problem.M} rows"
    return None


def _tiles(problem: PromotedGemmProblem, config: Config) -> int:
    return problem.groups.most_tiles(config["tile_m"]) * -(-problem.N // _TILE_N)


def _candidates(target: Target, problem: PromotedGemmProblem) -> list[Config]:
    """The least tiles that hold a usual group, then others."""
    rows = problem.groups.usual_rows
    best = 64 if rows <= 64 else 128 if rows <= 128 else 256
    return [{"tile_m": tile} for tile in sorted((64, 128, 256), key=lambda tile: tile != best)]


def _defines(target: Target, problem: PromotedGemmProblem, config: Config) -> Mapping[str, int]:
    return {"MX_OUT": DTYPE_CODES[problem.out_dtype], "MX_TILE_M": config["tile_m"]}


def _workgroups(target: Target, problem: PromotedGemmProblem, config: Config) -> int:
    stage = (config["tile_m"] + _TILE_N) * _STEP + _SCALE_BYTES
    resident = LDS_BYTES // (_STAGES * stage)
    return max(1, min(_tiles(problem, config), target.cu_num * resident))


def _geometry(target: Target, problem: PromotedGemmProblem, config: Config) -> Geometry:
    groups = _workgroups(target, problem, config)
    return Geometry(grid=(groups, 1, 1), block=(_WAVES * target.wave_size, 1, 1))


def _scalars(target: Target, problem: PromotedGemmProblem, config: Config) -> tuple[int, ...]:
    room = problem.M // problem.G if problem.layout == "masked" else 0
    return (*scalars(problem), room, _workgroups(target, problem, config))


MFMA = declare(
    "promoted_gemm",
    "mfma",
    {"gfx950": "grouped/promoted_gfx950.cu"},
    args=(*ARGS, Arg("room", "i64"), Arg("workgroups", "i64")),
    defines=_defines,
    geometry=_geometry,
    scalars=_scalars,
    refusal=_refusal,
    params=PARAMS,
    configure=first_of(_candidates),
    candidates=_candidates,
)
