"""CPU time of shapes that no table has, from routing to launching, and of reading tables.

No GPU is needed: where the driver would be called, nothing is.

    python op_tests/bench/routes.py [--save FILE] [--problems 1000]
    python op_tests/bench/routes.py --only-tables --save FILE    # leaves the other rows as they are

Each op and target has a process of its own, which pretends to have the GPU. Half of the problems
are of decode, half of prefill; their N and K are in no table. AITER_MX_CONFIG names a table and
AITER_MX_LOG_UNTUNED a file, as on a server that is being tuned.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from aiter_mx.paths import configs_dir
from aiter_mx.target import ARCHS, hardware

OPS = ("linear", "moe_gemm", "grouped_gemm", "quantize", "moe_align", "moe_combine")
MANY_ROWS = 8000
MANY = f"linear, {MANY_ROWS} rows"


def _sizes(draw: random.Random) -> dict[str, int]:
    """N and K of no table: multiples of 32 as models have them, though none of these."""
    return {"N": 32 * draw.randrange(11, 700) + 32, "K": 128 * draw.randrange(3, 120)}


def _tokens(draw: random.Random) -> int:
    return draw.randrange(1, 65) if draw.random() < 0.5 else draw.randrange(65, 16385)


def _linear(draw: random.Random) -> dict[str, Any]:
    return {
        "M": _tokens(draw),
        **_sizes(draw),
        "out_dtype": draw.choice(("bf16", "fp16", "fp32")),
        "bias": draw.choice(("none", "bf16")),
        "pdl": draw.random() < 0.5,
        "x_dtype": draw.choice(("e4m3", "bf16")),
    }


def _moe_gemm(draw: random.Random) -> dict[str, Any]:
    sizes = _sizes(draw)
    activated = draw.random() < 0.5
    sizes["N"] = -(-sizes["N"] // 64) * 64
    return {
        "M": _tokens(draw),
        **sizes,
        "E": draw.choice((8, 16, 64, 128, 256)),
        "top_k": draw.choice((1, 2, 4, 8)),
        "block_m": draw.choice((16, 32, 64)),
        "activation": draw.choice(("silu", "swiglu_oai")) if activated else "none",
        "out_dtype": "mxfp8" if activated else draw.choice(("bf16", "fp16", "fp32")),
        "bias": draw.choice(("none", "bf16")),
    }


def _grouped_gemm(draw: random.Random) -> dict[str, Any]:
    groups = draw.choice((2, 8, 32, 128))
    dtype = draw.choice(("bf16", "fp16", "fp32"))
    return {"M": groups * _tokens(draw), **_sizes(draw), "G": groups, "out_dtype": dtype}


def _quantize(draw: random.Random) -> dict[str, Any]:
    sizes = _sizes(draw)
    to = draw.choice(("rows", "columns", "both"))
    M = _tokens(draw) if to == "rows" else 32 * draw.randrange(1, 512)
    dtype = draw.choice(("bf16", "fp16", "fp32"))
    return {"M": M, "N": sizes["K"], "to": to, "dtype": dtype}


def _routing(draw: random.Random) -> dict[str, Any]:
    experts = draw.choice((8, 16, 64, 128, 256))
    return {"M": _tokens(draw), "E": experts, "top_k": draw.choice((1, 2, 4, 8))}


def _moe_combine(draw: random.Random) -> dict[str, Any]:
    return {**_routing(draw), "N": _sizes(draw)["N"]}


DRAWS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "linear": _linear,
    "moe_gemm": _moe_gemm,
    "grouped_gemm": _grouped_gemm,
    "quantize": _quantize,
    "moe_align": _routing,
    "moe_combine": _moe_combine,
}


def _cpu_us(call: Callable[[], object]) -> float:
    started = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - started) / 1e3


class _Functions(dict):  # type: ignore[type-arg]
    """Every kernel is built and loaded."""

    def get(self, key: object, default: object = None) -> object:
        return key


class _Driver:
    """A runtime that launches nothing."""

    encode_map = staticmethod(lambda described, address: bytes(128))
    map_offset = staticmethod(lambda function, argument: 128 * argument)
    bind = staticmethod(lambda function, geometry, args: lambda stream: None)
    current_stream = staticmethod(lambda device: 0)


def _pretend_to_launch() -> None:
    """Have everything of a first call happen but what the driver does."""
    import torch

    from aiter_mx import launch

    launch._functions = _Functions()
    launch.runtime_of = lambda name: _Driver  # type: ignore[assignment, return-value]
    if not hasattr(torch._C, "_cuda_getDevice"):
        torch._C._cuda_getDevice = lambda: 0  # type: ignore[attr-defined]


def time_routes(op: str, arch: str, count: int) -> dict[str, float]:
    """Median, 99th percentile and worst of the CPU time of new problems' routes, and of tables;
    the first two of routing and binding a launch too."""
    import torch

    from aiter_mx.dispatch.dispatcher import route
    from aiter_mx.dispatch.tables import load_rows
    from aiter_mx.kernels.registry import kernels_of, ops, problem_type
    from aiter_mx.plan import bind

    _pretend_to_launch()
    target, draw = hardware(arch), random.Random(f"{op} {arch}")
    for other in ops():  # importing them is no part of either
        kernels_of(other)
    of_type = problem_type(op)
    tables_us = _cpu_us(lambda: load_rows(arch, op))
    problems = list(dict.fromkeys(of_type(**DRAWS[op](draw)) for _ in range(count)))
    route(op, target, of_type(**DRAWS[op](random.Random(0))))
    if op == "linear":  # whose other half is a quantisation
        load_rows(arch, "quantize")
    times = sorted(_cpu_us(partial(route, op, target, problem)) for problem in problems)
    more = list(dict.fromkeys(of_type(**DRAWS[op](draw)) for _ in range(count)))
    device = torch.device("cuda", 0)
    calls = sorted(_cpu_us(partial(bind, op, target, problem, device)) for problem in more)
    return {
        "median_us": statistics.median(times),
        "p99_us": times[len(times) * 99 // 100],
        "worst_us": times[-1],
        "call_median_us": statistics.median(calls),
        "call_p99_us": calls[len(calls) * 99 // 100],
        "tables_ms": tables_us / 1e3,
    }


def time_tables(path: Path, arch: str, op: str) -> float:
    """Milliseconds of CPU that reading an op's tables takes, with ``path`` as the shipped one."""
    from aiter_mx.dispatch import tables
    from aiter_mx.kernels.registry import kernels_of, ops

    for other in ops():
        kernels_of(other)
    tables.configs_dir = lambda: path  # type: ignore[attr-defined]
    return _cpu_us(lambda: tables.load_rows(arch, op)) / 1e3


def aside(*arguments: object, **environment: str) -> Any:
    """What this file prints as JSON in a process of its own."""
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(
        command, env={**os.environ, **environment}, check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout)


def grow(table: Path, rows: int, to: Path) -> None:
    """A table of so many rows: those of another, and again for other N."""
    with table.open(newline="") as file:
        lines = list(csv.DictReader(file))
    to.parent.mkdir(parents=True)
    with to.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        for index in range(rows):
            row = lines[index % len(lines)]
            writer.writerow({**row, "N": int(row["N"]) + 32 * (index // len(lines))})
    digests = {to.relative_to(to.parents[1]).as_posix(): sha256(to.read_bytes()).hexdigest()}
    (to.parents[1] / "digests.json").write_text(json.dumps(digests))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", type=Path, help="the CSV to write")
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--only-tables", action="store_true", help="time the table of many rows")
    parser.add_argument("aside", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.aside:
        what, *arguments = given.aside
        if what == "routes":
            op, arch, count = arguments
            print(json.dumps(time_routes(op, arch, int(count))))
        else:
            folder, arch, op = arguments
            print(json.dumps(time_tables(Path(folder), arch, op)))
        return
    results: list[dict[str, object]] = []
    if given.only_tables and given.save:
        with given.save.open(newline="") as file:
            results += (row for row in csv.DictReader(file) if row["op"] != MANY)
    with tempfile.TemporaryDirectory() as folder:
        mine = Path(folder) / "mine.csv"
        shutil.copy(configs_dir() / "gfx950" / "grouped_gemm.csv", mine)
        for arch in ARCHS:
            for op in () if given.only_tables else OPS:
                environment = {
                    "AITER_MX_CONFIG": str(mine),
                    "AITER_MX_LOG_UNTUNED": str(Path(folder) / "untuned.csv"),
                }
                found = aside("routes", op, arch, given.problems, **environment)
                results.append(
                    {"op": op, "arch": arch, **{k: f"{v:.1f}" for k, v in found.items()}}
                )
                print(*results[-1].values(), flush=True)
        grow(configs_dir() / "sm_90a" / "linear.csv", MANY_ROWS, Path(folder) / "sm_90a/linear.csv")
        many = [aside("tables", folder, "sm_90a", "linear") for _ in range(5)]
        results.append(
            {"op": MANY, "arch": "sm_90a", "tables_ms": f"{statistics.median(many):.1f}"}
        )
        print(*results[-1].values())
    if given.save:
        with given.save.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(results[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(results)


if __name__ == "__main__":
    main()
