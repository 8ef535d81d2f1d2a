"""Mutants that are known to do what the original does, by what all paths through the code show."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from aiter_mx.sim.disasm import Instruction, Operand
from aiter_mx.sim.hazards import block_successors, find_hazards
from aiter_mx.sim.program import Program
from aiter_mx.sim.translate import Blocks, blocks_of
from op_tests.sim.mutation_kinds import Form
from op_tests.sim.mutation_planting import Mutant, case_named, listing, patched
from op_tests.sim.mutation_probes import AnyCase

_IDLE = "Nothing that it waits for is needed before a later wait: no path shows the difference."
_APART = "No rule asks for the wait state on any path."
_ZERO = "The register holds zero, of which each part is zero."
_NOTHING_ADDED = "Zeros from beyond the row are added to lanes that now stay as they are: the same."
_LOADS = re.compile(r"(global|buffer)_load|s_load|ds_(read|bpermute)")
_OTHERS = re.compile(r"(global|buffer)_(store|atomic)|ds_")
# Takes zeros from beyond a row of lanes, into the register that it adds to.
_ADDS_SHIFTED = re.compile(
    r"v_(?:add|max|or)_[ub]32_dpp (v\d+), v\d+, \1 row_shr:(\d+) .*bound_ctrl:1"
)
_MOST = 63  # operations of a kind that are told apart


@dataclass(frozen=True)
class _Operation:
    """One that a wait may wait for: which counter, whether in order, the registers it fills."""

    kind: str
    fills: frozenset[str]


_Pending = dict[int, int]  # number of an operation: how many of its kind follow it, at least


@cache
def why_harmless(mutant: Mutant) -> str:
    """A sentence; empty where no rule says so."""
    case = case_named(mutant.case)
    if mutant.kind.endswith("s_waitcnt"):
        return _IDLE if _waits_for_nothing_needed(case, mutant) else ""
    if mutant.kind == "shorten s_nop":
        before, after = (_hazards(image) for image in (case.image, patched(case, mutant)))
        return "" if after - before else _APART
    if mutant.kind == "lane move" and mutant.change == "bank_mask:0xe":  # lanes 0 to 3 of each row
        adds = _ADDS_SHIFTED.match(mutant.old)
        return _NOTHING_ADDED if adds and int(adds[2]) >= 4 else ""
    if mutant.kind == "conversion select":
        old = Form.of(mutant.old)
        operand = old.operands[-2 if mutant.change.startswith("src0") else -1]
        return _ZERO if _is_zero(case, operand) else ""
    return ""


def _code(image: bytes) -> Blocks:
    program = Program.from_image(image)
    (kernel,) = program.code_object.kernels.values()
    return blocks_of(program.code_object, kernel, program.listing)


def _hazards(image: bytes) -> set[tuple[int, str]]:
    code = _code(image)
    found = find_hazards(code.instructions, code.leaders)
    return {(i, hazard.rule) for i, hazard in found.items()}


def _is_zero(case: AnyCase, register: str) -> bool:
    writers = [ins.text for ins in listing(case) if register in _registers(ins.operands[:1])]
    return bool(writers) and all(text.endswith(f"{register}, 0") for text in writers)


def _registers(operands: Sequence[Operand]) -> set[str]:
    """Names of registers, each of 32 bits."""
    return {
        f"{operand.kind}{operand.index + i}"
        for operand in operands
        if operand.kind in ("v", "a", "s")
        for i in range(operand.count)
    }


def _operation(ins: Instruction) -> _Operation | None:
    if ins.mnemonic.startswith("s_load"):
        return _Operation("scalar", frozenset(_registers(ins.operands[:1])))
    kind = "lds" if ins.mnemonic.startswith("ds_") else "vector"
    if _LOADS.match(ins.mnemonic) and "lds" not in ins.modifiers:
        return _Operation(kind, frozenset(_registers(ins.operands[:1])))
    is_other = _LOADS.match(ins.mnemonic) or _OTHERS.match(ins.mnemonic)
    return _Operation(kind, frozenset()) if is_other else None


def _waits_for_nothing_needed(case: AnyCase, mutant: Mutant) -> bool:
    before, after = _code(case.image), _code(patched(case, mutant))
    if any("setpc" in ins.mnemonic or "call" in ins.mnemonic for ins in before.instructions):
        return False
    operations = [_operation(ins) for ins in before.instructions]
    late = _under_way(after, operations)
    for i, (usual, pending) in enumerate(zip(_under_way(before, operations), late, strict=True)):
        ins = before.instructions[i]
        for number in pending.keys() - usual.keys():
            operation = operations[number]
            assert operation is not None
            if not operation.fills or ins.mnemonic in ("s_barrier", "s_endpgm"):
                return False
            if operation.fills & _registers(ins.operands):
                return False
    return True


def _under_way(code: Blocks, operations: Sequence[_Operation | None]) -> list[_Pending]:
    """What some path may leave under way ahead of each instruction."""
    ends = [*code.leaders[1:], len(code.instructions)]
    blocks = {first: range(first, end) for first, end in zip(code.leaders, ends, strict=True)}
    successors = block_successors(code.instructions, code.leaders)
    known: list[_Pending] = [{} for _ in code.instructions]
    entered: dict[int, _Pending] = {code.entry: {}}
    waiting = {code.entry}
    while waiting:
        first = waiting.pop()
        pending = dict(entered[first])
        for i in blocks[first]:
            known[i] = dict(pending)
            pending = _passed(pending, operations, i, code.instructions[i])
        for successor in successors[first]:
            old = entered.get(successor)
            new = dict(old or {})
            for number, younger in pending.items():
                new[number] = min(younger, new.get(number, _MOST))
            if old is None or new != old:
                entered[successor] = new
                waiting.add(successor)
    return known


def _passed(
    pending: _Pending, operations: Sequence[_Operation | None], i: int, ins: Instruction
) -> _Pending:
    if ins.mnemonic == "s_waitcnt":
        fields = ins.words[0] & 0xFFFF
        vector, others = (fields & 15) | (fields >> 14 & 3) << 4, fields >> 8 & 15
        left = {"vector": vector, "lds": others, "scalar": 1 if others else 0}
        # Scalar loads come in any order: only a wait for all of them says that one is there.
        return {
            number: younger
            for number, younger in pending.items()
            if (operation := operations[number]) is not None
            and (younger < left[operation.kind] or (operation.kind == "scalar" and others))
        }
    started = operations[i]
    if started is None:
        return pending
    followed = {
        number: min(younger + ((of := operations[number]) is not None and of.kind == started.kind),
                    _MOST)
        for number, younger in pending.items()
    }  # fmt: skip
    return followed | {i: 0}
