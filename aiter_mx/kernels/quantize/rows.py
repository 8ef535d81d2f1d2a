"""Quantisation along rows with row-major scales, csrc/quantize/rows.cu."""

from __future__ import annotations

from collections.abc import Mapping

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.quantize.problem import GROUP_ROWS, POINTERS, QuantizeProblem
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    MAX_GRID_X,
    Config,
    Geometry,
    Param,
    combinations,
    numbers,
)
from aiter_mx.numerics import BLOCK
from aiter_mx.target import Target

PARAMS = (
    Param("waves", (1, 2, 4, 8), "waves of a workgroup"),
    Param("steps", (1, 2, 4, 8, 16), "steps of a wave, one block a lane each"),
    Param("resident", (1, 2, 4), "workgroups of a compute unit that registers must leave room for"),
)
OF_FORMATS = {
    "e4m3": {"MX_BITS": 8},
    "e5m2": {"MX_BITS": 8, "MX_E5M2": 1},
    "e2m1": {"MX_BITS": 4},
}
MODES = {"rceil": 0, "floor": 1, "even": 2}  # csrc/include/common/quantize.h


def _refusal(target: Target, problem: QuantizeProblem) -> str | None:
    if problem.to != "rows" or problem.block != "1x32":
        return f"rows makes blocks along rows alone, not to={problem.to}, block={problem.block}"
    if problem.layout != "row_major":
        return f"rows stores scales row-major, not as {problem.layout}"
    return None


def _configure(target: Target, problem: QuantizeProblem) -> Config:
    # With groups a workgroup first finds its tile; more steps make that worth while.
    if target.arch == "gfx950":
        return {"waves": 4, "steps": 4 if problem.groups else 1, "resident": 4}
    if problem.format == "e2m1":
        return {"waves": 4, "steps": 2, "resident": 4}
    return {"waves": 8, "steps": 2 if problem.groups else 1, "resident": 4}


def _candidates(target: Target, problem: QuantizeProblem) -> list[Config]:
    return [
        config
        for config in combinations(PARAMS)
        if config["waves"] * config["resident"] * target.wave_size <= 1024
    ]


def _defines(target: Target, problem: QuantizeProblem, config: Config) -> Mapping[str, int]:
    return {
        "MX_IN": DTYPE_CODES[problem.dtype],
        **OF_FORMATS[problem.format],
        "MX_MODE": MODES[problem.mode],
        "MX_GROUPED": int(problem.groups > 0),
        "MX_WAVES": config["waves"],
        "MX_RESIDENT": config["resident"],
        "MX_MAX_GRID_X": MAX_GRID_X,
    }


def _spans(target: Target, problem: QuantizeProblem, config: Config) -> tuple[int, int, int]:
    """Blocks of a workgroup, workgroups of a tile of grouped rows, and all workgroups."""
    span = config["waves"] * target.wave_size * config["steps"]
    blocks_per_row = problem.N // BLOCK
    if not problem.groups:
        return span, 1, -(-problem.matrices * problem.M * blocks_per_row // span)
    per_tile = -(-GROUP_ROWS * blocks_per_row // span)
    return span, per_tile, per_tile * (problem.out_rows // GROUP_ROWS)


def _geometry(target: Target, problem: QuantizeProblem, config: Config) -> Geometry:
    _, _, groups = _spans(target, problem, config)
    return Geometry(
        grid=(min(groups, MAX_GRID_X), -(-groups // MAX_GRID_X), 1),
        block=(config["waves"] * target.wave_size, 1, 1),
        carveout_bytes=problem.carveout_bytes,
    )


def _scalars(target: Target, problem: QuantizeProblem, config: Config) -> tuple[int | float, ...]:
    span, per_tile, _ = _spans(target, problem, config)
    blocks_per_row = problem.N // BLOCK
    blocks = problem.matrices * problem.out_rows * blocks_per_row
    return (
        blocks,
        blocks_per_row,
        span,
        per_tile,
        problem.M,
        problem.groups,
        int(problem.offsets == "int64"),
    )


ROWS = declare(
    "quantize",
    "rows",
    {"gfx950": "quantize/rows.cu", "sm_90a": "quantize/rows.cu"},
    args=(
        *POINTERS,
        *numbers("i64", "blocks", "blocks_per_row", "span", "spans_per_tile", "x_rows"),
        *numbers("i32", "groups", "wide"),
    ),
    defines=_defines,
    geometry=_geometry,
    scalars=_scalars,
    refusal=_refusal,
    params=PARAMS,
    configure=_configure,
    candidates=_candidates,
)
