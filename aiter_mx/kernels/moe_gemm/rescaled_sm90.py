"""The Hopper GEMMs over routed tokens over fp8 with a scale for 128 k, for many rows an expert.

They are grouped_gemm's ``rescaled`` and ``rescaled_in_place`` with MX_ROUTED, whose groups are the
sorted ids of experts' blocks: csrc/grouped/routed_sm90.h. They activate and quantise, or leave
16-bit results as the ids are sorted, which a further launch brings to routed rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem, in_place_sm90, rescaled_sm90
from aiter_mx.kernels.grouped_gemm.problem import scalars as scalars_of_groups
from aiter_mx.kernels.grouped_gemm.rescaled_groups_sm90 import SCALE_ALIGNMENT, ring_pays
from aiter_mx.kernels.moe_gemm.grouped import GROUPED_SM90, grouped_problem
from aiter_mx.kernels.moe_gemm.problem import ACTIVATION_CODES, ARGS, MoeGemmProblem
from aiter_mx.kernels.spec import (
    Arg,
    Config,
    KernelSpec,
    Module,
    TensorMap,
    numbers,
    place_of,
)
from aiter_mx.target import Target


def inner_problem(problem: MoeGemmProblem) -> GroupedGemmProblem:
    """The grouped GEMM over places, whose sums are activated as they are in registers."""
    inner = grouped_problem(problem)
    return replace(inner, out_dtype="bf16") if problem.activation != "none" else inner


def _args_of(sizes: tuple[str, ...]) -> tuple[Arg, ...]:
    return (
        *(
            replace(arg, align=SCALE_ALIGNMENT) if arg.name == "ws" else arg
            for arg in ARGS
            if arg.kind == "pointer"
        ),
        Arg("workspace", "pointer", "rw"),
        *numbers("i64", "M", "N", "K", "G"),
        *numbers("i32", "num_valid_tokens", "a_div", "packed_top_k", "max_blocks", "block_m"),
        Arg("bias_kind", "i32"),
        *numbers("i32", *sizes),
        *numbers("f32", "alpha", "beta", "limit"),
    )


def _routed(of_groups: KernelSpec, sizes: tuple[str, ...], **more: Any) -> KernelSpec:
    """A kernel of groups for places, whose workspace has these sizes."""
    args = _args_of(sizes)

    def refusal(target: Target, problem: MoeGemmProblem) -> str | None:
        if target.arch != "sm_90a":
            return f"no {of_groups.name} kernel for {target.arch}, only for sm_90a"
        if problem.weights != "none":
            return "routing weights are multiplied by sums in fp32, which it does not leave"
        return of_groups.refusal(target, inner_problem(problem))

    def scalars(target: Target, p: MoeGemmProblem, config: Config) -> tuple[int | float, ...]:
        inner = inner_problem(p)
        lists = (p.routed, p.a_div, p.top_k if p.ids == "aiter" else 0, p.blocks, p.block_m)
        M, N, K, G, _, _, bias = scalars_of_groups(inner)
        own = of_groups.modules[-1].scalars(target, inner, config)[-len(sizes) :]
        return (M, N, K, G, *lists, bias, *own, p.alpha, p.beta, p.limit)

    def defines(target: Target, problem: MoeGemmProblem, config: Config) -> Mapping[str, int]:
        inner = inner_problem(problem)
        found = {**of_groups.modules[-1].defines(target, inner, config), "MX_ROUTED": 1}
        if problem.activation != "none":
            found["MX_ACTIVATION"] = ACTIVATION_CODES[problem.activation]
            found["MX_INTERLEAVED"] = int(problem.layout == "interleaved")
        return found

    def operands(target: Target, problem: MoeGemmProblem, config: Config) -> TensorMap:
        found = of_groups.modules[-1].tensor_maps[0](target, inner_problem(problem), config)
        return replace(found, pointer=place_of(args, "workspace"))

    def weights(target: Target, problem: MoeGemmProblem, config: Config) -> TensorMap:
        """Boxes are of gate or of up where these are halves."""
        found = of_groups.modules[-1].tensor_maps[1](target, inner_problem(problem), config)
        halved = problem.activation != "none" and problem.layout != "interleaved"
        box_rows = found.box_rows // (2 if halved else 1)
        return replace(found, pointer=place_of(args, "wq"), box_rows=box_rows)

    def routed(module: Module) -> Module:
        return replace(
            module,
            args=args,
            geometry=lambda target, p, config: module.geometry(target, inner_problem(p), config),
            scalars=scalars,
            defines=defines,
            tensor_maps=(operands, weights) if module.tensor_maps else (),
        )

    return replace(
        GROUPED_SM90,
        name=of_groups.name,
        params=of_groups.params,
        refusal=refusal,
        configure=of_groups.configure,
        candidates=lambda target, problem: of_groups.candidates(target, inner_problem(problem)),
        modules=tuple(map(routed, of_groups.modules)),
        workspace_bytes=lambda target, problem, config: of_groups.workspace_bytes(
            target, inner_problem(problem), config
        ),
        archs=("sm_90a",),
        **more,
    )


def _yields_to_the_ring(target: Target, problem: MoeGemmProblem) -> str | None:
    rows = problem.rows_of_expert
    if ring_pays(rows, problem.N, problem.K):
        return f"{rows:.0f} rows of an expert pay for rescaling w once for all of them"
    return GROUPED_SM90.yields(target, problem)


def _yields_in_place(target: Target, problem: MoeGemmProblem) -> str | None:
    rows, N, K = problem.rows_of_expert, problem.N, problem.K
    if ring_pays(rows, N, K):
        return None
    return f"w of {N} x {K} is rescaled in place for {rows:.0f} rows of an expert"


RESCALED = _routed(rescaled_sm90.RESCALED, rescaled_sm90.SIZES, yields=_yields_in_place)
IN_PLACE = _routed(in_place_sm90.IN_PLACE, in_place_sm90.SIZES, yields=_yields_to_the_ring)
