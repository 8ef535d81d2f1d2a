"""Checks a call of ``moe_gemm``: the problem that it poses, as far as the host can know."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aiter_mx.kernels.fused_moe import refuse_unknown_activation
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.ops.checks import (
    BLOCK,
    DTYPE_NAMES,
    SCALE_DTYPES,
    check_tensor,
    refuse_less,
    refuse_no_whole_number,
    refuse_strides,
)

FP8 = (torch.float8_e4m3fn,)
_INT32 = (torch.int32,)


def problem_of(inputs: tuple[Tensor | None, ...], options: tuple[Any, ...]) -> MoeGemmProblem:
    """The problem that these arguments pose, ``plan_of``'s; raises as ``moe_gemm`` documents."""
    xq, xs, wq, ws, sorted_ids, expert_ids, post_padded, weights, bias = inputs
    routed, top_k, block_m, a_div, ids, out_dtype, activation, layout, swiglu = options
    device = check_tensor("xq", xq, FP8, ("rows", "K")).device
    assert xq is not None
    rows, K = xq.shape
    if K == 0 or K % BLOCK:
        raise ValueError(f"K must be a multiple of {BLOCK}, got K={K} (xq: {list(xq.shape)})")
    check_tensor("xs", xs, SCALE_DTYPES, (rows, K // BLOCK), device)
    E, N, _ = check_tensor("wq", wq, FP8, ("E", "N", K), device).shape
    refuse_no_experts("wq", E, N, K)
    check_tensor("ws", ws, SCALE_DTYPES, (E, N, K // BLOCK), device)
    check_tensor("sorted_token_ids", sorted_ids, _INT32, ("ids",), device)
    check_tensor("expert_ids", expert_ids, _INT32, ("blocks",), device)
    check_tensor("num_tokens_post_padded", post_padded, _INT32, ("1 or 2",), device)
    assert sorted_ids is not None and expert_ids is not None and post_padded is not None
    if post_padded.numel() not in (1, 2):
        raise ValueError(
            f"num_tokens_post_padded must be [1] or [2], got {list(post_padded.shape)}"
        )
    refuse_no_whole_number(top_k=top_k, num_valid_tokens=routed, block_m=block_m, a_div=a_div)
    refuse_less(1, top_k=top_k, a_div=a_div)
    refuse_less(0, num_valid_tokens=routed)
    if routed % top_k:
        raise ValueError(
            f"num_valid_tokens must be a multiple of top_k, got {routed} and top_k={top_k}"
        )
    if rows * a_div < routed:
        raise ValueError(
            f"xq must have a row for each {a_div} of {routed} routed rows (a_div={a_div}), got "
            f"{list(xq.shape)}"
        )
    is_block = block_m > 0 and block_m % 4 == 0  # else the problem refuses it
    if is_block:
        _refuse_other_blocks(len(sorted_ids), len(expert_ids), routed, block_m)
    if out_dtype == "mxfp8":
        refuse_unknown_activation(activation)
    by_place = ids == "aiter"
    if weights is not None:
        count = len(sorted_ids) if by_place else routed
        refuse_strides(topk_weights=weights)  # flattened, any others would be a copy's
        check_tensor("topk_weights", weights.flatten(), (torch.float32,), (count,), device)
    if bias is not None:
        check_tensor("bias", bias, tuple(DTYPE_NAMES), (E, N), device)
    alpha, beta, limit = swiglu or (1.702, 1.0, 7.0)
    return MoeGemmProblem(
        M=routed // top_k,
        N=N,
        K=K,
        E=E,
        top_k=top_k,
        block_m=block_m,
        out_dtype=out_dtype,
        activation=activation,
        layout=layout,
        bias="none" if bias is None else DTYPE_NAMES[bias.dtype],
        weights="none" if weights is None else "by_place" if by_place else "by_t",
        ids=ids,
        a_div=a_div,
        max_blocks=min(len(expert_ids), len(sorted_ids) // block_m) if is_block else 0,
        alpha=alpha,
        beta=beta,
        limit=limit,
    )


def _refuse_other_blocks(ids: int, experts: int, routed: int, block_m: int) -> None:
    """Raise ValueError where lists of these lengths cannot be of blocks of ``block_m``.

    Engines' buffers may end within a block, which is never in use, and may or may not have an
    expert for it. With routed rows there is a whole block, or none at all.
    """
    whole, part = divmod(ids, block_m)
    if not whole <= experts <= whole + (part > 0) or (routed and part and not whole):
        raise ValueError(
            f"sorted_token_ids has {ids} ids, which are {whole} whole blocks of block_m={block_m}, "
            f"but expert_ids has {experts}: was the routing made for another block_m?"
        )


def swiglu_of(activation: str, alpha: float, beta: float, limit: float) -> tuple[float, ...]:
    """alpha, beta and limit where the activation takes them, else nothing.

    Raises:
        TypeError: one of them is no number of Python's.
    """
    if activation != "swiglu_oai":
        return ()
    for name, value in (("alpha", alpha), ("beta", beta), ("limit", limit)):
        if not isinstance(value, (int, float, torch.SymFloat)):
            raise TypeError(f"{name} must be a number, a float, got {type(value).__name__}")
    return float(alpha), float(beta), float(limit)


def refuse_no_experts(name: str, E: int, N: int, K: int) -> None:
    """Raise ValueError where weights of this shape are nobody's."""
    if E == 0:
        raise ValueError(f"{name} must have at least one expert, got {[E, N, K]}")
