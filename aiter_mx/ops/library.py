"""Ops in ``torch.library``, and which calls go there: those that torch must see.

Any other call goes straight to its launch, as torch's dispatcher takes longer than small kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from aiter_mx.ops.checks import check_result, refuse_no_tensor, refuse_shape

PLAIN = frozenset({Tensor, torch.nn.Parameter})
"""Types of tensors with which a call may go straight to a launch."""
PLAIN_OR_NONE = PLAIN | {type(None)}


def is_traced(tensors: Sequence[object]) -> bool:
    """Whether torch compiles the caller, a dispatch mode is on, or a tensor is of a subclass."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    return not PLAIN_OR_NONE.issuperset(map(type, tensors)) and any(
        type(tensor) not in PLAIN_OR_NONE and isinstance(tensor, Tensor) for tensor in tensors
    )


def wants_gradient(*tensors: object) -> bool:
    """Whether torch would record what is computed from these, for a gradient that no op has.

    Such calls go through torch's dispatcher, whose backward pass then raises instead of stopping
    there in silence.
    """
    return torch.is_grad_enabled() and any(
        isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors
    )


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
    return op


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
