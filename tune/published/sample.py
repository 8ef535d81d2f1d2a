"""What the launches of a published row do, by a few of their workgroups."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from aiter_mx.code_object import resident
from aiter_mx.sim.report import LaunchReport, Trace
from aiter_mx.sim.timing.sample import IDLE, joined
from aiter_mx.sim.timing.sharing import Fresh, fresh
from aiter_mx.tuning.traces import TRACED
from tune.published.run import Launch, PublishedRun

_MOE_SAMPLES = 6


@dataclass(frozen=True)
class Sample:
    """A launch, and what some of its workgroups do.

    Attributes:
        trace: of those.
        groups: workgroups of the launch that have something to do.
        resident: workgroups that a compute unit holds at once.
        fills: launches ahead of it that only fill memory.
        report: counts of the traced workgroups.
        fresh: how much of what an XCD's workgroups touch is new to it, by region.
    """

    trace: Trace
    groups: int
    resident: int
    fills: int
    report: LaunchReport
    fresh: Fresh = ()


def samples(run: PublishedRun, is_layer: bool, split_k: int, fills: int) -> list[Sample]:
    """Of each launch of a run.

    Args:
        run: the launches.
        is_layer: they are of an expert layer, whose workgroups differ.
        split_k: parts of K, of which the first prepares the result for the others.
        fills: launches ahead of them that only fill memory.
    """
    return [_sample(run, launch, is_layer, split_k, fills) for launch in run.launches]


def with_neighbours(run: PublishedRun, found: list[Sample]) -> list[Sample]:
    """The samples of a run, with what the workgroups of an XCD have in common."""
    return [
        replace(each, fresh=fresh(partial(_traced, run, launch), each.groups))
        for launch, each in zip(run.launches, found, strict=True)
    ]


def _sample(run: PublishedRun, launch: Launch, is_layer: bool, split_k: int, fills: int) -> Sample:
    groups = launch.grid[0] * launch.grid[1] * launch.grid[2]
    if is_layer:
        numbers = sorted({(2 * i + 1) * groups // (2 * _MOE_SAMPLES) for i in range(_MOE_SAMPLES)})
    else:
        numbers = [0 if split_k > 1 else groups // 2]
    reports = [_traced(run, launch, number) for number in numbers]
    most = max(report.instructions for report in reports)
    busy = [report for report in reports if report.instructions > IDLE * most]
    lanes = launch.block[0] * launch.block[1] * launch.block[2]
    kernel = launch.program.kernel(launch.kernel)
    held = resident(kernel, lanes, launch.shared_bytes)
    working = max(1, round(groups * len(busy) / len(reports)))
    return Sample(joined(busy), working, held, fills, busy[0])


def _traced(run: PublishedRun, launch: Launch, number: int) -> LaunchReport:
    options = replace(TRACED, collect=True, first_group=number, group_count=1, max_steps=1 << 21)
    return launch.program.launch(
        launch.kernel,
        launch.grid,
        launch.block,
        launch.kernarg,
        launch.shared_bytes,
        run.regions,
        options,
    )
