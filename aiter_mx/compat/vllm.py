"""vLLM's routing lists, of the lengths and with the filling that its callers count on."""

from __future__ import annotations

import torch
from torch import Tensor

from aiter_mx.checks import check_tensor, checking, refuse_less, refuse_no_whole_number
from aiter_mx.compat.names import renamed
from aiter_mx.ops.moe_align import moe_align


def moe_align_block_size(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
    return_scatter_idx: bool = False,
) -> tuple[Tensor, ...]:
    """``aiter_mx.moe_align`` with lists as vLLM's function of this name makes them.

    Args:
        topk_ids: int32 or int64 ``[M, top_k]``; ids of no expert are left out.
        block_size: ids of a block, a multiple of 4.
        num_experts: experts that are routed to, on all ranks.
        expert_map: int32 ``[num_experts]``: each expert's number on this rank, -1 for one that is
            not here; or None.
        pad_sorted_ids: whether the ids are a multiple of block_size.
        ignore_invalid_experts: leave out the rows of experts that are not here, whose blocks are
            listed with expert -1 otherwise.
        return_scatter_idx: whether scatter_idx is returned too; with expert_map it needs
            ignore_invalid_experts.

    Returns:
        sorted_token_ids: int32 ``[M * top_k + num_experts * (block_size - 1)]``, rounded up to a
            multiple of block_size where pad_sorted_ids asks for it, and where there are fewer ids
            than experts at most a block for each of them; padding is M * top_k. An expert's ids
            rise.
        expert_ids: int32, one for each block; -1 for those past the end.
        num_tokens_post_padded: int32 ``[1]``.
        scatter_idx: int32 ``[M * top_k, 1]``: the routed row's own number, or -1 for one of no
            expert that is here.

    Raises:
        TypeError, ValueError: as ``aiter_mx.moe_align``.
    """
    if return_scatter_idx and expert_map is not None and not ignore_invalid_experts:
        raise ValueError(
            "return_scatter_idx with an expert_map needs ignore_invalid_experts: rows of experts "
            "that are not here are listed otherwise"
        )
    skips = expert_map is not None and ignore_invalid_experts
    try:
        ids, experts, used = moe_align(
            topk_ids, block_size, num_experts, expert_map if skips else None, drop_absent=True
        )
    except (TypeError, ValueError) as error:
        raise renamed(error, {"block_m": "block_size"}) from error
    routed = topk_ids.numel()
    length = routed + num_experts * (block_size - 1)
    if pad_sorted_ids:
        length = -(-length // block_size) * block_size
    if routed < num_experts:
        length = min(routed * block_size, length)
    ids = filled(ids, length, routed)
    experts = filled(experts, -(-length // block_size), -1)
    if expert_map is not None and not skips:
        experts = torch.where(experts < 0, experts, expert_map[experts.clamp(min=0)])
    if not return_scatter_idx:
        return ids, experts, used
    flat = topk_ids.flatten()
    here = (flat >= 0) & (flat < num_experts)
    if expert_map is not None:
        here &= expert_map[flat.clamp(0, num_experts - 1).long()] >= 0
    row = torch.arange(routed, dtype=torch.int32, device=flat.device)
    return ids, experts, used, torch.where(here, row, -1).unsqueeze(1)


def batched_moe_align_block_size(
    max_tokens_per_batch: int, block_size: int, expert_num_tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Lists of rows that are with their experts already: of batch e the first ones count.

    Args:
        max_tokens_per_batch: rows that each expert has room for.
        block_size: ids of a block.
        expert_num_tokens: int32 ``[batches]``, on the device: rows of each expert that count, 0 to
            max_tokens_per_batch. Where it is not read, more are taken as max_tokens_per_batch and
            fewer as 0; vLLM's own function writes past its lists then.

    Returns:
        sorted_token_ids: int32 ``[batches * max_tokens_per_batch]``, of which each batch's rows are
            rounded up to whole blocks; padding is batches * max_tokens_per_batch.
        expert_ids: int32, one for each block, -1 past the end.
        num_tokens_post_padded: int32 ``[1]``.

    Raises:
        TypeError, ValueError: arguments other than those above; of counts where they are on the CPU
            or ``AITER_MX_CHECK=1`` asks for it.
    """
    refuse_no_whole_number(max_tokens_per_batch=max_tokens_per_batch, block_size=block_size)
    refuse_less(1, block_size=block_size)
    refuse_less(0, max_tokens_per_batch=max_tokens_per_batch)
    integers = (torch.int32, torch.int64)
    counts = check_tensor("expert_num_tokens", expert_num_tokens, integers, ("batches",)).long()
    if counts.device.type == "cpu" or checking():
        for batch, count in enumerate(counts.tolist()):
            if not 0 <= count <= max_tokens_per_batch:
                raise ValueError(
                    f"expert_num_tokens must be 0 to max_tokens_per_batch={max_tokens_per_batch}, "
                    f"got {count} of batch {batch}"
                )
    return _lists_of_batches(max_tokens_per_batch, block_size, counts)


def _lists_of_batches(
    max_tokens_per_batch: int, block_size: int, counts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    counts = counts.clamp(0, max_tokens_per_batch)
    batches, device = len(counts), counts.device
    blocks = (counts + block_size - 1) // block_size
    ends = blocks.cumsum(0)
    length = batches * -(-max_tokens_per_batch // block_size)
    block = torch.arange(length, device=device)
    owner = torch.searchsorted(ends, block, right=True)
    known = owner < batches
    batch = owner.clamp(max=max(batches - 1, 0))
    none = batches * max_tokens_per_batch
    if batches == 0:
        empty = torch.empty(0, dtype=torch.int32, device=device)
        return empty, empty.clone(), torch.zeros(1, dtype=torch.int32, device=device)
    first = (block - (ends - blocks)[batch]) * block_size
    row = first.unsqueeze(1) + torch.arange(block_size, device=device)
    counted = known.unsqueeze(1) & (row < counts[batch].unsqueeze(1))
    ids = torch.where(counted, batch.unsqueeze(1) * max_tokens_per_batch + row, none)
    experts = torch.where(known, batch, -1)
    used = ends[-1:] * block_size
    return ids.flatten().to(torch.int32), experts.to(torch.int32), used.to(torch.int32)


def filled(values: Tensor, length: int, filling: int) -> Tensor:
    """The first ``length`` of the values, then ``filling``."""
    return torch.nn.functional.pad(values, (0, length - len(values)), value=filling)
