"""What translators of single instructions share: operands as C, vector functions, strict facts."""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import dataclass, field

from aiter_mx.sim.disasm import Instruction, Operand
from aiter_mx.sim.faults import UnknownInstruction
from aiter_mx.sim.isa.tables import C_TYPES, FLOATS, HALF, WIDE, Rule

EXEC = 126


@dataclass(frozen=True)
class Reads:
    """Rows that an instruction reads in some lanes (a C expression)."""

    rows: tuple[int, ...]
    lanes: str = "w->exec"


@dataclass
class Code:
    """The C of one instruction, and what strict mode must know of it.

    Attributes:
        body: statements.
        prepare: statements before the checks.
        reads: vector registers that must be valid.
        flows: for arithmetic, what each row written is made of: it becomes as valid as that, and
            it is an error only when something that must be valid is read.
        writes: vector registers written, in the lanes ``write_lanes``.
        scalar_reads, scalar_writes: scalar registers.
        scalar_flow: the scalar registers written become as valid as those read.
        copies: rows that ``prepare`` fills.
        lane_copy: strict statement that does all the bookkeeping of a move between a lane and a
            scalar register.
        issue: strict statement that starts an asynchronous operation, between checks and body.
        may_skip: whether a mode may leave the instruction out.
        yields: whether another wave may take over before the instruction.
    """

    body: str
    prepare: str = ""
    reads: list[Reads] = field(default_factory=list)
    writes: tuple[int, ...] = ()
    write_lanes: str = "w->exec"
    scalar_reads: tuple[int, ...] = ()
    scalar_writes: tuple[int, ...] = ()
    flows: dict[int, list[Reads]] = field(default_factory=dict)
    scalar_flow: bool = False
    copies: tuple[int, ...] = ()
    lane_copy: str = ""
    issue: str = ""
    may_skip: bool = False
    yields: bool = False


class Modifiers:
    """The modifiers of an instruction; each must be taken, or the instruction is refused."""

    def __init__(self, instruction: Instruction) -> None:
        self._left = dict(instruction.modifiers)
        self._text = instruction.text

    def flag(self, name: str) -> bool:
        """Whether the flag is there."""
        return self._left.pop(name, "0") == "1"

    def take(self, name: str, default: str = "") -> str:
        """The value as written."""
        return self._left.pop(name, default)

    def number(self, name: str, default: int = 0) -> int:
        """The value as a number."""
        text = self._left.pop(name, "")
        return int(text, 0) if text else default

    def bits(self, name: str, count: int, default: int = 0) -> list[int]:
        """The value of a list such as ``op_sel:[0,1]``, filled up to ``count``."""
        text = self._left.pop(name, "")
        found = [int(x) for x in text.strip("[]").split(",")] if text else []
        return found + [default] * (count - len(found))

    def has(self, *names: str) -> bool:
        """Whether any of these is there and not taken yet."""
        return any(name in self._left for name in names)

    def finish(self) -> None:
        """Raise UnknownInstruction if something is left."""
        if self._left:
            raise UnknownInstruction(
                f"the simulator does not know {', '.join(map(repr, self._left))} of {self._text!r}"
            )


def unknown(instruction: Instruction, why: str = "") -> UnknownInstruction:
    """The error that names an instruction."""
    what = f" ({why})" if why else ""
    return UnknownInstruction(
        f"the simulator does not know {instruction.mnemonic}{what}: "
        f"{instruction.text!r} at {instruction.address:#x}"
    )


class Context:
    """One kernel's translation: its register file and the vector functions made so far."""

    def __init__(self, acc_base: int, rows: int, spare_rows: int = 0) -> None:
        self.acc_base = acc_base
        self.rows = rows
        self.spare_rows = spare_rows
        self.functions: dict[str, str] = {}  # by name

    def row(self, operand: Operand, instruction: Instruction) -> int:
        """Index of a vector register's first row.

        Accumulation registers begin in the middle of one file: a vector register of a number
        beyond that is one of them. Spare rows, for copies of the simulator's own, follow.
        """
        if operand.kind not in "va":
            raise unknown(instruction, f"{operand.text!r} is not a vector register")
        first = operand.index + (self.acc_base if operand.kind == "a" else 0)
        if first + operand.count > self.rows + self.spare_rows:
            raise unknown(instruction, f"{operand.text} is beyond the kernel's registers")
        return first

    def rows_of(self, operand: Operand, instruction: Instruction) -> tuple[int, ...]:
        """All rows of a vector register operand."""
        first = self.row(operand, instruction)
        return tuple(range(first, first + operand.count))

    def function(self, text: str) -> str:
        """The name of a C function, given its text with ``NAME`` for the name.

        The name follows from the text, so that kernels can share the compiled function.
        """
        name = f"op_{hashlib.sha256(text.encode()).hexdigest()[:24]}"
        self.functions[name] = text.replace("NAME", name)
        return name


def is_vector(operand: Operand) -> bool:
    """Whether the operand has a value a lane."""
    return operand.kind in ("v", "a")


def scalar_registers(operand: Operand) -> tuple[int, ...]:
    """Scalar registers that the operand reads, EXEC apart (it always holds a value)."""
    if operand.kind != "s" or operand.index >= EXEC:
        return ()
    return tuple(range(operand.index, operand.index + operand.count))


def _half_bits(value: float) -> int:
    (bits,) = struct.unpack("<H", struct.pack("<e", value))
    return int(bits)


def _constant(operand: Operand, letter: str, instruction: Instruction) -> str:
    value = operand.value
    if operand.kind == "float":
        if letter in "dUI":
            return f"{struct.unpack('<Q', struct.pack('<d', value))[0]:#x}ull"
        if letter in "hw":
            return f"{_half_bits(value):#x}u"
        if letter in "xb":
            raise unknown(instruction, f"constant {operand.text} in a 16-bit operand")
        return f"{struct.unpack('<I', struct.pack('<f', value))[0]:#x}u"
    number = int(value)
    if letter == "d" and operand.kind == "literal":
        return f"{number << 32:#x}ull"
    if letter in "UId":
        signed = letter == "I" and operand.kind == "literal" and number >> 31
        return f"{(number - (1 << 32) if signed else number) & (1 << 64) - 1:#x}ull"
    return f"{number & 0xFFFFFFFF:#x}u"


def scalar(operand: Operand, letter: str, instruction: Instruction) -> str:
    """A scalar operand's raw bits as a C expression: u64 for 64-bit types, else u32."""
    wide = letter in WIDE
    if operand.kind in ("int", "float", "literal"):
        return _constant(operand, letter, instruction)
    if operand.kind == "scc":
        return "w->scc"
    if operand.kind == "aperture" and wide:
        return f"{int(operand.value):#x}ull"
    if operand.kind != "s":
        raise unknown(instruction, f"operand {operand.text!r}")
    if operand.index >= EXEC:
        if wide:
            return "w->exec"
        return "(u32)(w->exec >> 32)" if operand.index == EXEC + 1 else "(u32)w->exec"
    if wide and operand.count != 2:
        raise unknown(instruction, f"{operand.text!r} is not a pair of registers")
    return f"s64(w, {operand.index})" if wide else f"w->s[{operand.index}]"


def write_scalar(operand: Operand, wide: bool, value: str, instruction: Instruction) -> str:
    """Statement that writes a scalar register, or a pair of them."""
    if operand.kind != "s":
        raise unknown(instruction, f"destination {operand.text!r}")
    if operand.index >= EXEC:
        if wide:
            return f"set_exec(w, {value});"
        keep, shift = ("0xffffffffull", 32) if operand.index > EXEC else ("~0xffffffffull", 0)
        return f"set_exec(w, (w->exec & {keep}) | (u64)(u32)({value}) << {shift});"
    if wide:
        return f"set_s64(w, {operand.index}, {value});"
    return f"w->s[{operand.index}] = (u32)({value});"


def interpret(letter: str, raw: str, shift: int = 0) -> str:
    """Raw bits read as a type of the tables."""
    return {
        "u": raw,
        "i": f"(i32){raw}",
        "f": f"f32({raw})",
        "U": raw,
        "I": f"(i64){raw}",
        "d": f"f64({raw})",
        "w": f"({raw} >> {shift} & 0xffff)",
        "y": f"({raw} >> {shift} & 0xff)",
        "x": f"(i32)(i16)({raw} >> {shift})",
        "h": f"f16_to_f32((u16)({raw} >> {shift}))",
        "b": f"f32({raw} >> {shift} << 16)",
        "m": f"({raw} & 1)",
    }[letter]


def with_sign(letter: str, value: str, negate: bool, absolute: bool) -> str | None:
    """Source modifiers on a value, or None where the type has none."""
    if not (negate or absolute):
        return value
    if letter in FLOATS:
        value = f"{'fabs' if letter == 'd' else 'fabsf'}({value})" if absolute else value
        return f"-({value})" if negate else value
    if letter == "u":
        value = f"({value} & 0x7fffffff)" if absolute else value
        return f"({value} ^ 0x80000000)" if negate else value
    return None


def store(letter: str, part: int | None, value: str) -> list[tuple[int, str]]:
    """How a result goes to the destination's rows: row and the new bits of a lane.

    ``part`` says which 16 bits are replaced, of ``Y`` which 8; None that the others are cleared.
    """
    if letter in "UId":
        raw = f"bits64({value})" if letter == "d" else f"(u64){value}"
        return [(0, f"(u32)({raw})"), (64, f"(u32)({raw} >> 32)")]
    if letter == "F":
        return [(0, f"bits32({value})"), (64, f"bits32({value}2)")]
    if letter == "f":
        return [(0, f"bits32({value})")]
    if letter in "ui":
        return [(0, f"(u32){value}")]
    if letter == "Y":
        shift = 8 * (part or 0)
        return [(0, f"(D[l] & {~(0xFF << shift) & 0xFFFFFFFF:#x}u) | {value} << {shift}")]
    raw = {
        "h": f"f32_to_f16({value})",
        "H": f"f32_to_f16({value})",
        "b": f"f32_to_bf16({value})",
    }.get(letter, value)
    if part is None:
        return [(0, f"(u32)(u16){raw}")]
    return [(0, f"(D[l] & {0xFFFF0000 >> 16 * part:#x}u) | (u32)(u16){raw} << {16 * part}")]


def result_statements(rule: Rule, letter: str) -> str:
    """``r = expression; rest`` with the result's C type."""
    first, _, rest = rule.expression.partition(";")
    second = "float r2;" if letter == "F" else ""
    return f"{C_TYPES[letter]} r = ({C_TYPES[letter]})({first}); {second}{rest};"


def names_in(text: str) -> set[str]:
    """Identifiers in a C expression."""
    return set(re.findall(r"\b[A-Za-z_]\w*\b", text))


HALF_LETTERS = HALF + "WH"
