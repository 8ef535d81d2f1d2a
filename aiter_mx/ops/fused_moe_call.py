"""The way from an expert layer to its launches: checks, the memory between them, and the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aiter_mx.checks import (
    ALIGNMENT_BYTES,
    BLOCK,
    DTYPE_NAMES,
    INDEX_NAMES,
    SCALE_ALIGNMENT_BYTES,
    SCALE_DTYPES,
    as_whole_number,
    check_expert_ids,
    check_expert_map,
    check_out,
    check_tensor,
    checking,
    either,
    refuse_alignment,
    refuse_less,
    refuse_no_experts,
    refuse_no_whole_number,
)
from aiter_mx.codec import DTYPES
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.errors import CaptureError
from aiter_mx.kernels.fused_moe import FusedMoeProblem, refuse_unknown_activation
from aiter_mx.kernels.moe_align import MoeAlignProblem
from aiter_mx.kernels.moe_combine import MoeCombineProblem
from aiter_mx.kernels.moe_up import MoeUpProblem
from aiter_mx.kernels.spec import Parts
from aiter_mx.launch import Run, not_warm
from aiter_mx.plan import Plans, bind, falls_back
from aiter_mx.registration import with_memory
from aiter_mx.target import ENVIRONMENT, EXACT_SUMS, Target, cpu_target, target_of

_FP8 = (torch.float8_e4m3fn,)
_PART_ALIGNMENT = 256  # bytes


class Options(NamedTuple):
    """What a call asks for beside its tensors, as ``fused_moe`` takes it; a tuple, as every call
    makes and hashes one. ``swiglu`` is alpha, beta and limit of swiglu_oai, else nothing. Where
    ``reduce`` is 0 slots that are left out get zeros, where it is -1 they are not written. Where
    ``masked``, tokens are with their experts already, and topk_ids counts those of each."""

    num_experts: int | None
    shared_experts: int
    activation: str
    layout: str
    swiglu: tuple[float, ...]
    block_m: int | None
    reduce: int
    out_dtype: torch.dtype
    exact_sums: bool | None = None
    expected: int = 0
    masked: bool = False


def compute(inputs: tuple[Any, ...], options: Options, out: Tensor | None) -> Tensor:
    """The layer's result.

    Args:
        inputs: what ``NAMES`` names.
        options: what else the call asks for.
        out: where to write the result, or None.

    Raises:
        TypeError, ValueError, CaptureError: as ``fused_moe`` documents.
    """
    x, w1q, w1s, w2q, w2s, topk_ids, shares, expert_map, *optional, num_tokens = inputs
    try:
        call = (
            *[(t.shape, t.dtype, t.device, t.is_contiguous()) for t in inputs if t is not None],
            (expert_map is None, *[each is None for each in optional], num_tokens is None),
            options,
            x.is_cuda or cpu_target(),
            ENVIRONMENT.get(EXACT_SUMS),
        )
        plan = _plans.by_call.get(call)
        if plan is None:
            plan = _plans.keep(call, _plan(inputs, options))
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in inputs]
    except AttributeError:
        _refuse_no_tensors(inputs)
        raise
    if x.is_neg() or shares.is_neg() or not (addresses[0] and addresses[6]):
        x, shares = with_memory(x.resolve_neg()), with_memory(shares.resolve_neg())
        inputs = (x, *inputs[1:6], shares, *inputs[7:])
        addresses[0], addresses[6] = x.data_ptr(), shares.data_ptr()
    if checking():
        if not options.masked:
            check_expert_ids(topk_ids, plan.problem.num_experts, num_tokens)
        check_expert_map(expert_map, plan.problem.E)
    if out is None:
        out = torch.empty(plan.shape, dtype=options.out_dtype, device=x.device)
    else:
        check_out(out, plan.shape, options.out_dtype, **dict(zip(NAMES, inputs, strict=True)))
    if not plan.launches:
        return out.zero_() if options.reduce >= 0 else out
    if options.reduce == 0:
        _clear(out, num_tokens)
    if (addresses[0] | addresses[1] | addresses[3]) % ALIGNMENT_BYTES:
        refuse_alignment(x=x, w1q=w1q, w2q=w2q)
    if (addresses[2] | addresses[4] | addresses[_X_SCALE]) % SCALE_ALIGNMENT_BYTES:
        refuse_alignment(SCALE_ALIGNMENT_BYTES, w1s=w1s, w2s=w2s, x_scale=inputs[_X_SCALE])

    held = torch.empty(plan.bytes, dtype=torch.uint8, device=x.device)
    if plan.takes_tensors:
        parts = [
            held[part.at : part.at + part.bytes].view(part.dtype).view(part.shape)
            for part in plan.parts
        ]
        tensors = (*inputs, out, None, out.view(-1, out.shape[-1]), *parts)
        for run, pick in plan.launches:
            picked = pick(tensors)
            run(picked, [0 if tensor is None else tensor.data_ptr() for tensor in picked])
        return out
    first, last = held.data_ptr(), out.data_ptr()
    addresses += (last, 0, last, *[first + part.at for part in plan.parts])
    for run, pick in plan.launches:
        run((), pick(addresses))
    return out


def with_whole_numbers(options: Options) -> Options:
    """With numbers of Python's in place of NumPy's, which are their equals in a plan's key."""
    numbers = ("num_experts", "shared_experts", "block_m", "expected")
    return options._replace(**{name: as_whole_number(getattr(options, name)) for name in numbers})


def _refuse_no_tensors(inputs: Sequence[object]) -> None:
    """Raise TypeError for the first of these that is no tensor."""
    for name, tensor in zip(NAMES, inputs, strict=True):
        if not isinstance(tensor, Tensor) and (tensor is not None or name not in _OPTIONAL):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")


_LISTS = ("sorted_ids", "expert_ids", "post_padded")
ARGUMENTS = (
    (
        *("topk_ids", "none", "expert_map", "num_tokens", "x", "sorted_ids", "none"),
        *_LISTS[1:],
        "xq",
        "xs",
    ),
    ("xq", "xs", "w1q", "w1s", *_LISTS, "none", "bias1", "hq", "hs"),
    ("hq", "hs", "w2q", "w2s", *_LISTS, "none", "bias2", "y", "none"),
    ("y", "none", "topk_ids", "topk_weights", "expert_map", "num_tokens", "out"),
)
"""The pointers of each launch of a layer that lists its routed rows. Without a reduction there is
no last one."""
_SORTED = (
    *ARGUMENTS[:2],
    (*ARGUMENTS[2][:-1], "places"),
    ("y", "places", *ARGUMENTS[3][2:]),
)
"""Those of a layer whose second GEMM leaves its results as the ids are sorted."""

NAMES = (
    *("x", "w1q", "w1s", "w2q", "w2s", "topk_ids", "topk_weights"),
    *("expert_map", "bias1", "bias2", "x_scale", "num_tokens"),
)
_OPTIONAL = NAMES[7:]
_X_SCALE = NAMES.index("x_scale")


def _clear(out: Tensor, num_tokens: Tensor | None) -> None:
    """Zeros for slots that are left out, which no launch writes."""
    if num_tokens is None:
        out.zero_()
    else:
        counts = torch.arange(len(out), device=out.device) < num_tokens
        out.masked_fill_(counts[:, None, None], 0)


@dataclass(frozen=True)
class _Part:
    """A tensor between the launches: where it is in the memory that they share."""

    at: int
    bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Plan:
    """What computes a call.

    Attributes:
        problem: the layer.
        shape: of the result.
        launches: none where there is nothing to compute; and what picks the arguments of each from
            the inputs, the result, nothing, the result's rows, and ``parts``.
        takes_tensors: whether one of them asks for tensors and not for addresses alone.
        bytes: of all that lies between the launches, in one piece of memory.
        parts: what lies there.
    """

    problem: FusedMoeProblem
    shape: tuple[int, ...]
    launches: tuple[tuple[Run, Callable[[Sequence[Any]], tuple[Any, ...]]], ...]
    takes_tensors: bool
    bytes: int
    parts: tuple[_Part, ...]


_plans: Plans[_Plan] = Plans()


def _plan(inputs: Sequence[Tensor | None], options: Options) -> _Plan:
    _refuse_no_tensors(inputs)
    options = with_whole_numbers(options)
    problem = _check(inputs, options)
    assert inputs[0] is not None
    device = inputs[0].device
    target = target_of(device, options.exact_sums)
    layer = problem.parts(target.arch) if problem.hidden else ()  # it refuses what none can do
    slots = () if problem.reduce else (problem.top_k + problem.shared,)
    result = (problem.M, *slots, problem.hidden)
    if problem.M == 0 or not layer:
        return _Plan(problem, result, (), False, 0, ())
    try:
        runs = [bind(op, target, part, device) for op, part in layer]
    except CaptureError as error:  # of one launch: what the caller can warm is the layer
        raise not_warm("a launch of fused_moe", "fused_moe", problem, target) from error
    at, parts = 0, {}
    for name, (shape, dtype) in tensors_between(problem, layer).items():
        size = prod(shape) * dtype.itemsize
        parts[name] = _Part(at, size, dtype, shape)
        at += -(-size // _PART_ALIGNMENT) * _PART_ALIGNMENT
    where = {name: i for i, name in enumerate((*NAMES, "out", "none", "rows", *parts))}
    where.setdefault("y", where["rows"])
    if problem.quantised:
        where |= {"x": where["none"], "xq": where["x"], "xs": where["x_scale"]}
    picks = [itemgetter(*(where[name] for name in names)) for names in arguments_of(layer)]
    launches = tuple(zip(runs, picks, strict=True))
    takes_tensors = _takes_tensors(layer, target)
    return _Plan(problem, result, launches, takes_tensors, at, tuple(parts.values()))


def arguments_of(layer: Parts) -> tuple[tuple[str, ...], ...]:
    """The names of each launch's pointers: what the caller gave, or what lies between them."""
    up = layer[0][1]
    if not isinstance(up, MoeUpProblem):
        return (_SORTED if _is_sorted(layer) else ARGUMENTS)[: len(layer)]
    x = ("xq", "xs") if up.x_dtype == "mxfp8" else ("x", "none")
    routing = ("topk_ids", "expert_map", "num_tokens")
    return (
        (*routing, *x, "w1q", "w1s", "bias1", "h"),
        ("h", "topk_ids", "topk_weights", *routing[1:], "w2q", "w2s", "bias2", "out"),
    )


def _is_sorted(layer: Parts) -> bool:
    return (last := _combine_of(layer)) is not None and last.sorted_y


def _combine_of(layer: Parts) -> MoeCombineProblem | None:
    last = layer[-1][1]
    return last if isinstance(last, MoeCombineProblem) else None


def tensors_between(
    problem: FusedMoeProblem, layer: Parts
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of what lies between the launches, by the names of ``arguments_of``."""
    align, M, H, I = layer[0][1], problem.M, problem.hidden, problem.intermediate
    if not isinstance(align, MoeAlignProblem):
        return {"h": ((problem.routed, I), torch.float32)}
    quantisation = {"xq": ((M, H), _FP8[0]), "xs": ((M, H // BLOCK), torch.uint8)}
    to_reduce: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    if combine := _combine_of(layer):
        rows = align.max_ids if combine.sorted_y else problem.routed
        to_reduce = {"y": ((rows, H), DTYPES[combine.y_dtype])}
        if combine.sorted_y:
            to_reduce["places"] = ((problem.routed,), torch.int32)
    return {
        **({} if problem.quantised else quantisation),
        "hq": ((problem.routed, I), _FP8[0]),
        "hs": ((problem.routed, I // BLOCK), torch.uint8),
        **to_reduce,
        "sorted_ids": ((align.max_ids,), torch.int32),
        "expert_ids": ((align.max_ids // align.block_m,), torch.int32),
        "post_padded": ((1,), torch.int32),
    }


def _takes_tensors(layer: Parts, target: Target) -> bool:
    """Whether a launch is simulated, is not of one kernel of ours, or may be replaced by others."""
    if target.runtime not in ("hip", "cuda") or falls_back():
        return True
    for op, part in layer:
        chosen = route(op, target, part)
        spec = chosen.spec
        if spec.module is None or spec.workspace_bytes(target, part, chosen.config):
            return True
    return False


def _check(inputs: Sequence[Tensor | None], options: Options) -> FusedMoeProblem:
    """The problem that these arguments pose; raises as ``fused_moe`` documents."""
    x, w1q, w1s, w2q, w2s, topk_ids, topk_weights, expert_map, bias1, bias2, *more = inputs
    num_experts, shared, activation, layout, swiglu, block_m, reduce, out_dtype, *_ = options
    x_scale, num_tokens = more
    assert x is not None
    device = check_tensor(
        "x", x, tuple(DTYPE_NAMES) if x_scale is None else _FP8, ("M", "H")
    ).device
    if out_dtype not in DTYPE_NAMES or (x_scale is None and out_dtype != x.dtype):
        allowed = either(tuple(DTYPE_NAMES)) if x_scale is not None else f"x's, {x.dtype}"
        raise TypeError(f"out_dtype must be {allowed}, got {out_dtype}")
    M, H = x.shape
    if H % BLOCK:
        raise ValueError(f"H must be a multiple of {BLOCK}, got H={H} (x: {list(x.shape)})")
    if x_scale is not None:
        check_tensor("x_scale", x_scale, SCALE_DTYPES, (M, H // BLOCK), device)
    if num_tokens is not None:
        check_tensor("num_tokens", num_tokens, (torch.int32,), (1,), device)
    E, N, _ = check_tensor("w1q", w1q, _FP8, ("E", "2 * I", H), device).shape
    refuse_no_experts("w1q", E, N, H)
    if N == 0 or N % (2 * BLOCK):
        raise ValueError(f"w1q must have a multiple of {2 * BLOCK} rows, got {N}")
    check_tensor("w1s", w1s, SCALE_DTYPES, (E, N, H // BLOCK), device)
    check_tensor("w2q", w2q, _FP8, (E, H, N // 2), device)
    check_tensor("w2s", w2s, SCALE_DTYPES, (E, H, N // 2 // BLOCK), device)
    if options.masked:
        ids, top_k = check_tensor("masked_m", topk_ids, (torch.int32,), (E,), device), 1
    else:
        ids = check_tensor("topk_ids", topk_ids, tuple(INDEX_NAMES), (M, "top_k"), device)
        top_k = ids.shape[1]
        check_tensor("topk_weights", topk_weights, (torch.float32,), (M, top_k), device)
    refuse_unknown_activation(activation)
    refuse_no_whole_number(shared_experts=shared)
    refuse_less(0, shared_experts=shared)
    if shared >= E:
        raise ValueError(f"shared_experts must be fewer than the {E} experts of w1q, got {shared}")
    for name, value in (("num_experts", num_experts), ("block_m", block_m)):
        if value is None:
            continue
        refuse_no_whole_number(**{name: value})
        if value < 1:
            raise ValueError(f"{name} must be at least 1, or None, got {value}")
    if expert_map is not None:
        known = ("num_experts",) if num_experts is None else (num_experts,)
        num_experts = len(check_tensor("expert_map", expert_map, (torch.int32,), known, device))
        if num_experts == 0:
            raise ValueError("expert_map must name at least one expert, got [0]")
    elif num_experts is None:
        num_experts = E - shared
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
        dtype=DTYPE_NAMES[out_dtype],
        bias1="none" if bias1 is None else DTYPE_NAMES[bias1.dtype],
        bias2="none" if bias2 is None else DTYPE_NAMES[bias2.dtype],
        id_dtype=INDEX_NAMES[ids.dtype],
        block_m=block_m or 0,
        alpha=alpha,
        beta=beta,
        limit=limit,
        quantised=int(x_scale is not None),
        reduce=int(reduce == 1),
        expected=min(options.expected, M),
        masked=int(options.masked),
    )
