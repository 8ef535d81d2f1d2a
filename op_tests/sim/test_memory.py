"""Memory of the simulator: every width and kind, and every address checked."""

from __future__ import annotations

import re

import numpy as np
import pytest

from aiter_mx.errors import LaunchError
from aiter_mx.sim.faults import MemoryFault, UninitializedRead
from aiter_mx.sim.program import SimOptions
from op_tests.sim.tools import Array, launch, program


def words(seed: int, count: int) -> Array:
    return np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)


def test_every_width_of_load_and_store() -> None:
    data = words(1, 4096)
    out = np.zeros(1 << 17, np.uint8)
    launch(program("memory.cu"), "widths", 4, 256, [data, out], access="rw")
    raw = data.view(np.uint8)

    def part(start: int, dtype: type, count: int = 1024) -> Array:
        return out[start:].view(dtype)[:count]

    np.testing.assert_array_equal(out[:1024], raw[:1024] + np.uint8(1))
    np.testing.assert_array_equal(part(1024, np.uint16), raw.view(np.uint16)[:1024] + np.uint16(1))
    np.testing.assert_array_equal(part(4096, np.int32), raw[:1024].view(np.int8))
    np.testing.assert_array_equal(part(8192, np.int32), raw.view(np.int16)[:1024])
    np.testing.assert_array_equal(part(16384, np.uint64), raw.view(np.uint64)[:1024] * 3)
    three = data[:3072].reshape(-1, 3) + np.array([0, 5, 0], np.uint32)
    np.testing.assert_array_equal(part(32768, np.uint32, 3072).reshape(-1, 3), three)
    np.testing.assert_array_equal(part(65536, np.uint32, 4096), data ^ np.uint32(7))


def test_lds_of_every_width() -> None:
    data, out = words(2, 1024), np.zeros(3072, np.uint32)
    launch(program("memory.cu"), "through_lds", 1, 256, [data, out], access="rw")
    t = np.arange(256)
    np.testing.assert_array_equal(out[:256], data[t * 37 & 1023])
    np.testing.assert_array_equal(out[256:512], (data[255 - t] >> 3) & 255)
    pairs = data.reshape(-1, 2)
    np.testing.assert_array_equal(out[512:1024].reshape(-1, 2), pairs[(t + 100) & 511])
    np.testing.assert_array_equal(out[1024:1280], data[t] + data[t + 512])
    np.testing.assert_array_equal(out[2048:].reshape(-1, 4), data.reshape(-1, 4)[t ^ 70])


def test_buffers_end_where_their_descriptor_says_and_copies_land_in_lds() -> None:
    data, out = words(3, 256), np.full(3 * 256, 9, np.uint32)
    size = 4 * 256 - 20
    launch(program("memory.cu"), "buffers", 1, 64, [data, out, size], access="bw")
    bounded = np.where(np.arange(262) * 4 + 4 <= size, np.resize(data, 262), 0)
    np.testing.assert_array_equal(out[:256], bounded[2:258])
    reversed_rows = bounded[:256].reshape(64, 4)[::-1]
    want = data.reshape(64, 4)[np.arange(64) ^ 5]
    np.testing.assert_array_equal(out[512:].reshape(64, 4), want)
    np.testing.assert_array_equal(out[256:512].reshape(64, 4), reversed_rows)
    np.testing.assert_array_equal(data, words(3, 256))  # the store out of range did nothing


@pytest.mark.parametrize("schedule", ["random", "run-to-barrier"])
def test_atomics_of_many_workgroups_add_up(schedule: str) -> None:
    data, old = words(4, 2048), np.zeros(2048, np.uint32)
    sums, total = np.zeros(11, np.uint32), np.zeros(1, np.float32)
    wide = np.zeros(3, np.uint64)
    launch(program("memory.cu"), "atomics", 8, 256, [data, sums, total, old, wide],
           options=SimOptions(schedule=schedule, threads=2))  # fmt: skip
    np.testing.assert_array_equal(sums[:8], np.bincount(data & 7, minlength=8))
    assert sums[8] == data.max() and sums[9] == np.bitwise_xor.reduce(data)
    assert sums[10] == (data & 3).sum() and total[0] == 1024
    assert wide[0] == data.astype(np.uint64).sum()
    assert wide[1] == 2048 % 1000 and wide[2] == -2048 % 1000  # from 0 to 999 and round
    for value in range(8):  # each atomic saw another old value
        np.testing.assert_array_equal(np.sort(old[data & 7 == value]), np.arange(sums[value]))


@pytest.mark.parametrize("flags", [("-O3",), ("-O1",)])
def test_scratch_is_private_to_a_lane(flags: tuple[str, ...]) -> None:
    data, out = words(5, 68), np.zeros(64, np.uint32)
    report = launch(program("memory.cu", *flags), "scratch", 1, 64, [data, out], access="rw")
    picks = np.array([data[i : i + 64] % 40 + 1 for i in range(5)], np.uint32)
    np.testing.assert_array_equal(out, (data[:64] * picks).sum(axis=0, dtype=np.uint32))
    assert report.scratch_bytes == 64 * 4 * 45


def test_functions_are_called_and_constants_read() -> None:
    data, out = words(6, 64), np.zeros(64, np.uint32)
    launch(program("memory.cu"), "called", 1, 64, [data, out], access="rw")
    primes = np.array([2, 3, 5, 7, 11, 13, 17, 19], np.uint32)
    once = data * primes[data & 7] + (data >> 5)
    np.testing.assert_array_equal(out, once * primes[data >> 3 & 7] + (once >> 5))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("offset", "lane", "place"),
    [(1, 63, "4 bytes beyond the end of argument 0"), (-2, 0, "8 bytes before argument 0")],
)
def test_an_address_outside_every_tensor_is_named(
    offset: int, lane: int, place: str, strict: bool
) -> None:
    memory = np.zeros(4096, np.uint32)
    out, data = memory[1000:1064], words(7, 64)
    with pytest.raises(MemoryFault) as caught:
        launch(program("memory.cu"), "writes_at", 1, 64, [out, data, offset], access="wr",
               options=SimOptions(strict=strict))  # fmt: skip
    message = str(caught.value)
    assert f"kernel writes_at, workgroup (0, 0, 0), wave 0, lane {lane}: 'global_store" in message
    assert f"{out.ctypes.data + 4 * (lane + offset):#x}, {place}" in message
    assert not memory[:1000].any() and not memory[1064:].any()


def test_writing_what_may_only_be_read_is_an_error() -> None:
    out, data = words(8, 64), words(9, 64)
    with pytest.raises(MemoryFault, match=r"writes 4 bytes .* which is not writable"):
        launch(program("memory.cu"), "writes_at", 1, 64, [out, data, 0], access="rr")
    with pytest.raises(MemoryFault, match=r"reads 4 bytes .* which is not readable"):
        launch(program("memory.cu"), "writes_at", 1, 64, [out, data, 0], access="ww")


def test_lds_has_an_end_and_starts_unset() -> None:
    out = np.zeros(64, np.uint32)
    with pytest.raises(MemoryFault, match=r"at LDS address 256, but .* 256 bytes of LDS"):
        launch(program("memory.cu"), "lds_at", 1, 64, [out, 1], access="w")
    with pytest.raises(UninitializedRead, match=r"reads the LDS byte at 0, which nothing"):
        launch(program("memory.cu"), "lds_at", 1, 64, [out, 16], access="w", shared_bytes=64)


def test_geometry_and_arguments_are_checked_before_anything_runs() -> None:
    loaded, out = program("memory.cu"), np.zeros(64, np.uint32)
    with pytest.raises(LaunchError, match="at most 64 lanes"):
        launch(loaded, "lds_at", 1, 128, [out, 0])
    with pytest.raises(LaunchError, match=r"wants 164096 bytes of LDS; a workgroup has 163840"):
        launch(loaded, "lds_at", 1, 64, [out, 0], shared_bytes=160 * 1024)
    with pytest.raises(LaunchError, match="takes 12 bytes of arguments, got 8"):
        launch(loaded, "lds_at", 1, 64, [out])
    with pytest.raises(LaunchError, match=re.escape("no kernel 'lds'")):
        launch(loaded, "lds", 1, 64, [out, 0])
    with pytest.raises(LaunchError, match="must be positive"):
        launch(loaded, "lds_at", 0, 64, [out, 0])
