"""A launch of a public kernel, traced in the simulator."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aiter_mx.region import Region
from aiter_mx.sim.program import Dim3, Program, SimOptions
from aiter_mx.sim.report import LaunchReport

Array = NDArray[np.generic]
_CHECKS = ("all", "-global-race", "-lanes-differ")  # their memory grows with the tensors


@dataclass(frozen=True)
class PublicLaunch:
    """One launch of a row's kernels.

    Attributes:
        image: the code object.
        symbol: the kernel; its only one when empty.
        arguments: its packed arguments.
        tensors: those that it points to; the launch keeps them alive.
        grid, block: workgroups and lanes.
        lds_bytes: dynamic LDS.
        group: the workgroup that is traced for all.
        launches_before: others of the same operation that only fill memory.
    """

    image: bytes
    symbol: str
    arguments: bytes
    tensors: Sequence[Array]
    grid: Dim3
    block: Dim3 = (256, 1, 1)
    lds_bytes: int = 0
    group: int = 0
    launches_before: int = 0

    @property
    def groups(self) -> int:
        """Workgroups."""
        return self.grid[0] * self.grid[1] * self.grid[2]


def packed(kernarg_bytes: int, slots: Sequence[Array | int | float]) -> bytes:
    """Arguments in slots of 16 bytes, as hand-written kernels take them."""
    segment = bytearray(kernarg_bytes)
    for i, slot in enumerate(slots[: -(-kernarg_bytes // 16)]):
        if isinstance(slot, np.ndarray):
            struct.pack_into("<Q", segment, 16 * i, slot.ctypes.data)
        elif slot:
            struct.pack_into("<f" if isinstance(slot, float) else "<I", segment, 16 * i, slot)
    return bytes(segment)


def traced(launch: PublicLaunch, program: Program) -> LaunchReport:
    """What the launch's sampled workgroup does."""
    symbol = launch.symbol or next(iter(program.code_object.kernels))
    regions = [
        Region(f"tensor {i}", tensor.ctypes.data, tensor.nbytes, "rw")
        for i, tensor in enumerate(launch.tensors)
    ]
    options = SimOptions(
        collect=True,
        schedule="round-robin",
        count_conflicts=True,
        trace=True,
        first_group=launch.group,
        group_count=1,
        max_steps=1 << 22,
        checks=_CHECKS,
    )
    return program.launch(
        symbol, launch.grid, launch.block, launch.arguments, launch.lds_bytes, regions, options
    )
