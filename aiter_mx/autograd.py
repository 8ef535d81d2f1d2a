"""Linears with gradients, all products over MX-FP8 operands.

A forward pass quantises x and the weights along both dimensions that products reduce over, and
keeps the payloads and scales that the backward pass takes; a backward pass quantises the gradient
likewise. The gradient of quantisation is the straight-through one: that of a product of quantised
operands, each of which is quantised along the dimension that the product in question reduces over.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from aiter_mx.checks import BLOCK, checking, refuse_no_tensor, shape_text
from aiter_mx.ops.grouped_gemm import grouped_gemm
from aiter_mx.ops.grouped_wgrad import grouped_gemm_dgrad, grouped_gemm_wgrad
from aiter_mx.ops.linear import linear
from aiter_mx.ops.quantize import (
    Dual,
    quantize,
    quantize_dual,
    quantize_dual_grouped,
    quantize_grouped,
)
from aiter_mx.registration import in_clear

Pair: TypeAlias = tuple[Tensor, Tensor]
"""A payload and its scales."""
Columns: TypeAlias = tuple[Tensor, Tensor, Tensor | None]
"""The same, and where padded groups begin, if there are groups."""
GRAD_FORMATS = ("e4m3", "e5m2")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_AUTOCAST_KINDS = ("cpu", "cuda")
"""Types of devices that our tensors may be on and that ``torch.autocast`` has. Dynamo of torch 2.11
does not trace the question which ones it has."""


@in_clear
def linear_autograd(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    quantized_w: Dual | None = None,
    main_grad: Tensor | None = None,
    grad_format: str = "e4m3",
) -> Tensor:
    """``x @ w.T + bias`` over MX-FP8 operands, with gradients of all three.

    Kept for the backward pass are payloads and scales, and of them what the gradients that are
    asked for need. Nothing synchronises; ``torch.compile``, checkpointing and, after a first call,
    graphs that capture both passes work. There is no second derivative: asking for one raises.
    Inside of ``torch.autocast`` x is taken in its dtype, as ``torch.nn.functional.linear`` does.

    Args:
        x: bf16, fp16 or fp32 ``[..., K]``, K a multiple of 32.
        w: likewise ``[N, K]``, N a multiple of 32.
        bias: ``[N]``, or None.
        quantized_w: what ``quantize_dual(w)`` returns, where several calls share it, such as those
            of the micro-batches of a step. None: each call quantises w.
        main_grad: bf16 or fp32 ``[N, K]``, to which the gradient of w is added, rounded once, in
            place of being returned; or None.
        grad_format: of the gradient in the backward pass: ``"e4m3"``, or ``"e5m2"``, which
            keeps smaller numbers beside large ones of a block, and a bit less of each.

    Returns:
        ``[..., N]`` of x's dtype, or autocast's.

    Raises:
        TypeError: no tensor, or another dtype.
        ValueError: another format, or a shape or device that does not fit, also where only the
            backward pass would fail.

    Example:
        >>> w = torch.randn(64, 32, requires_grad=True)
        >>> aiter_mx.linear_autograd(torch.randn(5, 32), w).sum().backward()
        >>> w.grad.shape
        torch.Size([64, 32])
    """
    _check(x, w, "w", 2, bias, main_grad, grad_format)
    x = _as_autocast(x)
    rows = x.reshape(-1, x.shape[-1])
    y = _apply(rows, w, None, bias, quantized_w, main_grad, grad_format)
    return y.reshape(*x.shape[:-1], w.shape[0])


@in_clear
def grouped_linear(
    x: Tensor,
    w: Tensor,
    group_offs: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    group_lens: Tensor | None = None,
    quantized_w: Dual | None = None,
    main_grad: Tensor | None = None,
    grad_format: str = "e4m3",
) -> Tensor:
    """``x[m] @ w[g].T + bias[g]`` for the rows m of each group g, with gradients.

    As ``linear_autograd``, for the experts of a layer. Where groups begin and end is read on the
    device alone, unless it is on the CPU.

    Args:
        x: bf16, fp16 or fp32 ``[T, K]``, rows of all groups, K a multiple of 32.
        w: likewise ``[G, N, K]``, N a multiple of 32.
        group_offs: int32 or int64 ``[G + 1]``: group g is the rows ``group_offs[g]`` to
            ``group_offs[g + 1]``; or ``[G]``, without the 0 that they begin with. Together they are
            all rows of x.
        bias: ``[G, N]``, or None.
        group_lens: rows of each group, ``[G]``, in place of ``group_offs``.
        quantized_w: what ``quantize_dual_batched(w)`` returns, or None.
        main_grad: bf16 or fp32 ``[G, N, K]`` to add the gradient of w to, or None.
        grad_format: as ``linear_autograd``.

    Returns:
        ``[T, N]`` of x's dtype, or autocast's.

    Raises:
        TypeError, ValueError: as ``linear_autograd``; groups that decrease or are not all of x,
            where they are on the CPU or ``AITER_MX_CHECK=1`` asks for it.

    Example:
        >>> w = torch.randn(3, 64, 32, requires_grad=True)
        >>> offs = torch.tensor([0, 41, 41, 100])
        >>> aiter_mx.grouped_linear(torch.randn(100, 32), w, offs).sum().backward()
        >>> w.grad.shape
        torch.Size([3, 64, 32])
    """
    _check(x, w, "w", 3, bias, main_grad, grad_format)
    if x.ndim != 2:
        raise ValueError(f"x must be [T, K], got {shape_text(x)}")
    x = _as_autocast(x)
    offs = offsets_of_groups(group_offs, group_lens, w.shape[0], x)
    return _apply(x, w, offs, bias, quantized_w, main_grad, grad_format)


def _as_autocast(x: Tensor) -> Tensor:
    """x in the dtype that ``torch.autocast`` asks for on its device, if it does."""
    kind = x.device.type
    if kind not in _AUTOCAST_KINDS or not torch.is_autocast_enabled(kind):
        return x
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype) if dtype in _FLOATS else x


def offsets_of_groups(
    group_offs: Tensor | None, group_lens: Tensor | None, G: int, x: Tensor
) -> Tensor:
    """Offsets ``[G + 1]`` on x's device, from any of the forms that ``grouped_linear`` takes.

    Raises:
        TypeError: no tensor, or of another dtype.
        ValueError: both or neither, another shape, or groups that are not the rows of x, where
            they can be read or ``AITER_MX_CHECK=1`` asks for it.
    """
    if (group_offs is None) == (group_lens is None):
        raise ValueError("give either group_offs or group_lens")
    name = "group_lens" if group_offs is None else "group_offs"
    bounds = group_lens if group_offs is None else group_offs
    assert bounds is not None
    refuse_no_tensor(**{name: bounds})
    if bounds.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be torch.int32 or torch.int64, got {bounds.dtype}")
    lengths = (G,) if group_offs is None else (G, G + 1)
    if bounds.ndim != 1 or all(bounds.shape[0] != length for length in lengths):
        known = " or ".join(f"[{length}]" for length in lengths)
        raise ValueError(f"{name} must be {known} for {G} groups, got {shape_text(bounds)}")
    if group_offs is None:
        bounds = bounds.cumsum(0, dtype=bounds.dtype)
    if bounds.shape[0] == G:
        bounds = torch.nn.functional.pad(bounds, (1, 0))
    if not torch.compiler.is_compiling() and (bounds.device.type == "cpu" or checking()):
        _check_offsets(bounds, x, name)
    return bounds.to(x.device, non_blocking=True)


def _check_offsets(offs: Tensor, x: Tensor, name: str) -> None:
    found = offs.tolist()
    decreasing = [g for g in range(len(found) - 1) if found[g + 1] < found[g]]
    if decreasing:
        g = decreasing[0]
        raise ValueError(f"{name}: group {g} would be rows {found[g]} to {found[g + 1]}")
    if found[0] != 0 or found[-1] != x.shape[0]:
        raise ValueError(
            f"{name}: groups are rows {found[0]} to {found[-1]}, and must be all of x, "
            f"{shape_text(x)}"
        )


def refuse_grad_format(grad_format: str) -> None:
    """Raise ValueError unless gradients can be quantised to this."""
    if grad_format not in GRAD_FORMATS:
        known = " or ".join(map(repr, GRAD_FORMATS))
        raise ValueError(f"grad_format must be {known}, got {grad_format!r}")


def _check(
    x: Tensor,
    w: Tensor,
    name: str,
    dimensions: int,
    bias: Tensor | None,
    main_grad: Tensor | None,
    grad_format: str,
) -> None:
    """Raise for operands that either pass could not multiply."""
    refuse_no_tensor(("bias", "main_grad"), x=x, w=w, bias=bias, main_grad=main_grad)
    refuse_grad_format(grad_format)
    for what, tensor in (("x", x), (name, w)):
        if tensor.dtype not in _FLOATS:
            raise TypeError(f"{what} must be bfloat16, float16 or float32, got {tensor.dtype}")
    expected = "[G, N, K]" if dimensions == 3 else "[N, K]"
    if w.ndim != dimensions:
        raise ValueError(f"{name} must be {expected}, got {shape_text(w)}")
    if x.ndim < 1 or x.shape[-1] != w.shape[-1]:
        raise ValueError(
            f"x must be [..., K] and {name} {expected}, got {shape_text(x)} and {shape_text(w)}"
        )
    for dimension, size in (("N", w.shape[-2]), ("K", w.shape[-1])):
        if size == 0 or size % BLOCK:
            raise ValueError(
                f"{dimension} must be a multiple of {BLOCK}, which a product of one of the two "
                f"passes reduces over, got {dimension}={size} ({name}: {shape_text(w)})"
            )
    if bias is not None and bias.shape != w.shape[:-1]:
        raise ValueError(f"bias must be {list(w.shape[:-1])}, got {shape_text(bias)}")
    if main_grad is not None and (
        main_grad.shape != w.shape or main_grad.dtype not in (torch.bfloat16, torch.float32)
    ):
        raise ValueError(
            f"main_grad must be bfloat16 or float32 {list(w.shape)}, got {main_grad.dtype} "
            f"{shape_text(main_grad)}"
        )


def _apply(
    x: Tensor,
    w: Tensor,
    offs: Tensor | None,
    bias: Tensor | None,
    quantized_w: Dual | None,
    main_grad: Tensor | None,
    grad_format: str,
) -> Tensor:
    of_w = (None,) * 4 if quantized_w is None else _quantized_of(w, quantized_w)
    options = (main_grad, grad_format)
    y: Tensor = _Linear.apply(x, w, bias, offs, *options, *of_w)  # type: ignore[no-untyped-call]
    return y


def _quantized_of(w: Tensor, quantized_w: Dual) -> tuple[Tensor, ...]:
    """Its four tensors; raises unless they have the shapes of w's."""
    if not isinstance(quantized_w, tuple) or len(quantized_w) != 4:
        raise TypeError(
            "quantized_w must be what quantize_dual makes of w: payload and scales along rows, "
            f"payload and scales along columns; got {type(quantized_w).__name__}"
            + (f" of {len(quantized_w)}" if isinstance(quantized_w, tuple) else "")
        )
    rows, row_scales, columns, column_scales = quantized_w
    if rows.shape != w.shape or columns.shape != w.mT.shape:
        raise ValueError(
            f"quantized_w must be what quantize_dual makes of w, {shape_text(w)}, got rows "
            f"{shape_text(rows)} and columns {shape_text(columns)}"
        )
    return rows, row_scales, columns, column_scales


class _Linear(torch.autograd.Function):
    """Both linears: that of groups has their offsets, the other one None."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        offs: Tensor | None,
        main_grad: Tensor | None,
        grad_format: str,
        w_rows: Tensor | None,
        w_row_scales: Tensor | None,
        w_columns: Tensor | None,
        w_column_scales: Tensor | None,
    ) -> Tensor:
        needs_x, needs_w, *_ = ctx.needs_input_grad
        if w_rows is None and needs_x:
            w_rows, w_row_scales, w_columns, w_column_scales = quantize_dual(w)
        elif w_rows is None:
            w_rows, w_row_scales = quantize(w)
        assert w_row_scales is not None
        of_rows, of_columns = _both(x, offs, True, needs_w)
        assert of_rows is not None
        xq, xs = of_rows
        if offs is None:
            y = linear(xq, xs, w_rows, w_row_scales, bias, out_dtype=x.dtype)
        else:
            y = grouped_gemm(xq, xs, w_rows, w_row_scales, offs, None, x.dtype, bias)
        of_w = (w_columns, w_column_scales) if needs_x else (None, None)
        ctx.save_for_backward(*of_w, *(of_columns or (None,) * 3), offs)
        ctx.main_grad, ctx.grad_format = main_grad, grad_format
        ctx.dtypes = (x.dtype, w.dtype, bias.dtype if bias is not None else None)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        # A gradient that has none itself would let torch take ours, which has none, for a constant.
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and not dy.requires_grad:
            dy = dy.detach().requires_grad_()
        return _Linear._gradients(ctx, dy)

    @staticmethod
    @once_differentiable
    def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_w, needs_bias, *_ = ctx.needs_input_grad
        w_columns, w_scales, x_columns, x_scales, padded, offs = ctx.saved_tensors
        of_x, of_w, of_bias = ctx.dtypes
        dy_rows, dy_columns = _both(dy, offs, needs_x, needs_w, ctx.grad_format)
        dx = dw = db = None
        if dy_rows is not None:
            if offs is None and ctx.grad_format == "e4m3":
                dx = linear(*dy_rows, w_columns, w_scales, out_dtype=of_x)
            elif offs is None:
                of_group = (w_columns[None], w_scales[None], _one_group(dy))
                dx = grouped_gemm_dgrad(*dy_rows, *of_group, out_dtype=of_x)
            else:
                dx = grouped_gemm_dgrad(*dy_rows, w_columns, w_scales, offs, out_dtype=of_x)
        if dy_columns is not None:
            dw = _weights_gradient(
                dy_columns[:2], (x_columns, x_scales), padded, offs, of_w, ctx.main_grad
            )
        if needs_bias:
            db = _bias_gradient(dy, offs).to(of_bias)
        return dx, dw, db, *(None,) * 7


def _one_group(x: Tensor) -> Tensor:
    """Offsets of a group of all rows."""
    return torch.arange(2, device=x.device, dtype=torch.int32) * x.shape[0]


def _both(
    x: Tensor, offs: Tensor | None, rows: bool, columns: bool, format: str = "e4m3"
) -> tuple[Pair | None, Columns | None]:
    """x quantised along rows, and along columns: transposed, its groups padded."""
    whole = offs is None and x.shape[0] % BLOCK == 0
    if not columns:
        return quantize(x, format=format) if rows else None, None
    if whole and rows:
        dual = quantize_dual(x, format=format)
        return dual[:2], (*dual[2:], None)
    if whole:
        return None, (*quantize(x, -2, format=format), None)
    groups = _one_group(x) if offs is None else offs
    if rows:
        both = quantize_dual_grouped(x, groups, format=format, pad_rows=False)
        padded = None if offs is None else both.group_offs
        return both[:2], (both.columns, both.column_scales, padded)
    alone = quantize_grouped(x, groups, -2, format=format)
    return None, (*alone[:2], None if offs is None else alone.group_offs)


def _weights_gradient(
    dy: Pair,
    x: Pair,
    padded: Tensor | None,
    offs: Tensor | None,
    dtype: torch.dtype,
    main_grad: Tensor | None,
) -> Tensor | None:
    """None where it has been added to ``main_grad``."""
    if offs is None and main_grad is None and dy[0].shape[1] == 0:
        return dy[0].new_zeros((dy[0].shape[0], x[0].shape[0]), dtype=dtype)
    if offs is None and main_grad is None and dy[0].dtype == x[0].dtype:
        return linear(*dy, *x, out_dtype=dtype)
    if padded is None:
        P = dy[0].shape[1]
        if P % 128:
            dy, x = _padded(dy), _padded(x)
            P = dy[0].shape[1]
        padded = torch.arange(2, device=dy[0].device, dtype=torch.int32) * P
    if main_grad is None:
        dw = grouped_gemm_wgrad(*dy, *x, padded, offs, out_dtype=dtype)
        return dw[0] if offs is None else dw
    out = main_grad.view(-1, *main_grad.shape[-2:])
    grouped_gemm_wgrad(*dy, *x, padded, offs, out, main_grad.dtype, accumulate=True)
    return None


def _padded(pair: Pair) -> Pair:
    """With zeros up to a multiple of 128 columns."""
    payload, scale = pair
    more = -payload.shape[1] % 128
    wider = torch.nn.functional.pad(payload.view(torch.uint8), (0, more)).view(payload.dtype)
    return wider, torch.nn.functional.pad(scale, (0, more // BLOCK))


def _bias_gradient(dy: Tensor, offs: Tensor | None) -> Tensor:
    """Sums in fp32: of all rows, or of each group's."""
    if offs is None:
        return dy.sum(0, dtype=torch.float32)
    return torch.segment_reduce(dy.float(), "sum", offsets=offs.long(), axis=0, unsafe=True)
