"""The simulator's option `delay`: what late memory operations show, and what they must not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import aiter_mx
from aiter_mx.sim.program import SimOptions
from aiter_mx.timing import random_mx
from op_tests.sim.tools import Array, launch, program

T = np.arange(256)


def run(
    kernel: str, *more: int, block: int = 64, options: SimOptions | None = None
) -> tuple[Array, Array]:
    data = np.random.default_rng(3).integers(1, 2**32, 1024, dtype=np.uint32)
    out = np.zeros(1025, np.uint32)
    launch(program("delay.cu"), kernel, 1, block, [data, out, *more], access="rb",
           options=options)  # fmt: skip
    return data, out


def seen_with_delay(kernel: str, block: int) -> set[tuple[bool, ...]]:
    """For each of some seeds, which words of the kernel's second result are new ones of ``in``."""
    found = set()
    for seed in range(24):
        options = SimOptions(seed=seed, delay=True)
        data, out = run(kernel, block=block, options=options)
        want = data[T ^ 64] if block == 256 else data[64:128]
        found.add(tuple((out[256:512][: len(want)] == want).tolist()))
    return found


def test_delay_shows_a_store_that_no_wait_brings_to_memory_before_the_barrier() -> None:
    assert seen_with_delay("memory_waited", 256) == {(True,) * 256}
    assert len(seen_with_delay("memory_not_waited", 256)) > 1
    data, out = run("memory_not_waited", block=256)  # the mistake that nothing else shows
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


@pytest.mark.parametrize("kind", ["copy", "buffer_copy", "flat"])
def test_other_reads_under_way_see_what_is_written_meanwhile(kind: str) -> None:
    assert seen_with_delay(f"{kind}_overtaken", 128) == {(True,) * 64, (False,) * 64}


def test_scalar_loads_are_late_too() -> None:
    found = set()
    for seed in range(24):
        data, out = run("scalar_overtaken", block=128, options=SimOptions(seed=seed, delay=True))
        assert (out[256:320] == out[256]).all()
        found.add(int(out[256]))
    assert found == {0, int(data[64])}


def test_an_atomic_under_way_has_or_has_not_happened() -> None:
    found = set()
    for seed in range(24):
        data, out = run("atomic_overtaken", block=128, options=SimOptions(seed=seed, delay=True))
        np.testing.assert_array_equal(out[:64], data[:64])  # it has by the end
        found.add(tuple((out[256:320] == data[:64]).tolist()))
    assert found == {(True,) * 64, (False,) * 64}


def test_stores_overtake_each_other_where_they_do_not_touch_the_same_bytes() -> None:
    def seen(apart: int) -> set[int]:
        options = (SimOptions(seed=seed, delay=True) for seed in range(60))
        return {int(run("two_stores", apart, block=128, options=o)[1][256]) for o in options}

    assert seen(64) == {0, 1, 2, 3}
    assert seen(0) == {0, 1, 2}
    assert {int(run("two_stores", 0, block=128, options=SimOptions(seed=seed, delay=True))[1][0])
            for seed in range(20)} == {1}  # the second is the last  # fmt: skip
