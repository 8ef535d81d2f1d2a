"""The constants of the model of time: each with a unit, a physical range and a value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from aiter_mx.paths import configs_dir
from aiter_mx.sim.timing.cu import Machine

CUS = 256


@dataclass(frozen=True)
class Constants:
    """Of an MI355X; configs/gfx950/timing.json says what each is, its range and its source."""

    launch_us: float
    memory_tb_s: float
    memory_latency_us: float
    mall_tb_s: float
    cached_latency_us: float
    l2_hit_us: float
    lds_latency_us: float
    scalar_latency_us: float
    address_cycles: float
    address_queue_cycles: float
    line_bytes_a_cycle: float
    data_bytes_a_cycle: float
    matrix_clock_ghz: float
    deal_us: float
    issue_cycles: float
    fill_us: float
    branch_cycles: float
    barrier_cycles: float
    lds_bytes_a_cycle: float
    missing_kib: float
    clock_ghz: float

    def machine(self, sharers: float) -> Machine:
        """A compute unit's rates while so many like it share the memory."""
        cycles_a_us = self.clock_ghz * 1e3
        return Machine(
            issue=self.issue_cycles,
            branch=self.branch_cycles,
            address=self.address_cycles,
            address_queue=self.address_queue_cycles,
            lds_latency=self.lds_latency_us * cycles_a_us,
            lds_bytes=self.lds_bytes_a_cycle,
            scalar_latency=self.scalar_latency_us * cycles_a_us,
            cached_latency=self.cached_latency_us * cycles_a_us,
            memory_latency=self.memory_latency_us * cycles_a_us,
            line_bytes=self.line_bytes_a_cycle,
            memory_bytes=self.memory_tb_s * 1e6 / cycles_a_us / sharers,
            barrier=self.barrier_cycles,
            deal=self.deal_us * cycles_a_us,
            data_bytes=self.data_bytes_a_cycle,
            missing_bytes=self.missing_kib * 1024,
            mall_bytes=self.mall_tb_s * 1e6 / cycles_a_us / sharers,
            l2_hit=self.l2_hit_us * cycles_a_us,
        )

    def us(self, cycles: float, matrix_share: float) -> float:
        """Microseconds of cycles in which the matrix units are busy for such a share."""
        slower = (self.clock_ghz - self.matrix_clock_ghz) * min(1.0, matrix_share)
        return cycles / (self.clock_ghz - slower) / 1e3


@cache
def described() -> Mapping[str, Mapping[str, Any]]:
    """What configs/gfx950/timing.json says of each constant."""
    path: Path = configs_dir() / "gfx950" / "timing.json"
    return dict(json.loads(path.read_text()))


def spread() -> tuple[float, float]:
    """By what a published time is divided by its prediction in the middle 80 % of test rows."""
    low, high = described()["error"]["ratio_p10"], described()["error"]["ratio_p90"]
    return float(low), float(high)


def median_error() -> float:
    """Of predictions for published rows that nothing was fitted to."""
    return float(described()["error"]["median"])


@cache
def shipped() -> Constants:
    """The calibrated constants."""
    return with_values({})


def with_values(values: Mapping[str, float]) -> Constants:
    """The calibrated constants, but for those given."""
    known = {field.name: float(described()[field.name]["value"]) for field in fields(Constants)}
    return replace(Constants(**known), **values)
