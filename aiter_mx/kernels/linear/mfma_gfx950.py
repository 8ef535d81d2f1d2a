"""The CDNA4 kernel of the linear for up to 64 rows of x, csrc/linear/mfma_gfx950.cu."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from typing import NamedTuple

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.gfx950 import (
    BYTES_A_CYCLE,
    LATENCY_CYCLES,
    SIDE,
    TILE_CYCLES,
    TILE_K,
    WAVES,
    refuse_static_lds,
    resident,
)
from aiter_mx.kernels.linear.problem import (
    MATRIX_ARGS,
    QUANTISED_FIRST,
    X_CODES,
    LinearProblem,
    matrix_scalars,
    quantise_pays,
    quantised_first,
    rows_tuned_for,
)
from aiter_mx.kernels.search import Costed, Least, Search, without_waste
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    MAX_GRID_X,
    Arg,
    Config,
    Geometry,
    Param,
    Parts,
    as_defines,
)
from aiter_mx.numerics import BLOCK
from aiter_mx.target import Target

PARAMS = (
    Param("row_tiles", (1, 2, 3, 4), "tiles of w that a workgroup computes, 16 / fold rows each"),
    Param("fold", (1, 2, 4), "parts of K that a tile has side by side"),
    Param("waves", WAVES, "waves of a workgroup, which split K"),
    Param(
        "unroll", (1, 2, 3, 4), "steps of a wave whose loads are issued before the first is used"
    ),
)

MAX_M = 64
MAX_K = 1 << 25  # offsets within the rows of a workgroup, at most 64, are below 2^31
_MOST_COL_TILES = 4
_MOST_CANDIDATES = 48

_QUANTISING = 4.8  # vector instructions for 64 values


class _Work(NamedTuple):
    """What a configuration makes of a problem.

    Attributes:
        col_tiles: tiles of x.
        groups: workgroups.
        of_busiest: workgroups of the busiest compute unit.
        rows: of w, of the largest workgroup.
        steps: tiles along K.
    """

    col_tiles: int
    groups: int
    of_busiest: int
    rows: int
    steps: int


def _work(target: Target, problem: LinearProblem, row_tiles: int, fold: int) -> _Work:
    """Workgroups are as many on each compute unit, where there are rows for them: the busiest has
    no more of them then, and each has fewer rows."""
    needed = -(-problem.N * fold // (SIDE * row_tiles))
    of_busiest = -(-needed // target.cu_num)
    groups = min(problem.N, of_busiest * target.cu_num)
    col_tiles = -(-problem.M * fold // SIDE)
    if fold > 1 and col_tiles == 3:
        col_tiles = 4  # one code object less, for a few rows that are there in the cache
    return _Work(
        col_tiles=col_tiles,
        groups=groups,
        of_busiest=-(-groups // target.cu_num),
        rows=-(-problem.N // max(groups, 1)),
        steps=-(-problem.K // (TILE_K * fold)),
    )


def _work_of(target: Target, problem: LinearProblem, config: Config) -> _Work:
    return _work(target, problem, config["row_tiles"], config["fold"])


def _refusal(target: Target, problem: LinearProblem) -> str | None:
    if problem.M > MAX_M:
        return f"M={problem.M} is above {MAX_M}, the most rows of mfma"
    if problem.K >= MAX_K:
        return f"K={problem.K} is not below {MAX_K}, as the 32-bit offsets of mfma demand"
    return None


def _parts(target: Target, problem: LinearProblem, config: Config) -> Parts:
    """A quantisation first, where doing it here costs more or takes too much of something."""
    most = replace(problem, M=rows_tuned_for(problem.M))
    work = _work_of(target, most, config)
    fits = problem.K < MAX_K // 2 and _resident_of(config, work, quantises=True) > 0
    if fits and quantise_pays(target, most, work.groups, _QUANTISING):
        return ()
    return quantised_first(target, problem, config)


def _registers(rows: int, cols: int, unroll: int, quantises: bool = False) -> int:
    """At most so many registers of a lane: loads, sums and addresses, as compilers have it."""
    held = 10 * max(0, rows - 2) * max(0, cols - 1)
    if quantises:
        held += 8 + 16 * unroll * cols
    return 42 + 17 * unroll * (rows + cols) + 4 * rows * cols + held


@cache
def _resident(
    row_tiles: int, col_tiles: int, waves: int, unroll: int, quantises: bool = False
) -> int:
    """Workgroups that a compute unit holds at once; 0 where not even one fits."""
    registers = _registers(row_tiles, col_tiles, unroll, quantises)
    return resident(registers, waves, _lds_bytes(row_tiles, col_tiles, waves))


def _resident_of(config: Config, work: _Work, quantises: bool = False) -> int:
    tiles = (config["row_tiles"], work.col_tiles)
    return _resident(*tiles, config["waves"], config["unroll"], quantises)


def _lds_bytes(row_tiles: int, col_tiles: int, waves: int) -> int:
    """What a workgroup declares: a tile or the sums of each wave, and the bias of its rows."""
    return waves * 1024 * max(4, row_tiles * col_tiles) + 256


def _costs(target: Target, problem: LinearProblem, least: Least) -> Iterator[Costed]:
    """A bound on the time in cycles; then what to have less of where bounds are equal."""
    for tile in product(PARAMS[0].values, PARAMS[1].values):
        work = _work(target, problem, *tile)
        memory = work.of_busiest * work.rows * problem.K * 33 / 32 / BYTES_A_CYCLE
        loads = work.of_busiest * work.steps * (tile[0] + work.col_tiles) * TILE_CYCLES
        if work.col_tiles > _MOST_COL_TILES or max(memory, loads) > least.cost:
            continue
        for unroll in PARAMS[3].values:
            for waves, turns in without_waste(WAVES, work.steps, unroll):
                held = _resident(tile[0], work.col_tiles, waves, unroll)
                if held > 0:
                    rounds = turns * -(-work.of_busiest // held)
                    cycles = max(memory, loads, rounds * LATENCY_CYCLES)
                    yield cycles, (rounds, loads, waves * unroll, unroll), (*tile, waves, unroll)


_search = Search(PARAMS, _costs, _MOST_CANDIDATES)


def _configure(target: Target, problem: LinearProblem) -> Config:
    return _search.best(target, replace(problem, M=rows_tuned_for(problem.M)))


def _defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    return {
        **as_defines(config),
        "MX_COL_TILES": _work_of(target, problem, config).col_tiles,
        "MX_EVEN_BLOCKS": int(problem.K % (2 * BLOCK) == 0),
        "MX_X": X_CODES[problem.x_dtype],
        "MX_OUT": DTYPE_CODES[problem.out_dtype],
        "MX_MAX_GRID_X": MAX_GRID_X,
    }


def _geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
    work = _work_of(target, problem, config)
    needed = _lds_bytes(config["row_tiles"], work.col_tiles, config["waves"])
    refuse_static_lds(problem, config, needed)
    groups = work.groups
    return Geometry(
        grid=(min(groups, MAX_GRID_X), -(-groups // MAX_GRID_X), 1),
        block=(config["waves"] * target.wave_size, 1, 1),
    )


def _scalars(target: Target, problem: LinearProblem, config: Config) -> tuple[int | float, ...]:
    groups = max(1, _work_of(target, problem, config).groups)
    return (*matrix_scalars(problem), problem.N // groups, problem.N % groups)


MFMA = declare(
    "linear",
    "mfma",
    {"gfx950": "linear/mfma_gfx950.cu"},
    args=(*MATRIX_ARGS, Arg("rows_each", "i32"), Arg("longer_groups", "i64")),
    defines=_defines,
    geometry=_geometry,
    scalars=_scalars,
    refusal=_refusal,
    params=PARAMS,
    configure=_configure,
    candidates=_search.candidates,
    composed=replace(QUANTISED_FIRST, parts=_parts),
)
