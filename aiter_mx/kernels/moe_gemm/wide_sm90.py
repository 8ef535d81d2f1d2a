"""The Hopper kernel of the grouped GEMM for tens of tokens an expert, moe_gemm_wide_sm90.cu."""

from __future__ import annotations

from collections.abc import Mapping

from aiter_mx.kernels.moe_gemm.problem import ACTIVATION_CODES, ARGS, MoeGemmProblem, scalars
from aiter_mx.kernels.moe_gemm.sm90 import MAX_SIDE
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    Config,
    Geometry,
    KernelSpec,
    Module,
    Param,
    combinations,
)
from aiter_mx.target import Target

PARAMS = (
    Param("col_tiles", (4, 8), "tiles of 8 rows of x that a workgroup takes at a time"),
    Param("depth", (3, 4, 5), "times 128 k that are in the ring"),
)

_CHUNK = 128  # k
_ADDING, _WARPS = 8, 16  # of a workgroup: warps that add, and all
_ROWS = _ADDING * 32  # of w in a tile
_PIECE = 64  # ids of a block that are looked up at a time
_MAX_ITEMS = 1 << 31
_SHARED_BYTES = 226 * 1024  # of a workgroup: compute capability 9.0


def shared_bytes(problem: MoeGemmProblem, config: Config) -> int:
    """Of a workgroup: ring, x in fp16, queue, maxima, units, flags and barriers."""
    cols, depth = config["col_tiles"] * 8, config["depth"]
    slot = (_ROWS + cols) * (_CHUNK + 4 * _scale_chunks(problem, config))
    entry = cols * 8 + 16
    halves = cols * (_CHUNK * 2 + 4) + 24
    return depth * (slot + entry + 24) + 2 * halves + (2 * _ADDING + 4) * cols * 4 + 16


def _scale_chunks(problem: MoeGemmProblem, config: Config) -> int:
    """Chunks whose scales are copied at once, as rows' alignment and registers allow."""
    most = (4, 2, 1) if config["col_tiles"] == 4 else (2, 1)
    return next(count for count in most if problem.K % (count * _CHUNK) == 0)


def _scale_alignment_bytes(problem: MoeGemmProblem) -> int:
    """Of a copy, four scales a chunk, in the configuration that has the largest."""
    return max(4 * _scale_chunks(problem, config) for config in combinations(PARAMS))


def _items(problem: MoeGemmProblem) -> int:
    pieces = problem.blocks * -(-problem.block_m // _PIECE)
    return pieces * -(-problem.N // _ROWS)


def _refusal(target: Target, problem: MoeGemmProblem) -> str | None:
    if target.arch not in MODULE.sources:
        return f"no such kernel for {target.arch}, only for {' and '.join(MODULE.sources)}"
    if problem.K % _CHUNK:
        return f"K={problem.K} is not a multiple of {_CHUNK}"
    if max(problem.N, problem.K) >= MAX_SIDE:
        return f"N={problem.N} and K={problem.K} must be below {MAX_SIDE}"
    if _items(problem) >= _MAX_ITEMS:
        return f"{problem.blocks} blocks by N={problem.N} are more tiles than 31 bits count"
    return None


def _candidates(target: Target, problem: MoeGemmProblem) -> list[Config]:
    fitting = [c for c in combinations(PARAMS) if shared_bytes(problem, c) <= _SHARED_BYTES]
    cols = 4 if problem.block_m <= 32 else 8
    depth = 4 if cols == 4 else 3
    return sorted(fitting, key=lambda c: (c["col_tiles"] != cols, abs(c["depth"] - depth)))


def _configure(target: Target, problem: MoeGemmProblem) -> Config:
    return _candidates(target, problem)[0]


def _defines(target: Target, problem: MoeGemmProblem, config: Config) -> Mapping[str, int]:
    return {
        "MX_COL_TILES": config["col_tiles"],
        "MX_DEPTH": config["depth"],
        "MX_SCALE_CHUNKS": _scale_chunks(problem, config),
        "MX_OUT": DTYPE_CODES.get(problem.out_dtype, 0),
        "MX_ACTIVATION": ACTIVATION_CODES[problem.activation],
        "MX_INTERLEAVED": int(problem.layout == "interleaved"),
        "MX_SHARED_BYTES": shared_bytes(problem, config),
    }


def _geometry(target: Target, problem: MoeGemmProblem, config: Config) -> Geometry:
    return Geometry(
        grid=(max(1, min(target.cu_num, _items(problem))), 1, 1),
        block=(_WARPS * target.wave_size, 1, 1),
        shared_bytes=shared_bytes(problem, config),
        overlaps=True,
    )


MODULE = Module(
    sources={"sm_90a": "moe_gemm_wide_sm90.cu"},
    symbol="aiter_mx_moe_gemm",
    args=ARGS,
    defines=_defines,
    geometry=_geometry,
    scalars=lambda target, problem, config: scalars(problem),
)

WIDE = KernelSpec(
    op="moe_gemm",
    backend="hip",
    name="wide",
    params=PARAMS,
    refusal=_refusal,
    configure=_configure,
    candidates=_candidates,
    module=MODULE,
    scale_alignment_bytes=_scale_alignment_bytes,
)
