"""A compute unit in time: the waves of a traced launch, replayed by ``replay.c``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from aiter_mx.errors import SimulatorError
from aiter_mx.sim.compile import plain_library
from aiter_mx.sim.report import Trace
from aiter_mx.sim.timing.code import Cost, Kind, costs

_REGIONS = 64
REASONS = ("issue", "matrix", "address", "lds", "memory", "scalar", "barrier")
"""What waves wait for: other waves on the pipes, the address unit's queue, LDS, vector memory,
scalar loads, each other."""


class _CInstruction(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint32) for name in ("kind", "cycles", "vm_left", "lgkm_left", "bytes")
    ]


@dataclass(frozen=True)
class Machine:
    """A compute unit's rates and latencies, in cycles and bytes a cycle.

    Attributes:
        issue: cycles from one instruction of a wave to the next.
        branch: after a branch.
        address: of the address unit for each that the trace has.
        address_queue: cycles of work that the unit takes in before issue stalls.
        lds_latency, lds_bytes: of LDS.
        scalar_latency: of a scalar load.
        cached_latency: of a load from L2 or the MALL.
        memory_latency: of one that comes from HBM.
        line_bytes: between the L2 cache and the unit.
        memory_bytes: the unit's share of the memory's rate.
        barrier: from the last wave's arrival on.
        deal: between the starts of two workgroups.
        data_bytes: between the address unit and registers or LDS, on top of the addresses.
        missing_bytes: of lines that loads may wait for at a time.
        mall_bytes: the unit's share of the MALL's rate.
        l2_hit: latency of a load of what L2 holds from before the launch.
    """

    issue: float
    branch: float
    address: float
    address_queue: float
    lds_latency: float
    lds_bytes: float
    scalar_latency: float
    cached_latency: float
    memory_latency: float
    line_bytes: float
    memory_bytes: float
    barrier: float
    deal: float
    data_bytes: float
    missing_bytes: float
    mall_bytes: float
    l2_hit: float

    def latency(self, memory: float) -> float:
        """Of a load of which such a share comes from HBM."""
        return self.cached_latency + (self.memory_latency - self.cached_latency) * memory


class _CMachine(ctypes.Structure):
    _fields_ = [(field.name, ctypes.c_double) for field in fields(Machine)]


class _CResult(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_double)
            for name in (
                "cycles", "matrix", "vector", "address", "lds", "memory_bytes", "wave_cycles",
            )
        ),
        ("reasons", ctypes.c_double * len(REASONS)),
        ("issued", ctypes.c_double * len(Kind)),
        ("spans", ctypes.c_void_p),
        ("span_room", ctypes.c_uint64),
        ("span_count", ctypes.c_uint64),
    ]  # fmt: skip


class _CSpan(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_double) for name in ("begin", "end")),
        *((name, ctypes.c_uint32) for name in ("slot", "wave", "simd", "what")),
    ]


@dataclass(frozen=True)
class Span:
    """What a wave does for a while.

    Attributes:
        begin, end: in cycles.
        slot: of the workgroup, among those that the unit holds at once.
        wave: of the workgroup.
        simd: that it runs on.
        what: ``wave`` from its start to its end, else what it waits for meanwhile.
    """

    begin: float
    end: float
    slot: int
    wave: int
    simd: int
    what: str


@dataclass(frozen=True)
class Replay:
    """What a compute unit did with its workgroups.

    Attributes:
        cycles: until the last wave ends.
        matrix, vector: that the matrix and vector pipes are busy, summed over the four SIMDs.
        address, lds: that the address unit and LDS are busy.
        wave_cycles: from each wave's start to its end, summed.
        memory_bytes: the unit's share of what comes from memory.
        waits: cycles that waves wait, by reason, summed over waves.
        issued: instructions by kind.
        waited: cycles that waves wait at each instruction.
        ends: when each workgroup ends.
        spans: what waves do when, where the replay was asked for them.
    """

    cycles: float
    matrix: float
    vector: float
    address: float
    lds: float
    memory_bytes: float
    wave_cycles: float
    waits: dict[str, float]
    issued: dict[str, float]
    waited: Sequence[float]
    ends: Sequence[float]
    spans: Sequence[Span] = field(default=(), repr=False)


@dataclass(frozen=True)
class Shares:
    """Where the lines come from that a workgroup touches, by region.

    Attributes:
        memory: how much of a line comes from HBM, for this workgroup.
        mall: how much comes to its XCD, from HBM or from the MALL; the rest lies in L2.
    """

    memory: Sequence[float]
    mall: Sequence[float]


class SplitTrace:
    """A trace by waves, ready to be replayed any number of times.

    Args:
        trace: of some or all workgroups of a launch.
        known: what its instructions cost; by default as their texts say.
    """

    def __init__(self, trace: Trace, known: Sequence[Cost] | None = None) -> None:
        self.groups, self.waves, self.texts = trace.groups, trace.waves, trace.texts
        self.region_bytes = trace.region_bytes
        self.costs = list(known or costs(trace.texts))
        self._code = (_CInstruction * len(self.costs))(
            *(
                _CInstruction(c.kind, c.cycles, c.vm_left, c.lgkm_left, c.lds_bytes)
                for c in self.costs
            )
        )
        starts = [0]
        for size in trace.block_sizes:
            starts.append(starts[-1] + size)
        self._starts = (ctypes.c_uint32 * len(starts))(*starts)
        words = (ctypes.c_uint32 * (len(trace.words) // 4)).from_buffer_copy(trace.words)
        self._trace = _library().trace_split(
            self._code, words, len(words), trace.groups, trace.waves
        )
        if not self._trace:
            raise SimulatorError("no memory for the trace of a launch")

    def __del__(self) -> None:
        if getattr(self, "_trace", None):
            _library().trace_free(self._trace)

    @property
    def _regions(self) -> int:
        return min(len(self.region_bytes), _REGIONS)

    def footprint(self) -> list[float]:
        """Bytes of lines that the traced workgroups touch, each its own, by region."""
        footprint = _library().trace_footprint
        return [footprint(self._trace, i) for i in range(self._regions)]

    def touched(self, group: int) -> float:
        """Bytes of lines that a workgroup touches."""
        return float(_library().trace_touched(self._trace, group))

    def address_cycles(self, group: int) -> int:
        """Of the address unit, for what a workgroup loads and stores."""
        return int(_library().trace_addressed(self._trace, group))

    def first_lines(self) -> list[list[int]]:
        """The lowest line of each region that a workgroup touches, by workgroup; -1: of none."""
        lines = _library().trace_firsts(self._trace)
        return [
            [lines[group * _REGIONS + i] - 1 for i in range(self._regions)]
            for group in range(self.groups)
        ]

    def is_stored_to(self, region: int) -> bool:
        """Whether any workgroup stores to a region."""
        return bool(_library().trace_stored(self._trace, region))

    def replay(
        self,
        machine: Machine,
        shares: Shares,
        groups: Sequence[int],
        resident: int,
        most_spans: int = 0,
    ) -> Replay:
        """Run workgroups on a compute unit.

        Args:
            machine: its rates.
            shares: where lines come from.
            groups: those of the trace that are dealt to it, in order.
            resident: how many it holds at once.
            most_spans: that are wanted of what waves do when.
        """
        dealt = len(groups)
        result, waited = _CResult(), (ctypes.c_double * len(self.costs))()
        ends = (ctypes.c_double * dealt)()
        spans = (_CSpan * most_spans)()
        result.spans, result.span_room = ctypes.addressof(spans), most_spans
        memory, mall = (
            (ctypes.c_double * _REGIONS)(*each[:_REGIONS]) for each in (shares.memory, shares.mall)
        )
        values = _CMachine(*(getattr(machine, field.name) for field in fields(machine)))
        failed = _library().replay(
            self._trace, self._code, self._starts, ctypes.byref(values), memory, mall,
            (ctypes.c_uint32 * dealt)(*groups), dealt, resident, ctypes.byref(result), waited, ends,
        )  # fmt: skip
        if failed:
            raise SimulatorError("the waves of a traced launch wait for each other for ever")
        return Replay(
            result.cycles,
            result.matrix,
            result.vector,
            result.address,
            result.lds,
            result.memory_bytes,
            result.wave_cycles,
            dict(zip(REASONS, result.reasons, strict=True)),
            {kind.name.lower(): result.issued[kind] for kind in Kind},
            list(waited),
            list(ends),
            [
                Span(s.begin, s.end, s.slot, s.wave, s.simd, (*REASONS, "wave")[s.what])
                for s in spans[: result.span_count]
            ],
        )


@cache
def _library() -> Any:
    library = plain_library(Path(__file__).with_name("replay.c"), "the model of a compute unit")
    library.trace_split.restype = ctypes.c_void_p
    library.trace_split.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64,
                                    ctypes.c_uint32, ctypes.c_uint32]  # fmt: skip
    library.trace_free.argtypes, library.trace_free.restype = [ctypes.c_void_p], None
    library.trace_footprint.restype = ctypes.c_double
    library.trace_footprint.argtypes = [ctypes.c_void_p, ctypes.c_uint32]
    library.trace_touched.restype = ctypes.c_double
    library.trace_touched.argtypes = [ctypes.c_void_p, ctypes.c_uint32]
    library.trace_stored.argtypes = [ctypes.c_void_p, ctypes.c_uint32]
    library.trace_addressed.restype = ctypes.c_uint64
    library.trace_addressed.argtypes = [ctypes.c_void_p, ctypes.c_uint32]
    library.trace_firsts.argtypes = [ctypes.c_void_p]
    library.trace_firsts.restype = ctypes.POINTER(ctypes.c_uint32)
    library.replay.argtypes = [ctypes.c_void_p] * 7 + [ctypes.c_uint32] * 2 + [ctypes.c_void_p] * 3
    return library
