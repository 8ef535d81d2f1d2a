"""The decode GEMV, csrc/linear/gemv.h."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import log2

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.linear.mma_registers_sm90 import MMA_REGISTERS
from aiter_mx.kernels.linear.problem import (
    POINTERS,
    QUANTISED_FIRST,
    X_CODES,
    LinearProblem,
    quantise_pays,
    quantised_first,
    too_many_results,
)
from aiter_mx.kernels.search import ROUNDED_OFF, Costed, Least, Search, without_waste
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

MAX_M = 16
_MOST = {"gfx950": {"K": 1 << 27, "N": 1 << 31}}  # offsets within 16 rows of x are below 2^31
_LEAST_OWN_K, _LEAST_DEPTH = 10240, 100
"""On gfx950, without a table: of one row of x, and K for each output, by the model of time."""
_PIECE_BYTES = 16  # what a lane reads of one row of w in one step
_WAVES = (1, 2, 3, 4, 6, 8, 12)
_MOST_WIDE_ROWS = 8  # of x, of all steps that are under way, before they are quantised
# Of a compute unit for 64 values: counted for gfx950, measured on an H200 (docs/kernels/gemv.md).
_QUANTISING_CYCLES = {"gfx950": 6.7, "sm_90a": 3.4}
_MANY_WAVES = 8  # with more of them in a workgroup large M spills

PARAMS = (
    Param("rows", (1, 2, 3, 4, 6, 8), "output features that a workgroup computes"),
    Param("waves", _WAVES, "waves of a workgroup, which split K"),
    Param(
        "unroll", (1, 2, 3, 4), "steps of a wave whose loads are issued before the first is used"
    ),
)


def _refusal(target: Target, problem: LinearProblem) -> str | None:
    if problem.M > MAX_M:
        return f"M={problem.M} is above {MAX_M}, the most rows gemv holds in registers"
    for name, most in _MOST.get(target.arch, {}).items():
        if getattr(problem, name) >= most:
            size = getattr(problem, name)
            return f"{name}={size} is not below {most}, as the 32-bit offsets of gemv demand"
    return too_many_results(problem, MAX_M) if target.arch == "gfx950" else None


def _configure(target: Target, problem: LinearProblem) -> Config:
    """A balanced configuration without spills; docs/kernels/gemv.md has its reasons."""
    if target.arch == "sm_90a":
        return _search.best(target, problem)
    M, cus = problem.M, target.cu_num

    def groups_a_cu(rows: int) -> int:
        return -(-problem.N // (rows * cus))

    # Instructions of the busiest compute unit for two k of each row: to convert w and x, to
    # multiply, and for each 16 k to sum and scale.
    most_rows = 3 if M > 14 else 4
    rows = min(range(most_rows, 0, -1), key=lambda r: groups_a_cu(r) * (r * (1 + 1.375 * M) + M))
    most_unroll = {1: 3, 2: 2}.get(M, 1)
    # Enough lanes on a compute unit to hide memory's latency, in waves of at least one step.
    lanes = 768 if M <= 8 else 512
    steps = _steps(target, problem)
    wanted = min(-(-lanes // (target.wave_size * groups_a_cu(rows))), steps, _MANY_WAVES)
    waves = next(w for w in _WAVES if w >= wanted)
    unroll = min(most_unroll, -(-steps // waves))
    fewest = max(w for w, _ in without_waste(_WAVES, steps, unroll) if w <= waves)
    return {"rows": rows, "waves": fewest, "unroll": unroll}


def _yields(target: Target, problem: LinearProblem) -> str | None:
    """Where another is the better kernel: docs/kernels/gemv.md says why."""
    if (
        MMA_REGISTERS.refusal(target, problem) is None
        and MMA_REGISTERS.yields(target, problem) is None
    ):
        return "mma_registers is faster here by its fitted times"
    if target.arch == "sm_90a" and problem.M <= MAX_M:
        weights = problem.N * problem.K
        saved_us = min(1.1, 1.2e-7 * weights) if problem.pdl else 0
        gemv_us = 2.4 + (1.7 + 0.75 * problem.M) * 1e-7 * weights - saved_us / (2 * problem.M)
        mma_us = 3.4 + 2.57e-7 * weights - saved_us
        return "mma_ring is faster here by its fitted times" if mma_us < gemv_us else None
    is_deep = max(_LEAST_OWN_K, _LEAST_DEPTH * problem.N) <= problem.K
    if target.arch == "gfx950" and (problem.M > 1 or not is_deep):
        return "mfma is as fast or faster by the model of time, with one code object for several M"
    return None


@dataclass(frozen=True)
class _Taste:
    """What a configuration costs for being unlike the one that suits a GPU.

    Attributes:
        lanes: that suit a compute unit, times the steps that each has under way.
        off: for each factor of two from them.
        rest: for lanes without work in the last round, as a share of K.
        fewer_rows, more_rows: for each factor of two from four rows of a workgroup.
    """

    lanes: int
    off: float
    rest: float = 0.0
    fewer_rows: float = 0.0
    more_rows: float = 0.0


_AT_ONE_ROW_ON_HOPPER = _Taste(lanes=768, off=0.5, rest=2.0, fewer_rows=0.4, more_rows=0.2)
"""Fitted to a sweep of 31 shapes on an H200; with pdl or more rows it does no better."""


def _steps(target: Target, problem: LinearProblem) -> int:
    return -(-problem.K // (_PIECE_BYTES * target.wave_size))


def _costs(target: Target, problem: LinearProblem, least: Least) -> Iterator[Costed]:
    """The configurations that waste no wave and leave the sums and loads room in registers.

    First come those with little work for the busiest compute unit and about as many loads under way
    as suit a CDNA4 too, and of these waves rather than steps.
    """
    M, steps = problem.M, _steps(target, problem)
    taste = _Taste(lanes=768 if M <= 8 else 512, off=0.5)
    if target.arch == "sm_90a" and M == 1 and not problem.pdl:
        taste = _AT_ONE_ROW_ON_HOPPER
    least_work = -(-problem.N // target.cu_num) * (1 + 1.375 * M)
    for rows in PARAMS[0].values:
        if rows > (3 if M > 14 else 4) and rows * M > 32:
            continue
        groups = -(-problem.N // (rows * target.cu_num))
        work = groups * (rows * (1 + 1.375 * M) + M) / least_work
        of_rows = log2(rows / 4) * (taste.more_rows if rows > 4 else -taste.fewer_rows)
        if (work + of_rows) * ROUNDED_OFF > least.cost:
            continue
        for unroll in PARAMS[2].values:
            if unroll > 1 and unroll * (rows + M) > 16:
                break
            for waves, _ in without_waste(_WAVES, steps, unroll):
                many = waves > _MANY_WAVES
                if many and rows * M > 8:
                    break
                under_way = waves * unroll
                lanes = under_way * target.wave_size * groups
                rest = -steps % under_way / steps  # of K, for which lanes have nothing to do
                unlike = taste.off * abs(log2(lanes / taste.lanes)) + taste.rest * rest
                yield work + (unlike + of_rows), (many, unroll), (rows, waves, unroll)


_search = Search(PARAMS, _costs)


def _parts(target: Target, problem: LinearProblem, config: Config) -> Parts:
    """A quantisation first, where doing it here costs more or takes too many registers."""
    groups = -(-problem.N // config["rows"])
    fits = config["unroll"] * problem.M <= _MOST_WIDE_ROWS
    if fits and quantise_pays(target, problem, groups, _QUANTISING_CYCLES[target.arch]):
        return ()
    return quantised_first(target, problem, config)


def _overlaps(target: Target, problem: LinearProblem) -> bool:
    return problem.pdl and target.arch == "sm_90a"


def _defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    blocks = problem.K // BLOCK
    own = {
        "gfx950": {"MX_SCALE_DWORDS": 0 if blocks < 4 else 1 + (blocks % 4 == 0)},
        "sm_90a": {"MX_OVERLAPS": int(_overlaps(target, problem))},
    }
    return {
        **as_defines(config),
        "MX_M": problem.M,
        "MX_X": X_CODES[problem.x_dtype],
        "MX_OUT": DTYPE_CODES[problem.out_dtype],
        "MX_MAX_GRID_X": MAX_GRID_X,
        **own[target.arch],
    }


def _geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
    groups = -(-problem.N // config["rows"])
    return Geometry(
        grid=(min(groups, MAX_GRID_X), -(-groups // MAX_GRID_X), 1),
        block=(config["waves"] * target.wave_size, 1, 1),
        overlaps=_overlaps(target, problem),
    )


def _scalars(target: Target, problem: LinearProblem, config: Config) -> tuple[int | float, ...]:
    return (problem.N, problem.K, DTYPE_CODES[problem.bias])


GEMV = declare(
    "linear",
    "gemv",
    {"gfx950": "linear/gemv_gfx950.cu", "sm_90a": "linear/gemv_sm90.cu"},
    args=(*POINTERS, Arg("N", "i64"), Arg("K", "i64"), Arg("bias_kind", "i32")),
    defines=_defines,
    geometry=_geometry,
    scalars=_scalars,
    refusal=_refusal,
    params=PARAMS,
    configure=_configure,
    candidates=_search.candidates,
    composed=replace(QUANTISED_FIRST, parts=_parts),
    yields=_yields,
)
