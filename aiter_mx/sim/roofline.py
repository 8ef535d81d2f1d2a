"""What an MI355X could do at best in the time that a launch takes, from what the launch did."""

from __future__ import annotations

from dataclasses import dataclass

from aiter_mx.sim.report import LaunchReport
from aiter_mx.target import hardware

# MI355X: AMD's product page, CDNA 4 white paper and ISA manual; the latency is an assumption.
CUS = hardware("gfx950").cu_num
MEMORY_BYTES_A_US = 8e6
CYCLES_A_US = 2400
LATENCY_US = 1.0
SIMDS = 4
VALU_CYCLES = 4  # 64 lanes over 16
PASS_CYCLES = 4
LDS_BYTES_A_CYCLE = 128  # a CU


@dataclass(frozen=True)
class Bounds:
    """Lower bounds on a launch's time, in microseconds, each for the busiest compute unit.

    Attributes:
        memory_us: its share of the bytes that must be moved, at its share of the bandwidth.
        latency_us: a microsecond for each wait for memory that follows another one, in each round
            of the workgroups that it holds at once.
        valu_us: vector instructions, at 4 cycles each.
        mfma_us: passes of the matrix units, at 4 cycles each.
        lds_us: bytes to and from LDS at 128 bytes a cycle, and a cycle for each bank conflict.
        address_us: cycles of the unit that takes the addresses of vector memory; a CU has one.
        wave_bytes: loads under way for a wave when it waits for memory, on average.
        cu_bytes: the same for all waves that a compute unit holds.
    """

    memory_us: float
    latency_us: float
    valu_us: float
    mfma_us: float
    lds_us: float
    address_us: float
    wave_bytes: float
    cu_bytes: float

    @property
    def issue_us(self) -> float:
        """Vector and matrix instructions, as if never issued side by side."""
        return self.valu_us + self.mfma_us

    @property
    def longest_us(self) -> float:
        """The longest of all: units work side by side at best."""
        return max(self.memory_us, self.latency_us, self.issue_us, self.lds_us, self.address_us)


def bounds(report: LaunchReport, minimal_bytes: float, groups: int, waves_a_simd: int) -> Bounds:
    """The bounds of a launch on an MI355X.

    Args:
        report: of the launch, simulated in strict mode. Where the options did not ask for bank
            conflicts and address cycles, none are in the bounds.
        minimal_bytes: what must come from or go to memory.
        groups: workgroups.
        waves_a_simd: waves that a SIMD holds at once, as ``aiter_mx.code_object.occupancy`` says.
    """
    groups_of_busiest = -(-groups // CUS)
    share = groups_of_busiest / groups
    resident = min(waves_a_simd * SIMDS, groups_of_busiest * report.waves // groups)
    at_once = max(1, waves_a_simd * SIMDS // max(1, round(report.waves / groups)))
    rounds = -(-groups_of_busiest // at_once)
    wave_bytes = report.in_flight_bytes / max(report.waits, 1)
    cu_bytes = resident * wave_bytes
    simd_us = share / SIMDS / CYCLES_A_US
    lds_cycles = (report.lds_bytes_read + report.lds_bytes_written) / LDS_BYTES_A_CYCLE
    return Bounds(
        memory_us=minimal_bytes * share * CUS / MEMORY_BYTES_A_US,
        latency_us=rounds * report.latencies / groups * LATENCY_US,
        valu_us=report.by_class.get("valu", 0) * VALU_CYCLES * simd_us,
        mfma_us=sum(report.mfma_passes.values()) * PASS_CYCLES * simd_us,
        lds_us=(lds_cycles + report.lds_conflicts) * share / CYCLES_A_US,
        address_us=report.address_cycles * share / CYCLES_A_US,
        wave_bytes=wave_bytes,
        cu_bytes=cu_bytes,
    )
