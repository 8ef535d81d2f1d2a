"""How many clusters of workgroups a Hopper GPU runs at once."""

from __future__ import annotations

from aiter_mx.target import Target

# A cluster lies within a GPC, so not all SMs get one: the share of an H200's that do, by the
# cluster's size (cuOccupancyMaxActiveClusters).
_PACKED = {1: 1.0, 2: 1.0, 3: 0.89, 4: 0.91, 5: 0.84, 6: 0.78, 7: 0.80, 8: 0.91}


def most_clusters(target: Target, size: int) -> int:
    """Clusters of so many workgroups, 1 to 8, each of which has an SM to itself."""
    return max(1, int(target.cu_num * _PACKED[size]) // size)
