"""``make sanitize-gpu``, or ``python -m op_tests.sanitize``: compute-sanitizer over every kernel.

One case of every kernel that the conformance suites try on this GPU, and each test marked
``sanitized``, is run under each of its tools, all at once: memcheck, racecheck, initcheck,
synccheck. They look at the package's own kernels alone. ``build/sanitizer`` gets the logs;
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
from pathlib import Path

from op_tests import gpu

TOOLS: dict[str, tuple[str, ...]] = {
    "memcheck": ("--report-api-errors", "no"),  # the driver's bindings ask for functions it lacks
    "racecheck": (),
    "initcheck": ("--check-api-memory-access", "no"),  # tests copy what padding rows hold
    "synccheck": (),
}
"""And their options."""
BUILD = gpu.ROOT / "build" / "sanitizer"
SUITES = ("linear", "moe", "grouped", "training", "quantize")
TESTS = (
    *(f"op_tests/{suite}/test_conformance.py" for suite in SUITES),
    "op_tests/grouped/test_promoted.py",
    "op_tests/training/test_gpu.py",
)
LEFT_OUT = {"racecheck": "training"}
"""Tests whose kernel a tool's own code makes end with an illegal instruction."""
HANDED_OVER = (
    "aiter_mx_grouped_gemm_persistent",
    "aiter_mx_linear_wgmma_bf16",
    "aiter_mx_moe_gemm_wgmma_f16",
    "aiter_mx_moe_gemm_wgmma_fp8",
)
"""Kernels whose warps write, meet in ``__syncwarp``, and have one lane arrive at an mbarrier for
all, or have TMA fill again what they read: racecheck orders neither."""
_SUMMARY = re.compile(r"(ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")
_RACE = re.compile(r"Race reported between \w+ access at (\w+)")
_CASES = re.compile(r"(\d+) passed")
_FAILED = re.compile(r"(\d+) failed")


def command(tool: str, log: Path) -> list[str]:
    """What runs one case of every kernel under a tool."""
    own = ("--kernel-name", "kernel_substring=aiter_mx", "--target-processes", "all")
    sanitizer = ["compute-sanitizer", "--tool", tool, *TOOLS[tool], *own, "--log-file", str(log)]
    given = [test for test in TESTS if tool not in LEFT_OUT or LEFT_OUT[tool] not in test]
    tests = ("-q", "-p", "no:cacheprovider", "-m", "gpu", "--one-each", *given)
    return [*sanitizer, sys.executable, "-m", "pytest", *tests]


def errors_of(log: str) -> int | None:
    """How many errors or hazards a log sums up to; None where it has no summary."""
    found = _SUMMARY.findall(log)
    return sum(int(count) for _, count in found) if found else None


def races_of_handing_over(log: str) -> int:
    """How many of the races are of kernels that hand over in a way which racecheck misses."""
    return sum(kernel in HANDED_OVER for kernel in _RACE.findall(log))


def count_of(found: re.Pattern[str], output: str) -> int:
    """The number in the last of pytest's lines that tells of it."""
    counts = found.findall(output)
    return int(counts[-1]) if counts else 0


def run(seconds: float) -> list[dict[str, object]]:
    """A row for each tool."""
    BUILD.mkdir(parents=True, exist_ok=True)
    begin, running = time.monotonic(), {}
    for tool in TOOLS:
        with (BUILD / f"{tool}.tests").open("w") as output:
            running[tool] = subprocess.Popen(
                [
                    "timeout",
                    "--kill-after=10",
                    f"{seconds:.0f}",
                    *command(tool, BUILD / f"{tool}.log"),
                ],
                cwd=gpu.ROOT,
                env=gpu.environment(),
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
