"""Vector arithmetic to C: one function for each distinct combination of operation and operands."""

from __future__ import annotations

from aiter_mx.sim.disasm import Instruction, Operand
from aiter_mx.sim.emit import (
    HALF_LETTERS,
    Code,
    Context,
    Modifiers,
    Reads,
    interpret,
    is_vector,
    names_in,
    result_statements,
    scalar,
    scalar_registers,
    store,
    unknown,
    with_sign,
    write_scalar,
)
from aiter_mx.sim.isa.tables import C_TYPES, FLOATS, WIDE, Rule
from aiter_mx.sim.isa.valu import (
    COMPARE,
    KEEPS_HIGH,
    LOW_FROM_LOW,
    PACKS,
    SATURATING,
    VALU,
)
from aiter_mx.sim.packed import translate_packed, vector_function

_OMOD = {"mul:2": "* 2", "mul:4": "* 4", "div:2": "/ 2"}
_VCC = Operand("s", 106, 2, text="vcc")
_DPP = {
    "quad_perm": "QUAD_PERM", "row_shl": "ROW_SHL", "row_shr": "ROW_SHR", "row_ror": "ROW_ROR",
    "wave_shl": "WAVE_SHL", "wave_rol": "WAVE_ROL", "wave_shr": "WAVE_SHR",
    "wave_ror": "WAVE_ROR", "row_mirror": "ROW_MIRROR", "row_half_mirror": "ROW_HALF_MIRROR",
    "row_newbcast": "ROW_NEWBCAST",
}  # fmt: skip


def translate_vector(ins: Instruction, ctx: Context) -> Code | None:
    """The C of a vector-arithmetic instruction, or None when it is not one."""
    if (packed := translate_packed(ins, ctx)) is not None:
        return packed
    if rule := VALU.get(ins.mnemonic) or COMPARE.get(ins.mnemonic):
        return _Plain(ins, rule, ctx).translate()
    return None


class _Plain:
    """VOP1, VOP2, VOP3 and VOPC, with DPP or SDWA."""

    def __init__(self, ins: Instruction, rule: Rule, ctx: Context) -> None:
        self.ins, self.rule, self.ctx = ins, rule, ctx
        self.mods = Modifiers(ins)
        self.code = Code("")
        self.mask = "w->mask"
        self.lanes = "w->exec"
        operands = list(ins.operands)
        self.target = operands.pop(0) if rule.result[0] != "k" else None
        self.bit_target = operands.pop(0) if "k" in rule.result else None
        if len(operands) == len(rule.sources) - 1 and rule.sources[-1] == "m":
            operands.append(_VCC)
        if len(operands) != len(rule.sources):
            raise unknown(ins, f"{len(rule.sources)} sources expected, got {len(operands)}")
        self.sources = operands
        self.letter = rule.result[0] if self.target else ""
        self.parameters: list[str] = []
        self.lines: list[str] = []
        self.values: list[str] = []
        self.rows_by_source: list[tuple[int, ...]] = []

    def translate(self) -> Code:
        ins, rule, code = self.ins, self.rule, self.code
        shifts, part = self._select()
        for i, (operand, letter) in enumerate(zip(self.sources, rule.sources, strict=True)):
            self._source(i, operand, letter, shifts[i])
        self._result(part)
        self.mods.finish()
        if self.target and ins.encoding != "dpp":
            code.flows = self._flows()
            code.reads = []
        return code

    def _select(self) -> tuple[list[int], int]:
        """What op_sel picks: the first bit of each source, and the destination's half or byte."""
        ins, count = self.ins, len(self.sources)
        bits = self.mods.bits("op_sel", max(count + 1, 4))
        if self.rule.sources[:1] == "y":
            shifts, part, left = (
                [8 * (bits[0] + 2 * bits[1])] + [0] * (count - 1),
                bits[2],
                bits[3:],
            )
        elif self.letter == "Y":
            shifts, part, left = [0] * count, bits[2] + 2 * bits[3], bits[:2]
        else:
            part = 0 if self.rule.result[0] == "k" else bits[count]
            shifts, left = [16 * bit for bit in bits[:count]], bits[count + 1 :]
            halves = zip(bits, self.rule.sources, strict=False)
            if any(bit and letter not in HALF_LETTERS for bit, letter in halves):
                raise unknown(ins, "op_sel on an operand that is not 16 bits")
        if (part and self.letter not in HALF_LETTERS + "Y") or any(left):
            raise unknown(ins, "op_sel on a destination that is not 16 bits")
        return shifts, part

    def _flows(self) -> dict[int, list[Reads]]:
        code, ins = self.code, self.ins
        if ins.mnemonic == "v_cndmask_b32":
            mask = scalar(self.sources[2], "U", ins)
            chosen = [
                Reads(rows, f"w->exec & {sign}{mask}")
                for rows, sign in zip(self.rows_by_source, ("~", ""), strict=False)
                if rows
            ]
            return dict.fromkeys(code.writes, chosen)
        reads = code.reads
        if ins.mnemonic in PACKS:  # the other of the two may be padding
            needed = [self.rows_by_source[0], *self.rows_by_source[2:]]
            reads = [Reads(rows) for rows in needed if rows]
        flows = dict.fromkeys(code.writes, reads)
        if ins.mnemonic in LOW_FROM_LOW:
            flows[code.writes[0]] = [Reads(r.rows[:1], r.lanes) for r in reads]
        return flows

    def _source(self, i: int, operand: Operand, letter: str, shift: int) -> None:
        name = "abcm"[i] if letter != "m" else "m"
        raw, value = self._raw(i, operand, letter)
        parameter = f"const u32 *{name.upper()}_" if raw else f"{_raw_type(letter)} {name.upper()}_"
        self.parameters.append(parameter)
        self.values.append(value)
        text = f"{name.upper()}_" + ("[l]" if raw else "")
        if raw and letter in WIDE:
            text = f"({name.upper()}_[l] | (u64){name.upper()}_[l + 64] << 32)"
        signed = with_sign(letter, interpret(letter, text, shift), operand.negate, operand.absolute)
        if signed is None:
            raise unknown(self.ins, f"source modifier of {operand.text!r}")
        self.lines.append(f"{C_TYPES[letter]} {name} = {signed};")

    def _raw(self, i: int, operand: Operand, letter: str) -> tuple[bool, str]:
        """Whether a source is a row of lanes, and the C argument."""
        ins, code, ctx = self.ins, self.code, self.ctx
        if not (i == 1 and ins.mnemonic in PACKS):
            code.scalar_reads += scalar_registers(operand)
        self.rows_by_source.append(ctx.rows_of(operand, ins) if is_vector(operand) else ())
        if letter == "m":
            code.prepare += f"expand_mask({scalar(operand, 'U', ins)}, w->tmp[2]);"
            return True, "w->tmp[2]"
        sdwa, dpp = ins.encoding == "sdwa", ins.encoding == "dpp"
        if operand.sign_extend and not sdwa:
            raise unknown(ins, "sext")
        if is_vector(operand):
            rows = ctx.rows_of(operand, ins)
            if len(rows) != (2 if letter in WIDE else 1):
                raise unknown(ins, f"width of {operand.text!r}")
            argument = f"ROW({rows[0]})"
            if dpp and i == 0:
                return True, self._dpp(rows)
            code.reads.append(Reads(rows, self.lanes))
        elif sdwa and letter != "m":
            argument = f"w->tmp[{i}]"
            code.prepare += f"fill({argument}, {scalar(operand, 'u', ins)});"
        else:
            return False, scalar(operand, letter, ins)
        if sdwa:
            piece = self.mods.take(f"src{i}_sel", "DWORD")
            if piece != "DWORD":
                code.prepare += (
                    f"select_piece(w->tmp[{i}], {argument}, {piece}, {int(operand.sign_extend)});"
                )
                argument = f"w->tmp[{i}]"
            elif operand.sign_extend:
                raise unknown(ins, "sext of a whole dword")
        return True, argument

    def _dpp(self, rows: tuple[int, ...]) -> str:
        ins, mods = self.ins, self.mods
        control, argument = self._dpp_control()
        row_mask, bank_mask = mods.number("row_mask", 15), mods.number("bank_mask", 15)
        zero = int(mods.take("bound_ctrl", "") != "")
        call = (
            f"ROW({{}}), w->tmp[3], {control}, {argument}, {row_mask}, {bank_mask}, {zero}, &from"
        )
        self.code.prepare += "u64 from, written;"
        for i, row in enumerate(rows):
            self.code.prepare += f"written = dpp(w, w->tmp[0] + {64 * i}, {call.format(row)});"
        self.code.reads.append(Reads(rows, "from"))
        self.mask, self.lanes = "w->tmp[3]", "written"
        if ins.operands and self.target is None:
            raise unknown(ins, "DPP on a compare")
        return "w->tmp[0]"

    def _dpp_control(self) -> tuple[str, int]:
        mods = self.mods
        if mods.has("row_bcast"):
            return f"ROW_BCAST{mods.number('row_bcast')}", 0
        for name, control in _DPP.items():
            if mods.has(name):
                text = mods.take(name)
                if name != "quad_perm":
                    return control, int(text)
                picks = [int(x) for x in text.strip("[]").split(",")]
                return control, sum(pick << (2 * i) for i, pick in enumerate(picks))
        raise unknown(self.ins, "DPP control")

    def _result(self, part: int) -> None:
        ins, rule, code, ctx = self.ins, self.rule, self.code, self.ctx
        expression = rule.expression
        if "BITOP3" in expression:
            expression = expression.replace("BITOP3", f"{self.mods.number('bitop3'):#x}")
        if ins.mnemonic in SATURATING and self.mods.flag("clamp"):
            expression = SATURATING[ins.mnemonic]
        names = names_in(expression)
        rows: tuple[int, ...] = ()
        stores: list[tuple[int, str]] = []
        arguments = []
        if self.target:
            rows = ctx.rows_of(self.target, ins)
            if len(rows) != (2 if self.letter in WIDE else 1):
                raise unknown(ins, f"width of {self.target.text!r}")
            if "d" in names:
                self._old_value(rows)
            keeps = self.letter in "WHY" or ins.mnemonic in KEEPS_HIGH
            stores = store(self.letter, part if part or keeps else None, "r")
            destination = self._sdwa_destination(rows[0], stores)
            arguments = [destination or f"ROW({rows[0]})"]
        else:
            destination = ""
        bit = ""
        if self.bit_target:
            bit = "k" if self.target else "r"
            self.lines.append("u32 k = 0;")
        if self.target:
            self.lines.append(
                result_statements(Rule("", "", "", expression), self.letter) + self._finish_float()
            )
        else:
            self.lines.append(f"u32 r = ({expression}) != 0;")
            if self.mods.has("clamp"):
                raise unknown(ins, "clamp")
        name = vector_function(ctx, self.parameters, self.lines, stores, bit)
        call = f"{name}({', '.join([*arguments, *self.values, self.mask])})"
        if self.bit_target:
            call = write_scalar(self.bit_target, True, call, ins)
            code.scalar_writes += scalar_registers(self.bit_target)
            if ins.mnemonic.startswith("v_cmpx"):
                call += f" set_exec(w, {scalar(self.bit_target, 'U', ins)});"
        code.body += call if call.endswith(";") else f"{call};"
        if destination:
            into = f"ROW({rows[0]}), {destination}, w->mask, {self._piece}, {self._rest}"
            code.body += f"insert_piece({into});"
        code.writes, code.write_lanes = rows, self.lanes

    def _old_value(self, rows: tuple[int, ...]) -> None:
        raw = "(D[l] | (u64)D[l + 64] << 32)" if self.letter in WIDE else "D[l]"
        self.lines.append(f"{C_TYPES[self.letter]} d = {interpret(self.letter, raw)};")
        self.code.reads.append(Reads(rows, self.lanes))

    def _sdwa_destination(self, row: int, stores: list[tuple[int, str]]) -> str:
        """A temporary row when SDWA writes a piece of the destination, else nothing."""
        if self.ins.encoding != "sdwa":
            return ""
        self._piece = self.mods.take("dst_sel", "DWORD")
        rest = self.mods.take("dst_unused", "UNUSED_PAD")
        if self._piece == "DWORD":
            return ""
        if len(stores) != 1 or "d" in names_in(self.rule.expression):
            raise unknown(self.ins, "dst_sel of this operation")
        self._rest = ("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE").index(rest)
        return "w->tmp[3]"

    def _finish_float(self) -> str:
        text = ""
        for name, factor in _OMOD.items():
            key, value = name.split(":")
            if self.mods.has(key) and self.ins.modifiers[key] == value:
                self.mods.take(key)
                text += f" r = r {factor};"
        if self.mods.flag("clamp"):
            if self.letter not in FLOATS or self.letter == "F":
                raise unknown(self.ins, "clamp of this type")
            text += f" r = {'clamp_f64' if self.letter == 'd' else 'clamp_f32'}(r);"
        return text


def _raw_type(letter: str) -> str:
    return "u64" if letter in WIDE else "u32"
