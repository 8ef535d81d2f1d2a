"""The Hopper kernel of the grouped GEMM for tens of tokens an expert, moe/wide_sm90.cu."""

from __future__ import annotations

from collections.abc import Mapping

from aiter_mx.kernels.moe_gemm.mma_ring_sm90 import MAX_SIDE
from aiter_mx.kernels.moe_gemm.problem import (
    MoeGemmProblem,
    module,
    sm90_defines,
)
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
    Param("col_tiles", (4, 8, 12, 16), "tiles of 8 rows of x that a workgroup takes at a time"),
    Param("groups", (2, 3), "warpgroups of a workgroup that add, with 64 rows of w each"),
    Param("depth", (1, 2, 3, 4), "times 128 k of w that are in flight"),
)

_CHUNK = 128  # k
_GROUP_ROWS = 64  # of w
_SLOTS = {4: 4, 8: 5, 12: 4, 16: 3}  # chunks of x that are ready, by col_tiles
_AHEAD = {4: 4, 8: 5, 12: 4, 16: 3}  # and on their way
_ENTRIES = 8  # of the queue
_MAX_ITEMS = 1 << 31
_SHARED_BYTES = 227 * 1024  # of a workgroup: compute capability 9.0


def shared_bytes(problem: MoeGemmProblem, config: Config) -> int:
    """Of a workgroup: x in bf16 and as fetched, the queue, flags of rows of w, maxima, barriers."""
    tiles, groups = config["col_tiles"], config["groups"]
    cols = tiles * 8
    ready = _SLOTS[tiles] * (cols * _CHUNK * 2 + 16)
    fetched = _AHEAD[tiles] * cols * (_CHUNK + 16)
    maxima = 32 * groups * (2 if problem.activation == "none" else cols)
    flags = groups * _GROUP_ROWS * 4
    return ready + fetched + _ENTRIES * (12 * cols + 32) + flags + maxima


def _fits(config: Config) -> bool:
    """Whether registers hold what a thread that adds has in flight."""
    registers = 52 + config["col_tiles"] * 4 + config["depth"] * 18
    return registers <= (144 if config["groups"] == 3 else 208)


def _items(problem: MoeGemmProblem, config: Config) -> int:
    piece = max(64, config["col_tiles"] * 8)  # ids of a block that are looked up at a time
    pieces = problem.blocks * -(-problem.block_m // piece)
    return pieces * -(-problem.N // (config["groups"] * _GROUP_ROWS))


def _refusal(target: Target, problem: MoeGemmProblem) -> str | None:
    if target.arch not in MODULE.sources:
        return f"no such kernel for {target.arch}, only for {' and '.join(MODULE.sources)}"
    if problem.K % _CHUNK:
        return f"K={problem.K} is not a multiple of {_CHUNK}"
    if max(problem.N, problem.K) >= MAX_SIDE:
        return f"N={problem.N} and K={problem.K} must be below {MAX_SIDE}"
    if _items(problem, {"col_tiles": 4, "groups": 2}) >= _MAX_ITEMS:
        return f"{problem.blocks} blocks by N={problem.N} are more tiles than 31 bits count"
    return None


def _candidates(target: Target, problem: MoeGemmProblem) -> list[Config]:
    """All that fit, the ones that did well on an H200 first."""
    rows = problem.rows_of_expert
    most = min(problem.block_m, rows + 2 * rows**0.5)  # of most blocks
    cols = next((c for c in (4, 8, 12) if most <= c * 8), 16)
    depth = {4: 4 if problem.K >= 16 * _CHUNK else 3, 8: 2, 12: 1, 16: 1}[cols]
    return sorted(
        filter(_fits, combinations(PARAMS)),
        key=lambda c: (c["col_tiles"] != cols, -c["groups"], abs(c["depth"] - depth)),
    )


def _defines(target: Target, problem: MoeGemmProblem, config: Config) -> Mapping[str, int]:
    return {
        **sm90_defines(problem),
        "MX_COL_TILES": config["col_tiles"],
        "MX_GROUPS": config["groups"],
        "MX_DEPTH": config["depth"],
        "MX_SLOTS": _SLOTS[config["col_tiles"]],
        "MX_AHEAD": _AHEAD[config["col_tiles"]],
        "MX_WHOLE": int(problem.K % (config["depth"] * _CHUNK) == 0),
        "MX_SHARED_BYTES": shared_bytes(problem, config),
    }


def _geometry(target: Target, problem: MoeGemmProblem, config: Config) -> Geometry:
    return Geometry(
        grid=(max(1, min(target.cu_num, _items(problem, config))), 1, 1),
        block=((config["groups"] + 1) * 4 * target.wave_size, 1, 1),
        shared_bytes=shared_bytes(problem, config),
        overlaps=True,
    )


MODULE = module("wide", {"sm_90a": "moe/wide_sm90.cu"}, _defines, _geometry)

WIDE = KernelSpec(
    op="moe_gemm",
    backend="hip",
    name="wide",
    params=PARAMS,
    refusal=_refusal,
    configure=first_of(_candidates),
    candidates=_candidates,
    module=MODULE,
)
