"""The Hopper kernel of the linear whose weights go straight into registers, for up to 16 rows of x,
csrc/linear/mma_registers_sm90.cu."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import ceil, log2

from aiter_mx.kernels.linear.problem import MATRIX_ARGS, LinearProblem, matrix_scalars
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    Config,
    Geometry,
    KernelSpec,
    Module,
    Param,
    cheapest,
    first_of,
)
from aiter_mx.target import Target

MAX_M = 16
_FEW, _EIGHT = 4, 8  # rows of x up to which products are of other kinds
MAX_SIZE = (1 << 31) - 1
_MOST_ROWS = 48
_FEWEST_ROWS = 4  # of a candidate
_USUAL_ROWS = (8, 16, 24, 32, 40, 48)
_FEWEST_WEIGHTS = 2_500_000  # below, the GEMV is faster on one H200
_MOST_FEATURES_OF_ONE = 45_000  # of one row of x; above, the GEMV was faster at 4 of 4 shapes
_MOST_OVERLAPPING_WEIGHTS = 260_000_000  # where launches overlap, on one H200
_MOST_CANDIDATES = 20
_MOST_ALIKE = 2
_CHUNK = 128  # k that a wave takes at a time
_REGISTERS = 65536  # of an SM
_MOST_REGISTERS = 232  # of a lane, above which ptxas was seen to spill
_SCHEDULER_REGISTERS = _REGISTERS // 4 // 32  # of an SM's scheduler, of each lane
_CYCLES_A_US = 4 * 1980  # of an SM's four schedulers
# Registers of a lane, by halves of rows, with which ptxas puts 16 bytes or more on the stack, up to
# M = 4 where each chunk is asked for while the one before is used: 1.05 to 2 times as slow.
_SPILLING = {1: range(88), 2: range(80), 3: range(104, 144)}
_LEAST_SHARE, _SPARE_SHARE = 0.9, 1.15  # of the registers that ptxas would take
_SUITS_BYTES = 63e3  # of weights under way on an SM
# What an H200 holds at once of what its SMs could, by the size of a cluster, which lies in a GPC.
_PACKED = {1: 1.0, 2: 1.0, 4: 0.93, 8: 0.93}
_SPLITS = (1, 2, 4, 8)
_MOST_SUMS_BYTES = 47 * 1024  # of static shared memory, which may have 48 KiB
_MOST_RESIDENT = (32, 8)  # workgroups of an SM: alone, and of clusters, which more only slow

PARAMS = (
    Param("rows", tuple(range(1, _MOST_ROWS + 1)), "output features that a workgroup computes"),
    Param("waves", (1, 2, 3, 4, 6, 8, 12, 16), "waves of a workgroup, which take turns with K"),
    Param(
        "unroll",
        (0, 1, 2, 3),
        "chunks of 128 k of a wave whose loads precede the first use; 0: each is asked for while"
        " the one before is used",
    ),
    Param("split", _SPLITS, "workgroups of a cluster, which share K"),
)


def _refusal(target: Target, problem: LinearProblem) -> str | None:
    if target.arch not in MODULE.sources:
        return f"no mma_registers kernel for {target.arch}, only for {' and '.join(MODULE.sources)}"
    if problem.M > MAX_M:
        return f"M={problem.M} is above {MAX_M}, the most rows of x in mma_registers"
    if max(problem.N * _SPLITS[-1], problem.K) > MAX_SIZE:
        return f"N={problem.N}, K={problem.K}: mma_registers counts K and its workgroups in 31 bits"
    return None


def _chunks(problem: LinearProblem) -> int:
    return -(-problem.K // _CHUNK)


def _at_once(config: Config) -> int:
    """Chunks that a wave has asked for before it uses the first."""
    return max(1, config["unroll"])


def _rounds(problem: LinearProblem, config: Config) -> int:
    chunks = _chunks(problem) // config["split"]
    return -(-chunks // (config["waves"] * _at_once(config)))


def _registers(problem: LinearProblem, config: Config) -> int:
    """Of a lane, about: what ptxas took for 36 configurations, or up to 11 more or less.

    With each chunk asked for while the one before is used ptxas takes up to 50 more if it may, but
    as many as here are enough, and better.
    """
    halves, unroll = -(-config["rows"] // 8), _at_once(config)
    if problem.M <= _FEW:
        return 36 + 9 * unroll * (halves + 1) + 7 * halves
    if problem.M <= _EIGHT:
        return 38 + unroll * (8 * halves + 9) + 9 * halves
    return 58 + unroll * (8 * halves + 16) + 10 * halves


def _sums_bytes(problem: LinearProblem, config: Config) -> int:
    """Of those that a workgroup adds, of all waves."""
    halves, split = -(-config["rows"] // 8), config["split"]
    units = next(units for units in (4, 2, 1) if units * halves <= split or units == 1)
    owned, lanes = -(-halves * units // split), 32 // units
    of_lane = 1 if problem.M <= _FEW else 2 if problem.M <= _EIGHT else 4
    return owned * split * config["waves"] * lanes * 4 * of_lane


def _fits(problem: LinearProblem, config: Config) -> bool:
    """Whether registers and K leave the configuration something to do."""
    waves, chunks = config["waves"], _chunks(problem) // config["split"]
    most = min(_REGISTERS // (32 * waves), _MOST_REGISTERS)
    rounds = -(-chunks // waves)
    return (
        _registers(problem, config) <= most
        and _sums_bytes(problem, config) <= _MOST_SUMS_BYTES
        and waves <= chunks
        and (config["unroll"] <= rounds if config["unroll"] else rounds > 1)
    )


def _of_sm(target: Target, problem: LinearProblem, config: Config) -> float:
    """Workgroups of an SM, if all had as many."""
    return -(-problem.N // config["rows"]) * config["split"] / target.cu_num


def _resident(target: Target, problem: LinearProblem, config: Config) -> int:
    """For how many workgroups of an SM ptxas is to leave registers, or 1 to leave that to it.

    It is told only where all of a launch would fit an SM with some registers less than it likes to
    take: told more, it asks for less at once.
    """
    waves, wanted = config["waves"], _registers(problem, config)
    most = _SCHEDULER_REGISTERS // (-(-wanted // 8) * 8)  # waves of a scheduler
    groups = ceil(_of_sm(target, problem, config) / _PACKED[config["split"]])
    of_scheduler = -(-groups * waves // 4)
    allowed = _SCHEDULER_REGISTERS // of_scheduler // 8 * 8
    fit = groups <= _MOST_RESIDENT[config["split"] > 1] and _LEAST_SHARE * wanted <= allowed
    if config["unroll"] == 0:
        return max(1, 4 * (of_scheduler if fit else most) // waves)
    return max(1, 4 * of_scheduler // waves) if fit and allowed < _SPARE_SHARE * wanted else 1


def _spills(target: Target, problem: LinearProblem, config: Config) -> bool:
    """Whether ptxas is held to registers with which it was seen to spill."""
    if problem.M > _FEW or config["unroll"] != 0:
        return False
    lanes = 32 * config["waves"] * _resident(target, problem, config)
    return _REGISTERS // lanes // 8 * 8 in _SPILLING.get(-(-config["rows"] // 8), ())


def _cost(target: Target, problem: LinearProblem, config: Config) -> float:
    """A model of what a call takes beyond reading, in us: fitted to 519 times on one H200."""
    rows, waves, split = config["rows"], config["waves"], config["split"]
    halves, chunks, a_round = -(-rows // 8), _chunks(problem) / split, waves * _at_once(config)
    of_scheduler = _SCHEDULER_REGISTERS // (-(-_registers(problem, config) // 8) * 8)
    held = max(4 * of_scheduler // waves, _resident(target, problem, config))
    resident = max(1, min(held, 64 // waves, _MOST_RESIDENT[split > 1]))
    of_sm = _of_sm(target, problem, config)
    under_way = min(resident, of_sm) * rows * min(a_round, chunks) * _CHUNK
    of_half, of_chunk = (73, 90) if problem.M <= _FEW else (55, 120)  # cycles
    busy_us = of_sm * chunks * (of_half * halves + of_chunk) / _CYCLES_A_US
    idle = -chunks % a_round / chunks
    starved = max(0.0, log2(_SUITS_BYTES / under_way))
    waits = of_sm > resident * _PACKED[split]  # for others to end
    length = _at_once(config) * halves  # of a round's code
    in_turn = 0.0
    if config["unroll"] == 0:  # of few rounds it makes little; overlapping launches gain most
        rounds = min(8, _rounds(problem, config))
        in_turn = 0.3 - 0.1 * rounds if problem.pdl else 0.2 - 0.03 * rounds
    of_round = 0.22 * length + 0.15 * (config["unroll"] > 1) + 0.18 * log2(waves)
    return 0.08 * busy_us + 1.7 * idle + 0.65 * starved + 1.8 * waits + of_round + in_turn


@lru_cache(maxsize=64)
def _candidates(target: Target, problem: LinearProblem) -> list[Config]:
    """Those of the least modelled time, which order them, but few that are alike."""
    even = {-(-problem.N // (target.cu_num * groups)) for groups in range(1, 9)}
    choices = {*_USUAL_ROWS, *(rows for rows in even if _FEWEST_ROWS <= rows <= _MOST_ROWS)}
    waves, unrolls, splits = (param.values for param in PARAMS[1:])
    found: list[Config] = [
        {"rows": rows, "waves": wave, "unroll": unroll, "split": split}
        for rows in sorted(choices)
        for wave in waves
        for unroll in unrolls
        for split in splits
        if split == 1 or wave > 1
    ]
    return cheapest(
        [c for c in found if _fits(problem, c) and not _spills(target, problem, c)],
        lambda config: _cost(target, problem, config),
        alike=("rows", "unroll", "split"),
        most_alike=_MOST_ALIKE,
        most=_MOST_CANDIDATES,
    )


def _yields(target: Target, problem: LinearProblem) -> str | None:
    weights = problem.N * problem.K
    if problem.x_dtype != "e4m3" or problem.K % _CHUNK:
        return f"mma_registers gains for quantised x, and whole chunks of {_CHUNK} k"
    if problem.pdl:
        if problem.M > _EIGHT or weights > _MOST_OVERLAPPING_WEIGHTS:
            return "others gain more where launches overlap"
        return None
    if problem.M == 1 and problem.N > _MOST_FEATURES_OF_ONE:
        return f"gemv is faster for one row of x above N={_MOST_FEATURES_OF_ONE}"
    if weights < _FEWEST_WEIGHTS:
        return f"mma_registers gains from {_FEWEST_WEIGHTS} weights on"
    return None


def _defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    rows = config["rows"]
    a_round = config["waves"] * _at_once(config) * config["split"]
    return {
        "MX_OUT": DTYPE_CODES[problem.out_dtype],
        "MX_TOKENS": _FEW if problem.M <= _FEW else _EIGHT if problem.M <= _EIGHT else MAX_M,
        "MX_ROWS": rows,
        "MX_WAVES": config["waves"],
        "MX_UNROLL": config["unroll"],
        "MX_SPLIT": config["split"],
        "MX_RESIDENT": _resident(target, problem, config),
        "MX_OVERLAPS": int(problem.pdl),
        "MX_EVEN": int(_chunks(problem) % a_round == 0),
        "MX_DEPTH": problem.K,
        "MX_ROWS_FIT": 2 if problem.N % rows == 0 else int(rows < problem.N),
    }


def _geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
    if _sums_bytes(problem, config) > _MOST_SUMS_BYTES:
        raise ValueError(
            f"mma_registers with {dict(config)} does not fit M={problem.M}: too many sums"
        )
    return Geometry(
        grid=(-(-problem.N // config["rows"]) * config["split"], 1, 1),
        block=(config["waves"] * target.wave_size, 1, 1),
        overlaps=problem.pdl,
    )


def _scalars(target: Target, problem: LinearProblem, config: Config) -> tuple[int | float, ...]:
    return matrix_scalars(problem)


MODULE = Module(
    sources={"sm_90a": "linear/mma_registers_sm90.cu"},
    symbol="aiter_mx_linear_mma_registers",
    args=MATRIX_ARGS,
    defines=_defines,
    geometry=_geometry,
    scalars=_scalars,
)

MMA_REGISTERS = KernelSpec(
    op="linear",
    backend="hip",
    name="mma_registers",
    params=PARAMS,
    refusal=_refusal,
    configure=first_of(_candidates),
    candidates=_candidates,
    module=MODULE,
    yields=_yields,
)
