"""What a launch's checks found, merged from its threads and named by rule."""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

from aiter_mx.errors import SimulatorError
from aiter_mx.sim import checks
from aiter_mx.sim.idle import Idle
from aiter_mx.sim.report import CFault, CFindings, Finding
from aiter_mx.sim.run import Result, Translated

_HAZARD = 15  # fault of csrc/core.h
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python has the name from 3.13 on
_UNTOUCHED_IS_FREE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE


class Shadow:
    """A word for each dword that may be written, with pointers to those of each piece.

    The word before a piece's first says whether anything of it has been written.
    """

    def __init__(self, pieces: Sequence[tuple[int, int, bool, bool]]) -> None:
        self.pointers = (ctypes.c_void_p * max(len(pieces), 1))()
        self._kept = []
        for i, (begin, end, _, writable) in enumerate(pieces):
            if writable:
                words = mmap.mmap(-1, 8 * ((end - begin) // 4 + 4), flags=_UNTOUCHED_IS_FREE)
                self._kept.append(words)
                self.pointers[i] = ctypes.addressof(ctypes.c_char.from_buffer(words)) + 8


def check_of(fault: CFault, hazards: Mapping[str, Sequence[str]]) -> checks.Check | None:
    """The rule that a fault breaks, None where it is none of the rules."""
    if fault.kind == _HAZARD:
        return checks.CHECKS[hazards[str(fault.instruction)][0]]
    return checks.BY_FAULT.get(fault.kind)


def named(error: SimulatorError, check: checks.Check | None) -> SimulatorError:
    """The error with its rule, for those who switch rules."""
    if check:
        error.check, error.kind = check.name, check.kind
    return error


def merged_findings(
    lists: Sequence[CFindings],
    hazards: Mapping[str, Sequence[str]],
    texts: Sequence[str],
    addresses: Sequence[int],
    error: Callable[[CFault], SimulatorError],
) -> tuple[Finding, ...]:
    """One finding a rule and instruction, by address."""
    merged: dict[tuple[str, int], Finding] = {}
    for each in lists:
        for fault in each.found[: each.count]:
            check = check_of(fault, hazards)
            assert check
            key = check.name, fault.instruction
            before = merged.get(key)
            merged[key] = Finding(
                check.name,
                check.kind,
                texts[fault.instruction],
                addresses[fault.instruction],
                fault.count + (before.count if before else 0),
                before.message if before else str(error(fault)),
            )
    return tuple(sorted(merged.values(), key=lambda found: (found.address, found.check)))


def idle_findings(
    idle: Mapping[int, Idle], kernel: str, translated: Translated, results: Sequence[Result]
) -> tuple[Finding, ...]:
    """Of the instructions that do nothing, those that waves came to."""
    blocks = {i: bisect_right(translated.leaders, i) - 1 for i in idle}
    times = {i: sum(result.blocks[block] for result in results) for i, block in blocks.items()}
    return tuple(
        Finding(
            each.rule,
            checks.STYLE,
            translated.texts[i],
            translated.addresses[i],
            times[i],
            f"kernel {kernel}: {translated.texts[i]!r} at {translated.addresses[i]:#x} {each.why}",
        )
        for i, each in sorted(idle.items())
        if times[i]
    )
