"""The gradient of a grouped GEMM's weights in plain torch: float64 inside, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from aiter_mx.codec import as_scale_bytes, dequantize_block_scaled, round_once
from aiter_mx.kernels.grouped_wgrad import GroupedWgradProblem
from aiter_mx.kernels.grouped_wgrad.problem import START_COLUMNS
from aiter_mx.kernels.spec import Config
from aiter_mx.launch import Tensors
from aiter_mx.numerics import BLOCK


def run(problem: GroupedWgradProblem, tensors: Tensors, config: Config) -> None:
    """Compute the gradient from the dequantised operands.

    On a GPU, where bounds cannot be read without waiting, each group takes all columns with those
    of others as zeros: it is a reference, not a fast path.
    """
    grad, grad_scale, x, x_scale, before, out, starts, through = tensors
    grad_scale, x_scale = as_scale_bytes(grad_scale), as_scale_bytes(x_scale)
    begins, counts = columns_of_groups(problem, starts, before, through)
    column = torch.arange(problem.M, device=out.device)
    for g in range(problem.G):
        first, end = 0, problem.M
        if out.device.type == "cpu":
            first = int(begins[g])
            end = first + -(-int(counts[g]) // BLOCK) * BLOCK
        inside = column[first:end] - begins[g]
        mine = (inside >= 0) & (inside < counts[g])
        blocks = slice(first // BLOCK, end // BLOCK)
        grad_values = _values(grad[:, first:end], grad_scale[:, blocks], mine)
        product = grad_values @ _values(x[:, first:end], x_scale[:, blocks], mine).T
        if problem.accumulate:
            product += out[g].double()
        out[g] = round_once(product, out.dtype)


def _values(payload: Tensor, scale: Tensor, mine: Tensor) -> Tensor:
    values = dequantize_block_scaled(payload.contiguous(), scale.contiguous(), torch.float64)
    return torch.where(mine, values, 0.0)


def columns_of_groups(
    problem: GroupedWgradProblem, starts: Tensor, before: Tensor | None, through: Tensor
) -> tuple[Tensor, Tensor]:
    """First column of each group, or piece, and how many it has, cut to those there are."""
    M, G = problem.M, problem.G // problem.pieces
    begins = starts[:G].long().clamp(0, M) // START_COLUMNS * START_COLUMNS
    counts = through[-G:].long() if before is None else through[-G:].long() - before[:G].long()
    counts = torch.minimum(counts.clamp(min=0), M - begins)
    room = -(-counts // (problem.pieces * START_COLUMNS)) * START_COLUMNS  # of a group's pieces
    passed = room[:, None] * torch.arange(problem.pieces, device=room.device)
    left = (counts[:, None] - passed).clamp(min=0)
    return (begins[:, None] + passed).flatten(), torch.minimum(left, room[:, None]).flatten()
