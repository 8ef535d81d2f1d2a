"""Candidates judged without a GPU: compiled for gfx950, run in the simulator, bounded by a model.

A part of the problem is simulated as that part of a GPU would have it, in strict mode, on two
random inputs, and must give what the reference gives; the counters, scaled to the whole, give a
bound on the time on an MI355X. It is the largest of these, for the compute unit with the most
workgroups:

- memory: its share of the weights at 8 TB/s over 256 CUs;
- latency: the waits for memory that follow each other, each taking one microsecond, in as many
  rounds as it takes workgroups that fit by registers and LDS of the compiled object;
- issue: vector instructions at 4 cycles each and matrix passes at theirs, on 4 SIMDs;
- LDS by its bytes and bank conflicts, and the unit that takes the addresses of vector memory.

Bounds are given to three digits: where candidates do not differ in those, the kernel's own choice
comes first. These are no measurements, and rows say ``source=model``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from aiter_mx.errors import AiterMxError
from aiter_mx.kernels.spec import Problem
from aiter_mx.sim.program import SimOptions
from aiter_mx.sim.report import LaunchReport
from aiter_mx.sim.roofline import CUS, bounds
from aiter_mx.target import hardware
from aiter_mx.trial import Trial, try_out
from aiter_mx.tuning.builds import Ahead, build_of
from aiter_mx.tuning.candidates import Admission, Bench, Built, Candidate, Meter, Unfit
from aiter_mx.workloads.workload import workload_of

_SHARE = 0.02
_COUNTED = SimOptions(count_conflicts=True)


def modelled_meter(op: str, jobs: int) -> Meter:
    """A meter for gfx950, on any machine, with so many compilers at a time."""
    workload_of(op)  # an op that cannot be tried out raises here

    @contextmanager
    def bench(problem: Problem) -> Iterator[Bench]:
        yield ModelBench(op, problem)

    return Meter("model", ("hip",), lambda: Ahead(hardware("gfx950"), jobs), bench)


class ModelBench:
    """The candidates of one problem in the simulator."""

    def __init__(self, op: str, problem: Problem) -> None:
        self._op, self._problem = op, problem
        self._us: dict[Candidate, float] = {}

    def admit(self, candidate: Candidate) -> Admission:
        spec, config = candidate.spec, candidate.config
        if spec.module is None or spec.parts(hardware("gfx950"), self._problem, config):
            raise Unfit("it is made of other ops, and only single kernels are simulated")
        workload = workload_of(self._op)
        part, read_bytes = workload.sample(self._problem, _SHARE), workload.read_bytes
        share = read_bytes(part, None) / read_bytes(self._problem, None)
        cu_num = max(1, round(CUS * share))
        rel_err = 0.0
        try:
            for number in range(2):
                trial = try_out(candidate.spec, part, candidate.config, _COUNTED, cu_num, number)
                verdict = workload.judge(part, trial.operands)(trial.operands)
                if not verdict.right:
                    raise Unfit(f"wrong: relative error {verdict.rel_err:.2e} in the simulator")
                rel_err = max(rel_err, verdict.rel_err)
            _refuse_spills(trial)
            self._us[candidate] = self._bound_us(candidate, trial, part)
        except Unfit:
            raise
        except (AiterMxError, ValueError) as error:
            raise Unfit(f"{type(error).__name__}: {error}") from None
        return Admission(self._us[candidate], rel_err)

    def sample_us(self, candidate: Candidate) -> float:
        return self._us[candidate]

    def confirm(self, candidate: Candidate) -> None:
        return

    def drop(self, candidate: Candidate) -> None:
        self._us.pop(candidate, None)

    def touched(self) -> float | None:
        return None

    def build_of(self, candidate: Candidate) -> Built:
        return build_of(hardware("gfx950"), self._problem, candidate)

    def _bound_us(self, candidate: Candidate, trial: Trial, part: Problem) -> float:
        module = candidate.spec.module
        assert module is not None
        launch = module.geometry(hardware("gfx950"), self._problem, candidate.config)
        groups = launch.grid[0] * launch.grid[1] * launch.grid[2]
        read_bytes = workload_of(self._op).read_bytes
        weights = read_bytes(self._problem, None)
        whole = _scaled(trial.report, weights / read_bytes(part, trial.operands))
        limits = bounds(whole, weights, groups, trial.waves_a_simd)
        return float(f"{limits.longest_us:.3g}")


def _refuse_spills(trial: Trial) -> None:
    kernel = trial.kernel
    spilled = kernel.vgpr_spills + kernel.sgpr_spills
    if spilled or kernel.scratch_bytes:
        raise Unfit(f"it spills {spilled} registers and uses {kernel.scratch_bytes} scratch bytes")


def _scaled(report: LaunchReport, factor: float) -> LaunchReport:
    """The report of a launch that does so many times as much."""

    def times(count: int) -> int:
        return round(count * factor)

    return replace(
        report,
        waves=times(report.waves),
        mnemonics={name: times(count) for name, count in report.mnemonics.items()},
        mfma_passes={name: times(count) for name, count in report.mfma_passes.items()},
        bytes_read=times(report.bytes_read),
        bytes_written=times(report.bytes_written),
        lds_bytes_read=times(report.lds_bytes_read),
        lds_bytes_written=times(report.lds_bytes_written),
        lds_conflicts=times(report.lds_conflicts),
        address_cycles=times(report.address_cycles),
        waits=times(report.waits),
        in_flight_bytes=times(report.in_flight_bytes),
        latencies=times(report.latencies),
    )
