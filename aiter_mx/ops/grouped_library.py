"""``grouped_gemm`` in ``torch.library``, through which calls go that torch traces."""

from __future__ import annotations

from typing import Any

import torch

from aiter_mx.ops.checks import DTYPES, refuse_no_tensor, shape_text
from aiter_mx.ops.grouped_check import grouped_problem


@torch.library.custom_op("aiter_mx::grouped_gemm", mutates_args=())
def _op(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    starts: torch.Tensor | None,
    ends: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: torch.Tensor | None = None,
    expected_rows: int = 0,
    a_scale_layout: str = "row_major",
    b_scale_layout: str = "row_major",
) -> torch.Tensor:
    from aiter_mx.ops.grouped_gemm import compute

    return compute(
        a, a_scale, b, b_scale, starts, ends, None, out_dtype, bias, expected_rows,
        a_scale_layout, b_scale_layout,
    )  # fmt: skip


@_op.register_fake
def _fake(*operands: Any, **options: Any) -> torch.Tensor:
    problem, a = grouped_problem(*operands, **options), operands[0]
    fake: torch.Tensor = a.new_empty((*a.shape[:-1], problem.N), dtype=DTYPES[problem.out_dtype])
    return fake


@torch.library.custom_op("aiter_mx::grouped_gemm_out", mutates_args=("out",))
def _out_op(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    starts: torch.Tensor | None,
    ends: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    expected_rows: int = 0,
    a_scale_layout: str = "row_major",
    b_scale_layout: str = "row_major",
) -> None:
    from aiter_mx.ops.grouped_gemm import compute

    compute(
        a, a_scale, b, b_scale, starts, ends, out, out.dtype, bias, expected_rows,
        a_scale_layout, b_scale_layout,
    )  # fmt: skip


@_out_op.register_fake
def _out_fake(*operands: Any, **options: Any) -> None:
    a, out = operands[0], operands[6]
    problem = grouped_problem(*(*operands[:6], out.dtype, *operands[7:]), **options)
    expected = [*a.shape[:-1], problem.N]
    if list(out.shape) != expected:
        raise ValueError(f"out must be {expected}, got {shape_text(out)}")


def grouped_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    starts: torch.Tensor | None,
    ends: torch.Tensor,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
    expected_rows: int,
    a_scale_layout: str,
    b_scale_layout: str,
) -> torch.Tensor:
    """``aiter_mx.ops.grouped_gemm.compute`` of a call that torch traces, or whose arguments are no
    plain tensors."""
    refuse_no_tensor(a=a, a_scale=a_scale, b=b, b_scale=b_scale, group_offs=ends)
    refuse_no_tensor(("starts", "bias", "out"), starts=starts, bias=bias, out=out)
    if out is None:
        result: torch.Tensor = _op(
            a, a_scale, b, b_scale, starts, ends, out_dtype, bias, expected_rows,
            a_scale_layout, b_scale_layout,
        )  # fmt: skip
        return result
    if out.dtype != out_dtype:
        raise TypeError(f"out must be of out_dtype {out_dtype}, got {out.dtype}")
    _out_op(
        a, a_scale, b, b_scale, starts, ends, out, bias, expected_rows,
        a_scale_layout, b_scale_layout,
    )  # fmt: skip
    return out
