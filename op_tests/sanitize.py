"""``make sanitize-gpu``, or ``python -m op_tests.sanitize``: compute-sanitizer over every kernel.

One case of every kernel that the conformance suites try on this GPU, and each test marked
``sanitized``, is run under each of its tools, all at once: memcheck, racecheck, initcheck,
synccheck. ``build/sanitizer`` gets the logs; what they report is told by kernel and line.
``--save`` keeps how many errors each found in ``docs/measured/<gpu>/sanitizer.csv``.
"""

from __future__ import annotations

import argparse
import datetime
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from aiter_mx.jit import nvidia
from op_tests import gpu

OWN = ("--kernel-name", "kernel_substring=aiter_mx")
"""Looks at the package's kernels alone."""
TOOLS: dict[str, tuple[str, ...]] = {
    "memcheck": (*OWN, "--report-api-errors", "no"),  # the driver's bindings ask for what it lacks
    "racecheck": OWN,
    # What torch's kernels wrote would not count without them; tests copy what padding rows hold.
    "initcheck": ("--check-api-memory-access", "no"),
    "synccheck": OWN,
}
"""And their options."""
PRINTED = ("--print-limit", "200000", "--show-backtrace", "device")
"""What is not printed cannot be told by kernel and line."""
BUILD = gpu.ROOT / "build" / "sanitizer"
SUITES = ("linear", "moe", "grouped", "training", "quantize")
TESTS = (
    *(f"op_tests/{suite}/test_conformance.py" for suite in SUITES),
    "op_tests/linear/test_fused.py",
    "op_tests/linear/test_rescaling.py",
    "op_tests/linear/test_wgmma_fp8_rescaled_gpu.py",
    "op_tests/grouped/test_promoted.py",
    "op_tests/grouped/test_runs.py",
    "op_tests/moe/test_reblock_sm90.py",
    "op_tests/moe/test_routed_sm90.py",
    "op_tests/training/test_gpu.py",
)
HANDED_OVER = {
    ("Opener::open", "wgmma_roles_sm90.h"): ("fetch_x", "fetch_all", "find_tops", "store_rows"),
    ("Bringer::find_tops", "wgmma_f16_sm90.cu"): ("scale_sums",),
    ("Scaler::run", "wgmma_f16_sm90.cu"): ("load_shared_8",),
    ("store_shared_4", "memory.h"): ("load_cluster_16",),
}
"""Functions that write shared memory, the file of each, and functions that read it, in order.

racecheck takes an mbarrier to order what the threads that arrive did before, and knows nothing of
a cluster's barrier. Here the lanes of a warp write, meet in ``__syncwarp``, and one of them arrives
for all; those that read wait for that, or for a warp that has. What is read is written again once
the warps that add have arrived in the same way, after the last of them has read. The last pair has
the cluster's barrier between."""
_SUMMARY = re.compile(r"(ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)\b(?! were not)")
_REPORT = re.compile(r"^========= (?=\S)", re.MULTILINE)
_PLACE = re.compile(r"(?:\bat |Device Frame: ?)(.+?)\+0x\w+(?: in (\S+:\d+))?$", re.MULTILINE)
_RACE = re.compile(r"(Read|Write) access at (.+?)\+0x\w+ in (\S+?):\d+")
_CASES = re.compile(r"(\d+) passed")
_FAILED = re.compile(r"(\d+) failed")


def pytest_load_initial_conftests() -> None:
    """As a plugin: have the kernels say which function of the source an instruction is of."""
    nvidia.FLAGS = (*nvidia.FLAGS, *nvidia.LINE_FLAGS)


def command(tool: str, log: Path) -> list[str]:
    """What runs one case of every kernel under a tool."""
    options = (*TOOLS[tool], *PRINTED, "--target-processes", "all", "--log-file", str(log))
    tests = ("-q", "-p", "no:cacheprovider", "-p", "op_tests.sanitize", "-m", "gpu", "--one-each")
    run = [sys.executable, "-m", "pytest", *tests, *TESTS]
    return ["compute-sanitizer", "--tool", tool, *options, *run]


def errors_of(log: str) -> int | None:
    """How many errors or hazards a log sums up to; None where it has no summary."""
    found = _SUMMARY.findall(log)
    return sum(int(count) for _, count in found) if found else None


def reports_of(log: str) -> Counter[tuple[str, ...]]:
    """How often a log reports what, and where: the kernel, then lines from it to the instruction.

    Races are told of by ``races_of_handing_over``.
    """
    found: Counter[tuple[str, ...]] = Counter()
    for report in _REPORT.split(log):
        what = report.partition("\n")[0]
        places = [(_name(function)[0], line) for function, line in _PLACE.findall(report)]
        if places and not what.startswith("Error: Race"):
            outwards = dict.fromkeys(line for _, line in places if line)
            found[(what, places[-1][0], *reversed(outwards))] += 1
    return found


def races_of_handing_over(log: str) -> int:
    """How many of the races are between functions of which one hands over to the other."""
    return sum(_in_order(_RACE.findall(race)) for race in log.split("Race reported between ")[1:])


def _in_order(accesses: Sequence[tuple[str, str, str]]) -> bool:
    """Of the first access and all that race with it: kind, function and file."""
    named = [(kind, *_name(function), file) for kind, function, file in accesses]
    writes = {(name, file) for kind, name, _, file in named if kind == "Write"}
    reads = {last for kind, _, last, _ in named if kind == "Read"}
    known = [HANDED_OVER.get(write, ()) for write in writes]
    return bool(known and reads) and all(reads <= set(readers) for readers in known)


def _name(function: str) -> tuple[str, str]:
    """``void mx::A::f<int>(const T &) const`` as ``A::f``, and as ``f``."""
    name = re.split(r"[<(]", function)[0].split()[-1].removeprefix("mx::")
    return name, name.rpartition("::")[2]


def count_of(found: re.Pattern[str], output: str) -> int:
    """The number in the last of pytest's lines that tells of it."""
    counts = found.findall(output)
    return int(counts[-1]) if counts else 0


def run(seconds: float) -> list[dict[str, object]]:
    """A row for each tool; those of several GPUs share them out."""
    BUILD.mkdir(parents=True, exist_ok=True)
    begin, running = time.monotonic(), {}
    for tool, variables in zip(TOOLS, cycle(gpu.of_each_gpu()), strict=False):
        with (BUILD / f"{tool}.tests").open("w") as output:
            running[tool] = subprocess.Popen(
                [
                    "timeout",
                    "--kill-after=10",
                    f"{seconds:.0f}",
                    *command(tool, BUILD / f"{tool}.log"),
                ],
                cwd=gpu.ROOT,
                env=gpu.environment() | variables,
                stdout=output,
                stderr=output,
            )
    rows = []
    for tool, process in running.items():
        status = process.wait()
        log = BUILD / f"{tool}.log"
        text = log.read_text(errors="replace") if log.is_file() else ""
        errors, apart = errors_of(text), races_of_handing_over(text)
        tests = (BUILD / f"{tool}.tests").read_text(errors="replace")
        row: dict[str, object] = {
            "tool": tool,
            "cases": count_of(_CASES, tests),
            "failed": count_of(_FAILED, tests),
            "errors": "cut short"
            if status == 124
            else "no summary"
            if errors is None
            else errors - apart,
            "of_handing_over": apart,
            "seconds": round(time.monotonic() - begin),
        }
        print(*row.values(), flush=True)
        for reported, count in reports_of(text).most_common():
            print(f"  {count}:", *reported, flush=True)
        rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser("python -m op_tests.sanitize", description=__doc__)
    parser.add_argument("--seconds", type=float, default=500, help="end after so many")
    parser.add_argument("--save", action="store_true", help="keep the result in docs/measured")
    asked = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        raise SystemExit("there is no compute-sanitizer on PATH: it is part of the CUDA toolkit")
    rows = run(asked.seconds)
    if asked.save:
        import pandas as pd

        from aiter_mx.tuning import origin
        from op_tests.bench.common import MEASURED, gpu_name

        facts = {"commit": origin.commit(), "date": datetime.date.today().isoformat()}
        frame = pd.DataFrame(rows).assign(**facts, **gpu.digests())
        frame.to_csv(MEASURED / gpu_name() / "sanitizer.csv", index=False)
    return int(any(row["errors"] != 0 or row["failed"] or not row["cases"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
