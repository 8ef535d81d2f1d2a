"""``aiter_mx.moe_align`` and ``aiter_mx.moe_sort``: routed tokens as blocks, expert by expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aiter_mx.checks import (
    INDEX_NAMES,
    as_whole_number,
    check_expert_ids,
    check_tensor,
    refuse_less,
    refuse_no_whole_number,
)
from aiter_mx.kernels.moe_align import MoeAlignProblem
from aiter_mx.kernels.moe_gemm.problem import most_padded
from aiter_mx.launch import Run, call
from aiter_mx.plan import Plans, bind
from aiter_mx.registration import in_clear, is_traced, register, wants_gradient
from aiter_mx.target import target_of


@in_clear
def moe_align(
    topk_ids: Tensor,
    block_m: int,
    num_experts: int,
    expert_map: Tensor | None = None,
    *,
    drop_absent: bool = False,
    shared_experts: int = 0,
    first_shared: int | None = None,
    num_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort routed rows by expert, each expert's padded to whole blocks, in one launch.

    A routed row is ``t = token * slots + slot``; an expert's come in rising order, and the result
    is the same on every run. Nothing is read on the host. The interface is that of vLLM's
    ``moe_align_block_size``.

    Args:
        topk_ids: int32 or int64 ``[M, top_k]``: the expert of each slot, 0 to num_experts - 1. Any
            other value leaves the row out; ``AITER_MX_CHECK=1`` makes it an error.
        block_m: ids of a block, a multiple of 4.
        num_experts: experts that are routed to, on all ranks.
        expert_map: int32 ``[num_experts]``: each expert's number on this rank, -1 for one that is
            not here; None where all are here under their own numbers.
        drop_absent: leave out the rows of experts that are not here, instead of listing them in
            blocks of expert -1.
        shared_experts: experts that every token has besides: slots top_k and up, so that there are
            ``slots = top_k + shared_experts`` of them.
        first_shared: number of the first of these on this rank; by default after the others.
        num_tokens: int32 ``[1]`` on the device: tokens that count, the first ones; None for all.

    Returns:
        sorted_token_ids: int32; padding is M * slots.
        expert_ids: int32, one for each block, -1 where there is no block.
        num_tokens_post_padded: int32 ``[1]``: ids in use.

    Raises:
        TypeError, ValueError: arguments other than those above.
    """
    block_m, num_experts = as_whole_number(block_m), as_whole_number(num_experts)
    first_shared = num_experts if first_shared is None else as_whole_number(first_shared)
    options = (drop_absent, as_whole_number(shared_experts), first_shared, num_tokens)
    traced = is_traced((topk_ids, expert_map, num_tokens))
    align = _align_through_torch if traced else _align
    sorted_ids, expert_ids, used = align(topk_ids, block_m, num_experts, expert_map, *options)
    return sorted_ids, expert_ids, used


def _align(
    topk_ids: Tensor,
    block_m: int,
    num_experts: int,
    expert_map: Tensor | None,
    drop_absent: bool,
    shared: int,
    first_shared: int,
    num_tokens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    refuse_no_whole_number(block_m=block_m, num_experts=num_experts)
    refuse_no_whole_number(shared_experts=shared, first_shared=first_shared)
    refuse_less(1, num_experts=num_experts)
    refuse_less(0, shared_experts=shared, first_shared=first_shared)
    if drop_absent not in (False, True):
        raise TypeError(f"drop_absent must be True or False, got {drop_absent!r}")
    device = check_tensor("topk_ids", topk_ids, tuple(INDEX_NAMES), ("M", "top_k")).device
    if expert_map is not None:
        check_tensor("expert_map", expert_map, (torch.int32,), (num_experts,), device)
    if num_tokens is not None:
        check_tensor("num_tokens", num_tokens, (torch.int32,), (1,), device)
    problem = MoeAlignProblem(
        M=topk_ids.shape[0],
        top_k=topk_ids.shape[1],
        E=num_experts,
        block_m=block_m,
        id_dtype=INDEX_NAMES[topk_ids.dtype],
        expert_map="none" if expert_map is None else "numbers",
        drop_absent=int(drop_absent),
        shared=shared,
        first_shared=first_shared,
    )
    check_expert_ids(topk_ids, num_experts, num_tokens)
    sorted_ids, _, expert_ids, post_padded = _run(problem, topk_ids, None, expert_map, num_tokens)
    return sorted_ids, expert_ids, post_padded


@in_clear
def moe_sort(
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    block_m: int = 32,
    expert_mask: Tensor | None = None,
    num_local_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort routed rows by expert in the encoding of aiter's ``moe_sorting``, in one launch.

    An id is ``slot << 24 | token``, padding ``top_k << 24 | M`` with weight 0. Rows of experts that
    are not here are left out. There is no gradient: where torch records one for the weights, its
    backward pass raises.

    Args:
        topk_ids: int32 or int64 ``[M, top_k]``, as for ``moe_align``.
        topk_weights: float32 ``[M, top_k]``; with num_local_tokens it may have fewer rows, which
            are of the tokens that count.
        num_experts: experts that are routed to, on all ranks.
        block_m: ids of a block, a multiple of 4.
        expert_mask: int32 ``[num_experts]``, not 0 for those on this rank, which are numbered in
            their order; None where all are.
        num_local_tokens: int32 ``[1]`` on the device: tokens that count, the first ones; None for
            all.

    Returns:
        sorted_ids: int32.
        sorted_weights: float32, of the same length.
        sorted_expert_ids: int32, one for each block, -1 where there is no block.
        num_valid_ids: int32 ``[2]``: ids in use, and tokens that count.

    Raises:
        TypeError, ValueError: arguments other than those above.
    """
    block_m, num_experts = as_whole_number(block_m), as_whole_number(num_experts)
    if num_local_tokens is not None:
        topk_weights = _with_rows(topk_weights, topk_ids)
    arguments = (topk_ids, topk_weights, num_experts, block_m, expert_mask, num_local_tokens)
    traced = is_traced((topk_ids, topk_weights, expert_mask, num_local_tokens))
    sort = _sort_through_torch if traced or wants_gradient(topk_weights) else _sort
    sorted_ids, weights, expert_ids, used = sort(*arguments)
    return sorted_ids, weights, expert_ids, used


def _with_rows(topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """Weights with as many rows as ids, whose last ones are buffers' that no token fills."""
    if not (isinstance(topk_weights, Tensor) and isinstance(topk_ids, Tensor)):
        return topk_weights
    if not topk_weights.ndim == topk_ids.ndim == 2:
        return topk_weights
    missing = topk_ids.shape[0] - topk_weights.shape[0]
    return (
        torch.nn.functional.pad(topk_weights, (0, 0, 0, missing)) if missing > 0 else topk_weights
    )


def _sort(
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    block_m: int,
    expert_mask: Tensor | None,
    num_local_tokens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    refuse_no_whole_number(block_m=block_m, num_experts=num_experts)
    refuse_less(1, num_experts=num_experts)
    device = check_tensor("topk_ids", topk_ids, tuple(INDEX_NAMES), ("M", "top_k")).device
    shape = tuple(topk_ids.shape)
    check_tensor("topk_weights", topk_weights, (torch.float32,), shape, device)
    if expert_mask is not None:
        check_tensor("expert_mask", expert_mask, (torch.int32,), (num_experts,), device)
    if num_local_tokens is not None:
        check_tensor("num_local_tokens", num_local_tokens, (torch.int32,), (1,), device)
    problem = MoeAlignProblem(
        M=shape[0],
        top_k=shape[1],
        E=num_experts,
        block_m=block_m,
        ids="aiter",
        id_dtype=INDEX_NAMES[topk_ids.dtype],
        expert_map="none" if expert_mask is None else "mask",
        drop_absent=1,
    )
    check_expert_ids(topk_ids, num_experts, num_local_tokens)
    ids, weights, expert_ids, valid = _run(
        problem, topk_ids, topk_weights, expert_mask, num_local_tokens
    )
    assert weights is not None
    return ids, weights, expert_ids, valid


_plans: Plans[Run] = Plans()


def _run(
    problem: MoeAlignProblem,
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    expert_map: Tensor | None,
    num_tokens: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    device = topk_ids.device
    packed = problem.ids == "aiter"
    sorted_ids = torch.empty(problem.max_ids, dtype=torch.int32, device=device)
    weights = sorted_ids.new_empty(problem.max_ids, dtype=torch.float32) if packed else None
    blocks = problem.max_ids // problem.block_m
    expert_ids = torch.empty(blocks, dtype=torch.int32, device=device)
    post_padded = torch.empty(2 if packed else 1, dtype=torch.int32, device=device)
    outputs = (sorted_ids, weights, expert_ids, post_padded)
    if problem.routed == 0:
        post_padded.zero_()
        return outputs
    target = target_of(device)
    key = (target, device, problem)
    run = _plans.by_call.get(key)
    if run is None:
        run = _plans.keep(key, bind("moe_align", target, problem, device))
    call(run, topk_ids, topk_weights, expert_map, num_tokens, None, *outputs, None, None)
    return outputs


def _align_fake(
    topk_ids: Tensor, block_m: int, num_experts: int, expert_map: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _, shared, *_ = options
    return *_empty_lists(topk_ids, block_m, num_experts, shared), _int32(topk_ids, 1)


def _sort_fake(
    topk_ids: Tensor, topk_weights: Tensor, num_experts: int, block_m: int, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ids, expert_ids = _empty_lists(topk_ids, block_m, num_experts, 0)
    weights = ids.new_empty(ids.shape, dtype=torch.float32)
    return ids, weights, expert_ids, _int32(topk_ids, 2)


def _empty_lists(
    topk_ids: Tensor, block_m: int, num_experts: int, shared: int
) -> tuple[Tensor, Tensor]:
    """Sorted ids and the expert of each block, as a routing of this shape has them."""
    routed = topk_ids.shape[0] * (topk_ids.shape[1] + shared)
    ids = most_padded(routed, num_experts + shared, block_m)
    return _int32(topk_ids, ids), _int32(topk_ids, ids // block_m)


def _int32(like: Tensor, size: int) -> Tensor:
    return like.new_empty(size, dtype=torch.int32)


_align_through_torch = register(
    "moe_align",
    "(Tensor topk_ids, SymInt block_m, SymInt num_experts, Tensor? expert_map, bool drop_absent, "
    "SymInt shared, SymInt first_shared, Tensor? num_tokens) -> (Tensor, Tensor, Tensor)",
    _align,
    _align_fake,
)
_sort_through_torch = register(
    "moe_sort",
    "(Tensor topk_ids, Tensor topk_weights, SymInt num_experts, SymInt block_m, "
    "Tensor? expert_mask, Tensor? num_local_tokens) -> (Tensor, Tensor, Tensor, Tensor)",
    _sort,
    _sort_fake,
)
