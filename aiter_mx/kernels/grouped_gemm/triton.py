"""The Triton grouped GEMM. Triton itself is not imported, so that dispatch can do without it.

Its tiles are the linear's for many rows: a group of a prefill has hundreds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aiter_mx.kernels.grouped_gemm.problem import GroupedGemmProblem
from aiter_mx.kernels.spec import Config, Param
from aiter_mx.kernels.triton import tiles, with_tiles
from aiter_mx.target import Target

MAX_GROUPS = 4096  # a program looks at all of them at once

PARAMS = (
    Param("BLOCK_M", (16, 32, 64, 128), "rows of a in a tile"),
    Param("BLOCK_N", (64, 128, 256), "features in a tile"),
    Param("BLOCK_K", (64, 128, 256), "elements of K in one step of the loop"),
    Param("num_warps", (4, 8), "warps (sm_90a) or waves (gfx950) of a workgroup"),
    Param("num_stages", (2, 3, 4), "steps of the loop in flight"),
)


CANDIDATES: Mapping[str, tuple[Config, ...]] = {
    "gfx950": tiles(
        PARAMS,
        (128, 128, 128, 4, 2),
        (128, 256, 128, 8, 2),
        (128, 128, 256, 8, 2),
        (64, 128, 128, 4, 2),
        (32, 128, 256, 4, 2),
        (16, 128, 256, 4, 2),
    ),
    "sm_90a": tiles(
        PARAMS,
        (128, 256, 64, 8, 3),
        (128, 128, 64, 8, 3),
        (64, 64, 64, 4, 4),
        (16, 128, 128, 4, 3),
        (128, 128, 64, 4, 3),
        (64, 256, 64, 8, 3),
        (64, 128, 64, 4, 4),
    ),
}
"""Architecture to the configurations that a tuner should time."""


_LEAST_ROWS = {"sm_90a": (257, 65, 17)}
"""Of an average group, for the first candidates: the fastest of 13 tiles on an H200, of 24 rows on.
"""


def configure(target: Target, problem: GroupedGemmProblem) -> Config:
    """The first candidate that suits an average group: on gfx950, whose tile it more than half
    fills, or the lowest."""
    rows, every = max(16, problem.usual_rows), CANDIDATES[target.arch]
    if target.arch in _LEAST_ROWS:
        return every[sum(rows < least for least in _LEAST_ROWS[target.arch])]
    return next(c for c in every if c["BLOCK_M"] // 2 < rows)


def candidates(target: Target, problem: GroupedGemmProblem) -> Sequence[Config]:
    """The configurations that a tuner should time."""
    return CANDIDATES[target.arch]


def _refusal(problem: GroupedGemmProblem) -> str | None:
    if max(problem.G, problem.most_runs) > MAX_GROUPS:
        given = f"G={problem.G}" if problem.G > MAX_GROUPS else f"{problem.most_runs} runs of rows"
        return f"{given} is above {MAX_GROUPS}, the most groups of the Triton grouped GEMM"
    return None


DOT_SCALED = with_tiles("grouped_gemm", PARAMS, configure, candidates, _refusal)
