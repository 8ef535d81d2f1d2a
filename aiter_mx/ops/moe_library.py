"""The MoE ops in ``torch.library``, through which calls go that torch traces: ``aiter_mx::...``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aiter_mx.ops.checks import BLOCK, DTYPE_NAMES, DTYPES, check_result, refuse_shape

_FP8 = torch.float8_e4m3fn

_GEMM_INPUTS = (
    "Tensor xq, Tensor xs, Tensor wq, Tensor ws, Tensor sorted_token_ids, Tensor expert_ids, "
    "Tensor num_tokens_post_padded, Tensor? topk_weights, Tensor? bias"
)
_GEMM_ROUTING = "SymInt num_valid_tokens, SymInt top_k, SymInt block_m, SymInt a_div, str ids"
_GEMM_INPUT_COUNT = 9
_LAYER_INPUTS = (
    "Tensor x, Tensor w1q, Tensor w1s, Tensor w2q, Tensor w2s, Tensor topk_ids, "
    "Tensor topk_weights, Tensor? expert_map, Tensor? bias1, Tensor? bias2"
)
_LAYER_OPTIONS = (
    "SymInt? num_experts, SymInt shared_experts, str activation, str layout, float[] swiglu, "
    "SymInt? block_m"
)
_LAYER_INPUT_COUNT = 10


def moe_gemm(
    inputs: tuple[Tensor | None, ...], options: tuple[Any, ...], out: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """``aiter_mx.ops.moe_gemm.compute`` of such a call."""
    *given, swiglu = options
    if out is not None:
        check_result(out, DTYPES[options[5]])
        _moe_gemm_out(*inputs, out, *given[:5])
        return out, None
    result, scales = _moe_gemm(*inputs, *given, list(swiglu))
    return result, scales if options[6] != "none" else None


def _run_moe_gemm(*arguments: Any) -> tuple[Tensor, Tensor]:
    from aiter_mx.ops.moe_gemm import compute, plan_of

    inputs, (*options, swiglu) = arguments[:_GEMM_INPUT_COUNT], arguments[_GEMM_INPUT_COUNT:]
    out, scales = compute(plan_of(inputs, (*options, tuple(swiglu))), inputs, None)
    return out, out.new_empty(0, dtype=torch.uint8) if scales is None else scales


def _run_moe_gemm_out(*arguments: Any) -> None:
    from aiter_mx.ops.moe_gemm import compute, plan_of

    inputs, (out, *routing) = arguments[:_GEMM_INPUT_COUNT], arguments[_GEMM_INPUT_COUNT:]
    plain = (DTYPE_NAMES[out.dtype], "none", "halves", ())
    compute(plan_of(inputs, (*routing, *plain)), inputs, out)


_moe_gemm = torch.library.custom_op(
    "aiter_mx::moe_gemm",
    _run_moe_gemm,
    mutates_args=(),
    schema=f"({_GEMM_INPUTS}, {_GEMM_ROUTING}, str out_dtype, str activation, str layout, "
    "float[] swiglu) -> (Tensor, Tensor)",
)
_moe_gemm_out = torch.library.custom_op(
    "aiter_mx::moe_gemm_out",
    _run_moe_gemm_out,
    mutates_args=("out",),
    schema=f"({_GEMM_INPUTS}, Tensor(a!) out, {_GEMM_ROUTING}) -> ()",
)


@_moe_gemm.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    xq, xs, wq = arguments[:3]
    routed, *_, out_dtype, activation, _, _ = arguments[_GEMM_INPUT_COUNT:]
    N = wq.shape[1]
    if activation == "none":
        out = xq.new_empty((routed, N), dtype=DTYPES[out_dtype])
        return out, xs.new_empty(0, dtype=torch.uint8)
    scales = xs.new_empty((routed, N // 2 // BLOCK), dtype=torch.uint8)
    return xq.new_empty((routed, N // 2), dtype=_FP8), scales


@_moe_gemm_out.register_fake
def _(*arguments: Any) -> None:
    wq, (out, routed, *_) = arguments[2], arguments[_GEMM_INPUT_COUNT:]
    refuse_shape(out, (routed, wq.shape[1]))


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
    check_result(out, inputs[0].dtype)
    _fused_moe_out(*inputs, out, *given)
    return out


def _run_fused_moe(*arguments: Any, out: Tensor | None = None) -> Tensor:
    from aiter_mx.ops.fused_moe import compute

    inputs, (*options, swiglu, block_m) = (
        arguments[:_LAYER_INPUT_COUNT],
        arguments[_LAYER_INPUT_COUNT:],
    )
    return compute(inputs, (*options, tuple(swiglu), block_m), out)


def _run_fused_moe_out(*arguments: Any) -> None:
    at = _LAYER_INPUT_COUNT
    _run_fused_moe(*arguments[:at], *arguments[at + 1 :], out=arguments[at])


_fused_moe = torch.library.custom_op(
    "aiter_mx::fused_moe",
    _run_fused_moe,
    mutates_args=(),
    schema=f"({_LAYER_INPUTS}, {_LAYER_OPTIONS}) -> Tensor",
)
_fused_moe_out = torch.library.custom_op(
    "aiter_mx::fused_moe_out",
    _run_fused_moe_out,
    mutates_args=("out",),
    schema=f"({_LAYER_INPUTS}, Tensor(a!) out, {_LAYER_OPTIONS}) -> ()",
)


@_fused_moe.register_fake
def _(x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape)


@_fused_moe_out.register_fake
def _(x: Tensor, *others: Any) -> None:
    refuse_shape(others[_LAYER_INPUT_COUNT - 1], x.shape)


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
