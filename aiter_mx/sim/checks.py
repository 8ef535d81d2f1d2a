"""What strict mode checks: each rule by name, with its class and how its findings read.

A finding is *proven* where the ISA manual's rules are broken, or what is computed depends on the
order in which the hardware happens to do things. It is *llvm* where LLVM leaves more room than code
that ships, and works, does: hand-written kernels break each of these rules. It is *style* where an
instruction does nothing, on any path; those rules are off unless they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aiter_mx.errors import SimulatorError
from aiter_mx.sim import faults

PROVEN, LLVM, STYLE = "proven", "llvm", "style"
CLASSES = (PROVEN, LLVM, STYLE)
DEFAULT = (PROVEN, LLVM)


@dataclass(frozen=True)
class Check:
    """A rule.

    Attributes:
        name: by which it is switched.
        kind: ``proven``, ``llvm`` or ``style``.
        error: what it raises.
        fault: its number in csrc/core.h; None for wait states, whose rules share one, and for
            style, which is read from the code.
    """

    name: str
    kind: str
    error: type[SimulatorError]
    fault: int | None = None


_ACCESSES = (
    Check("unset-register", PROVEN, faults.UninitializedRead, 5),
    Check("early-register", PROVEN, faults.PendingAccess, 6),
    Check("overwritten-load", PROVEN, faults.PendingAccess, 7),
    Check("unset-lds", PROVEN, faults.UninitializedRead, 8),
    Check("early-lds", PROVEN, faults.PendingAccess, 9),
    Check("lds-race", PROVEN, faults.RaceError, 10),
    Check("lds-copy-over-reads", LLVM, faults.RaceError, 18),
    Check("unset-scc", PROVEN, faults.UninitializedRead, 19),
    Check("unset-scratch", PROVEN, faults.UninitializedRead, 20),
    Check("misaligned-atomic", PROVEN, faults.MemoryFault, 21),
    Check("lanes-differ", PROVEN, faults.RaceError, 22),
    Check("global-race", PROVEN, faults.RaceError, 23),
    Check("stale-read", PROVEN, faults.StaleRead, 25),
)
_PROVEN_STATES = (
    "mfma-result", "mfma-result-as-c", "mfma-source", "mfma-c-overwritten", "dot-result",
    "part-result", "lane-source", "transcendental-result", "lane-select", "vcc-of-div-fmas",
    "scalar-result-to-memory", "exec", "mode",
)  # fmt: skip
_LLVM_STATES = (
    "m0-of-copy", "scalar-result", "dpp-source", "swapped-source", "mfma-write-back",
    "stored-data-overwritten", "mfma-between",
)  # fmt: skip
_STATES = (
    *(Check(name, PROVEN, faults.HazardError) for name in _PROVEN_STATES),
    *(Check(name, LLVM, faults.HazardError) for name in _LLVM_STATES),
)
_IDLE = ("idle-nop", "idle-wait", "unread-m0", "unread-result")
_STYLE = tuple(Check(name, STYLE, faults.IdleInstruction) for name in _IDLE)
STYLE_RULES = frozenset(_IDLE)
CHECKS = {check.name: check for check in (*_ACCESSES, *_STATES, *_STYLE)}
BY_FAULT = {check.fault: check for check in _ACCESSES}
# The bit of a launch's mask: an access's fault number, a wait-state rule's place after those.
BITS = {check.name: check.fault or 0 for check in _ACCESSES} | {
    check.name: 32 + i for i, check in enumerate(_STATES)
}


def selected(names: Iterable[str]) -> frozenset[str]:
    """The rules that a list of names and classes switches on.

    ``all`` is every rule, and a name or class after a minus sign is taken away; the list is read
    from left to right, and begins with all but the style rules if it begins with a minus sign.

    Raises:
        ValueError: a name is none of the rules or classes.
    """
    chosen: set[str] = set()
    for i, name in enumerate(names):
        bare = name.removeprefix("-")
        of = {n for n, check in CHECKS.items() if bare in ("all", check.kind, n)}
        if not of:
            raise ValueError(
                f"checks must name rules ({', '.join(CHECKS)}) or classes ({', '.join(CLASSES)}, "
                f"all), got {name!r}"
            )
        if not name.startswith("-"):
            chosen |= of
        else:
            chosen = (set(selected(DEFAULT)) if not i else chosen) - of
    return frozenset(chosen)


def mask(names: Iterable[str]) -> int:
    """The rules as bits of ``Launch.checks``; those of style have none."""
    return sum(1 << BITS[name] for name in selected(names) if name in BITS)
