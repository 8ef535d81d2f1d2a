"""Quantisation along rows, columns or both, and into every layout, csrc/quantize/tiles*.cu."""

from __future__ import annotations

from collections.abc import Mapping

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.quantize.problem import GROUP_ROWS, POINTERS, QuantizeProblem
from aiter_mx.kernels.quantize.rows import MODES, OF_FORMATS
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    MAX_GRID_X,
    Config,
    Geometry,
    Param,
    combinations,
    numbers,
)
from aiter_mx.layouts import LAYOUTS, padded_shape
from aiter_mx.numerics import BLOCK, DTYPE_BYTES
from aiter_mx.target import Target

PARAMS = (
    Param("rows", (128, 256), "rows of a tile; groups take 128"),
    Param("resident", (2, 3, 4), "workgroups of a compute unit that registers must leave room for"),
    Param("steps", (1, 2, 4, 8), "tiles of a workgroup: side by side; sm_90a: below each other"),
    Param("cluster", (1, 2, 4, 8), "workgroups that gather scales of rows; gfx950: 1"),
)
_THREADS = 256
_AHEAD_BYTES = _THREADS * 8 * 16  # csrc/quantize/tile.h
_TILE_BYTES = 128 * 256  # of x
_MAX_COLUMNS = 1 << 22  # a tile's rows lie within 2^31 bytes
_MAX_ROWS = 1 << 31


def _refusal(target: Target, problem: QuantizeProblem) -> str | None:
    return tile_refusal(problem)


def tile_refusal(problem: QuantizeProblem) -> str | None:
    """Why no kernel that works on tiles takes a problem of such a size."""
    if problem.N >= _MAX_COLUMNS:
        return f"tiles takes less than {_MAX_COLUMNS} columns, not N={problem.N}"
    if problem.out_rows >= _MAX_ROWS:
        return f"tiles takes less than {_MAX_ROWS} rows, not M={problem.M}"
    return None


def _configure(target: Target, problem: QuantizeProblem) -> Config:
    """What an H200 was fastest with at 64 and 256 MB; shorter strips where there are few tiles."""
    config = {"rows": 128, "resident": 2, "steps": 4, "cluster": 1}
    down, across = tiles_of(problem, config)
    tiles, at_once = down * across * problem.matrices, 2 * target.cu_num
    if target.arch == "sm_90a":
        plain = problem.format != "e2m1" and not problem.groups
        if problem.to == "rows":
            config |= {"resident": 4, "steps": 1, "cluster": 8}
        elif problem.to == "columns" and not problem.groups:
            config |= {"rows": 256, "resident": 3, "steps": 1}
        elif problem.layout != "row_major" and problem.format != "e2m1" and problem.dtype == "bf16":
            config |= {"resident": 3, "steps": 1}
        elif problem.layout == "row_major" and tiles <= 3 * target.cu_num:
            config |= {"steps": 1}
        elif plain and tiles < 16 * at_once:
            config["steps"] = 8  # clusters do not fill all SMs, which few of them feel
        else:
            config["cluster"] = 8
        config["cluster"] = _cluster(target, problem, config)
        while config["cluster"] > across:
            config["cluster"] //= 2
    while config["steps"] > 1 and tiles < (config["steps"] - 1) * at_once:
        config["steps"] //= 2
    return config


def _candidates(target: Target, problem: QuantizeProblem) -> list[Config]:
    return [
        config
        for config in combinations(PARAMS)
        if (config["rows"] == GROUP_ROWS or not problem.groups)
        and config["cluster"] == _cluster(target, problem, config)
    ]


def _cluster(target: Target, problem: QuantizeProblem, config: Config) -> int:
    """Workgroups that gather: of scales that would leave in pieces, where there are clusters."""
    gathers = target.arch == "sm_90a" and problem.to != "columns" and problem.layout == "row_major"
    return config["cluster"] if gathers else 1


def variant_defines(problem: QuantizeProblem) -> dict[str, int]:
    """What csrc/quantize/tile.h is told of a problem."""
    defines = {
        "MX_IN": DTYPE_CODES[problem.dtype],
        **OF_FORMATS[problem.format],
        "MX_MODE": MODES[problem.mode],
        "MX_TO_ROWS": int(problem.to != "columns"),
        "MX_TO_COLUMNS": int(problem.to != "rows"),
        "MX_SQUARE": int(problem.block == "32x32"),
        "MX_GROUPED": int(problem.groups > 0),
        "MX_LAYOUT": LAYOUTS[problem.layout].code,
        "MX_MAX_GRID_X": MAX_GRID_X,
    }
    return defines | {"MX_ROWS_AS_READ": 1} if problem.padded == "columns" else defines


def _defines(target: Target, problem: QuantizeProblem, config: Config) -> Mapping[str, int]:
    defines = variant_defines(problem) | {
        "MX_TILE_ROWS": config["rows"],
        "MX_RESIDENT": config["resident"],
    }
    if target.arch == "sm_90a":  # where gfx950 has an argument, and no clusters
        defines |= {"MX_STEPS": config["steps"], "MX_CLUSTER": _cluster(target, problem, config)}
    return defines


def _scale_shapes(problem: QuantizeProblem) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of the rows' scales and the columns', as padded."""
    M, N = problem.out_rows, problem.N
    return (
        padded_shape(problem.rows_along, N // BLOCK, problem.layout),
        padded_shape(N, -(-M // BLOCK), problem.layout),
    )


def tiles_of(problem: QuantizeProblem, config: Config) -> tuple[int, int]:
    """Tiles down and across that cover a matrix and the padding of its scales."""
    rows, columns = [problem.out_rows], [problem.N]
    of_rows, of_columns = _scale_shapes(problem)
    if problem.to != "columns":
        rows.append(of_rows[0])
        columns.append(of_rows[1] * BLOCK)
    if problem.to != "rows":
        rows.append(of_columns[1] * BLOCK)
        columns.append(of_columns[0])
    tile_columns = _TILE_BYTES // config["rows"] // DTYPE_BYTES[problem.dtype]
    return -(-max(rows) // config["rows"]), -(-max(columns) // tile_columns)


def _geometry(target: Target, problem: QuantizeProblem, config: Config) -> Geometry:
    down, across = tiles_of(problem, config)
    if target.arch == "sm_90a":  # strips go down, in clusters side by side
        cluster = _cluster(target, problem, config)
        strips = -(-down // config["steps"]) * -(-across // cluster) * cluster
    else:
        strips = down * -(-across // config["steps"])
    groups = problem.matrices * strips
    return Geometry(
        grid=(min(groups, MAX_GRID_X), -(-groups // MAX_GRID_X), 1),
        block=(_THREADS, 1, 1),
        shared_bytes=_AHEAD_BYTES if target.arch == "sm_90a" else 0,
        overlaps=target.arch == "sm_90a",
    )


def tile_scalars(problem: QuantizeProblem, tiles: tuple[int, int]) -> tuple[int, ...]:
    """Sizes of the matrices, tiles down and across, sizes of the scales."""
    of_rows, of_columns = _scale_shapes(problem)
    sizes = (problem.out_rows, problem.N, problem.matrices, problem.M)
    return (*sizes, *tiles, *of_rows, *of_columns)


def _scalars(target: Target, problem: QuantizeProblem, config: Config) -> tuple[int | float, ...]:
    wide = int(problem.offsets == "int64")
    tiles = tiles_of(problem, config)
    return (*tile_scalars(problem, tiles), config["steps"], problem.groups, wide)


TILES = declare(
    "quantize",
    "tiles",
    {"gfx950": "quantize/tiles.cu", "sm_90a": "quantize/tiles_sm90.cu"},
    args=(
        *POINTERS,
        *numbers("i32", "M", "N", "matrices", "x_rows", "tiles_down", "tiles_across"),
        *numbers("i32", "scale_rows", "scale_columns"),
        *numbers("i32", "column_scale_rows", "column_scale_columns"),
        *numbers("i32", "steps", "groups", "wide"),
    ),
    defines=_defines,
    geometry=_geometry,
    scalars=_scalars,
    refusal=_refusal,
    params=PARAMS,
    configure=_configure,
    candidates=_candidates,
)
