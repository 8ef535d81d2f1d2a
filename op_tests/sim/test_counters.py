"""What the simulator counts: bank conflicts and matrix passes against independent definitions."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from aiter_mx.sim.program import SimOptions
from op_tests.sim.tools import Array, launch, program

COUNTED = SimOptions(strict=False, count_conflicts=True)
LANES = list(range(64))
# Lanes served together, as measured on MI350 (docs/simulator.md names the sources).
READ_B128 = [
    [0, 1, 2, 3, 12, 13, 14, 15, 20, 21, 22, 23, 24, 25, 26, 27],
    [4, 5, 6, 7, 8, 9, 10, 11, 16, 17, 18, 19, 28, 29, 30, 31],
    [32, 33, 34, 35, 44, 45, 46, 47, 52, 53, 54, 55, 56, 57, 58, 59],
    [36, 37, 38, 39, 40, 41, 42, 43, 48, 49, 50, 51, 60, 61, 62, 63],
]
KINDS = {  # dwords, banks, phases
    0: (1, 64, [LANES]),
    1: (1, 64, [LANES]),
    2: (2, 64, [LANES[:32], LANES[32:]]),
    3: (4, 64, READ_B128),
    4: (1, 32, [LANES[:32], LANES[32:]]),
    5: (2, 32, [LANES[i : i + 16] for i in range(0, 64, 16)]),
    6: (4, 32, [LANES[i : i + 8] for i in range(0, 64, 8)]),
}


def conflicts(kind: int, addresses: Array) -> int:
    out = np.zeros(64, np.uint32)
    report = launch(program("memory.cu"), "one_access", 1, 64,
                    [addresses.astype(np.uint32), out, kind], access="rw", shared_bytes=1 << 16,
                    options=COUNTED)  # fmt: skip
    return report.lds_conflicts


def expected(kind: int, addresses: Array) -> int:
    dwords, banks, phases = KINDS[kind]
    extra = 0
    for phase in phases:
        wanted: dict[int, set[int]] = defaultdict(set)
        for lane in phase:
            for word in range(addresses[lane] // 4, addresses[lane] // 4 + dwords):
                wanted[word % banks].add(word)
        extra += max(map(len, wanted.values())) - 1
    return extra


@pytest.mark.parametrize("kind", KINDS)
def test_bank_conflicts_of_random_addresses_are_those_of_the_published_phases(kind: int) -> None:
    generator = np.random.default_rng(kind)
    for unit in (1, 16, 64, 256):  # in accesses: from few conflicts to one bank for all
        size = 4 * KINDS[kind][0]
        addresses = generator.integers(0, (1 << 16) // (size * unit), 64) * size * unit
        want = expected(kind, addresses)
        assert conflicts(kind, addresses) == want
        assert unit < 16 or want > 0


@pytest.mark.parametrize("kind", KINDS)
def test_neighbouring_lanes_and_broadcasts_have_no_bank_conflict(kind: int) -> None:
    size = 4 * KINDS[kind][0]
    assert conflicts(kind, np.arange(64) * size) == 0
    assert conflicts(kind, np.full(64, 48)) == 0
    assert conflicts(kind, np.arange(64) * 256) > 0


@pytest.mark.parametrize(("kind", "dwords"), [(7, 1), (8, 2)])
def test_atomics_of_lds_take_turns_at_a_dword(kind: int, dwords: int) -> None:
    generator = np.random.default_rng(kind)
    addresses = 4 * dwords * generator.integers(0, 4096, 64)
    extra = 0
    for first in range(0, 64, 32 // dwords):
        lanes = addresses[first : first + 32 // dwords]
        extra += np.bincount(lanes // (4 * dwords) % (32 // dwords)).max() - 1
    assert conflicts(kind, addresses) == extra > 0
    assert conflicts(kind, np.arange(64) * 4 * dwords) == 0
    assert conflicts(kind, np.full(64, 48)) == 64 - 2 * dwords


def test_conflicts_are_not_counted_unasked() -> None:
    out = np.zeros(64, np.uint32)
    addresses = np.arange(0, 1 << 14, 256, dtype=np.uint32)
    report = launch(program("memory.cu"), "one_access", 1, 64, [addresses, out, 1], access="rw",
                    shared_bytes=1 << 16, options=SimOptions(strict=False))  # fmt: skip
    assert report.lds_conflicts == 0


STRIDED = """
KERNEL(64) strided(const u32* in, u32* out, int bytes) {
    const char* from = (const char*)in + lane_id() * bytes;
    if (lane_id() < 50)
        out[lane_id()] = *(const u32*)from;
}
"""


def in_whole_lines(dwords: int) -> Array:
    memory = np.zeros(dwords + 32, np.uint32)
    return memory[-memory.ctypes.data % 128 // 4 :][:dwords]


@pytest.mark.parametrize("stride", [4, 16, 32, 36, 128, 260])
def test_neighbours_in_one_line_share_a_cycle_of_the_address_unit(stride: int) -> None:
    data, out = in_whole_lines(64 * 260 // 4), in_whole_lines(64)
    lines = [[lane * stride // 128 for lane in range(i, min(i + 4, 50))] for i in range(0, 50, 4)]
    loading = sum(1 if len(set(four)) == 1 else len(four) for four in lines)
    report = launch(program(STRIDED), "strided", 1, 64, [data, out, stride], access="rw",
                    options=SimOptions(count_conflicts=True))  # fmt: skip
    assert report.address_cycles == loading + len(lines)  # what is stored is in whole lines


MFMA = """
KERNEL(64) passes(const u32* in, u32* out) {
    i32x8 a;
    for (int i = 0; i < 8; i++)
        a[i] = in[lane_id() * 8 + i];
    f32x4 c = {};
    f32x16 d = {};
    c = __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(a, a, c, 0, 0, 0, a[0], 0, a[1]);
    c = __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(a, a, c, 4, 4, 0, a[0], 0, a[1]);
    c = __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(a, a, c, 0, 4, 0, a[0], 0, a[1]);
    d = __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(a, a, d, 0, 0, 0, a[0], 0, a[1]);
    d = __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(a, a, d, 0, 0, 0, a[0], 0, a[1]);
    c = __builtin_amdgcn_mfma_f32_16x16x4f32((float)a[0], (float)a[1], c, 0, 0, 0);
    c = __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(((const long*)in)[0], ((const long*)in)[1], c, 0,
                                                   0, 0);
    d = __builtin_amdgcn_mfma_f32_16x16x1f32((float)a[0], (float)a[1], d, 0, 0, 0);
    out[lane_id()] = __builtin_bit_cast(u32, c[0] + d[0] + d[15]);
}
"""


def test_matrix_passes_are_counted_by_type() -> None:
    data, out = (
        np.random.default_rng(1).integers(0, 2**32, 512, dtype=np.uint32),
        np.zeros(64, "u4"),
    )
    report = launch(program(MFMA), "passes", 3, 64, [data, out], access="rw")
    assert report.mfma_passes == {
        "scaled fp8 x fp8": 3 * (8 + 16 + 16),
        "scaled fp4 x fp4": 3 * 4,
        "scaled fp8 x fp4": 3 * 8,
        "f32": 3 * (8 + 8),
        "fp8 x fp8": 3 * 4,
    }


CHAINS = """
KERNEL(256) chains(const u32* in, u32* out, int links) {
    SHARED u32 last[256];
    int thread = lane_id();
    u32 at = in[thread % 64], beside = in[thread % 64 + 64];
    if (thread / 64 == 1)
        for (int i = 1; i < links; i++)
            at = in[at];
    last[thread] = at + beside;
    barrier();
    out[thread] = in[last[thread ^ 64] & 127];
}
"""


def test_latencies_are_those_of_the_longest_chain_of_loads() -> None:
    data = np.random.default_rng(4).integers(0, 64, 128, dtype=np.uint32)
    for links in (1, 2, 5):
        out = np.zeros(256, np.uint32)
        for schedule in ("random", "round-robin", "run-to-barrier"):
            report = launch(program(CHAINS), "chains", 3, 256, [data, out, links], access="rw",
                            options=SimOptions(schedule=schedule))  # fmt: skip
            assert report.latencies == 3 * (links + 1)  # after the barrier all waves have waited


LATE = r"""
KERNEL(64) late(const u32* small, const u32* wide, u32* out) {
    asm volatile("s_nop 0\ns_nop 0\ns_nop 0");
    for (u32 i = 0; i <= group_id(); ++i) {
        u32x4 x;
        asm volatile("global_load_dwordx4 %0, %1, off\ns_waitcnt vmcnt(0)"
                     : "=v"(x) : "v"(wide + 4 * (64 * i + lane_id())));
        out[group_id() * 64 + lane_id()] = x[0] + small[lane_id()];
    }
}
"""


def test_bytes_are_counted_by_workgroup_and_tensor_and_so_is_what_precedes_the_first_load() -> None:
    small, wide, out = (np.zeros(n, np.uint32) for n in (64, 3 * 256, 3 * 64))
    found = [
        launch(program(source), "late", 3, 64, [small, wide, out],
               options=SimOptions(count_groups=True, threads=1))
        for source in (LATE, LATE.replace(r"s_nop 0\n", ""))
    ]  # fmt: skip
    report, other = found
    assert report.group_bytes is not None
    of_each = [report.group_bytes[name] for name in sorted(report.group_bytes)]
    assert (1024, 2048, 3072) in of_each  # of the wide loads
    assert sum(map(sum, of_each)) == report.bytes_read + report.scalar_bytes_read
    assert report.first_load is not None
    assert other.first_load is not None
    assert 3 < report.first_load.instructions < report.instructions / 3
    assert report.first_load.instructions == other.first_load.instructions + 2
    assert report.first_load.waits == 1  # for the arguments


def test_a_kernel_without_wide_loads_has_no_first_one() -> None:
    data, out = np.zeros(64, np.uint32), np.zeros(64, np.uint32)
    options = SimOptions(count_groups=True)
    report = launch(program(STRIDED), "strided", 1, 64, [data, out, 4], options=options)
    assert report.first_load is None
    assert report.group_bytes is not None
