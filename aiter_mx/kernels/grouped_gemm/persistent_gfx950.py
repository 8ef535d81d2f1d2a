"""The CDNA4 grouped GEMM, csrc/grouped/persistent_gfx950.cu."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.gfx950 import LDS_BYTES
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
    Param,
    as_defines,
    first_of,
    numbers,
)
from aiter_mx.layouts import LAYOUTS as SCALE_LAYOUTS
from aiter_mx.numerics import BLOCK
from aiter_mx.target import Target

PARAMS = (
    Param("tile_m", (32, 64, 128, 160, 256), "rows of a in a tile"),
    Param("tile_n", (128, 256), "features in a tile"),
    Param("swath", (1, 4, 8, 16), "rows of tiles that are gone through column after column"),
    Param("xcds", (1, 8), "dies that tiles are dealt to in runs; 1 deals them one by one"),
)

_ROWS = (32, 64, 128, 256)  # of tiles; those of 160 are for a linear, whose rows they divide evenly

LAYOUTS = ("16x4",)
"""Of scales, besides row-major ones, that the kernel reads."""

_DEPTH = 128  # of K in a step
_WAVES = 4
_RUN_BYTES = 16  # of a row's scales, copied at once
# Of an MI355X: the CDNA4 ISA manual and white paper.
_XCDS = 8
# Of a compute unit, a cycle.
_PRODUCTS_A_CYCLE = 4096
_LDS_BYTES_A_CYCLE = 128
_COPY_BYTES_A_CYCLE = 64  # from L2
# Estimates; docs/kernels/persistent.md has their origin.
_LATENCY_CYCLES = 2000
_COPY_CYCLES = 1000  # until the copies of a step are there
_EPILOGUE_CYCLES = 2600  # of the largest tile
_TILE_CYCLES = 1000  # to find the next tile
_UNEVEN_TILE = (128, 256)
"""Comes last for groups of more rows on average: these are seldom of one size, and largest tiles
take as many in fewer rounds."""
_HALF_TILE = 0.6  # of a tile's time: LDS has more than half to do

# Offsets within a tile are below 2^31, with the farthest row of a step added to one out of range.
MAX_K = 1 << 22
MAX_N = 1 << 21
MAX_ROWS = 1 << 31
MAX_TILES = 1 << 31


def _refusal(target: Target, problem: GroupedGemmProblem) -> str | None:
    if problem.N % BLOCK:
        return f"N={problem.N} is not a multiple of {BLOCK}, the features that a lane stores"
    for name, value, limit in (
        ("K", problem.K, MAX_K),
        ("N", problem.N, MAX_N),
        ("M", problem.M, MAX_ROWS),
        ("G", problem.G, MAX_ROWS),
    ):
        if value >= limit:
            return f"{name}={value} is not below {limit}, as 32-bit offsets within a tile demand"
    tiles = problem.most_tiles(PARAMS[0].values[0]) * -(-problem.N // PARAMS[1].values[0])
    if tiles >= MAX_TILES:
        return f"there are up to {tiles} tiles, and their numbers have 31 bits"
    return None


class _Copied(NamedTuple):
    """What a step's copies and a tile's results depend on, besides the tile.

    Attributes:
        a_layout, b_layout: of scales.
        scale_bytes: what rows of scales start at multiples of.
        a_in_runs: whether row-major scales of a are copied in runs.
        out_bytes: of a result.
    """

    a_layout: str
    b_layout: str
    scale_bytes: int
    a_in_runs: bool
    out_bytes: int


def _copied(problem: GroupedGemmProblem) -> _Copied:
    return _Copied(
        problem.a_scale_layout,
        problem.b_scale_layout,
        _scale_bytes(problem),
        _a_in_runs(problem),
        4 if problem.out_dtype == "fp32" else 2,
    )


@cache
def _lds_bytes(copied: _Copied, tile_m: int, tile_n: int) -> int:
    """What the kernel's ``kLdsBytes`` is."""
    pieces = 4 // copied.scale_bytes
    at_once = _WAVES * 64 // pieces  # rows of scales that the waves copy together
    room = -(-tile_m // 64) * 64 if tile_m > 32 else tile_m  # whole halves of waves
    stage = (room + tile_n) * _DEPTH
    for layout, rows, blocks, in_runs in (
        # a tile of a may begin within a block
        (copied.a_layout, tile_m, tile_m // 16 + 1, copied.a_in_runs),
        (copied.b_layout, tile_n, tile_n // 16, True),
    ):
        if layout == "row_major" and in_runs:
            stage += rows * _RUN_BYTES
        elif layout == "row_major":
            stage += -(-rows // at_once) * at_once * 4 * pieces
        else:
            stage += -(-blocks // _WAVES) * _WAVES * 16 * _DEPTH // BLOCK
    features = tile_n // (2 if tile_m > 32 else 4)
    return 2 * stage + _WAVES * 16 * min(features * copied.out_bytes, 256)


def resident(problem: GroupedGemmProblem, config: Config) -> int:
    """Workgroups that a compute unit holds at once."""
    return _resident(_copied(problem), config["tile_m"], config["tile_n"])


@cache
def _resident(copied: _Copied, tile_m: int, tile_n: int) -> int:
    # Tiles of half this size and less leave each lane half of a SIMD's registers or more.
    by_registers = 2 if tile_m * tile_n <= 128 * 128 else 1
    return min(by_registers, LDS_BYTES // _lds_bytes(copied, tile_m, tile_n))


def _address_cycles(copied: _Copied, tile_m: int, tile_n: int) -> float:
    """Of the copies of a step: one for four lanes in one line, else one for each lane."""
    pieces = 4 // copied.scale_bytes  # lanes of a row of scales
    run_steps = 4 if pieces == 1 else 3
    cycles = 0.0
    for layout, rows, in_runs in (
        (copied.a_layout, tile_m, copied.a_in_runs),
        (copied.b_layout, tile_n, True),
    ):
        cycles += rows * _DEPTH / _COPY_BYTES_A_CYCLE
        if layout != "row_major":
            cycles += rows / 16
        elif in_runs:
            cycles += rows / run_steps
        else:
            cycles += rows * (1 if pieces == 4 else pieces)
    return cycles


@cache
def _step_cycles(copied: _Copied, tile_m: int, tile_n: int) -> float:
    waves_m = 2 if tile_m > 32 else 1
    reads = _DEPTH * (tile_m * _WAVES // waves_m + tile_n * waves_m)
    copies = _DEPTH * (tile_m + tile_n)
    matrix = tile_m * tile_n * _DEPTH / _PRODUCTS_A_CYCLE
    lds = (reads + copies) / _LDS_BYTES_A_CYCLE
    return max(matrix, lds, _address_cycles(copied, tile_m, tile_n))


def _cycles(target: Target, problem: GroupedGemmProblem, copied: _Copied, config: Config) -> float:
    """A bound on a call's time, all groups of one size: docs/kernels/persistent.md."""
    tile_m, tile_n = config["tile_m"], config["tile_n"]
    step = _step_cycles(copied, tile_m, tile_n)
    epilogue = _EPILOGUE_CYCLES * tile_m * tile_n / (256 * 256)
    steps = -(-problem.K // _DEPTH)
    tile = steps * step + epilogue + _TILE_CYCLES
    held = _resident(copied, tile_m, tile_n)
    tiles = min(problem.G, problem.M) * -(-problem.usual_rows // tile_m) * -(-problem.N // tile_n)
    whole_rounds, left = divmod(tiles, target.cu_num * held)
    rounds = float(whole_rounds + (left > 0))
    if left and parts_of_last(config) * left <= target.cu_num * held:
        rounds = whole_rounds + _HALF_TILE
    latency = steps * _COPY_CYCLES + _LATENCY_CYCLES
    return rounds * max(latency, held * tile)


def in_dwords(args: Sequence[Arg]) -> Iterator[Arg]:
    """The arguments; scales, which are the second and fourth, begin with a dword."""
    return (replace(arg, align=4) if at in (1, 3) else arg for at, arg in enumerate(args))


def config_of(tile_m: int, tile_n: int) -> Config:
    """With a tile, in the order that comes first."""
    return {"tile_m": tile_m, "tile_n": tile_n, "swath": 8, "xcds": _XCDS}


def candidates_of(
    target: Target, problem: GroupedGemmProblem, rows: Sequence[int] = _ROWS
) -> list[Config]:
    """Every tile that fits, the one of the least modelled time first, in a few orders each.

    Args:
        rows: that tiles may have.
    """
    tiles = sorted(
        (config_of(m, n) for m in rows for n in PARAMS[1].values),
        key=partial(_cycles, target, problem, _copied(problem)),
    )
    if problem.G > 1 and problem.usual_rows > _UNEVEN_TILE[0]:
        uneven = config_of(*_UNEVEN_TILE)
        tiles.sort(key=lambda tile: tile == uneven)
    orders: tuple[Config, ...] = ({}, {"swath": 4}, {"swath": 1, "xcds": 1})
    return [{**tile, **order} for order in orders for tile in tiles]


def parts_of_last(config: Config) -> int:
    """Workgroups that divide a tile among them where tiles are few: the kernel's ``kHalves``."""
    return 2 if config["tile_m"] * config["tile_n"] == 256 * 256 else 1


def tile_rows(problem: GroupedGemmProblem, config: Config) -> int:
    """Rows that a tile takes: of one group as many as any other, or one more."""
    if problem.G > 1:
        return config["tile_m"]
    tiles = -(-problem.M // config["tile_m"])
    return -(-problem.M // max(tiles, 1)) or config["tile_m"]


def _workgroups(target: Target, problem: GroupedGemmProblem, config: Config) -> int:
    tiles = problem.most_tiles(tile_rows(problem, config)) * -(-problem.N // config["tile_n"])
    most = target.cu_num * resident(problem, config)
    return max(1, min(tiles * parts_of_last(config), most))


def _scale_bytes(problem: GroupedGemmProblem) -> int:
    """What rows of scales start at multiples of."""
    blocks = problem.K // BLOCK
    return 1 if blocks % 2 else 2 if blocks % 4 else 4


def _a_in_runs(problem: GroupedGemmProblem) -> bool:
    """Whether a's scales are row-major and whole dwords in all, and those of several steps copied
    at once.

    One group is a linear's, whose code objects serve every number of rows: it gains 2 % by this at
    most, by the model of time.
    """
    rows = 1 if problem.G == 1 else problem.M
    return problem.a_scale_layout == "row_major" and rows * (problem.K // BLOCK) % 4 == 0


def _whole_steps(problem: GroupedGemmProblem) -> bool:
    """Whether K is whole steps, two at least."""
    return problem.K % _DEPTH == 0 and problem.K > _DEPTH


def _defines(target: Target, problem: GroupedGemmProblem, config: Config) -> Mapping[str, int]:
    wide = {"MX_X_E5M2": 1} if problem.a_format == "e5m2" else {}
    return (wide | unpad_defines(problem)) | {
        **as_defines(config),
        "MX_SCALE_BYTES": _scale_bytes(problem),
        "MX_X_RUNS": int(_a_in_runs(problem)),
        "MX_X_SCALES": SCALE_LAYOUTS[problem.a_scale_layout].code,
        "MX_W_SCALES": SCALE_LAYOUTS[problem.b_scale_layout].code,
        "MX_WHOLE_STEPS": int(_whole_steps(problem)),
        "MX_OUT": DTYPE_CODES[problem.out_dtype],
        "MX_BIAS": DTYPE_CODES[problem.bias],
    }


def _geometry(target: Target, problem: GroupedGemmProblem, config: Config) -> Geometry:
    return Geometry(
        grid=(_workgroups(target, problem, config), 1, 1),
        block=(_WAVES * target.wave_size, 1, 1),
    )


def _scalars(
    target: Target, problem: GroupedGemmProblem, config: Config
) -> tuple[int | float, ...]:
    return (
        *scalars(problem),
        problem.M // problem.G,
        _workgroups(target, problem, config),
        tile_rows(problem, config),
    )


PERSISTENT = declare(
    "grouped_gemm",
    "persistent",
    {"gfx950": "grouped/persistent_gfx950.cu"},
    args=(*in_dwords(ARGS), *numbers("i32", "rows_each", "workgroups", "tile_rows")),
    defines=_defines,
    geometry=_geometry,
    scalars=_scalars,
    refusal=_refusal,
    params=PARAMS,
    configure=first_of(candidates_of),
    candidates=candidates_of,
)
