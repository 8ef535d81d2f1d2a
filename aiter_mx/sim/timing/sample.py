"""Some workgroups of a launch in place of all: those that work, and how many of these there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from aiter_mx.sim.report import LaunchReport, Trace
from aiter_mx.sim.timing.cu import SplitTrace

ALIKE, UNLIKE = 3, 16
"""Workgroups that stand for a launch in which all do the same, or in which the data decide."""
IDLE = 0.25
"""Of the busiest workgroup's instructions: one with fewer finds nothing to do. What finds out so
takes up to a sixth of them in expert products of few tokens."""


@dataclass(frozen=True)
class Sample:
    """What some workgroups of a launch do.

    Attributes:
        trace: of those that work, the busiest first.
        working: workgroups of the whole launch that do.
    """

    trace: Trace
    working: int


def sample(
    run: Callable[[int], LaunchReport], groups: int, count: int, working: int | None = None
) -> Sample:
    """Run so many workgroups of a launch, evenly spread over those that work.

    Args:
        run: simulates the workgroup of a number, traced.
        groups: workgroups of the launch.
        count: those to run; the last that works is among the sample only where all are.
        working: how many work, where that is known; else some more are run to find out.
    """
    run = cache(run)
    if working is None:
        working = _working(run, groups, count)
    numbers = _spread(working, count)
    if 1 < count < working:  # the last one has the rest of rows, and stands for none of the others
        numbers[-1] -= 1
    most = max(run(number).instructions for number in numbers)
    busy = [number for number in numbers if run(number).instructions > IDLE * most]
    busiest = max(busy, key=lambda number: _work(run(number)))
    ordered = [busiest, *(number for number in busy if number != busiest)]
    return Sample(joined([run(number) for number in ordered]), working)


def _work(report: LaunchReport) -> int:
    """What a workgroup asks of its unit: tiles of few rows take all instructions, but few lines.

    Address cycles are the trace's, whose regions begin at lines: those that the report counts
    depend on where the host put each tensor, and so would the workgroup that stands for all.
    """
    assert report.trace is not None
    return report.instructions + SplitTrace(report.trace).address_cycles(0)


def _spread(groups: int, count: int) -> list[int]:
    """So many numbers from the first to the last."""
    return sorted({i * (groups - 1) // max(1, count - 1) for i in range(count)})


def _working(run: Callable[[int], LaunchReport], groups: int, count: int) -> int:
    """Workgroups that work: all before the first idle one, or else their share of some."""
    numbers = _spread(groups, count)
    least = IDLE * max(run(number).instructions for number in numbers)
    busy = [number for number in numbers if run(number).instructions > least]
    if busy != numbers[: len(busy)] or busy == numbers:
        return max(1, round(groups * len(busy) / len(numbers)))
    last, idle = busy[-1], numbers[len(busy)]
    while idle - last > 1:
        middle = (last + idle) // 2
        if run(middle).instructions > least:
            last = middle
        else:
            idle = middle
    return idle


def joined(reports: Sequence[LaunchReport]) -> Trace:
    """The traces of several workgroups of a launch as one."""
    traces = [report.trace for report in reports if report.trace is not None]
    if any(trace.region_bytes != traces[0].region_bytes for trace in traces):
        raise ValueError("the regions of memory are not the same in all traces of a launch")
    words = b"".join(trace.words for trace in traces)
    return replace(traces[0], words=words, groups=len(traces))
