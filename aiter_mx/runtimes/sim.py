"""The simulated gfx950, behind the interface of a runtime."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from aiter_mx.kernels.spec import Geometry
from aiter_mx.runtimes.base import PackedArgs
from aiter_mx.sim.program import Program
from aiter_mx.sim.report import LaunchReport

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
