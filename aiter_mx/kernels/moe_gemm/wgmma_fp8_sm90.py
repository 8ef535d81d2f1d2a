"""The Hopper kernel of the grouped GEMM for 6 to 36 tokens an expert, moe/wgmma_fp8_sm90.cu."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from aiter_mx.kernels.moe_gemm import wgmma_f16_sm90 as wgmma_f16
from aiter_mx.kernels.moe_gemm.problem import MoeGemmProblem
from aiter_mx.kernels.moe_gemm.reblock_sm90 import declare_reblocking
from aiter_mx.kernels.search import by_distance
from aiter_mx.kernels.sm90 import CHUNK, GROUP_ROWS, SHARED_BYTES
from aiter_mx.kernels.spec import (
    Config,
    Geometry,
    Param,
)
from aiter_mx.target import Target

PARAMS = (
    Param("col_tiles", (4, 6), "tiles of 8 rows of x that a workgroup takes at a time"),
    Param("depth", (3, 4, 5, 6), "times 128 k of w that are in flight"),
    Param("slots", (4, 5, 6, 8), "times 128 k of x that are there or on their way"),
)

_NAMES = tuple(param.name for param in PARAMS)
_MOST_CANDIDATES = 24
ACCUMULATION_ERROR = 2.0**-10
"""Of the sum of magnitudes: blocks of 32 k are summed up with 14 bits. For random payloads; any
others are within MOST_ACCUMULATION_ERROR of kernels/linear/wgmma_fp8_sm90.py."""

_GROUPS = 3  # warpgroups of a workgroup that add, with 64 rows of w each
_SCALE_CHUNKS = 4  # times 128 k whose scales are loaded at once
_OUT_DTYPES = ("bf16", "mxfp8")
_LEAST_ROWS = 6  # of an expert, measured on an H200: for 4 mma_ring is as fast


def shared_bytes(problem: MoeGemmProblem, config: Config) -> int:
    """Of a workgroup: weights, x with factors, scales as they are, sums that warps exchange, the
    queue, maxima, barriers."""
    depth, slots, cols = config["depth"], config["slots"], config["col_tiles"] * 8
    activated = problem.activation != "none"
    rows = _GROUPS * GROUP_ROWS
    ring = depth * rows * CHUNK
    x = slots * cols * (CHUNK + 16)
    places = (slots + 2 * _SCALE_CHUNKS - 2) // _SCALE_CHUNKS
    scales = places * (cols + rows) * 4 * _SCALE_CHUNKS
    halves = activated and problem.layout == "halves"
    traded = 512 * (_GROUPS * (cols // 4 + 1) if halves else 1)
    barriers = 16 * _GROUPS * depth + 24 * slots
    total = ring + x + scales + traded + barriers + wgmma_f16.frame_bytes(problem, cols, _GROUPS)
    return -(-total // 1024) * 1024  # weights are where a KiB begins


def _refusal(target: Target, problem: MoeGemmProblem) -> str | None:
    if target.exact_sums:
        return "it adds the products of a block with 14 bits, and exact sums are asked for"
    if problem.out_dtype not in _OUT_DTYPES:
        return f"sums are not exact enough for {problem.out_dtype}, only for bf16 and mxfp8"
    if problem.K % (_SCALE_CHUNKS * CHUNK):
        return f"K={problem.K} is not a multiple of {_SCALE_CHUNKS * CHUNK}"
    return wgmma_f16.refusal(target, problem)


def _rows_of_most(problem: MoeGemmProblem, deviations: int) -> float:
    """Hardly any expert has more, if they are chosen at random. Small blocks of one are joined."""
    rows = problem.rows_of_expert
    return rows + float(deviations * rows**0.5)


def _in_order(target: Target, problem: MoeGemmProblem) -> Iterator[Config]:
    """Those that fit, the ones that did well on an H200 first."""
    col_tiles, depths, slots = (param.values for param in PARAMS)
    for alike in product(
        by_distance(col_tiles, lambda c: -c),  # the fewer are 1 % faster for few rows
        by_distance(depths, lambda d: abs(d - 3)),
        by_distance(slots, lambda s: abs(s - 6)),
    ):
        for values in product(*alike):
            config = dict(zip(_NAMES, values, strict=True))
            if shared_bytes(problem, config) <= SHARED_BYTES:
                yield config


def _candidates(target: Target, problem: MoeGemmProblem) -> list[Config]:
    return list(_in_order(target, problem))[:_MOST_CANDIDATES]


def _yields(target: Target, problem: MoeGemmProblem) -> str | None:
    if problem.rows_of_expert < _LEAST_ROWS:
        return f"mma_ring is faster for the {problem.rows_of_expert:.0f} rows of an expert"
    most = PARAMS[0].values[-1] * 8
    if _rows_of_most(problem, 2) > most:
        return f"wgmma_f16 is faster where experts have more than {most} rows"
    return None


def _defines(target: Target, problem: MoeGemmProblem, config: Config) -> Mapping[str, int]:
    shared = shared_bytes(problem, config)
    return wgmma_f16.frame_defines(problem, config, shared, _GROUPS) | {"MX_FP8": 1}


def _geometry(target: Target, problem: MoeGemmProblem, config: Config) -> Geometry:
    return wgmma_f16.frame_geometry(target, _GROUPS + 1, shared_bytes(problem, config))


WGMMA_FP8 = declare_reblocking(
    "wgmma_fp8",
    {"sm_90a": "moe/wgmma_fp8_sm90.cu"},
    defines=_defines,
    geometry=_geometry,
    tensor_maps=(wgmma_f16.weights_map,),
    refusal=_refusal,
    params=PARAMS,
    in_order=_in_order,
    candidates=_candidates,
    yields=_yields,
)
