"""What ``grouped_gemm`` checks of its arguments."""

from __future__ import annotations

import torch

from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from aiter_mx.layouts import layout_of, padded_shape
from aiter_mx.ops.checks import BLOCK, DTYPE_NAMES, INDEX_NAMES, SCALE_DTYPES, either, shape_text


def grouped_problem(
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
) -> GroupedGemmProblem:
    """The problem that these operands pose; raises as ``grouped_gemm`` documents."""
    indices = tuple(INDEX_NAMES)
    for name, tensor, dtypes in (
        ("a", a, (torch.float8_e4m3fn,)),
        ("a_scale", a_scale, SCALE_DTYPES),
        ("b", b, (torch.float8_e4m3fn,)),
        ("b_scale", b_scale, SCALE_DTYPES),
        ("masked_m" if a.ndim == 3 else "group_offs", ends, indices),
        ("starts", starts, (ends.dtype,)),
        ("bias", bias, tuple(DTYPE_NAMES)),
    ):
        if tensor is None:
            continue
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name} must be {either(dtypes)}, got {tensor.dtype}")
        if tensor.device != a.device:
            raise ValueError(
                f"{name} is on {tensor.device}, but a is on {a.device}: all operands must be on "
                "one device"
            )
    if out_dtype not in DTYPE_NAMES:
        raise TypeError(f"out_dtype must be {either(tuple(DTYPE_NAMES))}, got {out_dtype}")
    if a.ndim not in (2, 3):
        raise ValueError(f"a must be [M, K] or, masked, [G, rows, K], got {shape_text(a)}")
    if b.ndim != 3:
        raise ValueError(f"b must have three dimensions, [G, N, K], got {shape_text(b)}")
    (G, N, _), K = b.shape, a.shape[-1]
    masked = a.ndim == 3
    if K == 0 or K % BLOCK:
        raise ValueError(f"K must be a multiple of {BLOCK}, got K={K} (a: {shape_text(a)})")
    if N % BLOCK:
        raise ValueError(f"N must be a multiple of {BLOCK}, got N={N} (b: {shape_text(b)})")
    if G == 0:
        raise ValueError(f"there must be at least one group, got none (b: {shape_text(b)})")
    for name, layout in (("a_scale_layout", a_scale_layout), ("b_scale_layout", b_scale_layout)):
        layout_of(layout, name)
    a_scales = padded_shape(a.shape[-2], K // BLOCK, a_scale_layout)
    for name, tensor, expected in (
        ("a", a, (G, a.shape[1], K) if masked else (a.shape[0], K)),
        ("a_scale", a_scale, (*a.shape[:-2], *a_scales)),
        ("b", b, (G, N, K)),
        ("b_scale", b_scale, (G, *padded_shape(N, K // BLOCK, b_scale_layout))),
        ("starts", starts, (G,)),
        ("bias", bias, (G, N)),
    ):
        if tensor is not None and tuple(tensor.shape) != expected:
            raise ValueError(
                f"{name} must be {list(expected)}, got {shape_text(tensor)} "
                f"(a: {shape_text(a)}, b: {shape_text(b)})"
            )
    lengths = [(G,)] if masked or starts is not None else [(G,), (G + 1,)]
    if tuple(ends.shape) not in lengths:  # no set: while torch traces, sizes have no hash
        known = " or ".join(str(list(length)) for length in lengths)
        raise ValueError(
            f"{'masked_m' if masked else 'group_offs'} must be {known}, got {shape_text(ends)} "
            f"(b: {shape_text(b)})"
        )
    if masked and starts is not None:
        raise ValueError("masked groups start at fixed rows; starts must be None")
    return GroupedGemmProblem(
        M=a.shape[:-1].numel(),
        N=N,
        K=K,
        G=G,
        out_dtype=DTYPE_NAMES[out_dtype],
        bias="none" if bias is None else DTYPE_NAMES[bias.dtype],
        layout="masked" if masked else "jagged",
        index=INDEX_NAMES[ends.dtype],
        expected=expected_rows,
        a_scale_layout=a_scale_layout,
        b_scale_layout=b_scale_layout,
    )
