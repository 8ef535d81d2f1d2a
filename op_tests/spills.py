"""What compilers make of kernels for gfx950: all of it in registers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from aiter_mx.code_object import KernelInfo, parse_code_object
from aiter_mx.jit.build import BuildRequest, build_all


def kernels_without_spills(
    requests: Iterable[BuildRequest], accumulators: bool = False
) -> Iterator[tuple[BuildRequest, KernelInfo]]:
    """What is built, once it is seen that it neither spills nor has scratch.

    Args:
        requests: what to build.
        accumulators: whether there may be accumulation registers, in which compilers spill too.
    """
    listed = list(requests)
    for request, built in zip(listed, build_all(listed), strict=True):
        for kernel in parse_code_object(built.image).kernels.values():
            spilled = (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes)
            assert spilled == (0, 0, 0), f"{request}: {kernel}"
            assert accumulators or kernel.agprs == 0, f"{request}: {kernel}"
            yield request, kernel


def assert_no_spills(requests: Iterable[BuildRequest], accumulators: bool = False) -> None:
    """Builds them all and looks at each; arguments as above."""
    assert list(kernels_without_spills(requests, accumulators))
