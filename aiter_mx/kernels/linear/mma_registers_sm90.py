"""The Hopper kernel of the linear whose weights go straight into registers, for up to 16 rows of x,
csrc/linear/mma_registers_sm90.cu."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from math import ceil, log2

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.linear.fitted_sm90 import MmaRegisters
from aiter_mx.kernels.linear.problem import (
    MATRIX_ARGS,
    QUANTISED_MEANWHILE,
    X_CODES,
    LinearProblem,
    matrix_scalars,
    quantised_meanwhile,
)
from aiter_mx.kernels.search import ROUNDED_OFF, Costed, Least, Search
from aiter_mx.kernels.sm90 import CHUNK, REGISTERS
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    MAX_INT,
    Config,
    Geometry,
    Param,
    Parts,
    as_defines,
)
from aiter_mx.target import Target

MAX_M = 16
_FEW, _EIGHT = 4, 8  # rows of x up to which products are of other kinds
_MOST_ROWS = 48
_FEWEST_ROWS = 4  # of a candidate
_USUAL_ROWS = (8, 16, 24, 32, 40, 48)
_MOST_FEATURES_OF_ONE = 45_000  # of one row of x; above, the GEMV was faster at 4 of 4 shapes
_MOST_OVERLAPPING_WEIGHTS = 260_000_000  # where launches overlap, on one H200
_MOST_CANDIDATES = 20
_MOST_ALIKE = 2
_MOST_QUANTISING_US = 2.5  # of an SM: with more a launch that quantises is faster, on one H200
_MOST_REGISTERS = 232  # of a lane, above which ptxas was seen to spill
_SCHEDULER_REGISTERS = REGISTERS // 4 // 32  # of an SM's scheduler, of each lane
_CYCLES_A_US = 4 * 1980  # of an SM's four schedulers
# Registers of a lane, by halves of rows, with which ptxas puts 16 bytes or more on the stack, up to
# M = 4 where each chunk is asked for while the one before is used: 1.05 to 2 times as slow.
_SPILLING = {1: range(88), 2: range(80), 3: range(104, 144)}
_LEAST_SHARE, _SPARE_SHARE = 0.9, 1.15  # of the registers that ptxas would take
FITTED = MmaRegisters()
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
    if problem.M > MAX_M:
        return f"M={problem.M} is above {MAX_M}, the most rows of x in mma_registers"
    if max(problem.N * _SPLITS[-1], problem.K) > MAX_INT:
        return f"N={problem.N}, K={problem.K}: mma_registers counts K and its workgroups in 31 bits"
    return None


def _chunks(problem: LinearProblem) -> int:
    return -(-problem.K // CHUNK)


def _class(M: int) -> int:
    """The most rows of x whose products are of the same kind, ``MX_TOKENS``."""
    return _FEW if M <= _FEW else _EIGHT if M <= _EIGHT else MAX_M


def _registers(M: int, halves: int, unroll: int) -> int:
    """Of a lane, about: what ptxas took for 36 configurations, or up to 11 more or less.

    With each chunk asked for while the one before is used ptxas takes up to 50 more if it may, but
    as many as here are enough, and better.
    """
    at_once = max(1, unroll)
    if M <= _FEW:
        return 36 + 9 * at_once * (halves + 1) + 7 * halves
    if M <= _EIGHT:
        return 38 + at_once * (8 * halves + 9) + 9 * halves
    return 58 + at_once * (8 * halves + 16) + 10 * halves


def _sums_bytes(M: int, halves: int, waves: int, split: int) -> int:
    """Of those that a workgroup adds, of all waves."""
    units = next(units for units in (4, 2, 1) if units * halves <= split or units == 1)
    owned, lanes = -(-halves * units // split), 32 // units
    of_lane = 1 if M <= _FEW else 2 if M <= _EIGHT else 4
    return owned * split * waves * lanes * 4 * of_lane


def _of_sm(target: Target, problem: LinearProblem, rows: int, split: int) -> float:
    """Workgroups of an SM, if all had as many."""
    return -(-problem.N // rows) * split / target.cu_num


def _resident(of_sm: float, registers: int, waves: int, unroll: int, split: int) -> int:
    """For how many workgroups of an SM ptxas is to leave registers, or 1 to leave that to it.

    It is told only where all of a launch would fit an SM with some registers less than it likes to
    take: told more, it asks for less at once.
    """
    groups = ceil(of_sm / _PACKED[split])
    of_scheduler = -(-groups * waves // 4)
    allowed = _SCHEDULER_REGISTERS // of_scheduler // 8 * 8
    fit = groups <= _MOST_RESIDENT[split > 1] and _LEAST_SHARE * registers <= allowed
    if unroll == 0:
        most = _SCHEDULER_REGISTERS // (-(-registers // 8) * 8)  # waves of a scheduler
        return max(1, 4 * (of_scheduler if fit else most) // waves)
    return max(1, 4 * of_scheduler // waves) if fit and allowed < _SPARE_SHARE * registers else 1


def _costs(target: Target, problem: LinearProblem, least: Least) -> Iterator[Costed]:
    """A model of what a call takes beyond reading, in us: see ``FITTED``."""
    M, all_chunks = problem.M, _chunks(problem)
    class_M = _class(M)
    of_half, of_chunk, quantised = FITTED.half, FITTED.chunk, FITTED.quantised  # cycles
    if M > _FEW:
        of_half, of_chunk = FITTED.many_half, FITTED.many_chunk
        quantised = FITTED.many_quantised
    quantises = problem.x_dtype != "e4m3"
    quantised *= FITTED.quantising if quantises else 0
    even = {-(-problem.N // (target.cu_num * groups)) for groups in range(1, 9)}
    choices = {*_USUAL_ROWS, *(rows for rows in even if _FEWEST_ROWS <= rows <= _MOST_ROWS)}
    busy = []
    for rows, split in product(choices, _SPLITS):
        of_sm, halves = _of_sm(target, problem, rows, split), -(-rows // 8)
        of_all = FITTED.busy * (of_half * halves + of_chunk) + quantised
        busy_us = of_sm * (all_chunks / split) * of_all / _CYCLES_A_US
        if loops := _loops()[class_M, halves, split > 1][problem.pdl]:
            busy.append((busy_us + loops[0][0], busy_us, rows, split, of_sm, loops))
    for bound, busy_us, rows, split, of_sm, loops in sorted(busy):
        if bound * ROUNDED_OFF > least.cost:
            break
        halves, chunks, whole_chunks = -(-rows // 8), all_chunks / split, all_chunks // split
        # Of chunks under way.
        short = FITTED.starved * log2(FITTED.under_way_bytes / (of_sm * rows * CHUNK))
        left = least.cost / ROUNDED_OFF - busy_us
        for bound, at_once, unroll, waves, a_lane, of_scheduler, most, of_round in loops:
            if bound > left:
                break
            if at_once + short > left or (quantises and unroll == 0):
                continue
            rounds = -(-whole_chunks // waves)
            if waves > whole_chunks or (unroll > rounds if unroll else rounds < 2):
                continue
            a_round = waves * max(1, unroll)
            idle = -chunks % a_round / chunks
            in_turn = _in_turn_us(rounds, problem.pdl) if unroll == 0 else 0.0
            waits = of_sm > most * _PACKED[split]
            bound = busy_us + FITTED.idle * idle + FITTED.waits * waits + of_round + in_turn
            if bound * ROUNDED_OFF > least.cost:
                continue
            under_way = rows * min(a_round, chunks) * CHUNK
            starved = max(0.0, log2(FITTED.under_way_bytes / (min(most, of_sm) * under_way)))
            if (bound + FITTED.starved * starved) * ROUNDED_OFF > least.cost:
                continue
            if _sums_bytes(class_M, halves, waves, split) > _MOST_SUMS_BYTES:
                continue
            wanted = _resident(of_sm, a_lane, waves, unroll, split)
            if class_M == _FEW and unroll == 0 and _spills(halves, 32 * waves * wanted):
                continue
            resident = max(1, min(max(4 * of_scheduler // waves, wanted), 64 // waves))
            resident = min(resident, _MOST_RESIDENT[split > 1])
            starved = max(0.0, log2(FITTED.under_way_bytes / (min(resident, of_sm) * under_way)))
            waits = of_sm > resident * _PACKED[split]  # for others to end
            cost = busy_us + FITTED.idle * idle + FITTED.starved * starved
            cost = cost + FITTED.waits * waits + of_round + in_turn
            yield cost, (), (rows, waves, unroll, split)
            left = least.cost / ROUNDED_OFF - busy_us


_Loop = tuple[float, float, int, int, int, int, int, float]
"""A loop that registers leave room for: a bound of what it costs beyond computing, another for one
chunk under way of an SM in place of those that there may be, its unroll and waves, registers of a
lane, waves of a scheduler, the most workgroups of an SM whatever ptxas is told, and the cost of its
rounds."""


@cache
def _loops() -> dict[tuple[int, int, bool], tuple[list[_Loop], list[_Loop]]]:
    """Those of each kind of products, halves of rows, and without clusters or with them: all at
    once, so that one new shape waits for them."""
    kinds = product((_FEW, _EIGHT, MAX_M), range(1, -(-_MOST_ROWS // 8) + 1), (False, True))
    return {kind: _loops_of(*kind) for kind in kinds}


def _loops_of(class_M: int, halves: int, clustered: bool) -> tuple[list[_Loop], list[_Loop]]:
    """Those of launches that do not overlap and of those that do, by their bounds."""
    alone: list[_Loop] = []
    overlapping: list[_Loop] = []
    for unroll in PARAMS[2].values:
        registers = _registers(class_M, halves, unroll)
        of_scheduler = _SCHEDULER_REGISTERS // (-(-registers // 8) * 8)
        waves_of_sm = 4 * int(_SCHEDULER_REGISTERS / (_LEAST_SHARE * registers))
        length = max(1, unroll) * halves  # of a round's code
        of_round = FITTED.length * length + FITTED.unrolled * (unroll > 1)
        in_turn = [_in_turn_us(8, overlaps) if unroll == 0 else 0.0 for overlaps in (False, True)]
        for waves in PARAMS[1].values[clustered:]:
            if registers > min(REGISTERS // (32 * waves), _MOST_REGISTERS):
                break
            cost = of_round + FITTED.waves * log2(waves)
            most = max(1, min(waves_of_sm // waves, 64 // waves, _MOST_RESIDENT[clustered]))
            under_way = most * 8 * length * waves * CHUNK
            bound = cost
            if under_way < FITTED.under_way_bytes:
                bound += FITTED.starved * log2(FITTED.under_way_bytes / under_way)
            at_once = cost - FITTED.starved * log2(waves * max(1, unroll))
            known = (unroll, waves, registers, of_scheduler, most, cost)
            for found, less in zip((alone, overlapping), in_turn, strict=True):
                found.append((bound + less, at_once + less, *known))
    return sorted(alone), sorted(overlapping)


def _in_turn_us(rounds: int, overlaps: bool) -> float:
    """Of few rounds a loop in turn makes little; overlapping launches gain most."""
    rounds = min(8, rounds)
    if overlaps:
        return FITTED.overlapping_in_turn - FITTED.overlapping_round * rounds
    return FITTED.in_turn - FITTED.round * rounds


def _spills(halves: int, lanes: int) -> bool:
    """Whether ptxas is held to registers with which it was seen to spill."""
    return REGISTERS // lanes // 8 * 8 in _SPILLING.get(halves, ())


_search = Search(
    PARAMS,
    _costs,
    most=_MOST_CANDIDATES,
    alike=("rows", "unroll", "split"),
    most_alike=_MOST_ALIKE,
)


def _yields(target: Target, problem: LinearProblem) -> str | None:
    if problem.K % CHUNK or (problem.x_dtype != "e4m3" and problem.M > _EIGHT):
        return f"mma_registers gains for few rows or quantised x, and whole chunks of {CHUNK} k"
    if problem.pdl:
        if problem.M > _EIGHT or problem.N * problem.K > _MOST_OVERLAPPING_WEIGHTS:
            return "others gain more where launches overlap"
        return None
    if problem.M == 1 and problem.N > _MOST_FEATURES_OF_ONE:
        return f"gemv is faster for one row of x above N={_MOST_FEATURES_OF_ONE}"
    return None


def _parts(target: Target, problem: LinearProblem, config: Config) -> Parts:
    """A quantisation first, where doing it in each workgroup takes longer."""
    rows, split = config["rows"], config["split"]
    quantised = FITTED.quantised if problem.M <= _FEW else FITTED.many_quantised
    cycles = _of_sm(target, problem, rows, split) * _chunks(problem) / split * quantised
    if problem.M <= _EIGHT and cycles <= _MOST_QUANTISING_US * _CYCLES_A_US:
        return ()
    return quantised_meanwhile(target, problem, config)


def _defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    rows, waves, unroll, split = (config[param.name] for param in PARAMS)
    if problem.x_dtype != "e4m3":
        unroll = max(1, unroll)  # while x is quantised no weights would be asked for
    a_round = waves * max(1, unroll) * split
    registers = _registers(problem.M, -(-rows // 8), unroll)
    return {
        **as_defines({**config, "unroll": unroll}),
        "MX_OUT": DTYPE_CODES[problem.out_dtype],
        "MX_X": X_CODES[problem.x_dtype],
        "MX_TOKENS": _class(problem.M),
        "MX_RESIDENT": _resident(
            _of_sm(target, problem, rows, split), registers, waves, unroll, split
        ),
        "MX_OVERLAPS": int(problem.pdl),
        "MX_EVEN": int(_chunks(problem) % a_round == 0),
        "MX_DEPTH": problem.K,
        "MX_ROWS_FIT": 2 if problem.N % rows == 0 else int(rows < problem.N),
    }


def _geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
    rows, waves, _, split = (config[param.name] for param in PARAMS)
    if _sums_bytes(problem.M, -(-rows // 8), waves, split) > _MOST_SUMS_BYTES:
        raise ValueError(
            f"mma_registers with {dict(config)} does not fit M={problem.M}: too many sums"
        )
    return Geometry(
        grid=(-(-problem.N // rows) * split, 1, 1),
        block=(waves * target.wave_size, 1, 1),
        overlaps=problem.pdl,
    )


def _scalars(target: Target, problem: LinearProblem, config: Config) -> tuple[int | float, ...]:
    return matrix_scalars(problem)


MMA_REGISTERS = declare(
    "linear",
    "mma_registers",
    {"sm_90a": "linear/mma_registers_sm90.cu"},
    args=MATRIX_ARGS,
    defines=_defines,
    geometry=_geometry,
    scalars=_scalars,
    refusal=_refusal,
    search=_search,
    yields=_yields,
    composed=replace(QUANTISED_MEANWHILE, parts=_parts),
)
