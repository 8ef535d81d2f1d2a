"""The memory that a launch sees: the loaded code object, kernel arguments, and the regions."""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Sequence

from aiter_mx.code_object import CodeObject, KernelInfo
from aiter_mx.errors import LaunchError
from aiter_mx.region import Region

_RELATIVE64, _ABS64, _NONE = 13, 3, 0
_WRITABLE_SECTIONS = (".data", ".bss")
_PACKET_BYTES = 64


class LoadedImage:
    """A code object's sections in host memory, so that code can read its constants."""

    def __init__(self, code_object: CodeObject) -> None:
        end = max((s.address + len(s.data) for s in code_object.segments), default=0)
        self._memory = ctypes.create_string_buffer(end + 16)
        self.base = ctypes.addressof(self._memory)
        for segment in code_object.segments:
            ctypes.memmove(self.base + segment.address, segment.data, len(segment.data))
        for relocation in code_object.relocations:
            if relocation.kind == _NONE:
                continue
            if relocation.kind not in (_RELATIVE64, _ABS64):
                raise LaunchError(f"relocation type {relocation.kind} is not simulated")
            symbol = relocation.symbol if relocation.kind == _ABS64 else 0
            value = self.base + symbol + relocation.addend
            struct.pack_into("<Q", self._memory, relocation.address, value)
        self.regions = tuple(
            Region(
                f"section {s.name}",
                self.base + s.address,
                len(s.data),
                "rw" if s.name.startswith(_WRITABLE_SECTIONS) else "r",
            )
            for s in code_object.segments
        )


def kernel_arguments(
    kernel: KernelInfo,
    given: bytes,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared_bytes: int,
) -> bytes:
    """The kernel-argument segment: what the caller gave, and the hidden arguments after it.

    Raises:
        LaunchError: the caller's buffer does not hold the kernel's own arguments.
    """
    visible = [arg for arg in kernel.args if not arg.value_kind.startswith("hidden_")]
    needed = max((arg.offset + arg.size for arg in visible), default=0)
    if len(given) < needed:
        raise LaunchError(
            f"kernel {kernel.name} takes {needed} bytes of arguments, got {len(given)}"
        )
    data = bytearray(max(kernel.kernarg_bytes, len(given)))
    data[: len(given)] = given
    values = {"hidden_dynamic_lds_size": shared_bytes, "hidden_grid_dims": _dimensions(grid, block)}
    for i, axis in enumerate("xyz"):
        values[f"hidden_block_count_{axis}"] = grid[i]
        values[f"hidden_group_size_{axis}"] = block[i]
    for arg in kernel.args:
        if arg.value_kind.startswith("hidden_") and arg.offset >= needed:
            value = values.get(arg.value_kind, 0)
            data[arg.offset : arg.offset + arg.size] = value.to_bytes(arg.size, "little")
    return bytes(data)


def _dimensions(grid: tuple[int, int, int], block: tuple[int, int, int]) -> int:
    return max(i + 1 for i in range(3) if i == 0 or grid[i] * block[i] > 1)


def dispatch_packet(
    kernel: KernelInfo,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    lds_bytes: int,
    kernarg: int,
) -> bytes:
    """The AQL packet that a kernel may read sizes from."""
    sizes = [g * b for g, b in zip(grid, block, strict=True)]
    packet = struct.pack(
        "<HHHHHHIIIIIQQ",
        0,
        _dimensions(grid, block),
        *block,
        0,
        *sizes,
        kernel.scratch_bytes,
        lds_bytes,
        0,
        kernarg,
    )
    return packet.ljust(_PACKET_BYTES, b"\0")


def disjoint(regions: Sequence[Region]) -> list[tuple[int, int, bool, bool]]:
    """The regions as sorted pieces that do not overlap: begin, end, readable, writable.

    Where regions overlap (a view and its base), what either allows is allowed.
    """
    edges = sorted({e for r in regions for e in (r.address, r.address + r.size_bytes)})
    ordered = sorted((r for r in regions if r.size_bytes), key=lambda r: r.address)
    pieces: list[tuple[int, int, bool, bool]] = []
    for begin, end in itertools.pairwise(edges):
        over = [r for r in ordered if r.address <= begin and end <= r.address + r.size_bytes]
        if not over:
            continue
        readable = any("r" in r.access for r in over)
        writable = any("w" in r.access for r in over)
        if pieces and pieces[-1][1:] == (begin, readable, writable) and len(over) > 1:
            pieces[-1] = (pieces[-1][0], end, readable, writable)
        else:
            pieces.append((begin, end, readable, writable))
    return pieces
