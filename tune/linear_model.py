"""Regenerates ``configs/gfx950/linear.csv`` without a GPU, from a model of an MI355X.

    python tune/linear_model.py [--M 1 2 4 8 16 32 64] [--shapes 2304x6144 ...] [--table FILE]

Each candidate of our kernels is compiled and run in the simulator; the model turns what it counted
into a bound on the time. The rows say ``source=model``: nothing here was measured, and
``tune/linear.py`` replaces the rows on a real GPU.

The bound is the largest of three, for the compute unit with the most workgroups:

- memory: its share of the weights at 8 TB/s over 256 CUs;
- latency: the bytes that a wave waits for at a time, over the waves that fit, each wait taking
  one microsecond;
- issue: vector instructions at 4 cycles each and matrix instructions at theirs, on 4 SIMDs.
"""

from __future__ import annotations

import argparse
import datetime
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from linear import SHAPES, Rows, key_of, read_rows, write_rows
from rich.console import Console
from rich.progress import track

from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.registry import kernels_of
from aiter_mx.kernels.spec import Config, KernelSpec
from aiter_mx.paths import configs_dir
from aiter_mx.target import hardware
from aiter_mx.timing import commit
from aiter_mx.trial import try_out

ROWS = (1, 2, 4, 8, 16, 32, 64)
TARGET = hardware("gfx950")

MOST_OTHERS = 8  # candidates of a kernel beside its own choice


def estimate_us(kernel: KernelSpec, problem: LinearProblem, config: Config) -> float:
    """The model's bound on the time of a configuration, in microseconds."""
    trial = try_out(kernel, problem, config)
    weights = problem.N * problem.K * (1 + 1 / 32)  # x is in the L2
    memory_us = trial.bounds.memory_us * weights / trial.minimal_bytes
    return max(memory_us, trial.bounds.latency_us, trial.bounds.issue_us)


def best_row(problem: LinearProblem) -> dict[str, object]:
    """The row for the candidate with the lowest bound; among equals the kernels' own choice."""
    candidates = []
    for kernel in kernels_of("linear"):
        if kernel.module is not None and kernel.refusal(TARGET, problem) is None:
            own = kernel.configure(TARGET, problem)
            others = [c for c in kernel.candidates(TARGET, problem) if c != own]
            candidates += [(kernel, config) for config in (own, *others[:MOST_OTHERS])]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        times = list(pool.map(lambda c: estimate_us(c[0], problem, c[1]), candidates))
    us, (kernel, config) = min(zip(times, candidates, strict=True), key=lambda pair: pair[0])
    return {
        "gfx": TARGET.arch,
        "cu_num": TARGET.cu_num,
        "op": "linear",
        "M": problem.M,
        "N": problem.N,
        "K": problem.K,
        "out_dtype": problem.out_dtype,
        "backend": kernel.backend,
        "kernel": kernel.name,
        **config,
        "us": f"{us:.3f}",
        "source": "model",
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--M", type=int, nargs="+", default=ROWS)
    parser.add_argument("--shapes", nargs="+", default=[f"{N}x{K}" for N, K in SHAPES])
    parser.add_argument("--table", type=Path, default=configs_dir() / TARGET.arch / "linear.csv")
    arguments = parser.parse_args()
    rows: Rows = read_rows(arguments.table)
    for M in track(arguments.M, "rows", console=Console()):
        for shape in arguments.shapes:
            N, K = map(int, shape.split("x"))
            row = best_row(LinearProblem(M=M, N=N, K=K, out_dtype="bf16"))
            rows[key_of(row)] = row
            write_rows(arguments.table, rows)


if __name__ == "__main__":
    main()
