"""A published kernel's launches over tensors of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from aiter_mx.region import Region
from aiter_mx.sim.program import Dim3, Program


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
