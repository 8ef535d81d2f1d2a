"""``python -m op_tests.planted``: mistakes in Hopper's sources, each of which tests must find.

Each mistake is planted in a copy of ``csrc``, over which the conformance suite of its op is run on
the GPU of this machine until a test fails: first the tests that should find it, then all. The tests
that failed are then run over the sources as they are. ``build/planted`` gets the outputs;
``--save`` keeps what found each in ``docs/measured/<gpu>/planted.csv``. ``--resume`` tries no
mistake again that a test found before in the same sources. ``--compile`` needs no GPU: it says
whether every mistake compiles. The exit status is 1 where one is not found, or the sources as they
are fail.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from aiter_mx.jit import build as jit
from op_tests import gpu
from op_tests.mistakes import MISTAKES, Mistake

BUILD = gpu.ROOT / "build" / "planted"
VARIABLE = "AITER_MX_PLANTED_CSRC"
_FAILED = re.compile(r"^FAILED \S+?::(\w+(?:\[.*?\](?=[\s:]|$))?)", re.MULTILINE)
_ENDED = "ended with "
_NO_FINDING = ("BuildError", "OUT_OF_MEMORY", "CUDA out of memory")
"""What fails a test whatever the sources are."""


def pytest_load_initial_conftests() -> None:
    """As a plugin: have kernels be built of the sources that a variable names."""
    folder = Path(os.environ[VARIABLE])
    jit.csrc_dir = lambda: folder


def sources(name: str, mistake: Mistake | None) -> Path:
    """A copy of ``csrc``, with a mistake or without."""
    folder = BUILD / name / "csrc"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(gpu.ROOT / "csrc", folder)
    if mistake is not None:
        mistake.plant(folder)
    return folder


def tested(csrc: Path, output: Path, *tests: str) -> str:
    """The first test that fails over some sources, or how the run ended."""
    plugin = ("-p", "op_tests.planted", "-p", "no:cacheprovider", "-q", "-x", "-m", "gpu")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, *tests],
        cwd=gpu.ROOT,
        env=gpu.environment() | {VARIABLE: str(csrc)},
        capture_output=True,
        text=True,
        check=False,
    )
    output.write_text(done.stdout + done.stderr)
    return ending(done.returncode, done.stdout)


def ending(status: int, output: str) -> str:
    """Of a run of pytest: the test that failed, nothing where none did, or words."""
    failed = _FAILED.search(output)
    if status == 1 and failed and not any(words in output for words in _NO_FINDING):
        return failed[1]
    return "" if status == 0 else f"{_ENDED}{status}"


def found_by(mistake: Mistake, resume: bool = False) -> str:
    """The first test that fails over the mistake."""
    digest, kept = gpu.digests()["csrc"], BUILD / mistake.name / "found"
    if resume and kept.is_file():
        of, test = kept.read_text().split(" ", 1)
        if of == digest and is_test(test):
            return test
    csrc, of = sources(mistake.name, mistake), f"{mistake.kernel}-gpu"
    for among in (f"{of} and {mistake.sought}", of):
        test = tested(csrc, csrc.parent / "output", "-k", among, mistake.suite)
        if test:
            break
    kept.write_text(f"{digest} {test}")
    return test


def controls(found: Mapping[Mistake, str]) -> list[str]:
    """The tests that found mistakes, as pytest names them, each once."""
    return sorted({f"{m.suite}::{test}" for m, test in found.items() if is_test(test)})


def is_test(found: str) -> bool:
    """Whether a mistake was found, by a test."""
    return bool(found) and not found.startswith(_ENDED)


def compiled(mistake: Mistake) -> str:
    """Why a mistake does not compile for Hopper, or nothing."""
    from aiter_mx.jit.build import source_names
    from aiter_mx.launch import module_request
    from op_tests.jit.launches_sm90 import SM90, launches

    csrc = sources(mistake.name, mistake)
    for module, problem, config in launches().values():
        request = module_request(module, SM90, problem, config)
        if mistake.source in source_names(request):
            command = ["-c", _BUILD, str(csrc), request.source, repr(request.defines)]
            done = subprocess.run(
                [sys.executable, *command],
                env=gpu.environment(),
                capture_output=True,
                text=True,
                check=False,
            )
            return done.stderr[-500:] if done.returncode else ""
    return f"no launch uses {mistake.source}"


_BUILD = """
import ast, sys
from pathlib import Path
from aiter_mx.jit import build
build.csrc_dir = lambda: Path(sys.argv[1])
build.build(build.BuildRequest(sys.argv[2], "sm_90a", ast.literal_eval(sys.argv[3])))
"""


def main() -> int:
    parser = argparse.ArgumentParser("python -m op_tests.planted", description=__doc__)
    parser.add_argument("--compile", action="store_true", help="compile each, and run nothing")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--save", action="store_true", help="keep what found each")
    parser.add_argument("--resume", action="store_true", help="keep what tests found before")
    asked = parser.parse_args()
    with ThreadPoolExecutor(asked.jobs) as pool:
        if asked.compile:
            reasons = list(pool.map(compiled, MISTAKES))
            for mistake, reason in zip(MISTAKES, reasons, strict=True):
                print(mistake.name, reason or "compiles")
            return int(any(reasons))
        tests = pool.map(partial(found_by, resume=asked.resume), MISTAKES)
        found = dict(zip(MISTAKES, tests, strict=True))
    plain, passing = sources("none", None), controls(found)
    failure = tested(plain, plain.parent / "output", *passing) if passing else ""
    rows = [
        {"kernel": m.kernel, "source": m.source, "mistake": m.what, "found_by": test}
        for m, test in found.items()
    ]
    for row in rows:
        print(f"{row['kernel']}, {row['mistake']}: {row['found_by'] or 'NOT FOUND'}")
    print(f"{len(passing)} tests over the sources as they are: {failure or 'all pass'}")
    if asked.save:
        import pandas as pd

        from op_tests.bench.common import MEASURED, gpu_name

        pd.DataFrame(rows).to_csv(MEASURED / gpu_name() / "planted.csv", index=False)
    return int(bool(failure) or not all(map(is_test, found.values())))


if __name__ == "__main__":
    sys.exit(main())
