"""Hopper, compute capability 9.0: what its declarations share."""

from __future__ import annotations

from aiter_mx.target import Target

SHARED_BYTES = 227 * 1024
"""Of a workgroup. Those of an SM have as much together, less ``RESERVED_BYTES`` each."""
RESERVED_BYTES = 1024
"""What the system takes of each workgroup's."""
REGISTERS = 64 * 1024
"""Of an SM."""
CHUNK = 128
"""k that a workgroup takes at a time, and bytes of a row of them."""
GROUP_ROWS = 64
"""Rows of wgmma's A, which a warpgroup multiplies."""
SUM_BYTES = 512
"""Sums of 16 rows of an operand by 8 of the other, which a warp has in 4 registers."""

# A cluster lies within a GPC, so not all SMs get one: the share of an H200's that do, by the
# cluster's size (cuOccupancyMaxActiveClusters).
_PACKED = {1: 1.0, 2: 1.0, 3: 0.89, 4: 0.91, 5: 0.84, 6: 0.78, 7: 0.80, 8: 0.91}


def most_clusters(target: Target, size: int) -> int:
    """Clusters of so many workgroups, 1 to 8, each of which has an SM to itself."""
    return max(1, int(target.cu_num * _PACKED[size]) // size)


def up(value: int, to: int) -> int:
    """The least multiple of ``to`` that is no less than ``value``."""
    return -(-value // to) * to
