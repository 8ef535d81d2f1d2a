"""Some workgroups of a launch in place of all: those that work, and how many of these there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from aiter_mx.sim.report import LaunchReport, Trace

IDLE = 0.1
"""Of the busiest workgroup's instructions: one with fewer finds nothing to do."""


@dataclass(frozen=True)
class Sample:
    """What some workgroups of a launch do.

    Attributes:
        trace: of those that work, the busiest first.
        working: workgroups of the whole launch that do.
    """

    trace: Trace
    working: int


def sample(run: Callable[[int], LaunchReport], groups: int, count: int) -> Sample:
    """Run so many workgroups of a launch.

    Args:
        run: simulates the workgroup of a number, traced.
        groups: workgroups of the launch.
        count: those to run, from the first to the last. Where those that work come first, some more
            are run to find the last of them.
    """
    numbers = sorted({i * (groups - 1) // max(1, count - 1) for i in range(count)})
    reports = {number: run(number) for number in numbers}
    least = IDLE * max(report.instructions for report in reports.values())
    busy = [number for number in numbers if reports[number].instructions > least]
    working = round(groups * len(busy) / len(numbers))
    if busy == numbers[: len(busy)] and len(busy) < len(numbers):
        last, idle = busy[-1], numbers[len(busy)]
        while idle - last > 1:
            middle = (last + idle) // 2
            if run(middle).instructions > least:
                last = middle
            else:
                idle = middle
        working = idle
    busiest = max(busy, key=lambda number: reports[number].instructions)
    ordered = [busiest, *(number for number in busy if number != busiest)]
    return Sample(joined([reports[number] for number in ordered]), max(1, working))


def joined(reports: Sequence[LaunchReport]) -> Trace:
    """The traces of several workgroups of a launch as one."""
    traces = [report.trace for report in reports if report.trace is not None]
    words = b"".join(trace.words for trace in traces)
    return replace(traces[0], words=words, groups=len(traces))
