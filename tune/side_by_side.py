"""Counts and models our decode kernels beside the published ones of aiter's pull request 3783.

    python -m tune.side_by_side --checkout FOLDER --work FOLDER

The checkout is of the branch (``refs/pull/3783/head`` of ROCm/aiter), whose own table says which of
its kernels it takes. Both sides run whole in one simulator, all launches of a call; the result is
docs/measured/gfx950_simulated/side_by_side.csv.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from aiter_mx.cli.explain import describe_config
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.sim.report import LaunchReport
from aiter_mx.sim.timing.floor import floor
from aiter_mx.sim.timing.model import Traced, predict, traced
from aiter_mx.target import hardware
from aiter_mx.trial import prepare
from aiter_mx.tuning.table import write_csv
from aiter_mx.tuning.traces import TRACED
from tune.published.pr3783 import Pr3783
from tune.published.run import Launch, PublishedRun

SAVED = Path(__file__).parents[1] / "docs" / "measured" / "gfx950_simulated" / "side_by_side.csv"
SHAPES = (
    *((2304, 6144), (6144, 2048), (1536, 6144), (6144, 1536), (1152, 6144)),
    *((768, 6144), (6144, 1024), (6144, 768), (9216, 6144), (6144, 6144)),
    *((6144, 8192), (4608, 6144), (3072, 6144), (6144, 4096), (6144, 3072)),
)
"""All that the pull request's table names."""
ROWS = (1, 2, 4, 8, 16, 32, 64)
PUBLISHED_US = {  # of an MI355X, by the pull request's description: N, K, M
    (2304, 6144, 1): 7.20,
    (2304, 6144, 64): 21.97,
    (1536, 6144, 1): 7.82,
    (6144, 2048, 1): 7.65,
}
_OPTIONS = replace(TRACED, collect=True)

Side = tuple[str, list[tuple[LaunchReport, Traced]]]
"""What computes a shape, and its launches."""


def ours(M: int, N: int, K: int) -> Side:
    """What dispatch takes."""
    problem = LinearProblem(M, N, K)
    chosen = route("linear", hardware("gfx950"), problem)
    launch = prepare(chosen.spec, problem, chosen.config)
    report = launch.run(_OPTIONS)
    return f"{chosen.kernel} {describe_config(chosen.config)}", [(report, launch.traced(report))]


def theirs(published: Pr3783, entry: dict[str, str]) -> Side:
    """What the pull request's table takes."""
    M, N, K = (int(entry[name]) for name in ("M", "N", "K"))
    if entry["kernel"] == "gemv":
        run, name = published.gemv(M, N, K, seed=0), "gemv"
    else:
        n_sub, k_splits = int(entry["n_sub"]), int(entry["k_splits"])
        run = published.mfma(M, N, K, n_sub, k_splits, seed=0)
        name = f"mfma n_sub={n_sub} k_splits={k_splits}"
    found = [_run(run, launch) for launch in run.launches]
    run.check()
    return name, found


def _run(run: PublishedRun, launch: Launch) -> tuple[LaunchReport, Traced]:
    shape = launch.grid, launch.block, launch.kernarg, launch.shared_bytes
    report = launch.program.launch(launch.kernel, *shape, run.regions, _OPTIONS)
    groups = launch.grid[0] * launch.grid[1] * launch.grid[2]
    kernel = launch.program.kernel(launch.kernel)
    return report, traced(report, kernel, groups, launch.block[0], launch.shared_bytes)


def line(shape: Sequence[int], whose: str, side: Side, us: float | None) -> dict[str, object]:
    """A row of the table."""
    kernel, launches = side
    counts = [report.by_class for report, _ in launches]
    return {
        **dict(zip(("M", "N", "K"), shape, strict=True)),
        "whose": whose,
        "kernel": kernel,
        "launches": len(launches),
        **{f"{name}_thousand": f"{sum(of.get(name, 0) for of in counts) / 1e3:.0f}"
           for name in ("valu", "mfma", "vmem")},
        "read_mb": f"{sum(report.bytes_read for report, _ in launches) / 1e6:.1f}",
        "waits": f"{sum(report.latencies / model.groups for report, model in launches):.1f}",
        "sums_us": f"{sum(floor(model).us for _, model in launches):.2f}",
        "predicted_us": f"{sum(predict(model).us for _, model in launches):.2f}",
        "published_us": us or "",
    }  # fmt: skip


def lines(checkout: Path, work: Path) -> Iterator[dict[str, object]]:
    """Both sides of each shape that the pull request's table names."""
    table = checkout / "aiter" / "configs" / "smallm_mxfp8_tuned.csv"
    published = Pr3783(checkout, work)
    with table.open(newline="") as file:
        entries = {(int(e["M"]), int(e["N"]), int(e["K"])): e for e in csv.DictReader(file)}
    for N, K in SHAPES:
        for M in ROWS:
            shape = (M, N, K)
            yield line(shape, "ours", ours(*shape), None)
            us = PUBLISHED_US.get((N, K, M))
            yield line(shape, "published", theirs(published, entries[shape]), us)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--checkout", type=Path, required=True, help="of the pull request's branch")
    parser.add_argument("--work", type=Path, required=True, help="for what is compiled on the way")
    options = parser.parse_args()
    found = []
    for row in lines(options.checkout, options.work):
        print(*row.values(), flush=True)
        found.append(row)
    write_csv(SAVED, pd.DataFrame(found, dtype=object))


if __name__ == "__main__":
    main()
