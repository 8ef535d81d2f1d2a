"""The way from a quantisation to a launch: checks, outputs, and the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from aiter_mx.checks import (
    ALIGNMENT_BYTES,
    DTYPE_NAMES,
    check_groups,
    check_tensor,
    refuse_alignment,
    refuse_no_tensor,
    refuse_overlap,
)
from aiter_mx.codec import FORMATS, ROUNDING
from aiter_mx.fallbacks import quantize_torch
from aiter_mx.kernels.quantize import QuantizeProblem
from aiter_mx.launch import Run, Tensors, call
from aiter_mx.layouts import layout_of, padded_shape
from aiter_mx.numerics import BLOCK
from aiter_mx.plan import Plans, bind
from aiter_mx.registration import with_memory
from aiter_mx.target import cpu_target, target_of

MODES = tuple(ROUNDING)
INPUT_DTYPES = tuple(DTYPE_NAMES)

_OFFSET_NAMES = {torch.int32: "int32", torch.int64: "int64"}


class Options(NamedTuple):
    """What a call asks for beside its tensors; a tuple, as every call makes and hashes one.

    Attributes:
        to: ``rows``, ``columns`` or ``both``.
        mode: ``rceil``, ``floor`` or ``even``.
        square: blocks are 32x32.
        format: ``e4m3``, ``e2m1`` or ``e5m2``.
        layout: of the scales.
        padded: ``both``, or ``columns`` where groups are padded there alone.
    """

    to: str
    mode: str = "rceil"
    square: bool = False
    format: str = "e4m3"
    layout: str = "row_major"
    padded: str = "both"


@dataclass(frozen=True)
class Shapes:
    """Shapes of the outputs; None where there is none."""

    rows: tuple[int, ...] | None
    row_scales: tuple[int, ...] | None
    columns: tuple[int, ...] | None
    column_scales: tuple[int, ...] | None


def quantized(
    x: Tensor,
    offsets: Tensor | None,
    options: Options,
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
) -> list[Tensor]:
    """The outputs that ``options`` asks for, in the order of ``Shapes``, then padded offsets.

    The payload and the scales of one direction may be written to ``out`` and ``out_scale``.

    Raises:
        TypeError, ValueError: as the public functions document.
    """
    key = (
        (x.shape, x.dtype, x.device, options),
        offsets is not None and (offsets.shape, offsets.dtype, offsets.device),
        x.is_cuda or cpu_target(),
    )
    found = _plans.by_call.get(key)
    if found is None:
        found = _plans.keep(key, _plan(x, offsets, options))
    run, new_outputs, needs_pieces = found
    if x.is_neg() or not x.is_contiguous():
        x = x.resolve_neg().contiguous()
    address = x.data_ptr()
    if not address:
        x = with_memory(x)
    if needs_pieces and address % ALIGNMENT_BYTES:
        x = x.clone()
    outputs = [None if new is None else new() for new in new_outputs]
    if offsets is not None:
        offsets = offsets.contiguous()
        check_groups("group_offs", len(offsets) - 1, None, offsets, x.shape[0])
        outputs[-1] = torch.empty_like(offsets)
    if out is not None or out_scale is not None:
        first, taken = 0 if options.to == "rows" else 2, {"x": x}
        for at, name, given in ((first, "out", out), (first + 1, "out_scale", out_scale)):
            made = outputs[at]
            if given is not None and made is not None:
                refuse_no_tensor(**{name: given})
                dtypes, shape = (made.dtype,), tuple(made.shape)
                check_tensor(name, given, dtypes, shape, x.device)
                refuse_overlap(name, given, taken)
                taken[name] = given
                if needs_pieces:
                    refuse_alignment(**{name: given})
                outputs[at] = given
    call(run, x, offsets, *outputs)
    return [tensor for tensor in outputs if tensor is not None]


_Plan = tuple[Run, "list[Callable[[], Tensor] | None]", bool]
_plans: Plans[_Plan] = Plans()


def _plan(x: Tensor, offsets: Tensor | None, options: Options) -> _Plan:
    """What computes such a call, what makes its outputs, and whether x must be aligned."""
    problem, shapes = check(x, offsets, options)
    like = empty_outputs(x.new_empty(0, device="meta"), None, shapes, options)
    new_outputs: list[Callable[[], Tensor] | None] = [
        None
        if made is None
        else partial(  # in half of the time of torch.empty
            torch.empty_strided, made.shape, made.stride(), dtype=made.dtype, device=x.device
        )
        for made in like
    ]
    if problem.out_rows * problem.N * problem.matrices == 0:

        def run(tensors: Tensors, addresses: object) -> None:
            quantize_torch.run(problem, tensors, {})

        return run, new_outputs, False
    return bind("quantize", target_of(x.device), problem, x.device), new_outputs, True


def check(x: Tensor, offsets: Tensor | None, options: Options) -> tuple[QuantizeProblem, Shapes]:
    """The problem that these arguments pose, and the outputs' shapes."""
    for name, value, known in (
        ("mode", options.mode, MODES),
        ("format", options.format, tuple(FORMATS)),
    ):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    layout_of(options.layout, "scale_layout")
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(f"x must be bfloat16, float16 or float32, got {x.dtype}")
    shape = list(x.shape)
    if x.dim() == 0 or shape[-1] % BLOCK:
        raise ValueError(
            f"the last dimension of x must be a multiple of {BLOCK}, got x of shape {shape}"
        )
    across = options.to != "rows" or options.square
    if across and (x.dim() < 2 or (offsets is None and shape[-2] % BLOCK)):
        raise ValueError(
            f"the last but one dimension of x must be a multiple of {BLOCK} for blocks along it, "
            f"got x of shape {shape}"
        )
    if offsets is not None:
        _check_offsets(x, offsets)
    *leading, M, N = shape if x.dim() > 1 else [1, *shape]
    matrices = 1
    for size in leading:
        matrices *= size
    problem = QuantizeProblem(
        M=M,
        N=N,
        dtype=DTYPE_NAMES[x.dtype],
        to=options.to,
        matrices=matrices,
        groups=0 if offsets is None else offsets.shape[0] - 1,
        format=options.format,
        mode=options.mode,
        block="32x32" if options.square else "1x32",
        layout=options.layout,
        offsets="int64" if offsets is None else _OFFSET_NAMES[offsets.dtype],
        padded=options.padded,
    )
    return problem, _shapes(problem, leading, x.dim())


def _check_offsets(x: Tensor, offsets: Tensor) -> None:
    if x.dim() != 2:
        raise ValueError(f"x must have two dimensions, [rows, N], got {list(x.shape)}")
    if offsets.dtype not in _OFFSET_NAMES:
        raise TypeError(f"group_offs must be int32 or int64, got {offsets.dtype}")
    if offsets.dim() != 1 or offsets.shape[0] < 2:
        raise ValueError(
            "group_offs must be [groups + 1] with at least one group, got shape "
            f"{list(offsets.shape)}"
        )
    if offsets.device != x.device:
        raise ValueError(f"group_offs is on {offsets.device}, but x is on {x.device}")


def _shapes(problem: QuantizeProblem, leading: list[int], dimensions: int) -> Shapes:
    per_byte = FORMATS[problem.format].per_byte
    M, N = problem.out_rows, problem.N

    def of_matrix(rows: int, columns: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        payload = (*leading, rows, columns // per_byte)
        scales = (*leading, *padded_shape(rows, columns // BLOCK, problem.layout))
        if dimensions == 1:
            return payload[-1:], scales if problem.layout != "row_major" else scales[-1:]
        return payload, scales

    rows = of_matrix(problem.rows_along, N) if problem.to != "columns" else (None, None)
    columns = of_matrix(N, M) if problem.to != "rows" else (None, None)
    return Shapes(*rows, *columns)


def empty_outputs(
    x: Tensor, offsets: Tensor | None, shapes: Shapes, options: Options
) -> list[Tensor | None]:
    """Uninitialised outputs, in the order of a kernel's pointers."""
    dtype = FORMATS[options.format].dtype

    def empty(shape: tuple[int, ...] | None, of: torch.dtype) -> Tensor | None:
        return None if shape is None else x.new_empty(shape, dtype=of)

    return [
        empty(shapes.rows, dtype),
        empty(shapes.row_scales, torch.uint8),
        empty(shapes.columns, dtype),
        empty(shapes.column_scales, torch.uint8),
        None if offsets is None else torch.empty_like(offsets),
    ]
