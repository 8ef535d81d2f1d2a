"""``aiter_mx.explain``: the route of a shape, without running anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields, replace
from itertools import product
from operator import index
from typing import Any

from aiter_mx.dispatch.dispatcher import route
from aiter_mx.dispatch.route import Route
from aiter_mx.kernels.registry import key_columns, problem_type
from aiter_mx.kernels.spec import Problem
from aiter_mx.target import Target, cpu_target, gpu_target, hardware, with_sums

_DTYPE_NAMES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}


def explain(
    op: str,
    *,
    arch: str | None = None,
    cu_num: int | None = None,
    exact_sums: bool | None = None,
    **shape: object,
) -> Route:
    """The route that a call would take, and why.

    Args:
        op: name of the op, such as ``"linear"``. Layers of several launches, such as
            ``"fused_moe"``, have a route for each of them, which ``warmup`` returns.
        arch: ``"gfx950"`` or ``"sm_90a"``; by default what torch's current device is, and without
            a GPU what CPU tensors run on (the simulator inside ``aiter_mx.simulate()``).
        cu_num: compute units, where they are not those of the architecture's usual GPU.
        exact_sums: whether kernels that add with fewer bits than fp32 are passed over; None for
            what ``AITER_MX_EXACT_SUMS`` says, as in calls.
        shape: the op's problem, such as ``M=1, N=2304, K=6144, out_dtype="bf16"``.

    Returns:
        The route; printing its ``reason`` tells which row or rule decided.

    Raises:
        ValueError: an unknown op, architecture or field, a field left out, or a value that it
            cannot have.

    Example:
        >>> aiter_mx.explain("linear", M=1, N=2304, K=6144, arch="gfx950").backend
        'hip'
    """
    target = hardware(arch) if arch is not None else default_target()
    if cu_num is not None:
        if not isinstance(cu_num, int) or cu_num < 1:
            raise ValueError(f"cu_num must be a whole number of at least 1, got {cu_num!r}")
        target = replace(target, cu_num=cu_num)
    target = with_sums(target, exact_sums)
    key_columns(op)  # an op that is several launches has no route
    return route(op, target, make_problem(op, shape))


def default_target() -> Target:
    """Torch's current GPU; without one, what CPU tensors run on."""
    import torch

    if torch.cuda.is_available():
        return gpu_target(torch.cuda.current_device())
    return cpu_target()


def make_problem(op: str, shape: Mapping[str, object]) -> Problem:
    """The problem of ``op`` with these fields; dtypes may be torch's or their short names.

    Raises:
        ValueError: an unknown op or field, one left out, or a value that it cannot have.
    """
    of_type = problem_type(op)
    known = {field.name: field for field in fields(of_type)}
    unknown = [name for name in shape if name not in known]
    missing = [
        name for name, field in known.items() if field.default is MISSING and name not in shape
    ]
    if unknown or missing:
        needed = ", ".join(name for name, field in known.items() if field.default is MISSING)
        others = ", ".join(name for name, field in known.items() if field.default is not MISSING)
        raise ValueError(
            f"{op} is described by {needed}"
            + (f" and, optionally, {others}; " if others else "; ")
            + (f"{unknown[0]!r} is none of them" if unknown else f"{missing[0]!r} was not given")
        )
    return of_type(**{name: _value(known[name], value) for name, value in shape.items()})


def make_problems(op: str, shape: Mapping[str, object]) -> list[Problem]:
    """Every problem of ``op`` with one value of each field, given as a value or an iterable.

    Raises:
        ValueError: as ``make_problem`` does.
    """
    axes = [
        list(values) if isinstance(values, Iterable) and not isinstance(values, str) else [values]
        for values in shape.values()
    ]
    each = [dict(zip(shape, values, strict=True)) for values in product(*axes)]
    return [make_problem(op, fields) for fields in each]


def _value(field: Field[Any], given: object) -> object:
    if field.type in (bool, "bool") and given not in (False, True):
        raise ValueError(f"{field.name} must be True or False, got {given!r}")
    if field.type in (float, "float") and not isinstance(given, (int, float)):
        raise ValueError(f"{field.name} must be a number, got {given!r}")
    if field.type not in (int, "int"):
        return _DTYPE_NAMES.get(str(given), given)
    try:
        return index(given)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{field.name} must be a whole number, got {given!r}") from None
