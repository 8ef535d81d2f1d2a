"""Strict mode of the simulator finds planted mistakes, names them, and accuses nobody else."""

from __future__ import annotations

import numpy as np
import pytest

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
from op_tests.sim.tools import Array, launch, program

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


def test_the_half_of_a_scalar_pair_that_is_not_taken_may_be_unset() -> None:
    data, out, _ = run("half_of_a_pair", 0)
    np.testing.assert_array_equal(out[:64], 2 * (data[:64] >> 8) + 2 * (data[:64] & 255))
    with pytest.raises(UninitializedRead, match=r"'v_pk_mul_f32 .* reads s41"):
        run("half_of_a_pair", 1)


def test_a_move_of_halves_takes_one_of_each_source() -> None:
    data, out, _ = run("half_of_a_move", 0)
    np.testing.assert_array_equal(out[:64], data[:64])
    with pytest.raises(UninitializedRead, match=r"global_store_dword .* reads"):
        run("half_of_a_move", 1)


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


def test_options_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AITER_MX_SIM_STRICT", "0")
    monkeypatch.setenv("AITER_MX_SIM_SEED", "17")
    monkeypatch.setenv("AITER_MX_SIM_SCHEDULE", "round-robin")
    monkeypatch.setenv("AITER_MX_SIM_FINITE_SCALES", "1")
    assert SimOptions.from_environment() == SimOptions(False, "round-robin", 17, finite_scales=True)
    monkeypatch.setenv("AITER_MX_SIM_SEED", "often")
    with pytest.raises(ValueError, match="AITER_MX_SIM_SEED must be a number, got 'often'"):
        SimOptions.from_environment()
    with pytest.raises(ValueError, match="schedule must be one of random, round-robin"):
        SimOptions(schedule="fair")
