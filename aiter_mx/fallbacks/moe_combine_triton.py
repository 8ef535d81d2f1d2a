"""The sum over a token's routed rows in Triton: the operations of ``moe_combine_torch``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from aiter_mx.kernels.moe_combine import MoeCombineProblem
from aiter_mx.kernels.spec import Config
from aiter_mx.kernels.triton import OPTIONS
from aiter_mx.launch import Tensors

_FEATURES = 1024  # of a program


@triton.jit(
    do_not_specialize=["E", "top_k", "slots"],
    do_not_specialize_on_alignment=[
        *("places_ptr", "ids_ptr", "weights_ptr", "map_ptr", "num_tokens_ptr")
    ],
)
def combine_kernel(
    y_ptr,
    places_ptr,
    ids_ptr,
    weights_ptr,
    map_ptr,
    num_tokens_ptr,
    out_ptr,
    N,
    E,
    top_k,
    slots,
    SORTED: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_COUNT: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """FEATURES features of a token. Rows whose expert is not here are not read."""
    token = tl.program_id(0).to(tl.int64)
    if HAS_COUNT and token >= tl.load(num_tokens_ptr):
        return
    n = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    total = tl.zeros((FEATURES,), dtype=tl.float32)
    for slot in range(slots):
        is_routed = slot < top_k
        expert = tl.load(ids_ptr + token * top_k + slot, mask=is_routed, other=0)
        is_here = (expert >= 0) & (expert < E)
        if HAS_MAP:
            is_here &= tl.load(map_ptr + expert, mask=is_routed & is_here, other=0) >= 0
        weight = tl.load(weights_ptr + token * top_k + slot, mask=is_routed, other=1.0)
        row = token * slots + slot
        if SORTED:
            row = tl.load(places_ptr + row, mask=is_here, other=-1).to(tl.int64)
            is_here &= row >= 0
        is_inside = n < tl.where(is_here, N, 0)
        part = tl.load(y_ptr + row * N + n, mask=is_inside, other=0.0).to(tl.float32) * weight
        total += tl.where(is_inside, part, 0.0)  # also where a weight is not finite
    tl.store(out_ptr + token * N + n, total.to(out_ptr.dtype.element_ty), mask=n < N)


def run(problem: MoeCombineProblem, tensors: Tensors, config: Config) -> None:
    """What ``moe_combine_torch`` computes, to the last bit."""
    y, places, topk_ids, topk_weights, expert_map, num_tokens, out = tensors
    p = problem
    with torch.cuda.device_of(out):
        combine_kernel[(p.M, triton.cdiv(p.N, _FEATURES))](
            y,
            places,
            topk_ids,
            topk_weights,
            expert_map,
            num_tokens,
            out,
            p.N,
            p.E,
            p.top_k,
            p.top_k + p.shared,
            SORTED=p.sorted_y,
            HAS_MAP=expert_map is not None,
            HAS_COUNT=num_tokens is not None,
            FEATURES=_FEATURES,
            **OPTIONS,
        )
