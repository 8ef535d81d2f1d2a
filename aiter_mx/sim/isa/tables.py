"""How the instruction tables are written.

One line is one instruction: name, type of the destination, types of the sources, C expression.
In the expression ``a b c`` are the sources, ``d`` the destination's old value, ``l`` the lane;
``r`` is the result in whatever follows the first semicolon, and ``k`` a one-bit result a lane.
``-`` stands for no destination or no source.

========  ==========================================================================
type      meaning
========  ==========================================================================
``u i f`` 32 bits: unsigned, signed, float
``U I d`` 64 bits in two registers: unsigned, signed, double
``w x h`` 16 bits, the half that op_sel picks: unsigned, signed, half float
``b``     16 bits as bfloat16
``W H``   destination only: 16 bits (``H`` half float), the other half of the register is kept
``y``     8 bits, the byte that two bits of op_sel pick; of a first source
``Y``     destination only: as ``y``, and the other bytes of the register are kept
``F``     a pair of f32 in two registers; as a destination set ``r`` and ``r2``
``m``     one bit a lane, from a pair of scalar registers
``k``     destination: one bit a lane into a pair of scalar registers
========  ==========================================================================
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """One line of a table."""

    name: str
    result: str
    sources: str
    expression: str


C_TYPES = {
    "u": "u32",
    "i": "i32",
    "f": "float",
    "U": "u64",
    "I": "i64",
    "d": "double",
    "w": "u32",
    "W": "u32",
    "H": "float",
    "y": "u32",
    "Y": "u32",
    "x": "i32",
    "h": "float",
    "b": "float",
    "m": "u32",
    "F": "float",
}
WIDE = "UIdF"
HALF = "wxhb"
FLOATS = "fdhbFH"


def table(text: str) -> dict[str, Rule]:
    """Read a table as the module's docstring describes it."""
    rules = {}
    for line in text.strip().splitlines():
        if line and not line.startswith("#"):
            name, result, sources, expression = line.split(None, 3)
            rules[name] = Rule(
                name, result.replace("-", ""), sources.replace("-", ""), expression.strip()
            )
    return rules


def family(template: str, **choices: str) -> str:
    """Lines of ``template`` with each placeholder replaced by each of its space-separated values.

    All choices advance together: the first values make the first lines, and so on.
    """
    lists = {name: values.split("|") for name, values in choices.items()}
    count = len(next(iter(lists.values())))
    return "\n".join(
        template.format(**{name: values[i].strip() for name, values in lists.items()})
        for i in range(count)
    )
