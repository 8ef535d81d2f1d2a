"""A published kernel's launches over tensors of this process."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from aiter_mx.jit.toolchain import find_toolchain
from aiter_mx.region import Region
from aiter_mx.sim.program import Dim3, Program

_HEADERS = Path(__file__).with_name("hip_headers")


@dataclass(frozen=True)
class Launch:
    """One launch, as a runtime gets it.

    Attributes:
        program: the code object.
        kernel: its kernel's name.
        grid: workgroups.
        block: lanes of a workgroup.
        shared_bytes: of dynamic LDS.
        kernarg: the arguments, laid out as the kernel reads them.
    """

    program: Program
    kernel: str
    grid: Dim3
    block: Dim3
    shared_bytes: int
    kernarg: bytes


@dataclass(frozen=True)
class PublishedRun:
    """The launches of one published row, over tensors of this process.

    Attributes:
        launches: in their order.
        regions: what they may read and write.
        tensors: what these are, which must outlive the launches.
        check: raises AssertionError where the results are not those of the product.
    """

    launches: Sequence[Launch]
    regions: Sequence[Region]
    tensors: Sequence[torch.Tensor]
    check: Callable[[], None] = lambda: None


def regions_of(read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> list[Region]:
    return [
        Region(f"operand {at}", tensor.data_ptr(), tensor.nbytes, access)
        for at, (tensor, access) in enumerate(
            [*((each, "r") for each in read), *((each, "rw") for each in written)]
        )
    ]


def compile_gfx950(source: Path, image: Path, *include: Path) -> None:
    """The code object of a published source, over our stand-in for HIP's headers."""
    subprocess.run(
        [str(find_toolchain("gfx950").compiler), "-x", "hip", "--offload-arch=gfx950",
         "--cuda-device-only", "-nogpuinc", "-nogpulib", "--no-gpu-bundle-output", "-std=c++17",
         "-O3", "-w", *(f"-I{each}" for each in (_HEADERS, *include)), str(source),
         "-o", str(image)],
        check=True,
    )  # fmt: skip


def packed(pointers: Sequence[torch.Tensor | None], *numbers: int) -> bytes:
    """Arguments of a kernel that takes pointers, then 32-bit numbers."""
    return struct.pack(
        f"{len(pointers)}Q{len(numbers)}i",
        *(0 if each is None else each.data_ptr() for each in pointers),
        *numbers,
    )
