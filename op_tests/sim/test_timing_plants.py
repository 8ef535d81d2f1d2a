"""Slow-downs planted in a kernel move its modelled time by what they cost, worked out by hand."""

from __future__ import annotations

import csv

import pytest

from aiter_mx.sim.timing.constants import CUS, shipped
from op_tests.sim.public import SAVED
from op_tests.sim.slowdowns import KERNELS, SlowDown, modelled_us, slow_downs

EVERY = list(slow_downs())


@pytest.mark.parametrize("planted", EVERY, ids=lambda each: f"{each.kernel}: {each.name}")
def test_a_planted_slow_down_costs_what_it_takes(planted: SlowDown) -> None:
    cost_us = planted.cost_us()
    assert planted.is_held(cost_us), (cost_us, planted.worked_us)


def test_every_slow_down_is_planted_in_every_kernel_that_can_have_it() -> None:
    kernels: dict[str, set[str]] = {}
    for each in EVERY:
        kernels.setdefault(each.name, set()).add(each.kernel)
    apart = {"LDS padded until occupancy halves", "4-way bank conflicts"}  # a gemv has no LDS
    assert {name for name, found in kernels.items() if found != set(KERNELS)} == apart
    with (SAVED / "slowdowns.csv").open(newline="") as file:
        saved = [(row["planted"], row["kernel"]) for row in csv.DictReader(file)]
    assert saved == [(each.name, each.kernel) for each in EVERY]


@pytest.mark.parametrize("kernel", ["tile", "grouped"])
def test_what_a_loop_pays_for_is_not_free(kernel: str) -> None:
    """Costs whose lower end by hand is nothing, as other work may hide them."""
    for plant in ("AHEAD=1", "CONFLICTS=8"):
        assert modelled_us(kernel, plant) > modelled_us(kernel), plant
    full = modelled_us(kernel, groups=4 * CUS)
    assert modelled_us(kernel, "LDS_BYTES=81920", groups=4 * CUS) > full


@pytest.mark.parametrize("kernel", ["gemv", "tile"])
def test_a_second_round_of_workgroups_takes_as_long_as_the_first(kernel: str) -> None:
    """Registers and LDS let a unit hold several, which share its waits but no time of its own."""
    base, found = modelled_us(kernel), modelled_us(kernel, groups=4 * CUS)
    assert 0 < found - base <= 4 * (base - shipped().launch_us)


@pytest.mark.parametrize("kernel", KERNELS)
def test_several_loads_that_follow_each_other_cost_a_latency_each(kernel: str) -> None:
    cost = modelled_us(kernel, "SERIAL=5") - modelled_us(kernel, "SERIAL=1")
    worked = 4 * shipped().memory_latency_us
    assert worked / 2 <= cost <= 2 * worked


def test_tiles_that_follow_each_other_pay_for_their_beginnings() -> None:
    """A look-up and a first load each, as nothing is loaded ahead from tile to tile."""
    cost = modelled_us("grouped", "TILES=4") - modelled_us("grouped", "TILES=1")
    worked = 3 * 2 * shipped().memory_latency_us
    assert worked / 2 <= cost <= 2 * worked
