"""The simulator's option ``coherence``: handovers between workgroups, with a piece gone."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import aiter_mx
from aiter_mx.errors import LaunchError
from aiter_mx.sim.faults import DeadlockError, RaceError, StaleRead
from aiter_mx.sim.program import SimOptions
from aiter_mx.sim.report import LaunchReport
from aiter_mx.timing import random_mx
from op_tests.sim.tools import Array, launch, program

LANES, CPU = 128, torch.device("cpu")
COHERENT = SimOptions(coherence=True, collect=True, max_steps=1 << 20)


def run(
    kernel: str, groups: int = 4, lanes: int = LANES, options: SimOptions = COHERENT
) -> tuple[Array, Array, LaunchReport]:
    data = np.random.default_rng(7).integers(1, 1 << 20, (groups, lanes), dtype=np.uint32)
    parts, flags, out = np.zeros_like(data), np.zeros(groups + 1, np.uint32), np.zeros_like(data)
    report = launch(program("coherence.cu"), kernel, groups, lanes, [data, parts, flags, out],
                    access="rbbb", options=options)  # fmt: skip
    return data, out, report


@pytest.mark.parametrize("kernel", ["split_right", "compiled"])
@pytest.mark.parametrize("seed", range(4))
def test_a_whole_handover_raises_nothing(kernel: str, seed: int) -> None:
    options = SimOptions(coherence=True, seed=seed)
    data, out, _ = run(kernel, options=options)
    np.testing.assert_array_equal(out[0], data.sum(0))


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        ("split_no_drain", "nothing says that the write is over"),
        ("split_no_barrier", "nothing says that the write is over"),
        ("split_no_write_back", "in the L2 of another XCD"),
        ("split_no_wait_for_write_back", "in the L2 of another XCD|that the write is over"),
        ("split_plain_counter", "that the write is over"),
        ("split_early_invalidate", "no buffer_inv sc1 follows"),
        ("split_no_invalidate", "no buffer_inv sc1 follows"),
        ("split_workgroup_scope", "in the L2 of another XCD"),
    ],
)
def test_a_split_without_one_of_its_pieces_is_caught_in_every_run(kernel: str, why: str) -> None:
    for seed in range(6):
        data, out, report = run(kernel, options=replace(COHERENT, seed=seed))
        found = next(f for f in report.findings if f.check == "stale-read")
        assert found.kind == "proven"
        assert re.search(why, found.message)
        assert not np.array_equal(out[0], data.sum(0))


def test_workgroups_of_one_xcd_share_its_l2() -> None:
    data = np.random.default_rng(7).integers(1, 1 << 20, (32, LANES), dtype=np.uint32)
    for kernel, is_right in (("split_in_an_xcd", True), ("split_in_an_xcd_no_invalidate", False)):
        parts, flags, out = np.zeros_like(data), np.zeros(4, np.uint32), np.zeros_like(data)
        report = launch(program("coherence.cu"), kernel, 32, LANES, [data, parts, flags, out],
                        access="rbbb", options=COHERENT)  # fmt: skip
        assert (not report.findings) == is_right
        assert np.array_equal(out[0], data[:4].sum(0)) == is_right


@pytest.mark.parametrize("schedule", ["random", "run-to-barrier"])
def test_a_workgroup_may_wait_for_a_later_one(schedule: str) -> None:
    for seed in range(3):
        options = SimOptions(coherence=True, seed=seed, schedule=schedule)
        data, out, _ = run("fix_up_right", groups=20, options=options)
        np.testing.assert_array_equal(out, np.cumsum(data[::-1], 0, np.uint32)[::-1])


@pytest.mark.parametrize(
    "kernel",
    ["fix_up_no_drain", "fix_up_no_barrier", "fix_up_plain_store", "fix_up_plain_load",
     "fix_up_plain_flag", "fix_up_plain_poll"],
)  # fmt: skip
def test_a_fix_up_without_one_of_its_pieces_is_caught_in_every_run(kernel: str) -> None:
    for seed in range(6):
        with pytest.raises((StaleRead, RaceError)):
            run(kernel, groups=12, options=SimOptions(coherence=True, seed=seed))


@pytest.mark.parametrize("kernel", ["fix_up_plain_flag", "fix_up_plain_poll"])
def test_a_flag_that_stays_in_a_cache_is_waited_for_in_vain(kernel: str) -> None:
    options = SimOptions(coherence=True, checks=("-stale-read", "-global-race"))
    with pytest.raises(DeadlockError, match="all others have ended"):
        run(kernel, groups=12, options=options)


def test_a_scalar_load_sees_what_is_new_after_s_dcache_inv_alone() -> None:
    data, out, report = run("scalar_invalidated", groups=2, lanes=64)
    assert not report.findings
    assert (out[0] == data[0, 0]).all()
    data, out, report = run("scalar_stale", groups=2, lanes=64)
    (found,) = report.findings
    assert "no s_dcache_inv follows" in found.message
    assert not out.any()


def test_workgroups_wait_for_those_that_the_gpu_has_room_for_beside_them() -> None:
    kernel, flag = program("coherence.cu"), np.zeros(1, np.uint32)
    launch(kernel, "wait_for_the_last", 256, 64, [flag], options=SimOptions(coherence=True))
    flag[:] = 0
    with pytest.raises(DeadlockError, match=r"all 256 workgroups that run.*no room for 1 more"):
        launch(kernel, "wait_for_the_last", 257, 64, [flag], options=SimOptions(coherence=True))


def test_workgroups_that_wait_for_each_other_are_a_deadlock() -> None:
    locks = np.zeros(2, np.uint32)
    with pytest.raises(DeadlockError, match=r"workgroup \(0, 0, 0\).*global_.*others have ended"):
        launch(program("coherence.cu"), "two_locks", 2, 64, [locks],
               options=SimOptions(coherence=True))  # fmt: skip


@pytest.mark.parametrize("M", [1, 16, 128])
def test_our_kernels_hand_nothing_over(M: int) -> None:
    operands = (*random_mx(M, 512, CPU), *random_mx(96, 512, CPU))
    with aiter_mx.simulate("gfx950"):
        expected = aiter_mx.linear(*operands)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AITER_MX_SIM_COHERENCE", "1")
            assert torch.equal(aiter_mx.linear(*operands), expected)


def test_options_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match="coherence=True needs strict=True"):
        SimOptions(coherence=True, strict=False)
    with pytest.raises(ValueError, match="two ways to be late"):
        SimOptions(coherence=True, delay=True)
    with pytest.raises(LaunchError, match="at most 16384"):
        launch(program("coherence.cu"), "two_locks", 1 << 15, 64, [np.zeros(2, np.uint32)],
               options=SimOptions(coherence=True))  # fmt: skip
