"""``aiter-mx demo``: real weights and real sentences through the kernels."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from aiter_mx.cli.screen import make_console


def demo(
    simulate: Annotated[bool, typer.Option(help="Use the simulator even with a GPU.")] = False,
) -> None:
    """Run a real model, and shapes of a large one, in MX-FP8.

    Both are checked. They run on this machine's GPU, and without a supported one on the simulated
    gfx950.
    """
    console = make_console()
    started = time.perf_counter()
    from aiter_mx.cli.demo_story import run_demo

    passed = run_demo(console, on_simulator=simulate)
    console.print()
    verdict = "passed" if passed else "FAILED"
    console.print(f"demo {verdict} in {time.perf_counter() - started:.0f} s", style="bold")
    sys.exit(not passed)
