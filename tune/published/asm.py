"""AMD's hand-written products: code objects of aiter's public repository, by published name."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from pathlib import Path

import torch

from aiter_mx.region import Region
from aiter_mx.sim.program import Dim3, Program
from tune.published.rows import Row
from tune.published.run import Launch, PublishedRun

_FOLDERS = ("f4gemm", "fp8gemm_blockscale", "bf16gemm")
_BLOCK = (256, 1, 1)
Slots = Sequence[torch.Tensor | int | float]


class Objects:
    """The code objects of ``hsa/gfx950`` in a checkout of ROCm/aiter, each loaded once."""

    def __init__(self, aiter: Path) -> None:
        self._folder = aiter / "hsa" / "gfx950"
        self._known: dict[str, Program] = {}

    def program(self, kernel: str) -> Program:
        """The code object of a mangled kernel name.

        Raises:
            ValueError: there is none.
        """
        found = re.fullmatch(r"_ZN5aiter\d+(\w+)E", kernel)
        if not found:
            raise ValueError(f"not the name of a hand-written kernel: {kernel}")
        if kernel not in self._known:
            paths = [self._folder / folder / f"{found[1]}.co" for folder in _FOLDERS]
            path = next((path for path in paths if path.exists()), None)
            if path is None:
                raise ValueError(f"{found[1]}.co is in none of {', '.join(_FOLDERS)}")
            self._known[kernel] = Program.from_image(path.read_bytes())
        return self._known[kernel]

    def run(self, row: Row) -> PublishedRun:
        """The launch of a row; its operands' memory is zero, as only counts are of interest."""
        program = self.program(row.kernel)
        tile = re.search(r"_(\d+)x(\d+)", row.kernel)
        assert tile is not None
        slots, grid = _MAKERS[row.family](row, int(tile[1]), int(tile[2]))
        (kernel,) = program.code_object.kernels.values()
        tensors = [slot for slot in slots if isinstance(slot, torch.Tensor)]
        regions = [
            Region(f"tensor {i}", tensor.data_ptr(), tensor.nbytes, "rw")
            for i, tensor in enumerate(tensors)
        ]
        packed = _packed(kernel.kernarg_bytes, slots)
        launch = Launch(program, kernel.name, grid, _BLOCK, 0, packed)
        return PublishedRun([launch], regions, tensors)


def _packed(size: int, slots: Slots) -> bytes:
    """Arguments in slots of 16 bytes; kernels without split K take fewer."""
    segment = bytearray(size)
    for i, slot in enumerate(slots[: -(-size // 16)]):
        if isinstance(slot, torch.Tensor):
            struct.pack_into("<Q", segment, 16 * i, slot.data_ptr())
        elif slot:
            struct.pack_into("<f" if isinstance(slot, float) else "<I", segment, 16 * i, slot)
    return bytes(segment)


def _fp4(row: Row, tile_m: int, tile_n: int) -> tuple[Slots, Dim3]:
    M, N, K = row.M, row.N, row.K
    scales = [_zeros(_up(rows, 256), _up(K // 32, 8)) for rows in (M, N)]
    parts = -(-K // _up(K // 2**row.split_k, 256))
    slots = [_zeros(_up(M, 32), 2 * N), 0, _zeros(M, K // 2), _zeros(N, K // 2), 1.0, 0.0, 0, 0,
             N, 0, K, 0, K, 0, M, N, K, *scales, scales[0].shape[1], 0, scales[1].shape[1], 0,
             row.split_k]  # fmt: skip
    return slots, (-(-N // tile_n), -(-M // tile_m), parts)


def _block_scale(row: Row, tile_m: int, tile_n: int) -> tuple[Slots, Dim3]:
    M, N, K = row.M, row.N, row.K
    split = max(1, row.split_k)
    slots = [_zeros(M, 2 * N), _zeros(M, K), _zeros(N, K), _zeros(4 * (K // 128), M),
             _zeros(4 * (N // 128), K // 128), _zeros(4 * N), M, N, K, K, K, 2 * N, split, M,
             N // 128, K // 128]  # fmt: skip
    return slots, (N // tile_n * split, -(-M // tile_m), 1)


def _bf16(row: Row, tile_m: int, tile_n: int) -> tuple[Slots, Dim3]:
    M, N, K = row.M, row.N, row.K
    split = max(1, row.split_k)
    slots = [_zeros(M, 2 * N), 0, _zeros(M, 2 * K), _zeros(N, 2 * K), 1.0, 0.0, 2 * N, 0, 2 * N, 0,
             2 * K, 0, 2 * K, 0, M, N, K, split, 1, 0, 0, _zeros(16, 256)]  # fmt: skip
    return slots, (-(-N // tile_n), -(-M // tile_m), split)


_MAKERS = {"fp4_asm": _fp4, "block_scale_asm": _block_scale, "bf16": _bf16}


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def _up(count: int, step: int) -> int:
    return -(-count // step) * step
