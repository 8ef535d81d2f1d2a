"""The grouped GEMM in plain torch: float64 inside, for any shape on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from aiter_mx.fallbacks.linear_torch import linear_torch
from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from aiter_mx.kernels.spec import Config
from aiter_mx.launch import Tensors
from aiter_mx.numerics import BLOCK


def run(problem: GroupedGemmProblem, tensors: Tensors, config: Config) -> None:
    """Compute a grouped GEMM of the dequantised operands.

    On a GPU, where bounds cannot be read without waiting, each group is computed for all rows and
    kept for its own: it is a reference, not a fast path.
    """
    a, a_scale, b, b_scale, bias, out, starts, ends = tensors
    M, N, K = problem.M, problem.N, problem.K
    a, a_scale, out = a.view(M, K), a_scale.view(M, K // BLOCK), out.view(M, N)
    starts, ends = ranges(problem, starts, ends)
    of_groups = [(b[g], b_scale[g], None if bias is None else bias[g]) for g in range(problem.G)]
    if out.device.type == "cpu":
        for g, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            rows = slice(min(max(start, 0), M), min(max(end, 0), M))
            linear_torch(a[rows], a_scale[rows], *of_groups[g], out[rows])
        return
    row = torch.arange(M, device=out.device).unsqueeze(1)
    product = torch.empty((M, N), dtype=out.dtype, device=out.device)
    for g in range(problem.G):
        linear_torch(a, a_scale, *of_groups[g], product)
        mine = (row >= starts[g]) & (row < ends[g])
        torch.where(mine, product, out, out=out)


def ranges(
    problem: GroupedGemmProblem, starts: Tensor | None, ends: Tensor
) -> tuple[Tensor, Tensor]:
    """First row of each group, and the row after its last, whatever the layout."""
    M, G = problem.M, problem.G
    if problem.layout == "masked":
        first = torch.arange(G, device=ends.device) * (M // G)
        return first, first + ends.clamp(max=M // G)
    if starts is None:
        return torch.nn.functional.pad(ends[:-1], (1, 0)), ends
    return starts[:G], ends[-G:]
