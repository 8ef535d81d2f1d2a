"""``make test-gpu``, or ``python -m op_tests.gpu``: every test marked ``gpu``, on this machine.

First it compiles ahead what the tests will launch, as ``op_tests/rehearsal.py`` lists it, then it
runs them, a part on each GPU, one worker a core, each with one thread. Tests that fail are named as
they do. Nothing is installed, and no network is needed. ``build/gpu_tests`` gets a log and a JUnit
file of each part; with ``--save`` the result of a whole run goes to
``docs/measured/<gpu>/gpu_tests.csv`` together with a digest of the code, by which ``make test``
knows whether the saved run is of the code that is there.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import chain
from math import inf
from pathlib import Path

import pandas as pd
import pytest

from aiter_mx.jit.build import build
from aiter_mx.tuning import origin
from op_tests.bench.gpus import visible
from op_tests.shards import Shard

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "gpu_tests"
SAVED = ROOT / "docs" / "measured" / "nvidia_h200" / "gpu_tests.csv"
OF_HOPPER = {"csrc": "csrc", "aiter_mx": "aiter_mx", "configs": "configs/sm_90a"}
OF_OTHERS = ("gfx950", "aiter_mx/sim/", "aiter_mx/demo/", "__pycache__")
_REHEARSED = (
    pytest.ExitCode.OK,
    pytest.ExitCode.NO_TESTS_COLLECTED,
    pytest.ExitCode.TESTS_FAILED,  # those that expect an error of what is left out
)
ENDINGS = (".py", ".cu", ".h", ".csv", ".json")


def digests() -> dict[str, str]:
    """What the code that Hopper runs is known by, a digest for each of its folders."""
    return {name: _digest(ROOT / folder) for name, folder in OF_HOPPER.items()}


def _digest(folder: Path) -> str:
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(ROOT).as_posix()
        if name.endswith(ENDINGS) and not any(other in name for other in OF_OTHERS):
            whole.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    return whole.hexdigest()[:16]


def of_other_code(saved: Path = SAVED) -> list[str]:
    """Folders that are not what they were when the saved run was made; all where there is none."""
    if not saved.is_file():
        return list(OF_HOPPER)
    row = pd.read_csv(saved, dtype=str).iloc[0]
    return [name for name, digest in digests().items() if row.get(name) != digest]


def latest(measured: Path = SAVED.parents[1]) -> Path:
    """The saved run of this code, on whichever GPU of Hopper; else the last of other code."""
    runs = measured.glob(f"nvidia_*/{SAVED.name}")
    order = {run: (not of_other_code(run), pd.read_csv(run).date[0]) for run in runs}
    return max(order, key=lambda run: order[run], default=SAVED)


def state(saved: Path = SAVED) -> str:
    """A sentence about the saved run."""
    if not saved.is_file():
        return f"GPU tests: no run is saved in {saved.relative_to(ROOT)}; make test-gpu makes one"
    table = pd.read_csv(saved)
    of = f"GPU tests: the run of {table['date'][0]}, {saved.parent.name}, had"
    of += f" {table['tests'].sum()} tests"
    of += f", of which {table['failed'].sum()} failed and {table['skipped'].sum()} were skipped"
    if "unfinished" in table and (unfinished := table["unfinished"][0]):
        of += f", and ended before {unfinished} more"
    others = of_other_code(saved)
    return of + (f"; {', '.join(others)} changed since" if others else "; it is of this code")


def rows_of(junits: Iterable[Path]) -> list[dict[str, object]]:
    """A row for each file of tests: how many there were, failed and were skipped, and seconds; and
    in each how many of all files had begun, and no more, when the run ended: they have no name."""
    rows: dict[str, dict[str, float]] = {}
    unfinished = 0
    for case in (case for path in junits for case in ElementTree.parse(path).iter("testcase")):
        if not case.get("classname"):
            unfinished += 1
            continue
        of_file = case.get("classname", "").partition(".Test")[0].replace(".", "/") + ".py"
        row = rows.setdefault(of_file, dict.fromkeys(("tests", "failed", "skipped", "seconds"), 0))
        row["tests"] += 1
        row["failed"] += any(case.find(kind) is not None for kind in ("failure", "error"))
        row["skipped"] += case.find("skipped") is not None
        row["seconds"] += float(case.get("time", 0))
    counts = ("tests", "failed", "skipped")
    return [
        {"file": name, **{c: int(row[c]) for c in counts}, "seconds": round(row["seconds"], 1)}
        | {"unfinished": unfinished}
        for name, row in sorted(rows.items())
    ]


def _save(junits: Sequence[Path]) -> None:
    from op_tests.bench.common import gpu_name

    facts: Mapping[str, object] = {
        "commit": origin.commit(),
        "date": datetime.date.today().isoformat(),
        **digests(),
    }
    folder = ROOT / "docs" / "measured" / gpu_name()
    folder.mkdir(parents=True, exist_ok=True)
    frame = pd.DataFrame(rows_of(junits)).assign(**facts)
    frame.to_csv(folder / SAVED.name, index=False)
    print(f"saved in {folder / SAVED.name}")


def environment() -> dict[str, str]:
    """With one thread a process, as there is one core for each: torch takes all by default."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | threads | {"PYTHONPATH": path}


def _pytest(*arguments: str) -> list[str]:
    usual = ("-q", "--ignore=op_tests/engines", "--continue-on-collection-errors")
    return ["-m", "pytest", "-p", "no:cacheprovider", *usual, *arguments]


def requests(tests: Sequence[str], shard: Shard, jobs: int, until: float) -> Iterator[str]:
    """What tests launch, a line for each code object, as processes that each rehearse a part of
    them list it; they end with ``time.monotonic()`` at ``until``."""
    lists = [BUILD / f"ahead_{job}.requests" for job in range(jobs)]
    running = []
    for path, part in zip(lists, shard.parts(jobs), strict=True):
        path.write_text("")
        arguments = _pytest("-p", "op_tests.rehearsal", "--assert=plain", "-rN", "-W", "ignore")
        arguments += ["--shard", str(part), "--requests", str(path), *tests]
        command = [sys.executable, "-O", *arguments]
        with path.with_suffix(".log").open("w") as log:
            running.append(
                subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=log, stderr=log)
            )
    told: dict[str, None] = {}
    listing = True
    while listing and time.monotonic() < until:
        time.sleep(0.1)
        listing = any(process.poll() is None for process in running)
        new = dict.fromkeys(chain.from_iterable(map(_lines_of, lists)))
        new = {line: None for line in new if line not in told}
        told |= new
        yield from new
    for process, path in zip(running, lists, strict=True):
        ended = process.poll()
        process.kill()
        process.wait()
        if ended not in _REHEARSED:
            how = "was cut short" if ended is None else f"ended with {ended}"
            print(f"a rehearsal {how}: see {path.with_suffix('.log')}", flush=True)


def _lines_of(path: Path) -> list[str]:
    """The whole lines of a file that is being written."""
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def compile_ahead(lines: Iterable[str], jobs: int, until: float) -> None:
    """Compile what lines ask for; what is not built at ``until``, the tests compile."""
    from op_tests.rehearsal import request_of

    begin, pool = time.monotonic(), ThreadPoolExecutor(jobs)
    builds = [pool.submit(build, request_of(line)) for line in lines]
    built = wait(builds, max(0.0, until - time.monotonic())).done
    pool.shutdown(cancel_futures=True)
    print(f"compiled {len(built)} ahead in {time.monotonic() - begin:.0f} s", flush=True)


def of_each_gpu() -> list[dict[str, str]]:
    """The environment's variables of each GPU's processes, which see it first and then the others;
    a single one, of no variables, where there is no GPU."""
    names = visible()
    orders = [",".join(names[first:] + names[:first]) for first in range(len(names))]
    return [{"CUDA_VISIBLE_DEVICES": order} for order in orders] or [{}]


def run_all(tests: Sequence[str], parts: Sequence[Shard], jobs: int, seconds: float) -> int:
    """Run a part of the tests on each GPU, all at a time; the worst exit status."""
    workers = max(1, jobs // len(parts))
    with ThreadPoolExecutor(len(parts)) as pool:
        runs = [
            pool.submit(run_tests, tests, part, workers, seconds, gpus)
            for part, gpus in zip(parts, of_each_gpu(), strict=True)
        ]
        return max(run.result() for run in runs)


def run_tests(
    tests: Sequence[str], shard: Shard, jobs: int, seconds: float, variables: Mapping[str, str]
) -> int:
    """Run the tests, their output to people and to a file as it comes; pytest's exit status."""
    junit = BUILD / f"junit_{shard.index}_of_{shard.count}.xml"
    junit.unlink(missing_ok=True)
    workers = ["-n", str(jobs), "--dist", "worksteal"] if jobs > 1 else []
    arguments = _pytest("-m", "gpu", f"--junitxml={junit}", "--durations=15", "-rN", *workers)
    guard = ["timeout", "--kill-after=20", "--signal=INT", f"{seconds:.0f}"]
    command = [*guard, sys.executable, *arguments, "--shard", str(shard), *tests]
    log = BUILD / f"tests_{shard.index}_of_{shard.count}.log"
    with (
        log.open("w") as file,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment() | variables,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            file.write(line)
            file.flush()
    return process.returncode


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m op_tests.gpu", description=__doc__)
    add = parser.add_argument
    add("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="workers, of all GPUs")
    add("--shard", type=Shard.parse, default=Shard(1, 1), help="i/n: the i-th of n parts")
    add("--seconds", type=float, default=450, help="end the tests after so many")
    add("--ahead-only", action="store_true", help="compile, and run no test")
    add("--list", type=Path, help="only list what would be compiled, in this file; needs no GPU")
    add("--listed", type=Path, help="such a list: saves rehearsing the tests where the GPU is")
    add("--save", action="store_true", help="keep the result of all shards under docs/measured")
    add("--state", action="store_true", help="only say whether the saved run is of this code")
    add("tests", nargs="*", default=["op_tests"], help="files; by default all")
    return parser.parse_args()


def main() -> int:
    asked = _arguments()
    if asked.state:
        print(state(latest()))
        return 0
    if asked.save and asked.tests != ["op_tests"]:
        raise SystemExit("--save keeps the result of all tests: leave the files out")
    BUILD.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + (inf if asked.list else asked.seconds)
    if asked.listed:
        lines: Iterable[str] = asked.listed.read_text().splitlines(keepends=True)
    else:
        lines = requests(asked.tests, asked.shard, asked.jobs, until)
    if asked.list:
        asked.list.write_text("".join(sorted(lines)))
        return 0
    compile_ahead(lines, asked.jobs, until)
    if asked.ahead_only:
        return 0
    begin = time.monotonic()
    parts = asked.shard.parts(len(of_each_gpu()))
    status = run_all(asked.tests, parts, asked.jobs, asked.seconds)
    print(f"tests took {time.monotonic() - begin:.0f} s; logs and JUnit files are in {BUILD}")
    if asked.save:
        count = parts[0].count
        junits = [*BUILD.glob(f"junit_*_of_{count}.xml")]
        if len(junits) < count or status not in (0, 1):
            raise SystemExit("nothing saved: the run was cut short, or other shards are missing")
        _save(junits)
    return status


if __name__ == "__main__":
    sys.exit(main())
