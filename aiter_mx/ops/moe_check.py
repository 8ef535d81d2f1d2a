"""What only the device knows of a routing, checked on request: ``AITER_MX_CHECK=1``.

The kernels leave out rows whose ids are out of range. With the variable set, ops read the ids back
and raise instead. That synchronises, so it is for finding a mistake, not for serving.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.kernels.moe_gemm.problem import packed_padding


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
    """Raise ValueError if checks are on and a number is not within -1 to E - 1, or is there twice.

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
    _refuse_twice(
        expert_map,
        "each number of expert_map must be one expert's, but expert_map[{first}] and "
        "expert_map[{again}] are both {value}",
        torch.arange(len(expert_map), device=expert_map.device),
    )


def check_routing(
    problem: MoeGemmProblem, sorted_ids: Tensor, expert_ids: Tensor, post_padded: Tensor
) -> None:
    """Raise ValueError where the lists of a routing are not such as ``moe_gemm`` documents.

    That is where kernels would pass something over, or where results would depend on the kernel:
    blocks of an expert among those of others, and routed rows listed twice.
    """
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
    starts = torch.ones_like(experts, dtype=torch.bool)
    starts[1:] = experts[1:] != experts[:-1]
    firsts = starts.nonzero().flatten()
    _refuse_twice(
        experts[firsts],
        "the blocks of an expert must follow one another, but expert {value} has blocks from both "
        "expert_ids[{first}] and expert_ids[{again}] on, with others between",
        firsts,
    )
    ids = sorted_ids[:used]
    if problem.ids == "aiter":
        padding = packed_padding(problem.M, problem.top_k)
        token, slot = ids & 0xFFFFFF, (ids >> 24) & 0xFF
        wrong = (token >= problem.M) | (slot >= problem.top_k)
        rows = token * problem.top_k + slot
    else:
        padding = problem.routed
        wrong = (ids < 0) | (ids >= problem.routed)
        rows = ids
    listed = (~wrong).nonzero().flatten()
    wrong &= ids != padding
    if wrong.any():
        place = int(wrong.nonzero()[0])
        raise ValueError(
            f"{int(wrong.sum())} sorted ids are out of range for {problem.M} tokens and "
            f"top_k={problem.top_k}; the first is sorted_token_ids[{place}] = {int(ids[place])}"
        )
    _refuse_twice(
        rows[listed],
        "routed row {value} is listed twice, as sorted_token_ids[{first}] and "
        "sorted_token_ids[{again}]",
        listed,
    )


def _refuse_twice(values: Tensor, message: str, places: Tensor) -> None:
    """Raise ValueError if a value of 0 and more occurs twice.

    Args:
        values: integers.
        message: what to say, of ``value`` and of ``first`` and ``again``, two of its places.
        places: those of the values, in rising order.
    """
    order = values.argsort(stable=True)
    ordered = values[order]
    twice = ((ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)).nonzero().flatten()
    if len(twice):
        at = int(twice[0])
        first, again = int(places[order[at]]), int(places[order[at + 1]])
        raise ValueError(message.format(value=int(ordered[at]), first=first, again=again))
