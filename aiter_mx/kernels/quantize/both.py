"""Quantisation along rows and columns at once on Hopper, csrc/quantize_both_sm90.cu."""

from __future__ import annotations

from collections.abc import Mapping

from aiter_mx.kernels.quantize.problem import BLOCK, POINTERS, QuantizeProblem
from aiter_mx.kernels.quantize.rows import BITS
from aiter_mx.kernels.quantize.tiles import tile_refusal, tile_scalars, tiles_of, variant_defines
from aiter_mx.kernels.spec import (
    Arg,
    Config,
    Geometry,
    KernelSpec,
    Module,
    Param,
    combinations,
)
from aiter_mx.target import Target

PARAMS = (
    Param("across", (1, 2, 4, 8), "tiles side by side of a block"),
    Param("down", (1, 2, 4, 8), "tiles below each other of a block"),
)
_TILE_ROWS = 128
_THREADS = 256  # of a team
_TEAMS = 2
_LINE_BYTES = 256  # of x in a tile
_DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_MOST_SHARED_BYTES = 227 << 10


def _refusal(target: Target, problem: QuantizeProblem) -> str | None:
    if target.arch not in MODULE.sources:
        return f"no both kernel for {target.arch}, only for {' and '.join(MODULE.sources)}"
    if problem.to != "both":
        return f"both makes blocks both ways, not to={problem.to}"
    if problem.groups:
        return "both takes no groups"
    return tile_refusal(problem)


def _yields(target: Target, problem: QuantizeProblem) -> str | None:
    """Where an H200 was faster with others: scales in tiles, few blocks, many of e4m3."""
    if problem.layout != "row_major":
        return f"hip/both is slower with scales as {problem.layout}"
    down, across = _tiles(problem)
    tiles = down * across * problem.matrices
    if not 4 * target.cu_num <= tiles < 32 * target.cu_num:
        return f"hip/both is slower with {tiles} tiles"
    return None


def _shared_bytes(problem: QuantizeProblem, config: Config) -> int:
    """Tiles under way, and ``Shared`` in the source."""
    columns = _LINE_BYTES // _DTYPE_BYTES[problem.dtype]
    across, down = config["across"], config["down"]
    payload = _TILE_ROWS * columns * BITS[problem.format] // 8
    row_scales = down * _TILE_ROWS * across * columns // BLOCK
    column_scales = across * columns * (down + 1) * _TILE_ROWS // BLOCK
    flags = 32
    return _TEAMS * (_TILE_ROWS * _LINE_BYTES + payload) + 2 * (row_scales + column_scales) + flags


def _configure(target: Target, problem: QuantizeProblem) -> Config:
    down, across = _tiles(problem)
    enough = down * across * problem.matrices >= 8 * target.cu_num  # for a block on each SM
    return {"across": 2, "down": 4 if problem.format == "e2m1" and enough else 2}


def _takes(problem: QuantizeProblem, config: Config) -> bool:
    some = config["across"] * config["down"] >= _TEAMS
    return some and _shared_bytes(problem, config) <= _MOST_SHARED_BYTES


def _candidates(target: Target, problem: QuantizeProblem) -> list[Config]:
    return [config for config in combinations(PARAMS) if _takes(problem, config)]


def _defines(target: Target, problem: QuantizeProblem, config: Config) -> Mapping[str, int]:
    return {
        **variant_defines(problem),
        "MX_TILE_ROWS": _TILE_ROWS,
        "MX_TEAMS": _TEAMS,
        "MX_RESIDENT": 1,
        "MX_ACROSS": config["across"],
        "MX_DOWN": config["down"],
        "MX_SHARED_BYTES": _shared_bytes(problem, config),
    }


def _tiles(problem: QuantizeProblem) -> tuple[int, int]:
    return tiles_of(problem, {"rows": _TILE_ROWS})


def _geometry(target: Target, problem: QuantizeProblem, config: Config) -> Geometry:
    down, across = _tiles(problem)
    blocks = problem.matrices * -(-down // config["down"]) * -(-across // config["across"])
    return Geometry(
        grid=(min(blocks, target.cu_num), 1, 1),
        block=(_THREADS, _TEAMS, 1),
        shared_bytes=_shared_bytes(problem, config),
        overlaps=True,
    )


def _scalars(target: Target, problem: QuantizeProblem, config: Config) -> tuple[int | float, ...]:
    return tile_scalars(problem, _tiles(problem))


MODULE = Module(
    sources={"sm_90a": "quantize_both_sm90.cu"},
    symbol="aiter_mx_quantize_both",
    args=(
        *POINTERS,
        *(Arg(name, "i32") for name in ("M", "N", "matrices", "x_rows")),
        *(Arg(name, "i32") for name in ("tiles_down", "tiles_across")),
        *(Arg(name, "i32") for name in ("scale_rows", "scale_columns")),
        *(Arg(name, "i32") for name in ("column_scale_rows", "column_scale_columns")),
    ),
    defines=_defines,
    geometry=_geometry,
    scalars=_scalars,
)

BOTH = KernelSpec(
    op="quantize",
    backend="hip",
    name="both",
    params=PARAMS,
    refusal=_refusal,
    configure=_configure,
    candidates=_candidates,
    module=MODULE,
    yields=_yields,
)
