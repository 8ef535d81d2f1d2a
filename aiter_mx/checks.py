"""What ops check of their arguments, and how they say what was wrong.

What only the device knows of a routing is checked on request, with ``AITER_MX_CHECK=1``. Kernels
leave out rows whose ids are out of range; with the variable set, ops read the ids back and raise
instead. That synchronises, so it is for finding a mistake, not for serving.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from aiter_mx.codec import DTYPE_NAMES as DTYPE_NAMES
from aiter_mx.codec import DTYPES as DTYPES
from aiter_mx.codec import INDEX_NAMES as INDEX_NAMES
from aiter_mx.codec import INDICES as INDICES
from aiter_mx.codec import SCALE_DTYPES as SCALE_DTYPES
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.kernels.moe_gemm.problem import packed_padding
from aiter_mx.numerics import BLOCK as BLOCK
from aiter_mx.target import ENVIRONMENT, OFF, environment_key

ALIGNMENT_BYTES = 16
"""Kernels load payloads in pieces of this size."""
SCALE_ALIGNMENT_BYTES = 4
"""Kernels of the MoE's GEMM load scales in pieces of this size."""
STORED_FEATURES = 4
"""They store as many features at once."""


_CHECK = environment_key("AITER_MX_CHECK")


def check_tensor(
    name: str,
    tensor: object,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | str],
    device: torch.device | None = None,
) -> torch.Tensor:
    """``tensor``, if it is one as expected.

    Args:
        name: of the argument, for messages.
        tensor: what was given.
        dtypes: those allowed.
        shape: what each dimension must be; a string names a dimension of any size.
        device: where it must be; None for anywhere.

    Raises:
        TypeError: no tensor, or of another dtype.
        ValueError: another shape or device, or not contiguous.
    """
    refuse_no_tensor(**{name: tensor})
    assert isinstance(tensor, torch.Tensor)
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must be {either(tuple(dtypes))}, got {tensor.dtype}")
    if tensor.ndim != len(shape) or any(
        isinstance(expected, int) and expected != size
        for expected, size in zip(shape, tensor.shape, strict=True)
    ):
        expected_text = ", ".join(map(str, shape))
        raise ValueError(f"{name} must be [{expected_text}], got {shape_text(tensor)}")
    if device is not None and tensor.device != device:
        raise ValueError(
            f"{name} is on {tensor.device}, but must be on {device}: all operands must be on one "
            "device"
        )
    refuse_strides(**{name: tensor})
    return tensor


def refuse_no_tensor(optional: Collection[str] = (), /, **given: object) -> None:
    """Raise TypeError for the first of these that is no tensor, nor None where it is optional."""
    for name, value in given.items():
        if not isinstance(value, torch.Tensor) and (value is not None or name not in optional):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")


def refuse_no_whole_number(**given: object) -> None:
    """Raise TypeError for the first of these that is no whole number of Python's."""
    for name, value in given.items():
        if not isinstance(value, (int, torch.SymInt)):
            kind = type(value)
            found = (
                kind.__name__
                if kind.__module__ == "builtins"
                else f"{kind.__module__}.{kind.__name__}"
            )
            raise TypeError(f"{name} must be a whole number, an int, got {found}")


def as_whole_number(value: Any) -> Any:
    """NumPy's whole numbers, and others that count, as Python's; anything else as it is."""
    if isinstance(value, (int, torch.SymInt, Tensor)) or not hasattr(value, "__index__"):
        return value
    return index(value)


def refuse_less(least: int, /, **given: int) -> None:
    """Raise ValueError for the first of these that is less."""
    for name, value in given.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def check_out(
    out: torch.Tensor,
    shape: tuple[int, ...],
    out_dtype: torch.dtype,
    **inputs: torch.Tensor | None,
) -> None:
    """Raise unless ``out`` can take a result of this shape and dtype, apart from every input.

    The first input says on which device it must be.
    """
    check_result(out, out_dtype)
    device = next(tensor.device for tensor in inputs.values() if tensor is not None)
    if out.device != device:
        raise ValueError(f"out must be on {device}, where the operands are, got {out.device}")
    refuse_shape(out, shape)
    if not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous, got strides {out.stride()} for {shape_text(out)}"
        )
    if not out.is_meta:
        refuse_overlap("out", out, inputs)


def refuse_overlap(
    name: str, written: torch.Tensor, others: Mapping[str, torch.Tensor | None]
) -> None:
    """Raise where ``written`` shares memory with one of the others, by their names."""
    first, last = written.data_ptr(), written.data_ptr() + written.nbytes
    for other, tensor in others.items():
        if (
            tensor is not None
            and first < tensor.data_ptr() + tensor.nbytes
            and tensor.data_ptr() < last
        ):
            raise ValueError(f"{name} overlaps {other}; give it memory of its own")


def check_result(out: object, out_dtype: torch.dtype) -> None:
    """Raise TypeError unless ``out`` is a tensor of this dtype, which ops with ``out`` go by."""
    refuse_no_tensor(out=out)
    assert isinstance(out, torch.Tensor)
    if out.dtype != out_dtype:
        raise TypeError(f"out must be of out_dtype {out_dtype}, got {out.dtype}")
    if out.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "out requires a gradient, and what is written to it has none; give out.detach(), or "
            "call under torch.no_grad()"
        )


def refuse_shape(out: torch.Tensor, shape: Sequence[int]) -> None:
    """Raise ValueError unless ``out`` has the shape of its result."""
    if tuple(out.shape) != tuple(shape):
        raise ValueError(f"out must be {list(shape)}, got {shape_text(out)}")


def refuse_strides(**tensors: torch.Tensor | None) -> None:
    """Raise for the first of these that is not contiguous."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            mend = "" if name.startswith("out") else f"; call {name}.contiguous()"
            raise ValueError(
                f"{name} must be contiguous, got strides {tensor.stride()} for "
                f"{shape_text(tensor)}{mend}"
            )


def refuse_alignment(alignment_bytes: int = ALIGNMENT_BYTES, /, **tensors: torch.Tensor) -> None:
    """Raise for the first of these that kernels could not load, or store, in whole pieces."""
    for name, tensor in tensors.items():
        past = tensor.data_ptr() % alignment_bytes
        if past:
            mend = "give it memory of its own" if name == "out" else f"call {name}.clone()"
            raise ValueError(
                f"{name} must start at a multiple of {alignment_bytes} bytes, got a view that is "
                f"{past} bytes past one; {mend}"
            )


def shape_text(tensor: torch.Tensor) -> str:
    """A tensor's shape, for messages."""
    return str(list(tensor.shape))


def either(dtypes: tuple[torch.dtype, ...]) -> str:
    """Dtypes, for messages."""
    return " or ".join(str(dtype) for dtype in dtypes)


def swiglu_of(activation: str, alpha: float, beta: float, limit: float | None) -> tuple[float, ...]:
    """alpha, beta and limit where the activation takes them, else nothing. No limit is infinity.

    Raises:
        TypeError: one of them is no number of Python's.
        ValueError: the limit is below 0, or NaN.
    """
    if activation != "swiglu_oai":
        return ()
    limit = float("inf") if limit is None else limit
    for name, value in (("alpha", alpha), ("beta", beta), ("limit", limit)):
        if not isinstance(value, (int, float, torch.SymFloat)):
            raise TypeError(f"{name} must be a number, a float, got {type(value).__name__}")
    if not limit >= 0:  # kernels differ in what is within -limit to limit then
        raise ValueError(f"limit must be at least 0, or None for no limit, got {limit}")
    return float(alpha), float(beta), float(limit)


def refuse_no_experts(name: str, E: int, N: int, K: int) -> None:
    """Raise ValueError where weights of this shape are nobody's."""
    if E == 0:
        raise ValueError(f"{name} must have at least one expert, got {[E, N, K]}")


def checking() -> bool:
    """Whether ``AITER_MX_CHECK=1`` asks for checks; never while a stream is captured."""
    if ENVIRONMENT.get(_CHECK) is None or os.environ.get("AITER_MX_CHECK", "").lower() in OFF:
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def check_groups(
    name: str, groups: int, starts: Tensor | None, ends: Tensor, rows: int, apart: bool = False
) -> None:
    """Raise ValueError if checks are on and groups of rows are not such as can be.

    Args:
        name: of what says where groups end.
        groups: G.
        starts: ``[G]``, or None where a group begins with the row after the one before it.
        ends: ``[G]``, or ``[G + 1]`` with the first one's begin; rows that count where groups have
            rows of their own.
        rows: that there are, or that each group has of its own.
        apart: whether groups have rows of their own.
    """
    if not checking():
        return
    last = ends.tolist()
    if apart or starts is not None:
        first = [0] * len(last) if starts is None else starts.tolist()
    else:
        first, last = (last[:-1], last[1:]) if len(last) > groups else ([0, *last[:-1]], last)
    taken = 0
    for begin, end, group in sorted(zip(first, last, range(len(last)), strict=True)):
        is_none = starts is not None and end <= begin
        if not is_none and not 0 <= begin <= end <= rows:
            raise ValueError(
                f"{name} must give groups of rows within 0 to {rows} that do not decrease, but "
                f"group {group} is {begin} to {end}"
            )
        if not (apart or is_none) and begin < taken:
            raise ValueError(
                f"groups must not overlap, but group {group} begins at row {begin}, and another "
                f"one ends at {taken}"
            )
        taken = max(taken, 0 if is_none else end)


def check_expert_ids(topk_ids: Tensor, num_experts: int, tokens: Tensor | None = None) -> None:
    """Raise ValueError if checks are on and an id is not within 0 to num_experts - 1.

    Args:
        topk_ids: integers ``[M, top_k]``.
        num_experts: experts that are routed to.
        tokens: int32 ``[1]``: tokens that count, the first ones; those of the others may be
            anything. None for all.
    """
    if not checking():
        return
    refuse_expert_ids(topk_ids if tokens is None else topk_ids[: max(int(tokens), 0)], num_experts)


def refuse_expert_ids(topk_ids: Tensor, num_experts: int) -> None:
    """Raise ValueError where an id is not within 0 to num_experts - 1; synchronises."""
    wrong = ((topk_ids < 0) | (topk_ids >= num_experts)).nonzero().tolist()
    if wrong:
        token, slot = wrong[0]
        raise ValueError(
            f"{len(wrong)} of {topk_ids.numel()} ids in topk_ids are not within 0 to "
            f"{num_experts - 1}; the first is topk_ids[{token}, {slot}] = "
            f"{int(topk_ids[token, slot])}"
        )


def check_expert_map(expert_map: Tensor | None, E: int) -> None:
    """Raise ValueError if checks are on and a number is not within -1 to E - 1, or is there twice.

    Args:
        expert_map: int32: each expert's number here, -1 for one that is not here; or None.
        E: experts whose weights are here.
    """
    if expert_map is None or not checking():
        return
    wrong = (expert_map < -1) | (expert_map >= E)
    if wrong.any():
        expert = int(wrong.nonzero()[0])
        raise ValueError(
            f"expert_map must be within -1 to {E - 1}, as weights of {E} experts are here; "
            f"expert_map[{expert}] is {int(expert_map[expert])}"
        )
    _refuse_twice(
        expert_map,
        "each number of expert_map must be one expert's, but expert_map[{first}] and "
        "expert_map[{again}] are both {value}",
        torch.arange(len(expert_map), device=expert_map.device),
    )


def refuse_other_blocks(ids: int, experts: int, routed: int, block_m: int) -> None:
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


def check_routing(
    problem: MoeGemmProblem, sorted_ids: Tensor, expert_ids: Tensor, post_padded: Tensor
) -> None:
    """Raise ValueError where the lists of a routing are not such as ``moe_gemm`` documents.

    That is where kernels would pass something over, or where results would depend on the kernel:
    blocks of an expert among those of others, and routed rows listed twice.
    """
    block_m, used = problem.block_m, int(post_padded[0])
    if used % block_m or not 0 <= used <= problem.blocks * block_m:
        raise ValueError(
            f"num_tokens_post_padded must be a multiple of block_m={block_m} up to "
            f"{problem.blocks * block_m}, got {used}"
        )
    experts = expert_ids[: used // block_m]
    wrong = (experts < -1) | (experts >= problem.E)
    if wrong.any():
        block = int(wrong.nonzero()[0])
        raise ValueError(
            f"expert_ids must be within -1 to {problem.E - 1}; expert_ids[{block}] is "
            f"{int(experts[block])}"
        )
    starts = torch.ones_like(experts, dtype=torch.bool)
    starts[1:] = experts[1:] != experts[:-1]
    firsts = starts.nonzero().flatten()
    _refuse_twice(
        experts[firsts],
        "the blocks of an expert must follow one another, but expert {value} has blocks from both "
        "expert_ids[{first}] and expert_ids[{again}] on, with others between",
        firsts,
    )
    ids = sorted_ids[:used]
    if problem.ids == "aiter":
        padding = packed_padding(problem.M, problem.top_k)
        token, slot = ids & 0xFFFFFF, (ids >> 24) & 0xFF
        wrong = (token >= problem.M) | (slot >= problem.top_k)
        rows = token * problem.top_k + slot
    else:
        padding = problem.routed
        wrong = (ids < 0) | (ids >= problem.routed)
        rows = ids
    listed = (~wrong).nonzero().flatten()
    wrong &= ids != padding
    if wrong.any():
        place = int(wrong.nonzero()[0])
        raise ValueError(
            f"{int(wrong.sum())} sorted ids are out of range for {problem.M} tokens and "
            f"top_k={problem.top_k}; the first is sorted_token_ids[{place}] = {int(ids[place])}"
        )
    _refuse_twice(
        rows[listed],
        "routed row {value} is listed twice, as sorted_token_ids[{first}] and "
        "sorted_token_ids[{again}]",
        listed,
    )


def _refuse_twice(values: Tensor, message: str, places: Tensor) -> None:
    """Raise ValueError if a value of 0 and more occurs twice.

    Args:
        values: integers.
        message: what to say, of ``value`` and of ``first`` and ``again``, two of its places.
        places: those of the values, in rising order.
    """
    order = values.argsort(stable=True)
    ordered = values[order]
    twice = ((ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)).nonzero().flatten()
    if len(twice):
        at = int(twice[0])
        first, again = int(places[order[at]]), int(places[order[at + 1]])
        raise ValueError(message.format(value=int(ordered[at]), first=first, again=again))
