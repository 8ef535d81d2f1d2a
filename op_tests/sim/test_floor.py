"""Floor 1, the calibrated sums of a launch, and what tells an extrapolation."""

from __future__ import annotations

import statistics
from dataclasses import replace

import numpy as np
import pytest

from aiter_mx.sim.report import LaunchReport, Trace
from aiter_mx.sim.timing.constants import CUS, shipped, with_values
from aiter_mx.sim.timing.draws import DRAWS, drawn
from aiter_mx.sim.timing.floor import Floor, floor
from aiter_mx.sim.timing.model import Traced, predict, traced
from aiter_mx.sim.timing.sample import IDLE, joined, sample
from aiter_mx.sim.timing.seen import outside, ranges, seen
from op_tests.sim.tools import COPY, TRACED, launch, program
from tune.calibrate import FOLDER
from tune.published.saved import load

CHAIN = """
KERNEL(64) chain(const u32* in, u32* out, int links) {
    u32 at = lane_id();
    for (int i = 0; i < links; i++)
        at = in[at];
    out[group_id() * 64 + lane_id()] = at;
}
"""


def copied(steps: int, groups: int = CUS) -> Traced:
    data, out = (np.zeros(groups * 1024 * steps, np.uint32) for _ in range(2))
    loaded = program(COPY)
    report = launch(loaded, "copy", groups, 256, [data, out, steps], access="rw", options=TRACED)
    return traced(report, loaded.kernel("copy"), groups, 256)


def chained(links: int, **values: float) -> Floor:
    following = np.random.default_rng(links).permutation(1 << 16).astype(np.uint32)
    out = np.zeros(64, np.uint32)
    loaded = program(CHAIN)
    report = launch(loaded, "chain", 1, 64, [following, out, links], access="rw", options=TRACED)
    return floor(traced(report, loaded.kernel("chain"), 1, 64), with_values(values))


def test_the_busiest_unit_has_its_share_of_the_bytes_at_the_rate_of_memory() -> None:
    found = floor(copied(16))
    # What is written comes from memory too: the lines of a store are touched like a load's.
    bytes_a_unit = 2 * 16 * 4096
    rate = shipped().memory_tb_s * 1e6 / CUS
    assert found.units["memory"] == pytest.approx(bytes_a_unit / rate, rel=0.01)
    one_more = floor(copied(16, CUS + 1))
    assert one_more.units["address"] == pytest.approx(2 * found.units["address"])
    assert found.us == found.launch + found.waits + found.busy
    assert max(found.units.values()) <= found.busy < 1.42 * max(found.units.values())


def test_waits_that_follow_each_other_add_up() -> None:
    slow = 5.0  # so that nothing else matters
    few, many = (chained(links, memory_latency_us=slow, cached_latency_us=slow).waits
                 for links in (3, 8))  # fmt: skip
    assert many - few == pytest.approx(5 * slow, rel=0.01)
    assert chained(8, memory_latency_us=slow).launch == shipped().launch_us


def test_workgroups_one_after_the_other_wait_one_after_the_other() -> None:
    model = replace(copied(4, 4 * CUS), resident=1)
    assert floor(model).waits == pytest.approx(4 * floor(replace(model, resident=4)).waits)


def test_units_that_are_busy_as_long_hold_each_other_up_and_others_do_not() -> None:
    assert Floor(2, 1, {"address": 10.0, "lds": 0.1}).us == pytest.approx(13, rel=1e-6)
    assert 11.5 < Floor(0, 0, {"address": 10.0, "lds": 10.0}).us < 12


def test_waits_are_the_mean_of_workgroups_that_do_not_do_the_same() -> None:
    following = np.random.default_rng(0).permutation(1 << 16).astype(np.uint32)
    out = np.zeros(2 * 64, np.uint32)
    loaded = program(CHAIN.replace("i < links", "i < links * (1 + group_id())"))
    report = launch(loaded, "chain", 2, 64, [following, out, 5], access="rw", options=TRACED)
    found = floor(traced(report, loaded.kernel("chain"), 2, 64))
    both = [chained(links).waits for links in (5, 10)]
    assert found.waits == pytest.approx(statistics.fmean(both), rel=0.02)


@pytest.fixture(scope="module")
def published() -> list[tuple[str, float, list[Traced]]]:
    return [(row.role, row.us, launches) for row, launches in load(FOLDER / "traces.xz")]


def test_sums_alone_predict_published_times_better_than_their_bytes(
    published: list[tuple[str, float, list[Traced]]],
) -> None:
    errors, of_bytes = [], []
    for role, us, launches in published:
        if role == "test":
            parts = [floor(launch) for launch in launches]
            errors.append(abs(sum(part.us for part in parts) / us - 1))
            bytes_us = sum(part.launch + part.units["memory"] for part in parts)
            of_bytes.append(abs(bytes_us / us - 1))
    assert statistics.median(errors) < 0.15
    assert statistics.median(errors) < statistics.median(of_bytes) / 2


def test_no_published_launch_is_an_extrapolation_and_others_are(
    published: list[tuple[str, float, list[Traced]]],
) -> None:
    every = [launch for *_, launches in published for launch in launches]
    assert not any(outside(launch) for launch in every[::20])
    found = ranges(every[::20])
    for name, (low, high) in found.items():
        assert seen()[name][0] <= low * 1.001 and high <= seen()[name][1] * 1.001
    told = outside(replace(every[0], groups=9000 * CUS))
    assert any(text.startswith("workgroups of a unit: 9000, seen were 1 to") for text in told)


def test_all_traced_workgroups_of_published_layers_have_work(
    published: list[tuple[str, float, list[Traced]]],
) -> None:
    machine = shipped().machine(1)

    def instructions(launch: Traced, group: int) -> float:
        return sum(launch.split.replay(machine, launch.shares(), [group], 1).issued.values())

    counts = [
        [instructions(launch, group) for group in range(launch.split.groups)]
        for *_, launches in published
        for launch in launches
        if launch.split.groups > 1
    ]
    assert len(counts) > 100
    assert all(min(of_launch) > IDLE * max(of_launch) for of_launch in counts)


def test_draws_of_constants_are_many_wide_and_always_the_same() -> None:
    constants, known = drawn(), shipped()
    assert len(set(constants)) == DRAWS >= 32 and drawn() is constants
    for name, least in (("memory_latency_us", 0.25), ("memory_tb_s", 0.08)):
        values = [getattr(each, name) / getattr(known, name) for each in constants]
        assert min(values) < 1 - least and max(values) > 1 + least
    clocks = [each.matrix_clock_ghz for each in constants]
    assert min(clocks) >= 1.9 and max(clocks) - min(clocks) > 0.4


@pytest.mark.parametrize("working", [1, 5, 37, 99, 100])
def test_those_that_work_are_counted_to_the_last(working: int) -> None:
    def run(number: int) -> LaunchReport:
        count = 1000 + number if number < working else 20
        trace = Trace(bytes([number]), 1, 1, ("s_endpgm",), (1,), (64,))
        return LaunchReport("k", 1, 0.0, {"s_nop": count}, trace=trace)

    found = sample(run, 100, 9)
    assert found.working == working
    numbers = list(found.trace.words)
    assert found.trace.groups == len(numbers) and max(numbers) < working
    assert numbers[0] == max(numbers)  # the busiest


@pytest.mark.parametrize("counted", [(0, 7, 0), (9, 0, 0)])
def test_where_the_host_puts_tensors_does_not_pick_the_workgroup(counted: tuple[int, ...]) -> None:
    """Which stands for all: cycles that a report counts depend on addresses, those of a trace do
    not. A memory instruction is five words, of which the second has them in its low half."""

    def run(number: int) -> LaunchReport:
        group, wave, memory = 2 << 28, 1 << 28, 3 << 28
        words = np.array([group, wave, memory, 4 + number % 2, 0, 1, 64], np.uint32).tobytes()
        trace = Trace(words, 1, 1, ("global_load_dword v0, v[0:1], off",), (1,), (64,))
        cycles = counted[number // 50]
        return LaunchReport("k", 1, 0.0, {"s_nop": 100}, address_cycles=cycles, trace=trace)

    assert sample(run, 100, 3).trace.words == joined([run(49), run(0), run(98)]).words


def test_traces_with_other_regions_are_not_joined() -> None:
    traces = [Trace(b"", 1, 1, ("s_endpgm",), (1,), (size,)) for size in (64, 128)]
    reports = [LaunchReport("k", 1, 0.0, trace=trace) for trace in traces]
    with pytest.raises(ValueError, match="regions of memory are not the same"):
        joined(reports)


def test_samples_of_a_launch_stand_for_all() -> None:
    steps, groups = 8, 4 * CUS
    data, out = (np.zeros(groups * 1024 * steps, np.uint32) for _ in range(2))
    loaded = program(COPY)

    def run(number: int) -> LaunchReport:
        options = replace(TRACED, first_group=number, group_count=1)
        return launch(loaded, "copy", groups, 256, [data, out, steps], access="rw", options=options)

    found = sample(run, groups, 3)
    assert found.working == groups
    report = LaunchReport("copy", 4, 0.0, trace=found.trace)
    us = predict(traced(report, loaded.kernel("copy"), groups, 256)).us
    assert us == pytest.approx(predict(copied(steps, groups)).us, rel=0.05)
