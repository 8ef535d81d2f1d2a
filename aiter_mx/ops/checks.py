"""What ops check of their arguments, and how they say what was wrong."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from aiter_mx.numerics import BLOCK as BLOCK
from aiter_mx.numerics import DTYPE_NAMES as DTYPE_NAMES
from aiter_mx.numerics import DTYPES as DTYPES
from aiter_mx.numerics import INDEX_NAMES as INDEX_NAMES
from aiter_mx.numerics import INDICES as INDICES
from aiter_mx.numerics import SCALE_DTYPES as SCALE_DTYPES

ALIGNMENT_BYTES = 16
"""Kernels load payloads in pieces of this size."""
SCALE_ALIGNMENT_BYTES = 4
"""Kernels of the MoE's GEMM load scales in pieces of this size."""
STORED_FEATURES = 4
"""They store as many features at once."""


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
    first, last = out.data_ptr(), out.data_ptr() + out.nbytes
    for name, tensor in inputs.items():
        if (
            tensor is not None
            and first < tensor.data_ptr() + tensor.nbytes
            and tensor.data_ptr() < last
        ):
            raise ValueError(f"out overlaps {name}; give it memory of its own")


def check_result(out: object, out_dtype: torch.dtype) -> None:
    """Raise TypeError unless ``out`` is a tensor of this dtype, which ops with ``out`` go by."""
    refuse_no_tensor(out=out)
    assert isinstance(out, torch.Tensor)
    if out.dtype != out_dtype:
        raise TypeError(f"out must be of out_dtype {out_dtype}, got {out.dtype}")


def refuse_shape(out: torch.Tensor, shape: Sequence[int]) -> None:
    """Raise ValueError unless ``out`` has the shape of its result."""
    if tuple(out.shape) != tuple(shape):
        raise ValueError(f"out must be {list(shape)}, got {shape_text(out)}")


def refuse_strides(**tensors: torch.Tensor | None) -> None:
    """Raise for the first of these that is not contiguous."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous, got strides {tensor.stride()} for "
                f"{shape_text(tensor)}; call {name}.contiguous()"
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
