"""Expert layers without a gate, by the parts of ``fused_moe``: one product, an activation, one more
product."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import aiter_mx
from aiter_mx.checks import DTYPE_NAMES, INDEX_NAMES, check_tensor, either
from aiter_mx.kernels.fused_moe import FusedMoeProblem

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
    "relu2": lambda x: torch.relu(x).square(),
}


def fused_moe_ungated(
    x: Tensor,
    w1q: Tensor,
    w1s: Tensor,
    w2q: Tensor,
    w2s: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    activation: str = "relu2",
    num_experts: int | None = None,
    expert_map: Tensor | None = None,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    x_scale: Tensor | None = None,
    reduce: bool = True,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``fused_moe`` of experts whose first weights have no gate: ``activation(x @ w1.T) @ w2.T``.

    The activation and the quantisation of its results are launches of their own, over fp32 sums.

    Args:
        x: as ``fused_moe`` takes it, with ``x_scale`` too.
        w1q: weights, float8_e4m3fn ``[E, I, H]``.
        w1s: their scales, ``[E, I, H // 32]``.
        w2q: weights, ``[E, H, I]``.
        w2s: their scales, ``[E, H, I // 32]``.
        topk_ids: as for ``fused_moe``.
        topk_weights: likewise.
        activation: ``"relu2"``, ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``.
        num_experts: as for ``fused_moe``.
        expert_map: likewise.
        bias1: ``[E, I]``, or None.
        bias2: ``[E, H]``, or None.
        x_scale: as for ``fused_moe``.
        reduce: likewise.
        out_dtype: likewise.

    Returns:
        ``[M, H]``, or without a reduction ``[M, top_k, H]``.

    Raises:
        TypeError, ValueError, CaptureError: as ``fused_moe`` does.
    """
    if activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ValueError(f"activation must be one of {known}, got {activation!r}")
    fp8, dtypes = (torch.float8_e4m3fn,), tuple(DTYPE_NAMES)
    E, I, H = check_tensor("w1q", w1q, fp8, ("E", "I", "H")).shape
    device = w1q.device
    M, _ = check_tensor("x", x, dtypes if x_scale is None else fp8, ("M", H), device).shape
    ids = check_tensor("topk_ids", topk_ids, tuple(INDEX_NAMES), (M, "top_k"), device)
    top_k = ids.shape[1]
    check_tensor("topk_weights", topk_weights, (torch.float32,), (M, top_k), device)
    check_tensor("w2q", w2q, fp8, (E, H, I), device)
    if out_dtype is None:
        out_dtype = x.dtype if x_scale is None else torch.bfloat16
    if out_dtype not in DTYPE_NAMES:
        raise TypeError(f"out_dtype must be {either(dtypes)}, got {out_dtype}")
    if expert_map is not None:
        named: str | int = "num_experts" if num_experts is None else num_experts
        expert_map = check_tensor("expert_map", expert_map, (torch.int32,), (named,), device)
        num_experts = len(expert_map)
    num_experts = E if num_experts is None else num_experts
    layer = FusedMoeProblem(
        M, H, I, E, top_k, num_experts=num_experts, has_map=int(expert_map is not None)
    )
    if x_scale is None:
        x, x_scale = aiter_mx.quantize(x)
    lists = aiter_mx.moe_align(
        topk_ids, layer.block_m, num_experts, expert_map, drop_absent=expert_map is not None
    )
    shape = (M * top_k, top_k, layer.block_m)
    h = aiter_mx.moe_gemm(
        x, x_scale, w1q, w1s, *lists, *shape, a_div=top_k, bias=bias1, out_dtype=torch.float32
    )
    hq, hs = aiter_mx.quantize(_ACTIVATIONS[activation](h))
    sums_dtype = torch.float32 if reduce else out_dtype
    y = aiter_mx.moe_gemm(hq, hs, w2q, w2s, *lists, *shape, bias=bias2, out_dtype=sums_dtype)
    is_here = (topk_ids >= 0) & (topk_ids < num_experts)
    if expert_map is not None:
        is_here &= expert_map[topk_ids.clamp(0, num_experts - 1).long()] >= 0
    rows = y.view(M, top_k, H).masked_fill(~is_here.unsqueeze(2), 0)  # nobody has written them
    if not reduce:
        return rows
    weights = torch.where(is_here, topk_weights, 0.0)
    total = rows[:, 0] * weights[:, :1]
    for slot in range(1, top_k):  # in the order of fused_moe
        total = total + rows[:, slot] * weights[:, slot : slot + 1]
    return total.to(out_dtype)
