"""``aiter_mx.moe_gemm``: an MX-_FP8 grouped GEMM over routed tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aiter_mx.checks import (
    ALIGNMENT_BYTES,
    BLOCK,
    DTYPE_NAMES,
    DTYPES,
    SCALE_ALIGNMENT_BYTES,
    SCALE_DTYPES,
    STORED_FEATURES,
    as_whole_number,
    check_out,
    check_routing,
    check_tensor,
    checking,
    either,
    refuse_alignment,
    refuse_less,
    refuse_no_experts,
    refuse_no_whole_number,
    refuse_other_blocks,
    refuse_strides,
    swiglu_of,
)
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels.fused_moe import refuse_unknown_activation
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.launch import Run
from aiter_mx.plan import Plans, bind
from aiter_mx.registration import in_clear, is_traced, register_with_out, wants_gradient
from aiter_mx.target import ENVIRONMENT, EXACT_SUMS, cpu_target, target_of

_FP8 = (torch.float8_e4m3fn,)
_INT32 = (torch.int32,)


class Options(NamedTuple):
    """What a call asks for beside its tensors; a tuple, as every call makes and hashes one.

    Attributes:
        out_dtype: name of the result's dtype, ``mxfp8`` where it is activated and quantised.
        num_valid_tokens, top_k, block_m, a_div, ids: as the public functions take them.
        activation, layout: ``none``, or as ``moe_gemm_activated`` takes them.
        swiglu: alpha, beta and limit of swiglu_oai, else nothing.
        exact_sums: as the public functions take it.
    """

    out_dtype: str
    num_valid_tokens: int
    top_k: int
    block_m: int
    a_div: int = 1
    ids: str = "vllm"
    activation: str = "none"
    layout: str = "halves"
    swiglu: tuple[float, ...] = ()
    exact_sums: bool | None = None


@in_clear
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
    exact_sums: bool | None = None,
) -> Tensor:
    """``y[t] = (x[t // a_div] @ w[expert of t].T + bias[expert of t]) * weight of t``.

    ``t = token * top_k + slot`` is a routed row, and the lists of ``moe_align`` or ``moe_sort`` say
    which expert has it. Products are accumulated in fp32 and rounded once, but by some of Hopper's
    kernels, which 16-bit and activated results may get. ``wgmma_fp8`` adds those of a block with
    some 14 bits: within 2^-8 of the sum of their magnitudes, for random operands within 2^-10.
    ``rescaled`` and ``rescaled_in_place``, from some hundred rows an expert on, add 128 so: within
    2^-6, for random ones 2^-9; and an element may lose 2^-11 of the largest of its block. Results
    are bitwise the same on every run.
    The call does not synchronise, and after ``aiter_mx.warmup`` it can be captured into a graph and
    replayed with other routings. There is no gradient: where torch records one for routing weights
    or bias, its backward pass raises.

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
        exact_sums: pass over these kernels, which add with fewer bits than fp32; None for what
            ``AITER_MX_EXACT_SUMS`` says.

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
    options = Options(
        DTYPE_NAMES[out_dtype],
        as_whole_number(num_valid_tokens),
        as_whole_number(top_k),
        as_whole_number(block_m),
        as_whole_number(a_div),
        ids,
        exact_sums=exact_sums,
    )
    lists = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    return _moe_gemm((xq, xs, wq, ws, *lists, topk_weights, bias), options, out)[0]


@in_clear
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
    exact_sums: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """The first GEMM of an expert layer: gate and up, their activation, and its quantisation.

    As ``moe_gemm``, and then from the sums gate and up of each feature, in fp32,

    - ``"silu"``: ``silu(gate) * up``;
    - ``"gelu"``: ``gate * cdf(gate) * up``, by the normal distribution function; ``"gelu_tanh"``:
      likewise, by the approximation with tanh;
    - ``"relu2"``: ``relu(gate)**2 * up``;
    - ``"swiglu_oai"``: with gate at most ``limit`` and up within ``-limit`` to ``limit``,
      ``(up + beta) * gate * sigmoid(alpha * gate)``;

    which is quantised as ``aiter_mx.quantize`` does, without leaving the kernel.

    Args:
        xq: as for ``moe_gemm``.
        xs: likewise.
        wq: likewise; N is a multiple of 64.
        ws: likewise.
        sorted_token_ids: likewise.
        expert_ids: likewise.
        num_tokens_post_padded: likewise.
        num_valid_tokens: likewise.
        top_k: likewise.
        block_m: likewise.
        activation: one of those.
        layout: where gate and up stand among w's rows: ``"halves"``: gate first, ``[0, N / 2)``;
            ``"interleaved"``: gate in even rows, up in odd ones.
        alpha: of swiglu_oai.
        beta: of swiglu_oai.
        limit: of swiglu_oai.
        a_div: as for ``moe_gemm``.
        bias: likewise.
        ids: likewise.
        exact_sums: likewise.

    Returns:
        payload float8_e4m3fn ``[num_valid_tokens, N // 2]`` and scale uint8 ``[num_valid_tokens,
        N // 64]``: the operand of the second GEMM, with ``a_div=1``. Rows that no valid id names
        hold anything.

    Raises:
        TypeError, ValueError, CaptureError: as for ``moe_gemm``.
    """
    swiglu = swiglu_of(activation, alpha, beta, limit)
    options = Options(
        "mxfp8",
        as_whole_number(num_valid_tokens),
        as_whole_number(top_k),
        as_whole_number(block_m),
        as_whole_number(a_div),
        ids,
        activation,
        layout,
        swiglu,
        exact_sums,
    )
    lists = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    out, scales = _moe_gemm((xq, xs, wq, ws, *lists, None, bias), options, None)
    assert scales is not None
    return out, scales


@dataclass(frozen=True)
class Plan:
    """What computes a call.

    Attributes:
        problem: the problem that the call poses.
        backend: whose kernel computes it, or ``none``.
        run: the kernel, None where there is nothing to compute.
    """

    problem: MoeGemmProblem
    backend: str
    run: Run | None


_plans: Plans[Plan] = Plans()


def _moe_gemm(
    inputs: tuple[Tensor | None, ...], options: Options, out: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    if is_traced((*inputs, out)) or wants_gradient(*inputs[7:]):
        if options.activation != "none":
            payload, scales = _through_torch(_flat(inputs, options), None, _FP8[0])
            return payload, scales
        found = _through_torch(_flat(inputs, options), out, DTYPES[options.out_dtype])
        return (found[0] if out is None else found), None
    return compute(plan_of(inputs, options), inputs, out)


def plan_of(inputs: tuple[Tensor | None, ...], options: Options) -> Plan:
    """What computes a call.

    Args:
        inputs: what ``_NAMES`` names.
        options: the rest.

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
        xq.is_cuda or cpu_target(),
        ENVIRONMENT.get(EXACT_SUMS),
    )
    found = _plans.by_call.get(call)
    if found is None:
        found = _plans.keep(call, _plan(inputs, options))
    return found


def compute(
    plan: Plan, inputs: tuple[Tensor | None, ...], out: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The result of a call, and the scales of one that is MX-_FP8."""
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


def _plan(inputs: tuple[Tensor | None, ...], options: Options) -> Plan:
    problem = _problem_of(inputs, options)
    assert inputs[0] is not None
    device = inputs[0].device
    if problem.routed == 0 or problem.N == 0 or problem.blocks == 0:
        return Plan(problem, "none", None)
    target = target_of(device, options.exact_sums)
    backend = route("moe_gemm", target, problem).backend
    run = bind("moe_gemm", target, problem, device)
    return Plan(problem, backend, run)


def _problem_of(inputs: tuple[Tensor | None, ...], options: Options) -> MoeGemmProblem:
    """The problem that these arguments pose; raises as ``moe_gemm`` documents."""
    xq, xs, wq, ws, sorted_ids, expert_ids, post_padded, weights, bias = inputs
    out_dtype, routed, top_k, block_m, a_div, ids, activation, layout, swiglu, _ = options
    xq = check_tensor("xq", xq, _FP8, ("rows", "K"))
    device, (rows, K) = xq.device, xq.shape
    if K == 0 or K % BLOCK:
        raise ValueError(f"K must be a multiple of {BLOCK}, got K={K} (xq: {list(xq.shape)})")
    check_tensor("xs", xs, SCALE_DTYPES, (rows, K // BLOCK), device)
    E, N, _ = check_tensor("wq", wq, _FP8, ("E", "N", K), device).shape
    refuse_no_experts("wq", E, N, K)
    check_tensor("ws", ws, SCALE_DTYPES, (E, N, K // BLOCK), device)
    sorted_ids = check_tensor("sorted_token_ids", sorted_ids, _INT32, ("ids",), device)
    expert_ids = check_tensor("expert_ids", expert_ids, _INT32, ("blocks",), device)
    post_padded = check_tensor("num_tokens_post_padded", post_padded, _INT32, ("1 or 2",), device)
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
        refuse_other_blocks(len(sorted_ids), len(expert_ids), routed, block_m)
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


def _flat(inputs: tuple[Tensor | None, ...], options: Options) -> tuple[Any, ...]:
    """The arguments of torch's op, whose schema has lists for tuples."""
    return (*inputs, *options[:8], list(options.swiglu), options.exact_sums)


def _unflat(arguments: tuple[Any, ...]) -> tuple[tuple[Tensor | None, ...], Options]:
    options = arguments[len(_NAMES) :]  # without the last where it is at its default
    return arguments[: len(_NAMES)], Options._make(
        (*options[:8], tuple(options[8]), *(options[9:] or (None,)))
    )


def _run(*arguments: Any, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    inputs, options = _unflat(arguments)
    result, scales = compute(plan_of(inputs, options), inputs, out)
    return result, result.new_empty(0, dtype=torch.uint8) if scales is None else scales


def _fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    (xq, xs, wq, *_), options = _unflat(arguments)
    assert xq is not None and xs is not None and wq is not None
    routed, N = options.num_valid_tokens, wq.shape[1]
    if options.activation == "none":
        out = xq.new_empty((routed, N), dtype=DTYPES[options.out_dtype])
        return out, xs.new_empty(0, dtype=torch.uint8)
    scales = xs.new_empty((routed, N // 2 // BLOCK), dtype=torch.uint8)
    return xq.new_empty((routed, N // 2), dtype=_FP8[0]), scales


_through_torch = register_with_out(
    "moe_gemm",
    "Tensor xq, Tensor xs, Tensor wq, Tensor ws, Tensor sorted_token_ids, Tensor expert_ids, "
    "Tensor num_tokens_post_padded, Tensor? topk_weights, Tensor? bias, str out_dtype, "
    "SymInt num_valid_tokens, SymInt top_k, SymInt block_m, SymInt a_div, str ids, "
    "str activation, str layout, float[] swiglu, bool? exact_sums=None",
    "(Tensor, Tensor)",
    _run,
    _fake,
    out_at=9,
    stands_for=lambda out: (DTYPE_NAMES[out.dtype],),
)
