"""What a step of the persistent kernel's main loop on gfx950 does, as the simulator counts it."""

from __future__ import annotations

from aiter_mx.sim.matrix import PASS_CYCLES
from aiter_mx.sim.report import LaunchReport

WAVES = 4


def difference(one: LaunchReport, other: LaunchReport, steps: int) -> dict[str, float]:
    """What a step of a workgroup's main loop does: two launches that differ in their steps."""

    def each(name: str) -> float:
        return (getattr(other, name) - getattr(one, name)) / steps

    def passes(report: LaunchReport) -> int:
        return sum(report.mfma_passes.values())

    def mfma(report: LaunchReport) -> int:
        return report.by_class["mfma"]

    lds_bytes = each("lds_bytes_read") + each("lds_bytes_written")
    return {
        "matrix_cycles": (passes(other) - passes(one)) / steps * PASS_CYCLES / WAVES,
        "lds_cycles": lds_bytes / 128 + each("lds_conflicts"),
        "issue_cycles": each("instructions") / WAVES * 4,
        "conflicts": each("lds_conflicts"),
        "address_cycles": each("address_cycles"),
        "lds_bytes_a_product": lds_bytes / ((mfma(other) - mfma(one)) / steps),
        "matrix_share": (mfma(other) - mfma(one)) / (other.instructions - one.instructions),
        "scratch": each("scratch_bytes"),
    }
