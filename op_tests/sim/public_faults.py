"""Kernels of others with faults that the simulator has found: are they still found?

    python -m op_tests.sim.public_faults primus CHECKOUT WORK   # Primus-Turbo, pull request 330
    python -m op_tests.sim.public_faults flydsl CHECKOUT WORK   # FlyDSL's softmax; needs its wheel
    python -m op_tests.sim.public_faults aiter CHECKOUT         # aiter's block scale GEMM in Gluon

The checkouts are of these projects, or of a wheel's contents; what is compiled goes to the folder
WORK, and none of it is part of this project. Each kernel must break, by the instructions that stand
there, the rules that ``public_findings.csv`` has of it, and no other of class proven.
"""

from __future__ import annotations

import argparse
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from aiter_mx.sim.faults import MemoryFault
from aiter_mx.sim.program import SimOptions
from aiter_mx.sim.triton_driver import triton_launches
from op_tests.sim.public import Broken, known_rules, proven
from tune.published.flydsl import hip_capture
from tune.published.pr330 import Pr330
from tune.published.run import PublishedRun, regions_of

_ROWS = [256, 256]
_AITER = ("aiter", "aiter.ops", "aiter.ops.triton", "aiter.ops.triton.utils")


def primus(checkout: Path, work: Path) -> Iterator[tuple[str, Broken]]:
    """Forward's and wgrad's launches."""
    kernels = Pr330(checkout, work)
    yield from broken(kernels.product(_ROWS, 256, 512))
    yield from broken(kernels.wgrad(_ROWS, 256, 256))


def flydsl(checkout: Path, work: Path) -> Iterator[tuple[str, Broken]]:
    """The softmax of rows that are, and are not, whole tiles."""
    capture = hip_capture(work)
    sys.path.insert(0, str(checkout))
    import flydsl.expr as fx
    from kernels.norm.softmax_kernel import build_softmax_module

    for columns in (1024, 1000):
        x = torch.randn(4, columns)
        y = torch.empty_like(x)
        build_softmax_module(*x.shape, "f32")(x, y, len(x), fx.Stream(0))
        yield from broken(PublishedRun(capture.take(), regions_of([x], [y]), [x, y]))


def broken(run: PublishedRun) -> Iterator[tuple[str, Broken]]:
    """Each launch's kernel, and the proven rules that it breaks under either schedule."""
    for launch in run.launches:
        found: Broken = set()
        for schedule in ("round-robin", "random"):
            report = launch.program.launch(
                launch.kernel, launch.grid, launch.block, launch.kernarg, launch.shared_bytes,
                run.regions, SimOptions(collect=True, schedule=schedule, seed=1),
            )  # fmt: skip
            found |= proven(report.findings)
        yield launch.kernel, found


def aiter(checkout: Path) -> Iterator[tuple[str, Broken]]:
    """The product in Gluon of rows that do not fill its last tile, launched by its own wrapper."""
    for name in _AITER:
        sys.modules[name] = package = types.ModuleType(name)
        package.__path__ = [str(checkout / name.replace(".", "/"))]
    for name, has in {  # what asks a GPU
        "aiter.ops.triton.utils.core": {
            "AITER_TRITON_CONFIGS_PATH": str(checkout / "aiter/ops/triton/configs")
        },
        "aiter.ops.triton.utils._triton.arch_info": {"get_device": lambda: "MI350X"},
    }.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(has)
    from aiter.ops.triton.gluon.gemm_a8w8_blockscale import gemm_a8w8_blockscale

    M, N, K = 100, 256, 512
    x, w = (torch.randn(rows, K).to(torch.float8_e4m3fn) for rows in (M, N))
    scales = torch.rand(M, K // 128), torch.rand(N // 128, K // 128)
    try:
        with triton_launches(options=SimOptions(collect=True)):
            gemm_a8w8_blockscale(x, w, *scales)
    except MemoryFault as error:
        message = str(error)
        kernel, instruction = message.split()[1].rstrip(","), message.partition("'")[2].split()[0]
        yield kernel, {("memory-fault", instruction)}
    else:
        yield "_gemm_a8w8_blockscale_kernel", set()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1 where a fault is new, or is no longer found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="whose", required=True)
    for name in ("primus", "flydsl", "aiter"):
        command = commands.add_parser(name)
        command.add_argument("checkout", type=Path)
        if name != "aiter":
            command.add_argument("work", type=Path)
    options = parser.parse_args(arguments)
    if options.whose == "aiter":
        launches = aiter(options.checkout)
    else:
        launches = {"primus": primus, "flydsl": flydsl}[options.whose](
            options.checkout, options.work
        )
    wrong = 0
    for kernel, found in launches:
        known = known_rules(kernel)
        for rule, instruction in sorted(found):
            print(f"{kernel}: {rule} by {instruction}")
        for rule, instruction in sorted(found ^ known):
            state = "no longer found" if (rule, instruction) in known else "new"
            print(f"{kernel}: {rule} by {instruction} is {state}")
        if not found | known:
            print(f"{kernel}: nothing", flush=True)
        wrong += found != known
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
