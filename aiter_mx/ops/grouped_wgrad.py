"""The gradients of ``grouped_gemm``, over MX-FP8 operands: of its rows, and of its weights."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from aiter_mx.checks import (
    BLOCK,
    DTYPE_NAMES,
    DTYPES,
    INDEX_NAMES,
    SCALE_DTYPES,
    check_out,
    check_tensor,
    checking,
    either,
    refuse_alignment,
    shape_text,
)
from aiter_mx.codec import FLOAT8_NAMES
from aiter_mx.kernels.grouped_wgrad import GroupedWgradProblem
from aiter_mx.kernels.grouped_wgrad.problem import START_COLUMNS
from aiter_mx.launch import Run
from aiter_mx.ops.grouped_gemm import grouped_gemm
from aiter_mx.plan import Plans, bind
from aiter_mx.registration import in_clear, is_traced, register_with_out
from aiter_mx.target import cpu_target, target_of


@in_clear
def grouped_gemm_dgrad(
    grad: Tensor,
    grad_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    group_offs: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    out_offs: Tensor | None = None,
    out_rows: int | None = None,
    exact_sums: bool | None = None,
) -> Tensor:
    """The gradient of ``grouped_gemm``'s rows: ``out[m] = grad[m] @ b[g].T`` for each group g.

    The forward product reduces over K and this one over N, so that b is the weights quantised
    along N: ``quantize_dual_batched(weights)`` gives both. It is a ``grouped_gemm``, and runs as
    that does.

    Args:
        grad: gradient of the forward product's result, float8_e4m3fn or float8_e5m2 ``[M, N]``, N
            a multiple of 32.
        grad_scale: ``[M, N // 32]``, uint8 or float8_e8m0fnu.
        b: the transposed weights, float8_e4m3fn ``[G, K, N]``: ``columns`` of ``quantize_dual``.
        b_scale: ``[G, K, N // 32]``: its ``column_scales``.
        group_offs: as the forward product had it.
        out: ``[M, K]`` to write to. Rows outside every group are left as they are.
        out_dtype: bf16, fp16 or fp32.
        out_offs, out_rows: where groups that are padded in grad lie in the result, as
            ``grouped_gemm`` has it.
        exact_sums: likewise; sums of a gradient in e5m2 are those of fp32 anyway.

    Returns:
        ``[M, K]``, or ``out``.

    Raises:
        TypeError, ValueError, CaptureError: as ``grouped_gemm``.
    """
    operands = (grad, grad_scale, b, b_scale, group_offs)
    return grouped_gemm(
        *operands, out, out_dtype, out_offs=out_offs, out_rows=out_rows, exact_sums=exact_sums
    )


@in_clear
def grouped_gemm_wgrad(
    grad: Tensor,
    grad_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    group_offs: Tensor,
    group_lens: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    accumulate: bool = False,
) -> Tensor:
    """The gradient of ``grouped_gemm``'s weights, ``out[g] = grad[:, g's] @ x[:, g's].T``.

    Both operands are as ``quantize_dual_grouped`` gives them along columns: transposed, so that a
    token is a column, and with each group padded to a multiple of 128. Padding takes no part,
    whatever it holds, where ``group_lens`` says how long groups are. A group without rows gives
    zeros. Products are accumulated in fp32 and rounded once, and results are bitwise the same on
    every run. Nothing is read on the host, and after ``aiter_mx.warmup`` a call can be captured.

    Args:
        grad: gradient of the forward product's result, float8_e4m3fn or float8_e5m2 ``[N, P]``,
            contiguous, P a multiple of 128 and N of 32.
        grad_scale: uint8 or float8_e8m0fnu ``[N, P // 32]``.
        x: the forward product's rows, float8_e4m3fn ``[K, P]``, K a multiple of 32.
        x_scale: ``[K, P // 32]``.
        group_offs: where padded groups begin, int32 or int64 ``[G + 1]``, multiples of 128.
        group_lens: how many columns of each group count, ``[G]`` of the dtype of ``group_offs``;
            or ``[G + 1]``: the offsets of the groups before they were padded. None: all.
        out: ``[G, N, K]`` contiguous of ``out_dtype``, which may not overlap an input.
        out_dtype: bf16, fp16 or fp32.
        accumulate: whether to add to what ``out`` holds, such as a main gradient in fp32.

    Returns:
        ``[G, N, K]``, or ``out``.

    Raises:
        TypeError: an argument that is no tensor, or of a dtype not listed above.
        ValueError: another shape, stride, device or alignment, an overlap, ``accumulate`` without
            ``out``; groups that decrease, begin elsewhere or are longer than their room, where
            they are on the CPU or ``AITER_MX_CHECK=1`` asks for it.
        CaptureError: a first use while a stream is captured.

    Example:
        >>> offs = torch.tensor([0, 41, 41, 100])
        >>> grad = aiter_mx.quantize_dual_grouped(torch.randn(100, 32), offs)
        >>> x = aiter_mx.quantize_dual_grouped(torch.randn(100, 64), offs)
        >>> of_grad, of_x = (grad.columns, grad.column_scales), (x.columns, x.column_scales)
        >>> aiter_mx.grouped_gemm_wgrad(*of_grad, *of_x, x.group_offs, offs).shape
        torch.Size([3, 32, 64])
    """
    if accumulate and out is None:
        raise ValueError("accumulate=True adds to out, and there is none; give out=, [G, N, K]")
    tensors = (grad, grad_scale, x, x_scale, group_offs, group_lens)
    if is_traced((*tensors, out)):
        result: Tensor = _through_torch((*tensors, out_dtype, accumulate), out, out_dtype)
        return result
    return _wgrad(*tensors, out_dtype, accumulate, out)


_plans: Plans[tuple[Run, tuple[int, int, int]]] = Plans()


def _wgrad(
    grad: Tensor,
    grad_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    group_offs: Tensor,
    group_lens: Tensor | None,
    out_dtype: torch.dtype,
    accumulate: bool,
    out: Tensor | None = None,
) -> Tensor:
    problem = _problem_of(
        grad, grad_scale, x, x_scale, group_offs, group_lens, out_dtype, accumulate
    )
    if group_offs.device.type == "cpu" or checking():
        _check_groups(problem, group_offs, group_lens)
    shape = (problem.G, problem.N, problem.K)
    operands = {"grad": grad, "grad_scale": grad_scale, "x": x, "x_scale": x_scale}
    operands |= {"group_offs": group_offs}
    if out is None:
        out = torch.empty(shape, dtype=out_dtype, device=grad.device)
    else:
        check_out(out, shape, out_dtype, **operands, group_lens=group_lens)
    if problem.M == 0:
        return out if accumulate else out.zero_()
    refuse_alignment(grad=grad, x=x)
    key = (problem, grad.device, grad.is_cuda or cpu_target())
    found = _plans.by_call.get(key)
    if found is None:
        run = bind("grouped_wgrad", target_of(grad.device), problem, grad.device)
        found = _plans.keep(key, (run, shape))
    through = group_offs if group_lens is None else group_lens
    through_address = through.data_ptr()
    before, before_address = None, 0
    if len(through) == problem.G + 1:  # offsets: what is before a group, and through it
        before, before_address = through, through_address
        through_address += through.itemsize
    found[0](
        (grad, grad_scale, x, x_scale, before, out, group_offs, through),
        (
            grad.data_ptr(),
            grad_scale.data_ptr(),
            x.data_ptr(),
            x_scale.data_ptr(),
            before_address,
            out.data_ptr(),
            group_offs.data_ptr(),
            through_address,
        ),
    )
    return out


def _problem_of(
    grad: Tensor,
    grad_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    group_offs: Tensor,
    group_lens: Tensor | None,
    out_dtype: torch.dtype = torch.bfloat16,
    accumulate: bool = False,
) -> GroupedWgradProblem:
    """The problem that these operands pose; raises as ``grouped_gemm_wgrad`` documents."""
    check_tensor("grad", grad, tuple(FLOAT8_NAMES), ("N", "P"))
    device, (N, P) = grad.device, grad.shape
    check_tensor("x", x, (torch.float8_e4m3fn,), ("K", P), device)
    K = x.shape[0]
    for name, rows in (("N", N), ("K", K)):
        if rows == 0 or rows % BLOCK:
            raise ValueError(
                f"{name} must be a multiple of {BLOCK}, got {name}={rows} (grad: "
                f"{shape_text(grad)}, x: {shape_text(x)})"
            )
    if P % START_COLUMNS:
        raise ValueError(
            f"P must be a multiple of {START_COLUMNS}, as quantize_dual_grouped pads groups, got "
            f"P={P} (grad: {shape_text(grad)})"
        )
    check_tensor("grad_scale", grad_scale, SCALE_DTYPES, (N, P // BLOCK), device)
    check_tensor("x_scale", x_scale, SCALE_DTYPES, (K, P // BLOCK), device)
    check_tensor("group_offs", group_offs, tuple(INDEX_NAMES), ("G + 1",), device)
    G = group_offs.shape[0] - 1
    if G < 1:
        raise ValueError(
            f"group_offs must be [G + 1] with at least one group, got {shape_text(group_offs)}"
        )
    if group_lens is not None:
        check_tensor("group_lens", group_lens, (group_offs.dtype,), ("G or G + 1",), device)
        if group_lens.shape[0] not in (G, G + 1):
            raise ValueError(
                f"group_lens must be [{G}] or, as offsets before padding, [{G + 1}], got "
                f"{shape_text(group_lens)} (group_offs: {shape_text(group_offs)})"
            )
    if out_dtype not in DTYPE_NAMES:
        raise TypeError(f"out_dtype must be {either(tuple(DTYPE_NAMES))}, got {out_dtype}")
    return GroupedWgradProblem(
        M=P,
        N=N,
        K=K,
        G=G,
        out_dtype=DTYPE_NAMES[out_dtype],
        accumulate=int(accumulate),
        index=INDEX_NAMES[group_offs.dtype],
        grad_format=FLOAT8_NAMES[grad.dtype],
    )


def _check_groups(
    problem: GroupedWgradProblem, group_offs: Tensor, group_lens: Tensor | None
) -> None:
    """Raise ValueError unless groups begin and end where ``grouped_gemm_wgrad`` says."""
    offs = group_offs.tolist()
    for g, (begin, end) in enumerate(pairwise(offs)):
        if begin % START_COLUMNS or not 0 <= begin <= end <= problem.M:
            raise ValueError(
                f"group_offs must not decrease, be within 0 to P={problem.M} and begin groups at "
                f"multiples of {START_COLUMNS}; group {g} is {begin} to {end}"
            )
    if group_lens is None:
        return
    given = group_lens.tolist()
    if len(given) == len(offs):
        given = [end - begin for begin, end in pairwise(given)]
    for g, (length, begin, end) in enumerate(zip(given, offs[:-1], offs[1:], strict=True)):
        if not 0 <= length <= end - begin:
            raise ValueError(
                f"group_lens says that group {g} has {length} columns, and group_offs gives it "
                f"{begin} to {end}"
            )


def _fake(*arguments: Any) -> Tensor:
    problem, grad = _problem_of(*arguments), arguments[0]
    fake: Tensor = grad.new_empty(
        (problem.G, problem.N, problem.K), dtype=DTYPES[problem.out_dtype]
    )
    return fake


_through_torch = register_with_out(
    "grouped_gemm_wgrad",
    "Tensor grad, Tensor grad_scale, Tensor x, Tensor x_scale, Tensor group_offs, "
    "Tensor? group_lens, ScalarType out_dtype, bool accumulate",
    "Tensor",
    _wgrad,
    _fake,
    out_at=6,
    stands_for=lambda out: (out.dtype,),
)
