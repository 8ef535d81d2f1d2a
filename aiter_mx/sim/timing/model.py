"""How long a traced launch takes on an MI355X: its busiest compute unit, replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import mul

from aiter_mx.code_object import KernelInfo, resident
from aiter_mx.sim.report import LaunchReport
from aiter_mx.sim.timing.constants import CUS, Constants, shipped
from aiter_mx.sim.timing.cu import REASONS, Replay, Shares, Span, SplitTrace
from aiter_mx.sim.timing.sharing import COLD, Fresh, Left, shares

SIMDS = 4
_SAMPLED_CUS = 8
_MOST_SPANS = 1 << 17
_ROUNDS = 16  # that are replayed of the workgroups that a unit takes one after the other


@dataclass(frozen=True)
class Traced:
    """A launch, and what some or all of its workgroups do.

    Attributes:
        split: the trace, by waves.
        groups: workgroups of the launch.
        resident: workgroups that a compute unit holds at once.
        fills: launches ahead of it that only fill memory.
        fresh: how much of what the workgroups of an XCD touch no other of them does, by region.
        left: what caches hold from before the launch.
        least_bytes: that it is known to have of memory: the traced workgroups may have less than
            others, where these divide what they do unevenly.
    """

    split: SplitTrace
    groups: int
    resident: int
    fills: int = 0
    fresh: Fresh = ()
    left: Left = COLD
    least_bytes: float = 0.0

    def shares(self) -> Shares:
        """Where the lines come from that its workgroups touch."""
        return shares(self.split, self.groups, self.fresh, self.left)

    def memory_us(self, constants: Constants) -> float:
        """What the bytes of HBM take at its rate: no launch takes less."""
        of_traced = float(sum(map(mul, self.split.footprint(), self.shares().memory)))
        every = of_traced / self.split.groups * self.groups
        return max(every, self.least_bytes) / (constants.memory_tb_s * 1e6)


@dataclass(frozen=True)
class Prediction:
    """The modelled time of one launch.

    Attributes:
        us: in all.
        parts: the time of the busiest unit's waves by what they do, in microseconds that sum up to
            ``us``: ``launch``, ``run`` (instructions of their own), and what they wait for.
        busy: shares of the time in which the matrix, vector and address units and LDS are busy,
            and of the memory's rate.
        waited: share of the waves' time that is spent waiting at each instruction.
    """

    us: float
    parts: Mapping[str, float]
    busy: Mapping[str, float]
    waited: Sequence[float]


def traced(
    report: LaunchReport,
    kernel: KernelInfo,
    groups: int,
    block: int,
    shared_bytes: int = 0,
) -> Traced:
    """A launch that was simulated with ``SimOptions(trace=True, count_conflicts=True)``.

    Args:
        report: of the launch, or of some of its workgroups.
        kernel: what the code object says of it.
        groups: workgroups of the whole launch.
        block: lanes of a workgroup.
        shared_bytes: dynamic LDS.
    """
    if report.trace is None:
        raise ValueError("the launch was not traced: simulate it with SimOptions(trace=True)")
    held = resident(kernel, block, shared_bytes)
    return Traced(SplitTrace(report.trace), groups, held)


def predict(
    launch: Traced, constants: Constants | None = None, every_unit: bool = False
) -> Prediction:
    """The time of a launch.

    Where all workgroups are traced, some compute units are replayed with the workgroups that they
    are dealt, and the slowest counts; else the traced ones stand for all.

    Args:
        launch: what it does.
        constants: by default the calibrated ones.
        every_unit: replay all compute units with all of their workgroups, to see what the replay
            of some leaves out.
    """
    constants = constants or shipped()
    dealt = _dealt(launch, CUS if every_unit else _SAMPLED_CUS)
    runs = [_unit(launch, groups, constants, every_unit) for groups in dealt]
    us, run = max(runs, key=lambda pair: pair[0])
    us = max(us, launch.memory_us(constants))
    before = constants.launch_us + launch.fills * constants.fill_us
    scale = us / run.wave_cycles if run.wave_cycles else 0.0
    parts = {"launch": before, "run": (run.wave_cycles - sum(run.waits.values())) * scale}
    parts |= {reason: run.waits[reason] * scale for reason in REASONS}
    cycles = max(run.cycles, 1.0)
    active = launch.groups / -(-launch.groups // CUS)
    busy = {
        "matrix": run.matrix / SIMDS / cycles,
        "vector": run.vector / SIMDS / cycles,
        "address": run.address / cycles,
        "lds": run.lds / cycles,
        "memory": run.memory_bytes / constants.machine(active).memory_bytes / cycles,
    }
    waited = [spent / max(run.wave_cycles, 1.0) for spent in run.waited]
    return Prediction(before + us, parts, busy, waited)


def timeline(launch: Traced) -> list[Span]:
    """What the waves of the slowest unit do when, in cycles; the first of them of a long launch."""
    constants = shipped()
    groups = max(_dealt(launch), key=lambda each: _unit(launch, each, constants)[0])
    machine = constants.machine(_sharers(launch, groups))
    held = min(launch.resident, len(groups))
    shares = launch.shares()
    return list(launch.split.replay(machine, shares, groups, held, _MOST_SPANS).spans)


def _dealt(launch: Traced, sampled: int = _SAMPLED_CUS) -> list[list[int]]:
    """Workgroups of the trace by unit, for some units: the first has as many as any."""
    count = launch.split.groups
    if count < launch.groups:
        return [[i % count for i in range(-(-launch.groups // CUS))]]
    units = min(CUS, launch.groups)
    step = max(1, units // sampled) | 1  # odd: workgroups that share K take turns
    return [list(range(unit, launch.groups, CUS)) for unit in range(0, units, step)]


def _sharers(launch: Traced, groups: Sequence[int]) -> float:
    """As many units like the one with these workgroups as all of the launch's bytes are for.

    Units that have less to read leave their part of the rate to the others.
    """
    split = launch.split
    own = sum(map(split.touched, groups))
    every = sum(split.footprint()) / split.groups * launch.groups
    units = launch.groups / len(groups)  # one with less to read than others has its part at least
    return min(every / own, units) if own else units


def _unit(
    launch: Traced, groups: Sequence[int], constants: Constants, every_round: bool = False
) -> tuple[float, Replay]:
    """The time of a compute unit; many rounds of workgroups are taken for alike.

    Their rate is that of a unit that is full: from the first end to the last that makes room for
    a workgroup which is replayed. The ends behind that one come faster, as workgroups that are in
    the midst of their work get all of the unit.
    """
    held = min(launch.resident, len(groups))
    some = groups if every_round else groups[: max(_ROUNDS * held, held + 1)]
    machine = constants.machine(_sharers(launch, groups))
    run = launch.split.replay(machine, launch.shares(), some, held)
    cycles = run.cycles
    if left := len(groups) - len(some):
        ends = sorted(run.ends)
        cycles += left * (ends[-held] - ends[0]) / (len(ends) - held)
    return constants.us(cycles, run.matrix / SIMDS / max(run.cycles, 1.0)), run
