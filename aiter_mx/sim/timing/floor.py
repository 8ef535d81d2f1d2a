"""Floor 1: a launch's time by calibrated sums, whatever the order in which waves do things.

The launch itself, the waits that follow each other in a workgroup that has the compute unit to
itself, and the compute unit's parts: the one that is busy for longest, and somewhat more where
others are busy for nearly as long and so hold it up. Floor 2, ``model.predict``, replays the waves
and is the one that is held against published times; floor 1 knows nothing of their order, and so is
a second opinion on what floor 2 says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import mul

from aiter_mx.sim.timing.constants import CUS, Constants, shipped
from aiter_mx.sim.timing.cu import Machine, Shares
from aiter_mx.sim.timing.model import SIMDS, Traced

_LATENCIES = ("memory", "scalar", "lds", "barrier")
_FREE = 1e12  # bytes a cycle, or cycles of a queue
_SHARPNESS = 4  # of the soft maximum over units: of 2, 3, 4, 6 and 8 the best on rows that fit


@dataclass(frozen=True)
class Floor:
    """The sums of a launch, in microseconds.

    Attributes:
        launch: the launch, launches ahead that fill memory, and dealing a unit's workgroups.
        waits: for memory, LDS and other waves, one after the other, in all rounds of workgroups.
        units: that the busiest compute unit's ``address`` unit, vector pipes (``issue``),
            ``matrix`` pipes and ``lds`` are busy, that its ``lines`` take, and its shares of
            ``memory`` and ``mall``.
    """

    launch: float
    waits: float
    units: Mapping[str, float]

    @property
    def us(self) -> float:
        """The sum of launch, waits and the units."""
        return self.launch + self.waits + self.busy

    @property
    def busy(self) -> float:
        """A soft maximum over the units: those that are busy for as long hold each other up."""
        return float(sum(us**_SHARPNESS for us in self.units.values()) ** (1 / _SHARPNESS))

    @property
    def busiest(self) -> str:
        """The unit that is busy for longest."""
        return max(self.units, key=lambda name: self.units[name])


def floor(launch: Traced, constants: Constants | None = None) -> Floor:
    """The calibrated sums of a launch."""
    constants = constants or shipped()
    split, dealt = launch.split, -(-launch.groups // CUS)
    machine = constants.machine(launch.groups / dealt)
    shares = launch.shares()
    every = split.replay(machine, shares, range(split.groups), 1)
    alone = split.replay(_without_queues(machine), shares, range(split.groups), 1)
    held = min(launch.resident, dealt)
    rounds = -(-dealt // held)
    waits = sum(alone.waits[reason] for reason in _LATENCIES) / split.waves / split.groups * rounds
    of_busiest = dealt / split.groups
    cycles = {
        "address": every.address,
        "issue": every.vector / SIMDS,
        "lds": every.lds,
        "lines": _lines(split.footprint(), shares, machine),
        "memory": every.memory_bytes / machine.memory_bytes,
        "mall": sum(map(mul, split.footprint(), shares.mall)) / machine.mall_bytes,
    }
    units = {name: constants.us(value * of_busiest, 0.0) for name, value in cycles.items()}
    units["matrix"] = constants.us(every.matrix / SIMDS * of_busiest, 1.0)
    before = constants.launch_us + launch.fills * constants.fill_us
    before += constants.deal_us * (held - 1 + rounds - 1)
    return Floor(before, constants.us(waits, 0.0), units)


def _lines(footprint: Sequence[float], shares: Shares, machine: Machine) -> float:
    """Cycles of the lines of some workgroups: at L2's rate, or as many as may be waited for."""
    waited = sum(
        size * machine.latency(memory)
        for size, memory in zip(footprint, shares.memory, strict=True)
    )
    return max(sum(footprint) / machine.line_bytes, waited / machine.missing_bytes)


def _without_queues(machine: Machine) -> Machine:
    """A unit whose rates hold nothing up: latencies alone are left."""
    return replace(
        machine,
        address=0.0,
        address_queue=_FREE,
        data_bytes=_FREE,
        line_bytes=_FREE,
        memory_bytes=_FREE,
        mall_bytes=_FREE,
        missing_bytes=_FREE,
        lds_bytes=_FREE,
        deal=0.0,
    )
