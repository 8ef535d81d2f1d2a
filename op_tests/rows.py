"""``python -m op_tests.rows --arch gfx950 --rows 200``: random rows that a table may legally have.

For each of our kernels of an architecture, problems and configurations are drawn anew until the
kernel refuses neither, as the check of a table would. Each such row is compiled, launched (in the
simulator, or with ``--arch sm_90a`` on this machine's GPU) and compared with the workload's float64
judge. A row that raises, or gives another result, is printed with the seed that draws it again, and
makes the program fail. ``--save`` keeps each kernel's counts in ``docs/measured`` as it is done.
"""

from __future__ import annotations

import argparse
import fcntl
import random
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import MISSING
from itertools import islice
from math import log2
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import aiter_mx
from aiter_mx.dispatch.route import Route
from aiter_mx.errors import BuildError
from aiter_mx.jit.build import build_all
from aiter_mx.kernels.registry import kernels_of, ops, problem_type
from aiter_mx.kernels.spec import Config, KernelSpec, Problem
from aiter_mx.launch import call, module_request
from aiter_mx.plan import bind_route
from aiter_mx.target import Target, hardware, target_of
from aiter_mx.tuning.origin import commit
from aiter_mx.workloads import workload_of
from op_tests.bench.common import MEASURED, gpu_name

MOST_WORK = 1 << 23  # products of a problem, so that the simulator takes seconds
TRIES = 20_000  # draws for a row
AHEAD = 50  # rows that are compiled together
SIZES = {"M": 300, "N": 600, "K": 1600, "E": 9, "G": 6, "top_k": 4}
"""The largest value of fields that are sizes."""
WORDS: dict[str, tuple[object, ...]] = {
    "out_dtype": ("bf16", "fp16", "fp32"),
    "y_dtype": ("fp32", "bf16", "fp16"),
    "dtype": ("bf16", "fp16", "fp32"),
    "x_dtype": ("e4m3", "bf16", "fp16", "none"),
    "bias": ("none", "fp32", "bf16", "fp16"),
    "activation": ("none", "silu", "swiglu_oai", "gelu"),
    "layout": ("halves", "interleaved", "jagged", "masked", "row_major", "16x4", "256x8"),
    "weights": ("none", "fp32"),
    "ids": ("vllm", "aiter"),
    "index": ("i32", "i64"),
    "id_dtype": ("i32", "i64"),
    "to": ("rows", "columns", "both"),
    "format": ("e4m3", "e5m2", "e2m1"),
    "mode": ("rceil", "floor", "even"),
    "block": ("1x32", "32x32"),
    "grad_format": ("e4m3", "e5m2"),
    "residual": (0, 1),
    "accumulate": (0, 1),
    "block_m": (16, 32, 64, 128),
    "pdl": (False, True),
}
"""What fields of problems are drawn from; others keep their defaults."""


def size_of(draw: random.Random, name: str) -> int:
    """A value of a field that is a size: small ones are as likely as large ones."""
    value = round(2 ** draw.uniform(0, log2(SIZES[name])))
    if name == "K" or (name == "N" and draw.random() < 0.7):
        return -(-value // 32) * 32
    return value


def problem_of(op: str, draw: random.Random) -> Problem | None:
    """A random problem, or None where the draw is none."""
    kind: Any = problem_type(op)
    fields: dict[str, Any] = {}
    for name, field in kind.__dataclass_fields__.items():
        needed = field.default is MISSING
        if name in SIZES and needed:
            fields[name] = size_of(draw, name)
        elif name == "num_experts" and needed:
            fields[name] = fields["E"]
        elif name in WORDS and draw.random() < 0.5:
            fields[name] = draw.choice(WORDS[name])
    try:
        problem: Problem = kind(**fields)
    except (TypeError, ValueError):
        return None
    work = 1
    for name in ("M", "N", "K"):
        work *= max(1, fields.get(name, 1))
    return problem if work <= MOST_WORK else None


def rows(kernel: KernelSpec, target: Target, seed: int) -> Iterator[tuple[str, Problem, Config]]:
    """Rows that the kernel does not refuse, each with the seed that draws it."""
    missed = 0
    for number in range(sys.maxsize):
        name = f"{kernel.op}/{kernel.name} {seed}/{number}"
        draw = random.Random(name)
        problem = problem_of(kernel.op, draw)
        config = {param.name: draw.choice(param.values) for param in kernel.params}
        missed += 1
        if problem is None or kernel.refusal(target, problem) is not None:
            pass
        elif kernel.misfit(target, problem, config) is None:
            missed = 0
            yield name, problem, config
        if missed == TRIES:
            return


def tried(arch: str) -> dict[str, KernelSpec]:
    """Our kernels of an architecture, by the names that are saved."""
    every = (kernel for op in ops() for kernel in kernels_of(op))
    return {f"{k.op}/{k.name}": k for k in every if k.modules and k.is_for(arch)}


def compile_ahead(
    kernel: KernelSpec, target: Target, drawn: Sequence[tuple[str, Problem, Config]]
) -> None:
    """Compile what rows launch, on all cores; what does not compile is told when it is launched."""
    requests = [
        module_request(module, target, problem, config)
        for _, problem, config in drawn
        if not kernel.parts(target, problem, config)
        for module in kernel.modules
    ]
    with suppress(BuildError):
        build_all(requests)


def ran(kernel: KernelSpec, problem: Problem, config: Config, device: torch.device) -> str:
    """What is wrong with a row's launch, or nothing."""
    workload = workload_of(kernel.op)
    operands = workload.operands(problem, device)
    if any(t is not None and not t.numel() for t in operands):
        return ""
    try:
        run = bind_route(Route(kernel, config, "drawn"), target_of(device), problem, device)
        call(run, *operands)
    except BuildError as error:
        return f"does not build: {str(error)[-400:]}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:400]}"
    verdict = workload.judge(problem, operands)(operands)
    return "" if verdict.right else f"another result: {verdict}"


def save(path: Path, row: dict[str, object], kernels: Collection[str]) -> None:
    """Put a kernel's counts in the place of those that a file may have of it, or of kernels that
    are none of these."""
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as other processes may try other kernels
        frame = pd.DataFrame([row])
        if file.tell():
            file.seek(0)
            old = pd.read_csv(file)
            kept = old["kernel"].isin({*kernels} - {row["kernel"]})
            frame = pd.concat([old[kept], frame])
            file.truncate(0)
        frame.sort_values("kernel").to_csv(file, index=False)


def main() -> int:
    parser = argparse.ArgumentParser("python -m op_tests.rows", description=__doc__)
    add = parser.add_argument
    add("--arch", choices=("gfx950", "sm_90a"), default="gfx950")
    add("--rows", type=int, default=200, help="of each kernel")
    add("--seconds", type=float, default=float("inf"), help="of each kernel, at most")
    add("--kernels", nargs="*", default=[], help="op/name; by default all")
    add("--seed", type=int, default=0)
    add("--save", action="store_true", help="keep the counts in docs/measured")
    asked = parser.parse_args()
    simulated = asked.arch == "gfx950" and not torch.cuda.is_available()
    device = torch.device("cpu" if simulated else "cuda")
    target, failures = hardware(asked.arch), 0
    with aiter_mx.simulate("gfx950") if simulated else nullcontext():
        kernels = tried(asked.arch)
        for name, kernel in kernels.items():
            if asked.kernels and name not in asked.kernels:
                continue
            counts, end = Counter[str](), time.monotonic() + asked.seconds
            drawn = list(islice(rows(kernel, target, asked.seed), asked.rows))
            for at, (seed, problem, config) in enumerate(drawn):
                if time.monotonic() > end:
                    break
                if at % AHEAD == 0:
                    compile_ahead(kernel, target, drawn[at : at + AHEAD])
                wrong = ran(kernel, problem, config, device)
                counts["rows"] += 1
                if wrong:
                    counts["wrong"] += 1
                    print(f"{seed}: {problem} {config}: {wrong}", flush=True)
            failures += counts["wrong"]
            print(f"{name}: {counts['rows']} rows, {counts['wrong']} wrong", flush=True)
            if asked.save:
                row = {"kernel": name, "rows": counts["rows"], "wrong": counts["wrong"]}
                folder = MEASURED / ("gfx950_simulated" if simulated else gpu_name())
                save(folder / "rows.csv", row | {"seed": asked.seed, "commit": commit()}, kernels)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
