"""The Hopper kernel of the grouped GEMM for 40 to 96 tokens an expert, moe/slabs_sm90.cu."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from aiter_mx.kernels.moe_gemm import wgmma_f16_sm90 as wgmma_f16
from aiter_mx.kernels.moe_gemm.problem import MoeGemmProblem, module
from aiter_mx.kernels.moe_gemm.wgmma_f16_sm90 import CHUNK, SHARED_BYTES, rows_of_block
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
_FEW_ROWS = 40  # of an expert, for which wgmma_f16 is faster


def shared_bytes(problem: MoeGemmProblem, config: Config) -> int:
    """What wgmma_f16 has, and scales of w of this tile and the next, twice as many as are loaded at
    once."""
    scales = 2 * 2 * _GROUPS * _TILES * wgmma_f16.GROUP_ROWS * _SCALE_CHUNKS * 4
    return wgmma_f16.layout_bytes(problem, config, _GROUPS, config["slots"], _SCALE_CHUNKS) + scales


def _refusal(target: Target, problem: MoeGemmProblem) -> str | None:
    if target.arch in MODULE.sources and problem.K % (_SCALE_CHUNKS * CHUNK):
        return f"K={problem.K} is not a multiple of {_SCALE_CHUNKS * CHUNK}"
    return wgmma_f16.refusal(target, problem)


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
        return f"wgmma_f16 is faster for the {problem.rows_of_expert:.0f} rows of an expert"
    most = PARAMS[0].values[-1] * 8
    if rows_of_block(problem) > most:
        return f"wide has room for more than {most} rows of a block"
    if wgmma_f16.candidates(target, problem)[0]["slots"] == 0:
        return "wgmma_f16 has room for all of x"
    return None


def _defines(target: Target, problem: MoeGemmProblem, config: Config) -> Mapping[str, int]:
    shared = shared_bytes(problem, config)
    return wgmma_f16.frame_defines(problem, config, shared, _GROUPS, tiles=_TILES)


def _geometry(target: Target, problem: MoeGemmProblem, config: Config) -> Geometry:
    groups = _GROUPS + wgmma_f16.BRING_GROUPS
    return wgmma_f16.frame_geometry(target, groups, shared_bytes(problem, config))


MODULE = module(
    "slabs", {"sm_90a": "moe/slabs_sm90.cu"}, _defines, _geometry, wgmma_f16.weights_map
)

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
