"""Modes that change what the next vector instructions are: VSKIP, and GPR indexing through M0."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from aiter_mx.sim.disasm import Instruction, Operand
from aiter_mx.sim.emit import Code, Context, is_vector, scalar, scalar_registers, unknown
from aiter_mx.sim.matrix import is_matrix

_M0 = 124
_VECTOR = ("v_", "ds_", "global_", "flat_", "scratch_", "buffer_")
_SOURCE_0 = 1  # of the four bits of s_set_gpr_idx_on: the others index SRC1, SRC2 and the result
_NAMES = ("SRC0", "SRC1", "SRC2", "DST")


@dataclass(frozen=True)
class Modes:
    """What modes an instruction runs under.

    Attributes:
        may_skip: VSKIP may be on, and it is an instruction that VSKIP leaves out.
        indexed: which operands have M0 added to their register's number, as bits.
    """

    may_skip: bool = False
    indexed: int = 0


def find_modes(instructions: Sequence[Instruction], leaders: Sequence[int]) -> list[Modes]:
    """The modes of each instruction.

    Raises:
        UnknownInstruction: indexing goes on beyond a basic block.
    """
    starts = set(leaders)
    crosses = _skips_beyond_a_block(instructions, starts)
    found = []
    skip, indexed = crosses, 0
    for i, ins in enumerate(instructions):
        if i in starts:
            if indexed:
                raise unknown(instructions[i - 1], "indexing beyond the end of a block")
            skip = crosses
        if ins.mnemonic == "s_setvskip":
            skip = crosses or not _turns_off(ins)
        elif ins.mnemonic == "s_set_gpr_idx_on":
            indexed = _operands_indexed(ins)
        elif ins.mnemonic == "s_set_gpr_idx_off":
            indexed = 0
        found.append(Modes(skip and ins.mnemonic.startswith(_VECTOR), indexed))
    return found


def _skips_beyond_a_block(instructions: Sequence[Instruction], starts: set[int]) -> bool:
    """Whether VSKIP may be on where a block ends: then it may be on anywhere."""
    skip = False
    for i, ins in enumerate(instructions):
        if i in starts and skip:
            return True
        if ins.mnemonic == "s_setvskip":
            skip = not _turns_off(ins)
    return False


def _turns_off(ins: Instruction) -> bool:
    return ins.operands[0].kind == "int" and not ins.operands[0].value


def _operands_indexed(ins: Instruction) -> int:
    names = re.fullmatch(r"gpr_idx\(([A-Z0-9,]*)\)", ins.operands[1].text)
    if not names:
        raise unknown(ins)
    return sum(1 << _NAMES.index(name) for name in names[1].split(",") if name)


def translate_mode(ins: Instruction) -> Code | None:
    """The C of an instruction that sets a mode, or None when it is not one."""
    if ins.mnemonic == "s_setvskip":
        source, bit = ins.operands
        return Code(
            f"w->skips = {scalar(source, 'u', ins)} >> ({scalar(bit, 'u', ins)} & 31) & 1;",
            scalar_reads=scalar_registers(source) + scalar_registers(bit),
        )
    if ins.mnemonic == "s_set_gpr_idx_on":
        source = ins.operands[0]
        index = f"({scalar(source, 'u', ins)} & 255) | {_operands_indexed(ins) << 12:#x}u"
        return Code(
            f"w->s[{_M0}] = (w->s[{_M0}] & ~0xf0ffu) | {index};",
            scalar_reads=scalar_registers(source),
            scalar_writes=(_M0,),
        )
    return None


def with_indexed_source(ins: Instruction, indexed: int, ctx: Context) -> tuple[Instruction, Code]:
    """The instruction as one that reads a copy of the register picked, and what makes the copy."""
    if indexed != _SOURCE_0 or is_matrix(ins) or ins.encoding in ("dpp", "sdwa"):
        raise unknown(ins, "indexed by M0")
    source = ins.operands[1]
    if not is_vector(source):
        return ins, Code("")
    first, rows = ctx.row(source, ins), source.count
    copy = Operand("v", ctx.rows, rows, 0, source.negate, source.absolute, text=source.text)
    operands = (ins.operands[0], copy, *ins.operands[2:])
    copies = tuple(range(ctx.rows, ctx.rows + rows))
    prepare = f"pick_rows(w, $I, {ctx.rows}, {first}, {rows}, {ctx.rows});"
    return replace(ins, operands=operands), Code("", prepare=prepare, copies=copies)
