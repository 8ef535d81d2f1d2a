"""Ops in ``torch.library``, and which calls go there: those that torch must see.

Any other call goes straight to its launch, as torch's dispatcher takes longer than small kernels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from aiter_mx.checks import check_result, refuse_no_tensor, refuse_shape

PLAIN = frozenset({Tensor, torch.nn.Parameter})
"""Types of tensors with which a call may go straight to a launch."""
PLAIN_OR_NONE = PLAIN | {type(None)}


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def is_traced(tensors: Sequence[object]) -> bool:
    """Whether torch compiles the caller, a dispatch mode is on, or a tensor is of a subclass or on
    the meta device."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    if torch._C._is_tracing():
        raise NotImplementedError("torch.jit.trace")  # name_obstacle says more
    if not PLAIN_OR_NONE.issuperset(map(type, tensors)):
        return any(type(t) not in PLAIN_OR_NONE and isinstance(t, Tensor) for t in tensors)
    first = tensors[0]
    return isinstance(first, Tensor) and first.is_meta


def in_clear(op: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """``op``, whose errors about what it cannot take say what that is: see ``name_obstacle``."""

    @wraps(op)
    def call(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
        try:
            return op(*arguments, **named)
        except Exception as error:
            name_obstacle(op, error, arguments, named)
            raise

    return call


def name_obstacle(
    op: Callable[..., Any], error: Exception, arguments: Sequence[Any], named: Mapping[str, Any]
) -> None:
    """Raise an error that tells more than ``error`` where a call cannot be served at all.

    That is inside of torch's function transforms and tracers, and for tensors that are not dense.
    It is asked when something went wrong already, as asking costs as much as a small launch.
    """
    if torch.compiler.is_compiling():
        return
    name = op.__name__
    if torch._C._functorch.maybe_current_level() is not None:
        raise NotImplementedError(
            f"{name} has no rule for torch.func's transforms (vmap, grad, jvp): call it outside of "
            "them, on whole tensors"
        ) from error
    if torch._C._is_tracing():
        raise NotImplementedError(
            f"torch.jit.trace cannot record {name}: use torch.compile or torch.export"
        ) from error
    try:
        given = inspect.signature(op).bind(*arguments, **named).arguments
    except TypeError:
        return
    is_unhashable = isinstance(error, TypeError) and "unhashable" in str(error)
    for key, value in given.items():
        if not isinstance(value, Tensor):
            if is_unhashable and not isinstance(value, Hashable):
                raise TypeError(f"{name} takes no {key}={value!r}") from error
        elif value.is_nested:
            raise ValueError(f"{key} must be a dense tensor, got a nested one") from error
        elif value.layout is not torch.strided:
            raise ValueError(
                f"{key} must be a dense tensor, got one of layout {value.layout}; call "
                f"{key}.to_dense()"
            ) from error


def wants_gradient(*tensors: object) -> bool:
    """Whether torch would record what is computed from these, for a gradient that no op has.

    Such calls go through torch's dispatcher, whose backward pass then raises instead of stopping
    there in silence.
    """
    if forward_ad._current_level >= 0:
        refuse_tangents(tensors)
    if torch._C._is_tracing():
        raise NotImplementedError("torch.jit.trace")  # name_obstacle says more
    return torch.is_grad_enabled() and any(
        isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors
    )


def with_memory(tensor: Tensor) -> Tensor:
    """``tensor``, as zeros where it is one that autograd made without memory for them."""
    return torch.zeros_like(tensor) if tensor._is_zerotensor() else tensor


def refuse_tangents(tensors: Sequence[object]) -> None:
    """Raise NotImplementedError for a dual number of forward-mode differentiation."""
    for tensor in tensors:
        if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                "an argument carries a tangent of torch.autograd.forward_ad, and the ops of "
                "aiter_mx have no forward-mode derivative; call them on what unpack_dual() gives "
                "as primal"
            )


_OPTIONS: dict[str, tuple[tuple[type, ...], str]] = {
    "ScalarType": ((torch.dtype,), "a torch.dtype"),
    "str": ((str,), "text"),
    "bool": ((bool, torch.SymBool), "True or False"),
    "SymInt": ((int, torch.SymInt), "a whole number, an int"),
}
"""What the types of a schema take, and what to call it; others are left to torch."""


def _checking_options(op: Callable[..., Any], schema: str) -> Callable[..., Any]:
    """``op``, whose options are of their types or named, where torch would speak of its schema."""
    declared = schema[1 : schema.index(") ->")].split(", ")
    options = [
        (at, each.split("=")[0].split()[1], *_OPTIONS[each.split()[0]])
        for at, each in enumerate(declared)
        if each.split()[0] in _OPTIONS
    ]

    def call(*arguments: Any) -> Any:
        for at, name, types, called in options:
            if at < len(arguments) and not isinstance(arguments[at], types):
                raise TypeError(f"{name} must be {called}, got {arguments[at]!r}")
        return op(*arguments)

    return call


def register(
    name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """The op ``aiter_mx::name``, which may write to an argument ``Tensor(a!) out``.

    Args:
        name: of the op.
        schema: arguments and results, as torch's schemas have them.
        run: computes the results.
        fake: makes results that have shapes, dtypes and devices alone, or raises.
    """
    mutated = ("out",) if "(a!) out" in schema else ()
    op = torch.library.custom_op(f"aiter_mx::{name}", run, mutates_args=mutated, schema=schema)
    op.register_fake(fake)
    return _checking_options(op, schema)


def register_with_out(
    name: str,
    arguments: str,
    results: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    out_at: int,
    stands_for: Callable[[Tensor], tuple[Any, ...]],
) -> Callable[[tuple[Any, ...], Tensor | None, torch.dtype], Any]:
    """The ops ``aiter_mx::name`` and ``aiter_mx::name_out``, and what calls one or the other.

    Args:
        name: of the op.
        arguments: of its schema.
        results: likewise; the first of several is what ``out`` takes.
        run: has the arguments, and ``out`` by its name where there is one.
        fake: ``run`` of fake tensors without ``out``.
        out_at: where ``out`` is among the arguments of ``name_out``.
        stands_for: the arguments that an ``out`` says itself, which ``name_out`` does not have.

    Returns:
        What computes a call, given the arguments, ``out`` or None, and the dtype of the result. It
        raises TypeError for what should be a tensor and is none.
    """
    declared = arguments.split(", ")
    tensors = [
        (at, each.split("=")[0].split()[1])
        for at, each in enumerate(declared)
        if each.startswith("Tensor")
    ]
    optional = [name for at, name in tensors if declared[at].startswith("Tensor?")]
    left_out = len(stands_for(torch.empty(0)))
    before = [each.removesuffix("=None") for each in declared[:out_at]]
    with_out = ", ".join([*before, "Tensor(a!) out", *declared[out_at + left_out :]])

    def given(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return *arguments[:out_at], *stands_for(arguments[out_at]), *arguments[out_at + 1 :]

    def run_out(*arguments: Any) -> None:
        run(*given(arguments), out=arguments[out_at])

    def fake_out(*arguments: Any) -> None:
        result = fake(*given(arguments))
        refuse_shape(arguments[out_at], (result if isinstance(result, Tensor) else result[0]).shape)

    op = register(name, f"({arguments}) -> {results}", run, fake)
    op_out = register(f"{name}_out", f"({with_out}) -> ()", run_out, fake_out)

    def call(arguments: tuple[Any, ...], out: Tensor | None, out_dtype: torch.dtype) -> Any:
        refuse_no_tensor(optional, **{name: arguments[at] for at, name in tensors})
        if out is None:
            return op(*arguments)
        check_result(out, out_dtype)
        op_out(*arguments[:out_at], out, *arguments[out_at + left_out :])
        return out

    return call
