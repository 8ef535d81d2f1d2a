"""Scalar arithmetic, scalar loads and moves between lanes and scalar registers, to C."""

from __future__ import annotations

import re

from aiter_mx.sim.disasm import Instruction, Operand, parse_operand
from aiter_mx.sim.emit import (
    EXEC,
    Code,
    Context,
    Modifiers,
    interpret,
    is_vector,
    names_in,
    scalar,
    scalar_registers,
    unknown,
    write_scalar,
)
from aiter_mx.sim.isa.salu import SALU, SAVE_EXEC
from aiter_mx.sim.isa.tables import C_TYPES, WIDE, Rule

_SMEM = re.compile(r"s_(buffer_)?load_dword(?:x(\d+))?")
_SMEM_WRITE = re.compile(r"s_(?:store_dword(?:x(\d+))?|atomic_(add|dec|inc))")
FP16_OVERFLOW_BIT = 23


def translate_scalar(ins: Instruction, ctx: Context) -> Code | None:
    """The C of a scalar instruction, or None when it is not one."""
    if rule := SALU.get(ins.mnemonic):
        return _arithmetic(ins, rule)
    if ins.mnemonic in SAVE_EXEC:
        return _save_exec(ins)
    if match := _SMEM.fullmatch(ins.mnemonic):
        return _load(ins, bool(match[1]), int(match[2] or 1))
    if match := _SMEM_WRITE.fullmatch(ins.mnemonic):
        return _write_memory(ins, int(match[1] or 1), match[2])
    if ins.mnemonic == "s_getpc_b64":
        return _write_pair(ins, f"w->group->launch->image_base + {ins.end:#x}")
    if ins.mnemonic in ("s_memtime", "s_memrealtime"):
        return _write_pair(ins, "w->group->steps")
    if ins.mnemonic == "s_getreg_b32":
        return _get_register(ins)
    if ins.mnemonic in ("s_setreg_imm32_b32", "s_setreg_b32"):
        return _set_register(ins)
    if ins.mnemonic in ("v_readfirstlane_b32", "v_readlane_b32"):
        return _read_lane(ins, ctx)
    if ins.mnemonic == "v_writelane_b32":
        return _write_lane(ins, ctx)
    return None


def _arithmetic(ins: Instruction, rule: Rule) -> Code:
    Modifiers(ins).finish()
    operands = list(ins.operands)
    code = Code("")
    target = operands.pop(0) if rule.result else None
    if len(operands) != len(rule.sources):
        raise unknown(ins, f"{len(rule.sources)} sources expected, got {len(operands)}")
    parts = []
    for operand, letter, name in zip(operands, rule.sources, "abc", strict=False):
        code.scalar_reads += scalar_registers(operand)
        if letter == "k":
            value = ins.words[0] & 0xFFFF
            signed = value - 0x10000 if value >> 15 and not ins.mnemonic.endswith("u32") else value
            parts.append(f"i32 {name} = {signed};")
        else:
            raw = scalar(operand, letter, ins)
            parts.append(f"{C_TYPES[letter]} {name} = {interpret(letter, raw)};")
    if ins.mnemonic in ("s_or_b64", "s_andn2_b64") and operands[1].text == "exec":
        code.scalar_reads = ()  # a mask of lanes: it is set for those of EXEC, whatever it was
    first, _, rest = rule.expression.partition(";")
    if target:
        letter = rule.result
        if "d" in names_in(rule.expression):
            parts.append(f"{C_TYPES[letter]} d = {scalar(target, letter, ins)};")
            code.scalar_reads += scalar_registers(target)
        parts.append(f"{C_TYPES[letter]} r = ({C_TYPES[letter]})({first});")
        write = write_scalar(target, letter in WIDE, "r", ins)
        code.scalar_writes = scalar_registers(target)
        # Conditions such as `r < a` need the sources, which are copies, not the registers.
        parts += [f"{rest.strip()};" if rest else "", write]
    else:
        parts.append(f"{first};")
    text = re.sub(r"\bscc\b", "w->scc", " ".join(part for part in parts if part))
    code.body = "{ " + text.replace("w->w->scc", "w->scc") + " }"
    code.scalar_flow = bool(code.scalar_writes)
    return code


def _save_exec(ins: Instruction) -> Code:
    Modifiers(ins).finish()
    target, source = ins.operands
    saved = "r" if "wrexec" in ins.mnemonic else "e"
    write = write_scalar(target, True, saved, ins)
    return Code(
        f"{{ u64 e = w->exec, a = {scalar(source, 'U', ins)}; u64 r = {SAVE_EXEC[ins.mnemonic]}; "
        f"{write} set_exec(w, r); w->scc = r != 0; }}",
        scalar_reads=scalar_registers(source),
        scalar_writes=scalar_registers(target),
    )


def _load(ins: Instruction, is_buffer: bool, dwords: int) -> Code:
    mods = Modifiers(ins)
    mods.flag("glc")
    offset = mods.number("offset")
    mods.finish()
    target, base, index = ins.operands
    if target.kind != "s" or base.kind != "s":
        raise unknown(ins)
    at = f"{scalar(index, 'u', ins)} + {offset}"
    registers = tuple(range(target.index, target.index + dwords))
    if is_buffer:
        body = f"scalar_buffer_load(w, $I, w->s + {base.index}, {at}, {target.index}, {dwords});"
    else:
        if index.kind in ("int", "literal"):
            number = int(index.value)
            # The immediate is 21 bits, signed; it is printed as 32 bits.
            at = str((number - (1 << 32) if number >> 31 else number) + offset)
        body = f"scalar_load(w, $I, {scalar(base, 'U', ins)} + {at}, {target.index}, {dwords});"
    return Code(
        body,
        scalar_reads=scalar_registers(base) + scalar_registers(index),
        issue=f"issue_scalar(w, $I, {target.index}, {dwords});",
        scalar_writes=registers,
        yields=True,
    )


def _write_memory(ins: Instruction, dwords: int, atomic: str | None) -> Code:
    """Scalar stores and atomics that return nothing; they take effect at once."""
    mods = Modifiers(ins)
    is_glc = mods.flag("glc")
    offset = mods.number("offset")
    mods.finish()
    data, base, index = ins.operands
    if data.kind != "s" or base.kind != "s" or (atomic and is_glc):
        raise unknown(ins)
    at = f"{scalar(base, 'U', ins)} + {scalar(index, 'u', ins)} + {offset}"
    kind = f"SCALAR_{(atomic or 'store').upper()}"
    return Code(
        f"scalar_write(w, $I, {at}, {data.index}, {dwords}, {kind});",
        scalar_reads=(
            *range(data.index, data.index + dwords),
            *scalar_registers(base),
            *scalar_registers(index),
        ),
        yields=True,
    )


def _write_pair(ins: Instruction, value: str) -> Code:
    Modifiers(ins).finish()
    (target,) = ins.operands
    return Code(write_scalar(target, True, value, ins), scalar_writes=scalar_registers(target))


def _get_register(ins: Instruction) -> Code:
    """A field of MODE or XCC_ID; workgroups go round the 8 XCCs in turn, as hardware deals them."""
    match = re.fullmatch(r"\S+ (\S+), hwreg\(HW_REG_(MODE|XCC_ID)(?:, (\d+), (\d+))?\)", ins.text)
    if not match:
        raise unknown(ins)
    offset, size = int(match[3] or 0), int(match[4] or 32)
    value = {"MODE": "w->mode", "XCC_ID": "(u32)(w->group->index % 8)"}[match[2]]
    target = parse_operand(match[1])
    return Code(
        write_scalar(target, False, f"extract({value}, {offset}, {size})", ins),
        scalar_writes=scalar_registers(target),
    )


def _set_register(ins: Instruction) -> Code:
    """The MODE register's denormal modes and FP16_OVFL; anything else is refused."""
    match = re.fullmatch(r".*hwreg\(HW_REG_MODE(?:, (\d+), (\d+))?\), (\S+)", ins.text)
    if not match:
        raise unknown(ins)
    offset, size = int(match[1] or 0), int(match[2] or 32)
    fields = set(range(offset, offset + size))
    if not (fields <= {4, 5, 6, 7} or fields == {FP16_OVERFLOW_BIT}):
        raise unknown(ins, "only the denormal modes and FP16_OVFL are simulated")
    mask = ((1 << size) - 1) << offset
    source = parse_operand(match[3])
    value = f"(({scalar(source, 'u', ins)}) << {offset} & {mask:#x}u)"
    return Code(
        f"w->mode = (w->mode & {~mask & 0xFFFFFFFF:#x}u) | {value}; set_float_mode(w->mode);",
        scalar_reads=scalar_registers(source),
    )


def _read_lane(ins: Instruction, ctx: Context) -> Code:
    Modifiers(ins).finish()
    target, source, *lane = ins.operands
    if not is_vector(source):
        raise unknown(ins, f"source {source.text!r}")
    row = ctx.row(source, ins)
    pick = f"({scalar(lane[0], 'u', ins)}) & 63" if lane else None
    lanes = f"1ull << ({pick})" if pick else "(w->exec ? w->exec & -w->exec : 1)"
    value = f"ROW({row})[{pick}]" if pick else f"read_first_lane(w, ROW({row}))"
    return Code(
        write_scalar(target, False, value, ins),
        lane_copy=f"scalar_from_lane(w, $I, {target.index}, {row}, {lanes});",
        scalar_reads=scalar_registers(lane[0]) if lane else (),
        scalar_writes=scalar_registers(target),
    )


def _write_lane(ins: Instruction, ctx: Context) -> Code:
    Modifiers(ins).finish()
    target, source, lane = ins.operands
    row = ctx.row(target, ins)
    pick = f"({scalar(lane, 'u', ins)}) & 63"
    return Code(
        f"ROW({row})[{pick}] = {scalar(source, 'u', ins)};",
        lane_copy=f"lane_from_scalar(w, $I, {row}, 1ull << ({pick}), {_register(source)});",
        scalar_reads=scalar_registers(lane),
        writes=(row,),
    )


def _register(operand: Operand) -> int:
    """A scalar register's number, or that of EXEC, which always holds a value, for a constant."""
    return operand.index if scalar_registers(operand) else EXEC


def changes_exec(ins: Instruction) -> bool:
    """Whether the instruction changes EXEC, so that facts about active lanes lapse."""
    return (
        ins.mnemonic in SAVE_EXEC
        or ins.mnemonic.startswith("v_cmpx")
        or any(op.kind == "s" and op.index >= EXEC for op in ins.operands[:1])
    )
