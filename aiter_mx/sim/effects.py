"""Which registers an instruction reads and writes, and what else wait states depend on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from aiter_mx.sim.disasm import Instruction, Operand
from aiter_mx.sim.matrix import is_matrix, matrix_passes

EXEC, M0, VCC = 126, 124, 106
ACCUMULATORS = 1 << 10  # where their rows begin
_VMEM = ("global_", "flat_", "scratch_", "buffer_")
_TRANSCENDENTAL = re.compile(r"v_(rcp|rsq|sqrt|exp|log|sin|cos)_")
_CARRIES_OUT = re.compile(r"v_(\w+_co_u32|div_scale_f\d\d|mad_[ui]64_[ui]32)")
_READS_OLD = re.compile(r"v_((fmac|mac|pk_fmac|dot\w*c)_\w+|writelane_b32)")


@dataclass(frozen=True)
class Effect:
    """What an instruction touches. Vector registers are rows, accumulators after the others.

    Attributes:
        name: mnemonic.
        unit: ``valu``, ``matrix``, ``vmem``, ``lds``, or ``other``.
        states: wait states that it is to those after it.
        reads: rows read as operands, the old value of the destination where it counts.
        accumulator: those of them that are C of a matrix or dot instruction.
        writes: rows written.
        stores: rows that a store of more than 8 bytes sends to memory.
        has_scalar_offset: a buffer's offset comes from a scalar register.
        scalar_reads, scalar_writes: scalar registers, written ones of vector instructions alone
            and M0.
        lane_select: the scalar register that picks a lane.
        mode_register: of ``s_setreg`` and ``s_getreg``.
        passes: of the matrix unit.
        is_dpp: whether operands come from other lanes.
        crossing: rows read in other lanes: DPP's first source, both operands of a swap.
        places_part: the result is a part of a register and has to be moved to its place.
    """

    name: str
    unit: str = "other"
    states: int = 1
    reads: tuple[int, ...] = ()
    accumulator: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    stores: tuple[int, ...] = ()
    has_scalar_offset: bool = False
    scalar_reads: tuple[int, ...] = ()
    scalar_writes: tuple[int, ...] = ()
    lane_select: tuple[int, ...] = ()
    mode_register: str = ""
    passes: int = 0
    is_dpp: bool = False
    crossing: tuple[int, ...] = ()
    places_part: bool = False

    @cached_property
    def is_valu(self) -> bool:
        """Whether it is a vector or matrix instruction."""
        return self.unit in ("valu", "matrix")

    @cached_property
    def is_matrix(self) -> bool:
        """Whether it is a matrix instruction."""
        return self.unit == "matrix"

    @cached_property
    def is_xdl(self) -> bool:
        """Whether a matrix instruction runs on the matrix unit proper, as all but f32 ones do."""
        return self.is_matrix and not self.name.endswith("_f32")

    @cached_property
    def is_dot(self) -> bool:
        """Whether it is a dot product within a lane."""
        return self.name.startswith("v_dot")

    @cached_property
    def is_transcendental(self) -> bool:
        """Whether it takes the slow path for functions."""
        return _TRANSCENDENTAL.match(self.name) is not None

    @cached_property
    def swaps_rows(self) -> bool:
        """Whether it exchanges lanes between two registers."""
        return self.name.startswith("v_permlane")

    @cached_property
    def moves_lane(self) -> bool:
        """Whether it moves one lane from or to a scalar register."""
        return self.name in ("v_readlane_b32", "v_readfirstlane_b32", "v_writelane_b32")

    @cached_property
    def copies_to_lds(self) -> bool:
        """Whether it copies memory to LDS, to where M0 says."""
        return self.unit == "vmem" and M0 in self.scalar_reads


def row_name(row: int) -> str:
    """The assembler's name of a vector register."""
    return f"a{row - ACCUMULATORS}" if row >= ACCUMULATORS else f"v{row}"


_MOST_TEXTS = 1 << 16
_by_text: dict[str, Effect] = {}
"""What instructions do follows from their texts. Hazards and idle instructions are looked for
in the same kernel one after the other, and kernels have many texts in common."""


def effects_of(instructions: Sequence[Instruction]) -> list[Effect]:
    """What each instruction touches."""
    if len(_by_text) > _MOST_TEXTS:
        _by_text.clear()
    found = []
    for ins in instructions:
        effect = _by_text.get(ins.text)
        if effect is None:
            effect = _by_text[ins.text] = effect_of(ins)
        found.append(effect)
    return found


def effect_of(ins: Instruction) -> Effect:
    """What an instruction touches."""
    name = ins.mnemonic
    if name == "s_nop":
        return Effect(name, states=int(ins.operands[0].value) + 1)
    if name.startswith("v_"):
        return _vector(ins)
    if name.startswith((*_VMEM, "ds_")):
        return _memory(ins)
    if name.startswith(("s_setreg", "s_getreg")):
        match = re.search(r"hwreg\((\w+)", ins.text)
        return Effect(name, mode_register=match[1] if match else "")
    if ins.operands and M0 in _scalars(ins.operands[0]):
        return Effect(name, scalar_writes=(M0,))
    return Effect(name)


def _rows(*operands: Operand) -> tuple[int, ...]:
    return tuple(
        row
        for operand in operands
        if operand.kind in ("v", "a")
        for first in [operand.index + (ACCUMULATORS if operand.kind == "a" else 0)]
        for row in range(first, first + operand.count)
    )


def _scalars(*operands: Operand) -> tuple[int, ...]:
    return tuple(
        register
        for operand in operands
        if operand.kind == "s"
        for register in range(operand.index, operand.index + operand.count)
    )


def _vector(ins: Instruction) -> Effect:
    name, operands = ins.mnemonic, ins.operands
    targets, sources = operands[:1], operands[1:]
    swaps = name.startswith("v_permlane")
    if swaps or name == "v_swap_b32":
        targets = sources = operands[:2]
    elif _CARRIES_OUT.fullmatch(name):
        targets, sources = operands[:2], operands[2:]
    is_dpp, is_dot = ins.encoding == "dpp", name.startswith("v_dot")
    accumulator = _rows(*sources[2:3]) if is_matrix(ins) or is_dot else ()
    if _READS_OLD.fullmatch(name) or is_dpp:
        if is_dot:
            accumulator = _rows(*targets)
        sources = (*sources, *targets)
    written, read = _scalars(*targets), _scalars(*sources)
    if name.startswith("v_cmpx"):
        written += (EXEC, EXEC + 1)
    if name.startswith("v_div_fmas"):
        read += (VCC, VCC + 1)
    return Effect(
        name,
        "matrix" if is_matrix(ins) else "valu",
        reads=_rows(*sources),
        accumulator=accumulator,
        writes=_rows(*targets),
        scalar_reads=read,
        scalar_writes=written,
        lane_select=_scalars(operands[2]) if name in ("v_readlane_b32", "v_writelane_b32") else (),
        passes=sum(matrix_passes([ins]).values()),
        is_dpp=is_dpp,
        crossing=_rows(*operands[1:2]) if is_dpp else _rows(*sources) if swaps else (),
        places_part=_places_part(ins, len(sources)),
    )


def _places_part(ins: Instruction, sources: int) -> bool:
    if ins.encoding == "sdwa":
        return ins.modifiers.get("dst_sel", "DWORD") != "DWORD"
    picks = ins.modifiers.get("op_sel", "").strip("[]").split(",")
    if ins.mnemonic.startswith("v_cvt_scalef32_pk_fp4"):
        return "1" in picks[2:4]  # the number of a byte; to the first one, clang leaves no state
    return not is_matrix(ins) and len(picks) > sources and picks[sources] == "1"


def _memory(ins: Instruction) -> Effect:
    name, operands = ins.mnemonic, ins.operands
    is_buffer, to_lds = name.startswith("buffer_"), "lds" in ins.modifiers or "_lds_" in name
    loads = re.match(r"\w+?_(load|read)|ds_(b?permute|swizzle)", name) is not None
    returns = "_rtn_" in name or ("atomic" in name and "sc0" in ins.modifiers)
    writes: tuple[int, ...] = ()
    if operands and not to_lds and (loads or returns):
        writes = _rows(operands[0])
        if loads or not is_buffer:  # what a buffer's atomic returns takes the place of its data
            operands = operands[1:]
    stores: tuple[int, ...] = ()
    if name.startswith(_VMEM) and not loads and operands:
        data = operands[0] if is_buffer else operands[1]
        stores = _rows(data) if data.count > 2 else ()
    return Effect(
        name,
        "lds" if name.startswith("ds_") else "vmem",
        reads=_rows(*operands),
        writes=writes,
        stores=stores,
        has_scalar_offset=is_buffer and bool(operands) and operands[-1].kind == "s",
        scalar_reads=_scalars(*operands) + ((M0,) if to_lds else ()),
    )
