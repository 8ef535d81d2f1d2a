"""Workgroups that a grid has beyond the last tile: mistakes that let them work show there alone."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from aiter_mx.kernels.spec import Config, KernelSpec, Problem
from aiter_mx.sim.program import Program, SimOptions
from aiter_mx.trial import prepare
from aiter_mx.tuning.traces import TRACED
from aiter_mx.workloads import workload_of


class PastLaunch:
    """The last workgroup of a problem's grid, which has more of them than there are tiles."""

    def __init__(self, spec: KernelSpec, problem: Problem, config: Config) -> None:
        operands = workload_of(spec.op).hollow(problem)
        self._prepared = prepare(spec, problem, config, operands=operands)
        last = prod(self._prepared.geometry.grid) - 1
        self._options = SimOptions(first_group=last, group_count=1, checks=TRACED.checks)

    def run(self, program: Program, strict: bool = True) -> None:
        """Launch it.

        Raises:
            SimulatorError: the simulator found a mistake.
            AssertionError: it writes something.
        """
        prepared = replace(self._prepared, program=program)
        report = prepared.run(replace(self._options, strict=strict))
        assert report.bytes_written == 0, "a workgroup past the last tile writes"
