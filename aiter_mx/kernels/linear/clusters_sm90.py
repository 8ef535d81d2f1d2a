"""Clusters of workgroups on Hopper: how many run at once, and how they share K."""

from __future__ import annotations

from aiter_mx.kernels.linear.problem import LinearProblem
from aiter_mx.kernels.spec import Arg
from aiter_mx.target import Target

CHUNK = 128
"""k that a workgroup takes at a time, and bytes of a row of them."""

PART_ARGS = (
    Arg("part_chunks", "i32"),  # of every workgroup of a cluster,
    Arg("parts_with_one_more", "i32"),  # and the first ones have one more
    Arg("overlaps", "i32"),
)
"""What the arguments of every kernel end with whose clusters share K."""

# A cluster lies within a GPC, so not all SMs get one: the share of an H200's that do, by the
# cluster's size (cuOccupancyMaxActiveClusters).
_PACKED = {1: 1.0, 2: 1.0, 3: 0.89, 4: 0.91, 5: 0.84, 6: 0.78, 7: 0.80, 8: 0.91}


def most_clusters(target: Target, size: int) -> int:
    """Clusters of so many workgroups, 1 to 8, each of which has an SM to itself."""
    return max(1, int(target.cu_num * _PACKED[size]) // size)


def part_scalars(problem: LinearProblem, split: int) -> tuple[int, int, int]:
    """The values of ``PART_ARGS`` for clusters of ``split``."""
    part, parts_with_one_more = divmod(-(-problem.K // CHUNK), split)
    return part, parts_with_one_more, int(problem.pdl)
