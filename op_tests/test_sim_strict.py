"""Strict mode of the simulator finds planted mistakes, names them, and accuses nobody else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sim_tools import Array, launch, program

import aiter_mx
from aiter_mx.errors import SimulatorError
from aiter_mx.sim.faults import (
    PendingAccess,
    RaceError,
    StuckError,
    TrapError,
    UninitializedRead,
    UnknownInstruction,
)
from aiter_mx.sim.program import SCHEDULES, SimOptions
from aiter_mx.sim.report import LaunchReport
from aiter_mx.timing import random_mx

T = np.arange(256)


def run(
    kernel: str, *more: int, block: int = 64, options: SimOptions | None = None
) -> tuple[Array, Array, LaunchReport]:
    data = np.random.default_rng(3).integers(0, 2**32, 1024, dtype=np.uint32)
    out = np.zeros(1025, np.uint32)
    report = launch(program("strict.cu"), kernel, 1, block, [data, out, *more], access="rb",
                    options=options)  # fmt: skip
    return data, out, report


def test_a_register_that_nothing_wrote_is_reported_where_its_value_matters() -> None:
    with pytest.raises(UninitializedRead, match=r"wave 0, lane 0: 'global_store_dword .* reads v"):
        run("unset_register")


def test_lanes_are_told_apart() -> None:
    data, out, _ = run("unset_lanes", 1)
    np.testing.assert_array_equal(out[:64], data[:64])
    with pytest.raises(UninitializedRead, match="lane 0: "):
        run("unset_lanes", 0)


@pytest.mark.parametrize(
    ("kernel", "more", "instruction"),
    [
        ("early_read", (), "v_add_u32"),
        ("partly_waited", (1,), "v_add_u32"),
        ("early_scalar", (), "s_add_u32"),
        ("early_lds", (), "v_add_u32"),
    ],
)
def test_a_result_used_before_its_wait_is_an_error(
    kernel: str, more: tuple[int, ...], instruction: str
) -> None:
    with pytest.raises(PendingAccess, match=rf"'{instruction}.* before the s_waitcnt"):
        run(kernel, *more)


def test_waiting_for_the_older_of_two_loads_makes_it_valid() -> None:
    data, out, _ = run("partly_waited", 0)
    np.testing.assert_array_equal(out[:64], data[:64] + np.uint32(1))


def test_overwriting_the_target_of_a_load_under_way_is_an_error() -> None:
    with pytest.raises(PendingAccess, match=r"'v_mov_b32.* overwrites v\d+ while a load"):
        run("late_write")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("kernel", "error"),
    [
        ("neighbour_no_barrier", (RaceError, UninitializedRead)),  # whoever comes first
        ("neighbour_no_wait", RaceError),
        ("rounds_overwrite", RaceError),
        ("copied_no_barrier", (RaceError, UninitializedRead)),
        ("copied_late_wait", RaceError),
        ("copied_not_waited", PendingAccess),
    ],
)
def test_races_in_lds_are_found_under_every_schedule(
    kernel: str, error: type[SimulatorError] | tuple[type[SimulatorError], ...], schedule: str
) -> None:
    with pytest.raises(error, match=rf"kernel {kernel}, .* LDS byte at \d+"):
        run(kernel, block=256, options=SimOptions(schedule=schedule))


@pytest.mark.parametrize("seed", range(3))
def test_kernels_that_synchronise_are_not_accused(seed: int) -> None:
    options = SimOptions(seed=seed)
    data, out, _ = run("neighbour_right", block=256, options=options)
    np.testing.assert_array_equal(out[:256], data[T ^ 64])
    data, out, _ = run("rounds_right", block=256, options=options)
    factors = np.arange(1, 5, dtype=np.uint32)
    np.testing.assert_array_equal(out[:256], factors @ data.reshape(4, 256)[:, T ^ 192])
    data, out, _ = run("copied_right", block=256, options=options)
    np.testing.assert_array_equal(out[:256], data[T ^ 128])
    data, out, _ = run("innocent", block=256, options=options)
    loaded = np.where(data[T] & 1, data[T + 256], data[T + 512])
    byte = (data[:256] & 255).reshape(4, 64).T.ravel()
    np.testing.assert_array_equal(out[:256], loaded + byte + np.uint32(256))


def test_waves_may_all_write_the_same_value_but_not_different_ones() -> None:
    data, out, _ = run("duplicates", 1, block=256)
    np.testing.assert_array_equal(out[:256], np.tile(data[np.arange(64) ^ 1], 4))
    with pytest.raises(RaceError, match="'ds_write_b32"):
        run("duplicates", 0, block=256)


def test_a_seed_repeats_an_interleaving_and_another_gives_another() -> None:
    def order(options: SimOptions) -> bytes:
        return run("order", block=1024, options=options)[1].tobytes()

    seeds = [order(SimOptions(seed=seed)) for seed in range(4)]
    assert seeds == [order(SimOptions(seed=seed)) for seed in range(4)]
    fixed = [order(SimOptions(schedule=name)) for name in SCHEDULES if name != "random"]
    assert len({*seeds, *fixed}) == 6


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_kernel_that_never_ends_is_stopped(schedule: str) -> None:
    with pytest.raises(StuckError, match="endless did not end within"):
        run("endless", options=SimOptions(schedule=schedule, max_steps=20_000))


def test_a_trap_ends_the_launch() -> None:
    with pytest.raises(TrapError, match=r"wave 2, lane 0: 's_trap 2' at .* the kernel trapped"):
        run("traps", block=256)


def test_an_unknown_instruction_is_named_and_nothing_runs() -> None:
    with pytest.raises(UnknownInstruction, match=r"does not know v_sad_hi_u8: 'v_sad_hi_u8"):
        run("unknown")


def test_without_strict_mode_the_same_kernels_run() -> None:
    lax = SimOptions(strict=False)
    data, out, _ = run("early_read", options=lax)
    np.testing.assert_array_equal(out[:64], data[:64] + np.uint32(3))
    run("neighbour_no_barrier", block=256, options=lax)


def test_the_report_counts_what_ran() -> None:
    _, _, report = run("rounds_right", block=256)
    assert report.waves == 4
    assert (report.bytes_read, report.bytes_written) == (4 * 4 * 256, 4 * 256)
    assert (report.lds_bytes_read, report.lds_bytes_written) == (4 * 4 * 256, 4 * 4 * 256)
    assert report.mnemonics["s_barrier"] == 4 * 8 and report.mnemonics["s_endpgm"] == 4
    assert report.waits == 4 * 4 and report.in_flight_bytes == 4 * 4 * 256
    assert report.unique_bytes_read is None
    assert report.by_class["lds"] == 4 * 8 and report.instructions == sum(report.by_class.values())


def test_distinct_bytes_are_counted_once_over_all_workgroups() -> None:
    data, out = np.zeros(1024, np.uint32), np.zeros(1025, np.uint32)
    report = launch(program("strict.cu"), "rounds_right", 6, 256, [data, out], access="rw",
                    options=SimOptions(count_unique=True, threads=2))  # fmt: skip
    assert report.bytes_read == 6 * 4096 and report.bytes_written == 6 * 1024
    assert report.unique_bytes_read == 4096 + 16  # the array, and two pointer arguments
    assert report.unique_bytes_written == 1024


def seen_with_delay(kernel: str, block: int) -> set[tuple[bool, ...]]:
    """For each of some seeds, which words of the kernel's second result are new ones of ``in``."""
    found = set()
    for seed in range(24):
        options = SimOptions(seed=seed, delay=True)
        data, out, _ = run(kernel, block=block, options=options)
        want = data[T ^ 64] if block == 256 else data[64:128]
        found.add(tuple((out[256:512][: len(want)] == want).tolist()))
    return found


def test_delay_shows_a_store_that_no_wait_brings_to_memory_before_the_barrier() -> None:
    assert seen_with_delay("memory_waited", 256) == {(True,) * 256}
    assert len(seen_with_delay("memory_not_waited", 256)) > 1
    data, out, _ = run("memory_not_waited", block=256)  # the mistake that nothing else shows
    np.testing.assert_array_equal(out[256:512], data[T ^ 64])


def test_delay_lets_a_load_under_way_see_what_is_written_meanwhile() -> None:
    assert seen_with_delay("load_overtaken", 128) == {(True,) * 64, (False,) * 64}


@pytest.mark.parametrize("M", [1, 16])
def test_our_kernels_do_not_mind_memory_that_is_late(
    M: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (xq, xs), (wq, ws) = (random_mx(rows, 2048, torch.device("cpu")) for rows in (M, 96))
    with aiter_mx.simulate("gfx950"):
        want = aiter_mx.linear(xq, xs, wq, ws)
        monkeypatch.setenv("AITER_MX_SIM_DELAY", "1")
        for seed in "123":
            monkeypatch.setenv("AITER_MX_SIM_SEED", seed)
            assert torch.equal(aiter_mx.linear(xq, xs, wq, ws), want)


def test_delay_needs_strict_mode() -> None:
    with pytest.raises(ValueError, match="delay=True needs strict=True"):
        SimOptions(delay=True, strict=False)


def test_options_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AITER_MX_SIM_STRICT", "0")
    monkeypatch.setenv("AITER_MX_SIM_SEED", "17")
    monkeypatch.setenv("AITER_MX_SIM_SCHEDULE", "round-robin")
    assert SimOptions.from_environment() == SimOptions(False, "round-robin", 17)
    monkeypatch.setenv("AITER_MX_SIM_SEED", "often")
    with pytest.raises(ValueError, match="AITER_MX_SIM_SEED must be a number, got 'often'"):
        SimOptions.from_environment()
    with pytest.raises(ValueError, match="schedule must be one of random, round-robin"):
        SimOptions(schedule="fair")
