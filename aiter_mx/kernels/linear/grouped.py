"""The grouped GEMMs as kernels of the linear, which is one group of all rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from aiter_mx import invariance
from aiter_mx.kernels.grouped_gemm.persistent_sm90 import PERSISTENT
from aiter_mx.kernels.grouped_gemm.problem import GroupedGemmProblem
from aiter_mx.kernels.linear.problem import LinearProblem
from aiter_mx.kernels.spec import KernelSpec, Module
from aiter_mx.target import Target

T = TypeVar("T")

_FEWEST_ROWS = 17
_FEWEST_OWN_ROWS = {"gfx950": _FEWEST_ROWS, "sm_90a": 65}
"""Without a table. On sm_90a others take all rows below; on gfx950 they say where they do."""


@lru_cache(maxsize=64)
def one_group(problem: LinearProblem) -> GroupedGemmProblem:
    """The same products as those of one group."""
    return GroupedGemmProblem(
        problem.M, problem.N, problem.K, 1, problem.out_dtype, problem.bias, "jagged", "i32"
    )


def as_linear(spec: KernelSpec) -> KernelSpec:
    """A kernel of ``grouped_gemm`` as one of the linear: its ``starts`` and ``ends`` are null."""

    def of_one_group(function: Callable[..., T]) -> Callable[..., T]:
        return lambda target, problem, *config: function(target, one_group(problem), *config)

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
        return spec.refusal(target, one_group(problem))

    def yields(target: Target, problem: LinearProblem) -> str | None:
        fewest = _FEWEST_OWN_ROWS[target.arch]
        if fewest > problem.M:
            return f"others read w once for M={problem.M} below {fewest}"
        return spec.yields(target, one_group(problem))

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


PERSISTENT_SM90 = as_linear(PERSISTENT)
