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
    a, a_scale, out = a.view(M, K), a_scale.view(M, K // BLOCK), out.view(problem.rows_of_out, N)
    first_of_out = first_rows_of_out(problem, starts, ends)
    owners = groups_of_ranges(problem, ends)
    starts, ends = (each.clamp(0, M) for each in ranges(problem, starts, ends))
    of_groups = [(b[g], b_scale[g], None if bias is None else bias[g]) for g in range(problem.G)]
    if out.device.type == "cpu":
        bounds = (each.tolist() for each in (owners, starts, ends, first_of_out))
        for g, start, end, to in zip(*bounds, strict=True):
            if start < end:
                rows, of_out = slice(start, end), slice(to, to + end - start)
                linear_torch(a[rows], a_scale[rows], *of_groups[int(g)], out[of_out])
        return
    if problem.layout == "runs":
        owner, product = owners_of_rows(M, owners, starts, ends), torch.empty_like(out)
        for g in range(problem.G):
            linear_torch(a, a_scale, *of_groups[g], product)
            torch.where((owner == g).unsqueeze(1), product, out, out=out)
        return
    row = torch.arange(len(out), device=out.device).unsqueeze(1)
    product = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    for g in range(problem.G):
        rows_of_a, scales_of_a = a, a_scale
        if problem.unpads:
            moved = (row.squeeze(1) + starts[g] - first_of_out[g]).clamp(0, M - 1)
            rows_of_a, scales_of_a = a[moved], a_scale[moved]
        linear_torch(rows_of_a, scales_of_a, *of_groups[g], product)
        mine = (row >= first_of_out[g]) & (row < first_of_out[g] + ends[g] - starts[g])
        torch.where(mine, product, out, out=out)


def ranges(
    problem: GroupedGemmProblem, starts: Tensor | None, ends: Tensor
) -> tuple[Tensor, Tensor]:
    """First row of a of each group, and the row after its last, whatever the layout; of each range
    where a group may have several."""
    M, G = problem.M, problem.G
    if problem.unpads:
        assert starts is not None
        first = starts[:G].clamp(0, M)
        rows = ends.clamp(0, problem.out_rows).diff().clamp(min=0)
        return first, (first + rows).clamp(max=M)
    if problem.layout == "masked":
        first = torch.arange(G, device=ends.device) * (M // G)
        return first, first + ends.clamp(max=M // G)
    if starts is None:
        return torch.nn.functional.pad(ends[:-1], (1, 0)), ends
    if problem.layout == "runs":
        return starts, ends[: problem.most_runs]
    return starts[:G], ends[-G:]


def groups_of_ranges(problem: GroupedGemmProblem, ends: Tensor) -> Tensor:
    """The group of each of the ranges of rows that ``ranges`` finds."""
    if problem.layout == "runs":
        return ends[problem.most_runs + 1 :]
    return torch.arange(problem.G, dtype=torch.int32, device=ends.device)


def owners_of_rows(rows: int, owners: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """The group of each row, or -1, where range r belongs to group ``owners[r]``."""
    row = torch.arange(rows, device=ends.device)
    found = torch.full_like(row, -1)
    for owner, start, end in zip(owners, starts, ends, strict=True):
        found = torch.where((row >= start) & (row < end), owner, found)
    return found


def first_rows_of_out(problem: GroupedGemmProblem, starts: Tensor | None, ends: Tensor) -> Tensor:
    """The first row of out of each group."""
    if problem.unpads:
        return ends[:-1].clamp(0, problem.out_rows)
    return ranges(problem, starts, ends)[0].clamp(0, problem.M)
