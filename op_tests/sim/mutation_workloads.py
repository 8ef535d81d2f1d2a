"""Kernels to plant mistakes in whose launches are judged by their workloads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from aiter_mx.kernels.registry import find_kernel
from aiter_mx.kernels.spec import KernelSpec, Module, Problem
from aiter_mx.sim.program import Program, SimOptions
from aiter_mx.sim.timing.constants import CUS
from aiter_mx.target import hardware
from aiter_mx.trial import Prepared, prepare
from aiter_mx.workloads import workload_of
from aiter_mx.workloads.workload import Operands
from op_tests.launches import bound, most_read
from op_tests.sim.mutation_operands import (
    NAN_PAYLOAD,
    NAN_SCALE,
    nans_of,
    poison_of,
    poisoned_rows,
    posed,
)
from op_tests.sim.mutation_past import PastLaunch

_SCHEDULES = ("random", "round-robin", "run-to-barrier")
_MAX_STEPS, _CPU = 1 << 18, torch.device("cpu")
_PRODUCTS = ("grouped_gemm", "grouped_wgrad", "moe_gemm", "moe_up", "moe_down")
_ROWS = (*_PRODUCTS, "moe_combine", "group_runs")  # whose results are rows, not all of them written
_SCALES = ("xs", "ws", "x_scale", "grad_scale")
_PAYLOADS = ("xq", "wq")


@dataclass(frozen=True, eq=False)
class WorkloadCase:
    """A kernel variant and the problems that it is held against, which share its code object.

    Attributes:
        name: of the variant.
        op, kernel: which kernel it is.
        problems: what is computed, each with a schedule of its own.
        config: the kernel's parameters; by default its own choice for the first problem.
        cu_num: compute units that take the work: of few, each has several tiles.
        other_cu_num: of problems by number that more or fewer take.
        past: a problem whose grid has workgroups beyond the last tile.
        with_nans: numbers of the problems in which blocks of a product have NaN for a scale.
    """

    name: str
    op: str
    kernel: str
    problems: tuple[Problem, ...]
    config: Mapping[str, int] | None = None
    cu_num: int = CUS
    with_nans: tuple[int, ...] = (0,)
    other_cu_num: Mapping[int, int] = field(default_factory=dict)
    past: Problem | None = None

    @cached_property
    def spec(self) -> KernelSpec:
        """The kernel."""
        return find_kernel(self.op, "gfx950", "hip", self.kernel)

    @property
    def module(self) -> Module:
        """What it is compiled from."""
        assert self.spec.module is not None
        return self.spec.module

    @cached_property
    def launches(self) -> list[WorkloadLaunch | PastLaunch]:
        """The problems with their data."""
        past = [PastLaunch(self.spec, self.past, self.config or {})] if self.past else []
        return [*(WorkloadLaunch(self, i) for i in range(len(self.problems))), *past]

    @cached_property
    def image(self) -> bytes:
        """The code object."""
        return self.prepared(0, None).image.read_bytes()

    def prepared(self, number: int, operands: list[torch.Tensor | None] | None) -> Prepared:
        """The launch of a problem."""
        target = hardware("gfx950")
        assert not self.spec.refusal(target, self.problems[number])
        config = self.config or self.spec.configure(target, self.problems[0])
        cu_num = self.other_cu_num.get(number, self.cu_num)
        return prepare(self.spec, self.problems[number], config, cu_num, operands)


class WorkloadLaunch:
    """A problem with its operands in place."""

    def __init__(self, case: WorkloadCase, number: int) -> None:
        problem, workload = case.problems[number], workload_of(case.op)
        drawn = workload.operands(problem, _CPU, number)
        given, self._operands = posed(case.op, problem, number, drawn)
        self._judge = workload.judge(problem, self._operands)
        self._prepared = case.prepared(number, given)
        written = [arg.access in ("w", "rw") for arg in case.module.pointers]
        self._results = [
            tensor
            for tensor, is_result in zip(self._operands, written, strict=False)
            if is_result and tensor is not None
        ]
        has_nans = case.op in _PRODUCTS and number in case.with_nans
        self._options = SimOptions(
            schedule=_SCHEDULES[number % len(_SCHEDULES)],
            seed=number,
            max_steps=_MAX_STEPS,
            finite_scales=has_nans,
            count_groups=case.op == "quantize",
        )
        counts = self._options.count_groups
        self._most_read = most_read(self._prepared.run(self._options)) if counts else 0
        self._left_alone: list[torch.Tensor] | None = None
        self._without_nans: tuple[list[torch.Tensor], torch.Tensor] | None = None
        if case.op in _ROWS:
            run = bound(find_kernel(case.op, "gfx950", "torch", "reference"), _CPU, problem)
            self._poison()
            run(self._operands)
            self._left_alone = [poisoned_rows(result) for result in self._results]
            if has_nans:
                self._without_nans = self._plant_nans(case, run, number)

    def _poison(self) -> None:
        for result in self._results:  # where it is a scale, NaN
            result.view(torch.uint8).fill_(poison_of(result))

    def _plant_nans(
        self, case: WorkloadCase, run: Callable[[Operands], None], seed: int
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Give some blocks NaN for a scale and, but in the first problem, some rows a NaN to begin
        with: the results without, and where they are NaN then. Where results are blocks, rows of x
        alone, as rows of w would leave no block without."""
        found, draw = [], torch.Generator().manual_seed(seed)
        payloads = _PAYLOADS[: 1 if self._results[-1].dtype == torch.uint8 else None]
        for is_planted in (False, True):
            for arg, values in zip(case.module.pointers, self._operands, strict=False):
                if is_planted and arg.name in _SCALES and values is not None:
                    flat = values.view(-1)
                    flat[torch.randperm(len(flat), generator=draw)[:4]] = NAN_SCALE
                elif is_planted and seed and arg.name in payloads and values is not None:
                    values.view(torch.uint8).view(-1, values.shape[-1])[::7, 0] = NAN_PAYLOAD
            for result in self._results:
                result.view(torch.uint8).zero_()
            run(self._operands)
            found.append([result.clone() for result in self._results])
        return found[0], nans_of(found[1][-1])

    def run(self, program: Program, strict: bool = True) -> None:
        """Launch and compare.

        Raises:
            SimulatorError: the simulator found a mistake.
            AssertionError: the result is wrong.
        """
        self._poison()
        report = replace(self._prepared, program=program).run(replace(self._options, strict=strict))
        assert most_read(report) <= self._most_read, "a workgroup does what others are to do"
        for result, left_alone in zip(self._results, self._left_alone or (), strict=False):
            assert poisoned_rows(result)[left_alone].all(), "a row that is no result is written"
        if self._without_nans is not None:
            expected, nans = self._without_nans
            assert torch.equal(nans_of(self._results[-1]), nans), "NaN elsewhere"
            for pair in zip(self._results, expected, strict=True):
                result, without = (t.view(torch.uint8).view(*nans.shape, -1) for t in pair)
                result[nans] = without[nans]
        verdict = self._judge(self._operands)
        assert verdict.right, str(verdict)
