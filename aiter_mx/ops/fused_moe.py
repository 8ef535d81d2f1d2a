"""``aiter_mx.fused_moe``: a whole expert layer in four launches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from aiter_mx.kernels.moe_align import MoeAlignProblem
from aiter_mx.kernels.moe_combine import MoeCombineProblem
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.kernels.spec import Problem
from aiter_mx.launch import Run
from aiter_mx.ops import moe_align, moe_combine, moe_gemm
from aiter_mx.ops.checks import (
    ALIGNMENT_BYTES,
    BLOCK,
    DTYPE_NAMES,
    SCALE_DTYPES,
    check_out,
    check_tensor,
    refuse_alignment,
)
from aiter_mx.ops.moe_check import check_expert_ids
from aiter_mx.ops.plan import bind
from aiter_mx.target import cpu_target, target_of

_FP8 = (torch.float8_e4m3fn,)
_ID_DTYPES = {torch.int32: "i32", torch.int64: "i64"}


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
    limit: float = 7.0,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    block_m: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """A mixture of experts: each token's weighted sum over its experts' two-layer networks.

    Four launches: the routing, beside the quantisation of x; the first GEMM, whose sums are
    activated and quantised before they leave it; the second; and the sum over a token's slots, in
    their order. Results are bitwise the same on every run. Nothing is read on the host, and after
    ``aiter_mx.warmup("fused_moe", ...)`` the call can be captured into a graph.

    Args:
        x: tokens, bf16, fp16 or fp32 ``[M, H]``, H a multiple of 32.
        w1q: gate and up weights, float8_e4m3fn ``[E, 2 * I, H]``, I a multiple of 32.
        w1s: their scales, uint8 or float8_e8m0fnu ``[E, 2 * I, H // 32]``.
        w2q: down weights, ``[E, H, I]``.
        w2s: their scales, ``[E, H, I // 32]``.
        topk_ids: int32 or int64 ``[M, top_k]``: the expert of each slot, 0 to num_experts - 1. A
            slot with any other value is left out; ``AITER_MX_CHECK=1`` makes it an error.
        topk_weights: float32 ``[M, top_k]``.
        num_experts: experts that are routed to, on all ranks; by default E - shared_experts.
        expert_map: int32 ``[num_experts]``: each expert's number on this rank, -1 for one that is
            not here, whose slots are left out; None where all are here under their own numbers.
        shared_experts: experts that every token has besides, with weight 1: the last ones of E.
        activation: ``"silu"`` or ``"swiglu_oai"``, as for ``moe_gemm_activated``.
        layout: where gate and up stand among w1's rows, ``"halves"`` or ``"interleaved"``.
        alpha: of swiglu_oai.
        beta: of swiglu_oai.
        limit: of swiglu_oai.
        bias1: bf16, fp16 or fp32 ``[E, 2 * I]``, or None.
        bias2: ``[E, H]``, or None.
        block_m: rows of an expert that the routing puts into a block; by default it is chosen.
        out: where to write the result; it may not overlap an input.

    Returns:
        ``[M, H]`` of x's dtype, or ``out``.

    Raises:
        TypeError: an argument that is no tensor, or of a dtype not listed above.
        ValueError: a shape, stride, device or alignment other than those above, or an overlap.
        CaptureError: a first use while a stream is captured.
    """
    inputs = (x, w1q, w1s, w2q, w2s, topk_ids, topk_weights, expert_map, bias1, bias2)
    for name, tensor in zip(_NAMES, inputs, strict=True):
        if not isinstance(tensor, Tensor) and (tensor is not None or name not in _OPTIONAL):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    swiglu = (float(alpha), float(beta), float(limit)) if activation == "swiglu_oai" else ()
    options = (num_experts, shared_experts, activation, layout, swiglu, block_m)
    device = x.device
    call = (
        *((t.shape, t.dtype, t.device, t.is_contiguous()) for t in inputs if t is not None),
        (expert_map is None, bias1 is None, bias2 is None),
        options,
        device.type == "cpu" and cpu_target(),
    )
    plan = _plans.by_call.get(call)
    if plan is None:
        plan = _plans.by_call[call] = _plan(inputs, options)
    problem = plan.problem
    check_expert_ids(topk_ids, problem.num_experts)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=device)
    else:
        check_out(out, tuple(x.shape), x.dtype, **dict(zip(_NAMES, inputs, strict=True)))
    if not plan.runs:
        return out.zero_()
    if (x.data_ptr() | w1q.data_ptr() | w2q.data_ptr()) % ALIGNMENT_BYTES:
        refuse_alignment(x=x, w1q=w1q, w2q=w2q)

    held = torch.empty(plan.bytes, dtype=torch.uint8, device=device)
    xq, xs, hq, hs, y, sorted_ids, expert_ids, post_padded = (
        held[at : at + size].view(dtype) for at, size, dtype in plan.parts
    )
    hq, y = hq.view(problem.routed, -1), y.view(problem.routed, -1)
    xq, xs, hs = xq.view(problem.M, -1), xs.view(problem.M, -1), hs.view(problem.routed, -1)
    lists = (sorted_ids, expert_ids, post_padded)
    align, first, second, combine = plan.runs
    _launch(align, topk_ids, None, expert_map, None, x, sorted_ids, None, *lists[1:], xq, xs)
    _launch(first, xq, xs, w1q, w1s, *lists, None, bias1, hq, hs)
    _launch(second, hq, hs, w2q, w2s, *lists, None, bias2, y, None)
    _launch(combine, y, topk_ids, topk_weights, expert_map, out)
    return out


def _launch(run: Run, *tensors: Tensor | None) -> None:
    run(tensors, [0 if tensor is None else tensor.data_ptr() for tensor in tensors])


_NAMES = (
    *("x", "w1q", "w1s", "w2q", "w2s", "topk_ids", "topk_weights"),
    *("expert_map", "bias1", "bias2"),
)
_OPTIONAL = ("expert_map", "bias1", "bias2")


@dataclass(frozen=True)
class FusedMoeProblem:
    """An expert layer.

    Attributes:
        M: tokens.
        hidden: their elements, H.
        intermediate: activated features, I.
        E: experts here, shared ones included.
        top_k: slots of a token that are routed.
        num_experts: experts that are routed to, on all ranks; 0 for those here.
        shared: further slots of every token, for the last of the experts here.
        has_map: 1: an expert map says which experts are here.
        activation: ``silu`` or ``swiglu_oai``.
        layout: of gate and up rows, ``halves`` or ``interleaved``.
        dtype: of the tokens, in and out.
        bias1: dtype of the first GEMM's bias, or ``none``.
        bias2: of the second's.
        id_dtype: of the experts' ids, ``i32`` or ``i64``.
        block_m: rows of an expert that make a block; 0 for what suits the shape.
        alpha: of swiglu_oai.
        beta: of swiglu_oai.
        limit: of swiglu_oai.
    """

    M: int
    hidden: int
    intermediate: int
    E: int
    top_k: int
    num_experts: int = 0
    shared: int = 0
    has_map: int = 0
    activation: str = "silu"
    layout: str = "halves"
    dtype: str = "bf16"
    bias1: str = "none"
    bias2: str = "none"
    id_dtype: str = "i32"
    block_m: int = 0
    alpha: float = 1.702
    beta: float = 1.0
    limit: float = 7.0

    def __post_init__(self) -> None:
        if not 0 <= self.shared < self.E:
            raise ValueError(
                f"shared experts must be fewer than the experts here, got {self.shared} of {self.E}"
            )
        if self.num_experts == 0:
            object.__setattr__(self, "num_experts", self.E - self.shared)
        if self.block_m == 0:
            object.__setattr__(self, "block_m", _block_m(self))
        if not self.has_map and self.num_experts != self.E - self.shared:
            raise ValueError(
                f"num_experts={self.num_experts} but {self.E - self.shared} routed experts are "
                "here, and no expert_map says which"
            )
        if self.intermediate % BLOCK or self.hidden % BLOCK:
            raise ValueError(
                f"H and I must be multiples of {BLOCK}, got H={self.hidden} and "
                f"I={self.intermediate}"
            )

    @property
    def routed(self) -> int:
        """Routed rows of all tokens."""
        return self.M * (self.top_k + self.shared)

    def parts(self) -> tuple[tuple[str, Problem], ...]:
        """The ops and the problems of the four launches."""
        align = MoeAlignProblem(
            M=self.M,
            top_k=self.top_k,
            E=self.num_experts,
            block_m=self.block_m,
            id_dtype=self.id_dtype,
            expert_map="numbers" if self.has_map else "none",
            drop_absent=self.has_map,
            shared=self.shared,
            first_shared=self.E - self.shared,
            x_dtype=self.dtype,
            K=self.hidden,
        )
        first = MoeGemmProblem(
            M=self.M,
            N=2 * self.intermediate,
            K=self.hidden,
            E=self.E,
            top_k=align.slots,
            block_m=self.block_m,
            out_dtype="mxfp8",
            activation=self.activation,
            layout=self.layout,
            bias=self.bias1,
            a_div=align.slots,
            max_blocks=align.max_ids // self.block_m,
            alpha=self.alpha,
            beta=self.beta,
            limit=self.limit,
        )
        second = replace(
            first,
            N=self.hidden,
            K=self.intermediate,
            out_dtype="fp32",
            activation="none",
            layout="halves",
            bias=self.bias2,
            a_div=1,
        )
        combine = MoeCombineProblem(
            M=self.M,
            N=self.hidden,
            top_k=self.top_k,
            E=self.num_experts,
            shared=self.shared,
            y_dtype="fp32",
            out_dtype=self.dtype,
            id_dtype=self.id_dtype,
        )
        return (
            ("moe_align", align),
            ("moe_gemm", first),
            ("moe_gemm", second),
            ("moe_combine", combine),
        )


def _block_m(problem: FusedMoeProblem) -> int:
    """The least of 16, 32 and 64 that holds the rows of an expert that is chosen on average."""
    routed = problem.M * problem.top_k
    touched = problem.num_experts * (1 - (1 - 1 / problem.num_experts) ** routed)
    rows = max(routed / touched if touched else 0, problem.M if problem.shared else 0)
    return next((block for block in (16, 32) if rows <= block), 64)


@dataclass(frozen=True)
class _Plan:
    """What computes a call.

    Attributes:
        problem: the layer.
        runs: the four launches, or none where there is nothing to compute.
        bytes: of all that lies between the launches, in one piece of memory.
        parts: offset, bytes and dtype of each part of it.
    """

    problem: FusedMoeProblem
    runs: tuple[Run, ...]
    bytes: int
    parts: tuple[tuple[int, int, torch.dtype], ...]


class _Plans(threading.local):
    """Plans by everything about a call that the checks and the routes depend on."""

    def __init__(self) -> None:
        self.by_call: dict[Any, _Plan] = {}


_plans = _Plans()


def _plan(inputs: Sequence[Tensor | None], options: tuple[Any, ...]) -> _Plan:
    problem = _check(inputs, options)
    assert inputs[0] is not None
    device = inputs[0].device
    if problem.M == 0 or problem.hidden == 0:
        return _Plan(problem, (), 0, ())
    target = target_of(device)
    runs = tuple(
        bind(op, target, part, device, _FALLBACKS[op](part)) for op, part in problem.parts()
    )
    align = problem.parts()[0][1]
    M, H, I = problem.M, problem.hidden, problem.intermediate
    sizes = (
        (M * H, _FP8[0]),
        (M * H // BLOCK, torch.uint8),
        (problem.routed * I, _FP8[0]),
        (problem.routed * I // BLOCK, torch.uint8),
        (problem.routed * H * 4, torch.float32),
        (align.max_ids * 4, torch.int32),
        (align.max_ids // align.block_m * 4, torch.int32),
        (4, torch.int32),
    )
    at, placed = 0, []
    for size, dtype in sizes:
        placed.append((at, size, dtype))
        at += -(-size // 256) * 256
    return _Plan(problem, runs, at, tuple(placed))


_FALLBACKS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "moe_align": moe_align.fallbacks,
    "moe_gemm": moe_gemm.fallbacks,
    "moe_combine": moe_combine.fallbacks,
}


def _check(inputs: Sequence[Tensor | None], options: tuple[Any, ...]) -> FusedMoeProblem:
    """The problem that these arguments pose; raises as ``fused_moe`` documents."""
    x, w1q, w1s, w2q, w2s, topk_ids, topk_weights, expert_map, bias1, bias2 = inputs
    num_experts, shared, activation, layout, swiglu, block_m = options
    assert x is not None
    device = check_tensor("x", x, tuple(DTYPE_NAMES), ("M", "H")).device
    M, H = x.shape
    if H % BLOCK:
        raise ValueError(f"H must be a multiple of {BLOCK}, got H={H} (x: {list(x.shape)})")
    E, N, _ = check_tensor("w1q", w1q, _FP8, ("E", "2 * I", H), device).shape
    check_tensor("w1s", w1s, SCALE_DTYPES, (E, N, H // BLOCK), device)
    if N % (2 * BLOCK):
        raise ValueError(f"w1q must have a multiple of {2 * BLOCK} rows, got {N}")
    check_tensor("w2q", w2q, _FP8, (E, H, N // 2), device)
    check_tensor("w2s", w2s, SCALE_DTYPES, (E, H, N // 2 // BLOCK), device)
    ids = check_tensor("topk_ids", topk_ids, tuple(_ID_DTYPES), (M, "top_k"), device)
    top_k = ids.shape[1]
    check_tensor("topk_weights", topk_weights, (torch.float32,), (M, top_k), device)
    if not isinstance(shared, int) or not 0 <= shared < E:
        raise ValueError(f"shared_experts must be fewer than the {E} experts of w1q, got {shared}")
    if num_experts is None:
        num_experts = E - shared if expert_map is None else expert_map.shape[0]
    if expert_map is not None:
        check_tensor("expert_map", expert_map, (torch.int32,), (num_experts,), device)
    for name, bias, shape in (("bias1", bias1, (E, N)), ("bias2", bias2, (E, H))):
        if bias is not None:
            check_tensor(name, bias, tuple(DTYPE_NAMES), shape, device)
    alpha, beta, limit = swiglu or (1.702, 1.0, 7.0)
    return FusedMoeProblem(
        M=M,
        hidden=H,
        intermediate=N // 2,
        E=E,
        top_k=top_k,
        num_experts=num_experts,
        shared=shared,
        has_map=int(expert_map is not None),
        activation=activation,
        layout=layout,
        dtype=DTYPE_NAMES[x.dtype],
        bias1="none" if bias1 is None else DTYPE_NAMES[bias1.dtype],
        bias2="none" if bias2 is None else DTYPE_NAMES[bias2.dtype],
        id_dtype=_ID_DTYPES[ids.dtype],
        block_m=block_m or 0,
        alpha=alpha,
        beta=beta,
        limit=limit,
    )
