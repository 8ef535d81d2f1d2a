"""Runs the GEMM over routed tokens by way of ``grouped_gemm``: gather, multiply, scatter."""

from __future__ import annotations

import torch
from torch import Tensor

from aiter_mx import launch
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.kernels.moe_gemm.grouped import GATHER, SCATTER, grouped_problem
from aiter_mx.launch import Run, Tensors
from aiter_mx.ops import grouped_gemm
from aiter_mx.ops.checks import BLOCK, DTYPES
from aiter_mx.ops.plan import bind
from aiter_mx.target import target_of


def bind_grouped(problem: MoeGemmProblem, device: torch.device) -> Run:
    """What computes ``problem``; its tensors are those of a kernel of ``moe_gemm``.

    Between the steps lie the gathered rows and their sums, in memory from torch's allocator.

    Raises:
        CaptureError: something would have to be built while the current stream is captured.
    """
    target, index = target_of(device), device.index or 0
    inner = grouped_problem(problem)
    gather = launch.bind(GATHER, target, problem, {}, index)
    multiply = bind("grouped_gemm", target, inner, device, grouped_gemm.fallbacks(inner))
    scatter = launch.bind(SCATTER, target, problem, {}, index)

    def run(tensors: Tensors, _: object) -> None:
        xq, xs, wq, ws, sorted_ids, expert_ids, used, weights, bias, out, out_scales = tensors
        rows, K = inner.M, problem.K
        gathered = torch.empty((rows, K), dtype=xq.dtype, device=device)
        scales = torch.empty((rows, K // BLOCK), dtype=torch.uint8, device=device)
        starts, ends = torch.empty((2, problem.E), dtype=torch.int32, device=device)
        sums = torch.empty((rows, problem.N), dtype=DTYPES[inner.out_dtype], device=device)
        lists = (sorted_ids, expert_ids, used)
        _launch(gather, xq, xs, *lists, gathered, scales, starts, ends)
        _launch(multiply, gathered, scales, wq, ws, bias, sums, starts, ends)
        _launch(scatter, sums, *lists, weights, out, out_scales)

    return run


def warm(problem: MoeGemmProblem, device: torch.device) -> None:
    """Load what computes ``problem`` so, on ``device``."""
    grouped_gemm.warm(grouped_problem(problem), device)
    bind_grouped(problem, device)


def _launch(run: Run, *tensors: Tensor | None) -> None:
    run(tensors, [0 if tensor is None else tensor.data_ptr() for tensor in tensors])
