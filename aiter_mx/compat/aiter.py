"""aiter's ``moe_sorting``, and ``mxfp8_gemv``, ``grouped_gemm_mxfp8`` and the launchers below them,
``smallm_mxfp8_gemv``, ``smallm_mxfp8_mfma`` and ``smallm_mxfp8_moe_grouped_gemm`` (its pull request
3783).

``mxfp8_gemv`` and ``grouped_gemm_mxfp8`` return None where no kernel of this package computes the
shape on the tensors' device, so that the caller takes its own fallback. Arguments that no shape
could make right raise. As None is for each shape to decide, torch.compile does not trace them: call
them from an op of your own, as vLLM does, or call ``aiter_mx.linear`` and ``aiter_mx.moe_gemm``,
which it does trace.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from aiter_mx.checks import (
    DTYPE_NAMES,
    check_tensor,
    either,
    refuse_no_tensor,
    refuse_strides,
    shape_text,
)
from aiter_mx.compat.names import payload_of, renamed
from aiter_mx.compat.vllm import filled
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.moe_gemm.problem import packed_padding
from aiter_mx.ops.linear import linear, problem_of
from aiter_mx.ops.moe_align import moe_sort
from aiter_mx.ops.moe_gemm import Options, compute, plan_of
from aiter_mx.ops.quantize import quantize
from aiter_mx.target import Target, target_of

FP8 = torch.float8_e4m3fn
_GEMV_NAMES = {"xs": "x_scale", "ws": "w_scale"}
_RAW_LINEAR_NAMES = {"xq": "Xq", "xs": "Xs", "wq": "Wq", "ws": "Ws"}
_GROUPED_NAMES = {
    "xq": "a_q",
    "xs": "a_scale",
    "wq": "w",
    "ws": "w_scale",
    "topk_weights": "mul_weight_by",
}
"""What this package's ops call the arguments, to aiter's names."""
_OURS = ("hip", "none")  # kernels of csrc/ on either vendor's GPU; nothing to compute


def moe_sorting(
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    model_dim: int,
    moebuf_dtype: torch.dtype,
    block_size: int = 32,
    expert_mask: Tensor | None = None,
    num_local_tokens: Tensor | None = None,
    dispatch_policy: int = 0,
    accumulate: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``aiter_mx.moe_sort`` with lists of aiter's lengths, and room for the layer's result.

    Args:
        topk_ids: int32 or int64 ``[M, top_k]``.
        topk_weights: float32 ``[M, top_k]``.
        num_experts: experts that are routed to, on all ranks.
        model_dim: elements of a row of the result.
        moebuf_dtype: its dtype.
        block_size: ids of a block, a multiple of 4.
        expert_mask: int32 ``[num_experts]``, or None.
        num_local_tokens: int32 ``[1]``, or None.
        dispatch_policy: not needed.
        accumulate: whether the layer adds to the result; where it does not, and all experts are
            here, moe_buf is ``[0, 0]``.

    Returns:
        sorted_ids and sorted_weights ``[M * top_k + num_experts * block_size - top_k]``,
        sorted_expert_ids of their blocks, num_valid_ids ``[2]``, and moe_buf ``[M, model_dim]``,
        which holds anything.

    Raises:
        TypeError, ValueError: as ``aiter_mx.moe_sort``.
    """
    if not isinstance(moebuf_dtype, torch.dtype):
        raise TypeError(f"moebuf_dtype must be a torch.dtype, got {moebuf_dtype!r}")
    try:
        ids, weights, experts, valid = moe_sort(
            topk_ids, topk_weights, num_experts, block_size, expert_mask, num_local_tokens
        )
    except (TypeError, ValueError) as error:
        raise renamed(error, {"block_m": "block_size"}) from error
    M, top_k = topk_ids.shape
    length = M * top_k + num_experts * block_size - top_k
    room = (M, model_dim) if accumulate or expert_mask is not None else (0, 0)
    buffer = torch.empty(room, dtype=moebuf_dtype, device=topk_ids.device)
    return (
        filled(ids, length, packed_padding(M, top_k)),
        filled(weights, length, 0),
        filled(experts, -(-length // block_size), -1),
        valid,
        buffer,
    )


def mx_from_fnuz(payload: Tensor, scale: Tensor, mode: str = "rceil") -> tuple[Tensor, Tensor]:
    """MX operands from those of older GPUs: e4m3fnuz under a float for each 128 elements of a row.

    Their values are quantised anew, as neither the format nor the scales are MX's.

    Args:
        payload: float8_e4m3fnuz ``[..., K]``, K a multiple of 32.
        scale: float32 ``[..., K / 128]``, rounded up.
        mode: of the new scales, as ``aiter_mx.quantize`` has it.

    Returns:
        payload float8_e4m3fn ``[..., K]`` and scale uint8 ``[..., K // 32]``.

    Raises:
        TypeError, ValueError: as ``aiter_mx.quantize``; scales of another shape or dtype.
    """
    refuse_no_tensor(payload=payload, scale=scale)
    if payload.dtype != torch.float8_e4m3fnuz or payload.ndim == 0:
        raise TypeError(f"payload must be torch.float8_e4m3fnuz, got {payload.dtype}")
    K = payload.shape[-1]
    shape = (*payload.shape[:-1], -(-K // 128))
    check_tensor("scale", scale, (torch.float32,), shape, payload.device)
    each = scale.repeat_interleave(128, -1, output_size=shape[-1] * 128)[..., :K]
    payload, found = quantize(payload.float() * each, mode=mode)
    return payload, found


def mxfp8_gemv(
    xq: Tensor,
    x_scale: Tensor,
    wq: Tensor,
    w_scale: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor | None:
    """``dequantised(xq) @ dequantised(wq).T``, or None where ``aiter_mx.linear`` would fall back.

    Args:
        xq: float8_e4m3fn, or its bytes, ``[M, K]``.
        x_scale: uint8 ``[M, K // 32]``.
        wq: float8_e4m3fn, or its bytes, ``[N, K]``.
        w_scale: uint8 ``[N, K // 32]``.
        out_dtype: bf16, fp16 or fp32.

    Returns:
        ``[M, N]``, or None.

    Raises:
        TypeError, ValueError: as ``aiter_mx.linear`` has it.
    """
    refuse_no_tensor(xq=xq, x_scale=x_scale, wq=wq, w_scale=w_scale)
    xq, wq = payload_of(xq), payload_of(wq)
    if xq.dtype != FP8:
        raise TypeError(f"xq must be {FP8}, got {xq.dtype}")
    if xq.ndim != 2:
        raise ValueError(f"xq must have two dimensions, [rows, K], got {shape_text(xq)}")
    try:
        if out_dtype in DTYPE_NAMES and wq.ndim == 2 and xq.shape[1] > 0:
            (M, K), N = xq.shape, wq.shape[0]
            if K % 32:
                return None
            if M and N and not _is_ours(target_of(xq.device), M, N, K, DTYPE_NAMES[out_dtype]):
                problem_of(xq, x_scale, wq, w_scale, None, out_dtype)
                refuse_strides(xq=xq, xs=x_scale, wq=wq, ws=w_scale)
                return None
        return linear(xq, x_scale, wq, w_scale, None, out_dtype)
    except (TypeError, ValueError) as error:
        raise renamed(error, _GEMV_NAMES) from error


@lru_cache(maxsize=4096)
def _is_ours(target: Target, M: int, N: int, K: int, out_dtype: str) -> bool:
    return route("linear", target, LinearProblem(M, N, K, out_dtype)).backend in _OURS


def grouped_gemm_mxfp8(
    a_q: Tensor,
    a_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    num_valid_tokens: int,
    top_k: int,
    block_m: int,
    out_dtype: torch.dtype,
    a_div: int,
    mul_weight_by: Tensor | None = None,
    topk_ids: Tensor | None = None,
) -> Tensor | None:
    """A grouped GEMM over vLLM's routing, or None where ``aiter_mx.moe_gemm`` would fall back.

    Args:
        a_q: float8_e4m3fn, or its bytes, ``[rows, K]``; routed row t takes row ``t // a_div``.
        a_scale: uint8 ``[rows, K // 32]``.
        w: float8_e4m3fn, or its bytes, ``[E, N, K]``.
        w_scale: uint8 ``[E, N, K // 32]``.
        sorted_token_ids: int32, of ``moe_align_block_size``.
        expert_ids: int32, one for each block_m ids; rows of expert -1 become zero.
        num_tokens_post_padded: int32 ``[1]``.
        num_valid_tokens: tokens times top_k.
        top_k: experts of a token.
        block_m: ids of a block.
        out_dtype: bf16, fp16 or fp32.
        a_div: routed rows that share a row of a_q.
        mul_weight_by: routing weights, num_valid_tokens of them, or None.
        topk_ids: experts of the tokens; nothing here needs them.

    Returns:
        ``[num_valid_tokens, N]``, or None.

    Raises:
        TypeError, ValueError: as ``aiter_mx.moe_gemm`` has it.
    """
    if out_dtype not in DTYPE_NAMES:
        raise TypeError(f"out_dtype must be {either(tuple(DTYPE_NAMES))}, got {out_dtype}")
    refuse_no_tensor(("mul_weight_by",), a_q=a_q, w=w, mul_weight_by=mul_weight_by)
    a_q, w = payload_of(a_q), payload_of(w)
    if a_q.ndim == 2 and a_q.shape[1] % 32:
        return None
    if mul_weight_by is not None:
        mul_weight_by = mul_weight_by.reshape(-1).to(torch.float32)
        shape, device = (num_valid_tokens,), a_q.device
        check_tensor("mul_weight_by", mul_weight_by, (torch.float32,), shape, device)
    lists = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    inputs = (a_q, a_scale, w, w_scale, *lists, mul_weight_by, None)
    options = Options(DTYPE_NAMES[out_dtype], num_valid_tokens, top_k, block_m, a_div)
    try:
        plan = plan_of(inputs, options)
        return compute(plan, inputs, None)[0] if plan.backend in _OURS else None
    except (TypeError, ValueError) as error:
        raise renamed(error, _GROUPED_NAMES) from error


def smallm_mxfp8_gemv(
    Xq: Tensor, Xs: Tensor, Wq: Tensor, Ws: Tensor, out_dtype: torch.dtype, block_n: int = 8
) -> Tensor:
    """``dequantised(Xq) @ dequantised(Wq).T`` by ``aiter_mx.linear``, for any number of rows.

    Args:
        Xq: float8_e4m3fn, or its bytes, ``[M, K]``.
        Xs: uint8 ``[M, K // 32]``.
        Wq: float8_e4m3fn, or its bytes, ``[N, K]``.
        Ws: uint8 ``[N, K // 32]``.
        out_dtype: bf16, fp16 or fp32.
        block_n: of aiter's kernel; those of this package have parameters of their own.

    Returns:
        ``[M, N]``.

    Raises:
        TypeError, ValueError: as ``aiter_mx.linear`` has it.
    """
    refuse_no_tensor(Xq=Xq, Xs=Xs, Wq=Wq, Ws=Ws)
    try:
        return linear(payload_of(Xq), Xs, payload_of(Wq), Ws, None, out_dtype)
    except (TypeError, ValueError) as error:
        raise renamed(error, _RAW_LINEAR_NAMES) from error


def smallm_mxfp8_mfma(
    Xq: Tensor,
    Xs: Tensor,
    Wq: Tensor,
    Ws: Tensor,
    out_dtype: torch.dtype,
    n_sub: int = 1,
    k_splits: int = 1,
) -> Tensor:
    """``smallm_mxfp8_gemv`` under the name of aiter's kernel for some rows more.

    Args:
        Xq: as for ``smallm_mxfp8_gemv``.
        Xs: likewise.
        Wq: likewise.
        Ws: likewise.
        out_dtype: likewise.
        n_sub: of aiter's kernel; those of this package have parameters of their own.
        k_splits: likewise.

    Returns:
        ``[M, N]``.

    Raises:
        TypeError, ValueError: as ``aiter_mx.linear`` has it.
    """
    return smallm_mxfp8_gemv(Xq, Xs, Wq, Ws, out_dtype)


def smallm_mxfp8_moe_grouped_gemm(
    a_q: Tensor,
    a_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    out: Tensor,
    E: int,
    N: int,
    K: int,
    num_valid_tokens: int,
    M_act: int,
    a_div: int,
    block_m: int,
    mul_weight_by: Tensor | None = None,
    block_n: int = 8,
) -> Tensor:
    """A grouped GEMM over vLLM's routing by ``aiter_mx.moe_gemm``, into ``out``.

    Args:
        a_q: float8_e4m3fn, or its bytes, ``[M_act, K]``; routed row t takes row ``t // a_div``.
        a_scale: uint8 ``[M_act, K // 32]``.
        w: float8_e4m3fn, or its bytes, ``[E, N, K]``.
        w_scale: uint8 ``[E, N, K // 32]``.
        sorted_token_ids: as for ``grouped_gemm_mxfp8``.
        expert_ids: likewise.
        num_tokens_post_padded: likewise.
        out: bf16, fp16 or fp32 ``[num_valid_tokens, N]``.
        E: experts of ``w``.
        N: rows of an expert's.
        K: elements of the reduction.
        num_valid_tokens: routed rows.
        M_act: rows of ``a_q``.
        a_div: routed rows that share a row of ``a_q``.
        block_m: ids of a block.
        mul_weight_by: float32 ``[num_valid_tokens]``, or None.
        block_n: of aiter's kernel, likewise.

    Returns:
        ``out``.

    Raises:
        TypeError, ValueError: as ``aiter_mx.moe_gemm`` has it; sizes that are not the tensors'.
    """
    refuse_no_tensor(("mul_weight_by",), a_q=a_q, w=w, out=out, mul_weight_by=mul_weight_by)
    a_q, w = payload_of(a_q), payload_of(w)
    for name, tensor, shape in (("a_q", a_q, (M_act, K)), ("w", w, (E, N, K))):
        if tensor.shape != shape:
            raise ValueError(f"{name} must be {list(shape)}, got {shape_text(tensor)}")
    if out.dtype not in DTYPE_NAMES:
        raise TypeError(f"out must be {either(tuple(DTYPE_NAMES))}, got {out.dtype}")
    lists = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    inputs = (a_q, a_scale, w, w_scale, *lists, mul_weight_by, None)
    # The slots of a token are told by what the rows of a_q are shared by, and matter to no id.
    options = Options(DTYPE_NAMES[out.dtype], num_valid_tokens, a_div, block_m, a_div)
    try:
        return compute(plan_of(inputs, options), inputs, out)[0]
    except (TypeError, ValueError) as error:
        raise renamed(error, _GROUPED_NAMES) from error
