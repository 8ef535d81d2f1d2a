"""Slow-downs planted in a kernel move its modelled time by what they cost, worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from aiter_mx.sim.program import SimOptions
from aiter_mx.sim.timing.constants import CUS, shipped
from aiter_mx.sim.timing.model import predict, traced
from op_tests.sim.tools import launch, program

STEPS, TILES = 16, 4
TRACED = SimOptions(
    count_conflicts=True, trace=True, schedule="round-robin", group_count=4,
    checks=("all", "-global-race", "-lanes-differ"),
)  # fmt: skip
CYCLES_A_US = shipped().clock_ghz * 1e3
SLOT = 4


@cache
def modelled_us(kernel: str, *plants: str, groups: int = CUS, steps: int = STEPS) -> float:
    """The time of a kernel with plants such as ``EARLY=300``."""
    stride = max([16, *(int(p.split("=")[1]) for p in plants if p.startswith("STRIDE="))])
    loaded = program("timing.cu", "-O3", *(f"-D{plant}" for plant in plants))
    w = np.zeros(groups * steps * 256 * stride // 4, np.uint32)
    x, links, out = (
        np.zeros(4096, np.uint32),
        np.zeros(4096, np.uint64),
        np.zeros(groups * 256, np.uint32),
    )
    report = launch(loaded, kernel, groups, 256, [w, x, links, out, steps], access="rrrw",
                    options=TRACED)  # fmt: skip
    return predict(traced(report, loaded.kernel(kernel), groups, 256)).us


def whole_us(kernel: str, *plants: str) -> float:
    """The time of a launch of which every workgroup is traced."""
    loaded = program("timing.cu", "-O3", *(f"-D{plant}" for plant in plants))
    w = np.zeros(CUS * STEPS * 1024, np.uint32)
    x, links, out = np.zeros(4096, np.uint32), np.zeros(4096, np.uint64), np.zeros(CUS * 256, "u4")
    report = launch(loaded, kernel, CUS, 256, [w, x, links, out, STEPS], access="rrrw",
                    options=replace(TRACED, group_count=0))  # fmt: skip
    return predict(traced(report, loaded.kernel(kernel), CUS, 256)).us


def instructions(count: int) -> float:
    return count * max(SLOT, shipped().issue_cycles) / CYCLES_A_US


# What each plant costs, in microseconds, from the constants alone.
PLANTS: dict[str, Callable[[], float]] = {
    "EARLY=300": lambda: instructions(300),
    "LATE=200": lambda: instructions(200),
}


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("kernel", ["gemv", "tile", "grouped"])
def test_a_planted_slow_down_costs_what_it_takes(kernel: str, plant: str) -> None:
    cost = modelled_us(kernel, plant) - modelled_us(kernel)
    times = TILES if kernel == "grouped" and plant.startswith("LATE") else 1
    assert times * PLANTS[plant]() / 2 <= cost <= 2 * times * PLANTS[plant]()


@pytest.mark.parametrize("kernel", ["gemv", "tile", "grouped"])
def test_loads_that_follow_each_other_cost_a_latency_each(kernel: str) -> None:
    cost = modelled_us(kernel, "SERIAL=5") - modelled_us(kernel, "SERIAL=1")
    worked = 4 * shipped().memory_latency_us
    assert worked / 2 <= cost <= 2 * worked


def test_a_gemv_that_waits_for_each_step_pays_a_latency_for_each() -> None:
    cost = modelled_us("gemv", "AHEAD=1") - modelled_us("gemv")
    worked = (STEPS - STEPS / 4) * shipped().memory_latency_us
    assert worked / 2 <= cost <= 2 * worked


@pytest.mark.parametrize("kernel", ["tile", "grouped"])
def test_a_tile_loop_without_a_load_ahead_pays_what_the_products_hid(kernel: str) -> None:
    cost = modelled_us(kernel, "AHEAD=1") - modelled_us(kernel)
    assert 0 < cost <= 2 * STEPS * shipped().memory_latency_us


@pytest.mark.parametrize("kernel", ["gemv", "tile", "grouped"])
@pytest.mark.parametrize("fewer", [2, 4])
def test_fewer_workgroups_for_the_same_bytes_are_slower(kernel: str, fewer: int) -> None:
    """As each has as many steps more, whose waits follow each other."""
    base, found = modelled_us(kernel), modelled_us(kernel, groups=CUS // fewer, steps=STEPS * fewer)
    waits = STEPS / 4 if kernel == "gemv" else STEPS
    worked = waits * (fewer - 1) * shipped().memory_latency_us
    assert worked / 2 <= found - base <= 2 * worked


@pytest.mark.parametrize("kernel", ["gemv", "tile"])
def test_a_second_round_of_workgroups_takes_as_long_as_the_first(kernel: str) -> None:
    """Registers and LDS let a unit hold several, which share its waits but no time of its own."""
    base, found = modelled_us(kernel), modelled_us(kernel, groups=4 * CUS)
    assert 0 < found - base <= 4 * (base - shipped().launch_us)


def test_barriers_in_each_step_cost_themselves_and_what_waves_wait_for_each_other() -> None:
    """At worst each batch of loads is then served as a whole before any wave goes on."""
    steps = STEPS * 4 * (shipped().barrier_cycles + SLOT) / CYCLES_A_US
    served = STEPS * 2 * 4096 / shipped().line_bytes_a_cycle / CYCLES_A_US
    cost = modelled_us("gemv", "BARRIERS=4") - modelled_us("gemv")
    assert steps / 2 <= cost <= 2 * (steps + served)
    for kernel in ("tile", "grouped"):
        hidden = modelled_us(kernel, "BARRIERS=4") - modelled_us(kernel)  # behind the load ahead
        assert 0 <= hidden <= 2 * steps


def test_scattered_lines_cost_the_lines() -> None:
    """A line for each lane in place of one for eight."""
    found, base = modelled_us("gemv", "STRIDE=128"), modelled_us("gemv")
    lines = 64 * 4 * STEPS * 128
    worked = (lines - lines / 8) * max(
        1 / shipped().line_bytes_a_cycle / CYCLES_A_US,
        CUS / shipped().memory_tb_s / 1e6,
    )
    assert worked / 2 <= found - base <= 2 * worked


def test_scalar_loads_waited_for_cost_a_latency_each() -> None:
    found, base = modelled_us("gemv", "SCALAR=1"), modelled_us("gemv")
    worked = STEPS * shipped().scalar_latency_us
    assert worked / 2 <= found - base <= 2 * worked


def test_x_read_twice_is_not_faster() -> None:
    found, base = modelled_us("gemv", "X_READS=2"), modelled_us("gemv")
    moved = STEPS * 4 * (1024 / shipped().data_bytes_a_cycle + 16 * shipped().address_cycles)
    assert 0 <= found - base <= 2 * moved / CYCLES_A_US


@pytest.mark.parametrize("kernel", ["tile", "grouped"])
def test_bank_conflicts_cost_cycles_of_lds(kernel: str) -> None:
    found, base = modelled_us(kernel, "CONFLICTS=8"), modelled_us(kernel)
    assert found - base > 0


@pytest.mark.parametrize("kernel", ["tile", "grouped"])
def test_lds_that_halves_the_residents_is_not_faster(kernel: str) -> None:
    base = modelled_us(kernel, groups=4 * CUS)
    found = modelled_us(kernel, "LDS_BYTES=81920", groups=4 * CUS)
    assert found > base


@pytest.mark.parametrize("kernel", ["gemv", "tile", "grouped"])
def test_one_busy_unit_holds_up_the_launch(kernel: str) -> None:
    """By what its workgroup does more than all others."""
    cost = whole_us(kernel, "BUSY=3000") - whole_us(kernel)
    assert instructions(3000) / 2 <= cost <= 2 * instructions(3000)


@pytest.mark.parametrize("kernel", ["gemv", "tile", "grouped"])
def test_spills_cost_their_way_through_the_cache(kernel: str) -> None:
    """A store and a load for each register, and the kernel waits for every one of them."""
    cost = modelled_us(kernel, "SPILL=4") - modelled_us(kernel)
    batches = STEPS / 4 if kernel == "gemv" else STEPS
    worked = batches * 2 * 4 * shipped().cached_latency_us
    assert worked / 2 <= cost <= 2 * worked


@pytest.mark.parametrize("kernel", ["gemv", "tile", "grouped"])
def test_a_second_launch_costs_a_launch_and_the_waits_of_its_own_beginning(kernel: str) -> None:
    halves = 2 * modelled_us(kernel, steps=STEPS // 2)
    beginnings = 2 * TILES if kernel == "grouped" else 1  # of which each tile has two
    worked = shipped().launch_us + beginnings * shipped().memory_latency_us
    assert worked / 2 <= halves - modelled_us(kernel) <= 2 * worked


def test_tiles_that_follow_each_other_pay_for_their_beginnings() -> None:
    """A look-up and a first load each, as nothing is loaded ahead from tile to tile."""
    cost = modelled_us("grouped", "TILES=4") - modelled_us("grouped", "TILES=1")
    worked = 3 * 2 * shipped().memory_latency_us
    assert worked / 2 <= cost <= 2 * worked
