"""Mistakes to plant in gfx950 machine code: what an instruction's text can be changed into.

Each kind of mistake is a function from an instruction to its mutants, in the assembler's text. A
mutant takes no more room than the original. What is equal to the original by the instruction's own
definition (sums with their operands exchanged, a select of a byte that is not read) is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from aiter_mx.sim.disasm import Instruction


@dataclass(frozen=True)
class Form:
    """An instruction's text in parts; ``modifiers`` is what follows the last operand."""

    name: str
    operands: tuple[str, ...]
    modifiers: str = ""

    @classmethod
    def of(cls, text: str) -> Form:
        """Parts of a text; commas within brackets do not separate."""
        name, _, rest = text.partition(" ")
        if name in ("s_waitcnt", "s_nop"):
            return cls(name, (), rest)
        parts = [part.strip() for part in re.split(r",(?![^\[(]*[\])])", rest) if part.strip()]
        last, _, modifiers = parts[-1].partition(" ") if parts else ("", "", "")
        return cls(name, (*parts[:-1], last) if parts else (), modifiers)

    def __str__(self) -> str:
        return f"{self.name} {', '.join(self.operands)} {self.modifiers}".strip().replace("  ", " ")

    @property
    def base(self) -> str:
        """The mnemonic without its encoding."""
        return re.sub(r"_(e32|e64|dpp|sdwa)$", "", self.name)

    def named(self, base: str) -> Form:
        """With another mnemonic in the same encoding."""
        return replace(self, name=base + self.name[len(self.base) :])

    def with_operand(self, index: int, text: str) -> Form:
        """With one operand replaced."""
        changed = (*self.operands[:index], text, *self.operands[index + 1 :])
        return replace(self, operands=changed)

    def exchanged(self, a: int, b: int) -> Form:
        """With two operands exchanged."""
        return self.with_operand(a, self.operands[b]).with_operand(b, self.operands[a])

    def modifier(self, name: str) -> str:
        """The value of a modifier, empty when it is not there."""
        found = re.search(rf"(?<!\w){name}:(\S+)", self.modifiers)
        return found[1] if found else ""

    def with_modifier(self, name: str, value: str) -> Form:
        """With a modifier set, or taken away when the value is empty."""
        rest = re.sub(rf"(?<!\w){name}:\S+ ?", "", self.modifiers).strip()
        # The assembler wants op_sel before op_sel_hi, offsets after offen and before cache bits.
        before = "offen" if rest.startswith("offen") else ""
        parts = (before, f"{name}:{value}" if value else "", rest.removeprefix(before).strip())
        return replace(self, modifiers=" ".join(part for part in parts if part))


Changed: TypeAlias = Iterator[tuple[str, str | Form]]
NOP = "s_nop 0"


def _drop_wait(form: Form, ins: Instruction) -> Changed:
    if form.name == "s_waitcnt":
        yield "dropped", NOP


def _weaken_wait(form: Form, ins: Instruction) -> Changed:
    counters = re.findall(r"(\w+)\((\d+)\)", form.modifiers) if form.name == "s_waitcnt" else []
    for name, count in counters:
        weaker = f"{name}({int(count) + 1})"
        yield weaker, replace(form, modifiers=form.modifiers.replace(f"{name}({count})", weaker))
        if len(counters) > 1:
            rest = form.modifiers.replace(f"{name}({count})", "")
            yield f"no {name}", replace(form, modifiers=rest.strip())


def _drop_barrier(form: Form, ins: Instruction) -> Changed:
    if form.name == "s_barrier":
        yield "dropped", NOP


def _shorten_nop(form: Form, ins: Instruction) -> Changed:
    if form.name == "s_nop" and (states := int(form.modifiers)):
        yield "one wait state less", f"s_nop {states - 1}"


def _bits(text: str) -> list[int]:
    return [int(bit) for bit in text.strip("[]").split(",")] if text else [0, 0, 0]


def _scale_select(form: Form, ins: Instruction) -> Changed:
    if not form.name.startswith("v_mfma_scale"):
        return
    low, high = _bits(form.modifier("op_sel")), _bits(form.modifier("op_sel_hi"))
    for source, name in enumerate("ab"):
        for change in (1, 2, 3):
            new_low, new_high = low.copy(), high.copy()
            new_low[source] ^= change & 1
            new_high[source] ^= change >> 1
            changed = form.with_modifier("op_sel_hi", f"[{','.join(map(str, new_high))}]")
            changed = changed.with_modifier("op_sel", f"[{','.join(map(str, new_low))}]")
            byte = new_low[source] + 2 * new_high[source]
            yield f"scale byte {byte} of {name}", changed


def _shifted(register: str, by: int) -> str | None:
    if match := re.fullmatch(r"([vas])(\d+)", register):
        return f"{match[1]}{int(match[2]) + by}" if int(match[2]) + by >= 0 else None
    if match := re.fullmatch(r"([vas])\[(\d+):(\d+)\]", register):
        first, last = int(match[2]) + by, int(match[3]) + by
        return f"{match[1]}[{first}:{last}]" if first >= 0 else None
    return None


def _mfma_register(form: Form, ins: Instruction) -> Changed:
    if not form.name.startswith("v_mfma"):
        return
    if form.operands[1] != form.operands[2]:
        yield "a and b exchanged", form.exchanged(1, 2)
    for index, name in ((0, "result"), (1, "a"), (2, "b"), (3, "c")):
        for by in (-2, 2):
            if shifted := _shifted(form.operands[index], by):
                yield f"{name} moved by {by}", form.with_operand(index, shifted)


def _scale_register(form: Form, ins: Instruction) -> Changed:
    if not form.name.startswith("v_mfma_scale"):
        return
    if form.operands[4] != form.operands[5]:
        yield "scales exchanged", form.exchanged(4, 5)
    for index, name in ((4, "a"), (5, "b")):
        for by in (-1, 1):
            if shifted := _shifted(form.operands[index], by):
                yield f"scale of {name} moved by {by}", form.with_operand(index, shifted)


def _mfma_format(form: Form, ins: Instruction) -> Changed:
    if form.name.startswith("v_mfma_scale"):
        for name in ("cbsz", "blgp"):
            if not form.modifier(name):
                yield f"{name}:1", replace(form, modifiers=f"{form.modifiers} {name}:1")


_BYTES = {"byte": 1, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}


def _moved_offset(form: Form, steps: tuple[int, ...]) -> Changed:
    offset = int(form.modifier("offset") or 0)
    for step in dict.fromkeys(steps):
        if offset + step >= 0:
            yield f"offset {step:+d}", form.with_modifier("offset", str(offset + step))


def _global_offset(form: Form, ins: Instruction) -> Changed:
    if match := re.match(
        r"(?:global|buffer)_(?:load|store)_[us]?(byte|short|dword(?:x\d)?)", form.name
    ):
        yield from _moved_offset(form, (1, _BYTES[match[1]], 16, -16))


def _lds_offset(form: Form, ins: Instruction) -> Changed:
    if not re.match(r"ds_(read|write|bpermute)", form.name):
        return
    if "2" in form.name.split("_")[1]:
        for name in ("offset0", "offset1"):
            new = int(form.modifier(name) or 0) + 1
            yield f"{name} +1", form.with_modifier(name, str(new))
    elif form.name.startswith("ds_bpermute"):
        yield from _moved_offset(form, (4, 64))
    else:
        size = 16 if "b128" in form.name else 8 if "b64" in form.name else 4
        yield from _moved_offset(form, (size, 4, -size))


def _scalar_offset(form: Form, ins: Instruction) -> Changed:
    if form.name.startswith("s_load"):
        offset = int(form.operands[2], 0)
        for step in (4, 8, -8):
            if offset + step >= 0:
                yield f"offset {step:+d}", form.with_operand(2, hex(offset + step))


_DPP = {
    "row_mirror": "row_half_mirror",
    "row_half_mirror": "row_mirror",
    "quad_perm:[2,3,0,1]": "quad_perm:[1,0,3,2]",
    "quad_perm:[1,0,3,2]": "quad_perm:[2,3,0,1]",
    "row_mask:0xf": "row_mask:0xe",
    "bank_mask:0xf": "bank_mask:0xe",
}


def _lane_move(form: Form, ins: Instruction) -> Changed:
    if form.name.endswith("_dpp"):
        for old, new in _DPP.items():
            if old in form.modifiers:
                yield new, replace(form, modifiers=form.modifiers.replace(old, new))
    if match := re.match(r"v_permlane(16|32)_swap_b32", form.name):
        other = "32" if match[1] == "16" else "16"
        yield f"swaps {other}", replace(form, name=form.name.replace(match[1], other, 1))
        yield "registers exchanged", form.exchanged(0, 1)


def _conversion_select(form: Form, ins: Instruction) -> Changed:
    if not form.name.endswith("_sdwa"):
        return
    for name in ("src0_sel", "src1_sel"):
        old = form.modifier(name)
        new = "WORD_0" if old == "WORD_1" else "WORD_1"
        if old:
            yield (
                f"{name}:{new}",
                replace(form, modifiers=form.modifiers.replace(f"{name}:{old}", f"{name}:{new}")),
            )


# Only siblings that differ wherever the operation does something.
_SIBLINGS = {
    "v_add_f32": "v_sub_f32",
    "v_sub_f32": "v_add_f32",
    "v_mul_f32": "v_add_f32",
    "v_pk_mul_f32": "v_pk_add_f32",
    "v_add_u32": "v_sub_u32",
    "v_sub_u32": "v_add_u32",
    "v_sub_u16": "v_add_u16",
    "v_max_u32": "v_min_u32",
    "v_min_u32": "v_max_u32",
    "v_and_b32": "v_or_b32",
    "v_or_b32": "v_and_b32",
    "v_lshlrev_b32": "v_lshrrev_b32",
    "v_lshrrev_b32": "v_lshlrev_b32",
    "v_lshrrev_b16": "v_lshlrev_b16",
    "v_lshlrev_b64": "v_lshrrev_b64",
    "v_lshl_or_b32": "v_and_or_b32",
    "v_lshl_add_u32": "v_add_lshl_u32",
    "v_or3_b32": "v_and_or_b32",
    "v_and_or_b32": "v_or3_b32",
    "v_mul_lo_u32": "v_mul_hi_u32",
    "v_add3_u32": "v_add_lshl_u32",
    "s_add_u32": "s_sub_u32",
    "s_sub_u32": "s_add_u32",
    "s_add_i32": "s_sub_i32",
    "s_addc_u32": "s_subb_u32",
    "s_subb_u32": "s_addc_u32",
    "s_mul_i32": "s_mul_hi_u32",
    "s_mul_hi_u32": "s_mul_i32",
    "s_lshl_b32": "s_lshr_b32",
    "s_lshr_b32": "s_lshl_b32",
    "s_lshl_b64": "s_lshr_b64",
    "s_lshr_b64": "s_lshl_b64",
    "s_and_b32": "s_or_b32",
    "s_or_b32": "s_and_b32",
}
_CLOSE = {"gt": "ge", "ge": "gt", "lt": "le", "le": "lt", "eq": "ne", "ne": "eq", "lg": "eq"}
_OPPOSITE = {"gt": "le", "ge": "lt", "lt": "ge", "le": "gt", "eq": "ne", "ne": "eq", "lg": "eq"}


def _opcode(form: Form, ins: Instruction) -> Changed:
    if sibling := _SIBLINGS.get(form.base):
        yield sibling, form.named(sibling)
    if form.base in ("v_cndmask_b32", "s_cselect_b32", "s_cselect_b64"):
        yield "choices exchanged", form.exchanged(1, 2)
    if form.base.startswith("v_bitop3"):
        table = int(form.modifier("bitop3"), 0)
        yield "complement", form.with_modifier("bitop3", hex(table ^ 0xFF))
    if form.base == "v_lshl_add_u64":
        yield "shift +1", form.with_operand(2, str(int(form.operands[2]) + 1))


def _fma_sign(form: Form, ins: Instruction) -> Changed:
    if form.base == "v_pk_fma_f32":
        for half in ("lo", "hi"):
            for bits in ("[1,0,0]", "[0,0,1]"):
                if not form.modifier(f"neg_{half}"):
                    changed = replace(form, modifiers=f"{form.modifiers} neg_{half}:{bits}")
                    yield f"neg_{half}:{bits}", changed
    if form.name in ("v_fma_f32", "v_add3_f32"):
        yield "first operand negated", form.with_operand(1, f"-{form.operands[1]}")


def _comparison(form: Form, ins: Instruction) -> Changed:
    if match := re.fullmatch(r"(v_cmp|s_cmp)_(\w\w)_(\w+)", form.base):
        for table in (_CLOSE, _OPPOSITE):
            other = table.get(match[2], match[2])
            if match[1] == "s_cmp":
                other = other.replace("ne", "lg")
            yield other, form.named(f"{match[1]}_{other}_{match[3]}")


def _exec_mask(form: Form, ins: Instruction) -> Changed:
    if form.name == "s_and_saveexec_b64":
        yield "complement", replace(form, name="s_andn2_saveexec_b64")
        saved = form.operands[0]
        yield "mask not applied", replace(form, name="s_mov_b64", operands=(saved, "exec"))
    elif form.operands[:2] == ("exec", "exec"):
        other = {"s_or_b64": "s_and_b64", "s_andn2_b64": "s_and_b64"}.get(form.name)
        if other:
            yield other, replace(form, name=other)
        yield "dropped", NOP


_NEGATED = {"scc0": "scc1", "vccz": "vccnz", "execz": "execnz"}
_NEGATED |= {new: old for old, new in _NEGATED.items()}


def _branch(form: Form, ins: Instruction) -> Changed:
    if form.name.startswith("s_cbranch_"):
        negated = _NEGATED[form.name.removeprefix("s_cbranch_")]
        yield f"on {negated}", replace(form, name=f"s_cbranch_{negated}")


KINDS: dict[str, Callable[[Form, Instruction], Changed]] = {
    "drop s_waitcnt": _drop_wait,
    "weaken s_waitcnt": _weaken_wait,
    "drop s_barrier": _drop_barrier,
    "shorten s_nop": _shorten_nop,
    "MFMA scale select": _scale_select,
    "MFMA register": _mfma_register,
    "MFMA scale register": _scale_register,
    "MFMA format": _mfma_format,
    "memory offset": _global_offset,
    "LDS offset": _lds_offset,
    "scalar load offset": _scalar_offset,
    "lane move": _lane_move,
    "conversion select": _conversion_select,
    "opcode": _opcode,
    "fma sign": _fma_sign,
    "comparison": _comparison,
    "exec mask": _exec_mask,
    "negate branch": _branch,
}


def mutants_of(ins: Instruction, kind: str) -> Iterator[tuple[str, str]]:
    """What one kind of mistake makes of an instruction: what was changed, and the new text."""
    seen = {str(Form.of(ins.text))}
    for change, new in KINDS[kind](Form.of(ins.text), ins):
        if str(new) not in seen:
            seen.add(str(new))
            yield change, str(new)
