"""The GEMM over routed tokens by way of ``grouped_gemm``, for many tokens an expert.

Three steps: csrc/moe/gather.cu puts the rows of each expert side by side, the grouped GEMM that
dispatch chooses multiplies them, csrc/moe/scatter.cu does what is left of the epilogue. On Hopper
the grouped kernel finds rows by the sorted ids, activates and quantises, so that it is alone but
where results are neither activated nor stay as the ids are sorted: csrc/grouped/routed_sm90.h.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.grouped_gemm import KERNELS as GROUPED_KERNELS
from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from aiter_mx.kernels.grouped_gemm.persistent_sm90 import PERSISTENT
from aiter_mx.kernels.moe_gemm.mma_ring_sm90 import most_rows
from aiter_mx.kernels.moe_gemm.problem import ACTIVATION_CODES, ARGS, MoeGemmProblem
from aiter_mx.kernels.sm90 import CHUNK
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    Arg,
    Composition,
    Config,
    Geometry,
    KernelSpec,
    Module,
    Parts,
    TensorMap,
    numbers,
    place_of,
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


def _least_rows(arch: str, problem: MoeGemmProblem) -> float:
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
    if arch not in _LEAST_ROWS or problem.E > MAX_EXPERTS:
        return False
    expected = problem.as_expected() if problem.expected else problem
    least = _least_rows(arch, expected)
    if arch != "sm_90a" or problem.K % CHUNK == 0:
        least = max(least, _LEAST_ROWS[arch])
    return expected.rows_of_expert >= least


def has_many_rows(arch: str, problem: MoeGemmProblem) -> bool:
    """Whether experts have so many rows that results take about as long as weights."""
    expected = problem.as_expected() if problem.expected else problem
    return expected.rows_of_expert >= _LEAST_ROWS.get(arch, 0)


GATHER = declare(
    "moe_gemm",
    "gather",
    {"gfx950": "moe/gather.cu"},
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

# -- Hopper ----------------------------------------------------------------------------------------
_LIST, _PRODUCT = PERSISTENT.modules
_ROUTED_ARGS = (
    *(replace(arg, align=2 if arg.name == "ws" else 1) for arg in ARGS if arg.kind == "pointer"),
    Arg("workspace", "pointer", "rw"),
    *numbers("i64", "M", "N", "K", "G"),
    *numbers("i32", "num_valid_tokens", "a_div", "packed_top_k", "max_blocks", "block_m"),
    Arg("bias_kind", "i32"),
    *numbers("i64", "most_tiles", "most_slabs", "pairs"),
    Arg("clusters", "i32"),
    *numbers("f32", "alpha", "beta", "limit"),
)
_BOUND_BYTES = 8  # of each expert's rows
_ALIGNMENT_BYTES = 1024  # of x in bf16, in the workspace


def _routed_scalars(target: Target, p: MoeGemmProblem, config: Config) -> tuple[int | float, ...]:
    M, N, K, G, _, _, bias, *tiles = _PRODUCT.scalars(target, grouped_problem(p), config)
    lists = (p.routed, p.a_div, _packed_top_k(p), p.blocks, p.block_m)
    return (M, N, K, G, *lists, bias, *tiles, p.alpha, p.beta, p.limit)


def _routed_defines(target: Target, problem: MoeGemmProblem, config: Config) -> Mapping[str, int]:
    inner = grouped_problem(problem)
    found = dict(_PRODUCT.defines(target, inner, PERSISTENT.configure(target, inner)))
    if problem.activation != "none":
        found["MX_ACTIVATION"] = ACTIVATION_CODES[problem.activation]
        found["MX_INTERLEAVED"] = int(problem.layout == "interleaved")
    return {**found, "MX_ROUTED": 1}


def _routed_map(at: int) -> Callable[[Target, MoeGemmProblem, Config], TensorMap]:
    """The product's tensor map of that number; with an activation boxes of w are gate or up."""

    def described(target: Target, problem: MoeGemmProblem, config: Config) -> TensorMap:
        found = _PRODUCT.tensor_maps[at](target, grouped_problem(problem), config)
        halves = 2 if problem.activation != "none" and at == 0 else 1
        pointer = place_of(ARGS, ("wq", "out")[at])
        return replace(found, pointer=pointer, box_rows=found.box_rows // halves)

    return described


def _routed(module: Module, **more: Any) -> Module:
    return replace(
        module,
        args=_ROUTED_ARGS,
        geometry=lambda target, p, config: module.geometry(target, grouped_problem(p), config),
        scalars=_routed_scalars,
        **more,
    )


_ROUTED = (
    _routed(_LIST, defines=_routed_defines),
    _routed(_PRODUCT, defines=_routed_defines, tensor_maps=(_routed_map(0), _routed_map(1))),
)


def _workspace_bytes(target: Target, problem: MoeGemmProblem, config: Config) -> int:
    bounds = -(-_BOUND_BYTES * problem.E // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return bounds + PERSISTENT.workspace_bytes(target, grouped_problem(problem), config)


def sums_problem(problem: MoeGemmProblem) -> MoeGemmProblem:
    """The sums of a problem alone, which stay as the ids are sorted."""
    return replace(
        problem,
        sorted_out=True,
        out_dtype=grouped_problem(problem).out_dtype,
        activation="none",
        layout="halves",
        weights="none",
    )


def _sorted_first(target: Target, problem: MoeGemmProblem, config: Config) -> Parts:
    """None where results stay as ids are sorted, or are activated."""
    if problem.sorted_out or problem.activation != "none":
        return ()
    return (("moe_gemm", sums_problem(problem)),)


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
    archs=("gfx950",),
)
GROUPED_SM90 = replace(
    GROUPED,
    modules=_ROUTED,
    workspace_bytes=_workspace_bytes,
    composed=Composition(
        parts=_sorted_first,
        joined_by="aiter_mx.joined:then_scattered",
        around=lambda problem: SCATTER.modules,
    ),
)
