"""The emulator of Hopper, on a kernel whose CTAs wait for one another, right and with mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aiter_mx.kernels.spec import Geometry, KernelSpec, Module, TensorMap, numbers, pointers
from aiter_mx.paths import csrc_dir
from op_tests.emulated_sm90.build import unsupported
from op_tests.emulated_sm90.launch import EmulatedError, Schedule, launch
from op_tests.launches import Out

pytestmark = pytest.mark.skipif(bool(unsupported()), reason=unsupported())

SOURCE = "emulated_ring_sm90.cu"
CTAS, TILES, ROWS, ROW_BYTES, SLOTS = 3, 5, 16, 128, 2
SHARED_BYTES = 3 * ROWS * ROW_BYTES
TOTAL = CTAS * TILES * ROWS - 5  # the last tile is not whole
SEEDS = range(12)


def _map(pointer: int, rows: int) -> TensorMap:
    return TensorMap(pointer, rows, ROW_BYTES, ROWS, ROW_BYTES)


RING = KernelSpec(
    op="ring",
    backend="hip",
    name="ring",
    params=(),
    refusal=lambda target, problem: None,
    configure=lambda target, problem: {},
    candidates=lambda target, problem: ({},),
    modules=(
        Module(
            sources={"sm_90a": SOURCE},
            symbol="aiter_mx_emulated_ring",
            args=(
                *pointers("r", "raw"),
                *pointers("rw", "ring", "counters"),
                *pointers("w", "out"),
                *numbers("i32", "tiles"),
            ),
            defines=lambda target, problem, config: {},
            geometry=lambda target, problem, config: Geometry(
                (CTAS, 1, 1), (512, 1, 1), SHARED_BYTES
            ),
            scalars=lambda target, problem, config: (TILES,),
            tensor_maps=(
                lambda target, problem, config: _map(0, TOTAL),
                lambda target, problem, config: _map(1, CTAS * SLOTS * ROWS),
                lambda target, problem, config: _map(3, TOTAL),
            ),
        ),
    ),
)


def assert_result(schedule: Schedule, folder: Path, right: str = "", wrong: str = "") -> None:
    """Launch the kernel with a text of its source in another's place."""
    text = Path(__file__).with_name(SOURCE).read_text()
    assert not right or text.count(right) == 1, right
    csrc = folder / "csrc"
    csrc.mkdir(exist_ok=True)
    if not (csrc / "include").exists():
        (csrc / "include").symlink_to(csrc_dir() / "include")
    (csrc / SOURCE).write_text(text.replace(right, wrong) if right else text)
    generator = torch.Generator().manual_seed(schedule.seed)
    raw = torch.randint(256, (TOTAL, ROW_BYTES), dtype=torch.uint8, generator=generator)
    ring = Out((CTAS * SLOTS * ROWS, ROW_BYTES), torch.uint8)
    counters = torch.zeros(2 * CTAS, dtype=torch.int32)
    given = RING, None, {}, [raw, ring, counters, Out((TOTAL, ROW_BYTES), torch.uint8)]
    _, out = launch(*given, schedule, csrc=csrc)
    assert torch.equal(out, (raw + 1) ^ 0x80)


@pytest.mark.parametrize("seed", SEEDS)
def test_ctas_that_wait_for_one_another_give_the_result(seed: int, tmp_path: Path) -> None:
    assert_result(Schedule(seed, None, seed % 2 == 0), tmp_path)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_loop_that_polls_without_a_pause_lets_others_go_on(seed: int, tmp_path: Path) -> None:
    assert_result(Schedule(seed, None), tmp_path, "sleep(100);", ";")


MISTAKES = {  # text that is there once, and what stands in its place
    "a box loaded over one that is still to be stored": (
        "tma_store_wait_read<0>();\n            barrier_arrive_expect",
        "barrier_arrive_expect",
    ),
    "a stage released before it is stored": ("tma_store_wait_read<0>(); // of the stage", ""),
    "a tile announced before it is stored": (
        "tma_store_wait();\n                announce",
        "tma_store_wait_read<0>();\n                announce",
    ),
    "the last tile announced before it is stored": ("tma_store_wait(); // the last", ""),
    "a slot written before it is read": ("min(i + 1, kSlots)", "min(i + 1, kSlots + 1)"),
    "a slot released before it is read": (
        "barrier_wait(a.full + 8 * stage.at, stage.parity);\n        if (thread == 0)\n"
        "            announce(a.taken + a.next);",
        "if (thread == 0)\n            announce(a.taken + a.next);\n"
        "        barrier_wait(a.full + 8 * stage.at, stage.parity);",
    ),
    "a tile loaded before it is there": ("wait_for(a.made + a.next, i + 1);", ""),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_found(what: str, tmp_path: Path) -> None:
    with pytest.raises((EmulatedError, AssertionError)):
        for seed in SEEDS:
            assert_result(Schedule(seed, None), tmp_path, *MISTAKES[what])


@pytest.mark.parametrize(
    ("fence", "accesses"),
    [
        ("fence_async(); // the maker's", "tma_store meets 0x"),
        ("fence_async(); // the consumer's", "tma_store meets 0x"),
        ("fence_async_global();", "tma_load loads 0x"),
    ],
)
def test_a_missing_proxy_fence_is_named(fence: str, accesses: str, tmp_path: Path) -> None:
    with pytest.raises(EmulatedError, match=f"{accesses}.* proxy fence"):
        assert_result(Schedule(0, None), tmp_path, fence, ";")


@pytest.mark.parametrize("pause", ["sleep(100);", ";"])
def test_ctas_that_wait_for_ever_are_named(pause: str, tmp_path: Path) -> None:
    wrong = f"while (load_acquire(counter) < least + 1)\n        {pause}"
    right = "while (load_acquire(counter) < least)\n        sleep(100);"
    with pytest.raises(EmulatedError, match=r"(?s)DEADLOCK.* polls 0x.*, where it finds 0x"):
        assert_result(Schedule(0, None), tmp_path, right, wrong)


def test_ctas_that_wait_for_one_that_has_no_room_are_named(tmp_path: Path) -> None:
    with pytest.raises(EmulatedError, match="1 blocks have not started"):
        assert_result(Schedule(0, CTAS - 1), tmp_path)
