"""The MoE ops in ``torch.library``, through which calls go that torch traces: ``aiter_mx::...``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aiter_mx.ops.checks import BLOCK, DTYPE_NAMES, DTYPES, refuse_no_tensor, shape_text

_FP8 = torch.float8_e4m3fn


def moe_gemm(
    inputs: tuple[Tensor | None, ...], options: tuple[Any, ...], out: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """``aiter_mx.ops.moe_gemm.compute`` of such a call."""
    *given, swiglu = options
    if out is not None:
        _check_result(out, DTYPES[options[5]])
        _moe_gemm_out(*inputs, out, *given[:5])
        return out, None
    result, scales = _moe_gemm(*inputs, *given, list(swiglu))
    return result, scales if options[6] != "none" else None


def _check_result(out: object, dtype: torch.dtype) -> None:
    """Raise TypeError unless ``out`` is a tensor of this dtype, which its op takes for granted."""
    refuse_no_tensor(out=out)
    assert isinstance(out, Tensor)
    if out.dtype != dtype:
        raise TypeError(f"out must be of out_dtype {dtype}, got {out.dtype}")


def _refuse_shape(out: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(out.shape) != shape:
        raise ValueError(f"out must be {list(shape)}, got {shape_text(out)}")


@torch.library.custom_op("aiter_mx::moe_gemm", mutates_args=())
def _moe_gemm(
    xq: Tensor,
    xs: Tensor,
    wq: Tensor,
    ws: Tensor,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    topk_weights: Tensor | None,
    bias: Tensor | None,
    num_valid_tokens: int,
    top_k: int,
    block_m: int,
    a_div: int,
    ids: str,
    out_dtype: str,
    activation: str,
    layout: str,
    swiglu: list[float],
) -> tuple[Tensor, Tensor]:
    from aiter_mx.ops.moe_gemm import compute, plan_of

    lists = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    inputs = (xq, xs, wq, ws, *lists, topk_weights, bias)
    options = (num_valid_tokens, top_k, block_m, a_div, ids, out_dtype, activation, layout)
    out, scales = compute(plan_of(inputs, (*options, tuple(swiglu))), inputs, None)
    return out, xs.new_empty(0, dtype=torch.uint8) if scales is None else scales


@_moe_gemm.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    xq, xs, wq = arguments[:3]
    routed, *_, out_dtype, activation, _, _ = arguments[9:]
    N = wq.shape[1]
    if activation == "none":
        out = xq.new_empty((routed, N), dtype=DTYPES[out_dtype])
        return out, xs.new_empty(0, dtype=torch.uint8)
    scales = xs.new_empty((routed, N // 2 // BLOCK), dtype=torch.uint8)
    return xq.new_empty((routed, N // 2), dtype=_FP8), scales


@torch.library.custom_op("aiter_mx::moe_gemm_out", mutates_args=("out",))
def _moe_gemm_out(
    xq: Tensor,
    xs: Tensor,
    wq: Tensor,
    ws: Tensor,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    topk_weights: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    num_valid_tokens: int,
    top_k: int,
    block_m: int,
    a_div: int,
    ids: str,
) -> None:
    from aiter_mx.ops.moe_gemm import compute, plan_of

    lists = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    inputs = (xq, xs, wq, ws, *lists, topk_weights, bias)
    plain = (DTYPE_NAMES[out.dtype], "none", "halves", ())
    plan = plan_of(inputs, (num_valid_tokens, top_k, block_m, a_div, ids, *plain))
    compute(plan, inputs, out)


@_moe_gemm_out.register_fake
def _(*arguments: Any) -> None:
    wq, out, routed = arguments[2], arguments[9], arguments[10]
    _refuse_shape(out, (routed, wq.shape[1]))


def fused_moe(
    inputs: tuple[Tensor | None, ...], options: tuple[Any, ...], out: Tensor | None
) -> Tensor:
    """``aiter_mx.ops.fused_moe.compute`` of such a call."""
    num_experts, shared, activation, layout, swiglu, block_m = options
    given = (num_experts, shared, activation, layout, list(swiglu), block_m)
    if out is None:
        result: Tensor = _fused_moe(*inputs, *given)
        return result
    assert inputs[0] is not None
    _check_result(out, inputs[0].dtype)
    _fused_moe_out(*inputs, out, *given)
    return out


@torch.library.custom_op("aiter_mx::fused_moe", mutates_args=())
def _fused_moe(
    x: Tensor,
    w1q: Tensor,
    w1s: Tensor,
    w2q: Tensor,
    w2s: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    expert_map: Tensor | None,
    bias1: Tensor | None,
    bias2: Tensor | None,
    num_experts: int | None,
    shared_experts: int,
    activation: str,
    layout: str,
    swiglu: list[float],
    block_m: int | None,
) -> Tensor:
    from aiter_mx.ops.fused_moe import compute

    inputs = (x, w1q, w1s, w2q, w2s, topk_ids, topk_weights, expert_map, bias1, bias2)
    options = (num_experts, shared_experts, activation, layout, tuple(swiglu), block_m)
    return compute(inputs, options, None)


@_fused_moe.register_fake
def _(x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("aiter_mx::fused_moe_out", mutates_args=("out",))
def _fused_moe_out(
    x: Tensor,
    w1q: Tensor,
    w1s: Tensor,
    w2q: Tensor,
    w2s: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    expert_map: Tensor | None,
    bias1: Tensor | None,
    bias2: Tensor | None,
    out: Tensor,
    num_experts: int | None,
    shared_experts: int,
    activation: str,
    layout: str,
    swiglu: list[float],
    block_m: int | None,
) -> None:
    from aiter_mx.ops.fused_moe import compute

    inputs = (x, w1q, w1s, w2q, w2s, topk_ids, topk_weights, expert_map, bias1, bias2)
    options = (num_experts, shared_experts, activation, layout, tuple(swiglu), block_m)
    compute(inputs, options, out)


@_fused_moe_out.register_fake
def _(x: Tensor, *others: Any) -> None:
    _refuse_shape(others[9], tuple(x.shape))


@torch.library.custom_op("aiter_mx::moe_align", mutates_args=())
def moe_align(
    topk_ids: Tensor,
    block_m: int,
    num_experts: int,
    expert_map: Tensor | None,
    drop_absent: bool,
    shared: int,
    first_shared: int,
) -> tuple[Tensor, Tensor, Tensor]:
    from aiter_mx.ops.moe_align import align

    return align(topk_ids, block_m, num_experts, expert_map, drop_absent, shared, first_shared)


@moe_align.register_fake
def _(
    topk_ids: Tensor, block_m: int, num_experts: int, expert_map: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _, shared, _ = options
    ids, expert_ids = _empty_lists(topk_ids, block_m, num_experts, shared)
    return ids, expert_ids, topk_ids.new_empty(1, dtype=torch.int32)


@torch.library.custom_op("aiter_mx::moe_sort", mutates_args=())
def moe_sort(
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    block_m: int,
    expert_mask: Tensor | None,
    num_local_tokens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from aiter_mx.ops.moe_align import sort

    return sort(topk_ids, topk_weights, num_experts, block_m, expert_mask, num_local_tokens)


@moe_sort.register_fake
def _(
    topk_ids: Tensor, topk_weights: Tensor, num_experts: int, block_m: int, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ids, expert_ids = _empty_lists(topk_ids, block_m, num_experts, 0)
    weights = ids.new_empty(ids.shape, dtype=torch.float32)
    return ids, weights, expert_ids, topk_ids.new_empty(2, dtype=torch.int32)


def _empty_lists(
    topk_ids: Tensor, block_m: int, num_experts: int, shared: int
) -> tuple[Tensor, Tensor]:
    """Sorted ids and the expert of each block, as a routing of this shape has them."""
    from aiter_mx.kernels.moe_gemm.problem import most_padded

    routed = topk_ids.shape[0] * (topk_ids.shape[1] + shared)
    ids = most_padded(routed, num_experts + shared, block_m)
    new = topk_ids.new_empty
    return new(ids, dtype=torch.int32), new(ids // block_m, dtype=torch.int32)
