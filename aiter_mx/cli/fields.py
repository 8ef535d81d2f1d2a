"""Reads an op's shape: ``--M 1-16 --N 2304 --K 6144``, or ``--shape 1-16x2304x6144``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiter_mx.kernels.spec import Problem

Axis = list[int] | list[str]

DECODE_LINEARS = {
    "qkv": (2304, 6144),
    "gate_up": (1536, 6144),
    "o_proj": (6144, 2048),
    "down": (6144, 1536),
}
"""(N, K) of a dense layer of a large model on four GPUs."""
MOST_SHAPES = 100_000
"""Of a command: each takes some microseconds to route, and seconds to compile."""


def parse_axis(text: str) -> Axis:
    """The values of one field: ``1``, ``1,2,4``, ``1-16`` and mixtures; words stay words.

    Raises:
        ValueError: a range that is empty.
    """
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            return text.split(",")
        values = range(int(first), int(last or first) + 1)
        if not values:
            raise ValueError(f"the range {part!r} is empty")
        if len(numbers) + len(values) > MOST_SHAPES:
            raise ValueError(f"{text!r} has more than {MOST_SHAPES:,} values")
        numbers += values
    return numbers


def parse_fields(arguments: Sequence[str]) -> dict[str, Axis]:
    """Fields from options: ``--M 1-16``, ``--out-dtype=fp16``.

    Raises:
        ValueError: something that is not an option with a value.
    """
    fields: dict[str, Axis] = {}
    rest = list(arguments)
    while rest:
        option = rest.pop(0)
        name, equals, value = option.removeprefix("--").partition("=")
        if not option.startswith("--") or not name or not (equals or rest):
            raise ValueError(f"expected a field and its value, as in --M 1, got {option!r}")
        fields[name.replace("-", "_")] = parse_axis(value if equals else rest.pop(0))
    return fields


def parse_shape(text: str) -> dict[str, Axis]:
    """Fields from ``MxNxK``.

    Raises:
        ValueError: not three numbers, lists or ranges.
    """
    parts = [parse_axis(part) for part in text.split("x")]
    if len(parts) != 3 or not all(isinstance(value, int) for part in parts for value in part):
        raise ValueError(f"expected a shape MxNxK, as in 1-16x2304x6144, got {text!r}")
    return dict(zip("MNK", parts, strict=True))


def problems(op: str, fields: Mapping[str, Axis]) -> list[Problem]:
    """Every problem of ``op`` with one value of each field.

    Raises:
        ValueError: an unknown op or field, or a value that the field cannot have.
    """
    from aiter_mx.dispatch.explain import make_problems
    from aiter_mx.kernels.registry import field_value, problem_type

    count = prod(len(values) for values in fields.values())
    if count > MOST_SHAPES:
        raise ValueError(f"these ranges have {count:,} shapes, and {MOST_SHAPES:,} is the most")
    of_type = problem_type(op)
    types = of_type.__annotations__
    read: dict[str, object] = dict(fields)
    for name, values in fields.items():
        if types.get(name) in (int, "int") and not all(isinstance(v, int) for v in values):
            given = ",".join(map(str, values))
            raise ValueError(f"{name} must be a whole number, got {given!r}")
        if types.get(name) in (bool, "bool", float, "float"):
            read[name] = [field_value(of_type, name, str(value)) for value in values]
    return make_problems(op, read)
