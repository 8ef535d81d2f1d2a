"""Kernels that need other launches too: what lies between a problem's parts.

A function here has the problem, its parts and what runs each (``Composition.joined_by``), and makes
what runs the whole. What lies between them is from torch's allocator, which hands it out again only
to what the stream does later.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aiter_mx.codec import DTYPES
from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from aiter_mx.kernels.grouped_wgrad import GroupedWgradProblem
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.kernels.spec import Parts
from aiter_mx.launch import Run, Tensors, call
from aiter_mx.layouts import unshuffle_scales
from aiter_mx.numerics import BLOCK


def quantised_first(problem: LinearProblem, parts: Parts, runs: Sequence[Run]) -> Run:
    """Quantises the linear's x, for a kernel that takes quantised x alone."""
    quantise, multiply = runs

    def run(tensors: Tensors, addresses: object) -> None:
        x, _, *others = tensors
        xq = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        xs = x.new_empty((problem.M, problem.K // BLOCK), dtype=torch.uint8)
        call(quantise, x, None, xq, xs, None, None, None)
        call(multiply, xq, xs, *others)

    return run


def with_readable_scales(problem: GroupedGemmProblem, parts: Parts, runs: Sequence[Run]) -> Run:
    """Makes scales row-major that the chosen kernel does not read."""
    ((_, readable),), (multiply,) = parts, runs
    rows_a = problem.M // problem.G if problem.layout == "masked" else problem.M
    given = ((1, problem.a_scale_layout, rows_a), (3, problem.b_scale_layout, problem.N))
    read = (readable.a_scale_layout, readable.b_scale_layout)
    unread = [each for each, layout in zip(given, read, strict=True) if each[1] != layout]

    def run(tensors: Tensors, addresses: Sequence[int]) -> None:
        tensors, addresses = list(tensors), list(addresses)
        for at, layout, rows in unread:
            tensors[at] = unshuffle_scales(tensors[at], layout, rows, problem.K // BLOCK)
            addresses[at] = tensors[at].data_ptr()
        multiply(tensors, addresses)

    return run


def added_up(problem: GroupedWgradProblem, parts: Parts, runs: Sequence[Run]) -> Run:
    """Adds up the products of each group's pieces in fp32, in order, and rounds once."""
    ((_, pieces),), (multiply,) = parts, runs
    shape = (problem.G, pieces.pieces, problem.N, problem.K)

    def run(tensors: Tensors, addresses: Sequence[int]) -> None:
        tensors, addresses = list(tensors), list(addresses)
        out = tensors[5]
        tensors[5] = out.new_empty(shape, dtype=torch.float32)
        addresses[5] = tensors[5].data_ptr()
        multiply(tensors, addresses)
        total = tensors[5].sum(1)
        out.copy_(total.add_(out) if problem.accumulate else total)

    return run


def then_scattered(problem: MoeGemmProblem, parts: Parts, runs: Sequence[Run]) -> Run:
    """Scatters sums that stay as the ids are sorted."""
    ((_, sums),), (multiply, scatter) = parts, runs
    shape = (sums.blocks * sums.block_m, sums.N)

    def run(tensors: Tensors, addresses: object) -> None:
        *operands, weights, bias, out, out_scales = tensors
        held = operands[0].new_empty(shape, dtype=DTYPES[sums.out_dtype])
        call(multiply, *operands, None, bias, held, None)
        call(scatter, held, *operands[4:], weights, out, out_scales)

    return run


def in_other_blocks(problem: MoeGemmProblem, parts: Parts, runs: Sequence[Run]) -> Run:
    """Makes a list in other blocks first, and multiplies by that."""
    ((_, inner),), (multiply, reblock) = parts, runs
    ids = inner.blocks * inner.block_m
    sizes = (ids, inner.blocks, 1)
    by_place = problem.weights == "by_place"

    def run(tensors: Tensors, addresses: object) -> None:
        *operands, sorted_ids, expert_ids, used, weights, bias, out, out_scales = tensors
        lists = sorted_ids.new_empty(sum(sizes)).split(sizes)
        moved = weights.new_empty(ids) if by_place else None
        given = weights if by_place else None
        call(reblock, sorted_ids, expert_ids, used, given, *lists, moved)
        weights = moved if by_place else weights
        call(multiply, *operands, *lists, weights, bias, out, out_scales)

    return run


def by_groups(problem: MoeGemmProblem, parts: Parts, runs: Sequence[Run]) -> Run:
    """Gathers the rows of each expert, multiplies them as groups, and scatters their sums, if these
    do not stay as the ids are sorted."""
    ((_, inner),), (multiply, gather, *scatter) = parts, runs

    def run(tensors: Tensors, addresses: object) -> None:
        xq, xs, wq, ws, sorted_ids, expert_ids, used, weights, bias, out, out_scales = tensors
        gathered = xq.new_empty((inner.M, inner.K))
        scales = xq.new_empty((inner.M, inner.K // BLOCK), dtype=torch.uint8)
        starts, ends = xq.new_empty((2, inner.G), dtype=torch.int32)
        sums, places = out, out_scales
        if scatter:
            sums, places = xq.new_empty((inner.M, inner.N), dtype=DTYPES[inner.out_dtype]), None
        lists = (sorted_ids, expert_ids, used)
        call(gather, xq, xs, *lists, gathered, scales, starts, ends, places)
        call(multiply, gathered, scales, wq, ws, bias, sums, starts, ends)
        for each in scatter:
            call(each, sums, *lists, weights, out, out_scales)

    return run
