"""Compares the model of time by a few workgroups of a launch with the model by all of them.

    python -m tune.sampled

Ten launches, each simulated twice: by 3 of their workgroups, 16 where routing or groups have them
differ, replayed on one compute unit; and whole, every workgroup replayed on the unit that it is
dealt to. The result is docs/measured/gfx950_simulated/sampled.csv, with the processor time that
both take, from a compiled kernel to its prediction.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.kernels.quantize import QuantizeProblem
from aiter_mx.kernels.spec import Problem
from aiter_mx.sim.timing.cu import SplitTrace
from aiter_mx.sim.timing.model import Traced, predict
from aiter_mx.sim.timing.sample import ALIKE, UNLIKE
from aiter_mx.target import hardware
from aiter_mx.trial import prepare
from aiter_mx.tuning.traces import TRACED, held_by_unit, sampled
from aiter_mx.workloads.workload import workload_of

SAVED = Path(__file__).parents[1] / "docs" / "measured" / "gfx950_simulated" / "sampled.csv"
CASES: tuple[tuple[str, Problem], ...] = (
    ("linear", LinearProblem(1, 2304, 6144)),
    ("linear", LinearProblem(4, 6144, 2048)),
    ("linear", LinearProblem(16, 2304, 6144)),
    ("linear", LinearProblem(64, 2304, 6144)),
    ("linear", LinearProblem(96, 6144, 2048)),
    ("linear", LinearProblem(1024, 2304, 2048)),
    ("moe_gemm", MoeGemmProblem(1, 768, 6144, 128, 4, 16, "mxfp8", activation="silu")),
    ("moe_gemm", MoeGemmProblem(16, 768, 2048, 128, 4, 16, "mxfp8", activation="silu")),
    ("grouped_gemm", GroupedGemmProblem(4096, 1536, 2048, 8)),
    ("quantize", QuantizeProblem(512, 6144)),
)
BAR = 0.05


@dataclass(frozen=True)
class Line:
    """A launch by some of its workgroups, and by all.

    Attributes:
        op, shape, kernel: what is launched.
        groups: workgroups.
        sampled_us, whole_us: its time, by some and by all.
        off: by what the former is too long.
        sampled_s, whole_s: processor time of simulation and replay.
    """

    op: str
    shape: str
    kernel: str
    groups: int
    sampled_us: float
    whole_us: float
    off: float
    sampled_s: float
    whole_s: float


def compared(op: str, problem: Problem) -> Line:
    """One launch, both ways."""
    chosen = route(op, hardware("gfx950"), problem)
    hollow = workload_of(op).hollow(problem)
    launch = prepare(chosen.spec, problem, chosen.config, operands=hollow)
    begin = time.process_time()
    is_unlike = op in ("grouped_gemm", "moe_gemm")
    found = sampled(launch, UNLIKE if is_unlike else ALIKE)
    part = Traced(SplitTrace(found.trace), found.working, held_by_unit(launch))
    some = predict(part).us
    middle = time.process_time()
    all_ = predict(launch.traced(launch.run(TRACED)), every_unit=True).us
    end = time.process_time()
    shape = " ".join(f"{name}={size}" for name, size in vars(problem).items() if name.isupper())
    times = middle - begin, end - middle
    return Line(op, shape, chosen.kernel, launch.groups, some, all_, some / all_ - 1, *times)


def lines(cases: Iterable[tuple[str, Problem]] = CASES) -> Iterator[Line]:
    """All launches."""
    for op, problem in cases:
        yield compared(op, problem)


def save(path: Path, found: Iterable[Line]) -> None:
    """Write the table."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([field.name for field in fields(Line)])
        for line in found:
            values = vars(line).values()
            writer.writerow([f"{each:.3f}" if isinstance(each, float) else each for each in values])


def main() -> int:
    """Run the command line; 1 where a launch is off by more than 5 %."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=SAVED)
    options = parser.parse_args()
    found = []
    for line in lines():
        print(f"{line.op} {line.shape}: {line.sampled_us:.2f} us, whole {line.whole_us:.2f} us, "
              f"{line.off:+.1%}, {line.sampled_s:.1f} s", flush=True)  # fmt: skip
        found.append(line)
    save(options.out, found)
    return int(any(abs(line.off) > BAR for line in found))


if __name__ == "__main__":
    raise SystemExit(main())
