"""How long warming a weight or an expert layer up for 1 to 32,768 rows takes, compilers included.

    python -m op_tests.bench.warmup [--save] [--cores 16]

Each has a process and an empty cache of its own, and so many of the machine's cores; as many are
timed beside each other as there are such cores. ``warmup_s`` routes, compiles and loads;
``objects`` is how many code objects it compiled. Afterwards every number of rows is made ready to
launch again, and ``compiled_after`` counts what that compiles: nothing is what it should be.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import torch

from op_tests.bench.common import refuse_no_gpu, report

MOST_ROWS = 32_768
SUBJECTS: tuple[Mapping[str, object], ...] = (
    {"op": "linear", "N": 2304, "K": 6144},
    {"op": "fused_moe", "hidden": 2880, "intermediate": 2880, "E": 128, "top_k": 4},
    {"op": "linear", "N": 2304, "K": 6144, "x_dtype": "bf16"},
    {"op": "linear", "N": 1280, "K": 2880},
    {"op": "fused_moe", "hidden": 6144, "intermediate": 768, "E": 128, "top_k": 4},
    {"op": "linear", "N": 9216, "K": 6144},
)


def objects_in(folder: Path) -> int:
    """How many code objects a cache has."""
    return sum(1 for path in folder.rglob("*") if path.suffix in (".cubin", ".hsaco"))


def warm(
    op: str, most: int = MOST_ROWS, jobs: int | None = None, **shape: object
) -> dict[str, object]:
    """Warm up in this process, whose cache is empty, and see what every number of rows compiles."""
    import aiter_mx
    from aiter_mx.jit.folder import cache_dir
    from aiter_mx.kernels.registry import launches_of, problem_type
    from aiter_mx.plan import bind
    from aiter_mx.target import target_of

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    target = target_of(device)
    begun = time.perf_counter()
    aiter_mx.warmup(op, device=device, jobs=jobs, M=range(1, most + 1), **shape)
    warmup_s, objects = time.perf_counter() - begun, objects_in(Path(cache_dir()))
    for M in range(1, most + 1):
        for name, problem in launches_of(op, problem_type(op)(M=M, **shape), target.arch):
            bind(name, target, problem, device)
    after = objects_in(Path(cache_dir())) - objects
    return {"warmup_s": warmup_s, "objects": objects, "compiled_after": after}


def aside(subject: Mapping[str, object], cores: frozenset[int]) -> dict[str, object]:
    """``warm`` in a process of its own, on these cores."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "op_tests.bench.warmup", "--one", json.dumps(subject)]
        done = subprocess.run(
            [*command, "--on", *map(str, sorted(cores))],
            env={**os.environ, "AITER_MX_CACHE_DIR": folder},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    shape = " ".join(f"{name}={value}" for name, value in subject.items() if name != "op")
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return {"op": subject["op"], "shape": shape, "cores": len(cores), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write docs/measured/<gpu>/warmup.csv")
    parser.add_argument("--cores", type=int, default=16)
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--on", type=int, nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        os.sched_setaffinity(0, arguments.on)
        print(json.dumps(warm(jobs=len(arguments.on), **arguments.one)))
        return
    refuse_no_gpu()
    every, free = sorted(os.sched_getaffinity(0)), SimpleQueue[frozenset[int]]()
    count = max(1, len(every) // arguments.cores)
    for i in range(count):
        free.put(frozenset(every[i * arguments.cores :][: arguments.cores]))

    def timed(subject: Mapping[str, object]) -> dict[str, object]:
        cores = free.get()
        try:
            return aside(subject, cores)
        finally:
            free.put(cores)

    title, rows = f"Warming up for 1 to {MOST_ROWS} rows", list[dict[str, object]]()
    with ThreadPoolExecutor(count) as pool:
        for row in pool.map(timed, SUBJECTS):
            rows.append(row)
            report(title, rows, "warmup" if arguments.save else None)


if __name__ == "__main__":
    main()
