"""The CDNA4 kernel of the linear for up to 4096 rows of x, csrc/linear/mfma_gfx950.cu, two ways:
``mfma``, and ``mfma_split``, whose workgroups share K."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.gfx950 import PRELOADED, SIDE, refuse_static_lds
from aiter_mx.kernels.linear.choice_gfx950 import configuring, yielding
from aiter_mx.kernels.linear.mfma_choice_gfx950 import (
    LEAST_SPLIT_K,
    MOST_SHARED_ROWS,
    SEARCHES,
    cheapest,
    tuned_for,
)
from aiter_mx.kernels.linear.mfma_ways_gfx950 import (
    BLOCK_M,
    COL_TILES,
    MAX_M,
    PARAMS,
    SPLITS,
    has_odd_blocks,
    has_too_few_lanes,
    lds_bytes_of,
    resident_of,
    way_of,
    work_of,
)
from aiter_mx.kernels.linear.problem import (
    POINTERS,
    QUANTISED_FIRST,
    X_CODES,
    LinearProblem,
    matrix_scalars,
    quantise_pays,
    quantised_first,
    too_many_results,
)
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    MAX_GRID_X,
    Arg,
    Config,
    Geometry,
    Parts,
    as_defines,
    numbers,
    pointers,
)
from aiter_mx.target import Target

MOST_BLOCK_ROWS = SIDE * COL_TILES[-1]  # of x
MAX_K = 1 << 25  # offsets within the rows of a workgroup, at most 128, are below 2^32
_QUANTISING = 4.8  # vector instructions for 64 values


def _refusal(target: Target, problem: LinearProblem) -> str | None:
    if problem.M > MAX_M:
        return f"M={problem.M} is above {MAX_M}, the most rows of mfma"
    if refusal := too_many_results(problem, MOST_BLOCK_ROWS):
        return refusal
    if problem.K >= MAX_K:
        return f"K={problem.K} is not below {MAX_K}, as the 32-bit offsets of mfma demand"
    return None


def _parts(target: Target, problem: LinearProblem, config: Config) -> Parts:
    """A quantisation first, where doing it here costs more or takes too much of something."""
    most = replace(problem, M=tuned_for(problem.M))
    fits = problem.K < MAX_K // 2 and resident_of(most, config, True) > 0
    groups = work_of(target, most, config).groups
    if fits and quantise_pays(target, most, groups, _QUANTISING):
        return ()
    return quantised_first(target, problem, config)


def _configuring(kernel: str) -> Callable[[Target, LinearProblem], Config]:
    """What is chosen for so many rows serves fewer of them too."""

    def otherwise(target: Target, problem: LinearProblem) -> Config:
        return cheapest(kernel, target, tuned_for(problem.M), problem.N, problem.K)

    return configuring(kernel, otherwise)


def _candidates(kernel: str) -> Callable[[Target, LinearProblem], list[Config]]:
    """What is configured is among them."""

    def candidates(target: Target, problem: LinearProblem) -> list[Config]:
        M = tuned_for(problem.M) if problem.M > SIDE else problem.M
        found = SEARCHES[kernel].candidates(target, replace(problem, M=M))
        configured = _configuring(kernel)(target, problem) if found else None
        return found if configured is None or configured in found else [configured, *found]

    return candidates


def _split_refusal(target: Target, problem: LinearProblem) -> str | None:
    if problem.M > MOST_SHARED_ROWS:
        return f"M={problem.M} is above {MOST_SHARED_ROWS}, the most rows for which K is split"
    if problem.M > BLOCK_M and problem.K <= LEAST_SPLIT_K:
        most = f"M={problem.M} is above {BLOCK_M}, and K={problem.K} is not above {LEAST_SPLIT_K}"
        return f"{most}: too few steps of K to be split"
    return _refusal(target, problem)


def _defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    return {
        "MX_PRELOAD": PRELOADED,
        "MX_SPLITS": 1,
        **as_defines({name: config[name] for name in config if name != "blocks"}),
        "MX_COL_TILES": way_of(problem, config).col_tiles,
        "MX_EVEN_BLOCKS": int(not has_odd_blocks(problem.K)),
        "MX_X": X_CODES[problem.x_dtype],
        "MX_OUT": DTYPE_CODES[problem.out_dtype],
        "MX_MAX_GRID_X": MAX_GRID_X,
    }


def _geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
    way = way_of(problem, config)
    needed = lds_bytes_of(config["row_tiles"], way.col_tiles, config["waves"])
    refuse_static_lds(problem, config, needed)
    if has_too_few_lanes(config["row_tiles"], config["fold"], config["waves"]):
        raise ValueError(
            f"{dict(config)} does not fit {problem}: a workgroup would have fewer lanes than rows "
            "of w, and each lane adds the bias of one: take more waves"
        )
    groups = work_of(target, problem, config).groups // max(1, way.blocks)
    return Geometry(
        grid=(min(groups, MAX_GRID_X), -(-groups // MAX_GRID_X), way.blocks),
        block=(config["waves"] * target.wave_size, 1, 1),
    )


def _tiles(target: Target, problem: LinearProblem, config: Config) -> int:
    """Of outputs, for a block of x: a workgroup computes one, or several share it."""
    way = way_of(problem, config)
    return work_of(target, problem, config).groups // (way.splits * max(1, way.blocks))


def _slot_words(target: Target, problem: LinearProblem, config: Config) -> int:
    """Two for two sums, wherever two of the workgroups that share K meet."""
    way = way_of(problem, config)
    sums = way.row_tiles * way.col_tiles * (SIDE // config["fold"]) ** 2
    return _tiles(target, problem, config) * way.blocks * (way.splits - 1) * sums


def _scalars(target: Target, problem: LinearProblem, config: Config) -> tuple[int | float, ...]:
    tiles = max(1, _tiles(target, problem, config))
    *sizes, bias_kind = matrix_scalars(problem)
    return (*sizes, problem.N // tiles, problem.N % tiles, tiles, bias_kind)


# Those that registers have as a wave begins end with the pointers to x and w.
_SIZES = numbers("i32", "M", "N", "K", "rows_each", "longer_tiles", "tiles")
_BIAS_KIND = Arg("bias_kind", "i32")

MFMA = declare(
    "linear",
    "mfma",
    {"gfx950": "linear/mfma_gfx950.cu"},
    args=(*_SIZES, *POINTERS, _BIAS_KIND),
    defines=_defines,
    geometry=_geometry,
    scalars=_scalars,
    refusal=_refusal,
    params=PARAMS,
    configure=_configuring("mfma"),
    candidates=_candidates("mfma"),
    composed=replace(QUANTISED_FIRST, parts=_parts),
    yields=yielding("mfma"),
)

MFMA_SPLIT = declare(
    "linear",
    "mfma_split",
    {"gfx950": "linear/mfma_gfx950.cu"},
    args=(*_SIZES, *POINTERS, *pointers("rw", "slots"), _BIAS_KIND),
    defines=_defines,
    geometry=_geometry,
    scalars=_scalars,
    refusal=_split_refusal,
    params=(*PARAMS, SPLITS),
    configure=_configuring("mfma_split"),
    candidates=_candidates("mfma_split"),
    composed=QUANTISED_FIRST,
    counters=_slot_words,
    yields=yielding("mfma_split"),
)
