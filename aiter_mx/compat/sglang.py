"""SGLang's routing lists, of the lengths and with the filling that its callers count on."""

from __future__ import annotations

from torch import Tensor

from aiter_mx.compat.names import renamed
from aiter_mx.compat.vllm import filled
from aiter_mx.ops.moe_align import moe_align


def moe_align_block_size(
    topk_ids: Tensor, block_size: int, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``aiter_mx.moe_align`` with lists as SGLang's function of this name makes them.

    Args:
        topk_ids: int32 or int64 ``[M, top_k]``: 0 to num_experts - 1, or -1 for a row that is not
            computed here, whose blocks are listed first, with expert -1.
        block_size: ids of a block, a multiple of 4.
        num_experts: experts of this rank.

    Returns:
        sorted_token_ids: int32 ``[M * top_k + (num_experts + 1) * (block_size - 1)]``, or a block
            for each id where there are no more ids than experts, rounded up to a multiple of 4;
            padding is M * top_k. An expert's ids rise.
        expert_ids: int32, one for each block; -1 past the end.
        num_tokens_post_padded: int32 ``[1]``.

    Raises:
        TypeError, ValueError: as ``aiter_mx.moe_align``.
    """
    try:
        ids, experts, used = moe_align(topk_ids + 1, block_size, num_experts + 1)
    except (TypeError, ValueError) as error:
        raise renamed(error, {"block_m": "block_size"}) from error
    routed = topk_ids.numel()
    few = routed < num_experts + 1
    length = routed * block_size if few else routed + (num_experts + 1) * (block_size - 1)
    length = -(-length // 4) * 4
    experts = filled(experts, -(-length // block_size), -1)
    return filled(ids, length, routed), (experts - 1).clamp_(min=-1), used
