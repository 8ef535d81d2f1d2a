"""The model of time: traces, replays of a compute unit, and what constants and parts mean."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from aiter_mx.sim.program import SimOptions
from aiter_mx.sim.timing.code import Kind, costs
from aiter_mx.sim.timing.constants import described, shipped, with_values
from aiter_mx.sim.timing.cu import REASONS, SplitTrace
from aiter_mx.sim.timing.model import Prediction, predict, timeline, traced
from op_tests.sim.tools import COPY, TRACED, launch, program

GROUPS = 256


def copied(steps: int, groups: int = GROUPS, resident: int = 8, **values: float) -> Prediction:
    """The modelled time of a copy of so many steps of 4 KiB a workgroup."""
    data, out = (np.zeros(groups * 1024 * steps, np.uint32) for _ in range(2))
    loaded = program(COPY)
    report = launch(loaded, "copy", groups, 256, [data, out, steps], access="rw", options=TRACED)
    model = traced(report, loaded.kernel("copy"), groups, 256)
    assert model.resident == 8
    return predict(replace(model, resident=resident), with_values(values))


def test_instructions_cost_what_their_units_take() -> None:
    texts = [
        "s_waitcnt vmcnt(3) lgkmcnt(0)", "s_waitcnt 0xc07f", "s_nop 7", "s_barrier",
        "v_add_u32_e32 v0, v1, v2", "v_exp_f32_e32 v0, v1", "ds_read_b128 v[0:3], v4",
        "ds_write2_b64 v0, v[2:3], v[4:5]", "buffer_load_dwordx4 v0, s[0:3], 0 offen lds",
        "global_load_lds_dwordx4 v[0:1], off", "global_store_dword v[0:1], v2, off",
        "v_mfma_f32_16x16x32_bf16 a[0:3], v[0:3], v[4:7], a[0:3]",
        "v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], v[0:3], v20, v21",
        "v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:7], v[8:11], v[0:3], v20, v21 cbsz:4 blgp:4",
        "scratch_load_dwordx2 v[0:1], off, s0", "s_load_dwordx4 s[0:3], s[4:5], 0x0",
    ]  # fmt: skip
    found = costs(texts)
    assert [cost.kind for cost in found] == [
        Kind.WAIT, Kind.WAIT, Kind.NOP, Kind.BARRIER, Kind.VALU, Kind.VALU, Kind.LDS, Kind.LDS,
        Kind.LOAD, Kind.LOAD, Kind.STORE, Kind.MFMA, Kind.MFMA, Kind.MFMA, Kind.SCRATCH, Kind.SMEM,
    ]  # fmt: skip
    assert (found[0].vm_left, found[0].lgkm_left) == (3, 0)
    assert (found[1].vm_left, found[1].lgkm_left) == (63, 0)
    assert [found[i].cycles for i in (2, 4, 5, 11, 12, 13, 14)] == [32, 4, 16, 16, 32, 16, 8]
    assert [found[i].lds_bytes for i in (6, 7, 8, 9)] == [1024, 1024, 1024, 1024]


def test_parts_sum_up_to_the_time() -> None:
    found = copied(4)
    assert sum(found.parts.values()) == pytest.approx(found.us)
    assert found.parts["launch"] == shipped().launch_us
    assert all(0 <= share <= 1.001 for share in found.busy.values())


def test_a_long_copy_takes_its_bytes_at_the_rate_of_memory() -> None:
    rate = 1.0  # so slow that four waves a unit are enough to hide latencies
    more = copied(16, memory_tb_s=rate).us - copied(8, memory_tb_s=rate).us
    assert more == pytest.approx(2 * GROUPS * 4096 * 8 / rate / 1e6, rel=0.1)


def test_a_timeline_has_the_waits_of_each_wave() -> None:
    data, out = (np.zeros(GROUPS * 1024 * 4, np.uint32) for _ in range(2))
    loaded = program(COPY)
    report = launch(loaded, "copy", GROUPS, 256, [data, out, 4], access="rw", options=TRACED)
    model = traced(report, loaded.kernel("copy"), GROUPS, 256)
    spans = timeline(replace(model, groups=4 * GROUPS, resident=2))
    lives = [span for span in spans if span.what == "wave"]
    assert len(lives) == 4 * 4 and {span.slot for span in lives} == {0, 1}
    assert {span.simd for span in lives} == {0, 1, 2, 3}
    waits = [span for span in spans if span.what != "wave"]
    assert waits and {span.what for span in waits} <= set(REASONS)
    for wait in waits:  # within the life of its wave
        assert any(
            (life.slot, life.wave) == (wait.slot, wait.wave)
            and life.begin <= wait.begin < wait.end <= life.end
            for life in lives
        )
    parts = predict(replace(model, groups=4 * GROUPS, resident=2)).parts
    of_memory = sum(span.end - span.begin for span in waits if span.what == "memory")
    whole = sum(span.end - span.begin for span in lives)
    run = sum(parts.values()) - parts["launch"]
    assert of_memory / whole == pytest.approx(parts["memory"] / run, rel=1e-6)


def test_every_constant_slows_what_it_is_about() -> None:
    base = copied(8).us
    for name, value in (
        ("launch_us", shipped().launch_us + 1),
        ("memory_tb_s", shipped().memory_tb_s / 2),
        ("memory_latency_us", shipped().memory_latency_us + 1),
        ("address_cycles", shipped().address_cycles * 20),
        ("issue_cycles", shipped().issue_cycles * 20),
    ):
        assert copied(8, **{name: value}).us > base + 0.1, name


def test_the_busiest_unit_counts() -> None:
    """One workgroup too many is a second round, unless the unit holds two at once."""
    one = copied(16)
    run = one.us - one.parts["launch"]
    assert copied(16, GROUPS + 1, resident=1).us - one.us == pytest.approx(run, rel=0.5)
    assert 0 <= copied(16, GROUPS + 1).us - one.us < run / 2
    assert copied(16, groups=1).us < one.us


def test_sampled_workgroups_stand_for_all() -> None:
    data, out = (np.zeros(4 * GROUPS * 1024 * 8, np.uint32) for _ in range(2))
    loaded = program(COPY)
    found = []
    for options in (TRACED, SimOptions(**{**vars(TRACED), "first_group": 99, "group_count": 1})):
        report = launch(loaded, "copy", 4 * GROUPS, 256, [data, out, 8], access="rw",
                        options=options)  # fmt: skip
        assert report.trace is not None
        assert report.trace.groups == (1 if options.group_count else 4 * GROUPS)
        found.append(predict(traced(report, loaded.kernel("copy"), 4 * GROUPS, 256)).us)
    assert found[1] == pytest.approx(found[0], rel=0.05)


def test_constants_lie_in_their_ranges_and_say_their_units() -> None:
    for name in vars(shipped()):
        entry = described()[name]
        assert entry["low"] <= entry["value"] <= entry["high"], name
        assert entry["unit"] and entry["what"]
    fitted = [name for name in vars(shipped()) if described()[name]["fitted"]]
    assert len(fitted) <= 15


def test_a_launch_that_was_not_traced_is_refused() -> None:
    data, out = (np.zeros(1024, np.uint32) for _ in range(2))
    loaded = program(COPY)
    report = launch(loaded, "copy", 1, 256, [data, out, 1], access="rw")
    with pytest.raises(ValueError, match="was not traced"):
        traced(report, loaded.kernel("copy"), 1, 256)


def test_launches_of_a_thread_number_their_regions_alike() -> None:
    data, out = (np.zeros(4 * GROUPS * 1024, np.uint32) for _ in range(2))
    loaded, kept, found = program(COPY), [], set()
    for group in range(20):
        kept.append(np.zeros(64 + group, np.uint8))  # moves what is allocated next
        report = launch(loaded, "copy", 4, 256, [data, out, 1], access="rw",
                        options=replace(TRACED, first_group=group % 4, group_count=1))  # fmt: skip
        assert report.trace is not None
        footprint = SplitTrace(report.trace).footprint()
        touched = tuple(place for place, size in enumerate(footprint) if size)
        found.add((tuple(report.trace.region_bytes), touched))
    assert len(found) == 1


HALVES = """
KERNEL(64) rows(const u32* in, u32* out, int words, int steps) {
    u32 sum = 0;
    for (int i = 0; i < steps; i++)
        sum += in[lane_id() / 32 * words + i * 32 + lane_id() % 32];
    out[lane_id()] = sum;
}
"""


def test_a_line_that_accesses_share_counts_once() -> None:
    steps, words = 8, 8 * 32 + 16  # the second row begins in the midst of a line
    data, out = np.zeros(2 * words, np.uint32), np.zeros(64, np.uint32)
    loaded = program(HALVES)
    report = launch(loaded, "rows", 1, 64, [data, out, words, steps], access="rw", options=TRACED)
    assert report.trace is not None
    trace = SplitTrace(report.trace)
    assert sorted(filter(None, trace.footprint())) == [256, 128 * (steps + steps + 1)]
    assert trace.touched(0) == 128 * (2 * steps + 3)
