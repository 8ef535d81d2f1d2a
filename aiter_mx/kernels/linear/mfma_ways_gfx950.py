"""How ``mfma`` divides a linear: tiles of a workgroup, workgroups, and how many a unit holds."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from aiter_mx.kernels.gfx950 import (
    LDS_BYTES,
    MOST_REGISTERS,
    REGISTERS,
    SIDE,
    SIMDS,
    TILE_K,
    WAVES,
)
from aiter_mx.kernels.linear.problem import LinearProblem
from aiter_mx.kernels.spec import Config, Param
from aiter_mx.numerics import BLOCK
from aiter_mx.target import Target

PARAMS = (
    Param(
        "row_tiles", (1, 2, 3, 4, 5, 6), "tiles of w that a workgroup computes, 16 / fold rows each"
    ),
    Param("fold", (1, 2, 4), "parts of K that a tile has side by side"),
    Param("waves", WAVES, "waves of a workgroup, which split K"),
    Param(
        "unroll", (1, 2, 3, 4), "steps of a wave whose loads are issued before the first is used"
    ),
    Param("blocks", tuple(range(1, 257)), "blocks of rows of x, each with workgroups of its own"),
)

SPLITS = Param("splits", (2, 3, 4), "workgroups that share K")

MAX_M = 4096
BLOCK_M = 64
"""Rows of x in a block, where there are too many for as many blocks as a configuration says."""
COL_TILES = (1, 2, 3, 4, 6, 8)
LANES = 64


class Work(NamedTuple):
    """What a configuration makes of a problem.

    Attributes:
        groups: workgroups.
        of_busiest: workgroups of the busiest compute unit.
        rows: of w, of the largest workgroup.
        steps: tiles along a workgroup's part of K.
    """

    groups: int
    of_busiest: int
    rows: int
    steps: int


class Way(NamedTuple):
    """Tiles of a workgroup, whatever N and K are.

    Attributes:
        row_tiles, fold, splits: as parameters have them.
        blocks: of x.
        col_tiles: tiles of x, of a block.
        block_rows: rows of x, of a block.
    """

    row_tiles: int
    fold: int
    splits: int
    blocks: int
    col_tiles: int
    block_rows: int


@cache
def way_at(M: int, row_tiles: int, fold: int, blocks: int, splits: int = 1) -> Way:
    tiles = -(-M * fold // (SIDE * blocks))
    if M > BLOCK_M:
        tiles = next((t for t in COL_TILES if t >= tiles), BLOCK_M * fold // SIDE)
    else:
        tiles += tiles % 2 * (tiles > 2)  # fewer code objects, for rows that take no memory
    blocks = -(-M * fold // (SIDE * max(tiles, 1)))
    return Way(row_tiles, fold, splits, blocks, tiles, -(-M // max(blocks, 1)))


def work_at(cu_num: int, N: int, K: int, way: Way) -> Work:
    """Workgroups are as many on each compute unit, where there are rows for them: the busiest has
    no more of them then, and each has fewer rows."""
    row_tiles, fold, splits, blocks, _, _ = way
    of_tile = blocks * splits
    needed = -(-N * fold // (SIDE * row_tiles)) * of_tile
    of_busiest = -(-needed // cu_num)
    tiles = min(N, of_busiest * cu_num // max(of_tile, 1))
    groups = tiles * of_tile
    rows, steps = -(-N // max(tiles, 1)), -(-K // (TILE_K * fold * splits))
    return Work(groups, -(-groups // cu_num), rows, steps)


def way_of(problem: LinearProblem, config: Config) -> Way:
    splits = config.get("splits", 1)
    return way_at(problem.M, config["row_tiles"], config["fold"], config["blocks"], splits)


def work_of(target: Target, problem: LinearProblem, config: Config) -> Work:
    return work_at(target.cu_num, problem.N, problem.K, way_of(problem, config))


def registers_of(
    rows: int, cols: int, unroll: int, is_odd: bool = False, quantises: bool = False
) -> int:
    """At most so many registers of a lane: loads, operands at once, sums and addresses, as
    compilers have it.

    Args:
        rows, cols: tiles of w and of x.
        unroll: steps whose loads are issued before the first is used.
        is_odd: whether scales come one by one, as K has an odd number of blocks.
        quantises: whether x is quantised here.
    """
    tiles, pairs = unroll * (rows + cols), min(rows, cols)
    held = 18 * tiles + (tiles + 1 if is_odd else 0) + (8 if unroll > 1 else 0)
    if quantises:
        held += 8 + 16 * unroll * cols
    operands = 2 * pairs - (1 < pairs == rows)  # tiles of w and x take turns, and are used up
    spare = 10 if 1 < cols < rows else 0  # of the last tiles of w each is used up at once
    return 26 + held - spare + 17 * operands + 4 * rows * cols


@cache
def resident_at(
    row_tiles: int,
    col_tiles: int,
    waves: int,
    unroll: int,
    is_odd: bool = False,
    quantises: bool = False,
) -> int:
    """Workgroups that a compute unit holds at once; 0 where not even one fits."""
    registers = -(-registers_of(row_tiles, col_tiles, unroll, is_odd, quantises) // 8) * 8
    if registers > (MOST_REGISTERS if quantises else REGISTERS):
        return 0
    lds_bytes = lds_bytes_of(row_tiles, col_tiles, waves)
    return min(REGISTERS // registers * SIMDS // waves, LDS_BYTES // lds_bytes)


def has_too_few_lanes(row_tiles: int, fold: int, waves: int) -> bool:
    """Whether a workgroup has more rows of w than lanes, each of which adds a row's bias."""
    return row_tiles * SIDE > fold * waves * LANES


def has_odd_blocks(K: int) -> bool:
    return K % (2 * BLOCK) != 0


def resident_of(problem: LinearProblem, config: Config, quantises: bool = False) -> int:
    tiles = config["row_tiles"], way_of(problem, config).col_tiles
    is_odd = has_odd_blocks(problem.K)
    return resident_at(*tiles, config["waves"], config["unroll"], is_odd, quantises)


def row_kib(K: int) -> float:
    """Of w or x, with its scales."""
    return K * (BLOCK + 1) / (BLOCK * 1024)


def lds_bytes_of(row_tiles: int, col_tiles: int, waves: int) -> int:
    """What a workgroup declares: a tile or the sums of each wave, and the bias of its rows."""
    return waves * 1024 * max(4, row_tiles * col_tiles) + 256
