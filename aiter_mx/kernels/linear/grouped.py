"""The grouped GEMMs as kernels of the linear, which is one group of all rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from aiter_mx import invariance
from aiter_mx.kernels.grouped_gemm.persistent_gfx950 import PARAMS, candidates_of, config_of
from aiter_mx.kernels.grouped_gemm.persistent_gfx950 import PERSISTENT as PERSISTENT_GFX950
from aiter_mx.kernels.grouped_gemm.persistent_sm90 import PERSISTENT as PERSISTENT_SM90
from aiter_mx.kernels.grouped_gemm.problem import GroupedGemmProblem
from aiter_mx.kernels.linear.mfma_choice_gfx950 import persistent_tile
from aiter_mx.kernels.linear.problem import LinearProblem
from aiter_mx.kernels.spec import Config, KernelSpec, Module
from aiter_mx.target import Target

T = TypeVar("T")

_FEWEST_ROWS = 17
_FEWEST_OWN_ROWS = {"gfx950": _FEWEST_ROWS, "sm_90a": 65}
"""Without a table. On sm_90a others take all rows below; on gfx950 they say where they do."""


@lru_cache(maxsize=64)
def _one_group(problem: LinearProblem) -> GroupedGemmProblem:
    return GroupedGemmProblem(
        problem.M, problem.N, problem.K, 1, problem.out_dtype, problem.bias, "jagged", "i32"
    )


def as_linear(spec: KernelSpec) -> KernelSpec:
    """A kernel of ``grouped_gemm`` as one of the linear: its ``starts`` and ``ends`` are null."""

    def of_one_group(function: Callable[..., T]) -> Callable[..., T]:
        return lambda target, problem, *config: function(target, _one_group(problem), *config)

    def module_of_one_group(module: Module) -> Module:
        return replace(
            module,
            args=tuple(
                replace(arg, access="null") if arg.name in ("starts", "ends") else arg
                for arg in module.args
            ),
            defines=of_one_group(module.defines),
            geometry=of_one_group(module.geometry),
            scalars=of_one_group(module.scalars),
            tensor_maps=tuple(map(of_one_group, module.tensor_maps)),
        )

    def refusal(target: Target, problem: LinearProblem) -> str | None:
        if problem.M < _FEWEST_ROWS and not invariance.is_on():
            return f"M={problem.M} is below {_FEWEST_ROWS}: others have the better tiles"
        return spec.refusal(target, _one_group(problem))

    def yields(target: Target, problem: LinearProblem) -> str | None:
        fewest = _FEWEST_OWN_ROWS[target.arch]
        if fewest > problem.M:
            return f"others read w once for M={problem.M} below {fewest}"
        return spec.yields(target, _one_group(problem))

    return replace(
        spec,
        op="linear",
        refusal=refusal,
        configure=of_one_group(spec.configure),
        candidates=of_one_group(spec.candidates),
        modules=tuple(map(module_of_one_group, spec.modules)),
        workspace_bytes=of_one_group(spec.workspace_bytes),
        yields=yields,
    )


def _of_few_tiles(target: Target, problem: LinearProblem) -> Config:
    """A w has a code object for each tile, so that there are few."""
    return config_of(*persistent_tile(target, problem))


def _candidates(target: Target, problem: LinearProblem) -> list[Config]:
    """Those of any number of rows."""
    return candidates_of(target, _one_group(problem), PARAMS[0].values)


GROUPED = (
    replace(as_linear(PERSISTENT_GFX950), configure=_of_few_tiles, candidates=_candidates),
    as_linear(PERSISTENT_SM90),
)
