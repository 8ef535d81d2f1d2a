"""Runs gfx950 kernels on the CPU, through the simulator."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from aiter_mx.kernels.spec import Geometry
from aiter_mx.runtimes.base import PackedArgs
from aiter_mx.sim.program import Program
from aiter_mx.sim.report import LaunchReport


@dataclass(frozen=True)
class SimFunction:
    """A kernel of a loaded code object, with its dynamic LDS."""

    program: Program
    symbol: str
    shared_bytes: int


_last = threading.local()


def last_report() -> LaunchReport | None:
    """What the last simulated launch of this thread did; None before the first."""
    return getattr(_last, "report", None)


class SimRuntime:
    """The ``Runtime`` of the simulated gfx950. Launches return when the kernel has ended."""

    name = "sim"

    def load(self, image: bytes, device: int) -> Program:
        """Load a code object; every device number means the one simulated GPU.

        Raises:
            LaunchError: it is not a gfx950 code object.
        """
        return Program.from_image(image)

    def get_function(self, module: Program, symbol: str, shared_bytes: int) -> SimFunction:
        """The kernel named ``symbol``. Raises LaunchError when there is none."""
        module.kernel(symbol)
        return SimFunction(module, symbol, shared_bytes)

    def bind(
        self, function: SimFunction, geometry: Geometry, args: PackedArgs
    ) -> Callable[[int], None]:
        """A launcher: what it runs may touch ``args.regions`` and nothing else."""

        def launch(stream: int) -> None:
            _last.report = function.program.launch(
                function.symbol,
                geometry.grid,
                geometry.block,
                args.to_bytes(),
                max(geometry.shared_bytes, function.shared_bytes),
                args.regions,
            )

        return launch

    def current_stream(self, device: int) -> int:
        """The simulator has one stream."""
        return 0

    def is_capturing(self, device: int) -> bool:
        """Nothing can be captured."""
        return False
