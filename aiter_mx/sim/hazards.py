"""Wait states that software owes the hardware: which instruction comes too soon after another.

A wait state is an instruction in between, or each of the N + 1 of an ``s_nop N``; a matrix
instruction waits for the passes of the one before it, which count too. What must be kept
apart, by how much, and where that is written: docs/simulator.md. The check follows all branches, as
compilers do when they insert ``s_nop``; calls and computed jumps it does not follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from aiter_mx.sim.disasm import Instruction
from aiter_mx.sim.effects import EXEC, M0, VCC, Effect, effects_of, row_name
from aiter_mx.sim.isa.salu import BRANCHES

_FARTHEST = 20  # wait states, of all rules
_MOST_STATES = 16  # of an s_nop
# Passes of a matrix instruction that reads C: wait states until C may be written.
_READING_C = {2: 1, 4: 3, 8: 7, 16: 15}
_ENDS = ("s_branch", "s_endpgm", "s_setpc_b64", "s_swappc_b64", "s_call_b64")

# How a register was touched (written, read as C, stored, written by a scalar instruction), and it.
_Key: TypeAlias = tuple[str, Any]
_NOPS: _Key = ("nop", None)
# The instructions that did, on any path here, and the wait states counted when each had issued.
_State: TypeAlias = dict[_Key, dict[int, int]]


@dataclass(frozen=True)
class Hazard:
    """An instruction that comes too soon after another.

    Attributes:
        producer: number of the other one.
        needed, found: wait states between them.
        action: what it does too soon, as in ``reads v3``.
        rule: name in ``aiter_mx.sim.checks``.
    """

    producer: int
    needed: int
    found: int
    action: str
    rule: str

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
    checker = _Checker(instructions, leaders)
    if not any(effect.is_matrix for effect in checker.effects):
        return checker.run()
    # LLVM counts a matrix instruction in between as one state, hardware as those that it waits.
    cautious = {
        i: replace(hazard, rule="mfma-between")
        for i, hazard in _Checker(instructions, leaders, mfma_waits=False).run().items()
    }
    return cautious | checker.run()


def needless_nops(instructions: Sequence[Instruction], leaders: Sequence[int]) -> set[int]:
    """Numbers of the ``s_nop`` that no rule asks for, be matrix instructions counted or not."""
    nops = {i for i, ins in enumerate(instructions) if ins.mnemonic == "s_nop"}
    for mfma_waits in (True, False) if nops else ():
        checker = _Checker(instructions, leaders, mfma_waits, nops)
        checker.run()
        nops -= checker.asked_for
    return nops


# Wait states that the second instruction must leave after the first one, which wrote the register
# (or did what the key of the state says), and the rule's name in checks.py.
_Need: TypeAlias = tuple[int, str]
_Rule: TypeAlias = Callable[[Effect, Effect, int], _Need]
_NONE: _Need = (0, "")


def _to_read(first: Effect, second: Effect, row: int) -> _Need:
    as_c = row in second.accumulator
    if first.is_matrix:
        if second.is_matrix and as_c:
            return _to_read_as_c(first, second), "mfma-result-as-c"
        return _result(first), "mfma-write-back"
    needs = [_NONE]
    if first.is_dot and not second.is_matrix and not (first.name == second.name and as_c):
        needs.append((3, "dot-result"))
    if row in second.crossing:
        needs.append((2, "dpp-source" if second.is_dpp else "swapped-source"))
    if second.is_matrix and not first.is_dot:
        needs.append((2, "mfma-source"))
    if second.is_valu:
        if first.places_part:
            needs.append((1, "part-result"))
        if second.name.startswith("v_read"):
            needs.append((1, "lane-source"))
        if first.is_transcendental and not second.is_transcendental:
            needs.append((1, "transcendental-result"))
    return max(needs)


def _to_read_as_c(first: Effect, second: Effect) -> int:
    if first.writes == second.accumulator:
        return 2 if first.passes == 2 else 0
    if not first.is_xdl:
        return 0 if second.is_xdl else first.passes
    return first.passes + (2 if second.is_xdl or first.passes != 2 else 1)


def _to_overwrite(first: Effect, second: Effect, row: int) -> _Need:
    if first.is_matrix:
        return _NONE if second.is_matrix else (_result(first), "mfma-write-back")
    if first.is_dot and first.name != second.name and not second.is_matrix:
        return 3, "dot-result"
    return (1, "part-result") if first.places_part and second.is_valu else _NONE


def _to_overwrite_c(first: Effect, second: Effect, row: int) -> _Need:
    return _NONE if second.is_matrix else (_READING_C[first.passes], "mfma-c-overwritten")


def _to_overwrite_stored(first: Effect, second: Effect, row: int) -> _Need:
    return 1 if first.has_scalar_offset else 2, "stored-data-overwritten"


def _result(first: Effect) -> int:
    """After a matrix instruction, until any other unit may touch its result."""
    return first.passes + (2 if not first.is_xdl else 3 if first.passes == 2 else 4)


def _after(states: int, name: str) -> _Rule:
    return lambda first, second, register: (states, name)


def _uses(second: Effect) -> Iterator[tuple[_Key, _Rule, str]]:
    """What an instruction uses: the key, the rule for it, and how to say it."""
    for row in second.reads:
        yield ("written", row), _to_read, "reads"
    for row in second.writes:
        yield ("written", row), _to_overwrite, "overwrites"
        yield ("read as C", row), _to_overwrite_c, "overwrites"
        if second.is_valu:
            yield ("stored", row), _to_overwrite_stored, "overwrites"
    for register in second.scalar_reads:
        if register in second.lane_select:
            yield ("scalar", register), _after(4, "lane-select"), "reads"
        elif second.name.startswith("v_div_fmas"):
            yield ("scalar", register), _after(4, "vcc-of-div-fmas"), "reads"
        elif second.is_valu:
            yield ("scalar", register), _after(2, "scalar-result"), "reads"
        elif second.unit == "vmem":
            yield ("scalar", register), _after(5, "scalar-result-to-memory"), "reads"
    if second.is_dpp or second.is_matrix or second.swaps_rows or second.moves_lane:
        yield ("scalar", EXEC), _after(5 if second.is_dpp else 4, "exec"), "runs under"
    if second.copies_to_lds:
        yield ("moved", M0), _after(1, "m0-of-copy"), "reads"
    if second.mode_register:
        yield ("mode", second.mode_register), _after(2, "mode"), "uses"


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


def block_successors(
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
    def __init__(
        self,
        instructions: Sequence[Instruction],
        leaders: Sequence[int],
        mfma_waits: bool = True,
        nops: Set[int] = frozenset(),
    ) -> None:
        self.mfma_waits = mfma_waits
        self.nops = nops  # those of which it is to be found whether a rule asks for them
        self.asked_for: set[int] = set()
        self.farthest = _FARTHEST + (_MOST_STATES if nops else 0)
        self.effects = effects_of(instructions)
        self.ends = dict(zip(leaders, [*leaders[1:], len(instructions)], strict=True))
        self.successors = block_successors(instructions, leaders)
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
        recent = state.setdefault(_NOPS, {}) if self.nops else {}
        now = free = 0  # free: when the matrix unit takes another instruction
        for i in range(first, self.ends[first]):
            effect = self.effects[i]
            for key, rule, action in _uses(effect):
                for producer, since in state.get(key, {}).items():
                    needed, name = rule(self.effects[producer], effect, key[1])
                    if recent and needed > max(0, now - since - _MOST_STATES):
                        self._ask_for(recent, since, now - since - needed)
                    if needed > now - since:
                        if (
                            name == "mfma-write-back"
                            and now - since < self.effects[producer].passes
                        ):
                            name = "mfma-result"  # it is not even computed
                        what = f"{action} {_register_name(key)}"
                        self._report(i, Hazard(producer, needed, now - since, what, name))
            if effect.is_matrix:
                now = max(now, free) if self.mfma_waits else now
                free = now + effect.passes
            if i in self.nops:
                for old in [old for old, at in recent.items() if now - at >= self.farthest]:
                    del recent[old]
                recent[i] = now + 1
            _remember(state, effect, i, now + 1)
            now += effect.states
        return {
            key: kept
            for key, at in state.items()
            if (kept := {p: since - now for p, since in at.items() if now - since < self.farthest})
        }

    def _ask_for(self, nops: Mapping[int, int], since: int, spare: int) -> None:
        """Note the nops that may lie behind a producer and have more states than are to spare.

        What comes from earlier blocks may be of different paths, so that its order is not known.
        """
        self.asked_for |= {
            i for i, at in nops.items()
            if self.effects[i].states > spare and (at > since or since <= 0)
        }  # fmt: skip

    def _report(self, i: int, hazard: Hazard) -> None:
        known = self.found.get(i)
        if not known or hazard.needed - hazard.found > known.needed - known.found:
            self.found[i] = hazard
