"""The Triton gradient of a grouped GEMM's weights. Triton itself is not imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aiter_mx.kernels.grouped_wgrad.problem import GroupedWgradProblem
from aiter_mx.kernels.spec import Config, Param
from aiter_mx.kernels.triton import tiles, with_tiles
from aiter_mx.target import Target

PARAMS = (
    Param("BLOCK_N", (64, 128), "output features in a tile"),
    Param("BLOCK_K", (64, 128, 256), "input features in a tile"),
    Param("BLOCK_M", (64, 128), "columns in one step of the loop"),
    Param("num_warps", (4, 8), "warps (sm_90a) or waves (gfx950) of a workgroup"),
    Param("num_stages", (2, 3), "steps of the loop in flight"),
)


CANDIDATES: Mapping[str, tuple[Config, ...]] = {
    "gfx950": tiles(PARAMS, (128, 256, 128, 8, 2), (128, 128, 128, 4, 2), (64, 64, 128, 4, 2)),
    "sm_90a": tiles(PARAMS, (128, 128, 64, 8, 3), (128, 128, 128, 8, 2), (64, 64, 128, 4, 3)),
}
"""Architecture to the configurations that a tuner should time."""


def candidates(target: Target, problem: GroupedWgradProblem) -> Sequence[Config]:
    """The configurations that a tuner should time."""
    return CANDIDATES[target.arch]


def _configure(target: Target, problem: GroupedWgradProblem) -> Config:
    """The largest tiles, unless both sides of the result are small."""
    return CANDIDATES[target.arch][-1 if max(problem.N, problem.K) <= 64 else 0]


DOT_SCALED = with_tiles("grouped_wgrad", PARAMS, _configure, candidates)
