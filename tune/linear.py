"""Regenerates ``configs/<arch>/linear.csv`` on the GPU at hand.

    python tune/linear.py [--M 1 2 4 8 16] [--shapes 2304x6144 ...] [--table FILE]

For each shape it times every candidate configuration of every kernel, ours and Triton's, with cold
weights and graph replay. A candidate must first match the float64 reference on two random inputs;
one that fails to build, launch or match is reported and never chosen. The fastest few are timed
again in interleaved rounds. A row already in the table stays unless it is beaten by 3 %, or by
more than the spread of the rounds if that is larger. Rows of other shapes are kept.
"""

from __future__ import annotations

import argparse
import csv
import datetime
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.progress import track

from aiter_mx.dispatch.tables import CHOICE, SCOPE, read_table
from aiter_mx.errors import AiterMxError
from aiter_mx.fallbacks.linear_torch import linear_torch
from aiter_mx.fallbacks.linear_triton import linear_triton
from aiter_mx.jit.build import build_all
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.registry import find_kernel, kernels_of
from aiter_mx.kernels.spec import Config, KernelSpec
from aiter_mx.launch import bind, build_request
from aiter_mx.paths import configs_dir
from aiter_mx.target import Target, target_of
from aiter_mx.timing import commit, copies_to_stay_cold, random_mx, time_graph_us

SHAPES = (
    # (N, K) of a 6144-wide model's qkv, gate_up, o_proj and down at TP1, TP2, TP4 and TP8,
    *((9216, 6144), (4608, 6144), (2304, 6144), (1152, 6144)),
    *((6144, 6144), (3072, 6144), (1536, 6144), (768, 6144)),
    *((6144, 8192), (6144, 4096), (6144, 2048), (6144, 1024)),
    *((6144, 3072), (6144, 1536), (6144, 768)),
    # and of the small sentence encoder that the demo runs.
    *((384, 384), (1536, 384), (384, 1536)),
)
ROWS = (1, 2, 4, 8, 16)
DEVICE = torch.device("cuda", 0)
MAX_ERROR = 4e-3
"""Relative to the reference's norm: rounding to bf16 alone makes about 1.7e-3."""
MARGIN = 0.03
FINALISTS = 5
ROUNDS = 3
COLUMNS = (
    *(*SCOPE, "M", "N", "K", "out_dtype", *CHOICE),
    *dict.fromkeys(p.name for kernel in kernels_of("linear") for p in kernel.params),
    *("us", "triton_us", "spread", "source", "commit", "date"),
)
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Choice = tuple[str, str, Config]
"""Backend, kernel, configuration."""
Rows = dict[tuple[object, ...], dict[str, object]]
"""A table's rows, by ``key_of``."""
console = Console()


@dataclass
class Candidate:
    """A kernel and configuration, its calls over the rotated weights, and its times in us."""

    kernel: KernelSpec
    config: Config
    calls: list[Callable[[], object]]
    times: list[float]

    @property
    def us(self) -> float:
        return median(self.times)

    @property
    def spread(self) -> float:
        return (max(self.times) - min(self.times)) / self.us


def calls_of(
    kernel: KernelSpec,
    target: Target,
    problem: LinearProblem,
    config: Config,
    copies: list[Operands],
    outs: list[torch.Tensor],
) -> list[Callable[[], object]]:
    """One call for each copy of the operands."""
    if kernel.backend == "triton":
        return [
            partial(linear_triton, *operands, None, out, config)
            for operands, out in zip(copies, outs, strict=True)
        ]
    run = bind(kernel, target, problem, config, 0)
    calls: list[Callable[[], object]] = []
    for operands, out in zip(copies, outs, strict=True):
        tensors = (*operands, None, out)
        calls.append(partial(run, tensors, [0 if t is None else t.data_ptr() for t in tensors]))
    return calls


def matches(
    calls: list[Callable[[], object]], outs: list[torch.Tensor], references: list[torch.Tensor]
) -> bool:
    """Whether the first calls give what the reference gives, into poisoned outputs."""
    for call, out, reference in zip(calls, outs, references, strict=False):
        out.fill_(float("nan"))
        call()
        if not (out.float() - reference).norm() <= MAX_ERROR * reference.norm():
            return False
    return True


def incumbent_of(rows: Rows, target: Target, problem: LinearProblem) -> Choice | None:
    """What the table chooses for ``problem`` so far."""
    key = (problem.N, problem.K, problem.M, problem.out_dtype, target.cu_num)
    row = rows.get(key)
    if row is None:
        return None
    kernel = find_kernel("linear", target.arch, str(row["backend"]), str(row["kernel"]))
    config = {param.name: int(str(row[param.name])) for param in kernel.params}
    return kernel.backend, kernel.name, config


def tune(
    target: Target,
    problem: LinearProblem,
    weights: list[tuple[torch.Tensor, torch.Tensor]],
    incumbent: Choice | None,
) -> list[Candidate]:
    """All candidates that compute ``problem`` rightly; the first is the one to use."""
    M, N, K = problem.M, problem.N, problem.K
    activations = [random_mx(M, K, DEVICE) for _ in range(2)]
    copies = [(*activations[i % 2], *w) for i, w in enumerate(weights)]
    outs = [torch.empty(M, N, dtype=torch.bfloat16, device=DEVICE) for _ in copies]
    references = [torch.empty(M, N, dtype=torch.float32, device=DEVICE) for _ in range(2)]
    for operands, reference in zip(copies, references, strict=False):
        linear_torch(*operands, None, reference)

    found = []
    for kernel in kernels_of("linear"):
        if kernel.backend == "torch" or kernel.refusal(target, problem) is not None:
            continue
        configs = list(kernel.candidates(target, problem))
        if kernel.module is not None:
            build_all([build_request(kernel, target, problem, config) for config in configs])
        for config in configs:
            name = f"{kernel.backend}/{kernel.name} {dict(config)} at {M}x{N}x{K}"
            try:
                calls = calls_of(kernel, target, problem, config, copies, outs)
                if not matches(calls, outs, references):
                    console.print(f"[red]wrong[/]: {name}")
                    continue
                found.append(Candidate(kernel, config, calls, [time_graph_us(calls, replays=5)]))
            except AiterMxError as error:
                console.print(f"[red]failed[/]: {name}: {error}")

    found.sort(key=lambda candidate: candidate.us)
    holder = next(
        (c for c in found if (c.kernel.backend, c.kernel.name, c.config) == incumbent), None
    )
    finalists = found[:FINALISTS] + [c for c in found[FINALISTS:] if c is holder]
    for finalist in finalists:
        finalist.times.clear()
    for _ in range(ROUNDS):
        for finalist in finalists:
            finalist.times.append(time_graph_us(finalist.calls))
    finalists.sort(key=lambda candidate: candidate.us)
    if holder is not None:
        best = finalists[0]
        if best.us > holder.us * (1 - max(MARGIN, best.spread, holder.spread)):
            finalists.remove(holder)
            finalists.insert(0, holder)
    return finalists + [c for c in found if c not in finalists]


def row_of(target: Target, problem: LinearProblem, timed: list[Candidate]) -> dict[str, object]:
    """The table row for the first of ``timed``."""
    best = timed[0]
    peers = [c.us for c in timed if c.kernel.backend == "triton"]
    return {
        "gfx": target.arch,
        "cu_num": target.cu_num,
        "op": "linear",
        "M": problem.M,
        "N": problem.N,
        "K": problem.K,
        "out_dtype": problem.out_dtype,
        "backend": best.kernel.backend,
        "kernel": best.kernel.name,
        **best.config,
        "us": f"{best.us:.3f}",
        "triton_us": f"{min(peers):.3f}" if peers else "",
        "spread": f"{best.spread:.4f}",
        "source": "measured",
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def key_of(row: dict[str, object]) -> tuple[object, ...]:
    """What a row is for, in the order in which a table is sorted."""
    numbers = (int(str(row[name])) for name in ("N", "K", "M"))
    return (*numbers, str(row["out_dtype"]), int(str(row["cu_num"] or 0)))


def read_rows(path: Path) -> Rows:
    """The rows of a table as they stand, after a check that all are legal."""
    if not path.is_file():
        return {}
    list(read_table(path))
    with path.open(newline="") as file:
        return {key_of(row): dict(row) for row in csv.DictReader(file)}


def write_rows(path: Path, rows: Rows) -> None:
    """Write a table, sorted, in place of the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    with draft.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[key] for key in sorted(rows))
    draft.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--M", type=int, nargs="+", default=ROWS)
    parser.add_argument("--shapes", nargs="+", default=[f"{N}x{K}" for N, K in SHAPES])
    parser.add_argument("--table", type=Path, help="default: configs/<arch>/linear.csv")
    arguments = parser.parse_args()
    target = target_of(DEVICE)
    path = arguments.table or configs_dir() / target.arch / "linear.csv"
    rows = read_rows(path)
    for shape in track(arguments.shapes, "shapes", console=console):
        N, K = map(int, shape.split("x"))
        weights = [random_mx(N, K, DEVICE) for _ in range(copies_to_stay_cold(N * K))]
        for M in arguments.M:
            problem = LinearProblem(M=M, N=N, K=K, out_dtype="bf16")
            timed = tune(target, problem, weights, incumbent_of(rows, target, problem))
            row = row_of(target, problem, timed)
            rows[key_of(row)] = row
            chosen = f"{row['backend']}/{row['kernel']} {dict(timed[0].config)}"
            console.print(f"{M}x{N}x{K}: {chosen}, {row['us']} us; Triton {row['triton_us']} us")
            write_rows(path, rows)


if __name__ == "__main__":
    main()
