"""The simulator's mutation score: plant mistakes in our kernels' machine code, see who notices.

    python -m op_tests.sim.mutation                  a sample of every kind in every kernel
    python -m op_tests.sim.mutation --per-class 0    every mutant there is
    python -m op_tests.sim.mutation --save           the sample; write mutants.csv, docs/mutation.md
    python -m op_tests.sim.mutation --save --kernels 'mfma*'    these; the other rows stay
    python -m op_tests.sim.mutation --save --survivors          those on file, once more

Each mutant is the code object with one instruction changed. It runs in the simulator (strict, under
several schedules and seeds) and its results are compared with float64. What neither notices is a
survivor; ``mutation_reasons.json`` says why it is harmless or why no launch can show it. A survivor
without a reason makes the program fail.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatch
from multiprocessing import get_context
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from aiter_mx.jit.folder import cache_dir
from op_tests.sim.mutation_coverage import reached
from op_tests.sim.mutation_kinds import KINDS
from op_tests.sim.mutation_planting import Mutant, case_named, patched, sample
from op_tests.sim.mutation_probes import EVERY_CASE, verdict
from op_tests.sim.mutation_report import (
    UNREACHED,
    Outcome,
    load_outcomes,
    page,
    reasons,
    save_outcomes,
    show,
    survivors,
)

_DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = _DOCS / "mutation.md"
OUTCOMES = _DOCS / "measured" / "gfx950_simulated" / "mutants.csv"


def judge(mutant: Mutant) -> Outcome:
    """Run a mutant against its case's probes."""
    case = case_named(mutant.case)
    by, message = verdict(case, patched(case, mutant))
    if not by and mutant.index not in reached(case):
        message = UNREACHED
    return Outcome(mutant, by, message)


def _start_worker() -> None:
    torch.set_num_threads(1)
    for case in EVERY_CASE:
        _ = case.image  # by the usual cache
    os.environ["AITER_MX_CACHE_DIR"] = os.environ["MUTANTS_DIR"]  # of no use later


def judge_all(chosen: Sequence[Mutant], jobs: int, console: Console) -> Iterator[Outcome]:
    """Outcomes as they come."""
    with tempfile.TemporaryDirectory(prefix="aiter_mx-") as folder:
        os.environ["MUTANTS_DIR"] = folder
        parts = Path(folder, "sim")
        parts.mkdir(mode=0o700)
        for part in Path(cache_dir(), "sim").glob(
            "*.o"
        ):  # of kernels as they are: most of a mutant
            shutil.copy(part, parts)
        fresh = get_context("spawn")  # a fork would inherit threads
        with ProcessPoolExecutor(jobs, fresh, _start_worker) as pool:
            outcomes = pool.map(judge, chosen)
            yield from track(outcomes, "mutants", len(chosen), console=console, transient=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1 when a survivor has no reason."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kernels", default="*", help="pattern of the variants' names")
    parser.add_argument("--classes", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--per-class", type=int, default=8, metavar="N", help="0: all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--survivors", action="store_true", help=f"those of {OUTCOMES.name} alone")
    parser.add_argument("--save", action="store_true", help=f"write {OUTCOMES.name}, {PAGE.name}")
    options = parser.parse_args(arguments)
    console = Console()
    begin = time.perf_counter()
    cases = [case for case in EVERY_CASE if fnmatch(case.name, options.kernels)]
    names = {case.name for case in cases}
    on_file = load_outcomes(OUTCOMES) if options.save or options.survivors else []
    kept = [outcome for outcome in on_file if outcome.mutant.case not in names]
    if options.survivors:
        kept = [outcome for outcome in on_file if outcome.by or outcome.mutant.case not in names]
        chosen = [outcome.mutant for outcome in on_file if outcome not in kept]
    else:
        drawn = options.classes, options.per_class, options.seed
        chosen = [mutant for case in cases for mutant in sample(case, *drawn)]
    known = reasons()
    outcomes = list(judge_all(chosen, options.jobs, console))
    show(outcomes, known, console)
    console.print(f"{len(outcomes)} mutants in {time.perf_counter() - begin:.0f} s")
    if options.save:
        save_outcomes(OUTCOMES, [*kept, *outcomes])
        PAGE.write_text(page(load_outcomes(OUTCOMES), known))
    return 1 if any(reason is None for _, reason in survivors(outcomes, known)) else 0


if __name__ == "__main__":
    sys.exit(main())
