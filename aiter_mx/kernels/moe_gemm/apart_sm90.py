"""Hopper's activated grouped GEMM in two launches, for one token's experts: fp32 sums by
csrc/moe/mma_ring_sm90.cu, then their activation and quantisation by
csrc/moe/activate_sm90.cu."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from aiter_mx.kernels.moe_gemm.mma_ring_sm90 import MMA_RING, PARAMS
from aiter_mx.kernels.moe_gemm.problem import ACTIVATION_CODES, ARGS, MoeGemmProblem, scalars
from aiter_mx.kernels.spec import Arg, Config, Geometry, KernelSpec, Module, first_of
from aiter_mx.target import Target

_WARPS = 4  # of a workgroup that activates
_FEATURES = 128  # of one of its warps
_TILE = 64  # gate and up rows of a block of 32 features

_POINTERS = tuple(arg for arg in ARGS if arg.kind == "pointer")
_ARGS = (*_POINTERS, Arg("workspace", "pointer", "rw"), *ARGS[len(_POINTERS) :])


def _plain(problem: MoeGemmProblem) -> MoeGemmProblem:
    """The GEMM without what follows it."""
    return replace(problem, activation="none", out_dtype="fp32")


def _refusal(target: Target, problem: MoeGemmProblem) -> str | None:
    if problem.activation == "none":
        return "there is no activation to do apart"
    if problem.followed:  # 24.8 us for a layer of one token on an H200, not 23.8
        return "sums leave no room for the launch that follows until they are done"
    return MMA_RING.refusal(target, problem)


def _yields(target: Target, problem: MoeGemmProblem) -> str | None:
    tiles = min(problem.routed, problem.E) * -(-problem.N // _TILE)
    if tiles <= target.cu_num:
        return None
    return f"{tiles} blocks of features keep {target.cu_num} SMs busy in one launch"


def _candidates(target: Target, problem: MoeGemmProblem) -> Sequence[Config]:
    return MMA_RING.candidates(target, _plain(problem))


def _sums_defines(target: Target, problem: MoeGemmProblem, config: Config) -> Mapping[str, int]:
    assert MMA_RING.module is not None
    return {**MMA_RING.module.defines(target, _plain(problem), config), "MX_TO_WORKSPACE": 1}


def _sums_geometry(target: Target, problem: MoeGemmProblem, config: Config) -> Geometry:
    assert MMA_RING.module is not None
    return MMA_RING.module.geometry(target, _plain(problem), config)


def _geometry(target: Target, problem: MoeGemmProblem, config: Config) -> Geometry:
    warps = problem.blocks * problem.block_m * -(-problem.out_features // _FEATURES)
    return Geometry(
        grid=(max(1, -(-warps // _WARPS)), 1, 1),
        block=(_WARPS * target.wave_size, 1, 1),
        overlaps=True,
    )


def _defines(target: Target, problem: MoeGemmProblem, config: Config) -> Mapping[str, int]:
    return {
        "MX_ACTIVATION": ACTIVATION_CODES[problem.activation],
        "MX_INTERLEAVED": int(problem.layout == "interleaved"),
        "MX_THREADS": _WARPS * target.wave_size,
        "MX_TO_WORKSPACE": 1,
    }


APART = KernelSpec(
    op="moe_gemm",
    backend="hip",
    name="apart",
    params=PARAMS,
    refusal=_refusal,
    configure=first_of(_candidates),
    candidates=_candidates,
    before=(
        Module(
            sources={"sm_90a": "moe/mma_ring_sm90.cu"},
            symbol="aiter_mx_moe_gemm_mma_ring",
            args=_ARGS,
            defines=_sums_defines,
            geometry=_sums_geometry,
            scalars=lambda target, problem, config: scalars(problem),
        ),
    ),
    module=Module(
        sources={"sm_90a": "moe/activate_sm90.cu"},
        symbol="aiter_mx_moe_activate",
        args=_ARGS,
        defines=_defines,
        geometry=_geometry,
        scalars=lambda target, problem, config: scalars(problem),
    ),
    workspace_bytes=lambda target, problem, config: problem.routed * problem.N * 4,
    yields=_yields,
)
