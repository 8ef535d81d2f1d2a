"""The CDNA4 grouped GEMM, csrc/grouped/persistent_gfx950.cu, as two kernels of the linear:
``persistent``, and ``persistent_split``, two workgroups of which share the K of a tile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

from aiter_mx.kernels.grouped_gemm import persistent_gfx950 as grouped
from aiter_mx.kernels.linear.choice_gfx950 import configuring, yielding
from aiter_mx.kernels.linear.grouped import as_linear, one_group
from aiter_mx.kernels.linear.persistent_choice_gfx950 import LEAST_SPLIT_K, SPLIT, fastest_first
from aiter_mx.kernels.linear.problem import LinearProblem
from aiter_mx.kernels.spec import Config, Geometry, Module, Param, place_of, pointers
from aiter_mx.target import Target

_WAVES = 4  # of a workgroup
_SUM_BYTES = 4
_ROWS, _FEATURES = (tuple(sorted(set(sizes))) for sizes in zip(*SPLIT, strict=True))
_SPLIT_PARAMS = (
    Param("tile_m", _ROWS, "rows of x in a tile"),
    Param("tile_n", _FEATURES, "features in a tile"),
    Param("splits", (2,), "workgroups that share K"),
)


def _configuring(kernel: str) -> Callable[[Target, LinearProblem], Config]:
    return configuring(kernel, lambda *of: fastest_first(kernel, *of)[0])


def _candidates(target: Target, problem: LinearProblem) -> list[Config]:
    """Those of any number of rows."""
    return grouped.candidates_of(target, one_group(problem), grouped.PARAMS[0].values)


def _defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    assert _LINEAR.module is not None
    return {**_LINEAR.module.defines(target, problem, config), "MX_ONE_GROUP": 1}


def _whole(config: Config) -> Config:
    """That of whole tiles of this size."""
    return grouped.config_of(config["tile_m"], config["tile_n"])


def _tiles(problem: LinearProblem, config: Config) -> int:
    return -(-problem.M // config["tile_m"]) * -(-problem.N // config["tile_n"])


def _split_refusal(target: Target, problem: LinearProblem) -> str | None:
    if problem.K < LEAST_SPLIT_K:
        return f"K={problem.K} is below {LEAST_SPLIT_K}: too few steps of K to be shared"
    return _LINEAR.refusal(target, problem)


def _split_candidates(target: Target, problem: LinearProblem) -> list[Config]:
    configured = _split_configure(target, problem)
    found = fastest_first("persistent_split", target, problem)
    return sorted(found, key=lambda config: config != configured)


def _split_defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    return {**_defines(target, problem, _whole(config)), "MX_SHARED": 1}


def _split_geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
    assert _LINEAR.module is not None
    if (config["tile_m"], config["tile_n"]) not in SPLIT:
        raise ValueError(f"{dict(config)} does not fit {problem}: there are no such tiles")
    workgroups = _tiles(problem, config) * config["splits"]
    whole = _LINEAR.module.geometry(target, problem, _whole(config))
    return replace(whole, grid=(workgroups, 1, 1))


def _split_scalars(
    target: Target, problem: LinearProblem, config: Config
) -> tuple[int | float, ...]:
    assert _LINEAR.module is not None
    *sizes, _, rows = _LINEAR.module.scalars(target, problem, _whole(config))
    return (*sizes, _tiles(problem, config) * config["splits"], rows)


def _sum_bytes(target: Target, problem: LinearProblem, config: Config) -> int:
    return _tiles(problem, config) * config["tile_m"] * config["tile_n"] * _SUM_BYTES


def _meeting(module: Module) -> Module:
    """That whose workgroups meet."""
    after = place_of(module.args, "ends") + 1
    meetings = pointers("rw", "sums", "counts")
    return replace(module, args=(*module.args[:after], *meetings, *module.args[after:]))


_LINEAR = as_linear(grouped.PERSISTENT)
_MODULE = cast(Module, _LINEAR.module)
_split_configure = _configuring("persistent_split")

PERSISTENT = replace(
    _LINEAR,
    configure=_configuring("persistent"),
    candidates=_candidates,
    modules=(replace(_MODULE, defines=_defines),),
)

PERSISTENT_SPLIT = replace(
    _LINEAR,
    name="persistent_split",
    params=_SPLIT_PARAMS,
    refusal=_split_refusal,
    configure=_split_configure,
    candidates=_split_candidates,
    modules=(
        replace(
            _meeting(_MODULE),
            symbol="aiter_mx_linear_persistent_split",
            defines=_split_defines,
            geometry=_split_geometry,
            scalars=_split_scalars,
        ),
    ),
    workspace_bytes=_sum_bytes,
    counters=lambda target, problem, config: _tiles(problem, config) * _WAVES * 2,
    yields=yielding("persistent_split"),
)
