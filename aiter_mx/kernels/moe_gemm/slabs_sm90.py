"""The Hopper kernel of the grouped GEMM for 40 to 96 tokens an expert, moe_gemm_slabs_sm90.cu."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from aiter_mx.kernels.moe_gemm import boxes_sm90 as boxes
from aiter_mx.kernels.moe_gemm.boxes_sm90 import CHUNK, SHARED_BYTES, rows_of_block
from aiter_mx.kernels.moe_gemm.problem import MoeGemmProblem, module
from aiter_mx.kernels.spec import (
    Config,
    Geometry,
    KernelSpec,
    Param,
    combinations,
    first_of,
)
from aiter_mx.target import Target

PARAMS = (
    Param("col_tiles", (8, 10, 12), "tiles of 8 rows of x that a workgroup takes at a time"),
    Param("depth", (3, 4, 5, 6), "times 64 rows by 128 k of w that a warpgroup has in flight"),
    Param("slots", (2, 3), "times 128 k of x that are ready"),
    Param("ahead", (2, 3, 4), "times 128 k of x that are on their way"),
)

_GROUPS, _TILES = 2, 2  # warpgroups that add, and times 64 rows of w of each
_SCALE_CHUNKS = 4  # times 128 k whose scales are loaded at once
_FEW_ROWS = 40  # of an expert, for which boxes is faster


def shared_bytes(problem: MoeGemmProblem, config: Config) -> int:
    """Of a workgroup: what boxes has, and scales of w of this tile and the next, twice as many as
    are loaded at once."""
    scales = 2 * 2 * _GROUPS * _TILES * boxes.GROUP_ROWS * _SCALE_CHUNKS * 4
    return boxes.layout_bytes(problem, config, _GROUPS, config["slots"], _SCALE_CHUNKS) + scales


def _refusal(target: Target, problem: MoeGemmProblem) -> str | None:
    if target.arch in MODULE.sources and problem.K % (_SCALE_CHUNKS * CHUNK):
        return f"K={problem.K} is not a multiple of {_SCALE_CHUNKS * CHUNK}"
    return boxes.refusal(target, problem)


@lru_cache(maxsize=64)
def _candidates(target: Target, problem: MoeGemmProblem) -> list[Config]:
    """Those that fit, the ones that did well on an H200 first."""
    rows = rows_of_block(problem)
    tiles = next((t for t in PARAMS[0].values if rows <= t * 8), PARAMS[0].values[-1])
    return sorted(
        (c for c in combinations(PARAMS) if shared_bytes(problem, c) <= SHARED_BYTES),
        key=lambda c: (
            abs(c["col_tiles"] - tiles),
            abs(c["depth"] - 4),
            abs(c["slots"] - (3 if tiles == 10 else 2)),
            abs(c["ahead"] - 3),
        ),
    )[:24]


def _yields(target: Target, problem: MoeGemmProblem) -> str | None:
    if problem.rows_of_expert < _FEW_ROWS:
        return f"boxes is faster for the {problem.rows_of_expert:.0f} rows of an expert"
    most = PARAMS[0].values[-1] * 8
    if rows_of_block(problem) > most:
        return f"wide has room for more than {most} rows of a block"
    if boxes.candidates(target, problem)[0]["slots"] == 0:
        return "boxes has room for all of x"
    return None


def _defines(target: Target, problem: MoeGemmProblem, config: Config) -> Mapping[str, int]:
    shared = shared_bytes(problem, config)
    return boxes.frame_defines(problem, config, shared, _GROUPS, tiles=_TILES)


def _geometry(target: Target, problem: MoeGemmProblem, config: Config) -> Geometry:
    groups = _GROUPS + boxes.BRING_GROUPS
    return boxes.frame_geometry(target, groups, shared_bytes(problem, config))


MODULE = module({"sm_90a": "moe_gemm_slabs_sm90.cu"}, _defines, _geometry, boxes.weights_map)

SLABS = KernelSpec(
    op="moe_gemm",
    backend="hip",
    name="slabs",
    params=PARAMS,
    refusal=_refusal,
    configure=first_of(_candidates),
    candidates=_candidates,
    module=MODULE,
    yields=_yields,
)
