"""An ``asm`` statement as C++: its operands become variables, its instructions calls of ptx.py."""

from __future__ import annotations

import re

from op_tests.emulated_sm90.brackets import matching, split
from op_tests.emulated_sm90.ptx import Operands, UnknownPTX, emit

_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_OF_CONSTRAINT = {
    "r": "unsigned",
    "l": "unsigned long long",
    "h": "uint16_t",
    "n": "long long",
    "f": "float",
    "d": "double",
}
_OF_REGISTER = {
    "pred": "bool",
    "b16": "uint16_t",
    "u16": "uint16_t",
    "f16": "uint16_t",
    "b32": "unsigned",
    "u32": "unsigned",
    "f16x2": "unsigned",
    "s32": "int",
    "f32": "float",
    "b64": "unsigned long long",
    "u64": "unsigned long long",
}


def template_of(text: str) -> str:
    """The PTX of a statement, on one line."""
    parts = "".join(_STRING.findall(split(text, ":")[0]))
    return " ".join(parts.replace("\\n", " ").replace("\\t", " ").split())


class Statement:
    """An ``asm`` statement.

    Attributes:
        site: its number in the source, which instructions that a whole warp has to reach compare.
        template: its PTX.
        operands: constraints and expressions.
        outputs: how many of these are written.
    """

    def __init__(self, site: int, text: str) -> None:
        parts = split(text, ":")
        if _STRING.sub("", parts[0]).strip():
            raise UnknownPTX(f"a template that is not all strings: {parts[0]}")
        self.site, self.template = site, template_of(text)
        groups = [[one.strip() for one in split(part, ",") if one.strip()] for part in parts[1:3]]
        self.outputs = len(groups[0]) if groups else 0
        self.operands: list[tuple[str, str]] = []
        for one in (one for group in groups for one in group):
            constraint = _STRING.match(one)
            assert constraint, one
            self.operands.append((constraint[1], one[constraint.end() :].strip()))

    def translated(self) -> str:
        """A C++ statement without its semicolon.

        Raises:
            UnknownPTX: the emulator has no such instruction.
        """
        template = self.template
        if template.startswith("{") and matching(template, 0) == len(template):
            template = template[1:-1].strip()
        if not template:
            return "do { } while (0)"
        in_place = "wgmma.mma_async" in template  # whose sums stay where they are
        declared, body = self._operands(in_place), []
        for code in map(str.strip, split(template, ";")):
            while label := re.match(r"(\$?\w+):(?!:)", code):
                body.append(f"{label[1]}_{self.site}_:;")
                code = code[label.end() :].strip()
            if registers := re.match(r"\.reg\s+\.(\w+)\s+(.*)", code):
                type_ = _OF_REGISTER[registers[1]]
                declared += [f"{type_} {name.strip()}_{{}};" for name in registers[2].split(",")]
            elif code:
                body.append(self._instruction(code))
        if not in_place:
            written = enumerate(self.operands[: self.outputs])
            body += [f"emulated::put({expression}, a{n}_);" for n, (_, expression) in written]
        return "do { " + " ".join(declared + body) + " } while (0)"

    def _operands(self, in_place: bool) -> list[str]:
        declared = []
        for n, (constraint, expression) in enumerate(self.operands):
            type_ = _OF_CONSTRAINT[constraint.strip("=+&")]
            value = f"emulated::as<{type_}>{expression}"
            if n >= self.outputs:
                declared.append(f"const {type_} a{n}_ = {value};")
            elif not in_place:
                start = value if "+" in constraint else f"({type_})0"
                declared.append(f"{type_} a{n}_ = {start};")
        return declared

    def _instruction(self, code: str) -> str:
        guard = ""
        if found := re.match(r"@(!?)(\w+|%\d+)\s+", code):
            predicate = f"a{found[2][1:]}_" if found[2].startswith("%") else f"{found[2]}_"
            guard = f"if ({found[1]}{predicate}) "
            code = code[found.end() :]
        opcode = re.match(r"[\w.:]+", code)
        assert opcode, code
        texts = [each.strip() for each in split(code[opcode.end() :], ",") if each.strip()]
        of = Operands(self.site, texts, [expression for _, expression in self.operands])
        return f"{guard}{{ {emit(opcode[0], of)} }}"
