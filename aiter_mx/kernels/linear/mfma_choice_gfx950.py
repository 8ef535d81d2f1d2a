"""Which configuration of ``mfma`` and ``mfma_split`` is fastest, and where a kernel with large
tiles is: by a fit to the model of time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache, lru_cache, partial
from itertools import product
from math import ceil, inf
from typing import NamedTuple

from aiter_mx.kernels.gfx950 import SIDE, TILE_K, WAVES
from aiter_mx.kernels.linear.mfma_ways_gfx950 import (
    BLOCK_M,
    COL_TILES,
    LANES,
    PARAMS,
    SPLITS,
    Way,
    Work,
    has_odd_blocks,
    has_too_few_lanes,
    resident_at,
    row_kib,
    way_at,
    way_of,
    work_at,
)
from aiter_mx.kernels.linear.persistent_choice_gfx950 import fastest_large, least_large
from aiter_mx.kernels.linear.problem import LinearProblem, rows_tuned_for
from aiter_mx.kernels.search import ROUNDED_OFF, Costed, Least, Search, without_waste
from aiter_mx.kernels.spec import Config
from aiter_mx.target import Target

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
_WORTH_LEAVING = 0.95
_MOST_FOLDED_TILES = 4
_MOST_SUMS = 24  # of a thread: more make long code
_ROWS_OF_MENU = (128, 272, 528, 144, 80)
"""Beyond BLOCK_M, numbers of rows whose fastest code objects serve all."""
_ALIKE = 1.02
"""A code object has to be this much faster than those that more rows take."""
_MANY_CODES, _ALIKE_OF_MANY = 3, 1.08
"""And a further one beside so many this much, for large tiles take four more; of those one goes
that serves more rows than the first of the menu's, and gains less than the former on average."""
_MOST_CANDIDATES = 48


def _costs(
    splits: tuple[int, ...], target: Target, problem: LinearProblem, least: Least
) -> Iterator[Costed]:
    """A fit to the model of time, in cycles; then what to have less of where it is equal."""
    shared, is_odd = splits != (1,), has_odd_blocks(problem.K)
    a_round, a_step = FITTED["round"], FITTED["step"]
    for lowest, asked, way, own_blocks in sorted(_bounds(splits, target, problem, least)):
        if lowest * ROUNDED_OFF > least.cost:
            return
        work = work_at(target.cu_num, problem.N, problem.K, way)
        for unroll in PARAMS[3].values if problem.M <= BLOCK_M else (1,):
            if not resident_at(way.row_tiles, way.col_tiles, 1, unroll, is_odd):
                break
            a_turn = a_step * unroll * (way.row_tiles + way.col_tiles)
            for waves, turns in without_waste(WAVES, work.steps, unroll):
                if (asked + a_round + a_turn * turns) * ROUNDED_OFF > least.cost:
                    continue
                rounds = _rounds(way, work, waves, unroll, is_odd)
                if rounds:
                    cost = asked + rounds * _round(way, waves, turns, unroll)
                    if cost <= least.cost:
                        values = (way.row_tiles, way.fold, waves, unroll, own_blocks)
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
    rows, cols, fold = way.row_tiles, way.col_tiles, way.fold
    sums = -(-rows * cols * (SIDE // fold) ** 2 // (waves * LANES)) * waves * fold
    tiles = turns * float(((unroll * (rows + cols)) ** 4 + _TILES_OF_WAIT**4) ** 0.25)
    return FITTED["round"] + FITTED["step"] * tiles + FITTED["sum"] * sums


class _Weighed(NamedTuple):
    """A way that is worth a thought, for numbers of rows that are alike.

    Attributes:
        way, blocks: it, and the parameter ``blocks``.
        most_waves: that a workgroup may have.
        slots: waves that a compute unit holds at once.
        tiles: of a wave's step.
        sums: of a workgroup's waves, at least.
    """

    way: Way
    blocks: int
    most_waves: int
    slots: int
    tiles: int
    sums: float


@cache
def _ways(M: int, splits: tuple[int, ...]) -> list[_Weighed]:
    weighed = (_weighed(*found) for found in _ways_of(M, splits))
    return [found for found in weighed if found.slots]


def _weighed(way: Way, blocks: int) -> _Weighed:
    rows, cols = way.row_tiles, way.col_tiles
    slots = resident_at(rows, cols, 1, 1)
    most_waves = max((waves for waves in WAVES if resident_at(rows, cols, waves, 1)), default=1)
    sums = way.fold * rows * cols * (SIDE // way.fold) ** 2 / LANES
    return _Weighed(way, blocks, most_waves, slots, rows + cols, sums)


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
) -> Iterator[tuple[float, float, Way, int]]:
    """At least what each way takes, and of that what its units ask for."""
    N, K, cu_num, memory = problem.N, problem.K, target.cu_num, weights_cycles(target, problem)
    ahead = memory + FITTED["round"]
    most = least.cost / ROUNDED_OFF - ahead
    a_step, a_sum, a_line = FITTED["step"], FITTED["sum"], FITTED["lines"] * row_kib(K)
    meetings = [_meeting(shared) for shared in range(1, SPLITS.values[-1] + 1)]
    # As work_at and _asked have it, without calls: there are dozens of ways, and most end here.
    for way, own_blocks, most_waves, slots, tiles, sums in _ways(problem.M, splits):
        row_tiles, fold, shared, blocks, _, block_rows = way
        of_tile = blocks * shared
        of_busiest = -(-(-(-N * fold // (SIDE * row_tiles)) * of_tile) // cu_num)
        groups = of_busiest * cu_num // of_tile
        if groups > N:
            groups, of_busiest = N, -(-N * of_tile // cu_num)
        rows = -(-N // groups) * (1 + _FROM_MEMORY / blocks) + block_rows
        asked = a_line * of_busiest * rows / shared + meetings[shared - 1]
        if asked < most:
            turns = of_busiest / slots
            if turns * most_waves < 1:
                turns = 1 / most_waves
            turns *= -(-K // (TILE_K * fold * shared))
            in_turn = asked + a_step * turns * tiles + a_sum * sums
            if in_turn <= most:
                yield in_turn + ahead, memory + asked, way, own_blocks


def _meeting(splits: int) -> float:
    """Of workgroups that share K."""
    return (splits - 1).bit_length() * FITTED["split"]


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


class Code(NamedTuple):
    """A code object for more rows than BLOCK_M.

    Attributes:
        kernel: of it.
        row_tiles, col_tiles, waves, splits: as parameters and ``Way`` have them.
    """

    kernel: str
    row_tiles: int
    col_tiles: int
    waves: int
    splits: int


@lru_cache(maxsize=1024)
def menu(target: Target, N: int, K: int) -> tuple[Code, ...]:
    """The code objects of a weight for more rows than BLOCK_M, but those with large tiles."""
    codes = list[Code]()
    for M in _ROWS_OF_MENU:
        problem = LinearProblem(M, N, K)
        least = min(_by_cost(codes, target, problem), default=inf)
        alike = _ALIKE if len(codes) < _MANY_CODES else _ALIKE_OF_MANY
        kernel, config = _searched(target, problem, least / alike)
        if config is not None:
            way = way_of(problem, config)
            codes.append(Code(kernel, way.row_tiles, way.col_tiles, config["waves"], way.splits))
    for code in tuple(codes):
        gained = [*_gained(target, N, K, codes, code)] if len(codes) > _MANY_CODES else []
        if sum(gained) < _ALIKE * len(gained):
            codes.remove(code)
    return tuple(codes)


def _gained(target: Target, N: int, K: int, codes: Iterable[Code], code: Code) -> Iterator[float]:
    """What others take of what a code object does, at each number of rows that it serves: those
    found later, and large tiles, by the fit as it is. Of fewest rows all are needed."""
    others = [other for other in codes if other != code]
    for M in range(BLOCK_M + SIDE, max(_ROWS_OF_MENU) + 1, SIDE):
        problem = LinearProblem(M, N, K)
        own = min(_by_cost([code], target, problem), default=inf)
        other = min(_by_cost(others, target, problem), default=inf)
        if own < min(other, fastest_large(target, problem)[0]):
            instead = min(other, least_large(target, problem))
            yield instead / own if _ROWS_OF_MENU[0] < M else inf


def _by_cost(
    codes: Iterable[Code], target: Target, problem: LinearProblem
) -> dict[float, tuple[Code, int]]:
    """Code objects and their parameter ``blocks``, by what they take."""
    (M, N, K), found = (problem.M, problem.N, problem.K), dict[float, tuple[Code, int]]()
    memory, is_odd = weights_cycles(target, problem) + FITTED["launch"], has_odd_blocks(K)
    for code in codes:
        _, row_tiles, col_tiles, waves, splits = code
        if splits > 1 and M > MOST_SHARED_ROWS:
            continue
        for way, blocks in _ways_of_many(M, row_tiles, col_tiles, splits):
            work = work_at(target.cu_num, N, K, way)
            turns, rounds = -(-work.steps // waves), _rounds(way, work, waves, 1, is_odd)
            cost = memory + _asked(way, work, K) + rounds * _round(way, waves, turns, 1)
            found[cost] = code, blocks
    return found


def least_cycles(target: Target, problem: LinearProblem) -> float:
    """What any code object for more rows than BLOCK_M takes at least, were all compute units full
    and equally busy."""
    of_result = min(once + of_k * problem.K for once, of_k in _least_of_results())
    of_all = of_result * problem.M * problem.N / target.cu_num
    return (FITTED["launch"] + weights_cycles(target, problem) + of_all) * ROUNDED_OFF


@cache
def _least_of_results() -> list[tuple[float, float]]:
    """Cycles of a compute unit for each result, and for each k of it: of all tiles and waves for
    more rows than BLOCK_M, those that are the least for some K."""
    found = []
    for rows, cols, waves in product(PARAMS[0].values, COL_TILES, WAVES):
        if held := _held(rows, cols, 1, waves, 1, False):
            way = Way(rows, 1, 1, 1, cols, SIDE * cols)
            results = held * rows * cols * SIDE**2
            once = _round(way, waves, 0, 1)
            steps = (_round(way, waves, 1, 1) - once) / (results * waves * TILE_K)
            lines = FITTED["lines"] * row_kib(1) * (1 / rows + 1 / cols) / SIDE
            found.append((once / results, steps + lines))
    return [a for a in found if not any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in found)]


def _of_menu(target: Target, problem: LinearProblem) -> tuple[str, Config | None]:
    """What is fastest of the menu."""
    large, name = fastest_large(target, problem)
    if large < least_cycles(target, problem):
        return name, None
    found = _by_cost(menu(target, problem.N, problem.K), target, problem)
    least = min(found, default=inf)
    if least >= large:
        return name, None
    code, blocks = found[least]
    names = (param.name for param in SEARCHES[code.kernel].params)
    values = (code.row_tiles, 1, code.waves, 1, blocks, code.splits)
    return code.kernel, dict(zip(names, values, strict=False))


@lru_cache(maxsize=1024)
def fastest_of(target: Target, M: int, N: int, K: int) -> tuple[str, Config | None]:
    """The kernel that is, and its configuration unless it has large tiles."""
    return (_searched if M <= BLOCK_M else _of_menu)(target, LinearProblem(M, N, K))


def _searched(
    target: Target, problem: LinearProblem, most: float = inf
) -> tuple[str, Config | None]:
    """``mfma`` is the fastest unless another is by a twentieth; beyond BLOCK_M the fit has what
    shares K that much too slow. No search goes beyond what would be taken in its place, or
    beyond ``most`` cycles."""
    M, launch, best, large = problem.M, FITTED["launch"], most, "persistent"
    if M >= _FEWEST_LARGE_ROWS:
        cycles, large = fastest_large(target, problem)
        best = min(best, cycles)
    worth = _WORTH_LEAVING if M <= BLOCK_M else 1.0
    mfma = SEARCHES["mfma"].cheapest(target, problem, best / worth - launch)
    if mfma is not None:
        best = min(best, worth * (launch + mfma[0]))
    if _FEWEST_SPLIT_ROWS <= M <= MOST_SHARED_ROWS:
        split = SEARCHES["mfma_split"].cheapest(target, problem, best - launch)
        if split is not None:
            return "mfma_split", split[1]
    return (large, None) if mfma is None else ("mfma", mfma[1])
