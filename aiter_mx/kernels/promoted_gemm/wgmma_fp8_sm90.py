"""The Hopper kernel of products with scales for 128 k: csrc/grouped/promoted_sm90.cu."""

from __future__ import annotations

from collections.abc import Mapping

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.promoted_gemm.problem import ARGS, PromotedGemmProblem, scalars
from aiter_mx.kernels.sm90 import CHUNK
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    Config,
    Geometry,
    Param,
    TensorMap,
    first_of,
    place_of,
)
from aiter_mx.numerics import BLOCK
from aiter_mx.target import Target

PARAMS = (
    Param("tile_m", (64, 128, 256), "rows of a in a tile, of 128 rows of b"),
    Param("cluster", (1, 2), "workgroups with the same rows of a, which each brings a part of"),
)

ACCUMULATION_ERROR = 2.0**-9
"""Of the sum of the magnitudes of 128 products, of random payloads, which are added up with about
14 bits; MOST_ACCUMULATION_ERROR bounds it for any: 127 of them may be cut off beside the first."""
MOST_ACCUMULATION_ERROR = 2.0**-6

_TILE_N = 128
_STAGES = {64: 4, 128: 6, 256: 4}  # by tile_m: what shared memory has room for
_RESIDENT = {64: 2, 128: 1, 256: 1}  # workgroups on an SM, so that one begins while another ends
_THREADS = 3 * 128
_MAX_TURNS = 1 << 31


def _refusal(target: Target, problem: PromotedGemmProblem) -> str | None:
    if target.exact_sums:
        return "the fp8 matrix unit adds with about 14 bits"
    if problem.out_dtype == "fp32":
        return "the fp8 matrix unit adds with about 14 bits, which fp32 results would show"
    if problem.N % BLOCK:
        return f"N={problem.N} is not a multiple of {BLOCK}"
    for name, rows in (("a", problem.M), ("b", problem.G * problem.N)):
        if rows >= _MAX_TURNS - 256:  # boxes may start past the last one
            return f"{name} has {rows} rows, and their numbers have 31 bits"
    return None


def _candidates(target: Target, problem: PromotedGemmProblem) -> list[Config]:
    """The least tiles that hold a usual group, then others."""
    rows = problem.groups.usual_rows
    best = 64 if rows <= 64 else 128 if rows <= 128 else 256
    every = [{"tile_m": tile, "cluster": cluster} for cluster in (2, 1) for tile in _STAGES]
    return sorted(every, key=lambda config: config != {"tile_m": best, "cluster": 2})


def _shared_bytes(config: Config) -> int:
    return _STAGES[config["tile_m"]] * (config["tile_m"] + _TILE_N) * CHUNK


def _defines(target: Target, problem: PromotedGemmProblem, config: Config) -> Mapping[str, int]:
    return {
        "MX_OUT": DTYPE_CODES[problem.out_dtype],
        "MX_TILE_M": config["tile_m"],
        "MX_CLUSTER": config["cluster"],
        "MX_STAGES": _STAGES[config["tile_m"]],
        "MX_SHARED_BYTES": _shared_bytes(config),
    }


def _geometry(target: Target, problem: PromotedGemmProblem, config: Config) -> Geometry:
    size = config["cluster"]
    tiles = problem.groups.most_tiles(config["tile_m"]) * -(-problem.N // (size * _TILE_N))
    clusters = max(1, min(target.cu_num * _RESIDENT[config["tile_m"]] // size, tiles))
    return Geometry(
        grid=(clusters * size, 1, 1),
        block=(_THREADS, 1, 1),
        shared_bytes=_shared_bytes(config),
        overlaps=True,
    )


def _rows_of_a(target: Target, problem: PromotedGemmProblem, config: Config) -> TensorMap:
    """What a workgroup brings of a step of a."""
    rows = config["tile_m"] // config["cluster"]
    return TensorMap(place_of(ARGS, "xq"), problem.M, problem.K, rows, CHUNK)


def _rows_of_b(target: Target, problem: PromotedGemmProblem, config: Config) -> TensorMap:
    fetch = 128 if config["tile_m"] == 64 else 256  # few tiles share a row of b
    rows = problem.G * problem.N
    return TensorMap(place_of(ARGS, "wq"), rows, problem.K, _TILE_N, CHUNK, fetch_bytes=fetch)


WGMMA_FP8 = declare(
    "promoted_gemm",
    "wgmma_fp8",
    {"sm_90a": "grouped/promoted_sm90.cu"},
    args=ARGS,
    defines=_defines,
    geometry=_geometry,
    scalars=lambda target, problem, config: scalars(problem),
    tensor_maps=(_rows_of_a, _rows_of_b),
    refusal=_refusal,
    params=PARAMS,
    configure=first_of(_candidates),
    candidates=_candidates,
)
