"""Quantisation both ways on Hopper, scales by way of memory: csrc/quantize/staged_sm90.cu."""

from __future__ import annotations

from collections.abc import Mapping

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.quantize.problem import POINTERS, QuantizeProblem
from aiter_mx.kernels.quantize.tiles import tile_refusal, tiles_of, variant_defines
from aiter_mx.kernels.spec import (
    Arg,
    Config,
    Geometry,
    Module,
    Param,
    combinations,
    numbers,
)
from aiter_mx.numerics import BLOCK
from aiter_mx.target import Target

PARAMS = (
    Param("resident", (2, 3, 4), "workgroups of an SM that registers must leave room for"),
    Param("lines", (4, 8), "of scales, that a wave of the second launch brings to their places"),
)
_TILE = {"rows": 128}
_TILE_SCALE_BYTES = {"bf16": 1024, "fp16": 1024, "fp32": 512}  # of rows and of columns
_PLACE_BYTES = 16  # of the rows of x of a tile
_SCALE_BYTES = {"bf16": 4, "fp16": 4, "fp32": 2}  # of a row of a tile
_THREADS, _LANES = 256, 32
_AHEAD_BYTES = _THREADS * 8 * 16  # csrc/quantize/tile.h
_MOST_GRID_Y = 65535
_MANY_SCALE_BYTES = 4 << 20


def _refusal(target: Target, problem: QuantizeProblem) -> str | None:
    if problem.to != "both":
        return f"staged makes blocks both ways, not to={problem.to}"
    if problem.layout != "row_major":
        return f"staged stores scales row-major, not as {problem.layout}"
    if max(_tiles(problem)[0], problem.matrices) > _MOST_GRID_Y:
        return f"staged takes up to {_MOST_GRID_Y} tiles of 128 rows, and as many matrices"
    return tile_refusal(problem)


def _tiles(problem: QuantizeProblem) -> tuple[int, int]:
    """Down and across."""
    return tiles_of(problem, _TILE)


def _yields(target: Target, problem: QuantizeProblem) -> str | None:
    """Where an H200 was faster with others: a second launch does not pay for few tiles."""
    down, across = _tiles(problem)
    if (tiles := down * across * problem.matrices) <= 3 * target.cu_num:
        return f"hip/staged is slower with {tiles} tiles"
    return None


def _configure(target: Target, problem: QuantizeProblem) -> Config:
    # Scales are found one by one for fp16, for which a third workgroup leaves no room.
    resident = 2 if problem.dtype == "fp16" and problem.format != "e2m1" else 3
    many = _workspace_bytes(target, problem, {}) >= _MANY_SCALE_BYTES
    return {"resident": resident, "lines": 8 if many else 4}


def _defines(target: Target, problem: QuantizeProblem, config: Config) -> Mapping[str, int]:
    return {
        **variant_defines(problem),
        "MX_TILE_ROWS": _TILE["rows"],
        "MX_RESIDENT": config["resident"],
    }


def _geometry(target: Target, problem: QuantizeProblem, config: Config) -> Geometry:
    down, across = _tiles(problem)
    return Geometry(
        grid=(across, down, problem.matrices),
        block=(_THREADS, 1, 1),
        shared_bytes=_AHEAD_BYTES,
        overlaps=True,
    )


def _scalars(target: Target, problem: QuantizeProblem, config: Config) -> tuple[int | float, ...]:
    wide = int(problem.offsets == "int64")
    return (problem.out_rows, problem.N, problem.M, problem.groups, wide)


def _scales_defines(target: Target, problem: QuantizeProblem, config: Config) -> Mapping[str, int]:
    tiles = _defines(target, problem, config)
    return {**tiles, "MX_RESIDENT": 1, "MX_LINES": config["lines"]}


def _lanes(size: int) -> int:
    """Lanes that store a line of so many blocks' scales, 4 bytes each."""
    words = -(-size // (4 * BLOCK))
    return -(-words // _LANES) * _LANES if words > _LANES else 1 << (words - 1).bit_length()


def _scales_geometry(target: Target, problem: QuantizeProblem, config: Config) -> Geometry:
    down, across = _tiles(problem)
    columns = BLOCK * _SCALE_BYTES[problem.dtype]
    lines = down * _TILE["rows"] * _lanes(problem.N) + across * columns * _lanes(problem.out_rows)
    lanes = problem.matrices * lines // config["lines"]
    return Geometry(grid=(-(-lanes // _THREADS), 1, 1), block=(_THREADS, 1, 1), overlaps=True)


def _scales_scalars(
    target: Target, problem: QuantizeProblem, config: Config
) -> tuple[int | float, ...]:
    lanes = (_lanes(problem.N), _lanes(problem.out_rows))
    return (problem.out_rows, problem.N, problem.matrices, *_tiles(problem), *lanes)


def _workspace_bytes(target: Target, problem: QuantizeProblem, config: Config) -> int:
    down, across = _tiles(problem)
    places = _PLACE_BYTES * down if problem.padded == "columns" else 0
    return problem.matrices * down * across * _TILE_SCALE_BYTES[problem.dtype] + places


def _args(*names: str) -> tuple[Arg, ...]:
    return (*POINTERS, Arg("staged", "pointer", "rw"), *numbers("i32", *names))


TILES_MODULE = Module(
    sources={"sm_90a": "quantize/staged_sm90.cu"},
    symbol="aiter_mx_quantize_staged",
    args=_args("M", "N", "x_rows", "groups", "wide"),
    defines=_defines,
    geometry=_geometry,
    scalars=_scalars,
)

STAGED = declare(
    "quantize",
    "staged",
    {"sm_90a": "quantize/scales_sm90.cu"},
    symbol="aiter_mx_quantize_scales",
    args=_args(
        *("M", "N", "matrices", "tiles_down", "tiles_across", "lanes_of_row", "lanes_of_column")
    ),
    defines=_scales_defines,
    geometry=_scales_geometry,
    scalars=_scales_scalars,
    refusal=_refusal,
    params=PARAMS,
    configure=_configure,
    candidates=lambda target, problem: combinations(PARAMS),
    before=(TILES_MODULE,),
    yields=_yields,
    workspace_bytes=_workspace_bytes,
)
