"""The simulated gfx950, behind the interface of a runtime."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from aiter_mx.kernels.spec import Geometry
from aiter_mx.runtimes.base import PackedArgs
from aiter_mx.sim.program import Program
from aiter_mx.sim.report import LaunchReport
from aiter_mx.target import Target
from aiter_mx.target import simulate as simulate_ops

name = "sim"

_last = threading.local()


@dataclass(frozen=True)
class SimFunction:
    """A kernel of a loaded code object."""

    program: Program
    symbol: str


def last_report() -> LaunchReport | None:
    """What the last simulated launch of this thread did; None before the first."""
    return getattr(_last, "report", None)


@contextmanager
def simulate(arch: str = "gfx950") -> Iterator[Target]:
    """Run ops on CPU tensors through the simulator, in this thread, inside the ``with`` block.

    Where Triton has been imported before, launches of ``@triton.jit`` kernels on CPU tensors run
    there too (of the whole process, as Triton has one driver). The environment variable
    ``AITER_MX_SIMULATE=gfx950`` asks for the ops' part everywhere.

    Args:
        arch: ``"gfx950"``.

    Yields:
        The simulated GPU, as ``explain`` and tests take it.

    Raises:
        ValueError: the simulator has no such architecture.
    """

    def remember(report: LaunchReport) -> None:
        _last.report = report

    with ExitStack() as stack:
        target = stack.enter_context(simulate_ops(arch))
        if "triton" in sys.modules:
            from aiter_mx.sim.triton_driver import triton_launches

            stack.enter_context(triton_launches(remember))
        yield target


def current_stream(device: int) -> int:
    """The simulator has one stream; launches return when the kernel has ended."""
    return 0


def is_capturing(device: int) -> bool:
    """Nothing can be captured."""
    return False


def load(image: bytes, device: int) -> Program:
    """Load a code object; every device number means the one simulated GPU.

    Raises:
        LaunchError: it is not a gfx950 code object.
    """
    return Program.from_image(image)


def get_function(module: Program, symbol: str, shared_bytes: int) -> SimFunction:
    """The kernel named ``symbol``. Raises LaunchError when there is none."""
    module.kernel(symbol)
    return SimFunction(module, symbol)


def bind(function: SimFunction, geometry: Geometry, args: PackedArgs) -> Callable[[int], None]:
    """A launcher; what it runs may touch ``args.regions`` and nothing else."""

    def start(stream: int) -> None:
        _last.report = function.program.launch(
            function.symbol,
            geometry.grid,
            geometry.block,
            args.to_bytes(),
            geometry.shared_bytes,
            args.regions,
        )

    return start
