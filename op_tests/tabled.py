"""``python -m op_tests.tabled``: what gfx950's tables name, run with the caches of each XCD apart.

Each configuration of each kernel that a shipped table names is launched once, for a row that names
it, on the part of that row's problem that results are judged on when it is tuned: strict mode,
rules of class ``proven``, and what workgroups hand each other through caches that hide it
(docs/simulator.md). What raises, or gives another result than float64, is printed and makes the
program fail. ``--save`` keeps the counts in docs/measured/gfx950_simulated/tabled.csv.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from collections.abc import Iterator

import pandas as pd

from aiter_mx.cli.explain import describe_config
from aiter_mx.dispatch.tables import Row, read_table, table_files
from aiter_mx.errors import AiterMxError
from aiter_mx.kernels.registry import ops
from aiter_mx.sim.program import SimOptions
from aiter_mx.sim.timing.constants import CUS
from aiter_mx.trial import try_out
from aiter_mx.tuning.origin import commit
from aiter_mx.workloads import workload_of
from op_tests.bench.common import MEASURED

ARCH = "gfx950"
APART = SimOptions(schedule="random", checks=("proven",), coherence=True)


def named(seed: int) -> Iterator[tuple[str, Row]]:
    """A row, drawn by the seed, for each configuration of each kernel, and the row's op."""
    rows = defaultdict[tuple[str, str, str], list[Row]](list)
    for op in ops():
        for path in table_files(ARCH, op):
            for row_op, row in read_table(path):
                if row.spec.module is not None:
                    rows[row_op, row.spec.name, describe_config(row.config)].append(row)
    for name, alike in sorted(rows.items()):
        yield name[0], random.Random(f"{seed} {name}").choice(alike)


def ran(op: str, row: Row) -> str:
    """What is wrong with a row's launch, or nothing."""
    workload = workload_of(op)
    part = workload.sample(row.problem, 0.0)
    share = workload.read_bytes(part, None) / workload.read_bytes(row.problem, None)
    try:
        trial = try_out(row.spec, part, row.config, APART, max(1, round(CUS * share)))
    except AiterMxError as error:
        return f"{type(error).__name__}: {error}"
    verdict = workload.judge(part, trial.operands)(trial.operands)
    return "" if verdict.right else f"another result: {verdict}"


def main() -> int:
    parser = argparse.ArgumentParser("python -m op_tests.tabled", description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="of so many configurations, the first")
    parser.add_argument("--seed", type=int, default=0, help="of the rows")
    parser.add_argument("--save", action="store_true", help="write gfx950_simulated/tabled.csv")
    asked = parser.parse_args()
    found = []
    for op, row in list(named(asked.seed))[:: asked.every]:
        wrong = ran(op, row)
        found.append({"op": op, "kernel": row.spec.name, "wrong": bool(wrong)})
        if wrong:
            print(
                f"{row.where}: {row.spec.name} {describe_config(row.config)}: {wrong}", flush=True
            )
    counts = pd.DataFrame(found).groupby(["op", "kernel"]).wrong.agg(["count", "sum"])
    counts.columns = pd.Index(["configurations", "wrong"])
    print(counts.to_string())
    if asked.save:
        path = MEASURED / "gfx950_simulated" / "tabled.csv"
        counts.assign(seed=asked.seed, commit=commit()).to_csv(path)
    return int(counts.wrong.any())


if __name__ == "__main__":
    sys.exit(main())
