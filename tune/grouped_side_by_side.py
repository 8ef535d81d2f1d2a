"""Models our grouped GEMMs beside those of Primus-Turbo's pull request 330.

    python -m tune.grouped_side_by_side [--checkout FOLDER --work FOLDER] [--save]

Both sides of the pull request's balanced cells are traced in one simulator; scales are row-major,
and the launch that shuffles them for the pull request's kernels counts. Traces of most of its
forward products and of one of each gradient are among those that judge the model (judges.xz), of
one workgroup a launch; the other cells are run where there is a checkout of its branch
(``refs/pull/330/head`` of AMD-AGI/Primus-Turbo), six workgroups of each launch. Uneven groups are
ours alone, beside our own time of even ones. The result is
docs/measured/gfx950_simulated/grouped_side_by_side.csv.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pandas as pd
import torch

from aiter_mx.cli.explain import describe_config
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from aiter_mx.kernels.grouped_wgrad.problem import START_COLUMNS, GroupedWgradProblem
from aiter_mx.sim.timing.constants import shipped
from aiter_mx.sim.timing.cu import SplitTrace
from aiter_mx.sim.timing.draws import drawn
from aiter_mx.sim.timing.fit import modelled_us
from aiter_mx.sim.timing.model import Traced
from aiter_mx.target import hardware
from aiter_mx.trial import Prepared, prepare
from aiter_mx.tuning.table import write_csv
from aiter_mx.tuning.traces import held_by_unit, sampled
from aiter_mx.workloads import workload_of
from op_tests.bench.grouped import group_ends
from tune.published.judges import FOLDER, GROUPED
from tune.published.pr330 import Pr330
from tune.published.sample import samples
from tune.published.saved import load

SAVED = Path(__file__).parents[1] / "docs/measured/gfx950_simulated/grouped_side_by_side.csv"
LAYERS = ((4096, 7168), (7168, 2048), (3072, 5120), (5120, 1536), (8192, 4096), (4096, 4096),
          (4096, 2048), (2048, 2048))  # fmt: skip
"""N and K of expert layers in the pull request's benchmark whose K is in whole steps."""
GROUPS_ROWS = ((16, 2048), (16, 4096), (32, 2048), (32, 4096))
PASSES = ("forward", "dgrad", "wgrad")
UNEVEN = ("mild", "extreme")
UNEVEN_LAYERS, UNEVEN_GROUPS_ROWS = LAYERS[:1], GROUPS_ROWS[:1]
_SAMPLES = {"balanced": 1, "mild": 2, "extreme": 3}
JUDGES = FOLDER / "judges.xz"
COLUMNS = ("what", "mode", "groups", "rows", "N", "K", "kernel", "ours_us", "published_us",
           "times_as_fast", "wins_of_draws", "share_of_even")  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A product of groups: which pass of training, how rows fall to groups, and the sizes."""

    what: str
    mode: str
    groups: int
    rows: int
    N: int
    K: int

    def sizes(self) -> list[int]:
        """Rows of each group; those of gradients of weights begin at whole steps."""
        ends = group_ends(self.mode, self.groups, self.rows)
        if self.what == "wgrad":
            ends = [end // START_COLUMNS * START_COLUMNS for end in ends]
        return [end - start for start, end in pairwise([0, *ends])]


def cells() -> Iterator[Cell]:
    """The pull request's cells, then uneven groups of some of them."""
    for what in PASSES:
        for groups, rows in GROUPS_ROWS:
            for N, K in LAYERS:
                yield Cell(what, "balanced", groups, rows, N, K)
    for mode in UNEVEN:
        for what in PASSES:
            for groups, rows in UNEVEN_GROUPS_ROWS:
                for N, K in UNEVEN_LAYERS:
                    yield Cell(what, mode, groups, rows, N, K)


def launch_of(cell: Cell) -> tuple[Prepared, str]:
    """What dispatch takes, and its configuration in words."""
    sizes = cell.sizes()
    ends = torch.tensor([0, *sizes]).cumsum(0)
    if cell.what == "wgrad":
        op = "grouped_wgrad"
        problem = GroupedWgradProblem(int(ends[-1]), cell.N, cell.K, cell.groups, index="i64")
        bounds = (ends[:-1].clone(), ends[1:] - ends[:-1])
    else:
        op = "grouped_gemm"
        N, K = (cell.N, cell.K) if cell.what == "forward" else (cell.K, cell.N)
        problem = GroupedGemmProblem(int(ends[-1]), N, K, cell.groups, index="i64")
        bounds = (ends[:-1].clone(), ends[1:].clone())
    chosen = route(op, hardware("gfx950"), problem)
    operands = [*workload_of(op).hollow(problem)[:6], *bounds]
    launch = prepare(chosen.spec, problem, chosen.config, operands=operands)
    return launch, f"{chosen.kernel} {describe_config(chosen.config)}"


def ours(cell: Cell) -> tuple[list[Traced], str]:
    """Our launch of a cell, traced, and what it is."""
    launch, words = launch_of(cell)

    found = sampled(launch, _SAMPLES[cell.mode], launch.groups)
    return [Traced(SplitTrace(found.trace), launch.groups, held_by_unit(launch))], words


def theirs(published: Pr330, cell: Cell) -> list[Traced]:
    """The pull request's launches of a cell, traced."""
    if cell.what == "wgrad":
        run = published.wgrad(cell.sizes(), cell.N, cell.K)
    else:
        N, K = (cell.N, cell.K) if cell.what == "forward" else (cell.K, cell.N)
        run = published.product(cell.sizes(), N, K)
    # Workgroups all over the launch, as for an expert layer: some take more tiles than others.
    found = samples(run, True, 0, 0)
    return [Traced(SplitTrace(each.trace), each.groups, each.resident) for each in found]


def saved() -> dict[Cell, list[Traced]]:
    """The same of cells whose traces are kept, with caches that are cold, as for ours."""
    return {
        Cell(row.kernel, "balanced", row.experts, row.M, row.N, row.K): [
            Traced(each.split, each.groups, each.resident) for each in launches
        ]
        for row, launches in load(JUDGES)
        if row.family == GROUPED
    }


def line(
    cell: Cell, own: list[Traced], words: str, other: list[Traced] | None, even_us: float | None
) -> dict[str, object]:
    """A row of the table.

    Args:
        cell: what is computed.
        own: our launch, which is ``words``.
        other: the pull request's launches, where they are compared.
        even_us: our time of the same cell with even groups, where these are not.
    """
    us, drawn_us = modelled_us(own, shipped()), [modelled_us(own, each) for each in drawn()]
    row = {**vars(cell), "kernel": words, "ours_us": f"{us:.2f}"}
    if other is not None:
        other_us = modelled_us(other, shipped())
        wins = fmean(
            modelled_us(other, each) >= mine for each, mine in zip(drawn(), drawn_us, strict=True)
        )
        row |= {"published_us": f"{other_us:.2f}", "times_as_fast": f"{other_us / us:.3f}",
                "wins_of_draws": f"{wins:.2f}"}  # fmt: skip
    if even_us is not None:
        row["share_of_even"] = f"{even_us / us:.3f}"
    return {name: row.get(name, "") for name in COLUMNS}


def lines(
    wanted: Sequence[Cell], of_other: Callable[[Cell], list[Traced]]
) -> Iterator[dict[str, object]]:
    """A row a cell; ``of_other`` has the pull request's launches of an even one."""
    even: dict[Cell, float] = {}
    for cell in wanted:
        own, words = ours(cell)
        alike = replace(cell, mode="balanced")
        if cell == alike:
            even[cell] = modelled_us(own, shipped())
            yield line(cell, own, words, of_other(cell), None)
        else:
            if alike not in even:
                even[alike] = modelled_us(ours(alike)[0], shipped())
            yield line(cell, own, words, None, even[alike])


def rows_of(path: Path) -> list[dict[str, object]]:
    """The rows of a saved table."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def key_of(row: Mapping[str, object]) -> tuple[str, ...]:
    """Which cell a row is of."""
    return tuple(str(row[field.name]) for field in fields(Cell))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--checkout", type=Path, help="of the pull request's branch")
    parser.add_argument("--work", type=Path, help="for what is compiled on the way")
    parser.add_argument("--only", default="", help="cells whose text has this")
    parser.add_argument("--save", action="store_true", help=f"write these cells into {SAVED.name}")
    options = parser.parse_args()
    kept = saved()
    wanted = [cell for cell in cells() if options.only in str(cell)]
    if options.checkout:
        published = Pr330(options.checkout, options.work)
    else:
        wanted = [cell for cell in wanted if cell.mode != "balanced" or cell in kept]

    def of_other(cell: Cell) -> list[Traced]:
        return kept[cell] if cell in kept else theirs(published, cell)

    found = {} if not SAVED.exists() else {key_of(row): row for row in rows_of(SAVED)}
    for row in lines(wanted, of_other):
        print(*row.values(), flush=True)
        found[key_of(row)] = row
    if options.save:
        ranks = {key_of(vars(cell)): rank for rank, cell in enumerate(cells())}
        in_order = [found[key] for key in sorted(found, key=ranks.__getitem__)]
        write_csv(SAVED, pd.DataFrame(in_order, columns=COLUMNS, dtype=object))


if __name__ == "__main__":
    main()
