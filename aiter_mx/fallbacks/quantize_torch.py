"""Quantisation in torch operations: the reference, on any device and without a host sync."""

from __future__ import annotations

import torch
from torch import Tensor

from aiter_mx.codec import FORMATS, amax_bits, encode_blocks, pack_elements
from aiter_mx.kernels.quantize.problem import GROUP_ROWS, QuantizeProblem
from aiter_mx.kernels.spec import Config
from aiter_mx.launch import Tensors
from aiter_mx.layouts import shuffle_scales
from aiter_mx.numerics import BLOCK


def run(problem: QuantizeProblem, tensors: Tensors, config: Config) -> None:
    """Compute a quantisation."""
    x, offsets, rows, row_scales, columns, column_scales, padded_offsets = tensors
    M, N = problem.M, problem.N
    matrices = x.reshape(problem.matrices, M, N)
    given = matrices
    if problem.groups:
        matrices = padded_rows(matrices[0], offsets, padded_offsets, problem.out_rows)[None]
    for payload, scales, along in (
        (rows, row_scales, given if problem.padded == "columns" else matrices),
        (columns, column_scales, matrices.mT),
    ):
        if payload is None:
            continue
        elements, found = _quantized(along, problem)
        found = shuffle_scales(found, problem.layout)
        if along is given and problem.padded == "columns":
            elements = _where_grouped(offsets, elements, payload)
            found = _where_grouped(offsets, found, scales)
        payload.copy_(elements.view(payload.shape))
        scales.copy_(found.view(scales.shape))


def _where_grouped(offsets: Tensor, made: Tensor, there: Tensor) -> Tensor:
    """Rows of ``made`` that are of a group, and of ``there`` the others."""
    rows = made.shape[-2]
    row, bounds = torch.arange(rows, device=made.device)[:, None], offsets.long().clamp(0, rows)
    grouped = ((row >= bounds[:-1]) & (row < bounds[1:])).any(1, keepdim=True)
    made_bytes, there_bytes = made.view(torch.uint8), there.reshape(made.shape).view(torch.uint8)
    chosen: Tensor = torch.where(grouped, made_bytes, there_bytes)
    return chosen.view(made.dtype)


def _quantized(x: Tensor, problem: QuantizeProblem) -> tuple[Tensor, Tensor]:
    """Payload and row-major scales of ``x[matrices, R, C]`` along C."""
    payload_format = FORMATS[problem.format]
    blocks = x.float().contiguous().unflatten(-1, (x.shape[-1] // BLOCK, BLOCK))
    amax = amax_bits(blocks)
    if problem.block == "32x32":
        tiles = amax.unflatten(-2, (amax.shape[-2] // BLOCK, BLOCK)).amax(-2)
        amax = tiles.repeat_interleave(BLOCK, dim=-2)
    elements, scales = encode_blocks(blocks, amax, payload_format, problem.mode)
    return pack_elements(elements.flatten(-2), payload_format), scales


def padded_rows(x: Tensor, offsets: Tensor, padded_offsets: Tensor, out_rows: int) -> Tensor:
    """``x`` with each group's rows followed by zeros; fills ``padded_offsets``."""
    begin = offsets.long().clamp(0, x.shape[0])
    size = (begin[1:] - begin[:-1]).clamp(min=0)
    padded_size = (size + GROUP_ROWS - 1) // GROUP_ROWS * GROUP_ROWS
    padded_end = padded_size.cumsum(0)
    padded_offsets[:1] = 0
    padded_offsets[1:] = padded_end
    out = x.new_zeros(out_rows, x.shape[1])
    if not x.shape[0]:
        return out
    row = torch.arange(out_rows, device=x.device)
    group = torch.searchsorted(padded_end, row, right=True).clamp(max=len(size) - 1)
    inside = row - (padded_end - padded_size)[group]
    there = (row < padded_end[-1]) & (inside < size[group])
    source = torch.where(there, begin[group] + inside, 0)
    return torch.where(there[:, None], x[source], out)
