"""What the headers of safetensors files say, and whether MX-FP8 weights have their scales."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from operator import index
from pathlib import Path
from typing import Any

from aiter_mx.errors import AiterMxError
from aiter_mx.integrations.layers import SCALE, why_not
from aiter_mx.numerics import BLOCK

HEADER_LENGTH = 8
"""Bytes ahead of the header that say how long it is."""
OFFSETS = "data_offsets"
_BYTES = {"U8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F16": 2, "F32": 4, "F64": 8}
"""Bytes of an element, of the dtypes that matter here."""
_SCALE_DTYPE = "U8"  # transformers would convert the values of F8_E8M0, not its bytes


class CheckpointError(AiterMxError):
    """A checkpoint that cannot be read or converted, or a folder that cannot take the result."""


@dataclass(frozen=True)
class Stored:
    """A tensor of a safetensors file: dtype as the format names it, and where its bytes are."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> list[Stored]:
    """The tensors of a safetensors file, in the order of their bytes.

    Raises:
        CheckpointError: the file is damaged.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(HEADER_LENGTH), "little")
        if size < HEADER_LENGTH or HEADER_LENGTH + length > size:
            raise CheckpointError(f"{path} is cut off: its header would end behind its last byte")
        try:
            header = json.loads(file.read(length))
            found = [
                _stored(name, each, HEADER_LENGTH + length)
                for name, each in dict(header).items()
                if name != "__metadata__"
            ]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CheckpointError(f"{path} has no readable header: {error!r}") from error
    for stored in found:
        if stored.end > size:
            raise CheckpointError(
                f"{path} is cut off: {stored.name} would end at byte {stored.end} of {size}"
            )
    return sorted(found, key=lambda stored: stored.begin)


def _stored(name: str, told: Mapping[str, Any], first: int) -> Stored:
    """A tensor as a header tells of it; offsets are from byte ``first`` on.

    Raises:
        ValueError, TypeError, KeyError: the header cannot be right.
    """
    dtype, shape, (begin, end) = str(told["dtype"]), [*map(index, told["shape"])], told[OFFSETS]
    own = _BYTES.get(dtype, 0) * prod(shape)
    if not 0 <= begin <= end or min(shape, default=0) < 0 or (own and own != end - begin):
        raise ValueError(f"{name}, {dtype} {shape}, cannot be bytes {begin} to {end}")
    return Stored(name, dtype, tuple(shape), first + begin, first + end)


def refuse_misfits(files: Iterable[Path]) -> None:
    """Raise unless every e4m3 weight of a checkpoint has the scales that belong to it.

    Raises:
        CheckpointError: which tensor of which file is missing or is not what it must be.
    """
    found = {stored.name: (stored, path) for path in files for stored in read_header(path)}
    for weight, path in found.values():
        if weight.dtype != "F8_E4M3" or len(weight.shape) < 2:
            continue
        if reason := why_not("", weight.shape):
            raise CheckpointError(f"{path}: {weight.name} {list(weight.shape)}: {reason}")
        name = weight.name + SCALE
        if name not in found:
            raise CheckpointError(f"{path}: {weight.name} has no scales, {name}, in any file")
        scale, path = found[name]
        expected = (*weight.shape[:-1], weight.shape[-1] // BLOCK)
        if prod(scale.shape) != prod(expected) or scale.dtype != _SCALE_DTYPE:
            raise CheckpointError(
                f"{path}: {name} must be {_SCALE_DTYPE} {list(expected)}, as its "
                f"weight is {list(weight.shape)}, got {scale.dtype} {list(scale.shape)}"
            )
