"""Triton's tutorials in the simulator: do they come out right, and what is found in their kernels.

    git clone https://github.com/triton-lang/triton
    python -m op_tests.sim.tutorials triton/python/tutorials [--only softmax] [--configs 2]

The scripts are Triton's and not part of this project. Each is executed with tensors on the CPU and
without its benchmarks, then its pytest functions with the first of their parameters. Scripts for
other GPUs' instructions fail where they ask for these, which is said. A wrong result, an error or a
proven finding that is not in ``public_findings.csv`` makes the program fail, and with
``--coherence`` one that is there and no longer found.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch.nn import functional

from aiter_mx.sim.program import SimOptions
from aiter_mx.sim.report import Finding, LaunchReport
from aiter_mx.sim.triton_driver import triton_launches
from op_tests.sim.public import ROOT, SAVED, known_rules, proven, save_counts

_WRONG = re.compile(r"❌.*|.*\bdiffer$")
_ON_CPU = (
    (r"""(["'])cuda(:0)?\1""", '"cpu"'),
    (r"\.is_cuda\b(?!\()", ".is_cpu"),
    (r"\.cuda\(\)", ".cpu()"),
    (r"'gfx942'", "'gfx942', 'gfx950'"),  # in lists of the CDNA that older scripts know
)


class _NoBenchmark:
    """What ``perf_report`` makes of a benchmark."""

    def run(self, **_: Any) -> None:
        """Measures nothing: nothing here takes a GPU's time."""


@contextlib.contextmanager
def _without_benchmarks(configs: int) -> Iterator[None]:
    autotune = triton.autotune

    def fewer(*arguments: Any, **keywords: Any) -> Any:
        keywords.pop("prune_configs_by", None)
        some = arguments[0] if arguments else keywords.pop("configs")
        return autotune(list(some)[:configs], *arguments[1:], **keywords)

    with (
        mock.patch.object(triton, "autotune", fewer),
        mock.patch.object(triton.testing, "perf_report", lambda *_: lambda f: _NoBenchmark()),
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 4)),
        mock.patch.object(torch.cuda, "synchronize", lambda *_: None),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
        mock.patch.object(torch, "allclose", _close),
        mock.patch.object(torch, "matmul", _in_double(torch.matmul)),
        mock.patch.object(functional, "layer_norm", _in_double(functional.layer_norm)),
        mock.patch.dict(sys.modules, {"tabulate": mock.Mock()}),  # prints what is not looked at
    ):
        yield


def _in_double(reference: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What torch computes of 16-bit tensors, in double and rounded once, as on a CPU it is not."""

    def exact(*arguments: Any, **keywords: Any) -> torch.Tensor:
        (dtype,) = {x.dtype for x in arguments if isinstance(x, torch.Tensor)}
        wide = [x.double() if isinstance(x, torch.Tensor) else x for x in arguments]
        return reference(*wide, **keywords).to(dtype)

    return exact


def _close(a: torch.Tensor, b: torch.Tensor, rtol: float = 0, atol: float = 0) -> bool:
    """``torch.allclose`` that grants an ulp: sums in another order may round to the neighbour."""
    ulp = torch.finfo(a.dtype).eps if a.dtype.is_floating_point else 0
    return bool(torch.isclose(a, b, max(rtol, ulp), atol).all())


def _first_parameters(function: Any) -> dict[str, Any]:
    """The first value of each parameter that a pytest function is given."""
    found: dict[str, Any] = {}
    for mark in getattr(function, "pytestmark", ()):
        if mark.name == "parametrize":
            names, values = mark.args[0], mark.args[1][0]
            split = [name.strip() for name in names.split(",")] if "," in names else [names]
            found.update(zip(split, values if len(split) > 1 else [values], strict=True))
    return found


def run(path: Path, configs: int, options: SimOptions) -> tuple[list[LaunchReport], str]:
    """The launches of a script, and what went wrong in it, or nothing."""
    text = path.read_text()
    for pattern, on_cpu in _ON_CPU:
        text = re.sub(pattern, on_cpu, text)
    reports: list[LaunchReport] = []
    said = io.StringIO()
    try:
        with (
            _without_benchmarks(configs),
            contextlib.redirect_stdout(said),
            triton_launches(reports.append, options),
            mock.patch.object(sys, "argv", [str(path)]),
        ):
            # Triton reads a kernel's source from its file.
            copy = path.with_name(f"on_cpu_{path.name}")
            copy.write_text(text)
            try:
                names: dict[str, Any] = {"__name__": "__main__", "__file__": str(copy)}
                exec(compile(text, str(copy), "exec"), names)
                for name, function in list(names.items()):
                    if name.startswith("test_") and (parameters := _first_parameters(function)):
                        function(**parameters)
            finally:
                copy.unlink()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        what = re.sub(r"0x[0-9a-f]{8,}|\d+ bytes beyond", "...", what)  # differs from run to run
        return reports, f"{what} at {Path(where.filename).name}:{where.lineno}, {where.line}"
    wrong = _WRONG.search(said.getvalue())
    return reports, wrong[0] if wrong else ""


def findings_of(reports: Sequence[LaunchReport]) -> list[Finding]:
    """What was found in all launches."""
    return [found for report in reports for found in report.findings]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1 when a script fails or something proven is found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="part of the scripts' names")
    parser.add_argument("--coherence", action="store_true", help="with caches, on one thread")
    parser.add_argument("--save", action="store_true", help=f"write {SAVED.relative_to(ROOT)}")
    parser.add_argument("--configs", type=int, default=2, help="of those to be tuned, the first")
    options = parser.parse_args(arguments)
    failed, rows = 0, []
    sim = SimOptions(collect=True, coherence=options.coherence)
    by_class: Counter[str] = Counter()
    for path in sorted(options.folder.glob("*.py")):
        if options.only not in path.name:
            continue
        begin = time.perf_counter()
        reports, wrong = run(path, options.configs, sim)
        findings = findings_of(reports)
        by_class.update(found.kind for found in findings)
        rules = Counter(f"{found.kind} {found.check}" for found in findings)
        known = known_rules(f"tutorials/{path.name}")
        new = [found for found in findings if proven([found]) - known]
        missed = {rule for rule, _ in known} - {found.check for found in findings}
        failed += bool((wrong and not known) or new or (options.coherence and missed))
        kernels = Counter(report.kernel for report in reports)
        seconds = time.perf_counter() - begin
        row: dict[str, object] = {"script": path.name, "launches": len(reports)}
        row |= {"kernels": " ".join(kernels), "outcome": wrong or "right"}
        rows.append(row | {"findings": "; ".join(f"{r} {n}" for r, n in sorted(rules.items()))})
        print(f"{path.name}: {dict(kernels)}, {wrong or 'right'}, {dict(rules)} ({seconds:.0f} s)")
        for found in new:
            print(f"    {found.check}: {found.message}")
        if options.coherence and missed:
            print(f"    no longer found: {', '.join(sorted(missed))}")
    if options.save:
        save_counts("public_tutorials" + "_coherence" * options.coherence, rows)
    print(f"findings by class {dict(by_class)}; {failed} scripts failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
