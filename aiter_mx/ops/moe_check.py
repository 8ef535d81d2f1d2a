"""What only the device knows of a routing, checked on request: ``AITER_MX_CHECK=1``.

The kernels leave out rows whose ids are out of range. With the variable set, ops read the ids back
and raise instead. That synchronises, so it is for finding a mistake, not for serving.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from aiter_mx.kernels.moe_gemm import MoeGemmProblem


def checking() -> bool:
    """Whether ``AITER_MX_CHECK=1`` asks for checks; never while a stream is captured."""
    if os.environ.get("AITER_MX_CHECK", "0") in ("", "0"):
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def check_expert_ids(topk_ids: Tensor, num_experts: int, tokens: Tensor | None = None) -> None:
    """Raise ValueError if checks are on and an id is not within 0 to num_experts - 1.

    Args:
        topk_ids: integers ``[M, top_k]``.
        num_experts: experts that are routed to.
        tokens: int32 ``[1]``: tokens that count, the first ones; those of the others may be
            anything. None for all.
    """
    if not checking():
        return
    if tokens is not None:
        topk_ids = topk_ids[: max(int(tokens), 0)]
    wrong = (topk_ids < 0) | (topk_ids >= num_experts)
    if wrong.any():
        token, slot = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{int(wrong.sum())} of {topk_ids.numel()} ids in topk_ids are not within 0 to "
            f"{num_experts - 1}; the first is topk_ids[{token}, {slot}] = "
            f"{int(topk_ids[token, slot])}"
        )


def check_expert_map(expert_map: Tensor | None, E: int) -> None:
    """Raise ValueError if checks are on and a number is not within -1 to E - 1.

    Args:
        expert_map: int32: each expert's number here, -1 for one that is not here; or None.
        E: experts whose weights are here.
    """
    if expert_map is None or not checking():
        return
    wrong = (expert_map < -1) | (expert_map >= E)
    if wrong.any():
        expert = int(wrong.nonzero()[0])
        raise ValueError(
            f"expert_map must be within -1 to {E - 1}, as weights of {E} experts are here; "
            f"expert_map[{expert}] is {int(expert_map[expert])}"
        )


def check_routing(
    problem: MoeGemmProblem, sorted_ids: Tensor, expert_ids: Tensor, post_padded: Tensor
) -> None:
    """Raise ValueError where the lists of a routing have what ``moe_gemm`` would pass over."""
    block_m, used = problem.block_m, int(post_padded[0])
    if used % block_m or not 0 <= used <= problem.blocks * block_m:
        raise ValueError(
            f"num_tokens_post_padded must be a multiple of block_m={block_m} up to "
            f"{problem.blocks * block_m}, got {used}"
        )
    experts = expert_ids[: used // block_m]
    wrong = (experts < -1) | (experts >= problem.E)
    if wrong.any():
        block = int(wrong.nonzero()[0])
        raise ValueError(
            f"expert_ids must be within -1 to {problem.E - 1}; expert_ids[{block}] is "
            f"{int(experts[block])}"
        )
    ids = sorted_ids[:used]
    if problem.ids == "aiter":
        padding = problem.top_k << 24 | problem.M
        token, slot = ids & 0xFFFFFF, (ids >> 24) & 0xFF
        wrong = (token >= problem.M) | (slot >= problem.top_k)
    else:
        padding = problem.routed
        wrong = (ids < 0) | (ids > problem.routed)
    wrong &= ids != padding
    if wrong.any():
        place = int(wrong.nonzero()[0])
        raise ValueError(
            f"{int(wrong.sum())} sorted ids are out of range for {problem.M} tokens and "
            f"top_k={problem.top_k}; the first is sorted_token_ids[{place}] = {int(ids[place])}"
        )
