"""The CDNA4 kernel of the linear for up to 768 rows of x, csrc/linear/mfma_gfx950.cu, two ways:
``mfma``, and ``mfma_split``, whose workgroups share K."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import product
from math import inf

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.gfx950 import (
    REGISTERS,
    SIDE,
    WAVES,
    refuse_static_lds,
)
from aiter_mx.kernels.linear.mfma_ways_gfx950 import (
    BLOCK_M,
    PARAMS,
    SPLITS,
    Way,
    Work,
    lds_bytes_of,
    registers_of,
    resident_at,
    resident_of,
    way_at,
    way_of,
    work_at,
    work_of,
)
from aiter_mx.kernels.linear.problem import (
    MATRIX_ARGS,
    POINTERS,
    QUANTISED_FIRST,
    X_CODES,
    LinearProblem,
    matrix_scalars,
    quantise_pays,
    quantised_first,
    rows_tuned_for,
)
from aiter_mx.kernels.search import ROUNDED_OFF, Costed, Least, Search, without_waste
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    MAX_GRID_X,
    Arg,
    Config,
    Geometry,
    Parts,
    as_defines,
    pointers,
)
from aiter_mx.numerics import BLOCK
from aiter_mx.target import Target

FITTED: dict[str, float] = {
    "launch": 4800,
    "memory_bytes": 10.4,
    "cached_bytes": 24,
    "tile": 36,
    "moved_bytes": 40,
    "bound": 0.804,
    "round": 3519,
    "turn": 211,
    "step": 92.7,
    "sum": 105,
    "split": 1788,
    "persistent": 5800,
}
"""Cycles of a compute unit at 2.4 GHz, and bytes a cycle, by tune/fit_mfma.py: a launch; memory's
and the L2 cache's rate; the address unit's work on a tile, and the bytes that it moves; how much of
the slowest of these counts; a round of workgroups; a wave's turn; a step's work on a tile; a sum of
waves; a handover between workgroups; all but the steps of ``persistent``."""
PERSISTENT_STEPS = {(128, 128): (1520, 1520, 0.72), (256, 256): (2300, 3750, 0.93)}
"""Of tiles, by tune/fit_mfma.py: cycles of a step of 128 k, where half of the compute units have
none and where more of them do, and what a further round of tiles takes of that. Other tiles are
left out, so that few code objects serve a weight."""

MAX_M = 768
MAX_K = 1 << 25  # offsets within the rows of a workgroup, at most 64, are below 2^31
_MAX_SPLIT_N = 1 << 23  # offsets within results of 64 rows are below 2^31
_FEWEST_SHARED_ROWS = 17  # that other kernels than mfma take
_WORTH_LEAVING = 0.95
_MOST_FOLDED_TILES = 4
_MANY = 128  # rows, beyond which few tiles serve, and K is not split
_STEP = 32  # of rows that are chosen for, up to there
_COL_TILES_OF_MANY = (3, 4, 6)
_WAVES_OF_MANY = 4  # at most, so that few code objects serve all numbers of rows
_MOST_CANDIDATES = 48

_QUANTISING = 4.8  # vector instructions for 64 values


def _refusal(target: Target, problem: LinearProblem) -> str | None:
    if problem.M > MAX_M:
        return f"M={problem.M} is above {MAX_M}, the most rows of mfma"
    if problem.K >= MAX_K:
        return f"K={problem.K} is not below {MAX_K}, as the 32-bit offsets of mfma demand"
    return None


def _parts(target: Target, problem: LinearProblem, config: Config) -> Parts:
    """A quantisation first, where doing it here costs more or takes too much of something."""
    most = replace(problem, M=tuned_for(problem.M))
    fits = problem.K < MAX_K // 2 and resident_of(config, way_of(most, config), True) > 0
    groups = work_of(target, most, config).groups
    if fits and quantise_pays(target, most, groups, _QUANTISING):
        return ()
    return quantised_first(target, problem, config)


def _costs(
    splits: tuple[int, ...], target: Target, problem: LinearProblem, least: Least
) -> Iterator[Costed]:
    """A fit to the model of time, in cycles; then what to have less of where it is equal."""
    bounded = sorted(_bounds(splits, target, problem, least))
    cycles, shared = FITTED, splits != (1,)
    a_step, a_turn, a_sum, once = (cycles[name] for name in ("step", "turn", "sum", "round"))
    for lowest, bound, way, own_blocks, work in bounded:
        if lowest * ROUNDED_OFF > least.cost:
            return
        rows, fold, split, _, cols, block_rows = way
        busiest, results = work.of_busiest, block_rows * work.rows
        of_tiles = a_step * (rows + cols)
        but_turns = bound + once + a_sum * fold * results / target.wave_size
        for unroll in PARAMS[3].values if problem.M <= BLOCK_M else (1,):
            if (but_turns + unroll * of_tiles) * ROUNDED_OFF > least.cost:
                break
            if registers_of(rows, cols, unroll) > REGISTERS:
                break
            of_waves = without_waste(WAVES, work.steps, unroll)
            if problem.M > _MANY:
                of_waves = tuple(found for found in of_waves if found[0] <= _WAVES_OF_MANY)[-1:]
            for waves, turns in of_waves:
                if (but_turns + turns * unroll * of_tiles) * ROUNDED_OFF > least.cost:
                    continue
                held = min(busiest, resident_at(rows, cols, waves, unroll))
                if held == 0:
                    continue
                rounds, each = -(-busiest // held), -(-results // (waves * target.wave_size))
                a_round = turns * unroll * of_tiles + a_sum * each * waves * fold + once
                cost = bound + rounds * a_round + a_turn * (rounds * turns - 1)
                if cost <= least.cost:
                    values = (rows, fold, waves, unroll, own_blocks, *((split,) if shared else ()))
                    yield cost, (rounds, waves * unroll, unroll), values


@cache
def _ways(M: int, splits: tuple[int, ...]) -> list[tuple[Way, int]]:
    """Those that are worth a thought, and their parameter ``blocks``."""
    if M > _MANY:
        return [*dict.fromkeys(_ways_of_many(M, splits))]
    most, found = -(-M // SIDE), []  # blocks: each has a tile
    for rows, fold, blocks, split in product(
        *(PARAMS[i].values for i in (0, 1)), (1, 2, 4), splits
    ):
        folds = fold == 1 or (split * blocks == 1 and M * fold <= SIDE * _MOST_FOLDED_TILES)
        if folds and blocks <= max(1, min(most, 2 * BLOCK_M // (SIDE * split))):
            found.append((way_at(M, rows, fold, blocks, split), blocks))
    return found


def _ways_of_many(M: int, splits: tuple[int, ...]) -> Iterator[tuple[Way, int]]:
    """Large tiles, in as few blocks as they give."""
    for tiles, split in product(_COL_TILES_OF_MANY, splits):
        blocks = -(-M // (SIDE * tiles))
        if blocks in PARAMS[4].values:
            yield way_at(M, PARAMS[0].values[-1], 1, blocks, split), blocks


def weights_cycles(target: Target, problem: LinearProblem) -> float:
    """What memory takes for w."""
    row_bytes = problem.K * (BLOCK + 1) / BLOCK
    return problem.N * row_bytes / (FITTED["memory_bytes"] * target.cu_num)


def _bounds(
    splits: tuple[int, ...], target: Target, problem: LinearProblem, least: Least
) -> Iterator[tuple[float, float, Way, int, Work]]:
    """At least what each way takes, and of that what memory, the L2 cache or address units do."""
    cycles, row_bytes = FITTED, problem.K * (BLOCK + 1) / BLOCK
    memory, cu_num, N, K = weights_cycles(target, problem), target.cu_num, problem.N, problem.K
    a_tile, moved, cached = cycles["tile"], cycles["moved_bytes"], cycles["cached_bytes"]
    of_slowest, a_split = cycles["bound"], cycles["split"]
    once, a_sum = cycles["round"], cycles["sum"] / target.wave_size
    a_step = cycles["step"] / WAVES[-1]
    for way, own_blocks in _ways(problem.M, splits):
        rows, fold, split, _, cols, block_rows = way
        work = work_at(cu_num, N, K, way)
        busiest = work.of_busiest
        asked = busiest * (block_rows + work.rows) * row_bytes / split
        addresses = busiest * work.steps * (rows + cols) * a_tile + asked / moved
        bound = of_slowest * max(memory, asked / cached, addresses)
        if split > 1:
            bound += a_split * busiest
        in_turn = work.steps * a_step * (rows + cols)
        lowest = bound + once + in_turn + a_sum * block_rows * work.rows * fold
        if lowest * ROUNDED_OFF <= least.cost:
            yield lowest, bound, way, own_blocks, work


SEARCHES: dict[str, Search] = {
    "mfma": Search(PARAMS, partial(_costs, (1,)), _MOST_CANDIDATES),
    "mfma_split": Search((*PARAMS, SPLITS), partial(_costs, SPLITS.values), _MOST_CANDIDATES),
}


def tuned_for(M: int) -> int:
    """Few code objects serve all numbers of rows."""
    if M <= BLOCK_M:
        return max(8, rows_tuned_for(M))
    return -(-M // _STEP) * _STEP if M <= _MANY else -(-M // SIDE) * SIDE


@lru_cache(maxsize=1024)
def _cheapest(kernel: str, target: Target, M: int, N: int, K: int) -> Config:
    return SEARCHES[kernel].best(target, LinearProblem(M, N, K))


def _configuring(kernel: str) -> Callable[[Target, LinearProblem], Config]:
    """What is chosen for so many rows serves fewer of them too."""

    def configure(target: Target, problem: LinearProblem) -> Config:
        fastest, config = _fastest(target, problem)
        if fastest != kernel or config is None:
            M = tuned_for(problem.M)
            config = _cheapest(kernel, target, M, problem.N, problem.K)
        return dict(config)

    return configure


def _candidates(kernel: str) -> Callable[[Target, LinearProblem], list[Config]]:
    """What is configured is among them."""

    def candidates(target: Target, problem: LinearProblem) -> list[Config]:
        M = tuned_for(problem.M) if problem.M > SIDE else problem.M
        return SEARCHES[kernel].candidates(target, replace(problem, M=M))

    return candidates


def _split_refusal(target: Target, problem: LinearProblem) -> str | None:
    if problem.N >= _MAX_SPLIT_N:
        return f"N={problem.N} is not below {_MAX_SPLIT_N}, as 32-bit offsets of results demand"
    return _refusal(target, problem)


def persistent_steps(target: Target, problem: LinearProblem, tile: tuple[int, int]) -> float:
    """Cycles of all the steps that the kernel with large tiles takes."""
    tiles = -(-problem.M // tile[0]) * -(-problem.N // tile[1])
    of_few, of_many, further = PERSISTENT_STEPS[tile]
    rounds = 1 + further * (-(-tiles // target.cu_num) - 1)
    cycles = of_few if 2 * tiles <= target.cu_num else of_many
    return rounds * cycles * -(-problem.K // 128)


def persistent_tile(target: Target, problem: LinearProblem) -> tuple[int, int]:
    """The fastest of its tiles."""
    return min(PERSISTENT_STEPS, key=lambda tile: persistent_steps(target, problem, tile))


def _persistent(target: Target, problem: LinearProblem) -> float:
    """What the kernel with large tiles would take."""
    cycles = persistent_steps(target, problem, persistent_tile(target, problem))
    return max(cycles, weights_cycles(target, problem)) + FITTED["persistent"]


def _fastest(target: Target, problem: LinearProblem) -> tuple[str, Config | None]:
    return _fastest_of(target, tuned_for(problem.M), problem.N, problem.K)


@lru_cache(maxsize=1024)
def _fastest_of(target: Target, M: int, N: int, K: int) -> tuple[str, Config | None]:
    """The kernel that is, and its configuration unless it is ``persistent``; ``mfma`` is unless
    another is by a twentieth. No search goes beyond what would be taken in its place."""
    tuned, launch, best = LinearProblem(M, N, K), FITTED["launch"], inf
    if M >= _FEWEST_SHARED_ROWS:
        best = launch + _persistent(target, tuned)
    mfma = SEARCHES["mfma"].cheapest(target, tuned, best / _WORTH_LEAVING - launch)
    if mfma is not None:
        best = min(best, _WORTH_LEAVING * (launch + mfma[0]))
    if _FEWEST_SHARED_ROWS <= M <= _MANY and N < _MAX_SPLIT_N:
        split = SEARCHES["mfma_split"].cheapest(target, tuned, best - launch)
        if split is not None:
            return "mfma_split", split[1]
    return ("persistent", None) if mfma is None else ("mfma", mfma[1])


def _yielding(kernel: str) -> Callable[[Target, LinearProblem], str | None]:
    def yields(target: Target, problem: LinearProblem) -> str | None:
        fastest, _ = _fastest(target, problem)
        return None if fastest == kernel else f"{fastest} is faster here by the model of time"

    return yields


def _defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    return {
        "MX_SPLITS": 1,
        **as_defines({name: config[name] for name in config if name != "blocks"}),
        "MX_COL_TILES": way_of(problem, config).col_tiles,
        "MX_EVEN_BLOCKS": int(problem.K % (2 * BLOCK) == 0),
        "MX_X": X_CODES[problem.x_dtype],
        "MX_OUT": DTYPE_CODES[problem.out_dtype],
        "MX_MAX_GRID_X": MAX_GRID_X,
    }


def _geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
    way = way_of(problem, config)
    needed = lds_bytes_of(config["row_tiles"], way.col_tiles, config["waves"])
    refuse_static_lds(problem, config, needed)
    groups = work_of(target, problem, config).groups // max(1, way.blocks)
    return Geometry(
        grid=(min(groups, MAX_GRID_X), -(-groups // MAX_GRID_X), way.blocks),
        block=(config["waves"] * target.wave_size, 1, 1),
    )


def _tiles(target: Target, problem: LinearProblem, config: Config) -> int:
    """Of outputs, for a block of x: a workgroup computes one, or several share it."""
    way = way_of(problem, config)
    return work_of(target, problem, config).groups // (way.splits * max(1, way.blocks))


def _parts_bytes(target: Target, problem: LinearProblem, config: Config) -> int:
    """Sums of each workgroup."""
    way, side = way_of(problem, config), SIDE // config["fold"]
    sums = way.row_tiles * side * way.col_tiles * side
    return work_of(target, problem, config).groups * 4 * sums


def _scalars(target: Target, problem: LinearProblem, config: Config) -> tuple[int | float, ...]:
    tiles = max(1, _tiles(target, problem, config))
    return (*matrix_scalars(problem), problem.N // tiles, problem.N % tiles)


def _split_scalars(
    target: Target, problem: LinearProblem, config: Config
) -> tuple[int | float, ...]:
    return (*_scalars(target, problem, config), _tiles(target, problem, config))


_TILE_ARGS = (Arg("rows_each", "i32"), Arg("longer_tiles", "i64"))

MFMA = declare(
    "linear",
    "mfma",
    {"gfx950": "linear/mfma_gfx950.cu"},
    args=(*MATRIX_ARGS, *_TILE_ARGS),
    defines=_defines,
    geometry=_geometry,
    scalars=_scalars,
    refusal=_refusal,
    params=PARAMS,
    configure=_configuring("mfma"),
    candidates=_candidates("mfma"),
    composed=replace(QUANTISED_FIRST, parts=_parts),
    yields=_yielding("mfma"),
)

MFMA_SPLIT = declare(
    "linear",
    "mfma_split",
    {"gfx950": "linear/mfma_gfx950.cu"},
    args=(
        *POINTERS,
        *pointers("rw", "parts", "arrived"),
        *MATRIX_ARGS[len(POINTERS) :],
        *_TILE_ARGS,
        Arg("tiles", "i32"),
    ),
    defines=_defines,
    geometry=_geometry,
    scalars=_split_scalars,
    refusal=_split_refusal,
    params=(*PARAMS, SPLITS),
    configure=_configuring("mfma_split"),
    candidates=_candidates("mfma_split"),
    composed=QUANTISED_FIRST,
    workspace_bytes=_parts_bytes,
    counters=lambda target, problem, config: (
        _tiles(target, problem, config) * way_of(problem, config).blocks * config["waves"]
    ),
    yields=_yielding("mfma_split"),
)
