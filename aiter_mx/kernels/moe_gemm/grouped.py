"""The GEMM over routed tokens by way of ``grouped_gemm``, for many tokens an expert.

Three steps: csrc/moe/gather.cu puts the rows of each expert side by side, the grouped GEMM that
dispatch chooses multiplies them, csrc/moe/scatter.cu does what is left of the epilogue.
"""

from __future__ import annotations

from collections.abc import Mapping

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.grouped_gemm import KERNELS as GROUPED_KERNELS
from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from aiter_mx.kernels.moe_gemm.mma_ring_sm90 import most_rows
from aiter_mx.kernels.moe_gemm.problem import ACTIVATION_CODES, MoeGemmProblem
from aiter_mx.kernels.sm90 import CHUNK
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    Arg,
    Composition,
    Config,
    Geometry,
    KernelSpec,
    numbers,
    pointers,
)
from aiter_mx.numerics import BLOCK
from aiter_mx.target import Target

MAX_EXPERTS = 4096  # whose ranges fit into LDS
_WAVES = 4
_LEAST_ROWS = {"gfx950": 128, "sm_90a": 128}
"""Rows of an expert from which on weights are no longer what takes the time."""
_LONG_K, _LEAST_ROWS_OF_LONG_K = 4096, 97  # on an H200, where sums are activated


def grouped_problem(problem: MoeGemmProblem) -> GroupedGemmProblem:
    """The grouped GEMM over gathered rows. Its sums are rounded once, so to fp32 where something is
    still done to them."""
    is_last = problem.activation == "none" and problem.weights == "none"
    return GroupedGemmProblem(
        M=problem.blocks * problem.block_m,
        N=problem.N,
        K=problem.K,
        G=problem.E,
        out_dtype=problem.out_dtype if is_last else "fp32",
        bias=problem.bias,
    )


def _refusal(target: Target, problem: MoeGemmProblem) -> str | None:
    if target.arch not in _LEAST_ROWS:
        return f"no kernels for {target.arch}"
    if problem.N % BLOCK:
        return f"N={problem.N} is not a multiple of {BLOCK}"
    if problem.E > MAX_EXPERTS:
        return f"E={problem.E} is above {MAX_EXPERTS}, the most whose ranges gather finds"
    ours = [k for k in GROUPED_KERNELS if k.backend == "hip" and k.is_for(target.arch)]
    if not ours:
        return f"grouped_gemm has no kernel of ours for {target.arch}"
    refusals = [kernel.refusal(target, grouped_problem(problem)) for kernel in ours]
    return None if None in refusals else f"grouped_gemm: {refusals[0]}"


def _least_rows(arch: str, problem: MoeGemmProblem) -> int:
    """Rows of an expert that pay for gathering them."""
    if arch == "sm_90a" and problem.K % CHUNK:  # only mma_ring is there besides
        return most_rows(problem)
    activated = problem.activation != "none"
    if arch == "sm_90a" and activated and problem.K >= _LONG_K:
        return _LEAST_ROWS_OF_LONG_K
    return _LEAST_ROWS.get(arch, 0)


def _yields(target: Target, problem: MoeGemmProblem) -> str | None:
    rows, least = problem.rows_of_expert, _least_rows(target.arch, problem)
    if rows >= least:
        return None
    return f"{rows:.0f} rows of an expert are fewer than the {least} that pay for gathering them"


def _gather_defines(target: Target, problem: MoeGemmProblem, config: Config) -> Mapping[str, int]:
    return {"MX_WAVES": _WAVES, "MX_EXPERTS": max(64, 1 << (problem.E - 1).bit_length())}


def _rows_grid(target: Target, problem: MoeGemmProblem, more: int) -> Geometry:
    groups = more + -(-problem.blocks * problem.block_m // _WAVES)
    return Geometry(grid=(groups, 1, 1), block=(_WAVES * target.wave_size, 1, 1))


_LIST_SCALARS = ("num_experts", "num_valid_tokens")


def _packed_top_k(problem: MoeGemmProblem) -> int:
    return problem.top_k if problem.ids == "aiter" else 0


def is_first(arch: str, problem: MoeGemmProblem) -> bool:
    """Whether the kernel is the first in line on an architecture, where no table decides."""
    expected = problem.as_expected() if problem.expected else problem
    return (
        arch in _LEAST_ROWS
        and problem.E <= MAX_EXPERTS
        and expected.rows_of_expert >= max(_LEAST_ROWS[arch], _least_rows(arch, expected))
    )


GATHER = declare(
    "moe_gemm",
    "gather",
    {"gfx950": "moe/gather.cu", "sm_90a": "moe/gather.cu"},
    symbol="aiter_mx_moe_gather",
    args=(
        *pointers("r", "xq", "xs", "sorted_ids", "expert_ids"),
        Arg("num_tokens_post_padded", "pointer", "r"),
        *pointers("w", "gathered", "scales", "starts", "ends", "places"),
        Arg("K", "i64"),
        *numbers("i32", *_LIST_SCALARS, "a_div", "packed_top_k", "max_blocks", "block_m"),
    ),
    defines=_gather_defines,
    geometry=lambda target, problem, config: _rows_grid(target, problem, 1),
    scalars=lambda target, p, config: (
        *(p.K, p.E, p.routed, p.a_div, _packed_top_k(p), p.blocks, p.block_m),
    ),
    refusal=_refusal,
)


def _scatter_defines(target: Target, problem: MoeGemmProblem, config: Config) -> Mapping[str, int]:
    activated = problem.activation != "none"
    return {
        "MX_WAVES": _WAVES,
        "MX_ACTIVATION": ACTIVATION_CODES[problem.activation],
        "MX_INTERLEAVED": int(activated and problem.layout == "interleaved"),
        "MX_SUM": DTYPE_CODES[grouped_problem(problem).out_dtype],
        "MX_OUT": DTYPE_CODES["fp32" if activated else problem.out_dtype],
    }


SCATTER = declare(
    "moe_gemm",
    "scatter",
    {"gfx950": "moe/scatter.cu", "sm_90a": "moe/scatter.cu"},
    symbol="aiter_mx_moe_scatter",
    args=(
        *pointers(
            "r", "sums", "sorted_ids", "expert_ids", "num_tokens_post_padded", "topk_weights"
        ),
        *pointers("w", "out", "out_scales"),
        Arg("N", "i64"),
        *numbers(
            "i32", *_LIST_SCALARS, "packed_top_k", "weights_by_place", "max_blocks", "block_m"
        ),
        *numbers("f32", "alpha", "beta", "limit"),
    ),
    defines=_scatter_defines,
    geometry=lambda target, problem, config: _rows_grid(target, problem, 0),
    scalars=lambda target, p, config: (
        *(p.N, p.E, p.routed, _packed_top_k(p), int(p.weights == "by_place")),
        *(p.blocks, p.block_m, p.alpha, p.beta, p.limit),
    ),
    refusal=_refusal,
)

GROUPED = KernelSpec(
    op="moe_gemm",
    backend="hip",
    name="grouped",
    params=(),
    refusal=_refusal,
    configure=lambda target, problem: {},
    candidates=lambda target, problem: ({},),
    composed=Composition(
        parts=lambda target, problem, config: (("grouped_gemm", grouped_problem(problem)),),
        joined_by="aiter_mx.joined:by_groups",
        around=lambda problem: (*GATHER.modules, *(() if problem.sorted_out else SCATTER.modules)),
    ),
    yields=_yields,
)
