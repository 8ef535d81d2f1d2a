"""Finds the kernels of an op: module or package ``aiter_mx.kernels.<op>`` lists them, ``KERNELS``.

The order of ``KERNELS`` is the order of preference where no tuned table decides, except that of
each backend those kernels come last that yield. ``PROBLEM`` is the dataclass of the op's shapes and
dtypes; ``KEY`` names those of its fields that tables choose by, and the others have defaults.
``stand_ins``, where an op has it, gives the keys whose rows serve a problem whose own key has none:
a key is the values of those fields, in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from math import isnan, nan
from operator import attrgetter
from pkgutil import iter_modules

from aiter_mx import kernels
from aiter_mx.kernels.spec import KernelSpec, Key, Problem
from aiter_mx.target import Target

_NOT_OPS = {"declare", "gfx950", "registry", "search", "sm90", "spec", "triton"}
_RENAMED = {
    ("linear", "direct"): "mma_registers",
    ("linear", "mma"): "mma_ring",
    ("linear", "outer"): "wgmma_fp8",
    ("moe_gemm", "boxes"): "wgmma_f16",
    ("moe_gemm", "outer"): "wgmma_fp8",
    ("moe_gemm", "stream"): "mma_ring",
}
"""What older tables call a kernel, and what it is called now."""
LAYERS = ("fused_moe",)
"""Ops that are several launches of others: their problems have ``parts()``, and they no kernels."""
_by_backend: dict[tuple[str, str], tuple[tuple[KernelSpec, ...], list[list[KernelSpec]]]] = {}
"""What ``by_backend`` found in which kernels, of which there may be others."""
_TRUTH = {"True": True, "1": True, "False": False, "0": False}


@cache
def ops() -> tuple[str, ...]:
    """Names of the ops that have kernels."""
    modules = {module.name for module in iter_modules(kernels.__path__)}
    return tuple(sorted(modules - _NOT_OPS - {*LAYERS}))


@cache
def _module(op: str) -> Problem:
    if op in LAYERS:
        raise ValueError(
            f"{op} is several launches, with a route each: aiter_mx.warmup({op!r}, ...) returns "
            f"them, and aiter-mx explain {op} shows them"
        )
    if op not in ops():
        raise ValueError(f"unknown op {op!r}; there are {', '.join(ops())}")
    return import_module(f"aiter_mx.kernels.{op}")


@cache
def problem_type(op: str) -> type[Problem]:
    """The dataclass that holds a problem of ``op``, which may be several launches of others."""
    known = sorted((*ops(), *LAYERS))
    if op not in known:
        raise ValueError(f"unknown op {op!r}; there are {', '.join(known)}")
    problem: type[Problem] = import_module(f"aiter_mx.kernels.{op}").PROBLEM
    return problem


def launches_of(op: str, problem: Problem, arch: str) -> tuple[tuple[str, Problem], ...]:
    """The ops and problems that a problem of ``op`` is made of, most often itself alone."""
    return tuple(problem.parts(arch)) if op in LAYERS else ((op, problem),)


def key_columns(op: str) -> tuple[str, ...]:
    """The fields of a problem of ``op`` by which tables choose, in their order as columns."""
    columns: tuple[str, ...] = _module(op).KEY
    return columns


def field_value(of_type: type[Problem], name: str, text: str) -> int | float | bool | str:
    """A field of a problem from what a table or a command line says of it.

    Raises:
        ValueError: the field is a number or a truth value, and the text is none.
    """
    kind = of_type.__annotations__[name]
    if kind in (bool, "bool"):
        if text not in _TRUTH:
            raise ValueError(f"{name} must be True or False, got {text!r}")
        return _TRUTH[text]
    if kind in (int, "int"):
        return whole_number(name, text)
    if kind in (float, "float"):
        return _number(name, text)
    return text


def whole_number(name: str, text: str) -> int:
    """A count from ASCII digits: ``int`` also reads those of other scripts, and ``1_000``.

    Raises:
        ValueError: something else, or it is negative.
    """
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        raise ValueError(f"{name} must be a whole number, got {text!r}")
    if digits != text:
        raise ValueError(f"{name} must be at least 0, got {text!r}")
    return int(text)


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = nan
    if isnan(number) or not text.isascii() or "_" in text:
        raise ValueError(f"{name} must be a number, got {text!r}")
    return number


@cache
def key_of(op: str) -> Callable[[Problem], Key]:
    """What takes the key of a problem of ``op``, a ``Key``."""
    return attrgetter(*key_columns(op))  # of several names, so that it gives a tuple


def problem_key(op: str, problem: Problem) -> Problem:
    """``problem`` with the fields that tables do not choose by at their defaults."""
    return problem_type(op)(**{name: getattr(problem, name) for name in key_columns(op)})


@cache
def stand_ins(op: str) -> Callable[[Key], tuple[Key, ...]]:
    """What finds the keys whose rows serve another key that has none, the nearest first."""
    found: Callable[[Key], tuple[Key, ...]] = getattr(_module(op), "stand_ins", lambda key: ())
    return found


def kernels_of(op: str) -> tuple[KernelSpec, ...]:
    """The kernels of ``op``, most preferred first but for those that yield."""
    found: tuple[KernelSpec, ...] = _module(op).KERNELS
    return found


def by_backend(op: str, arch: str) -> list[list[KernelSpec]]:
    """The kernels of ``op`` for an architecture, those of each backend together, as preferred."""
    every = kernels_of(op)
    known = _by_backend.get((op, arch))
    if known is not None and known[0] is every:
        return known[1]
    groups: dict[str, list[KernelSpec]] = {}
    for kernel in every:
        if kernel.is_for(arch):
            groups.setdefault(kernel.backend, []).append(kernel)
    _by_backend[op, arch] = every, list(groups.values())
    return _by_backend[op, arch][1]


def in_line(op: str, target: Target, problem: Problem) -> list[KernelSpec]:
    """The kernels of ``op`` in the order to take one in where no tuned table decides."""
    return [
        kernel
        for kernels in by_backend(op, target.arch)
        for kernel in sorted(kernels, key=lambda k: k.yields(target, problem) is not None)
    ]


def find_kernel(op: str, arch: str, backend: str, name: str) -> KernelSpec:
    """The kernel of ``op`` with this backend and name on an architecture.

    Two architectures may have kernels of one name whose structure and parameters differ.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    for kernel in kernels_of(op):
        if (kernel.backend, kernel.name) == (backend, name) and kernel.is_for(arch):
            return kernel
    known = ", ".join(f"{k.backend}/{k.name}" for k in kernels_of(op) if k.is_for(arch))
    text = f"op {op!r} has no kernel {backend}/{name} for {arch}; it has {known}"
    now = _RENAMED.get((op, name))
    if backend == "hip":
        renamed = f"{name} is called {now} now: rename it, or " if now is not None else ""
        text += f"; {renamed}make a new table with aiter-mx tune"
    raise ValueError(text)
