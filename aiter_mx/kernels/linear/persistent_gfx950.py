"""The CDNA4 grouped GEMM, csrc/grouped/persistent_gfx950.cu, as three kernels of the linear:
``persistent``, ``persistent_split``, two workgroups of which share the K of a tile, and
``persistent_last``, several of which share that of each tile of the last row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

from aiter_mx.kernels.grouped_gemm import persistent_gfx950 as grouped
from aiter_mx.kernels.linear.choice_gfx950 import configuring, yielding
from aiter_mx.kernels.linear.grouped import as_linear, one_group
from aiter_mx.kernels.linear.persistent_choice_gfx950 import (
    LAST,
    LEAST_SPLIT_K,
    MOST_SPLITS,
    SPLIT,
    fastest_first,
    last_splits,
    may_share_last,
)
from aiter_mx.kernels.linear.problem import LinearProblem
from aiter_mx.kernels.spec import (
    Config,
    Geometry,
    Module,
    Param,
    numbers,
    place_of,
    pointers,
)
from aiter_mx.target import Target

_WAVES, _DEPTH = 4, 128  # of a workgroup, and k of a step
_SUM_BYTES = 4
_ROWS, _FEATURES = (tuple(sorted(set(sizes))) for sizes in zip(*SPLIT, strict=True))
_LAST_PARAMS = (
    Param("tile_m", tuple(sorted({m for m, _ in LAST})), "rows of x in a tile"),
    Param("tile_n", tuple(sorted({n for _, n in LAST})), "features in a tile"),
    Param("splits", tuple(range(2, MOST_SPLITS + 1)), "workgroups that share a last tile's K"),
)
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
    return -(-problem.M // config["tile_m"]) * _columns(problem, config)


def _columns(problem: LinearProblem, config: Config) -> int:
    return -(-problem.N // config["tile_n"])


def _split_refusal(target: Target, problem: LinearProblem) -> str | None:
    if problem.K < LEAST_SPLIT_K:
        return f"K={problem.K} is below {LEAST_SPLIT_K}: too few steps of K to be shared"
    return _LINEAR.refusal(target, problem)


def _sharing_candidates(kernel: str) -> Callable[[Target, LinearProblem], list[Config]]:
    def candidates(target: Target, problem: LinearProblem) -> list[Config]:
        found = fastest_first(kernel, target, problem)
        configured = _configuring(kernel)(target, problem) if found else {}
        return sorted(found, key=lambda config: config != configured)

    return candidates


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


def _last_refusal(target: Target, problem: LinearProblem) -> str | None:
    if not any(last_splits(target, tile, problem.N, problem.K) for tile in LAST):
        return f"no row of tiles of M={problem.M}, N={problem.N}, K={problem.K} is to be shared"
    return _LINEAR.refusal(target, problem)


def _last_defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    return {**_defines(target, problem, _whole(config)), "MX_LAST": 1}


def _last_workgroups(target: Target, problem: LinearProblem, config: Config) -> tuple[int, int]:
    """Those with whole tiles, and all; one for each tile and part where there are places enough."""
    tile_m, splits, whole = config["tile_m"], config["splits"], _whole(config)
    places = target.cu_num * grouped.resident(one_group(problem), whole)
    parts = _columns(problem, config) * splits
    for is_wrong, why in (
        (not may_share_last((tile_m, config["tile_n"]), problem.K), "there are no such tiles"),
        (parts > places, f"{parts} parts, and workgroups have {places} places"),
        (2 * splits > -(-problem.K // _DEPTH), "too few steps of K to be shared"),
    ):
        if is_wrong:
            raise ValueError(f"{dict(config)} does not fit {problem}: {why}")
    tiles = (problem.M - 1) // tile_m * _columns(problem, config)
    halves = tiles * grouped.parts_of_last(whole)
    with_tiles = halves if halves <= places else min(tiles, places)
    return with_tiles, min(with_tiles + parts, places)


def _last_geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
    assert _LINEAR.module is not None
    plain = _LINEAR.module.geometry(target, problem, _whole(config))
    return replace(plain, grid=(_last_workgroups(target, problem, config)[1], 1, 1))


def _last_scalars(
    target: Target, problem: LinearProblem, config: Config
) -> tuple[int | float, ...]:
    assert _LINEAR.module is not None
    *sizes, _, _ = _LINEAR.module.scalars(target, problem, _whole(config))
    with_tiles, every = _last_workgroups(target, problem, config)
    return (*sizes, with_tiles, config["tile_m"], config["splits"], every)


def _last_bytes(target: Target, problem: LinearProblem, config: Config) -> int:
    """Of the rows that there are."""
    parts, tile_m = _columns(problem, config) * config["splits"], config["tile_m"]
    return parts * ((problem.M - 1) % tile_m + 1) * config["tile_n"] * _SUM_BYTES


def _meeting(module: Module) -> Module:
    """That whose workgroups meet."""
    after = place_of(module.args, "ends") + 1
    meetings = pointers("rw", "sums", "counts")
    return replace(module, args=(*module.args[:after], *meetings, *module.args[after:]))


_LINEAR = as_linear(grouped.PERSISTENT)
_MODULE = cast(Module, _LINEAR.module)
_MEETING = _meeting(_MODULE)

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
    configure=_configuring("persistent_split"),
    candidates=_sharing_candidates("persistent_split"),
    modules=(
        replace(
            _MEETING,
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

PERSISTENT_LAST = replace(
    _LINEAR,
    name="persistent_last",
    params=_LAST_PARAMS,
    refusal=_last_refusal,
    configure=_configuring("persistent_last"),
    candidates=_sharing_candidates("persistent_last"),
    modules=(
        replace(
            _MEETING,
            args=(*_MEETING.args, *numbers("i32", "splits", "groups")),
            defines=_last_defines,
            geometry=_last_geometry,
            scalars=_last_scalars,
        ),
    ),
    workspace_bytes=_last_bytes,
    counters=lambda target, problem, config: _columns(problem, config) * _WAVES,
    yields=yielding("persistent_last"),
)
