"""What a launch did, and how its faults read."""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aiter_mx.errors import SimulatorError
from aiter_mx.region import Region
from aiter_mx.sim import faults
from aiter_mx.sim.counts import FirstLoad

_VCC, _M0 = 106, 124
_DESCRIPTORS = ("that swizzles", "that adds the lane's number")


class CFault(ctypes.Structure):
    """``Fault`` of csrc/core.h."""

    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("kind", "instruction", "lane", "wave")),
        ("group", ctypes.c_uint32 * 3),
        *(
            (name, ctypes.c_uint32)
            for name in (
                "is_write", "size", "reg", "other_wave", "other_is_write", "is_scalar", "count",
            )
        ),
        ("address", ctypes.c_uint64),
        ("other_group", ctypes.c_uint64),
    ]  # fmt: skip


class CFindings(ctypes.Structure):
    """``Findings`` of csrc/core.h."""

    _fields_ = [("count", ctypes.c_uint32), ("found", CFault * 256)]


COUNTERS = (
    "bytes_read", "bytes_written", "scalar_bytes_read", "lds_bytes_read", "lds_bytes_written",
    "lds_conflicts", "scratch_bytes", "waits", "in_flight_bytes", "address_cycles",
    "latencies",
)  # fmt: skip


class CCounters(ctypes.Structure):
    """``Counters`` of csrc/core.h."""

    _fields_ = [(name, ctypes.c_uint64) for name in COUNTERS]


@dataclass(frozen=True)
class Finding:
    """What a check found in a launch that goes on after findings.

    Attributes:
        check: the rule's name in ``aiter_mx.sim.checks``.
        kind: its class, ``proven``, ``llvm`` or ``style``.
        instruction: as disassembled.
        address: of the instruction in the code object.
        count: times that it was found there.
        message: what the error would have said the first time.
    """

    check: str
    kind: str
    instruction: str
    address: int
    count: int
    message: str


@dataclass(frozen=True)
class Trace:
    """What the waves of a launch did, in their order, for ``aiter_mx.sim.timing``.

    Attributes:
        words: of 32 bits, as ``csrc/core.h`` has them.
        groups: workgroups that ran.
        waves: of a workgroup.
        texts: the kernel's instructions, as disassembled.
        block_sizes: instructions of each basic block, in the same order.
        region_bytes: sizes of the regions of memory, by the numbers that the words have.
        addresses: of the instructions, in the code object.
    """

    words: bytes
    groups: int
    waves: int
    texts: Sequence[str]
    block_sizes: Sequence[int]
    region_bytes: Sequence[int]
    addresses: Sequence[int] = ()


@dataclass(frozen=True)
class LaunchReport:
    """What one launch did.

    Attributes:
        kernel: its name.
        waves: waves run.
        seconds: wall time, translation apart.
        mnemonics: wave instructions executed, by mnemonic.
        mfma_passes: passes of the matrix unit, each of 4 cycles, by the operands' type, such as
            ``scaled fp8 x fp8``.
        bytes_read, bytes_written: vector memory traffic in bytes, every access counted.
        scalar_bytes_read: bytes of scalar loads, kernel arguments among them.
        lds_bytes_read, lds_bytes_written: LDS traffic in bytes, copies from memory included.
        lds_conflicts: where the options ask for it, times that the banks of LDS are gone over again
            because lanes served together want different dwords of one bank.
        address_cycles: likewise, cycles of the address units for vector memory: one for four
            neighbouring lanes in one line of 128 bytes, else one for each of them.
        latencies: strict mode: how many waits for vector memory follow each other, each for what
            was issued after the one before, in the workgroup's wave that has most of them, barriers
            taken into account; summed over workgroups.
        scratch_bytes: private memory traffic.
        waits: strict mode: waits for vector memory that had something to wait for.
        in_flight_bytes: strict mode: bytes of loads under way, summed over those waits.
        findings: what the checks found, in a launch that goes on after findings.
        group_bytes: bytes read by each workgroup, by region's name, where the options ask for it.
        first_load: likewise, what is executed ahead of the first load of 16 bytes a lane.
        unique_bytes_read, unique_bytes_written: distinct bytes of memory touched by vector and
            scalar instructions, where the options ask for the count.
        trace: what waves did, as ``aiter_mx.sim.timing.trace`` reads it, where the options ask.
    """

    kernel: str
    waves: int
    seconds: float
    mnemonics: Mapping[str, int] = field(default_factory=dict)
    mfma_passes: Mapping[str, int] = field(default_factory=dict)
    bytes_read: int = 0
    bytes_written: int = 0
    scalar_bytes_read: int = 0
    lds_bytes_read: int = 0
    lds_bytes_written: int = 0
    lds_conflicts: int = 0
    address_cycles: int = 0
    latencies: int = 0
    scratch_bytes: int = 0
    waits: int = 0
    in_flight_bytes: int = 0
    findings: tuple[Finding, ...] = ()
    group_bytes: Mapping[str, tuple[int, ...]] | None = None
    first_load: FirstLoad | None = None
    unique_bytes_read: int | None = None
    unique_bytes_written: int | None = None
    trace: Trace | None = field(default=None, repr=False)

    @property
    def instructions(self) -> int:
        """Wave instructions executed."""
        return sum(self.mnemonics.values())

    @property
    def by_class(self) -> dict[str, int]:
        """Wave instructions by class: salu, smem, valu, mfma, vmem, lds, branch, wait."""
        classes: Counter[str] = Counter()
        for name, count in self.mnemonics.items():
            classes[instruction_class(name)] += count
        return dict(classes)

    @property
    def mfma(self) -> dict[str, int]:
        """Matrix instructions executed, by mnemonic."""
        return {n: c for n, c in self.mnemonics.items() if instruction_class(n) == "mfma"}

    @property
    def mfma_macs(self) -> int:
        """Multiply-adds of the matrix instructions executed."""
        total = 0
        for name, count in self.mfma.items():
            if shape := re.search(r"_(\d+)x(\d+)x(\d+)(?:_(\d+)b)?", name):
                m, n, k, blocks = (int(x or 1) for x in shape.groups())
                total += m * n * k * blocks * count
        return total


def instruction_class(mnemonic: str) -> str:
    """The class that a mnemonic counts in."""
    if mnemonic.startswith(("v_mfma", "v_smfmac")):
        return "mfma"
    if mnemonic.startswith("v_"):
        return "valu"
    if mnemonic.startswith("ds_"):
        return "lds"
    if mnemonic.startswith(("s_load", "s_buffer_load", "s_store", "s_atomic")):
        return "smem"
    if mnemonic.startswith(("s_waitcnt", "s_nop", "s_sleep", "s_barrier")):
        return "wait"
    if mnemonic.startswith(("s_branch", "s_cbranch", "s_endpgm", "s_setpc", "s_swappc", "s_call")):
        return "branch"
    return "salu" if mnemonic.startswith("s_") else "vmem"


def sgpr_name(number: int) -> str:
    """The assembler's name of a scalar register."""
    special = {_VCC: "vcc_lo", _VCC + 1: "vcc_hi", _M0: "m0"}
    return special.get(number, f"s{number}")


def fault_error(
    fault: CFault,
    kernel: str,
    texts: Sequence[str],
    addresses: Sequence[int],
    regions: Sequence[Region],
    lds_bytes: int,
    scratch_bytes: int,
    row_name: str,
    hazards: Mapping[str, Sequence[str]],
) -> SimulatorError:
    """The error that a fault becomes."""
    number = fault.instruction & 0xFFFFFFFF
    kind, at = fault.kind, fault.address
    where = f"kernel {kernel}, workgroup {tuple(fault.group)}, wave {fault.wave}"
    if kind == 15:
        return faults.HazardError(
            f"{where}: {texts[number]!r} at {addresses[number]:#x} {hazards[str(number)][1]}"
        )
    if number < len(texts):
        where += f", lane {fault.lane}: {texts[number]!r} at {addresses[number]:#x}"
    verb = "writes" if fault.is_write else "reads"
    register = sgpr_name(fault.reg) if fault.is_scalar else row_name
    if kind in (1, 2):
        return faults.MemoryFault(
            f"{where} {verb} {fault.size} bytes at {at:#x}, {_place(at, fault.size, regions)}"
            + (
                f", which is not {'writable' if fault.is_write else 'readable'}"
                if kind == 2
                else ""
            )
        )
    if kind == 3:
        return faults.MemoryFault(
            f"{where} {verb} {fault.size} bytes at LDS address {at}, "
            f"but the workgroup has {lds_bytes} bytes of LDS"
        )
    if kind == 4:
        signed = at - (1 << 64) if at >> 63 else at
        return faults.MemoryFault(
            f"{where} {verb} {fault.size} bytes at scratch offset {signed}, "
            f"but a lane has {scratch_bytes} bytes of scratch"
        )
    if kind == 5:
        return faults.UninitializedRead(f"{where} reads {register}, which nothing has written")
    if kind == 6:
        return faults.PendingAccess(
            f"{where} reads {register} before the s_waitcnt that makes its load's result valid"
        )
    if kind == 7:
        return faults.PendingAccess(
            f"{where} overwrites {register} while a load into it is still under way"
        )
    if kind == 8:
        return faults.UninitializedRead(
            f"{where} reads the LDS byte at {at}, which nothing has written"
        )
    if kind == 9:
        return faults.PendingAccess(
            f"{where} {verb} the LDS byte at {at} before the s_waitcnt that ends the wave's own "
            "copy into it"
        )
    if kind == 18:
        return faults.RaceError(f"{where} copies to the LDS byte at {at}, {_other(fault)}")
    if kind == 19:
        return faults.UninitializedRead(f"{where} reads scc, which nothing has written")
    if kind == 20:
        return faults.UninitializedRead(
            f"{where} reads the scratch byte at {at}, which nothing has written"
        )
    if kind == 21:
        return faults.MemoryFault(
            f"{where} is an atomic of {fault.size} bytes at {at:#x}, which is no multiple of "
            f"{fault.size}"
        )
    if kind == 22:
        return faults.RaceError(
            f"{where} writes {fault.size} bytes at {at:#x}, {_place(at, fault.size, regions)}, "
            "where another of its lanes writes a different value"
        )
    if kind == 23:
        return faults.RaceError(
            f"{where} {verb} the byte at {at:#x}, {_place(at, 1, regions)}, which wave "
            f"{fault.other_wave} of workgroup number {fault.other_group} wrote with nothing in "
            "between that orders them"
        )
    if kind == 24:
        return faults.DeadlockError(
            f"{where} waits for ever: so do all {fault.count} workgroups that run, and "
            + (
                "all others have ended"
                if at == fault.other_group
                else f"the GPU has no room for {fault.other_group - at} more"
            )
        )
    if kind == 25:
        return faults.StaleRead(
            f"{where} reads the dword at {at:#x}, {_place(at, 4, regions)}, which wave "
            f"{fault.other_wave} of workgroup number {fault.other_group} wrote by "
            f"{texts[fault.size]!r} at {addresses[fault.size]:#x}: {_STALE[fault.reg]}"
        )
    if kind == 10:
        return faults.RaceError(f"{where} {verb} the LDS byte at {at}, {_other(fault)}")
    if kind == 11:
        return faults.StuckError(f"{where} jumps to {at:#x}, where no known code begins")
    if kind == 12:
        return faults.StuckError(
            f"kernel {kernel} did not end within the launch's step limit; it spins or loops for "
            "ever (AITER_MX_SIM_MAX_STEPS raises the limit)"
        )
    if kind == 16:
        return faults.MemoryFault(
            f"{where} reads vector register {fault.reg}, which M0 picks; the kernel has fewer"
        )
    if kind == 17:
        return faults.UnknownInstruction(
            f"{where} uses a buffer descriptor {_DESCRIPTORS[fault.reg]}, which is not simulated"
        )
    if kind == 14:
        return faults.TrapError(f"{where}: the kernel trapped, as a failed assertion does")
    return SimulatorError(f"the simulator has no memory for a workgroup of {kernel}")


_STALE = (
    "nothing says that the write is over, as s_waitcnt vmcnt after it and then a barrier or a flag"
    " would",
    "it is in the L2 of another XCD, and neither sc1 at the store nor buffer_wbl2 sc1 before the"
    " flag brings it to memory",
    "a cache may have kept what was there before, as no buffer_inv sc1 follows the flag and the"
    " load has no sc1",
    "the scalar cache may have kept what was there before, as no s_dcache_inv follows",
)
"""Why a read may be stale: csrc/coherence.h numbers the reasons."""


def _other(fault: CFault) -> str:
    who = fault.other_wave
    did = "wrote" if fault.other_is_write else "read"
    by = {32: "several waves", 33: "an atomic operation", 56: "several waves"}.get(who)
    if by is None:
        by = f"wave {who - 40 if who >= 40 else who % 16}" + (
            " (copying from memory)" if 16 <= who < 32 else ""
        )
    return f"which {by} {did} with no barrier, or no s_waitcnt before the barrier, in between"


def _place(address: int, size: int, regions: Sequence[Region]) -> str:
    """Where an address is relative to the nearest region."""
    if not regions:
        return "where no tensor is (the launch names none)"

    def distance(region: Region) -> int:
        end = region.address + region.size_bytes
        return max(region.address - address, address + size - end, 0)

    region = min(regions, key=distance)
    offset = address - region.address
    what = f"{region.name} ({region.size_bytes} bytes at {region.address:#x}, {region.access!r})"
    if offset >= 0 and offset + size <= region.size_bytes:
        return f"byte {offset} of {what}"
    if offset < 0:
        return f"{-offset} bytes before {what}"
    return f"{offset + size - region.size_bytes} bytes beyond the end of {what}"
