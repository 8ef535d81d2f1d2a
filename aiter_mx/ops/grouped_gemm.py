"""``aiter_mx.grouped_gemm``: a matrix product for each group of rows, over MX-FP8 operands."""

from __future__ import annotations

from typing import Any

import torch

from aiter_mx.checks import (
    DTYPES,
    check_groups,
    check_out,
    refuse_alignment,
    refuse_strides,
)
from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from aiter_mx.launch import Run
from aiter_mx.ops.grouped_gemm_call import check_places, problem_of
from aiter_mx.plan import Plans, bind
from aiter_mx.registration import PLAIN, PLAIN_OR_NONE, in_clear, register_with_out, wants_gradient
from aiter_mx.target import ENVIRONMENT, EXACT_SUMS, cpu_target, target_of


@in_clear
def grouped_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    group_offs: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: torch.Tensor | None = None,
    *,
    a_scale_layout: str = "row_major",
    b_scale_layout: str = "row_major",
    out_offs: torch.Tensor | None = None,
    out_rows: int | None = None,
    exact_sums: bool | None = None,
) -> torch.Tensor:
    """``out[m] = a[m] @ b[g].T + bias[g]`` for the rows m of each group g, over MX-FP8 operands.

    Groups may be empty and of any length: nothing is padded or copied, and where they begin and
    end is read on the device alone. Products are accumulated in fp32 and rounded once, but by
    Hopper's ``rescaled`` kernels, which 16-bit results of groups in e4m3 may get. They add 128
    products by some 14 bits: within 2^-6 of the sum of their magnitudes, for random operands within
    2^-9; and an element may lose 2^-11 of the largest of its block. Results are bitwise the same on
    every run. The call does not synchronise, and after ``aiter_mx.warmup`` it can be captured into
    a graph; a replay takes the bounds that are then in memory. There is no gradient.

    Args:
        a: activations of all groups, float8_e4m3fn ``[M, K]``, contiguous, K a multiple of 32; or
            float8_e5m2, as gradients may be.
        a_scale: their scales, uint8 or float8_e8m0fnu ``[M, K // 32]``: 2**(byte - 127), 255 is
            NaN.
        b: weights, float8_e4m3fn ``[G, N, K]``, contiguous, N a multiple of 32.
        b_scale: their scales, ``[G, N, K // 32]``.
        group_offs: where groups begin and end, int32 or int64. ``[G + 1]``: group g is the rows
            ``group_offs[g] .. group_offs[g + 1]``. ``[G]``: it ends before ``group_offs[g]`` and
            begins where the one before it ends, the first at row 0, as torch's ``offs`` has it.
            Bounds are cut to 0 .. M, and must not decrease.
        out: where to write the result, ``[M, N]`` contiguous of dtype ``out_dtype``; it may not
            overlap an input. Its rows outside every group are left as they are.
        out_dtype: dtype of the result: bf16, fp16 or fp32.
        bias: bf16, fp16 or fp32 ``[G, N]``, or None.
        a_scale_layout: layout of a_scale, one that ``aiter_mx.layouts`` describes: what
            ``quantize``, ``quantize_grouped`` or ``shuffle_scales`` make of all rows of a,
            whatever the groups. It starts at a multiple of 16 bytes then, as any but row-major.
            CDNA4's kernel reads ``row_major`` and ``16x4``; what the chosen one does not read is
            made row-major by each call, in a few launches of torch's.
        b_scale_layout: layout of b_scale, each group's by itself, such as of
            ``quantize(b, scale_layout=...)``.
        out_offs: where groups that are padded in a lie in the result, ``[G + 1]`` of the dtype of
            ``group_offs``, which then is ``[G + 1]`` too: group g is the
            ``out_offs[g + 1] - out_offs[g]`` rows of a from ``group_offs[g]`` on, and its results
            go to the rows from ``out_offs[g]`` on, so that what ``quantize_grouped`` pads is
            multiplied as it is. None: as in a.
        out_rows: with ``out_offs`` the rows of the result. None: as many as out has, or M.
        exact_sums: pass over this kernel, which adds with fewer bits than fp32; None for what
            ``AITER_MX_EXACT_SUMS`` says.

    Returns:
        ``[M, N]`` (``[out_rows, N]``), or ``out``. Without ``out``, rows outside every group hold
        anything.

    Raises:
        TypeError: an argument that is no tensor, or of a dtype not listed above.
        ValueError: a shape, stride, device or alignment other than those above, or an overlap.
        CaptureError: a first use while a stream is captured.

    Source of the semantics: OCP Microscaling Formats (MX) v1.0, sections 5.2 and 6; the bounds are
    those of aiter's ``grouped_gemm_mxfp8_hip_fwd`` and of torch's ``scaled_grouped_mm``.

    Example:
        >>> a, a_scale = aiter_mx.quantize(torch.randn(100, 64))
        >>> b, b_scale = aiter_mx.quantize(torch.randn(3, 32, 64))
        >>> offs = torch.tensor([0, 41, 41, 100])
        >>> aiter_mx.grouped_gemm(a, a_scale, b, b_scale, offs).shape
        torch.Size([100, 32])
    """
    return grouped_gemm_ranges(
        a, a_scale, b, b_scale, None, group_offs, out, out_dtype, bias, 0,
        a_scale_layout, b_scale_layout, out_offs, out_rows, exact_sums=exact_sums,
    )  # fmt: skip


@in_clear
def grouped_gemm_ranges(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    starts: torch.Tensor | None,
    ends: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: torch.Tensor | None = None,
    expected_rows: int = 0,
    a_scale_layout: str = "row_major",
    b_scale_layout: str = "row_major",
    out_offs: torch.Tensor | None = None,
    out_rows: int | None = None,
    run_rows: int = 0,
    exact_sums: bool | None = None,
) -> torch.Tensor:
    """``grouped_gemm`` whose groups need neither be in order nor adjoin, or start at fixed rows.

    Args:
        a: ``[M, K]`` as in ``grouped_gemm``; or ``[G, rows, K]``, where a group is the first
            ``ends[g]`` of its rows.
        a_scale: ``[..., K // 32]`` likewise.
        b: ``[G, N, K]``.
        b_scale: ``[G, N, K // 32]``.
        starts: ``[G]``, first row of each group, of the dtype of ``ends``; or None: see ``ends``.
        ends: ``[G]``, the row after each group's last. Where ``starts`` is None and a has two
            dimensions, this is ``grouped_gemm``'s ``group_offs``. Groups must not overlap.
        out: ``[M, N]`` or ``[G, rows, N]``.
        out_dtype: as in ``grouped_gemm``.
        bias: as in ``grouped_gemm``.
        expected_rows: rows that a group is likely to have, where that is not their average. It
            chooses tiles and does not bear on results.
        a_scale_layout: as in ``grouped_gemm``; where a is ``[G, rows, K]``, of each group's.
        b_scale_layout: as in ``grouped_gemm``.
        out_offs, out_rows: as in ``grouped_gemm``, where ``starts`` is None.
        run_rows: above 0, a group may have several ranges of rows, which all begin at multiples of
            ``run_rows`` unless there are no more of them than groups. With R the larger one of G
            and M / run_rows, rounded up, ``starts`` is int32 ``[R]``, and ``ends`` int32
            ``[2 R + 1]``: the row after each range's last, how many ranges there are, and the group
            of each. Places of no range have an end that is not after its start.
        exact_sums: as in ``grouped_gemm``.

    Returns:
        ``[M, N]`` or ``[G, rows, N]``, or ``out``.

    Raises:
        TypeError, ValueError, CaptureError: as ``grouped_gemm``.
    """
    if out_rows is None:
        out_rows = 0 if out_offs is None else len(a) if out is None else len(out)
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or not PLAIN.issuperset(map(type, (a, a_scale, b, b_scale, ends)))
        or not PLAIN_OR_NONE.issuperset((type(starts), type(bias), type(out), type(out_offs)))
        or wants_gradient(bias)
    ):
        arguments = (
            a, a_scale, b, b_scale, starts, ends, out_dtype, bias, expected_rows,
            a_scale_layout, b_scale_layout, out_offs, out_rows, run_rows, exact_sums,
        )  # fmt: skip
        result: torch.Tensor = _through_torch(arguments, out, out_dtype)
        return result
    return _grouped_gemm(
        a, a_scale, b, b_scale, starts, ends, out_dtype, bias, expected_rows,
        a_scale_layout, b_scale_layout, out_offs, out_rows, run_rows, exact_sums, out,
    )  # fmt: skip


_plans: Plans[tuple[Run | None, tuple[int, ...], int]] = Plans()


def _grouped_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    starts: torch.Tensor | None,
    ends: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
    expected_rows: int,
    a_scale_layout: str,
    b_scale_layout: str,
    out_offs: torch.Tensor | None = None,
    out_rows: int = 0,
    run_rows: int = 0,
    exact_sums: bool | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    device = a.device
    call = (
        (a.shape, a_scale.shape, b.shape, b_scale.shape, ends.shape),
        (a.dtype, a_scale.dtype, b.dtype, b_scale.dtype, ends.dtype, out_dtype),
        (device, a_scale.device, b.device, b_scale.device, ends.device),
        starts is not None and (starts.shape, starts.dtype, starts.device),
        bias is not None and (bias.shape, bias.dtype, bias.device),
        out_offs is not None and (out_offs.shape, out_offs.dtype, out_offs.device),
        (a.is_cuda or cpu_target(), expected_rows, a_scale_layout, b_scale_layout),
        (out_rows, run_rows, exact_sums, ENVIRONMENT.get(EXACT_SUMS)),
    )
    found = _plans.by_call.get(call)
    if found is None:
        problem = problem_of(
            a, a_scale, b, b_scale, starts, ends, out_dtype, bias, expected_rows,
            a_scale_layout, b_scale_layout, out_offs, out_rows, run_rows,
        )  # fmt: skip
        found = _plans.keep(call, _plan(problem, a, ends, exact_sums))
    run, shape, first_end = found

    operands = {"a": a, "a_scale": a_scale, "b": b, "b_scale": b_scale, "bias": bias}
    operands |= {"starts": starts, "group_offs": ends, "out_offs": out_offs}
    refuse_strides(**operands)
    apart = a.ndim == 3
    name = "masked_m" if apart else "group_offs" if starts is None else "ends"
    bounds = ends[: len(starts)] if run_rows and starts is not None else ends
    check_groups(name, b.shape[0], starts, bounds, a.shape[-2], apart)
    if out_offs is not None:
        check_places(ends, out_offs, out_rows)
    if out is None:
        out = torch.empty(shape, dtype=out_dtype, device=device)
    else:
        check_out(out, shape, out_dtype, **operands)
    if run is not None:
        refuse_alignment(a=a, b=b)
        if a_scale_layout != "row_major":
            refuse_alignment(a_scale=a_scale)
        if b_scale_layout != "row_major":
            refuse_alignment(b_scale=b_scale)
        ends_address = ends.data_ptr()
        starts_address = 0 if starts is None else starts.data_ptr()
        if out_offs is not None:
            starts, starts_address = ends, ends_address
            ends, ends_address = out_offs, out_offs.data_ptr()
        elif first_end:  # offsets [G + 1]: starts, and the same from the second on
            starts, starts_address = ends, ends_address
            ends_address += first_end
        run(
            (a, a_scale, b, b_scale, bias, out, starts, ends),
            (
                a.data_ptr(),
                a_scale.data_ptr(),
                b.data_ptr(),
                b_scale.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                out.data_ptr(),
                starts_address,
                ends_address,
            ),
        )
    return out


def _plan(
    problem: GroupedGemmProblem, a: torch.Tensor, ends: torch.Tensor, exact_sums: bool | None
) -> tuple[Run | None, tuple[int, ...], int]:
    """What computes such a call (None for an empty result), the result's shape, and the bytes
    before the first group's end in ``ends``."""
    shape = (problem.out_rows, problem.N) if problem.unpads else (*a.shape[:-1], problem.N)
    first_end = ends.itemsize if ends.shape[0] == problem.G + 1 else 0
    if 0 in shape or problem.M == 0 or a.is_meta:
        return None, shape, first_end
    run = bind("grouped_gemm", target_of(a.device, exact_sums), problem, a.device)
    return run, shape, first_end


def _fake(*arguments: Any) -> torch.Tensor:
    problem, a = problem_of(*arguments[:14]), arguments[0]  # what of them bears on the shape
    rows = (problem.out_rows,) if problem.unpads else a.shape[:-1]
    fake: torch.Tensor = a.new_empty((*rows, problem.N), dtype=DTYPES[problem.out_dtype])
    return fake


_through_torch = register_with_out(
    "grouped_gemm",
    "Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? starts, Tensor group_offs, "
    "ScalarType out_dtype, Tensor? bias, SymInt expected_rows, str a_scale_layout, "
    "str b_scale_layout, Tensor? out_offs=None, SymInt out_rows=0, SymInt run_rows=0, "
    "bool? exact_sums=None",
    "Tensor",
    _grouped_gemm,
    _fake,
    out_at=6,
    stands_for=lambda out: (out.dtype,),
)
