"""The way from a grouped product's operands to its problem: what raises, and where."""

from __future__ import annotations

from itertools import pairwise

import torch

from aiter_mx.checks import (
    BLOCK,
    DTYPE_NAMES,
    INDEX_NAMES,
    SCALE_DTYPES,
    as_whole_number,
    checking,
    either,
    refuse_no_whole_number,
    shape_text,
)
from aiter_mx.codec import FLOAT8_NAMES
from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from aiter_mx.kernels.grouped_gemm.problem import room_for_runs
from aiter_mx.layouts import layout_of, padded_shape


def problem_of(
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
    out_offs: torch.Tensor | None = None,
    out_rows: int = 0,
    run_rows: int = 0,
) -> GroupedGemmProblem:
    """The problem that these operands pose; raises as ``grouped_gemm`` documents."""
    out_rows = as_whole_number(out_rows)
    refuse_no_whole_number(out_rows=out_rows)
    _refuse_dtypes(
        a.device,
        ("a", a, tuple(FLOAT8_NAMES)),
        ("a_scale", a_scale, SCALE_DTYPES),
        ("b", b, (torch.float8_e4m3fn,)),
        ("b_scale", b_scale, SCALE_DTYPES),
        ("masked_m" if a.ndim == 3 else "group_offs", ends, tuple(INDEX_NAMES)),
        ("starts", starts, (ends.dtype,)),
        ("bias", bias, tuple(DTYPE_NAMES)),
        ("out_offs", out_offs, (ends.dtype,)),
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
        ("starts", starts, (room_for_runs(a.shape[-2], G, run_rows) or G,)),
        ("bias", bias, (G, N)),
    ):
        if tensor is not None and tuple(tensor.shape) != expected:
            raise ValueError(
                f"{name} must be {list(expected)}, got {shape_text(tensor)} "
                f"(a: {shape_text(a)}, b: {shape_text(b)})"
            )
    _refuse_groups(a, b, starts, ends, out_offs, out_rows, run_rows)
    jagged = "runs" if run_rows else "jagged"
    return GroupedGemmProblem(
        M=a.shape[:-1].numel(),
        N=N,
        K=K,
        G=G,
        out_dtype=DTYPE_NAMES[out_dtype],
        bias="none" if bias is None else DTYPE_NAMES[bias.dtype],
        layout="masked" if masked else jagged if out_offs is None else "unpadded",
        index=INDEX_NAMES[ends.dtype],
        expected=expected_rows,
        a_scale_layout=a_scale_layout,
        b_scale_layout=b_scale_layout,
        a_format=FLOAT8_NAMES[a.dtype],
        out_rows=out_rows,
        run_rows=run_rows,
    )


def _refuse_dtypes(
    device: torch.device,
    *named: tuple[str, torch.Tensor | None, tuple[torch.dtype, ...]],
) -> None:
    """Raise for the first tensor that has none of its dtypes, or is on another device than a."""
    for name, tensor, dtypes in named:
        if tensor is None:
            continue
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name} must be {either(dtypes)}, got {tensor.dtype}")
        if tensor.device != device:
            raise ValueError(
                f"{name} is on {tensor.device}, but a is on {device}: all operands must be on "
                "one device"
            )


def _refuse_groups(
    a: torch.Tensor,
    b: torch.Tensor,
    starts: torch.Tensor | None,
    ends: torch.Tensor,
    out_offs: torch.Tensor | None,
    out_rows: int,
    run_rows: int,
) -> None:
    """Raise ValueError where what says which rows are whose has another length, or is too much."""
    G, masked = b.shape[0], a.ndim == 3
    lengths = [(G,)] if masked or starts is not None else [(G,), (G + 1,)]
    if run_rows:
        if masked or starts is None or out_offs is not None:
            raise ValueError("run_rows is for rows [M, K] and starts, without out_offs")
        lengths = [(2 * room_for_runs(a.shape[0], G, run_rows) + 1,)]
    if tuple(ends.shape) not in lengths:  # no set: while torch traces, sizes have no hash
        known = " or ".join(str(list(length)) for length in lengths)
        raise ValueError(
            f"{'masked_m' if masked else 'group_offs'} must be {known}, got {shape_text(ends)} "
            f"(b: {shape_text(b)})"
        )
    if masked and starts is not None:
        raise ValueError("masked groups start at fixed rows; starts must be None")
    if out_rows and out_offs is None:
        raise ValueError("out_rows says how many rows out_offs divides; give out_offs")
    if out_offs is not None and not (
        ends.shape == out_offs.shape == (G + 1,) and starts is None and not masked
    ):
        raise ValueError(
            f"out_offs, and group_offs with it, must be [{G + 1}] for rows [M, K] of {G} groups, "
            f"got {shape_text(out_offs)} and {shape_text(ends)}"
        )


def check_places(group_offs: torch.Tensor, out_offs: torch.Tensor, out_rows: int) -> None:
    """Raise ValueError if groups do not fit in a or in the result, where that can be read."""
    if out_offs.device.type != "cpu" and not checking():
        return
    rooms = group_offs.diff().tolist()
    for g, (begin, end) in enumerate(pairwise(out_offs.tolist())):
        if not 0 <= begin <= end <= out_rows:
            raise ValueError(
                f"out_offs must not decrease, and be within the {out_rows} rows of the result; "
                f"group {g} is {begin} to {end}"
            )
        if end - begin > rooms[g]:
            raise ValueError(
                f"out_offs gives group {g} {end - begin} rows, and group_offs {rooms[g]}"
            )
