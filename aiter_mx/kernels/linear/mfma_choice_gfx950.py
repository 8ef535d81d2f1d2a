"""Which configuration of ``mfma`` and ``mfma_split`` is fastest, and for few rows where a kernel
with large tiles is: by a fit to the model of time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache, lru_cache, partial
from itertools import product
from math import ceil, inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aiter_mx.kernels.gfx950 import SIDE, TILE_K, WAVES
from aiter_mx.kernels.linear.mfma_ways_gfx950 import (
    BLOCK_M,
    COL_TILES,
    LANES,
    MAX_M,
    PARAMS,
    SPLITS,
    Way,
    Work,
    has_odd_blocks,
    has_too_few_lanes,
    resident_at,
    row_kib,
    way_at,
    work_at,
)
from aiter_mx.kernels.linear.persistent_choice_gfx950 import (
    SMALLEST,
    Large,
    config_of_large,
    fastest_large,
)
from aiter_mx.kernels.linear.problem import LinearProblem, rows_tuned_for
from aiter_mx.kernels.search import ROUNDED_OFF, Costed, Least, Search, without_waste
from aiter_mx.kernels.spec import Config
from aiter_mx.target import Target

Array = npt.NDArray[np.float64]

FITTED: dict[str, float] = {
    "launch": 5700,
    "memory": 28.4,
    "lines": 28.4,
    "round": 942,
    "step": 67.1,
    "sum": 83.9,
    "split": 1150,
}
"""Cycles of a compute unit at 2.4 GHz, by tune/fit_mfma.py: a launch; a KiB of the operands, of the
unit's share of them; a KiB that its workgroups ask the L2 cache for; a round of workgroups; a
wave's step, for each tile; a sum of waves; a meeting of workgroups that share K."""
_FROM_MEMORY = 0.56
"""By so much is a line waited for longer that comes from memory."""
_TILES_OF_WAIT = 8
"""A wave's next loads are waited for as long as so many tiles of a step take."""

_FEWEST_SPLIT_ROWS = 9  # with fewer, what split K saves of x is little
_FEWEST_LARGE_ROWS = 17  # of the kernel with large tiles
MOST_SHARED_ROWS = 256  # beyond, K is not split
LEAST_SPLIT_K = min(SPLITS.values) * TILE_K
"""Beyond BLOCK_M more, as a workgroup's sums take two waves, each with a tile of K."""
_FEWEST_SHARED_TILES = 3  # of w and of x, beyond BLOCK_M
_LARGE_OF_FEW = (SMALLEST, Large("persistent_split", SMALLEST.tile))
_WORTH_LEAVING = 0.95
_MOST_FOLDED_TILES = 4
_MOST_SUMS = 24  # of a thread: more make long code
_MOST_CANDIDATES = 48
_ROW_TILES, _WAVES, _WAVES_THAT_SHARE = PARAMS[0].values[1:], (1, 2, 4, 8), 4
"""Of code objects beyond BLOCK_M: with others they would be half of a thousandth faster."""


def _costs(
    splits: tuple[int, ...], target: Target, problem: LinearProblem, least: Least
) -> Iterator[Costed]:
    """A fit to the model of time, in cycles; then what to have less of where it is equal."""
    shared, is_odd = splits != (1,), has_odd_blocks(problem.K)
    a_round, a_step, a_sum = FITTED["round"], FITTED["step"], FITTED["sum"]
    for lowest, asked, of_busiest, steps, way, own_blocks in sorted(
        _bounds(splits, target, problem, least)
    ):
        if lowest * ROUNDED_OFF > least.cost:
            return
        row_tiles, fold, col_tiles = way.row_tiles, way.fold, way.col_tiles
        for unroll in PARAMS[3].values if problem.M <= BLOCK_M else (1,):
            if not resident_at(row_tiles, col_tiles, 1, unroll, is_odd):
                break
            a_turn = a_step * unroll * (row_tiles + col_tiles)
            for waves, turns in without_waste(WAVES, steps, unroll):
                if (asked + a_round + a_turn * turns) * ROUNDED_OFF > least.cost:
                    continue
                held = _held(row_tiles, col_tiles, fold, waves, unroll, is_odd)
                if held:
                    tiles, sums = _loop(row_tiles, col_tiles, fold, waves, unroll)
                    rounds = max(1.0, of_busiest / held)  # each as _round has it
                    cost = asked + rounds * (a_round + a_step * (turns * tiles) + a_sum * sums)
                    if cost <= least.cost:
                        values = (row_tiles, fold, waves, unroll, own_blocks)
                        further = (way.splits,) if shared else ()
                        yield cost, (ceil(rounds), waves * unroll, unroll), (*values, *further)


def _rounds(way: Way, work: Work, waves: int, unroll: int, is_odd: bool) -> float:
    """Of workgroups on the busiest compute unit; 0 where none fits."""
    held = _held(way.row_tiles, way.col_tiles, way.fold, waves, unroll, is_odd)
    return max(1.0, work.of_busiest / held) if held else 0


@cache
def _held(rows: int, cols: int, fold: int, waves: int, unroll: int, is_odd: bool) -> int:
    """Workgroups that a compute unit holds at once; 0 where one is out of the question."""
    if rows * cols * SIDE**2 > _MOST_SUMS * fold**2 * waves * LANES:
        return 0
    if has_too_few_lanes(rows, fold, waves):
        return 0
    return resident_at(rows, cols, waves, unroll, is_odd)


def _round(way: Way, waves: int, turns: int, unroll: int) -> float:
    """A workgroup that waits for nobody but itself."""
    tiles, sums = _loop(way.row_tiles, way.col_tiles, way.fold, waves, unroll)
    return FITTED["round"] + FITTED["step"] * (turns * tiles) + FITTED["sum"] * sums


@cache
def _loop(rows: int, cols: int, fold: int, waves: int, unroll: int) -> tuple[float, int]:
    """Tiles that a turn is as long as, and sums of a workgroup."""
    sums = -(-rows * cols * (SIDE // fold) ** 2 // (waves * LANES)) * waves * fold
    return float(((unroll * (rows + cols)) ** 4 + _TILES_OF_WAIT**4) ** 0.25), sums


class _Weighed(NamedTuple):
    """A way that is worth a thought, for numbers of rows that are alike.

    Attributes:
        way, blocks: it, and the parameter ``blocks``.
        of_tile: workgroups of a tile of w.
        wait: for a line of w, in waits for one of x.
        meetings: of workgroups that share K, one after the other.
        step_k: of K, in a step of all that share it.
        slots: waves that a compute unit holds at once.
        fewest: turns of a workgroup, with as many waves as it may have.
        tiles: of a wave's step.
        sums: of a workgroup's waves, at least.
    """

    way: Way
    blocks: int
    of_tile: int
    wait: float
    meetings: int
    step_k: int
    slots: int
    fewest: float
    tiles: int
    sums: float


@cache
def _ways(M: int, splits: tuple[int, ...]) -> list[_Weighed]:
    weighed = (_weighed(*found) for found in _ways_of(M, splits))
    return [found for found in weighed if found.slots]


def _weighed(way: Way, blocks: int) -> _Weighed:
    rows, fold, splits, of_x, cols, _ = way
    most_waves = max((waves for waves in WAVES if resident_at(rows, cols, waves, 1)), default=1)
    return _Weighed(
        way,
        blocks,
        of_tile=of_x * splits,
        wait=1 + _FROM_MEMORY / of_x,
        meetings=_meetings(splits),
        step_k=TILE_K * fold * splits,
        slots=resident_at(rows, cols, 1, 1),
        fewest=1 / most_waves,
        tiles=rows + cols,
        sums=fold * rows * cols * (SIDE // fold) ** 2 / LANES,
    )


def _ways_of(M: int, splits: tuple[int, ...]) -> Iterator[tuple[Way, int]]:
    if M > BLOCK_M:
        for rows, cols, split in product(PARAMS[0].values, COL_TILES, splits):
            if split == 1 or min(rows, cols) >= _FEWEST_SHARED_TILES:
                yield from _ways_of_many(M, rows, cols, split)
        return
    for rows, fold, blocks, split in product(
        *(PARAMS[i].values for i in (0, 1)), (1, 2, 4), splits
    ):
        tiles = -(-M * fold // SIDE)  # each block has one
        folds = fold == 1 or (split == 1 and tiles <= _MOST_FOLDED_TILES)
        if folds and blocks <= max(1, min(tiles, 2 * BLOCK_M // (SIDE * split))):
            yield way_at(M, rows, fold, blocks, split), blocks


@cache
def _ways_of_many(M: int, rows: int, cols: int, split: int) -> tuple[tuple[Way, int], ...]:
    """In blocks the largest of which have so many tiles: as few as can be, and one more."""
    fewest = -(-M // (SIDE * cols))
    found = ((way_at(M, rows, 1, blocks, split), blocks) for blocks in (fewest, fewest + 1))
    return tuple(each for each in found if (each[0].blocks, each[0].col_tiles) == (each[1], cols))


def weights_cycles(target: Target, problem: LinearProblem) -> float:
    """What counts of memory's time for the operands."""
    return FITTED["memory"] * (problem.N + problem.M) * row_kib(problem.K) / target.cu_num


def _bounds(
    splits: tuple[int, ...], target: Target, problem: LinearProblem, least: Least
) -> Iterator[tuple[float, float, int, int, Way, int]]:
    """At least what each way takes, of that what its units ask for, workgroups of the busiest unit
    and their steps."""
    N, K, cu_num, memory = problem.N, problem.K, target.cu_num, weights_cycles(target, problem)
    ahead = memory + FITTED["round"]
    most = least.cost / ROUNDED_OFF - ahead
    a_step, a_sum, a_line = FITTED["step"], FITTED["sum"], FITTED["lines"] * row_kib(K)
    a_meeting = FITTED["split"]
    # As work_at and _asked have it, without calls: there are dozens of ways, and most end here.
    for way, own, of_tile, wait, meetings, step_k, slots, fewest, tiles, sums in _ways(
        problem.M, splits
    ):
        row_tiles, fold, shared, _, _, block_rows = way
        of_busiest = -(-(-(-N * fold // (SIDE * row_tiles)) * of_tile) // cu_num)
        groups = of_busiest * cu_num // of_tile
        if groups > N:
            groups, of_busiest = N, -(-N * of_tile // cu_num)
        rows = -(-N // groups) * wait + block_rows
        asked = a_line * of_busiest * rows / shared + a_meeting * meetings
        if asked < most:
            turns, steps = of_busiest / slots, -(-K // step_k)
            turns = turns if turns > fewest else fewest
            in_turn = asked + a_step * turns * steps * tiles + a_sum * sums
            if in_turn <= most:
                yield in_turn + ahead, memory + asked, of_busiest, steps, way, own


def _meetings(splits: int) -> int:
    """Of workgroups that share K, one after the other."""
    return (splits - 1).bit_length()


def _meeting(splits: int) -> float:
    """What they take."""
    return _meetings(splits) * FITTED["split"]


def _asked(way: Way, work: Work, K: int) -> float:
    """For lines of w and x, and the sums of workgroups that share K."""
    _, _, splits, blocks, _, block_rows = way
    rows = work.rows * (1 + _FROM_MEMORY / blocks) + block_rows
    return FITTED["lines"] * row_kib(K) * work.of_busiest * rows / splits + _meeting(splits)


SEARCHES: dict[str, Search] = {
    "mfma": Search(PARAMS, partial(_costs, (1,)), _MOST_CANDIDATES),
    "mfma_split": Search((*PARAMS, SPLITS), partial(_costs, SPLITS.values), _MOST_CANDIDATES),
}


def tuned_for(M: int) -> int:
    """Few code objects serve all numbers of rows."""
    return max(8, rows_tuned_for(M)) if M <= BLOCK_M else -(-M // SIDE) * SIDE


@lru_cache(maxsize=1024)
def cheapest(kernel: str, target: Target, M: int, N: int, K: int) -> Config:
    return SEARCHES[kernel].best(target, LinearProblem(M, N, K))


@lru_cache(maxsize=1024)
def fastest_of_few(target: Target, M: int, N: int, K: int) -> tuple[str, Config]:
    """The kernel that is, and its configuration, of up to BLOCK_M rows: ``mfma`` unless another is
    by a twentieth. No search goes beyond what would be taken in its place."""
    problem, launch = LinearProblem(M, N, K), FITTED["launch"]
    best, large = inf, SMALLEST
    if M >= _FEWEST_LARGE_ROWS:
        best, large = fastest_large(target, _LARGE_OF_FEW, problem)
    mfma = SEARCHES["mfma"].cheapest(target, problem, best / _WORTH_LEAVING - launch)
    if mfma is not None:
        best = min(best, _WORTH_LEAVING * (launch + mfma[0]))
    if M >= _FEWEST_SPLIT_ROWS:
        split = SEARCHES["mfma_split"].cheapest(target, problem, best - launch)
        if split is not None:
            return "mfma_split", split[1]
    if mfma is not None:
        return "mfma", mfma[1]
    return large.kernel, config_of_large(large)


class Code(NamedTuple):
    """A code object for more rows than BLOCK_M.

    Attributes:
        row_tiles, col_tiles, waves, splits: as parameters and ``Way`` have them.
    """

    row_tiles: int
    col_tiles: int
    waves: int
    splits: int


class Codes(NamedTuple):
    """What is known of code objects: a row of an array for each.

    Attributes:
        row_tiles, col_tiles, waves, splits: as ``Code`` has them.
        held: workgroups that a compute unit holds at once.
        once, turn: cycles of a workgroup without its steps, and of a step of all waves.
        meeting: of workgroups that share K.
    """

    row_tiles: Array
    col_tiles: Array
    waves: Array
    splits: Array
    held: Array
    once: Array
    turn: Array
    meeting: Array

    def code(self, place: int) -> Code:
        return Code(*(int(column[place, 0]) for column in self[:4]))


@cache
def every_code(is_odd: bool) -> Codes:
    """Those that a weight may have."""
    found = []
    for row_tiles, col_tiles, waves, splits in product(
        _ROW_TILES, COL_TILES[:-1], _WAVES, (1, *SPLITS.values)
    ):
        shares = waves == _WAVES_THAT_SHARE and min(row_tiles, col_tiles) >= _FEWEST_SHARED_TILES
        held = _held(row_tiles, col_tiles, 1, waves, 1, is_odd)
        if held and (splits == 1 or shares):
            way = Way(row_tiles, 1, splits, 1, col_tiles, SIDE * col_tiles)
            once = _round(way, waves, 0, 1)
            turn = _round(way, waves, 1, 1) - once
            code = row_tiles, col_tiles, waves, splits
            found.append((*code, held, once, turn, _meeting(splits)))
    return Codes(*np.array(found, float).T[..., None])


class InBlocks(NamedTuple):
    """Numbers of rows of x divided evenly among as few blocks as can be.

    Attributes:
        rows: of x.
        of_tile: workgroups that share rows of w: of all blocks, and parts of K.
        block_rows: of the largest block; infinitely many unless it takes the tiles of x that a code
            object has.
        of_w: how long a row of w takes, of which the first block waits for memory.
    """

    rows: Array
    of_tile: Array
    block_rows: Array
    of_w: Array


def in_blocks(codes: Codes, rows: Array) -> InBlocks:
    """With each code object."""
    tiles = np.ceil(rows / SIDE)
    blocks = np.ceil(tiles / codes.col_tiles)
    needed = np.searchsorted(COL_TILES, np.ceil(tiles / blocks))
    has_tiles = (np.array(COL_TILES)[needed] == codes.col_tiles) & (rows <= MAX_M)
    has_tiles &= (codes.splits == 1) | (rows <= MOST_SHARED_ROWS)
    block_rows = np.where(has_tiles, np.ceil(rows / blocks), inf)
    return InBlocks(rows, blocks * codes.splits, block_rows, 1 + _FROM_MEMORY / blocks)


def code_cycles(target: Target, codes: Codes, x: InBlocks, N: int, K: int) -> Array:
    """What each takes, with a column for each number of rows of x; infinitely long where it does
    not fit. It is what ``_costs`` has, of all at once."""
    cu_num, a_row = target.cu_num, row_kib(K)
    needed = np.ceil(np.ceil(N / (SIDE * codes.row_tiles)) * x.of_tile / cu_num)
    tiles = np.minimum(np.floor(needed * cu_num / x.of_tile), N)
    of_busiest = np.ceil(tiles * x.of_tile / cu_num)
    cycles = np.ceil(N / tiles) * x.of_w + x.block_rows
    cycles *= of_busiest * (FITTED["lines"] * a_row / codes.splits)
    steps = np.ceil(K / (TILE_K * codes.splits))
    cycles += np.maximum(of_busiest / codes.held, 1) * (
        codes.once + codes.turn * np.ceil(steps / codes.waves)
    )
    has_k = (codes.waves <= steps) & ((codes.splits == 1) | (K > LEAST_SPLIT_K))
    meeting = np.where(has_k, codes.meeting, inf)
    cycles += meeting + (FITTED["launch"] + FITTED["memory"] * N * a_row / cu_num)
    cycles += x.rows * (FITTED["memory"] * a_row / cu_num)
    return cycles


def fastest_of_codes(
    target: Target, codes: Iterable[Code], problem: LinearProblem
) -> tuple[float, str, Config]:
    """What the fastest of some takes, its kernel, and its configuration."""
    (M, N, K), found = (problem.M, problem.N, problem.K), (inf, "mfma", dict[str, int]())
    memory, is_odd = weights_cycles(target, problem) + FITTED["launch"], has_odd_blocks(K)
    for row_tiles, col_tiles, waves, splits in codes:
        kernel = "mfma" if splits == 1 else "mfma_split"
        way = way_at(M, row_tiles, 1, -(-M // (SIDE * col_tiles)), splits)
        most = MAX_M if splits == 1 else MOST_SHARED_ROWS
        if way.col_tiles == col_tiles and most >= M:
            work = work_at(target.cu_num, N, K, way)
            rounds = _rounds(way, work, waves, 1, is_odd)
            own = rounds * _round(way, waves, -(-work.steps // waves), 1)
            if (cost := memory + _asked(way, work, K) + own) < found[0]:
                values = (row_tiles, 1, waves, 1, way.blocks, splits)
                names = (param.name for param in SEARCHES[kernel].params)
                found = cost, kernel, dict(zip(names, values, strict=False))
    return found
