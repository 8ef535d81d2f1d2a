"""From llvm-objdump's text to instructions, with every operand and modifier accounted for."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from aiter_mx.jit.toolchain import llvm_tool
from aiter_mx.sim.faults import UnknownInstruction

_COMMA = re.compile(r",(?![^(\[]*[)\]])")  # in no brackets
_LINE = re.compile(r"\s+(\S+)\s*(.*?)\s*// ([0-9A-F]{12}):((?: [0-9A-F]{8})+)")
_REGISTER = re.compile(r"([vsa])(?:(\d+)|\[(\d+)(?::(\d+))?\])")
_MODIFIER = re.compile(r"([a-z][a-z0-9_]*)(?::(\S+))?")
_NAMED = {"vcc": 106, "flat_scratch": 102, "xnack_mask": 104, "exec": 126}
_SINGLES = {
    f"{name}_{half}": number + (half == "hi")
    for name, number in _NAMED.items()
    for half in ("lo", "hi")
} | {"m0": 124}
# Flat addresses that mean LDS or scratch; host addresses have fewer bits. Also in csrc/memory.h.
_APERTURES = {"src_shared_base": 1 << 48, "src_private_base": 1 << 49}
_FLOATS = {
    "0.5": 0.5,
    "1.0": 1.0,
    "2.0": 2.0,
    "4.0": 4.0,
    "0.15915494": 0.15915494309189532,
    "0.15915494309189532": 0.15915494309189532,
    "0.15915494309189533": 0.15915494309189532,
    "0.1592": 0.15915494309189532,
}


@dataclass(frozen=True)
class Operand:
    """An operand as written.

    Attributes:
        kind: ``v``, ``a`` or ``s`` register, ``int`` or ``float`` constant, ``literal`` (32 raw
            bits), ``aperture``, ``off``, ``null``, ``scc``, or ``name`` for anything else.
        index: first register.
        count: how many registers.
        value: of a constant.
        negate, absolute: float source modifiers.
        sign_extend: SDWA's ``sext``.
        text: as written.
    """

    kind: str
    index: int = 0
    count: int = 1
    value: float = 0
    negate: bool = False
    absolute: bool = False
    sign_extend: bool = False
    text: str = ""


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        address: in the code object's address space.
        words: its encoding.
        mnemonic: without encoding suffix.
        encoding: ``e32``, ``e64``, ``dpp``, ``sdwa`` or empty.
        operands: as written, destinations first.
        modifiers: name to value; a flag has the value ``1``.
        text: as written.
    """

    address: int
    words: tuple[int, ...]
    mnemonic: str
    encoding: str
    operands: tuple[Operand, ...]
    modifiers: dict[str, str] = field(default_factory=dict)
    text: str = ""

    @property
    def end(self) -> int:
        """Address of the next instruction."""
        return self.address + 4 * len(self.words)

    @property
    def branch_target(self) -> int:
        """Where a branch with a 16-bit word offset goes."""
        (offset,) = struct.unpack("<h", struct.pack("<H", self.words[0] & 0xFFFF))
        return int(self.end + 4 * offset)


@cache  # few are different
def parse_operand(text: str) -> Operand:
    """One operand. Raises UnknownInstruction for a form that is not known."""
    body, negate, absolute, sign_extend = text, False, False, False
    if match := re.fullmatch(r"sext\((.*)\)", body):
        body, sign_extend = match[1], True
    if match := re.fullmatch(r"lit\((.*)\)", body):
        body = match[1]
    if match := re.fullmatch(r"neg\((.*)\)", body):
        body, negate = match[1], True
    elif re.match(r"-[vsa|a]", body):
        body, negate = body[1:], True
    if match := re.fullmatch(r"\|(.*)\||abs\((.*)\)", body):
        body, absolute = match[1] or match[2], True

    def operand(kind: str, index: int = 0, count: int = 1, value: float = 0) -> Operand:
        return Operand(kind, index, count, value, negate, absolute, sign_extend, text)

    if match := _REGISTER.fullmatch(body):
        first = int(match[2] or match[3])
        last = int(match[4]) if match[4] else first
        return operand(match[1], first, last - first + 1)
    if body in _NAMED:
        return operand("s", _NAMED[body], 2)
    if body in _SINGLES:
        return operand("s", _SINGLES[body])
    if body in ("off", "null"):
        return operand(body)
    if body in ("scc", "src_scc"):
        return operand("scc")
    if body in _APERTURES:
        return operand("aperture", value=_APERTURES[body])
    if re.fullmatch(r"0x[0-9a-f]+", body):
        return operand("literal", value=int(body, 16))
    if re.fullmatch(r"-?\d+", body):
        return operand("int", value=int(body))
    if body.lstrip("-") in _FLOATS:
        value = _FLOATS[body.lstrip("-")]
        return operand("float", value=-value if body.startswith("-") else value)
    return operand("name")


def _split(text: str) -> tuple[list[str], str]:
    """Operands between commas, and the modifiers after the last of them."""
    parts = [part.strip() for part in _COMMA.split(text)]
    words = parts.pop().split(" ")
    parts.append(words[0])
    return [part for part in parts if part], " ".join(words[1:])


def _modifiers(text: str, whole: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in text.split():
        match = _MODIFIER.fullmatch(word)
        if not match:
            raise UnknownInstruction(f"cannot read modifier {word!r} of {whole!r}")
        found[match[1]] = match[2] or "1"
    return found


def parse_line(line: str) -> Instruction | None:
    """The instruction on one line of a disassembly, or None where there is none."""
    match = _LINE.match(line)
    if not match:
        return None
    mnemonic, rest, address, words = match.groups()
    text = f"{mnemonic} {rest}".strip()
    name, encoding = mnemonic, ""
    if split := re.fullmatch(r"(v_.*)_(e32|e64|dpp|sdwa)", mnemonic):
        name, encoding = split[1], split[2]
    if re.match(r"s_(waitcnt|sendmsg|getreg|setreg|nop|endpgm|code_end|sleep|setprio)", name):
        operands, modifiers = [rest] if rest else [], ""
    elif rest and ("," in rest or " " not in rest or not _is_modifier(rest.split(" ")[0])):
        operands, modifiers = _split(rest)
    else:
        operands, modifiers = [], rest
    # Operands without a comma before a first modifier: "v_nop", "buffer_wbl2 sc0".
    if len(operands) == 1 and _is_modifier(operands[0]):
        operands, modifiers = [], f"{operands[0]} {modifiers}"
    return Instruction(
        int(address, 16),
        tuple(int(word, 16) for word in words.split()),
        name,
        encoding,
        tuple(parse_operand(part) for part in operands),
        _modifiers(modifiers, text),
        text,
    )


def _is_modifier(word: str) -> bool:
    return word in ("sc0", "sc1", "nt", "glc", "slc") or (":" in word and "[" not in word)


def disassemble(image: bytes) -> list[Instruction]:
    """All instructions of a code object, by address.

    Raises:
        ToolchainError: there is no llvm-objdump that knows gfx950.
        UnknownInstruction: the disassembler printed something that is not an instruction.
    """
    with tempfile.TemporaryDirectory(prefix="aiter_mx-") as folder:
        path = Path(folder) / "k.hsaco"
        path.write_bytes(image)
        run = subprocess.run(
            [str(llvm_tool("llvm-objdump")), "-d", str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
    if run.returncode:
        raise UnknownInstruction(f"llvm-objdump failed: {run.stderr.strip()}")
    return [found for line in run.stdout.splitlines() if (found := parse_line(line))]
