"""The Hopper kernel of the grouped GEMM for tens of tokens an expert, moe_gemm_wide_sm90.cu."""

from __future__ import annotations

from collections.abc import Mapping

from aiter_mx.kernels.moe_gemm.problem import ACTIVATION_CODES, ARGS, MoeGemmProblem, scalars
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
    Param("warps", (4, 8), "warps of a workgroup that add, each with 32 rows of w"),
    Param("col_tiles", (4, 8), "tiles of 8 rows of x that a workgroup takes at a time"),
    Param("depth", (3, 4, 5), "times 128 k that are in the ring"),
    Param("groups", (1, 2), "workgroups of an SM"),
)

_CHUNK = 128  # k
_WARP_ROWS = 32  # of w
_PIECE = 64  # ids of a block that are looked up at a time
_MAX_ITEMS = 1 << 31
_SHARED_BYTES = 227 * 1024  # of an SM, for workgroups of 1 KiB more each: compute capability 9.0
_OTHER_WARPS = 4  # of a workgroup
_WARPS = 8  # of an SM that add: as its registers are shared out


def shared_bytes(problem: MoeGemmProblem, config: Config) -> int:
    """Of a workgroup: ring, x in fp16, queue, maxima, units and flags."""
    warps, cols, depth = config["warps"], config["col_tiles"] * 8, config["depth"]
    slot = (warps * _WARP_ROWS + cols) * (_CHUNK + 4)
    queue = depth * (cols * 8 + 16)
    return depth * (slot + 28) + 2 * cols * _CHUNK * 2 + queue + (2 * warps + 4) * cols * 4 + 80


def _items(problem: MoeGemmProblem, config: Config) -> int:
    pieces = problem.blocks * -(-problem.block_m // _PIECE)
    return pieces * -(-problem.N // (config["warps"] * _WARP_ROWS))


def _refusal(target: Target, problem: MoeGemmProblem) -> str | None:
    if target.arch not in MODULE.sources:
        return f"no such kernel for {target.arch}, only for {' and '.join(MODULE.sources)}"
    if problem.K % _CHUNK:
        return f"K={problem.K} is not a multiple of {_CHUNK}"
    if _items(problem, {"warps": 4}) >= _MAX_ITEMS:
        return f"{problem.blocks} blocks by N={problem.N} are more tiles than 31 bits count"
    return None


def _fits(problem: MoeGemmProblem, config: Config) -> bool:
    return (
        config["warps"] * config["groups"] == _WARPS
        and (shared_bytes(problem, config) + 1024) * config["groups"] <= _SHARED_BYTES
    )


def _candidates(target: Target, problem: MoeGemmProblem) -> list[Config]:
    fitting = [config for config in combinations(PARAMS) if _fits(problem, config)]
    cols = 4 if problem.block_m <= 32 else 8
    return sorted(fitting, key=lambda c: (c["col_tiles"] != cols, c["warps"], -c["groups"]))


def _configure(target: Target, problem: MoeGemmProblem) -> Config:
    return _candidates(target, problem)[0]


def _defines(target: Target, problem: MoeGemmProblem, config: Config) -> Mapping[str, int]:
    return {
        "MX_WARPS": config["warps"],
        "MX_COL_TILES": config["col_tiles"],
        "MX_DEPTH": config["depth"],
        "MX_GROUPS": config["groups"],
        "MX_OUT": DTYPE_CODES.get(problem.out_dtype, 0),
        "MX_ACTIVATION": ACTIVATION_CODES[problem.activation],
        "MX_INTERLEAVED": int(problem.layout == "interleaved"),
        "MX_SHARED_BYTES": shared_bytes(problem, config),
    }


def _geometry(target: Target, problem: MoeGemmProblem, config: Config) -> Geometry:
    groups = min(target.cu_num * config["groups"], _items(problem, config))
    return Geometry(
        grid=(max(1, groups), 1, 1),
        block=((config["warps"] + _OTHER_WARPS) * target.wave_size, 1, 1),
        shared_bytes=shared_bytes(problem, config),
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
)
