"""The Triton linear: what a table may set, and what is used where no table decides.

Triton itself is not imported here, so that dispatch can reason without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from aiter_mx.kernels.linear.problem import LinearProblem
from aiter_mx.kernels.spec import Config, Param
from aiter_mx.kernels.triton import tiles, with_tiles
from aiter_mx.target import Target

PARAMS = (
    Param("BLOCK_M", (16, 32, 64, 128), "rows of x in a tile"),
    Param("BLOCK_N", (16, 32, 64, 128, 256), "rows of w in a tile"),
    Param("BLOCK_K", (64, 128, 256, 512), "elements of K in one step of the loop"),
    Param("SPLIT_K", (1, 2, 4, 8), "workgroups that share K; a second kernel adds their sums"),
    Param("SWAP", (0, 1), "1: w is the first operand of the matrix instruction, 0: x is"),
    Param("num_warps", (1, 2, 4, 8), "warps (sm_90a) or waves (gfx950) of a workgroup"),
    Param("num_stages", (1, 2, 3, 4, 5), "steps of the loop in flight"),
)

_WORKGROUPS_A_CU = 3  # on an H200 the split stops paying between 2 and 4
_FEW_ROWS = 64
_OF_MANY_ROWS = 8  # as many, above 64 rows
_MIN_STEPS = 4
_WIDE = {"sm_90a": 1.5}
"""Tiles of M's second candidate for each compute unit from which it is taken, above 64 rows: 35
cells timed on an H200 then take 1.06 times their best tile's time."""


def bucket(M: int) -> int:
    """Tiles are chosen by this: the smallest of 16, 32, 64 and 128 that holds M, at most 128."""
    return next((rows for rows in (16, 32, 64) if rows >= M), 128)


CANDIDATES: Mapping[str, Mapping[int, tuple[Config, ...]]] = {
    "gfx950": {
        16: tiles(
            PARAMS,
            (16, 16, 256, 4, 0, 2, 2),
            (16, 16, 512, 2, 0, 2, 2),
            (16, 32, 256, 4, 0, 2, 2),
            (16, 32, 512, 4, 0, 4, 2),
            (16, 64, 256, 4, 0, 4, 2),
            (16, 64, 256, 8, 0, 4, 2),
            (16, 32, 256, 4, 1, 2, 2),
            (16, 64, 256, 4, 1, 4, 2),
        ),
        32: tiles(
            PARAMS,
            (32, 32, 256, 4, 0, 2, 2),
            (32, 32, 512, 4, 0, 4, 2),
            (32, 64, 256, 4, 0, 4, 2),
            (32, 64, 256, 8, 0, 4, 2),
            (32, 32, 256, 4, 1, 2, 2),
            (32, 64, 256, 4, 1, 4, 2),
        ),
        64: tiles(
            PARAMS,
            (64, 32, 256, 4, 0, 4, 2),
            (64, 64, 256, 4, 0, 4, 2),
            (64, 64, 256, 8, 0, 4, 2),
            (64, 64, 128, 8, 0, 4, 2),
            (64, 128, 128, 8, 0, 4, 2),
            (64, 64, 256, 4, 1, 4, 2),
        ),
        128: tiles(
            PARAMS,
            (128, 128, 128, 1, 0, 4, 2),
            (128, 128, 128, 1, 0, 8, 2),
            (128, 256, 128, 1, 0, 8, 2),
            (128, 128, 256, 1, 0, 8, 2),
            (128, 64, 128, 2, 0, 4, 2),
            (64, 128, 128, 1, 0, 4, 2),
        ),
    },
    "sm_90a": {
        16: tiles(
            PARAMS,
            (16, 64, 128, 8, 1, 4, 4),
            (16, 64, 128, 4, 1, 4, 4),
            (16, 64, 256, 4, 1, 4, 3),
            (16, 128, 128, 8, 1, 8, 3),
            (16, 128, 128, 8, 1, 4, 3),
            (16, 32, 256, 2, 0, 4, 3),
            (16, 32, 256, 4, 0, 4, 3),
            (16, 64, 128, 4, 0, 4, 4),
        ),
        32: tiles(
            PARAMS,
            (32, 64, 128, 4, 1, 4, 4),
            (32, 64, 256, 4, 1, 4, 3),
            (32, 64, 128, 8, 1, 4, 4),
            (32, 128, 128, 8, 1, 8, 3),
            (32, 32, 256, 4, 0, 4, 3),
            (32, 64, 128, 4, 0, 4, 4),
        ),
        64: tiles(
            PARAMS,
            (64, 64, 64, 8, 0, 4, 4),
            (64, 64, 64, 4, 0, 4, 4),
            (64, 64, 128, 4, 1, 4, 3),
            (64, 64, 128, 8, 1, 4, 3),
            (64, 128, 128, 4, 1, 8, 3),
            (64, 128, 128, 8, 1, 4, 3),
            (64, 64, 128, 4, 0, 4, 3),
        ),
        128: tiles(
            PARAMS,
            (64, 128, 64, 4, 0, 4, 4),
            (128, 128, 64, 1, 0, 4, 3),
            (128, 128, 64, 4, 1, 8, 3),
            (128, 256, 64, 1, 1, 8, 3),
            (128, 128, 64, 1, 1, 4, 4),
            (128, 64, 64, 1, 1, 4, 4),
            (64, 64, 64, 4, 0, 4, 4),
        ),
    },
}
"""Architecture, then bucket, to the configurations that a tuner should time; the first is the one
that ``configure`` starts from."""


def configure(target: Target, problem: LinearProblem) -> Config:
    """The configuration of a problem that no tuned table lists.

    The first candidate of M's bucket, with K split only as far as the GPU has room for more
    workgroups and every workgroup keeps a few steps of its loop; or the second, where many rows
    have enough of its tiles.
    """
    rows = bucket(problem.M)
    first, second, *_ = CANDIDATES[target.arch][rows]
    is_many = rows > _FEW_ROWS
    if is_many and _tiles(problem, second) >= _WIDE.get(target.arch, inf) * target.cu_num:
        return second
    config = dict(first)
    most = (_OF_MANY_ROWS if is_many else _WORKGROUPS_A_CU) * target.cu_num
    tiles, steps = _tiles(problem, config), -(-problem.K // config["BLOCK_K"])
    while config["SPLIT_K"] > 1 and (
        tiles * config["SPLIT_K"] > most or steps < _MIN_STEPS * config["SPLIT_K"]
    ):
        config["SPLIT_K"] //= 2
    return config


def _tiles(problem: LinearProblem, config: Config) -> int:
    return -(-problem.M // config["BLOCK_M"]) * -(-problem.N // config["BLOCK_N"])


def candidates(target: Target, problem: LinearProblem) -> Sequence[Config]:
    """The configurations that a tuner should time."""
    return CANDIDATES[target.arch][bucket(problem.M)]


DOT_SCALED = with_tiles("linear", PARAMS, configure, candidates)
