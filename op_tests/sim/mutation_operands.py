"""Operands that show mistakes: those that a workload draws, made as odd as a caller's may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from aiter_mx.codec import as_scale_bytes, dequantize_block_scaled
from aiter_mx.numerics import BLOCK
from aiter_mx.workloads.moe_gemm import sorted_by
from aiter_mx.workloads.workload import Operands
from op_tests.far_memory import across
from op_tests.launches import POISON

Posed: TypeAlias = tuple[Operands, Operands]
"""What a kernel is given, and what its results are judged by, which says what it stands for."""

NAN_PAYLOAD, NAN_SCALE = 0x7F, 255
_LOUD = 512  # times a bias, which else is lost in what sums may be off by


def poisoned_rows(results: torch.Tensor) -> torch.Tensor:
    """Which rows nothing has been written to."""
    return (results.view(len(results), -1).view(torch.uint8) == poison_of(results)).all(1)


def poison_of(results: torch.Tensor) -> int:
    """The byte that marks what nothing is written to: where it is a scale, NaN."""
    return NAN_SCALE if results.dtype == torch.uint8 else POISON


def nans_of(results: torch.Tensor) -> torch.Tensor:
    """Which of them are NaN, or which scales say that their block is."""
    return results == NAN_SCALE if results.dtype == torch.uint8 else results.isnan()


def posed(op: str, problem: Any, number: int, drawn: Operands) -> Posed:
    """Operands of a case's problem of this number.

    Every second problem of products and their sum has them across a multiple of 4 GiB, where
    addresses carry.
    """
    is_across = number % 2 == 1 and op in _ACROSS
    operands = [across(t) if is_across and t is not None else t for t in drawn]
    return _VARIED[op](problem, number, operands)


def vary_halves(values: torch.Tensor | None) -> None:
    """Give the halves of blocks, each of which a lane has, sizes of their own."""
    if values is not None and values.itemsize > 1:
        halves = values.view(len(values), -1, 16)
        halves *= torch.randint(-4, 4, halves.shape[:2]).exp2().to(halves.dtype)[..., None]


def _raise(bias: torch.Tensor | None) -> None:
    if bias is not None:
        bias *= _LOUD


def _quantize(problem: Any, number: int, operands: Operands) -> Posed:
    """Infinity and NaN, in every second problem; in one a column of infinity is beside zeros."""
    vary_halves(x := operands[0])
    if number % 2 and x is not None:
        x.view(-1)[5::97], x.view(-1)[11::613] = torch.inf, torch.nan
    if number == 6 and x is not None:
        rows = x.view(-1, x.shape[-1])[:BLOCK]
        rows[:, ::2], rows[7, 1::2] = 0, torch.inf
    return operands, operands


def _moe_up(problem: Any, number: int, operands: Operands) -> Posed:
    """In the third problem the last token does not count."""
    vary_halves(operands[3])
    _raise(operands[7])
    if (tokens := operands[2]) is not None:
        tokens -= number // 2
    return operands, operands


def _moe_down(problem: Any, number: int, operands: Operands) -> Posed:
    """In the last problem the last token does not count, and the first one has shared experts
    alone."""
    vary_halves(operands[0])
    _raise(operands[7])
    ids, tokens = operands[1], operands[4]
    if number == 4 and ids is not None and tokens is not None:
        ids[0] = -1
        tokens -= 1
    return operands, operands


def _align(problem: Any, number: int, operands: Operands) -> Posed:
    """Experts that are elsewhere, in every chunk of them."""
    vary_halves(operands[4])
    if (here := operands[2]) is not None:
        here[number % 3 :: 3] = -1 if problem.expert_map == "numbers" else 0
    return operands, operands


def _combine(problem: Any, number: int, operands: Operands) -> Posed:
    """Ids that name no expert, tokens that do not count, rows that are nowhere; or all is there,
    and what says so left out."""
    _, places, ids, _, numbers, tokens, _ = operands
    assert ids is not None and numbers is not None and tokens is not None
    if places is not None:  # the first row of y is one; its token has it last
        slots = problem.top_k + problem.shared
        first = int(places.argmin())
        places[first], places[slots - 1] = places[slots - 1].clone(), 0
    if number % 3 == 2:
        numbers.zero_()
        return [*operands[:4], None, None, operands[6]], operands
    numbers[number % 2 :: 2] = -1
    ids.view(-1)[1::7] = problem.E
    ids.view(-1)[3::11] = -1
    if places is not None:
        places[slots::13] = -1
    tokens -= number % 2
    return operands, operands


def _moe_gemm(problem: Any, number: int, operands: Operands) -> Posed:
    """Sums no larger than a bias; blocks of experts that are not here; many experts of a token each
    beside one of many; ids in any order, padding of any slot, a last block that counts in part or
    not at all."""
    x, x_scale, w, w_scale, ids, experts, used, _, bias, _, _ = operands
    assert ids is not None and experts is not None and used is not None
    assert x is not None and x_scale is not None and w is not None and w_scale is not None
    if problem.activation != "none" and number in (2, 4):  # what 2^128 makes of w stays finite
        x_scale.copy_((x_scale.int() - 32).clamp(min=0).to(x_scale.dtype))
    if bias is not None:
        _raise(bias)
        of_x = dequantize_block_scaled(x, as_scale_bytes(x_scale), torch.float64).norm(dim=-1)
        of_w = dequantize_block_scaled(w, as_scale_bytes(w_scale), torch.float64).norm(dim=-1)
        excess = int(torch.log2(of_x.median() * of_w.median() / _LOUD))
        w_scale.copy_((w_scale.int() - excess).clamp(0, 254).to(w_scale.dtype))
    if problem.E > _MANY_EXPERTS:
        experts = torch.arange(problem.M).clamp(max=problem.E - 1)[:, None]
        operands[4:8] = sorted_by(problem, experts)
        if number > 6 and (used := operands[6]) is not None:
            used[0] -= problem.block_m
    elif number % 4 == 1:
        experts[0], experts[1] = -1, problem.E
        used[0] -= problem.block_m // 2
        if problem.ids == "aiter":
            padding = (ids & 0xFFFFFF >= problem.M).nonzero()[:, 0]
            ids[padding] = problem.M
            padding = padding[::2]
            ids[padding] = problem.top_k << 24 | torch.arange(len(padding)).int() % problem.M
        ids[: problem.block_m] = ids[: problem.block_m].flip(0)
    elif number == 6:
        used[0] -= problem.block_m
    return operands, operands


def _group_runs(problem: Any, number: int, operands: Operands) -> Posed:
    """Groups beyond the last, and in every second of the first problems, and in all of the others,
    runs that begin at any row."""
    layout = operands[0]
    assert layout is not None
    if number % 2 or number > 5:
        layout.copy_(layout.roll(3 * number))
    layout[7::31] = problem.G + number // 2
    return operands, operands


def _grouped(problem: Any, number: int, operands: Operands) -> Posed:
    """Bounds of each kind: with starts, with ends alone, with neither, cut, below 0, of no rows."""
    _raise(operands[4])
    *rest, starts, ends = operands
    assert ends is not None
    if problem.layout == "runs":
        assert starts is not None
        return [*rest, *_runs(problem, number, starts, ends)], operands
    if problem.layout == "masked" and number in _BEGIN_LATE:
        ends[:64] = ends[-1] = 0
        given = ends.clone()
        given[-1] = -1
        return [*rest, starts, given], operands
    if problem.layout != "jagged" or number % 6 in (0, 2):
        return operands, operands
    given = ends.clone()
    if number % 6 == 3 or number > 6:  # the first 64 groups are empty, and one of the others
        ends[: min(64, problem.G - 3)] = 0
        given = torch.where(ends == 0, -1, ends)
        given[0].clamp_(min=0)
        ends[-2] = given[-2] = ends[-3]
    if number % 6 == 3:
        return [*rest, None, given], operands
    starts = torch.nn.functional.pad(ends[:-1], (1, 0))
    if number % 6 == 4:
        starts[1:] = problem.M
        return [*rest, starts, None], [*rest, starts, torch.full_like(ends, problem.M)]
    given_starts = starts.clone()
    if number % 6 == 5:
        given_starts[0], given[-1] = -1, problem.M + 1000
    return [*rest, given_starts, given], [*rest, starts, ends]


def _runs(problem: Any, number: int, starts: torch.Tensor, ends: torch.Tensor) -> Operands:
    """The first 64 are empty, and more in number than there is room; or behind the last that counts
    are two that do not, of rows that another one has."""
    most = problem.most_runs
    if number in _BEGIN_LATE:
        ends[:64] = starts[:64]
        given = ends.clone()
        given[most] = 1 << 20
        return [starts, given]
    given_starts, given = starts.clone(), ends.clone()
    left, owners = slice(most - 2, most), ends[most + 1 :]
    ends[left] = starts[left]
    given_starts[left], given[left] = starts[0], ends[0]
    given[most], given[-2:] = most - 2, (owners[0] + 1) % problem.G
    return [given_starts, given]


def _wgrad(problem: Any, number: int, operands: Operands) -> Posed:
    """Groups of no columns and of any part of 16, NaN for padding; ends in place of counts."""
    grad, grad_scale, x, x_scale, _, _, starts, counts = operands
    assert starts is not None and counts is not None
    assert grad is not None and grad_scale is not None and x is not None and x_scale is not None
    if number:
        starts = starts[: len(counts)]
        room = torch.diff(torch.cat([starts, starts.new_tensor([problem.M])]))
        counts.copy_((room - torch.arange(len(room)) * 7 % 128).clamp(min=0))
        counts[number % 3 :: 5] = 0
        if number % 4 == 3:
            counts[:64] = 0
        if number > 7:
            counts[:-1] = 0
        for first, count, end in zip(starts.tolist(), counts.tolist(), (starts + room).tolist(),
                                     strict=True):  # fmt: skip
            for payload, scale in ((grad, grad_scale), (x, x_scale)):
                payload.view(torch.uint8)[:, first + count : end] = NAN_PAYLOAD
                scale.view(torch.uint8)[:, -(-(first + count) // BLOCK) : end // BLOCK] = NAN_SCALE
    if number // 2 % 2 == 0:
        return operands, operands
    before = torch.randint(1000, counts.shape).to(counts.dtype)
    return [*operands[:4], before, *operands[5:7], counts + before], operands


_ACROSS = (
    "moe_up",
    "moe_down",
    "moe_combine",
    "moe_gemm",
    "grouped_gemm",
    "grouped_wgrad",
    "group_runs",
)
_MANY_EXPERTS = 32
_BEGIN_LATE = (13, 17, 22, 23)  # problems whose first 64 masked groups, or runs, are empty
_VARIED: dict[str, Callable[[Any, int, Operands], Posed]] = {
    "quantize": _quantize,
    "moe_up": _moe_up,
    "moe_down": _moe_down,
    "moe_align": _align,
    "moe_combine": _combine,
    "moe_gemm": _moe_gemm,
    "group_runs": _group_runs,
    "grouped_gemm": _grouped,
    "grouped_wgrad": _wgrad,
}
