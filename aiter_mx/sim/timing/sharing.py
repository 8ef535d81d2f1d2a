"""Where the lines come from that a workgroup touches: HBM, the MALL, or the L2 of its XCD."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from aiter_mx.sim.report import LaunchReport
from aiter_mx.sim.timing.cu import Shares, SplitTrace
from aiter_mx.sim.timing.sample import joined

XCDS = 8
L2_BYTES, MALL_BYTES = 4 << 20, 256 << 20  # of an XCD; of all
_MOST_NEIGHBOURS = 256

Fresh: TypeAlias = "tuple[float, ...]"
"""By region: how much of what each workgroup of an XCD touches no other of them has brought there;
-1 where that is not known."""


@dataclass(frozen=True)
class Left:
    """What caches hold from before a launch, in bytes of its operands.

    Attributes:
        l2_bytes: that each L2 has room for.
        mall_bytes: that the MALL has room for.
    """

    l2_bytes: int = 0
    mall_bytes: int = 0


COLD = Left()


def fresh(run: Callable[[int], LaunchReport], groups: int) -> Fresh:
    """How much of what an XCD's workgroups touch is new to it.

    Workgroups that begin at the same line of a region touch the same part of it.

    Args:
        run: simulates the workgroup of a number, traced.
        groups: workgroups of the launch, of which the XCDs take one each in turn.
    """
    neighbours = range(0, min(groups, XCDS * _MOST_NEIGHBOURS), XCDS)
    lines = SplitTrace(joined([run(number) for number in neighbours])).first_lines()
    found = []
    for of_region in zip(*lines, strict=True):
        touched = [line for line in of_region if line >= 0]
        found.append(len(set(touched)) / len(touched) if touched else -1.0)
    return tuple(found)


def shares(split: SplitTrace, groups: int, fresh: Fresh, left: Left) -> Shares:
    """Where lines come from in a launch of so many workgroups.

    HBM gives each byte of a region once, and an XCD has it once from HBM or the MALL. What the
    workgroups of an XCD have in common counts where the MALL holds all; lines from HBM, which
    workgroups wait for side by side, are taken to cost each XCD what its workgroups touch, up to
    eight times the region.

    Args:
        split: of some workgroups of the launch, which touch as much of each region as the others.
        groups: of the launch.
        fresh: what the workgroups of an XCD have in common.
        left: what caches hold from before the launch.
    """
    in_mall = sum(split.region_bytes) <= left.mall_bytes
    known = fresh if in_mall and fresh else (-1.0,) * len(split.region_bytes)
    memory, mall, brought = [], [], 0.0
    for size, bytes_, new in zip(split.region_bytes, split.footprint(), known, strict=False):
        whole = bytes_ / split.groups * groups
        once = min(1.0, size / whole) if whole else 1.0
        memory.append(0.0 if in_mall else once)
        mall.append(max(once, new) if new >= 0 else min(1.0, XCDS * once))
        brought += min(size, mall[-1] * whole / XCDS)
    if brought <= left.l2_bytes:
        mall = [share if split.is_stored_to(i) else 0.0 for i, share in enumerate(mall)]
    return Shares(memory, mall)
