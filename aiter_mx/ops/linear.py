"""``aiter_mx.linear``: a linear layer over MX-FP8 weights and activations, or unquantised ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
from torch.autograd import forward_ad

from aiter_mx.checks import (
    ALIGNMENT_BYTES,
    BLOCK,
    DTYPE_NAMES,
    DTYPES,
    SCALE_DTYPES,
    check_out,
    either,
    refuse_alignment,
    refuse_shape,
    refuse_strides,
    shape_text,
)
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.launch import Run
from aiter_mx.plan import Plans, bind
from aiter_mx.registration import (
    PLAIN,
    PLAIN_OR_NONE,
    name_obstacle,
    refuse_tangents,
    register_with_out,
    with_memory,
)
from aiter_mx.target import ENVIRONMENT, EXACT_SUMS, cpu_target, target_of

_X_DTYPES = {torch.float8_e4m3fn: "e4m3", torch.bfloat16: "bf16", torch.float16: "fp16"}


def linear(
    xq: torch.Tensor,
    xs: torch.Tensor | None,
    wq: torch.Tensor,
    ws: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    *,
    pdl: bool = False,
    exact_sums: bool | None = None,
) -> torch.Tensor:
    """``y[m, n] = sum_k x[m, k] * w[n, k] + bias[n]`` over MX-FP8 operands.

    Products are accumulated in fp32 and rounded once, but by two kinds of Hopper's kernels that
    16-bit results may get. ``wgmma_fp8`` and ``wgmma_fp8_tiled`` add the 32 products of a block by
    some 14 bits: within 2^-8 of the sum of their magnitudes, for random operands within 2^-10.
    ``wgmma_fp8_rescaled``, for M of hundreds and more, adds 128 so: within 2^-6, for random ones
    2^-9; and an element may lose 2^-11 of the largest of its block. Results are bitwise the same on
    every run. The call does not synchronise, and after ``aiter_mx.warmup`` it can be captured into
    a graph. There is no gradient: where torch records one for activations or bias, its backward
    pass raises.

    Args:
        xq: activations, float8_e4m3fn ``[..., K]``, K a multiple of 32; M is the product of the
            dimensions before. Rows that are not next to one another are copied. Or bf16 or fp16,
            with xs None: they are quantised on the way, bit for bit as by ``aiter_mx.quantize``,
            small decode shapes in the linear's own kernel. A table may have another configuration
            for them than for what is quantised already, which adds in another order.
        xs: their scales, uint8 or float8_e8m0fnu ``[..., K // 32]``: 2**(byte - 127), 255 is NaN.
        wq: weights, float8_e4m3fn ``[N, K]``, contiguous.
        ws: their scales, ``[N, K // 32]``; or ``[ceil(N / 32), K // 32]``, each for 32 rows, which
            a launch of each call repeats.
        bias: bf16, fp16 or fp32 ``[N]``, or None.
        out_dtype: dtype of the result: bf16, fp16 or fp32.
        out: where to write the result, ``[..., N]`` contiguous of dtype ``out_dtype``; it may not
            overlap an input.
        pdl: let the kernel start, and read weights, scales of weights and bias, while the kernel
            ahead of it in the stream still runs (CUDA's programmatic dependent launch). Only for
            weights that this kernel does not write, nor those before it where it starts early
            itself: a linear with ``pdl``, or on Hopper a quantisation, but one along rows with
            row-major scales of 32 elements each.
            Targets and kernels without it ignore it.
        exact_sums: pass over these kernels, which add with fewer bits than fp32; None for what
            ``AITER_MX_EXACT_SUMS`` says.

    Returns:
        ``[..., N]``, or ``out``.

    Raises:
        TypeError: an argument that is no tensor, or of a dtype not listed above.
        ValueError: a shape, stride, device or alignment other than those above, or an overlap.
        CaptureError: a first use while a stream is captured.

    Source of the semantics: OCP Microscaling Formats (MX) v1.0, sections 5.2 and 6.
    """
    try:
        if (
            torch.compiler.is_compiling()
            or torch._C._len_torch_dispatch_stack()
            or type(xq) not in PLAIN
            or type(wq) not in PLAIN
            or type(ws) not in PLAIN
            or type(xs) not in PLAIN_OR_NONE
            or type(bias) not in PLAIN_OR_NONE
            or type(out) not in PLAIN_OR_NONE
            or forward_ad._current_level >= 0
            or (
                torch.is_grad_enabled()
                and (xq.requires_grad or (bias is not None and bias.requires_grad))
            )
        ):
            refuse_tangents((xq, bias))

            def call(xq: torch.Tensor, xs: Any, ws: torch.Tensor, out: Any) -> torch.Tensor:
                result: torch.Tensor = _through_torch(
                    (xq, xs, wq, ws, bias, out_dtype, pdl, exact_sums), out, out_dtype
                )
                return result

            tensors = (xq, wq, ws)
            if all(isinstance(t, torch.Tensor) for t in tensors) and _is_general(*tensors):
                return _as_matrices(call, xq, xs, wq, ws, out)
            if isinstance(xq, torch.Tensor):
                xq, xs = _with_adjacent_rows(xq), _with_adjacent_rows(xs)
            return call(xq, xs, ws, out)
        return _linear(xq, xs, wq, ws, bias, out_dtype, pdl, exact_sums, out)
    except Exception as error:
        name_obstacle(
            linear,
            error,
            (xq, xs, wq, ws, bias, out_dtype, out),
            {"pdl": pdl, "exact_sums": exact_sums},
        )
        raise


_plans: Plans[tuple[Run | None, tuple[int, int], Callable[[], torch.Tensor]]] = Plans()


def _linear(
    xq: torch.Tensor,
    xs: torch.Tensor | None,
    wq: torch.Tensor,
    ws: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    pdl: bool = False,
    exact_sums: bool | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    call = (
        xq.shape,
        wq.shape,
        ws.shape,
        xq.dtype,
        wq.dtype,
        ws.dtype,
        out_dtype,
        xq.device,
        wq.device,
        ws.device,
        None if xs is None else (xs.shape, xs.dtype, xs.device),
        None if bias is None else (bias.shape, bias.dtype, bias.device),
        xq.is_cuda or cpu_target(),
        exact_sums,
        ENVIRONMENT.get(EXACT_SUMS),
        pdl,
    )
    found = _plans.by_call.get(call)
    if found is None:
        if _is_general(xq, wq, ws):

            def again(xq: torch.Tensor, xs: Any, ws: torch.Tensor, out: Any) -> torch.Tensor:
                return _linear(xq, xs, wq, ws, bias, out_dtype, pdl, exact_sums, out)

            return _as_matrices(again, xq, xs, wq, ws, out)
        found = _plans.keep(call, _plan(xq, xs, wq, ws, bias, out_dtype, pdl, exact_sums))
    run, shape, new_result = found

    if not (
        xq.is_contiguous()
        and (xs is None or xs.is_contiguous())
        and wq.is_contiguous()
        and ws.is_contiguous()
        and (bias is None or bias.is_contiguous())
    ):
        xq, xs = _with_adjacent_rows(xq), _with_adjacent_rows(xs)
        refuse_strides(xq=xq, xs=xs, wq=wq, ws=ws, bias=bias)
    if out is None:
        out = new_result()
    else:
        check_out(out, shape, out_dtype, xq=xq, xs=xs, wq=wq, ws=ws, bias=bias)
    if run is not None:
        if xs is None:
            xq = xq.resolve_neg()
        if bias is not None:
            bias = bias.resolve_neg()
        x_address, w_address = xq.data_ptr(), wq.data_ptr()
        if not (x_address and w_address):
            xq, wq = with_memory(xq), with_memory(wq)
            x_address, w_address = xq.data_ptr(), wq.data_ptr()
        if (x_address | w_address) % ALIGNMENT_BYTES:
            refuse_alignment(xq=xq, wq=wq)
        run(
            (xq, xs, wq, ws, bias, out),
            (
                x_address,
                0 if xs is None else xs.data_ptr(),
                w_address,
                ws.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                out.data_ptr(),
            ),
        )
    return out


def _is_general(xq: torch.Tensor, wq: torch.Tensor, ws: torch.Tensor) -> bool:
    """Whether x is no matrix, or scales of weights stand for 32 rows each."""
    return xq.ndim != 2 or _is_compact(wq, ws)


def _is_compact(wq: torch.Tensor, ws: torch.Tensor) -> bool:
    return (
        wq.ndim == ws.ndim == 2
        and ws.shape[0] == -(-wq.shape[0] // BLOCK)
        and ws.shape[0] != wq.shape[0]
    )


def _as_matrices(
    compute: Callable[[torch.Tensor, Any, torch.Tensor, Any], torch.Tensor],
    xq: torch.Tensor,
    xs: torch.Tensor | None,
    wq: torch.Tensor,
    ws: torch.Tensor,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """``compute`` over x and out as matrices and a scale for each row of the weights."""
    if xq.ndim == 0 or wq.ndim != 2:
        name, tensor, form = ("xq", xq, "[..., K]") if xq.ndim == 0 else ("wq", wq, "[N, K]")
        raise ValueError(f"{name} must have the dimensions {form}, got {shape_text(tensor)}")
    if _is_compact(wq, ws):
        ws = ws.repeat_interleave(BLOCK, 0, output_size=ws.shape[0] * BLOCK)[: wq.shape[0]]
    leading, N = xq.shape[:-1], wq.shape[0]
    rows = prod(leading)
    if xs is not None:
        if xs.shape[:-1] != leading:
            expected = [*leading, xq.shape[-1] // BLOCK]
            raise ValueError(f"xs must be {expected}, got {shape_text(xs)} (xq: {shape_text(xq)})")
        xs = xs.reshape(rows, xs.shape[-1])
    if out is not None:
        refuse_shape(out, (*leading, N))
        refuse_strides(out=out)
    result = compute(
        xq.reshape(rows, xq.shape[-1]),
        xs,
        ws,
        None if out is None else out.view(rows, N),
    )
    return result.view(*leading, N) if out is None else out


def _with_adjacent_rows(x: Any) -> Any:
    """x, copied if its rows are whole but not next to one another."""
    apart = isinstance(x, torch.Tensor) and x.ndim == 2 and x.stride(1) == 1
    return x.contiguous() if apart else x


def _plan(
    xq: torch.Tensor,
    xs: torch.Tensor | None,
    wq: torch.Tensor,
    ws: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    pdl: bool,
    exact_sums: bool | None,
) -> tuple[Run | None, tuple[int, int], Callable[[], torch.Tensor]]:
    """What computes such a call (None for an empty result), the result's shape, what makes it."""
    problem = problem_of(xq, xs, wq, ws, bias, out_dtype, pdl)
    shape, device = (problem.M, problem.N), xq.device
    new_result = partial(  # in half of the time of torch.empty
        torch.empty_strided, shape, (problem.N, 1), dtype=out_dtype, device=device
    )
    if 0 in shape or xq.is_meta:
        return None, shape, new_result
    run = bind("linear", target_of(device, exact_sums), problem, device)
    return run, shape, new_result


def problem_of(
    xq: torch.Tensor,
    xs: torch.Tensor | None,
    wq: torch.Tensor,
    ws: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    pdl: bool = False,
) -> LinearProblem:
    """The problem that these operands pose; raises as ``linear`` documents."""
    x_dtype = _X_DTYPES.get(xq.dtype, "e4m3")
    if (xs is None) == (x_dtype == "e4m3") and xq.dtype in _X_DTYPES:
        wanted = "given" if xs is None else "None"
        raise TypeError(
            f"xs must be {wanted} for xq of {xq.dtype}: scales belong to float8_e4m3fn, and "
            "other activations are quantised here"
        )
    for name, tensor, dtypes in (
        ("xq", xq, tuple(_X_DTYPES)),
        ("xs", xs, SCALE_DTYPES),
        ("wq", wq, (torch.float8_e4m3fn,)),
        ("ws", ws, SCALE_DTYPES),
        ("bias", bias, tuple(DTYPE_NAMES)),
    ):
        if tensor is None:  # the bias, or scales, which may be
            continue
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name} must be {either(dtypes)}, got {tensor.dtype}")
        if tensor.device != xq.device:
            raise ValueError(
                f"{name} is on {tensor.device}, but xq is on {xq.device}: all operands must be on "
                "one device"
            )
    if out_dtype not in DTYPE_NAMES:
        raise TypeError(f"out_dtype must be {either(tuple(DTYPE_NAMES))}, got {out_dtype}")
    for name, tensor in (("xq", xq), ("wq", wq)):
        if tensor.ndim != 2:
            raise ValueError(
                f"{name} must have two dimensions, [rows, K], got {shape_text(tensor)}"
            )
    (M, K), N = xq.shape, wq.shape[0]
    if K == 0 or K % BLOCK:
        raise ValueError(f"K must be a multiple of {BLOCK}, got K={K} (xq: {shape_text(xq)})")
    for name, tensor, expected in (
        ("xs", xs, (M, K // BLOCK)),
        ("wq", wq, (N, K)),
        ("ws", ws, (N, K // BLOCK)),
        ("bias", bias, (N,)),
    ):
        if tensor is not None and tuple(tensor.shape) != expected:
            raise ValueError(
                f"{name} must be {list(expected)}, got {shape_text(tensor)} "
                f"(xq: {shape_text(xq)}, wq: {shape_text(wq)})"
            )
    bias_name = "none" if bias is None else DTYPE_NAMES[bias.dtype]
    return LinearProblem(M, N, K, DTYPE_NAMES[out_dtype], bias_name, pdl, x_dtype)


def _fake(*arguments: Any) -> torch.Tensor:
    problem = problem_of(*arguments[:7])  # what of them bears on the shape
    shape, dtype = (problem.M, problem.N), DTYPES[problem.out_dtype]
    fake: torch.Tensor = arguments[0].new_empty(shape, dtype=dtype)
    return fake


_through_torch = register_with_out(
    "linear",
    "Tensor xq, Tensor? xs, Tensor wq, Tensor ws, Tensor? bias=None, "
    # 15 is torch.bfloat16, as schemas number dtypes
    "ScalarType out_dtype=15, bool pdl=False, bool? exact_sums=None",
    "Tensor",
    _linear,
    _fake,
    out_at=5,
    stands_for=lambda out: (out.dtype,),
)
