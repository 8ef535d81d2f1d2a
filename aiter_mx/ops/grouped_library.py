"""``grouped_gemm`` in ``torch.library``, through which calls go that torch traces."""

from __future__ import annotations

from typing import Any

import torch

from aiter_mx.ops.checks import DTYPES, check_result, refuse_no_tensor, refuse_shape
from aiter_mx.ops.grouped_check import grouped_problem

_SCHEMA = (
    "(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? starts, Tensor ends, {}, "
    "Tensor? bias, SymInt expected_rows, str a_scale_layout, str b_scale_layout) -> {}"
)
_AT = 6  # where the dtype of the result is among the arguments, or the result itself


def _run(*arguments: Any) -> torch.Tensor:
    from aiter_mx.ops.grouped_gemm import compute

    with_out: tuple[Any, ...] = (*arguments[:_AT], None, *arguments[_AT:])
    return compute(*with_out)


def _run_out(*arguments: Any) -> None:
    from aiter_mx.ops.grouped_gemm import compute

    out = arguments[_AT]
    with_dtype: tuple[Any, ...] = (*arguments[: _AT + 1], out.dtype, *arguments[_AT + 1 :])
    compute(*with_dtype)


_op = torch.library.custom_op(
    "aiter_mx::grouped_gemm",
    _run,
    mutates_args=(),
    schema=_SCHEMA.format("ScalarType out_dtype", "Tensor"),
)
_out_op = torch.library.custom_op(
    "aiter_mx::grouped_gemm_out",
    _run_out,
    mutates_args=("out",),
    schema=_SCHEMA.format("Tensor(a!) out", "()"),
)


@_op.register_fake
def _(*arguments: Any) -> torch.Tensor:
    problem, a = grouped_problem(*arguments), arguments[0]
    fake: torch.Tensor = a.new_empty((*a.shape[:-1], problem.N), dtype=DTYPES[problem.out_dtype])
    return fake


@_out_op.register_fake
def _(*arguments: Any) -> None:
    a, out = arguments[0], arguments[_AT]
    plain: tuple[Any, ...] = (*arguments[:_AT], out.dtype, *arguments[_AT + 1 :])
    problem = grouped_problem(*plain)
    refuse_shape(out, (*a.shape[:-1], problem.N))


def grouped_gemm(
    operands: tuple[torch.Tensor | None, ...],
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
    options: tuple[int | str, ...],
) -> torch.Tensor:
    """``aiter_mx.ops.grouped_gemm.compute`` of a call that torch traces, or whose arguments are no
    plain tensors.

    Args:
        operands: a, a_scale, b, b_scale, starts and ends.
        out: where to write the result, or None.
        out_dtype: dtype of the result.
        bias: or None.
        options: expected_rows, a_scale_layout and b_scale_layout.
    """
    names = ("a", "a_scale", "b", "b_scale", "starts", "group_offs")
    given = dict(zip(names, operands, strict=True))
    refuse_no_tensor(("starts", "bias", "out"), **given, bias=bias, out=out)
    if out is None:
        result: torch.Tensor = _op(*operands, out_dtype, bias, *options)
        return result
    check_result(out, out_dtype)
    _out_op(*operands, out, bias, *options)
    return out
