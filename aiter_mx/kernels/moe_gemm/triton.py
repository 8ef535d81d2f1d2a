"""The Triton grouped GEMM over routed tokens. Triton itself is not imported here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aiter_mx.kernels.moe_gemm.problem import MoeGemmProblem
from aiter_mx.kernels.spec import Config, Param, first_of
from aiter_mx.kernels.triton import tiles, with_tiles
from aiter_mx.target import Target

PARAMS = (
    Param("BLOCK_M", (16, 32, 64), "ids in a tile"),
    Param("BLOCK_N", (32, 64, 128), "rows of w in a tile"),
    Param("BLOCK_K", (64, 128, 256), "elements of K in one step of the loop"),
    Param("SWAP", (0, 1), "1: w is the first operand of the matrix instruction, 0: x is"),
    Param("num_warps", (1, 2, 4, 8), "warps (sm_90a) or waves (gfx950) of a workgroup"),
    Param("num_stages", (1, 2, 3, 4), "steps of the loop in flight"),
)


CANDIDATES: Mapping[str, Mapping[int, tuple[Config, ...]]] = {
    "gfx950": {
        16: tiles(PARAMS, (16, 32, 256, 0, 2, 2), (16, 64, 256, 0, 4, 2), (16, 64, 128, 1, 4, 2)),
        32: tiles(PARAMS, (32, 64, 256, 0, 4, 2), (32, 32, 256, 0, 2, 2)),
        64: tiles(PARAMS, (64, 64, 256, 0, 4, 2), (64, 128, 128, 0, 8, 2)),
    },
    "sm_90a": {
        16: tiles(PARAMS, (16, 64, 128, 1, 4, 4), (16, 64, 256, 1, 4, 3), (16, 32, 256, 0, 4, 3)),
        32: tiles(PARAMS, (32, 64, 128, 1, 4, 4), (32, 32, 256, 0, 4, 3)),
        64: tiles(PARAMS, (64, 64, 128, 1, 4, 3), (64, 64, 64, 0, 4, 4)),
    },
}
"""Architecture, then the rows of a tile, to the configurations that a tuner should time."""


def candidates(target: Target, problem: MoeGemmProblem) -> Sequence[Config]:
    """The configurations that a tuner should time; the first one is used where no table decides."""
    rows = min(problem.block_m, max(16, problem.routed // min(problem.routed or 1, problem.E)))
    return CANDIDATES[target.arch][next((size for size in (16, 32) if rows <= size), 64)]


DOT_SCALED = with_tiles("moe_gemm", PARAMS, first_of(candidates), candidates)
