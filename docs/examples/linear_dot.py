"""The declaration of the worked example, docs/add_a_kernel.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.linear.problem import POINTERS, QUANTISED_FIRST, LinearProblem
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    MAX_GRID_X,
    Arg,
    Config,
    Geometry,
    Param,
    combinations,
)
from aiter_mx.target import Target

MAX_M = 4
_USUAL_WAVES = 4  # one for each SIMD of a compute unit

PARAMS = (Param("waves", (1, 2, 4, 8), "waves of a workgroup, an output feature each"),)


def _refusal(target: Target, problem: LinearProblem) -> str | None:
    if problem.M > MAX_M:
        return f"M={problem.M} is above {MAX_M}, where arithmetic alone outlasts reading w"
    if problem.N > MAX_GRID_X:
        return f"N={problem.N} is above {MAX_GRID_X}, the most workgroups that dot launches"
    return None


def _configure(target: Target, problem: LinearProblem) -> Config:
    return {"waves": _USUAL_WAVES}


def _candidates(target: Target, problem: LinearProblem) -> list[Config]:
    """All of them, the usual one first."""
    return sorted(combinations(PARAMS), key=lambda config: config["waves"] != _USUAL_WAVES)


def _defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    return {
        "MX_M": problem.M,
        "MX_OUT": DTYPE_CODES[problem.out_dtype],
        "MX_WAVES": config["waves"],
    }


def _geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
    return Geometry(
        grid=(-(-problem.N // config["waves"]), 1, 1),
        block=(config["waves"] * target.wave_size, 1, 1),
    )


def _scalars(target: Target, problem: LinearProblem, config: Config) -> tuple[int | float, ...]:
    return (problem.N, problem.K, DTYPE_CODES[problem.bias])


DOT = declare(
    "linear",
    "dot",
    {"gfx950": str(Path(__file__).with_suffix(".cu"))},  # below csrc/: "linear/dot.cu"
    args=(*POINTERS, Arg("N", "i64"), Arg("K", "i64"), Arg("bias_kind", "i32")),
    defines=_defines,
    geometry=_geometry,
    scalars=_scalars,
    refusal=_refusal,
    params=PARAMS,
    configure=_configure,
    candidates=_candidates,
    composed=QUANTISED_FIRST,  # x in bf16 or fp16 is quantised by a launch before
)
