"""``aiter_mx.moe_gemm``: an MX-FP8 grouped GEMM over routed tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.launch import Run
from aiter_mx.ops import moe_library
from aiter_mx.ops.calls import Plans, is_traced, wants_gradient
from aiter_mx.ops.checks import (
    ALIGNMENT_BYTES,
    BLOCK,
    DTYPE_NAMES,
    DTYPES,
    SCALE_ALIGNMENT_BYTES,
    STORED_FEATURES,
    check_out,
    either,
    refuse_alignment,
)
from aiter_mx.ops.moe_check import check_routing, checking
from aiter_mx.ops.moe_problem import FP8, problem_of, swiglu_of
from aiter_mx.plan import bind
from aiter_mx.target import cpu_target, target_of


def moe_gemm(
    xq: Tensor,
    xs: Tensor,
    wq: Tensor,
    ws: Tensor,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    num_valid_tokens: int,
    top_k: int,
    block_m: int,
    *,
    a_div: int = 1,
    topk_weights: Tensor | None = None,
    bias: Tensor | None = None,
    ids: str = "vllm",
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """``y[t] = (x[t // a_div] @ w[expert of t].T + bias[expert of t]) * weight of t``.

    ``t = token * top_k + slot`` is a routed row, and the lists of ``moe_align`` or ``moe_sort`` say
    which expert has it. Products are accumulated in fp32 and rounded once, but that Hopper's
    ``wgmma_fp8`` kernel, which some bf16 and activated results may get, adds those of a block with
    some 14 bits. Results are bitwise the same on every run. The call does not synchronise, and
    after ``aiter_mx.warmup`` it can be captured into a graph and replayed with other routings in
    the same buffers. There is no gradient: where torch records one for routing weights or bias, its
    backward pass raises.

    Args:
        xq: activations, float8_e4m3fn ``[rows, K]``, rows * a_div >= num_valid_tokens.
        xs: their scales, uint8 or float8_e8m0fnu ``[rows, K // 32]``.
        wq: weights, float8_e4m3fn ``[E, N, K]``.
        ws: their scales, ``[E, N, K // 32]``. Payloads begin at multiples of 16 bytes and scales
            at multiples of 4, as tensors do that are no views.
        sorted_token_ids: int32: ids of routed rows, block_m of them for each expert block. An id
            that is out of range marks padding.
        expert_ids: int32: the expert of each block. Blocks of one expert follow one another. Rows
            of an expert that is not within 0 to E - 1, such as -1 for one on another rank, become
            zero.
        num_tokens_post_padded: int32, its first value says how many sorted ids are in use.
        num_valid_tokens: M * top_k, the rows of the result.
        top_k: slots of a token.
        block_m: ids of a block, a multiple of 4.
        a_div: routed rows that share a row of x: top_k where x has a row for each token, 1 where
            it has one for each routed row.
        topk_weights: float32: for vLLM's ids ``num_valid_tokens`` of them, by routed row; for
            aiter's as sorted as the ids are; of any shape, contiguous; or None.
        bias: bf16, fp16 or fp32 ``[E, N]``, or None.
        ids: encoding of the sorted ids, ``"vllm"`` (t) or ``"aiter"`` (slot << 24 | token).
        out_dtype: dtype of the result: bf16, fp16 or fp32.
        out: where to write the result; it begins at a multiple of four elements, as tensors do that
            are no views, and may not overlap an input.

    Returns:
        ``[num_valid_tokens, N]``, or ``out``. Rows that no valid id names are left as they are.

    Raises:
        TypeError: an argument that is no tensor, or of a dtype not listed above.
        ValueError: a shape, stride, device or alignment other than those above, or an overlap; with
            ``AITER_MX_CHECK=1`` also ids or experts that are out of range.
        CaptureError: a first use while a stream is captured.
    """
    if out_dtype not in DTYPE_NAMES:
        raise TypeError(f"out_dtype must be {either(tuple(DTYPE_NAMES))}, got {out_dtype}")
    options = (
        num_valid_tokens,
        top_k,
        block_m,
        a_div,
        ids,
        DTYPE_NAMES[out_dtype],
        "none",
        "halves",
        (),
    )
    lists = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    return _moe_gemm((xq, xs, wq, ws, *lists, topk_weights, bias), options, out)[0]


def moe_gemm_activated(
    xq: Tensor,
    xs: Tensor,
    wq: Tensor,
    ws: Tensor,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    num_valid_tokens: int,
    top_k: int,
    block_m: int,
    *,
    activation: str = "silu",
    layout: str = "halves",
    alpha: float = 1.702,
    beta: float = 1.0,
    limit: float = 7.0,
    a_div: int = 1,
    bias: Tensor | None = None,
    ids: str = "vllm",
) -> tuple[Tensor, Tensor]:
    """The first GEMM of an expert layer: gate and up, their activation, and its quantisation.

    As ``moe_gemm``, and then from the sums gate and up of each feature, in fp32,

    - ``"silu"``: ``silu(gate) * up``;
    - ``"swiglu_oai"``: with gate at most ``limit`` and up within ``-limit`` to ``limit``,
      ``(up + beta) * gate * sigmoid(alpha * gate)``;

    which is quantised as ``aiter_mx.quantize`` does, without leaving the kernel.

    Args:
        xq, xs, wq, ws, sorted_token_ids, expert_ids, num_tokens_post_padded, num_valid_tokens,
            top_k, block_m, a_div, bias, ids: as for ``moe_gemm``; N is a multiple of 64.
        activation: ``"silu"`` or ``"swiglu_oai"``.
        layout: where gate and up stand among w's rows: ``"halves"``: gate first, ``[0, N / 2)``;
            ``"interleaved"``: gate in even rows, up in odd ones.
        alpha: of swiglu_oai.
        beta: of swiglu_oai.
        limit: of swiglu_oai.

    Returns:
        payload float8_e4m3fn ``[num_valid_tokens, N // 2]`` and scale uint8 ``[num_valid_tokens,
        N // 64]``: the operand of the second GEMM, with ``a_div=1``. Rows that no valid id names
        hold anything.

    Raises:
        TypeError, ValueError, CaptureError: as for ``moe_gemm``.
    """
    swiglu = swiglu_of(activation, alpha, beta, limit)
    options = (num_valid_tokens, top_k, block_m, a_div, ids, "mxfp8", activation, layout, swiglu)
    lists = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    out, scales = _moe_gemm((xq, xs, wq, ws, *lists, None, bias), options, None)
    assert scales is not None
    return out, scales


@dataclass(frozen=True)
class Plan:
    """What computes a call.

    Attributes: the problem; the backend of the kernel that computes it, or ``none``; the kernel,
    or None where there is nothing to compute.
    """

    problem: MoeGemmProblem
    backend: str
    run: Run | None


_plans: Plans[Plan] = Plans()


def _moe_gemm(
    inputs: tuple[Tensor | None, ...], options: tuple[Any, ...], out: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    if is_traced((*inputs, out)) or wants_gradient(*inputs[7:]):
        return moe_library.moe_gemm(inputs, options, out)
    return compute(plan_of(inputs, options), inputs, out)


def plan_of(inputs: tuple[Tensor | None, ...], options: tuple[Any, ...]) -> Plan:
    """What computes a call.

    Args:
        inputs: what ``_NAMES`` names.
        options: num_valid_tokens, top_k, block_m, a_div, ids, out_dtype, activation, layout, and
            alpha, beta and limit of swiglu_oai, else nothing.

    Raises:
        TypeError, ValueError, CaptureError: as ``moe_gemm`` documents.
    """
    for name, tensor in zip(_NAMES, inputs, strict=True):
        if not isinstance(tensor, Tensor) and (tensor is not None or name not in _OPTIONAL):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    xq, weights, bias = inputs[0], inputs[7], inputs[8]
    assert xq is not None
    call = (
        *((t.shape, t.dtype, t.device, t.is_contiguous()) for t in inputs if t is not None),
        (weights is None, bias is None),
        options,
        xq.device.type == "cpu" and cpu_target(),
    )
    found = _plans.by_call.get(call)
    if found is None:
        found = _plans.keep(call, _plan(inputs, options))
    return found


def compute(
    plan: Plan, inputs: tuple[Tensor | None, ...], out: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The result of a call, and the scales of one that is MX-FP8."""
    xq, xs, wq, ws, sorted_ids, expert_ids, post_padded, _, _ = inputs
    assert xq is not None and xs is not None and wq is not None and ws is not None
    assert sorted_ids is not None and expert_ids is not None and post_padded is not None
    problem, device = plan.problem, xq.device
    if checking():
        check_routing(problem, sorted_ids, expert_ids, post_padded)
    shape = (problem.routed, problem.out_features)
    out_scales = None
    if problem.activation != "none":
        out = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
        scales_shape = (problem.routed, problem.out_features // BLOCK)
        out_scales = torch.empty(scales_shape, dtype=torch.uint8, device=device)
    elif out is None:
        out = torch.empty(shape, dtype=DTYPES[problem.out_dtype], device=device)
    else:
        named = dict(zip(_NAMES, inputs, strict=True))
        check_out(out, shape, DTYPES[problem.out_dtype], **named)
        refuse_alignment(STORED_FEATURES * out.itemsize, out=out)
    if plan.run is not None:
        tensors = (*inputs, out, out_scales)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        if (addresses[0] | addresses[2]) % ALIGNMENT_BYTES:
            refuse_alignment(xq=xq, wq=wq)
        if (addresses[1] | addresses[3]) % SCALE_ALIGNMENT_BYTES:
            refuse_alignment(SCALE_ALIGNMENT_BYTES, xs=xs, ws=ws)
        plan.run(tensors, addresses)
    return out, out_scales


_NAMES = (
    *("xq", "xs", "wq", "ws", "sorted_token_ids", "expert_ids", "num_tokens_post_padded"),
    *("topk_weights", "bias"),
)
_OPTIONAL = ("topk_weights", "bias")


def _plan(inputs: tuple[Tensor | None, ...], options: tuple[Any, ...]) -> Plan:
    problem = problem_of(inputs, options)
    assert inputs[0] is not None
    device = inputs[0].device
    if problem.routed == 0 or problem.N == 0 or problem.blocks == 0:
        return Plan(problem, "none", None)
    target = target_of(device)
    backend = route("moe_gemm", target, problem).backend
    run = bind("moe_gemm", target, problem, device)
    return Plan(problem, backend, run)


def warm(problem: MoeGemmProblem, device: torch.device) -> None:
    """Load what computes ``problem`` on ``device``, so that its next call builds nothing."""
    target = target_of(device)
    run = bind("moe_gemm", target, problem, device)
    chosen = route("moe_gemm", target, problem)
    if chosen.backend != "triton" or problem.routed == 0:
        return
    # Triton compiles when it is called, so it is called, on whatever this memory holds but for the
    # lists, which have no block in use.
    p = problem
    ids = torch.empty(p.blocks * p.block_m, dtype=torch.int32, device=device)
    experts = torch.empty(p.blocks, dtype=torch.int32, device=device)
    none_used = torch.zeros(1, dtype=torch.int32, device=device)
    dtypes = {**DTYPES, "mxfp8": FP8[0]}
    scales = (p.routed, p.out_features // BLOCK)
    tensors = (
        *_operand(p.routed, p.K, device=device),
        *_operand(p.E, p.N, p.K, device=device),
        *(ids, experts, none_used),
        None if p.weights == "none" else torch.empty(len(ids), dtype=torch.float32, device=device),
        None if p.bias == "none" else torch.empty(p.E, p.N, dtype=dtypes[p.bias], device=device),
        torch.empty(p.routed, p.out_features, dtype=dtypes[p.out_dtype], device=device),
        None if p.activation == "none" else torch.empty(scales, dtype=torch.uint8, device=device),
    )
    run(tensors, [0 if tensor is None else tensor.data_ptr() for tensor in tensors])


def _operand(*shape: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(shape, dtype=FP8[0], device=device),
        torch.empty((*shape[:-1], shape[-1] // BLOCK), dtype=torch.uint8, device=device),
    )
