"""AMD's hand-written products: code objects of aiter's public repository, by published name."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from tune.published.launches import Array, PublicLaunch, packed
from tune.published.rows import Row

from aiter_mx.sim.program import Program

_FOLDERS = ("f4gemm", "fp8gemm_blockscale", "bf16gemm")


class NotRunnable(Exception):
    """The row's kernel cannot be had or launched; the message says why."""


def image_of(folder: Path, name: str) -> bytes:
    """A code object of ``hsa/gfx950`` by the mangled name of its kernel."""
    found = re.match(r"_ZN5aiter\d+(\w+)E$", name)
    if not found:
        raise NotRunnable(f"not a name of a hand-written kernel: {name}")
    for part in _FOLDERS:
        path = folder / part / f"{found[1]}.co"
        if path.exists():
            return path.read_bytes()
    raise NotRunnable(f"{found[1]}.co is in none of {', '.join(_FOLDERS)}")


def launches(row: Row, folder: Path, programs: dict[bytes, Program]) -> list[PublicLaunch]:
    """The launches that the row's time is of."""
    image = image_of(folder, row.kernel)
    tile = re.search(r"_(\d+)x(\d+)", row.kernel)
    assert tile
    make = {"fp4_asm": _f4gemm, "block_scale_asm": _block_scale, "bf16": _bf16}[row.family]
    program = programs.setdefault(image, Program.from_image(image))
    (kernel,) = program.code_object.kernels.values()
    slots, grid, zeroed = make(row, int(tile[1]), int(tile[2]))
    tensors = [slot for slot in slots if isinstance(slot, np.ndarray)]
    groups = grid[0] * grid[1] * grid[2]
    return [
        PublicLaunch(
            image, kernel.name, packed(kernel.kernarg_bytes, slots), tensors, grid,
            group=groups // 2 if grid[2] == 1 else 0, launches_before=zeroed,
        )
    ]  # fmt: skip


Slots = list["Array | int | float"]


def _f4gemm(row: Row, tile_m: int, tile_n: int) -> tuple[Slots, tuple[int, int, int], int]:
    M, N, K = row.M, row.N, row.K
    out = np.zeros((_up(M, 32), N), np.uint16)
    a, b = np.zeros((M, K // 2), np.uint8), np.zeros((N, K // 2), np.uint8)
    scales = [np.full((_up(rows, 256), _up(K // 32, 8)), 127, np.uint8) for rows in (M, N)]
    parts = -(-K // _up(K // 2**row.split_k, 256))
    slots: Slots = [out, 0, a, b, 1.0, 0.0, 0, 0, N, 0, K, 0, K, 0, M, N, K, *scales,
                    scales[0].shape[1], 0, scales[1].shape[1], 0, row.split_k]  # fmt: skip
    return slots, (-(-N // tile_n), -(-M // tile_m), parts), int(row.split_k > 0)


def _block_scale(row: Row, tile_m: int, tile_n: int) -> tuple[Slots, tuple[int, int, int], int]:
    M, N, K = row.M, row.N, row.K
    out = np.zeros((M, N), np.uint16)
    x, w = np.zeros((M, K), np.uint8), np.zeros((N, K), np.uint8)
    xs, ws = np.ones((K // 128, M), np.float32), np.ones((N // 128, K // 128), np.float32)
    bias, split = np.zeros(N, np.float32), max(1, row.split_k)
    slots: Slots = [out, x, w, xs, ws, bias, M, N, K, K, K, 2 * N, split, M, N // 128,
                    K // 128]  # fmt: skip
    return slots, (N // tile_n * split, -(-M // tile_m), 1), int(split > 1)


def _bf16(row: Row, tile_m: int, tile_n: int) -> tuple[Slots, tuple[int, int, int], int]:
    M, N, K = row.M, row.N, row.K
    out, semaphore = np.zeros((M, N), np.uint16), np.zeros((16, 64), np.uint32)
    a, b = np.zeros((M, K), np.uint16), np.zeros((N, K), np.uint16)
    split = max(1, row.split_k)
    slots: Slots = [out, 0, a, b, 1.0, 0.0, 2 * N, 0, 2 * N, 0, 2 * K, 0, 2 * K, 0, M, N, K, split,
                    1, 0, 0, semaphore]  # fmt: skip
    return slots, (-(-N // tile_n), -(-M // tile_m), split), 0


def _up(count: int, step: int) -> int:
    return -(-count // step) * step
