"""Wait states that software owes the hardware: which instruction comes too soon after another.

A wait state is an instruction in between, or each of the N + 1 of an ``s_nop N``. What must be kept
apart, by how much, and where that is written: docs/simulator.md. The check follows all branches, as
compilers do when they insert ``s_nop``; calls and computed jumps it does not follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from aiter_mx.sim.disasm import Instruction
from aiter_mx.sim.effects import EXEC, M0, VCC, Effect, effect_of, row_name
from aiter_mx.sim.isa.salu import BRANCHES

_FARTHEST = 20  # wait states, of all rules
# Passes of a matrix instruction that reads C: wait states until C may be written.
_READING_C = {2: 1, 4: 3, 8: 7, 16: 15}
_ENDS = ("s_branch", "s_endpgm", "s_setpc_b64", "s_swappc_b64", "s_call_b64")

# How a register was touched (written, read as C, stored, written by a scalar instruction), and it.
_Key: TypeAlias = tuple[str, Any]
# The instructions that did, on any path here, and the wait states counted when each had issued.
_State: TypeAlias = dict[_Key, dict[int, int]]


@dataclass(frozen=True)
class Hazard:
    """An instruction that comes too soon after another.

    Attributes:
        producer: number of the other one.
        needed, found: wait states between them.
        action: what it does too soon, as in ``reads v3``.
    """

    producer: int
    needed: int
    found: int
    action: str

    def describe(self, instructions: Sequence[Instruction]) -> str:
        """The hazard as the end of a sentence that begins with the instruction."""
        first, missing = instructions[self.producer], self.needed - self.found
        return (
            f"{self.action} {missing} wait state{'s' * (missing > 1)} too soon after "
            f"{first.text!r} at {first.address:#x}: {self.needed} must lie between them, and "
            f"{self.found} {'does' if self.found == 1 else 'do'}"
        )


def find_hazards(instructions: Sequence[Instruction], leaders: Sequence[int]) -> dict[int, Hazard]:
    """The worst hazard of each instruction that has one, by number.

    Args:
        instructions: of a kernel, and of the functions that it calls.
        leaders: numbers of those that begin a basic block.
    """
    return _Checker(instructions, leaders).run()


# Each rule: how many wait states the second instruction must leave after the first one, which wrote
# the register (or did what the key of the state says).
def _to_read(first: Effect, second: Effect, row: int) -> int:
    as_c = row in second.accumulator
    if first.is_matrix:
        if not (second.is_matrix and as_c):
            return _result(first)
        if first.writes == second.accumulator:
            return 2 if first.passes == 2 else 0
        if not first.is_xdl:
            return 0 if second.is_xdl else first.passes
        return first.passes + (2 if second.is_xdl or first.passes != 2 else 1)
    needed = 0
    if first.is_dot and not second.is_matrix:
        needed = 0 if first.name == second.name and as_c else 3
    if second.is_dpp or second.swaps_rows or (second.is_matrix and not first.is_dot):
        needed = max(needed, 2)
    if second.is_valu and (
        first.places_part
        or second.name.startswith("v_read")
        or (first.is_transcendental and not second.is_transcendental)
    ):
        needed = max(needed, 1)
    return needed


def _to_overwrite(first: Effect, second: Effect, row: int) -> int:
    if first.is_matrix:
        return 0 if second.is_matrix else _result(first)
    if first.is_dot and first.name != second.name and not second.is_matrix:
        return 3
    return 1 if first.places_part and second.is_valu else 0


def _to_overwrite_c(first: Effect, second: Effect, row: int) -> int:
    return 0 if second.is_matrix else _READING_C[first.passes]


def _to_overwrite_stored(first: Effect, second: Effect, row: int) -> int:
    return 1 if first.has_scalar_offset else 2


def _result(first: Effect) -> int:
    """After a matrix instruction, until any other unit may touch its result."""
    return first.passes + (2 if not first.is_xdl else 3 if first.passes == 2 else 4)


def _after(states: int) -> Callable[[Effect, Effect, int], int]:
    return lambda first, second, register: states


_AFTER = [_after(states) for states in range(6)]


def _uses(second: Effect) -> Iterator[tuple[_Key, Callable[[Effect, Effect, int], int], str]]:
    """What an instruction uses: the key, the rule for it, and how to say it."""
    for row in second.reads:
        yield ("written", row), _to_read, "reads"
    for row in second.writes:
        yield ("written", row), _to_overwrite, "overwrites"
        yield ("read as C", row), _to_overwrite_c, "overwrites"
        if second.is_valu:
            yield ("stored", row), _to_overwrite_stored, "overwrites"
    for register in second.scalar_reads:
        states = 2 if second.is_valu else 5 if second.unit == "vmem" else 0
        if register in second.lane_select or second.name.startswith("v_div_fmas"):
            states = 4
        if states:
            yield ("scalar", register), _AFTER[states], "reads"
    if second.is_dpp or second.is_matrix or second.swaps_rows or second.moves_lane:
        yield ("scalar", EXEC), _AFTER[5 if second.is_dpp else 4], "runs under"
    if second.copies_to_lds:
        yield ("moved", M0), _AFTER[1], "reads"
    if second.mode_register:
        yield ("mode", second.mode_register), _AFTER[2], "uses"


def _remember(state: _State, effect: Effect, i: int, now: int) -> None:
    """Enter what an instruction touched, in place of what touched it before."""
    for row in effect.writes:
        state["written", row] = {i: now} if effect.is_valu else {}
    if effect.is_xdl:
        for row in effect.accumulator:
            state["read as C", row] = {i: now}
    for row in effect.stores:
        state["stored", row] = {i: now}
    for register in effect.scalar_writes:
        state["scalar" if effect.is_valu else "moved", register] = {i: now}
    if effect.name.startswith("s_setreg"):
        state["mode", effect.mode_register] = {i: now}


def _register_name(key: _Key) -> str:
    kind, register = key
    if kind == "mode":
        return str(register)
    if kind not in ("scalar", "moved"):
        return row_name(register)
    return {EXEC: "exec", EXEC + 1: "exec", VCC: "vcc", VCC + 1: "vcc", M0: "m0"}.get(
        register, f"s{register}"
    )


def _join(into: _State, other: _State) -> bool:
    """Add another path's state; whether that changed anything."""
    changed = False
    for key, at in other.items():
        known = into.setdefault(key, {})
        for producer, since in at.items():
            if since > known.get(producer, since - 1):
                known[producer] = since
                changed = True
    return changed


def _successors(
    instructions: Sequence[Instruction], leaders: Sequence[int]
) -> dict[int, list[int]]:
    """Blocks that may follow each block, by their first instructions."""
    number = {instructions[i].address: i for i in leaders}
    found = {}
    for first, end in zip(leaders, [*leaders[1:], len(instructions)], strict=True):
        last = instructions[end - 1]
        targets = [last.branch_target] if last.mnemonic in BRANCHES else []
        if last.mnemonic not in _ENDS:
            targets.append(last.end)
        found[first] = [number[address] for address in targets if address in number]
    return found


class _Checker:
    def __init__(self, instructions: Sequence[Instruction], leaders: Sequence[int]) -> None:
        by_text: dict[str, Effect] = {}
        for ins in instructions:
            if ins.text not in by_text:
                by_text[ins.text] = effect_of(ins)
        self.effects = [by_text[ins.text] for ins in instructions]
        self.ends = dict(zip(leaders, [*leaders[1:], len(instructions)], strict=True))
        self.successors = _successors(instructions, leaders)
        self.before: dict[int, _State] = {first: {} for first in leaders}
        self.found: dict[int, Hazard] = {}

    def run(self) -> dict[int, Hazard]:
        waiting = dict.fromkeys(self.ends)
        while waiting:
            first = next(iter(waiting))
            del waiting[first]
            after = self._block(first)
            for successor in self.successors[first]:
                if _join(self.before[successor], after):
                    waiting[successor] = None
        return self.found

    def _block(self, first: int) -> _State:
        """What later blocks must know, with the wait states counted from the block's end."""
        state = {key: dict(at) for key, at in self.before[first].items()}
        now = 0
        for i in range(first, self.ends[first]):
            effect = self.effects[i]
            for key, rule, action in _uses(effect):
                for producer, since in state.get(key, {}).items():
                    needed = rule(self.effects[producer], effect, key[1])
                    if needed > now - since:
                        what = f"{action} {_register_name(key)}"
                        self._report(i, Hazard(producer, needed, now - since, what))
            _remember(state, effect, i, now + 1)
            now += effect.states
        return {
            key: kept
            for key, at in state.items()
            if (kept := {p: since - now for p, since in at.items() if now - since < _FARTHEST})
        }

    def _report(self, i: int, hazard: Hazard) -> None:
        known = self.found.get(i)
        if not known or hazard.needed - hazard.found > known.needed - known.found:
            self.found[i] = hazard
