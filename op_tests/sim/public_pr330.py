"""Primus-Turbo's grouped MX-FP8 kernels in the simulator: are the faults that they have found?

    python -m op_tests.sim.public_pr330 CHECKOUT WORK

The checkout is of the branch of its pull request 330; the kernels are compiled into the folder
WORK and are no part of this project. Each kernel must break the rules that stand for it in
``public_findings.csv``, and no other of class proven.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from aiter_mx.sim.program import SimOptions
from op_tests.sim.public import known_rules
from tune.published.pr330 import Pr330
from tune.published.run import PublishedRun

_ROWS = [256, 256]


def broken(run: PublishedRun) -> Iterator[tuple[str, set[str]]]:
    """Each launch's kernel, and the proven rules that it breaks under either schedule."""
    for launch in run.launches:
        rules = set()
        for schedule in ("round-robin", "random"):
            report = launch.program.launch(
                launch.kernel, launch.grid, launch.block, launch.kernarg, launch.shared_bytes,
                run.regions, SimOptions(collect=True, schedule=schedule, seed=1),
            )  # fmt: skip
            rules |= {found.check for found in report.findings if found.kind == "proven"}
        yield launch.kernel, rules


def main() -> int:
    """Run the command line; 1 where a fault is new, or is no longer found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("work", type=Path)
    options = parser.parse_args()
    kernels = Pr330(options.checkout, options.work)
    wrong = 0
    for run in (kernels.product(_ROWS, 256, 512), kernels.wgrad(_ROWS, 256, 256)):
        for kernel, rules in broken(run):
            print(f"{kernel}: {', '.join(sorted(rules)) or 'nothing'}", flush=True)
            wrong += rules != set(known_rules(kernel))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
