"""Grouped GEMMs over fp8 with fp32 scales for 128 k, which ``aiter_mx.compat.deep_gemm`` calls."""

from __future__ import annotations

import torch
from torch import Tensor

from aiter_mx.checks import DTYPE_NAMES, INDEX_NAMES, refuse_alignment
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels.promoted_gemm import PromotedGemmProblem
from aiter_mx.kernels.promoted_gemm.problem import COARSE
from aiter_mx.launch import Run
from aiter_mx.numerics import BLOCK
from aiter_mx.plan import Plans, bind
from aiter_mx.registration import is_traced, register
from aiter_mx.target import Target, target_of

_ALIGNMENT = 16  # bytes, of rows that are loaded and stored in vectors

_plans: Plans[Run] = Plans()


def promoted_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    starts: Tensor | None,
    ends: Tensor,
    out: Tensor,
    expected_rows: int = 0,
    run_rows: int = 0,
) -> bool:
    """Write groups of rows of ``a @ b.T``, whose products of 128 k are scaled in fp32.

    Hopper's ``wgmma_fp8``, which 16-bit results get, adds the 128 products with some 14 bits:
    within 2^-6 of the sum of their magnitudes, for random payloads within 2^-9.
    ``AITER_MX_EXACT_SUMS=1`` passes it over.

    Args:
        a: float8_e4m3fn ``[M, K]`` or, masked, ``[G, rows, K]``, contiguous.
        a_scale: fp32 ``[..., K / 128]`` rounded up, of any strides.
        b: float8_e4m3fn ``[G, N, K]``, contiguous.
        b_scale: fp32 ``[G, N / 128, K / 128]`` rounded up, of any strides.
        starts: first row of each group, int32 or int64 ``[G]``; None where groups are masked, or
            each begins where the one before ends.
        ends: the row after each group's last or, masked, its number of rows.
        out: ``[M, N]`` or ``[G, rows, N]``, which other rows of keep their values.
        expected_rows: a likely number of rows of a group, or 0.
        run_rows: as of ``grouped_gemm_ranges``.

    Returns:
        Whether a kernel covers such operands. If not, nothing is written.
    """
    masked = a.ndim == 3
    M, K = a.shape[:-1].numel(), a.shape[-1]
    G, N, _ = b.shape
    if N % BLOCK or M == 0 or not out.is_contiguous() or a.is_meta:
        return False
    if b_scale.shape != (G, -(-N // COARSE), -(-K // COARSE)):
        return False
    if any(t.dtype != torch.float32 for t in (a_scale, b_scale)):
        return False
    of_group, of_row, of_step = a_scale.stride() if masked else (0, *a_scale.stride())
    problem = PromotedGemmProblem(
        *(M, N, K, G, DTYPE_NAMES[out.dtype]),
        layout="masked" if masked else "runs" if run_rows else "jagged",
        index=INDEX_NAMES[ends.dtype],
        expected=expected_rows,
        a_row=of_row,
        a_step=of_step,
        a_group=of_group,
        b_block=b_scale.stride(1),
        b_step=b_scale.stride(2),
        b_group=b_scale.stride(0),
        run_rows=run_rows,
    )
    target = target_of(a.device)
    if route("promoted_gemm", target, problem).backend != "hip":
        return False
    tensors = (a, a_scale, b, b_scale, starts, ends)
    if is_traced((*tensors, out)):
        _through_torch(*tensors, out, expected_rows, run_rows)
    else:
        _run(problem, target, tensors, out)
    return True


def _run(
    problem: PromotedGemmProblem,
    target: Target,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor],
    out: Tensor,
) -> None:
    a, a_scale, b, b_scale, starts, ends = tensors
    refuse_alignment(a=a, b=b)
    if out.data_ptr() % _ALIGNMENT:
        aligned = out.clone()
        _run(problem, target, tensors, aligned)
        out.copy_(aligned)
        return
    key = (problem, a.device, target)
    run = _plans.by_call.get(key)
    if run is None:
        run = _plans.keep(key, bind("promoted_gemm", target, problem, a.device))
    given = (a, a_scale, b, b_scale, out, starts, ends)
    run(given, [0 if t is None else t.data_ptr() for t in given])


_through_torch = register(
    "promoted_gemm",
    "(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? starts, Tensor ends, "
    "Tensor(a!) out, SymInt expected_rows, SymInt run_rows=0) -> ()",
    lambda *arguments: None if promoted_gemm(*arguments) else _vanished(),
    lambda *arguments: None,
)


def _vanished() -> None:
    raise RuntimeError(
        "aiter_mx::promoted_gemm was traced where a kernel covered it, and runs where none does"
    )
