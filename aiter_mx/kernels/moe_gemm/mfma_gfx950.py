"""The CDNA4 kernel of the grouped GEMM over routed tokens, csrc/moe/mfma_gfx950.cu."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from math import ceil, sqrt
from typing import NamedTuple

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
from aiter_mx.kernels.moe_gemm.problem import ACTIVATION_CODES, MoeGemmProblem, declare_gemm
from aiter_mx.kernels.search import Costed, Least, Search, without_waste
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    Arg,
    Config,
    Geometry,
    Param,
    as_defines,
)
from aiter_mx.numerics import BLOCK
from aiter_mx.target import Target

PARAMS = (
    Param("row_tiles", (1, 2, 4), "tiles of 16 rows of w that a workgroup computes"),
    Param("col_tiles", (1, 2, 3), "the most tiles of 16 ids that a workgroup takes at once"),
    Param("waves", WAVES, "waves of a workgroup, which split K"),
    Param(
        "unroll", (1, 2, 3, 4), "steps of a wave whose loads are issued before the first is used"
    ),
)

MAX_K = 1 << 25  # offsets within the rows of a workgroup, at most 64, are below 2^31
MAX_TILES = 1 << 20  # of w in a grid: HIP counts its threads in 32 bits
MAX_GROUPS_Y = 65535
_ACTIVATED_TILES = 4  # hold the gate and up rows of a block of 32 features
_TILE_BYTES = SIDE * TILE_K * 33 // 32
_WIDE_BYTES = 1 << 31
_MOST_CANDIDATES = 32
# Without a table, by the model of time: 0.4 to 1 of what the bound finds, which has few waves wait
# too long. Few code objects serve all numbers of tokens then.
_FEWEST_ROWS_OF_THREE, _FEWEST_ROWS_OF_TWO = 24, 8  # of an expert, for so many tiles of ids
_SHORT_K = 384  # of which one wave has few enough steps
_MANY_GROUPS = 4  # of a compute unit, beside which a workgroup need not be fast itself
# Of 381 drawn shapes 19 have fewer where bounds are equal, and take 3 % less with so many, up to
# 9 %; none takes more. With eight, some do.
_ENOUGH_WAVES = 6  # of a compute unit

_DEVIATIONS = 2  # of the number of blocks, for which a grid has room
_LOOK_UP_CYCLES = 1500  # the expert of a block and its ids: a latency of the L2


class _Work(NamedTuple):
    """What a configuration makes of a problem whose tokens choose experts at random.

    Attributes:
        tiles: tiles of w of an expert.
        experts: experts with a token.
        chunks: chunks of ids with a token.
        col_tiles: tiles of x that the average chunk takes.
        steps: tiles along K.
    """

    tiles: int
    experts: float
    chunks: float
    col_tiles: int
    steps: int


def _work(problem: MoeGemmProblem, row_tiles: int, col_tiles: int) -> _Work:
    experts, of_expert = problem.touched, problem.rows_of_expert
    chunk = min(problem.block_m, SIDE * col_tiles)  # the most ids of one
    in_chunk = min(of_expert, chunk)
    chunks = max(experts, experts * of_expert / chunk)
    return _Work(
        tiles=-(-problem.N // (SIDE * row_tiles)),
        experts=experts,
        chunks=chunks,
        col_tiles=ceil(in_chunk / SIDE),
        steps=-(-problem.K // TILE_K),
    )


def _refusal(target: Target, problem: MoeGemmProblem) -> str | None:
    if problem.K >= MAX_K:
        return f"K={problem.K} is not below {MAX_K}, as the 32-bit offsets of mfma demand"
    if problem.N > MAX_TILES * SIDE:
        return f"N={problem.N} is above {MAX_TILES * SIDE}, the most rows of a grid of mfma"
    return None


def _registers(rows: int, cols: int, unroll: int) -> int:
    """At most so many registers of a lane: loads, sums, rows and addresses."""
    held = 10 * max(0, rows - 2) * max(0, cols - 1) + 4 * (rows > 1)
    return 72 + 18 * unroll * (rows + cols) + 4 * rows * cols + 10 * cols + held


@cache
def _resident(row_tiles: int, col_tiles: int, waves: int, unroll: int) -> int:
    """Workgroups that a compute unit holds at once; 0 where not even one fits."""
    registers = _registers(row_tiles, col_tiles, unroll)
    return resident(registers, waves, _lds_bytes(row_tiles, col_tiles, waves))


def _lds_bytes(row_tiles: int, col_tiles: int, waves: int) -> int:
    """What a workgroup declares: a tile or the sums of each wave, and little else."""
    return waves * 1024 * max(4, row_tiles * col_tiles) + 256


def _costs(target: Target, problem: MoeGemmProblem, least: Least) -> Iterator[Costed]:
    """A bound on the time in cycles; then what to have less of where bounds are equal.

    Weights come from memory once for an expert, and from the caches for its further chunks.
    """
    activated = problem.activation != "none"
    for tile in product((_ACTIVATED_TILES,) if activated else PARAMS[0].values, PARAMS[1].values):
        row_tiles, col_tiles = tile
        if col_tiles * SIDE >= 2 * max(problem.block_m, SIDE):
            continue
        work = _work(problem, row_tiles, col_tiles)
        of_busiest = -(-int(work.tiles * work.chunks) // target.cu_num)
        row_steps = work.tiles * work.steps * row_tiles
        memory = work.experts * row_steps * _TILE_BYTES / (target.cu_num * BYTES_A_CYCLE)
        loads = of_busiest * work.steps * (row_tiles + work.col_tiles) * TILE_CYCLES
        if max(memory, loads) > least.cost:
            continue
        for unroll in PARAMS[3].values:
            for waves, rounds in without_waste(WAVES, work.steps, unroll):
                held = _resident(row_tiles, col_tiles, waves, unroll)
                if held > 0:
                    turns = -(-of_busiest // held)
                    waiting = turns * (rounds * LATENCY_CYCLES + _LOOK_UP_CYCLES)
                    too_few = min(of_busiest, held) * waves < _ENOUGH_WAVES
                    less = (turns, loads, col_tiles, too_few, waves * unroll, unroll)
                    yield max(memory, loads, waiting), less, (*tile, waves, unroll)


_search = Search(PARAMS, _costs, _MOST_CANDIDATES)


def _configure(target: Target, problem: MoeGemmProblem) -> Config:
    rows, block_m, cols = problem.rows_of_expert, problem.block_m, 1
    if rows >= _FEWEST_ROWS_OF_THREE and block_m >= 3 * SIDE:
        cols = 3
    elif rows >= _FEWEST_ROWS_OF_TWO and block_m >= 2 * SIDE:
        cols = 2
    is_short = problem.K <= _SHORT_K
    row_tiles = _ACTIVATED_TILES
    if problem.activation == "none" and cols == 1 and not is_short:
        row_tiles = 2
    groups = problem.touched * -(-problem.N // (SIDE * row_tiles))  # of one block an expert
    are_many = groups >= _MANY_GROUPS * target.cu_num
    if cols == 1 and not are_many:
        return _search.best(target, problem)
    return {"row_tiles": row_tiles, "col_tiles": cols, "waves": 1 if is_short else 2, "unroll": 1}


def _candidates(target: Target, problem: MoeGemmProblem) -> list[Config]:
    chosen = _configure(target, problem)
    return [chosen, *(c for c in _search.candidates(target, problem) if c != chosen)]


def _defines(target: Target, problem: MoeGemmProblem, config: Config) -> Mapping[str, int]:
    rows_of_x = -(-problem.routed // problem.a_div)
    return {
        **as_defines(config),
        "MX_EVEN_BLOCKS": int(problem.K % (2 * BLOCK) == 0),
        "MX_WIDE": int(rows_of_x * problem.K >= _WIDE_BYTES),
        "MX_OUT": DTYPE_CODES["fp32" if problem.out_dtype == "mxfp8" else problem.out_dtype],
        "MX_ACTIVATION": ACTIVATION_CODES[problem.activation],
        "MX_INTERLEAVED": int(problem.activation != "none" and problem.layout == "interleaved"),
    }


def _geometry(target: Target, problem: MoeGemmProblem, config: Config) -> Geometry:
    if problem.activation != "none" and config["row_tiles"] != _ACTIVATED_TILES:
        raise ValueError(
            f"{dict(config)} does not fit {problem}: a workgroup holds the gate and up rows of 32 "
            f"features with row_tiles={_ACTIVATED_TILES} alone"
        )
    needed = _lds_bytes(config["row_tiles"], config["col_tiles"], config["waves"])
    refuse_static_lds(problem, config, needed)
    groups_x = -(-problem.N // (SIDE * config["row_tiles"]))
    return Geometry(
        grid=(groups_x, _groups_y(target, problem, config["col_tiles"], groups_x), 1),
        block=(config["waves"] * target.wave_size, 1, 1),
    )


def _groups_y(target: Target, problem: MoeGemmProblem, col_tiles: int, groups_x: int) -> int:
    """Workgroups of a tile of w, for as many chunks as tokens that choose at random hardly exceed.

    A workgroup takes further chunks in turn. Without an end of its own the grid would have one for
    each of all ranks' experts that tokens may choose, and most would find no block of theirs.
    """
    of_block = -(-problem.block_m // (SIDE * col_tiles))
    expected = problem.as_expected() if problem.expected else problem
    touched, rows = expected.touched, expected.rows_of_expert
    blocks = touched * (1 + max(rows - 1, 0) / problem.block_m)  # at most, in the mean
    likely = ceil((blocks + _DEVIATIONS * sqrt(blocks)) * of_block)
    enough = -(-target.cu_num // groups_x)
    most = min(problem.blocks * of_block, problem.routed, MAX_GROUPS_Y)
    return min(max(likely, enough), most)


MFMA = declare_gemm(
    "mfma",
    {"gfx950": "moe/mfma_gfx950.cu"},
    args=(Arg("groups_y", "i32"),),
    values=lambda target, problem, config: (_geometry(target, problem, config).grid[1],),
    defines=_defines,
    geometry=_geometry,
    refusal=_refusal,
    params=PARAMS,
    configure=_configure,
    candidates=_candidates,
)
