"""The routing of a mixture of experts in Triton: two launches, without atomics or a host sync.

A program of either has one expert and walks over all ids, so that an expert's come in rising order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from aiter_mx.fallbacks.moe_align_torch import ids_of_rows
from aiter_mx.fallbacks.quantize_triton import quantize_triton
from aiter_mx.kernels.moe_align import MAP_CODES, MoeAlignProblem
from aiter_mx.kernels.spec import Config
from aiter_mx.launch import Tensors

_IDS = 1024  # that a program looks at together

_ROUTING = ["M", "top_k", "E", "shared"]
_SIZES = [*_ROUTING, "first_shared", "block_m", "max_ids"]
_ANYWHERE = ["ids_ptr", "weights_ptr", "map_ptr", "num_tokens_ptr"]  # a view would compile anew


@triton.jit
def tokens_of(num_tokens_ptr, M, HAS_COUNT: tl.constexpr):
    """Tokens that count: the first ones."""
    tokens = M
    if HAS_COUNT:
        tokens = tl.minimum(tl.maximum(tl.load(num_tokens_ptr), 0), M)
    return tokens


@triton.jit
def is_routed_to(expert, t, tokens, ids_ptr, top_k, E, shared):
    """Whether routed rows t are the expert's, whose number is E or more if it is a shared one."""
    slots = top_k + shared
    token = t // slots
    slot = t % slots
    inside = t < tokens * slots
    # An id of 64 bits is compared as it is; one that is out of range is no expert's.
    chosen = tl.load(ids_ptr + token * top_k + slot, mask=inside & (slot < top_k), other=-1)
    return inside & tl.where(expert < E, chosen == expert, slot - top_k == expert - E)


@triton.jit(do_not_specialize=_ROUTING, do_not_specialize_on_alignment=_ANYWHERE)
def count_kernel(
    ids_ptr,
    map_ptr,
    num_tokens_ptr,
    counts_ptr,
    M,
    top_k,
    E,
    shared,
    MAP: tl.constexpr,
    DROP_ABSENT: tl.constexpr,
    HAS_COUNT: tl.constexpr,
    IDS: tl.constexpr,
):
    """Rows of an expert that are listed."""
    expert = tl.program_id(0)
    tokens = tokens_of(num_tokens_ptr, M, HAS_COUNT)
    if DROP_ABSENT and MAP != 0:
        entry = tl.load(map_ptr + expert, mask=expert < E, other=1)
        is_here = entry != 0 if MAP == 2 else entry >= 0
        tokens = tl.where(is_here, tokens, 0)
    found = tl.zeros((IDS,), dtype=tl.int32)
    for first in range(0, tokens * (top_k + shared), IDS):
        t = first + tl.arange(0, IDS)
        found += is_routed_to(expert, t, tokens, ids_ptr, top_k, E, shared).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(found))


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_ANYWHERE)
def place_kernel(
    ids_ptr,
    weights_ptr,
    map_ptr,
    num_tokens_ptr,
    counts_ptr,
    sorted_ids_ptr,
    sorted_weights_ptr,
    expert_ids_ptr,
    post_padded_ptr,
    M,
    top_k,
    E,
    shared,
    first_shared,
    block_m,
    max_ids,
    MAP: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_COUNT: tl.constexpr,
    EXPERTS: tl.constexpr,
    IDS: tl.constexpr,
):
    """The lists of an expert, and every so many pieces of what follows the last one's."""
    expert = tl.program_id(0)
    slots = top_k + shared
    tokens = tokens_of(num_tokens_ptr, M, HAS_COUNT)
    padding = slots << 24 | M if PACKED else M * slots
    i = tl.arange(0, IDS)

    e = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + e, mask=e < E + shared, other=0)
    padded = (counts + block_m - 1) // block_m * block_m
    begin = tl.sum(tl.where(e < expert, padded, 0))
    end = begin + tl.sum(tl.where(e == expert, padded, 0))
    used = tl.sum(padded)

    number = expert
    if MAP == 1:
        number = tl.load(map_ptr + expert, mask=expert < E, other=0)
    if MAP == 2:
        present = tl.load(map_ptr + e, mask=e < E, other=0) != 0
        is_here = tl.sum((present & (e == expert)).to(tl.int32)) > 0
        number = tl.where(is_here, tl.sum((present & (e < expert)).to(tl.int32)), -1)
    number = tl.where(expert < E, number, first_shared + expert - E)

    place = begin
    rows = tl.where(end > begin, tokens * slots, 0)  # none of an expert that is left out
    for first in range(0, rows, IDS):
        t = first + i
        is_own = is_routed_to(expert, t, tokens, ids_ptr, top_k, E, shared)
        at = place + tl.cumsum(is_own.to(tl.int32), 0) - 1
        place += tl.sum(is_own.to(tl.int32))
        if PACKED:
            token = t // slots
            slot = t % slots
            tl.store(sorted_ids_ptr + at, slot << 24 | token, mask=is_own)
            source = weights_ptr + token * top_k + slot
            weight = tl.load(source, mask=is_own & (slot < top_k), other=1.0)
            tl.store(sorted_weights_ptr + at, weight, mask=is_own)
        else:
            tl.store(sorted_ids_ptr + at, t, mask=is_own)
    for first in range(place, end, IDS):
        tl.store(sorted_ids_ptr + first + i, padding, mask=first + i < end)
        if PACKED:
            tl.store(sorted_weights_ptr + first + i, 0.0, mask=first + i < end)
    for first in range(begin // block_m, end // block_m, IDS):
        tl.store(expert_ids_ptr + first + i, number, mask=first + i < end // block_m)

    step = tl.num_programs(0) * IDS
    for first in range(used + expert * IDS, max_ids, step):
        tl.store(sorted_ids_ptr + first + i, padding, mask=first + i < max_ids)
        if PACKED:
            tl.store(sorted_weights_ptr + first + i, 0.0, mask=first + i < max_ids)
    blocks = max_ids // block_m
    for first in range(used // block_m + expert * IDS, blocks, step):
        tl.store(expert_ids_ptr + first + i, -1, mask=first + i < blocks)
    if expert == 0:
        tl.store(post_padded_ptr, used)
        if PACKED:
            tl.store(post_padded_ptr + 1, tokens)


def run(problem: MoeAlignProblem, tensors: Tensors, config: Config) -> None:
    """What ``moe_align_torch`` computes, to the last bit."""
    topk_ids, topk_weights, expert_map, num_tokens, x, *outputs = tensors
    sorted_ids, sorted_weights, expert_ids, post_padded, xq, xs = outputs
    if problem.x_dtype != "none":
        quantize_triton(x, xq, xs)
    p = problem
    if p.masked:
        topk_ids = ids_of_rows(p, topk_ids)
    experts = p.E + p.shared
    counts = torch.empty(experts, dtype=torch.int32, device=topk_ids.device)
    routing = (p.M, p.top_k, p.E, p.shared)
    has = {"MAP": MAP_CODES[p.expert_map], "HAS_COUNT": num_tokens is not None, "IDS": _IDS}
    with torch.cuda.device_of(topk_ids):
        count_kernel[(experts,)](
            topk_ids,
            expert_map,
            num_tokens,
            counts,
            *routing,
            DROP_ABSENT=bool(p.drop_absent),
            **has,
        )
        place_kernel[(experts,)](
            topk_ids,
            topk_weights,
            expert_map,
            num_tokens,
            counts,
            sorted_ids,
            sorted_weights,
            expert_ids,
            post_padded,
            *routing,
            p.first_shared,
            p.block_m,
            p.max_ids,
            PACKED=p.ids == "aiter",
            EXPERTS=triton.next_power_of_2(max(experts, 64)),
            **has,
        )
