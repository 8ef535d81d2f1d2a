"""Predicts Triton's time beside ours for rows of gfx950's tables, and counts where it is less.

    python -m tune.triton_beside [--ops linear,moe_gemm] [--every 13] [--save]

Triton's fallback is compiled for gfx950 without a GPU; all launches of a call count, in the fastest
of its tiles. Both sides are traced in one simulator and timed by one model. A row is decided under
the draws of the model's constants: ours is taken where it wins in four of five. Of so few rows as
to be read by bytes alone, times below all that anybody published are marked ``unmeasured``.
The result is docs/measured/gfx950_simulated/triton_beside.csv.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from math import prod
from pathlib import Path
from statistics import fmean
from unittest.mock import patch

import pandas as pd

from aiter_mx.cli.explain import describe_config
from aiter_mx.code_object import resident
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.dispatch.explain import make_problem
from aiter_mx.kernels.registry import field_value, find_kernel, problem_type
from aiter_mx.kernels.spec import Config, Problem
from aiter_mx.paths import configs_dir
from aiter_mx.plan import runner
from aiter_mx.region import Region
from aiter_mx.sim.program import Dim3, Program, SimOptions
from aiter_mx.sim.report import LaunchReport
from aiter_mx.sim.timing.constants import Constants, shipped
from aiter_mx.sim.timing.cu import SplitTrace
from aiter_mx.sim.timing.draws import drawn
from aiter_mx.sim.timing.fit import modelled_us
from aiter_mx.sim.timing.model import Traced
from aiter_mx.sim.timing.sample import ALIKE, UNLIKE, sample
from aiter_mx.sim.triton_driver import triton_launches
from aiter_mx.target import hardware
from aiter_mx.tuning.candidates import Candidate
from aiter_mx.tuning.modelled import ROUTINGS, ModelBench
from aiter_mx.tuning.table import write_csv
from aiter_mx.tuning.traces import TRACED
from aiter_mx.workloads import workload_of

SAVED = Path(__file__).parents[1] / "docs/measured/gfx950_simulated/triton_beside.csv"
OPS = ("linear", "moe_gemm")
GFX950 = hardware("gfx950")
FEW_ROWS = 64
_LARGE_BLOCK = 48  # rows; such blocks are filled to any share


def triton_launches_of(op: str, problem: Problem, config: Config, number: int = 0) -> list[Traced]:
    """The launches of Triton's fallback on a draw of indices, traced as they come."""
    spec = find_kernel(op, "gfx950", "triton", "dot_scaled")
    operands = workload_of(op).hollow(problem, number)
    # A part of K that is past its end has as many steps, and reads nothing in them.
    is_split = config.get("SPLIT_K", 1) > 1
    count = UNLIKE if is_split or getattr(problem, "block_m", 0) >= _LARGE_BLOCK else ALIKE
    launch, found = Program.launch, list[Traced]()

    def traced(
        program: Program,
        kernel: str,
        grid: Dim3,
        block: Dim3,
        kernarg: bytes,
        shared_bytes: int,
        regions: Sequence[Region],
        options: SimOptions | None,
    ) -> LaunchReport:
        told = kernel, grid, block, kernarg, shared_bytes, regions

        def of_group(number: int) -> LaunchReport:
            return launch(program, *told, replace(TRACED, first_group=number, group_count=1))

        taken = sample(of_group, prod(grid), count)
        held = resident(program.kernel(kernel), prod(block), shared_bytes)
        found.append(Traced(SplitTrace(taken.trace), taken.working, held))
        return LaunchReport(kernel, 0, 0.0)

    with patch.object(Program, "launch", traced), triton_launches():
        runner(spec)(problem, operands, config)
    return found


def row_of(op: str, problem: Problem) -> dict[str, object]:
    """What dispatch takes beside the fastest of Triton's tiles."""
    chosen = route(op, GFX950, problem)
    values = tuple(chosen.config.items())
    candidate = Candidate(op, "gfx950", chosen.backend, chosen.kernel, values)
    bench = ModelBench(op, problem)
    bench.admit(candidate)
    own_us = bench.sample_us(candidate)
    configs = find_kernel(op, "gfx950", "triton", "dot_scaled").candidates(GFX950, problem)
    draws = range(ROUTINGS if workload_of(op).indices is not None else 1)
    sides = [
        ([triton_launches_of(op, problem, config, number) for number in draws], config)
        for config in configs
    ]
    other, config = min(sides, key=lambda side: mean_us(side[0], shipped()))
    other_us = mean_us(other, shipped())
    wins = fmean(bench.replay_us(candidate, each) <= mean_us(other, each) for each in drawn())
    return {
        "op": op,
        **{name: getattr(problem, name, "") for name in COLUMNS},
        "kernel": f"{chosen.kernel} {describe_config(chosen.config)}",
        "triton": describe_config(config),
        "launches": len(other[0]),
        "ours_us": f"{own_us:.3f}",
        "triton_us": f"{other_us:.3f}",
        "times_as_fast": f"{other_us / own_us:.3f}",
        "wins_of_draws": f"{wins:.2f}",
        "unmeasured": int("unmeasured" in bench.source(candidate)),
    }


def mean_us(calls: Sequence[list[Traced]], constants: Constants) -> float:
    """Of calls, each of some launches."""
    return fmean(modelled_us(launches, constants) for launches in calls)


COLUMNS = ("M", "N", "K", "E", "num_experts", "top_k", "block_m", "activation")


def rows(ops: Sequence[str], every: int) -> Iterator[dict[str, object]]:
    """A row for each of so many lines of the shipped tables."""
    for op in ops:
        for problem in problems_of(op)[::every]:
            yield row_of(op, problem)


def problems_of(op: str) -> list[Problem]:
    """Those of the shipped table."""
    of_type = problem_type(op)
    known = {field.name for field in fields(of_type)}
    with (configs_dir() / "gfx950" / f"{op}.csv").open(newline="") as file:
        told = [{n: text for n, text in row.items() if n in known} for row in csv.DictReader(file)]
    return [
        make_problem(op, {n: field_value(of_type, n, text) for n, text in row.items()})
        for row in told
    ]


def summary(found: Sequence[Mapping[str, object]]) -> str:
    """How often Triton is faster, and by how much."""
    lines = []
    for op in dict.fromkeys(row["op"] for row in found):
        of_op = [row for row in found if row["op"] == op]
        few = [row for row in of_op if int(str(row["M"])) <= FEW_ROWS]
        lost = [row for row in few if float(str(row["times_as_fast"])) < 1]
        least = min(float(str(row["times_as_fast"])) for row in of_op)
        marks = sum(int(str(row["unmeasured"])) for row in of_op)
        lines.append(
            f"{op}: Triton is predicted to be faster in {len(lost)} of {len(few)} rows up to "
            f"M = {FEW_ROWS}; ours is at least {least:.2f} times as fast in {len(of_op)} rows; "
            f"{marks} are faster than anything published"
        )
    return "\n".join(lines)


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a saved table."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ops", default=",".join(OPS), help="with commas between")
    parser.add_argument("--every", type=int, default=13, help="of so many rows of a table, one")
    parser.add_argument("--save", action="store_true", help=f"write {SAVED.name}")
    options = parser.parse_args()
    ops = options.ops.split(",")
    found = []
    for row in rows(ops, options.every):
        print(*row.values(), flush=True)
        found.append({name: str(value) for name, value in row.items()})
    print(summary(found))
    if options.save:
        if SAVED.exists():  # ops that were not asked for stay as they are
            found = [*(row for row in rows_of(SAVED) if row["op"] not in ops), *found]
        write_csv(SAVED, pd.DataFrame(found))


if __name__ == "__main__":
    main()
