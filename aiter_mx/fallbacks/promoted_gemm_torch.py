"""Grouped GEMMs with scales for 128 k in plain torch: float64 inside, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from aiter_mx.fallbacks.grouped_gemm_torch import groups_of_ranges, owners_of_rows, ranges
from aiter_mx.kernels.promoted_gemm import PromotedGemmProblem
from aiter_mx.kernels.promoted_gemm.problem import COARSE
from aiter_mx.kernels.spec import Config
from aiter_mx.launch import Tensors


def run(problem: PromotedGemmProblem, tensors: Tensors, config: Config) -> None:
    """Compute the product of the dequantised operands, each group for all rows."""
    a, a_scale, b, b_scale, out, starts, ends = tensors
    M, N, K, G = problem.M, problem.N, problem.K, problem.G
    steps = -(-K // COARSE)
    row, step, group = problem.a_strides
    room = M // G if problem.layout == "masked" else M
    shape = (M // room if room else 0, room, steps)
    of_rows = a_scale.as_strided(shape, (group, row, step)).reshape(M, steps)
    block, step, group = problem.b_strides
    of_blocks = b_scale.as_strided((G, -(-N // COARSE), steps), (group, block, step))
    x = a.view(M, K).double() * _every(of_rows, -1, K)
    owners = groups_of_ranges(problem.groups, ends)
    owner = owners_of_rows(M, owners, *ranges(problem.groups, starts, ends)).unsqueeze(1)
    out = out.view(M, N)
    for g in range(G):
        w = b.view(G, N, K)[g].double() * _every(_every(of_blocks[g], -1, K), -2, N)
        torch.where(owner == g, (x @ w.T).to(out.dtype), out, out=out)


def _every(scale: Tensor, dim: int, size: int) -> Tensor:
    """Scales of each element along a dimension, from one for each 128."""
    return scale.double().repeat_interleave(COARSE, dim).narrow(dim, 0, size)
