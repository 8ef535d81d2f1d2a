"""How ``wgmma_fp8`` of Hopper's linear is laid out: tiles, shared memory and registers."""

from __future__ import annotations

from itertools import product
from math import gcd
from typing import NamedTuple

from aiter_mx.kernels.linear.problem import LinearProblem
from aiter_mx.kernels.sm90 import (
    CHUNK,
    GROUP_ROWS,
    RESERVED_BYTES,
    SHARED_BYTES,
    SUM_BYTES,
    most_clusters,
    up,
)
from aiter_mx.kernels.spec import Config, Param
from aiter_mx.target import Target

PARAMS = (
    Param("split", (1, 2, 3, 4, 5, 6, 7, 8), "workgroups of a cluster, which share K"),
    Param("row_groups", (1, 2, 3, 4), "warpgroups side by side along w"),
    Param("k_groups", (1, 2, 3, 4), "warpgroups that take turns along K"),
    Param("depth", (2, 3, 4, 6, 8, 12), "chunks of 128 k that are under way at most"),
    Param("per_sm", (1, 2, 3), "workgroups that an SM is to hold"),
)

MOST_GROUPS = 4  # of a workgroup that has an SM
_MOST_SHARED_GROUPS = 6  # of an SM
GROUPS = tuple(
    groups
    for groups in product(PARAMS[1].values, PARAMS[2].values)
    if groups[0] * groups[1] <= MOST_GROUPS
)

_X_IS_A_M = 49  # from which x, not w, is wgmma's A: it has 64 rows
_X_IS_A_M_OF_SHORT_K, _SHORT_K = 33, 1536  # likewise, where no cluster shares so few k
TWO_A_M = 97  # from which x is A again, of two warpgroups
_PASSES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""In which workgroups take the rows of w, where SMs have no room for all at once."""
_MANY_WEIGHTS, _MANY_ROWS = 50_000_000, 16_384
_FACTOR_BYTES = 8  # of a row's scales in a chunk
MOST_COLUMNS = 96  # of a wgmma
_MOST_BOX_ROWS = 256
_REGISTERS = (248, 240, 160, 112)  # of a lane, by warpgroups that multiply and have an SM
_ALIGNMENT_BYTES = 1024  # of boxes in shared memory, which the kernel's first byte may not have


def chunks_of(problem: LinearProblem) -> int:
    return -(-problem.K // CHUNK)


class Layout(NamedTuple):
    """What the host works out of a configuration: see the constants of the kernel.

    Attributes:
        x_is_a: whether x is wgmma's A, not w.
        rows_m: of x, with padding.
        rows_w: of w in a workgroup.
        columns: of a wgmma.
        passes: in which the SMs take the clusters.
        clusters: how many share the rows of w.
        chunks: of K in the largest part.
        stages: of them, that there is room for.
        shared_bytes: of a workgroup.
        scale_chunks: of which the scales of a row are loaded as a vector, or 1: then as words.
        kept: whether each warp keeps a share of its sums, and gets the other parts' for these.
    """

    x_is_a: bool
    rows_m: int
    rows_w: int
    columns: int
    passes: int
    clusters: int
    chunks: int
    stages: int
    shared_bytes: int
    scale_chunks: int
    kept: bool

    @property
    def stage_bytes(self) -> int:
        return (self.rows_m + self.rows_w) * CHUNK


def layout(target: Target, problem: LinearProblem, config: Config) -> Layout | None:
    """How a configuration is laid out, or None where it does not fit."""
    tile = config["split"], config["row_groups"], config["k_groups"]
    if config["per_sm"] > 1:
        return shared_layout(target, problem, *tile, config["per_sm"])
    return layout_of(target, problem, *tile)


def shared_layout(
    target: Target, problem: LinearProblem, split: int, row_groups: int, k_groups: int, per_sm: int
) -> Layout | None:
    """Of workgroups that share an SM, with one another or with the next launch's where launches
    overlap: tiles have all the rows that a warpgroup takes, so as to be few."""
    if (
        row_groups * k_groups * per_sm > _MOST_SHARED_GROUPS
        or chunks_of(problem) // split < k_groups
    ):
        return None
    needed = -(-problem.N // (GROUP_ROWS * row_groups))
    if problem.M >= _X_IS_A_M or needed > most_clusters(target, split) * per_sm:
        return None
    share = -(-problem.N // needed)
    if -(-share // GROUP_ROWS) != row_groups:
        return None
    return laid_out(problem, split, row_groups, k_groups, False, 1, share, per_sm)


def passes_of(problem: LinearProblem) -> tuple[int, ...]:
    """Those that are weighed."""
    many = problem.N >= _MANY_ROWS or problem.N * problem.K >= _MANY_WEIGHTS
    return _PASSES if many else _PASSES[:1]


def layout_of(
    target: Target, problem: LinearProblem, split: int, row_groups: int, k_groups: int
) -> Layout | None:
    """What fits some rows of x fits fewer, though it may not have w as wgmma's A: a table's row is
    for all M up to its own."""
    if row_groups * k_groups > MOST_GROUPS or chunks_of(problem) // split < k_groups:
        return None
    few_parts = split == 1 and problem.K <= _SHORT_K
    fewest = _X_IS_A_M_OF_SHORT_K if few_parts else _X_IS_A_M
    x_is_a = fewest <= problem.M <= GROUP_ROWS or problem.M >= TWO_A_M
    at_once = most_clusters(target, split)
    w_groups, unshared = divmod(row_groups, groups_of_x(problem))
    most_columns = 0 if unshared else min(_MOST_BOX_ROWS, MOST_COLUMNS * w_groups)
    for passes in passes_of(problem):
        share = -(-problem.N // (at_once * passes))
        for x_first in (x_is_a, not x_is_a):
            as_a = 0 < share <= most_columns
            if as_a if x_first else -(-share // GROUP_ROWS) == row_groups:
                found = laid_out(problem, split, row_groups, k_groups, x_first, passes, share)
                if found is not None:
                    return found
    return None


def rows_m_of(problem: LinearProblem, x_is_a: bool) -> int:
    """Of a tile of x. Rows that it is not full of are not copied and, where x is A, multiplied with
    the others: then few sizes, and code objects, do. To 32 rows sums are handed over by 16. As
    columns, 112 rows take as long as 128 on an H200, and 80 as long as 96 where K ends within a
    chunk."""
    M = problem.M
    if x_is_a:
        return up(M, 16 if M < _X_IS_A_M_OF_SHORT_K else GROUP_ROWS)
    if M >= TWO_A_M:
        return up(M, 2 * GROUP_ROWS)
    if M > GROUP_ROWS and problem.K % CHUNK:
        return up(M, GROUP_ROWS // 2)
    return up(M, 8 if M <= GROUP_ROWS // 2 else 16)


def registers(groups: int, per_sm: int = 1) -> int:
    """Of a lane that multiplies, as the kernel's kMostRegisters."""
    if per_sm == 1:
        return _REGISTERS[groups - 1]
    return 512 // -(-(4 * groups + 2) * per_sm // 4) // 8 * 8


def groups_of_x(problem: LinearProblem) -> int:
    """Warpgroups side by side along x, where it is wgmma's A."""
    return -(-problem.M // GROUP_ROWS)


def laid_out(
    problem: LinearProblem,
    split: int,
    row_groups: int,
    k_groups: int,
    x_is_a: bool,
    passes: int,
    share: int,
    per_sm: int = 1,
    rows_m: int | None = None,
) -> Layout | None:
    rows_m = rows_m_of(problem, x_is_a) if rows_m is None else rows_m
    if x_is_a:
        groups_a = groups_of_x(problem)
        groups_b = row_groups // groups_a
        rows_w = up(share, 8 * groups_b)
        columns, rows_a, rows_b = rows_w // groups_b, rows_m, rows_w
    else:
        groups_a, groups_b, rows_w = row_groups, 1, up(share, 8)
        columns, rows_a, rows_b = rows_m, rows_w, rows_m
    groups = row_groups * k_groups
    if rows_w > _MOST_BOX_ROWS:
        return None
    # Sums, and products and scales of a block at least.
    if 3 * columns // 2 + 32 > registers(groups, per_sm):
        return None
    fewest_chunks, more = divmod(chunks_of(problem), split)
    chunks = fewest_chunks + (more > 0)
    tiles = -(-rows_a // 16) * (rows_b // 8)
    if tiles < split and per_sm == 1:
        return None  # choices are fitted without clusters of which some own no sums
    parts = split * k_groups
    of_warp = columns // 8  # tiles
    kept = 1 < parts <= of_warp // 2
    if kept:
        warps = k_groups * -(-rows_a // 16) * groups_b
        boxes = warps * -(-of_warp // parts) * (parts - 1)
    else:
        boxes = -(-tiles // split) * parts if parts > 1 else 0
    stage_bytes = (rows_m + rows_w) * CHUNK
    scales = up(chunks * (rows_a + 1), 2) + up(chunks, 2) * (rows_b + 1)
    behind = scales * _FACTOR_BYTES + boxes * SUM_BYTES + (2 * chunks + 2) * 8
    # The last stage is read as if it had all rows of A.
    behind = max(behind, groups_a * GROUP_ROWS * CHUNK - stage_bytes)
    room = (SHARED_BYTES + RESERVED_BYTES) // per_sm - RESERVED_BYTES
    stages = (room - _ALIGNMENT_BYTES - behind) // stage_bytes
    stages = chunks if stages >= chunks else stages // k_groups * k_groups
    if stages < min(2 * k_groups, chunks):
        return None
    shared_bytes = up(_ALIGNMENT_BYTES + stages * stage_bytes + behind, 16)
    clusters = -(-problem.N // rows_w)
    at_once = 1 if more or problem.K % CHUNK else gcd(4, chunks)
    of_tile = x_is_a, rows_m, rows_w, columns, passes, clusters
    return Layout(*of_tile, chunks, stages, shared_bytes, at_once, kept)
