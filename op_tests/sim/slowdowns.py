"""Slow-downs planted in kernels like a gemv, a tile product and one of groups: what each costs.

    python -m op_tests.sim.slowdowns [--save]

For each, what floor 2 of the model of time says it costs, and the amount worked out by hand from
the constants alone: a range where the rest of the kernel may hide a part of it. The program fails
where the model is off by more than a factor of two, or has a slow-down make a kernel faster.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from aiter_mx.sim.timing.constants import CUS, shipped
from aiter_mx.sim.timing.model import predict, traced
from aiter_mx.tuning.traces import TRACED
from op_tests.sim.public import SAVED
from op_tests.sim.tools import launch, program

STEPS, TILES = 16, 4
SLOT = 4
KERNELS = ("gemv", "tile", "grouped")
_OPTIONS = replace(TRACED, group_count=4)
CYCLES_A_US = shipped().clock_ghz * 1e3


@dataclass(frozen=True)
class SlowDown:
    """A slow-down of a kernel.

    Attributes:
        name: what is planted.
        kernel: into what.
        plain, slow: the modelled time without it and with it.
        worked_us: what it costs by hand, the least and the most.
        launches: that the slow one takes.
    """

    name: str
    kernel: str
    plain: Callable[[], float]
    slow: Callable[[], float]
    worked_us: tuple[float, float]
    launches: int = 1

    def cost_us(self) -> float:
        """By the model."""
        return self.launches * self.slow() - self.plain()

    def is_held(self, cost_us: float) -> bool:
        """Whether a cost is within a factor of two of what was worked out."""
        return self.worked_us[0] / 2 <= cost_us <= 2 * self.worked_us[1]


@cache
def modelled_us(
    kernel: str, *plants: str, groups: int = CUS, steps: int = STEPS, whole: bool = False
) -> float:
    """The time of a kernel with plants such as ``EARLY=300``; of all workgroups or of some."""
    stride = max([16, *(int(p.split("=")[1]) for p in plants if p.startswith("STRIDE="))])
    loaded = program("timing.cu", "-O3", *(f"-D{plant}" for plant in plants))
    w = np.zeros(groups * steps * 256 * stride // 4, np.uint32)
    x, links, out = (
        np.zeros(4096, np.uint32),
        np.zeros(4096, np.uint64),
        np.zeros(groups * 256, np.uint32),
    )
    options = TRACED if whole else _OPTIONS
    report = launch(loaded, kernel, groups, 256, [w, x, links, out, steps], access="rrrw",
                    options=options)  # fmt: skip
    return predict(traced(report, loaded.kernel(kernel), groups, 256)).us


def instructions_us(count: int) -> float:
    """Of instructions that follow each other in a wave."""
    return count * max(SLOT, shipped().issue_cycles) / CYCLES_A_US


def slow_downs() -> Iterator[SlowDown]:
    """Every slow-down, in each kernel that has what it slows down."""
    for kernel in KERNELS:
        yield from _of(kernel)


def _of(kernel: str) -> Iterator[SlowDown]:
    known = shipped()
    latency = known.memory_latency_us
    x_cycles = 4 * (1024 / known.data_bytes_a_cycle + 16 * known.address_cycles)
    x_us = STEPS * (x_cycles + 4096 / known.line_bytes_a_cycle) / CYCLES_A_US
    lines = 64 * 4 * STEPS * 128 * 7 / 8
    line_us = max(1 / known.line_bytes_a_cycle / CYCLES_A_US, CUS / known.memory_tb_s / 1e6)
    lines_us = (lines * line_us, max(lines * line_us, STEPS * latency))
    barriers = STEPS * 4 * (known.barrier_cycles + SLOT) / CYCLES_A_US
    served = STEPS * 2 * 4096 / known.line_bytes_a_cycle / CYCLES_A_US

    plain = partial(modelled_us, kernel)

    def planted(name: str, plant: str, least: float, most: float) -> SlowDown:
        slow = partial(modelled_us, kernel, plant)
        return SlowDown(name, kernel, plain, slow, (least, most))

    is_gemv = kernel == "gemv"
    tiles = TILES if kernel == "grouped" else 1
    batches = STEPS / 4 if is_gemv else STEPS  # of loads that are waited for together
    early, late = instructions_us(300), instructions_us(200) * tiles
    yield planted("300 instructions before the first load", "EARLY=300", early, early)
    yield planted("200 instructions after the last wait", "LATE=200", late, late)
    yield SlowDown(
        "a load that others wait for",
        kernel,
        partial(modelled_us, kernel, "SERIAL=1"),
        partial(modelled_us, kernel, "SERIAL=2"),
        (known.cached_latency_us, latency),  # all workgroups load the same line
    )
    unpiped = STEPS * latency
    least = (STEPS - batches) * latency if is_gemv else 0.0  # products hide what they can
    yield planted("pipelining off", "AHEAD=1", least, unpiped)
    for part in (2, 4):
        worked = batches * (part - 1) * latency
        yield SlowDown(
            f"a {'half' if part == 2 else 'quarter'} of the workgroups", kernel, plain,
            partial(modelled_us, kernel, groups=CUS // part, steps=STEPS * part),
            (worked, worked),
        )  # fmt: skip
    busy = instructions_us(3000)
    yield SlowDown(
        "one busy compute unit",
        kernel,
        partial(modelled_us, kernel, whole=True),
        partial(modelled_us, kernel, "BUSY=3000", whole=True),
        (busy, busy),
    )
    if not is_gemv:  # which has no LDS
        # A second round of workgroups waits for its own loads.
        one = (STEPS + (2 * TILES if kernel == "grouped" else 0)) * latency
        yield SlowDown(
            "LDS padded until occupancy halves",
            kernel,
            partial(modelled_us, kernel, groups=4 * CUS),
            partial(modelled_us, kernel, "LDS_BYTES=81920", groups=4 * CUS),
            (one, one),
        )
        reads = STEPS * 4 * 8 * 1024 * 3 / known.lds_bytes_a_cycle / CYCLES_A_US
        yield planted("4-way bank conflicts", "CONFLICTS=8", 0.0, reads)
    most = barriers + (served if is_gemv else 0.0)
    yield planted("4 barriers a step", "BARRIERS=4", barriers if is_gemv else 0.0, most)
    found_us = 0.0 if is_gemv else instructions_us(14 * STEPS)  # addresses and sums
    yield planted("x read twice", "X_READS=2", 0.0, x_us + found_us)
    yield planted("scattered lines", "STRIDE=128", *lines_us)
    scalar = STEPS * known.scalar_latency_us
    # Loads ahead hide them in the others.
    least = scalar if is_gemv else 0.0
    yield planted("scales by scalar loads", "SCALAR=1", least, scalar)
    spilled = batches * 2 * 4 * known.cached_latency_us
    yield planted("4 registers spilled", "SPILL=4", spilled, spilled)
    beginnings = 2 * TILES if kernel == "grouped" else 1
    second = known.launch_us + beginnings * latency
    yield SlowDown(
        "a second launch",
        kernel,
        plain,
        partial(modelled_us, kernel, steps=STEPS // 2),
        (second, second),
        launches=2,
    )


def main() -> int:
    """Run the command line; 1 where the model is off by more than a factor of two."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--save", action="store_true", help="write slowdowns.csv")
    options = parser.parse_args()
    wrong, rows = 0, []
    for each in slow_downs():
        cost, (least, most) = each.cost_us(), each.worked_us
        row = [each.name, each.kernel, f"{least:.2f}", f"{most:.2f}", f"{cost:.2f}"]
        rows.append(row)
        wrong += not each.is_held(cost)
        print(*row, "" if each.is_held(cost) else "OFF", sep=", ", flush=True)
    if options.save:
        with (SAVED / "slowdowns.csv").open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["planted", "kernel", "worked_least_us", "worked_most_us", "model_us"])
            writer.writerows(rows)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
