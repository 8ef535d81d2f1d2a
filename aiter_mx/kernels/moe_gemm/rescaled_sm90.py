"""The Hopper GEMM over routed tokens over fp8 with a scale for 128 k, for many rows an expert.

It is grouped_gemm's ``rescaled`` with MX_ROUTED, whose groups are the sorted ids of experts'
blocks: csrc/grouped/routed_sm90.h. It activates and quantises, or leaves 16-bit results as the ids
are sorted, which a further launch brings to routed rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from aiter_mx.kernels.grouped_gemm import rescaled_sm90 as of_groups
from aiter_mx.kernels.grouped_gemm.problem import scalars as scalars_of_groups
from aiter_mx.kernels.moe_gemm.grouped import GROUPED_SM90, grouped_problem
from aiter_mx.kernels.moe_gemm.problem import ACTIVATION_CODES, ARGS, MoeGemmProblem
from aiter_mx.kernels.spec import Arg, Config, Module, TensorMap, numbers, place_of
from aiter_mx.target import Target

_ROUTED_ARGS = (
    *(
        replace(arg, align=of_groups.SCALE_ALIGNMENT) if arg.name == "ws" else arg
        for arg in ARGS
        if arg.kind == "pointer"
    ),
    Arg("workspace", "pointer", "rw"),
    *numbers("i64", "M", "N", "K", "G"),
    *numbers("i32", "num_valid_tokens", "a_div", "packed_top_k", "max_blocks", "block_m"),
    Arg("bias_kind", "i32"),
    *of_groups.SIZES_OF_TILES,
    *numbers("f32", "alpha", "beta", "limit"),
)


def inner_problem(problem: MoeGemmProblem) -> GroupedGemmProblem:
    """The grouped GEMM over places, whose sums are activated as they are in registers."""
    inner = grouped_problem(problem)
    return replace(inner, out_dtype="bf16") if problem.activation != "none" else inner


def _refusal(target: Target, problem: MoeGemmProblem) -> str | None:
    if target.arch != "sm_90a":
        return f"no rescaled kernel for {target.arch}, only for sm_90a"
    if problem.weights != "none":
        return "routing weights are multiplied by sums in fp32, which it does not leave"
    return of_groups.refusal(target, inner_problem(problem))


def _defines(target: Target, problem: MoeGemmProblem, config: Config) -> Mapping[str, int]:
    found = {**of_groups.defines(target, inner_problem(problem), config), "MX_ROUTED": 1}
    if problem.activation != "none":
        found["MX_ACTIVATION"] = ACTIVATION_CODES[problem.activation]
        found["MX_INTERLEAVED"] = int(problem.layout == "interleaved")
    return found


def _scalars(target: Target, p: MoeGemmProblem, config: Config) -> tuple[int | float, ...]:
    inner = inner_problem(p)
    lists = (p.routed, p.a_div, p.top_k if p.ids == "aiter" else 0, p.blocks, p.block_m)
    M, N, K, G, _, _, bias = scalars_of_groups(inner)
    tiles = of_groups.sizes_of_tiles(inner, config)
    return (M, N, K, G, *lists, bias, *tiles, p.alpha, p.beta, p.limit)


def _routed(module: Module, **more: Any) -> Module:
    """A launch of ``of_groups``, for places."""
    return replace(
        module,
        args=_ROUTED_ARGS,
        geometry=lambda target, p, config: module.geometry(target, inner_problem(p), config),
        scalars=_scalars,
        **more,
    )


_LISTED, _RESCALE, _PRODUCT = of_groups.LAUNCHES


def _operands(target: Target, problem: MoeGemmProblem, config: Config) -> TensorMap:
    found = _PRODUCT.tensor_maps[0](target, inner_problem(problem), config)
    return replace(found, pointer=place_of(_ROUTED_ARGS, "workspace"))


def _weights(target: Target, problem: MoeGemmProblem, config: Config) -> TensorMap:
    """Boxes are of gate or of up where these are halves."""
    found = _PRODUCT.tensor_maps[1](target, inner_problem(problem), config)
    halves = problem.activation != "none" and problem.layout != "interleaved"
    pointer, halved = place_of(_ROUTED_ARGS, "wq"), 2 if halves else 1
    return replace(found, pointer=pointer, box_rows=found.box_rows // halved)


RESCALED = replace(
    GROUPED_SM90,
    name="rescaled",
    params=of_groups.PARAMS,
    refusal=_refusal,
    configure=of_groups.configure,
    candidates=lambda target, problem: of_groups.candidates(target, inner_problem(problem)),
    modules=(
        _routed(_LISTED, defines=_defines),
        _routed(_RESCALE, defines=_defines),
        _routed(_PRODUCT, defines=_defines, tensor_maps=(_operands, _weights)),
    ),
    workspace_bytes=lambda target, problem, config: of_groups.workspace_bytes(
        target, inner_problem(problem), config
    ),
    yields=lambda target, problem: of_groups.why_not(problem.rows_of_expert, problem.N, problem.K),
    archs=("sm_90a",),
)
