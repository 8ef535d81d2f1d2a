"""Experts on many ranks, over torch.distributed: quantised tokens go to where their experts are,
and weighted sums come back. Any backend carries them; there is no transport of our own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import aiter_mx
from aiter_mx.checks import DTYPE_NAMES, INDEX_NAMES, check_tensor
from aiter_mx.codec import SCALE_DTYPES
from aiter_mx.numerics import BLOCK

_OPTIONS = (
    *("activation", "layout", "alpha", "beta", "limit", "bias1", "bias2", "block_m"),
    "exact_sums",
)


@dataclass(frozen=True)
class Dispatched:
    """Tokens of all ranks with an expert here.

    Attributes:
        x: their payloads, float8_e4m3fn ``[tokens, H]``, or the tokens as they were given.
        x_scale: their scales, uint8 ``[tokens, H // 32]``, or None.
        topk_ids: int32 ``[tokens, top_k]``: numbers of experts here, -1 for experts elsewhere.
        topk_weights: float32 ``[tokens, top_k]``.
        sent: for each rank, which tokens of this rank went there.
        received: tokens that came from each rank.
        tokens: of this rank.
        bytes_sent: to other ranks.
        group: of ranks.
    """

    x: Tensor
    x_scale: Tensor | None
    topk_ids: Tensor
    topk_weights: Tensor
    sent: tuple[Tensor, ...]
    received: tuple[int, ...]
    tokens: int
    bytes_sent: int
    group: Any


def prepare(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    *,
    x_scale: Tensor | None = None,
    quantise: bool = True,
    group: Any = None,
) -> Dispatched:
    """Send each token once to every rank that has one of its experts.

    A token is its payload, its scales and its routing: ``H + H / 32 + 8 * top_k`` bytes. Rank r of
    R has the experts ``r * num_experts / R`` and up. The counts are exchanged first and read on the
    host, so that this cannot be captured into a graph.

    Args:
        x: bf16, fp16 or fp32 ``[M, H]``, quantised here; or, with ``x_scale``, float8_e4m3fn. M may
            differ between ranks, and be 0.
        topk_ids: int32 or int64 ``[M, top_k]``: experts over all ranks; any other value is none's.
        topk_weights: float32 ``[M, top_k]``, or bf16 or fp16.
        num_experts: on all ranks together.
        x_scale: uint8 or float8_e8m0fnu ``[M, H // 32]``.
        quantise: False sends tokens without scales as they are, in 2 H bytes for bf16.
        group: of ranks; by default all.

    Returns:
        The tokens that came, with their routing over the experts here; ``finalize`` takes it.

    Raises:
        TypeError: scales of tokens that are not float8_e4m3fn, or routing of another dtype.
        ValueError: scales or routing of another shape, or experts that cannot be divided among
            the ranks.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if num_experts % ranks:
        raise ValueError(f"num_experts={num_experts} cannot be divided among {ranks} ranks")
    each, (M, H) = num_experts // ranks, x.shape
    if x_scale is None:
        if quantise:
            x, x_scale = aiter_mx.quantize(x)
    elif x.dtype != torch.float8_e4m3fn:
        raise TypeError(f"x must be torch.float8_e4m3fn where x_scale is given, got {x.dtype}")
    elif x_scale.dtype not in SCALE_DTYPES or tuple(x_scale.shape) != (M, H // BLOCK):
        raise ValueError(
            f"x_scale must be bytes [{M}, {H // BLOCK}], got {x_scale.dtype} {list(x_scale.shape)}"
        )
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
    check_tensor("topk_ids", topk_ids, tuple(INDEX_NAMES), (M, "top_k"), x.device)
    floats = tuple(DTYPE_NAMES)
    check_tensor("topk_weights", topk_weights, floats, tuple(topk_ids.shape), x.device)
    valid = (topk_ids >= 0) & (topk_ids < num_experts)
    ids = torch.where(valid, topk_ids, -1).to(torch.int32)  # which wide ones would wrap around to
    owner = torch.where(valid, ids // each, -1)
    goes = (owner.unsqueeze(2) == torch.arange(ranks, device=x.device)).any(1)  # [M, ranks]
    counts, received = _exchange_counts(goes.sum(0), group)
    order = goes.T.nonzero()[:, 1]
    scales = () if x_scale is None else (x_scale.view(torch.uint8),)
    columns = [column.contiguous() for column in (ids, topk_weights.float(), x, *scales)]
    as_bytes = [column.view(torch.uint8) for column in columns]
    rows = torch.cat(as_bytes, 1)
    came = _exchange(rows[order], counts, received, group)
    parts = came.split([column.shape[1] for column in as_bytes], 1)
    ids, weights, x, *scales_here = (
        part.contiguous().view(column.dtype) for part, column in zip(parts, columns, strict=True)
    )
    here = ids - rank * each
    return Dispatched(
        x=x,
        x_scale=scales_here[0] if scales_here else None,
        topk_ids=torch.where((here >= 0) & (here < each), here, -1),
        topk_weights=weights,
        sent=order.split(counts),
        received=tuple(received),
        tokens=M,
        bytes_sent=(sum(counts) - counts[rank]) * rows.shape[1],
        group=group,
    )


def finalize(dispatched: Dispatched, sums: Tensor) -> Tensor:
    """Bring weighted sums back to the ranks of their tokens, and add them up in order of ranks.

    Args:
        dispatched: what ``prepare`` made.
        sums: ``[tokens, H]``, of each token that came the weighted sum over its experts here.

    Returns:
        ``[M, H]`` of the dtype of ``sums``, of this rank's tokens. Additions are fp32.
    """
    counts = [len(tokens) for tokens in dispatched.sent]
    H, size = sums.shape[1], sums.element_size()
    rows = sums.contiguous().view(torch.uint8).view(-1, H * size)
    came = _exchange(rows, list(dispatched.received), counts, dispatched.group)
    parts = came.view(sums.dtype).view(-1, H).split(counts)
    total = torch.zeros(dispatched.tokens, H, dtype=torch.float32, device=sums.device)
    for tokens, part in zip(dispatched.sent, parts, strict=True):
        total.index_add_(0, tokens, part.float())
    return total.to(sums.dtype)


def fused_moe(
    x: Tensor,
    w1q: Tensor,
    w1s: Tensor,
    w2q: Tensor,
    w2s: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    *,
    x_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    group: Any = None,
    **options: Any,
) -> Tensor:
    """``aiter_mx.fused_moe`` whose experts are divided among the ranks of a group.

    Args:
        x: this rank's tokens, as ``prepare`` takes them.
        w1q: weights and scales of this rank's experts, as ``aiter_mx.fused_moe`` takes them.
        w1s: see w1q.
        w2q: see w1q.
        w2s: see w1q.
        topk_ids: experts over all ranks.
        topk_weights: float32 ``[M, top_k]``.
        num_experts: on all ranks together.
        x_scale: of quantised tokens.
        out_dtype: of the result, and of the sums on their way; by default x's, or bf16.
        group: of ranks; by default all.
        options: ``activation``, ``layout``, ``alpha``, ``beta``, ``limit``, ``bias1``, ``bias2``,
            ``block_m`` and ``exact_sums``, as for ``aiter_mx.fused_moe``.

    Returns:
        ``[M, H]``.

    Raises:
        TypeError: as ``prepare`` and ``aiter_mx.fused_moe``, or another option.
        ValueError: as these, or weights of another number of experts than each rank has.
    """
    if others := sorted(options.keys() - _OPTIONS):
        raise TypeError(
            f"experts on many ranks have no {others[0]}; the options are {', '.join(_OPTIONS)}"
        )
    ranks = dist.get_world_size(group)
    if len(w1q) * ranks != num_experts:
        raise ValueError(
            f"w1q must have the weights of {num_experts // ranks} experts, as num_experts="
            f"{num_experts} are divided among {ranks} ranks, got {len(w1q)}"
        )
    if out_dtype is None:
        out_dtype = x.dtype if x_scale is None else torch.bfloat16
    at = prepare(x, topk_ids, topk_weights, num_experts, x_scale=x_scale, group=group)
    sums = aiter_mx.fused_moe(
        at.x,
        w1q,
        w1s,
        w2q,
        w2s,
        at.topk_ids,
        at.topk_weights,
        x_scale=at.x_scale,
        out_dtype=out_dtype,
        **options,
    )
    return finalize(at, sums)


def _exchange_counts(counts: Tensor, group: Any) -> tuple[list[int], list[int]]:
    """How many rows go to each rank, and how many come from it, read on the host at once."""
    others = torch.empty_like(counts)
    dist.all_to_all_single(others, counts, group=group)
    here, there = torch.stack((counts, others)).tolist()
    return here, there


def _exchange(rows: Tensor, counts: list[int], received: list[int], group: Any) -> Tensor:
    """Rows to and from each rank."""
    came = rows.new_empty((sum(received), rows.shape[1]))
    dist.all_to_all_single(came, rows.contiguous(), received, counts, group=group)
    return came
