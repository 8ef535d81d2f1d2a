"""Packed and mixed-width vector arithmetic to C, and the functions that all of it becomes."""

from __future__ import annotations

from aiter_mx.sim.disasm import Instruction
from aiter_mx.sim.emit import (
    Code,
    Context,
    Modifiers,
    Reads,
    interpret,
    is_vector,
    scalar,
    scalar_registers,
    store,
    unknown,
    with_sign,
)
from aiter_mx.sim.isa.tables import C_TYPES, FLOATS, Rule
from aiter_mx.sim.isa.valu import PACKED, SATURATING


def translate_packed(ins: Instruction, ctx: Context) -> Code | None:
    """The C of an instruction on two halves or of mixed widths, or None when it is not one."""
    if rule := PACKED.get(ins.mnemonic):
        return _packed(ins, rule, ctx)
    if ins.mnemonic in ("v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16"):
        return _mixed(ins, ctx)
    return None


def vector_function(
    ctx: Context, parameters: list[str], lines: list[str], stores: list[tuple[int, str]], bit: str
) -> str:
    """Make a function over 64 lanes; ``bit`` is the one-bit result's expression, if any."""
    writes = [f"D[l + {row}] = (({new}) & M[l]) | (D[l + {row}] & ~M[l]);" for row, new in stores]
    head = ["u32 *D"] if stores else []
    signature = ", ".join([*head, *parameters, "const u32 *M"])
    if bit:
        writes.append(f"K[l] = -(u32)(({bit}) != 0) & M[l];")
    body = "\n    ".join(lines + writes)
    before = "u32 K[64] ALIGNED;\n  " if bit else ""
    after = "\n  return pack_mask(K);" if bit else ""
    return ctx.function(
        f"{'u64' if bit else 'void'} NAME({signature}) {{\n  {before}"
        f"LANES {{\n    {body}\n  }}{after}\n}}"
    )


def _packed(ins: Instruction, rule: Rule, ctx: Context) -> Code:
    """VOP3P: the same operation on two halves, or on two registers for 32-bit types."""
    mods, code = Modifiers(ins), Code("")
    target, *sources = ins.operands
    if len(sources) != len(rule.sources):
        raise unknown(ins, f"{len(rule.sources)} sources expected, got {len(sources)}")
    count, wide = len(sources), rule.result in "fu"
    picks = [mods.bits("op_sel", count, 0), mods.bits("op_sel_hi", count, 1)]
    moves = ins.mnemonic == "v_pk_mov_b32"
    if moves:  # one selector a source: the halves come from different ones
        mods.take("op_sel_hi")
        picks[1] = picks[0]
    signs = [mods.bits("neg_lo", count), mods.bits("neg_hi", count)]
    clamp = mods.flag("clamp")
    mods.finish()
    parameters, values, lines = [], [], []
    parts: list[list[Reads]] = [[], []]
    for i, operand in enumerate(sources):
        name = "ABC"[i]
        registers = scalar_registers(operand)
        if wide and registers:  # compilers leave the half unset that neither result takes
            registers = tuple(registers[pick] for pick in sorted({picks[0][i], picks[1][i]}))
        code.scalar_reads += registers
        if is_vector(operand):
            rows = ctx.rows_of(operand, ins)
            for half in (i,) if moves else (0, 1):
                parts[half].append(Reads((rows[picks[half][i] if wide else 0],)))
            parameters.append(f"const u32 *{name}")
            values.append(f"ROW({rows[0]})")
        else:
            parameters.append(f"u64 {name}")
            pair = wide and operand.kind == "s"
            # Constants of an integer instruction have 32 bits, of which a half takes 16.
            letter = "U" if pair else "u" if rule.sources[i] in "wx" else rule.sources[i]
            values.append(scalar(operand, letter, ins))
    for half in (0, 1):
        part = []
        for i, (operand, letter) in enumerate(zip(sources, rule.sources, strict=True)):
            pick, name = picks[half][i], "ABC"[i]
            is_constant = operand.kind in ("int", "float", "literal")
            if wide and is_constant and pick and operand.value != 0:
                raise unknown(ins, f"high half of the constant {operand.text}")
            if wide:
                raw = (
                    f"{name}[l + {64 * pick}]"
                    if is_vector(operand)
                    else f"(u32)({name} >> {32 * pick})"
                )
                shift = 0
            else:
                raw, shift = (f"{name}[l]" if is_vector(operand) else f"(u32){name}"), 16 * pick
            value = with_sign(letter, interpret(letter, raw, shift), bool(signs[half][i]), False)
            if value is None or operand.negate or operand.absolute:
                raise unknown(ins, f"source modifier of {operand.text!r}")
            part.append(f"{C_TYPES[letter]} {'abc'[i]} = {value};")
        result = C_TYPES[rule.result]
        end = " r = clamp_f32(r);" if clamp else ""
        expression = rule.expression.replace("half", str(half))
        if clamp and rule.result not in FLOATS:
            if ins.mnemonic not in SATURATING:
                raise unknown(ins, "clamp of this type")
            expression, end = SATURATING[ins.mnemonic], ""
        lines.append(
            f"{result} r{half}; {{ {' '.join(part)} {result} r = ({result})({expression});{end} "
            f"r{half} = r; }}"
        )
    if wide:
        stores = [(64 * half, store(rule.result, None, f"r{half}")[0][1]) for half in (0, 1)]
    else:
        low, high = (store(rule.result, None, f"r{half}")[0][1] for half in (0, 1))
        stores = [(0, f"({low}) | ({high}) << 16")]
    name = vector_function(ctx, parameters, lines, stores, "")
    rows = ctx.rows_of(target, ins)
    code.body = f"{name}({', '.join([f'ROW({rows[0]})', *values, 'w->mask'])});"
    code.writes = rows
    code.flows = {row: parts[half] for half, row in enumerate(rows)}
    return code


def _mixed(ins: Instruction, ctx: Context) -> Code:
    """v_fma_mix: each source is f32, or the half of a register that op_sel picks."""
    mods, code = Modifiers(ins), Code("")
    target, *sources = ins.operands
    half, is_half = mods.bits("op_sel", 3), mods.bits("op_sel_hi", 3)
    clamp = mods.flag("clamp")
    mods.finish()
    parameters, values, lines = [], [], []
    for i, operand in enumerate(sources):
        name, letter = "ABC"[i], "h" if is_half[i] else "f"
        code.scalar_reads += scalar_registers(operand)
        vector = is_vector(operand)
        parameters.append(f"const u32 *{name}" if vector else f"u32 {name}")
        if vector:
            code.reads.append(Reads(ctx.rows_of(operand, ins)))
            values.append(f"ROW({ctx.row(operand, ins)})")
        else:
            values.append(scalar(operand, letter, ins))
        raw = interpret(letter, f"{name}[l]" if vector else name, 16 * half[i])
        lines.append(f"float {'abc'[i]} = {with_sign('f', raw, operand.negate, operand.absolute)};")
    lines.append("float r = fmaf(a, b, c);" + (" r = clamp_f32(r);" if clamp else ""))
    kind = ins.mnemonic.removeprefix("v_fma_mix").split("_")[0]
    stores = store("f", None, "r") if not kind else store("h", int(kind == "hi"), "r")
    name = vector_function(ctx, parameters, lines, stores, "")
    rows = ctx.rows_of(target, ins)
    code.body = f"{name}({', '.join([f'ROW({rows[0]})', *values, 'w->mask'])});"
    code.writes = rows
    return code
