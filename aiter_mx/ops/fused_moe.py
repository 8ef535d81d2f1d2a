"""``aiter_mx.fused_moe``: a whole expert layer in a few launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aiter_mx.checks import (
    BLOCK,
    DTYPE_NAMES,
    SCALE_DTYPES,
    check_tensor,
    refuse_less,
    refuse_no_whole_number,
    refuse_shape,
    swiglu_of,
)
from aiter_mx.kernels.moe_gemm.blocks import block_of
from aiter_mx.ops.fused_moe_call import NAMES, Options, compute, with_whole_numbers
from aiter_mx.registration import (
    in_clear,
    is_traced,
    register_with_out,
    wants_gradient,
)

_FP8 = (torch.float8_e4m3fn,)


@in_clear
def fused_moe(
    x: Tensor,
    w1q: Tensor,
    w1s: Tensor,
    w2q: Tensor,
    w2s: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    num_experts: int | None = None,
    expert_map: Tensor | None = None,
    shared_experts: int = 0,
    activation: str = "silu",
    layout: str = "halves",
    alpha: float = 1.702,
    beta: float = 1.0,
    limit: float | None = 7.0,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    block_m: int | None = None,
    x_scale: Tensor | None = None,
    num_tokens: Tensor | None = None,
    expected_tokens: int | None = None,
    reduce: bool = True,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    exact_sums: bool | None = None,
) -> Tensor:
    """A mixture of experts: each token's weighted sum over its experts' two-layer networks.

    Four launches: the routing, beside the quantisation of x; the first GEMM, whose sums are
    activated and quantised before they leave it; the second; and the sum over a token's slots, in
    their order. Few tokens on gfx950 take two launches, without a list of routed rows. Sums are as
    exact as ``moe_gemm`` has them. Slots are added up in fp32; each is rounded to bf16 before that
    where the layer's result is in bf16 and tokens are so many, some 128 an expert, that the second
    GEMM gathers its rows. Results are bitwise the same on every run. Nothing is read on the host,
    and after ``aiter_mx.warmup("fused_moe", ...)`` the call can be captured into a graph. There is
    no gradient: where torch records one for tokens, routing weights or biases, its backward pass
    raises.

    Args:
        x: tokens, bf16, fp16 or fp32 ``[M, H]``, H a multiple of 32; or, with ``x_scale``,
            float8_e4m3fn.
        w1q: gate and up weights, float8_e4m3fn ``[E, 2 * I, H]``, I a multiple of 32.
        w1s: their scales, uint8 or float8_e8m0fnu ``[E, 2 * I, H // 32]``.
        w2q: down weights, ``[E, H, I]``.
        w2s: their scales, ``[E, H, I // 32]``. Payloads and scales begin where those of
            ``moe_gemm`` must.
        topk_ids: int32 or int64 ``[M, top_k]``: the expert of each slot, 0 to num_experts - 1. A
            slot with any other value is left out; ``AITER_MX_CHECK=1`` makes it an error.
        topk_weights: float32 ``[M, top_k]``. An infinite one makes its token's results infinite, or
            NaN where few tokens on gfx950 have it times parts of a sum; no other token's change.
        num_experts: experts that are routed to, on all ranks; by default E - shared_experts.
        expert_map: int32 ``[num_experts]``: each expert's number on this rank, -1 for one that is
            not here, whose slots are left out; None where all are here under their own numbers.
            Numbers of E and more add nothing; ``AITER_MX_CHECK=1`` makes them an error.
        shared_experts: experts that every token has besides, with weight 1: the last ones of E.
        activation: ``"silu"``, ``"swiglu_oai"``, ``"gelu"``, ``"gelu_tanh"`` or ``"relu2"``, as
            for ``moe_gemm_activated``.
        layout: where gate and up stand among w1's rows, ``"halves"`` or ``"interleaved"``.
        alpha: of swiglu_oai.
        beta: of swiglu_oai.
        limit: of swiglu_oai; None for none.
        bias1: bf16, fp16 or fp32 ``[E, 2 * I]``, or None.
        bias2: ``[E, H]``, or None.
        block_m: rows of an expert that the routing puts into a block; by default it is chosen.
        x_scale: scales of tokens that come quantised, uint8 or float8_e8m0fnu ``[M, H // 32]``.
        num_tokens: int32 ``[1]`` on the device: tokens that count, the first ones, of buffers that
            have room for more. What is behind them is neither read nor written. None for all.
        expected_tokens: how many are expected to count, to choose configurations for; by default M.
            More of them are computed all the same.
        reduce: False for the rows of a token's slots as the second GEMM has them: no weights are
            applied, and a slot that is left out has zeros.
        out_dtype: dtype of the result, bf16, fp16 or fp32; by default x's, bf16 where x is
            quantised. Another one than x's only where x is quantised.
        out: where to write the result; it may not overlap an input.
        exact_sums: as for ``moe_gemm``.

    Returns:
        ``[M, H]``, without a reduction ``[M, top_k + shared_experts, H]``, or ``out``.

    Raises:
        TypeError: an argument that is no tensor, or of a dtype not listed above.
        ValueError: a shape, stride, device or alignment other than those above, or an overlap.
        CaptureError: a first use while a stream is captured.
    """
    routing = (topk_ids, topk_weights, expert_map)
    inputs = (x, w1q, w1s, w2q, w2s, *routing, bias1, bias2, x_scale, num_tokens)
    swiglu = swiglu_of(activation, alpha, beta, limit)
    out_dtype = out_dtype or _usual_dtype(x, x_scale)
    if reduce not in (False, True):
        raise ValueError(f"reduce must be False or True, got {reduce!r}")
    if expected_tokens is not None:
        refuse_no_whole_number(expected_tokens=expected_tokens)
        refuse_less(0, expected_tokens=expected_tokens)
    options = Options(
        num_experts,
        shared_experts,
        activation,
        layout,
        swiglu,
        block_m,
        int(reduce),
        out_dtype,
        exact_sums,
        0 if expected_tokens is None else max(1, expected_tokens),
    )
    return _call(inputs, options, out)


@in_clear
def fused_moe_masked(
    x: Tensor,
    w1q: Tensor,
    w1s: Tensor,
    w2q: Tensor,
    w2s: Tensor,
    masked_m: Tensor,
    expected_m: int | None = None,
    *,
    x_scale: Tensor | None = None,
    activation: str = "silu",
    layout: str = "halves",
    alpha: float = 1.702,
    beta: float = 1.0,
    limit: float | None = 7.0,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    exact_sums: bool | None = None,
) -> Tensor:
    """``fused_moe`` over rows that are with their experts already, as a low-latency dispatch of
    expert parallelism leaves them. Rows past an expert's count are neither read nor written.

    Args:
        x: rows of each expert, bf16, fp16 or fp32 ``[E, max_tokens, H]``; or, with ``x_scale``,
            float8_e4m3fn.
        w1q: weights and scales, activation and biases as ``fused_moe`` takes them.
        w1s: see w1q.
        w2q: see w1q.
        w2s: see w1q.
        masked_m: int32 ``[E]`` on the device: rows of each expert that count, the first ones.
        expected_m: rows that an expert has in the mean, to choose a configuration for; by default
            max_tokens.
        x_scale: uint8 or float8_e8m0fnu ``[E, max_tokens, H // 32]``.
        activation: see w1q.
        layout: see w1q.
        alpha: see w1q.
        beta: see w1q.
        limit: see w1q.
        bias1: see w1q.
        bias2: see w1q.
        out_dtype: as for ``fused_moe``.
        out: where to write the result; it may not overlap an input.
        exact_sums: as for ``fused_moe``.

    Returns:
        ``[E, max_tokens, H]``, or ``out``. No weights are applied.

    Raises:
        TypeError, ValueError, CaptureError: as ``fused_moe`` does.
    """
    shape = check_tensor("x", x, (*DTYPE_NAMES, *_FP8), ("E", "max_tokens", "H")).shape
    E, rows, H = shape
    check_tensor("masked_m", masked_m, (torch.int32,), (E,), x.device)
    if out is not None:
        refuse_shape(out, shape)
    if x_scale is not None:
        check_tensor("x_scale", x_scale, SCALE_DTYPES, (E, rows, H // BLOCK), x.device)
        x_scale = x_scale.view(E * rows, H // BLOCK)
    if expected_m is not None:
        refuse_no_whole_number(expected_m=expected_m)
        refuse_less(0, expected_m=expected_m)
    routing = (masked_m, masked_m, None)  # nothing reads weights
    inputs = (x.view(E * rows, H), w1q, w1s, w2q, w2s, *routing, bias1, bias2)
    block_m = block_of(rows) if expected_m is None else None
    swiglu = swiglu_of(activation, alpha, beta, limit)
    out_dtype = out_dtype or _usual_dtype(x, x_scale)
    chosen = (None, 0, activation, layout, swiglu, block_m, -1, out_dtype, exact_sums)
    expected = 0 if expected_m is None else max(1, E * expected_m)
    options = Options(*chosen, expected, masked=True)
    of_rows = None if out is None else out.view(E * rows, 1, H)
    result = _call((*inputs, x_scale, None), options, of_rows)
    return result.view(shape) if out is None else out


def _usual_dtype(x: Tensor, x_scale: Tensor | None) -> torch.dtype:
    found: torch.dtype = getattr(x, "dtype", torch.bfloat16)
    return found if x_scale is None else torch.bfloat16


def _call(inputs: tuple[Tensor | None, ...], options: Options, out: Tensor | None) -> Tensor:
    x, topk_weights, bias1, bias2 = (inputs[at] for at in (0, 6, 8, 9))
    if is_traced((*inputs, out)) or wants_gradient(x, topk_weights, bias1, bias2):
        options = with_whole_numbers(options)
        flat = (*inputs, *options[:4], list(options.swiglu), *options[5:])
        result: Tensor = _through_torch(flat, out, options.out_dtype)
        return result
    return compute(inputs, options, out)


def _options_of(arguments: Sequence[Any]) -> Options:
    options = list(arguments[len(NAMES) :])  # without the last ones where they are at defaults
    options[4] = tuple(options[4])
    return Options(*options)


def _run(*arguments: Any, out: Tensor | None = None) -> Tensor:
    return compute(arguments[: len(NAMES)], _options_of(arguments), out)


def _fake(*arguments: Any) -> Tensor:
    x, topk_ids = (arguments[NAMES.index(name)] for name in ("x", "topk_ids"))
    options = _options_of(arguments)
    top_k = 1 if options.masked else topk_ids.shape[1]
    slots = () if options.reduce == 1 else (top_k + options.shared_experts,)
    fake: Tensor = x.new_empty((x.shape[0], *slots, x.shape[1]), dtype=options.out_dtype)
    return fake


_through_torch = register_with_out(
    "fused_moe",
    "Tensor x, Tensor w1q, Tensor w1s, Tensor w2q, Tensor w2s, Tensor topk_ids, "
    "Tensor topk_weights, Tensor? expert_map, Tensor? bias1, Tensor? bias2, Tensor? x_scale, "
    "Tensor? num_tokens, SymInt? num_experts, SymInt shared_experts, str activation, str layout, "
    "float[] swiglu, SymInt? block_m, SymInt reduce, ScalarType out_dtype, "
    "bool? exact_sums=None, SymInt expected=0, bool masked=False",
    "Tensor",
    _run,
    _fake,
    out_at=12,
    stands_for=lambda out: (),
)
