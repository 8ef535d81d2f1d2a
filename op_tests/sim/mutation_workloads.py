"""Kernels beside the linear ones to plant mistakes in: small launches, judged by workloads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch

from aiter_mx.kernels.group_runs import GroupRunsProblem
from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from aiter_mx.kernels.grouped_wgrad import GroupedWgradProblem
from aiter_mx.kernels.moe_align import MoeAlignProblem
from aiter_mx.kernels.moe_combine import MoeCombineProblem
from aiter_mx.kernels.moe_down import MoeDownProblem
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.kernels.moe_up import MoeUpProblem
from aiter_mx.kernels.quantize import QuantizeProblem
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


_dgrad = partial(GroupedGemmProblem, out_dtype="fp32", a_format="e5m2")
WORKLOAD_CASES = (
    WorkloadCase(
        "moe_up f2 w2 h1",
        "moe_up",
        "gemv",
        (
            MoeUpProblem(2, 64, 2176, 3, 2, 5, shared=1, has_map=1, bias="bf16"),
            MoeUpProblem(1, 192, 3200, 4, 2, 3, shared=1, has_map=1, bias="fp32"),
            MoeUpProblem(3, 64, 2304, 3, 2, 5, shared=1, has_map=1, bias="fp16"),
            MoeUpProblem(4, 64, 2176, 3, 2, 5, shared=1, has_map=1, bias="bf16"),
        ),
        {"features": 2, "waves": 2, "halves": 1},
    ),
    WorkloadCase(
        "moe_down r3 w2 h1",
        "moe_down",
        "gemv",
        (
            MoeDownProblem(2, 64, 1152, 3, 2, 5, shared=1, has_map=1, bias="bf16"),
            MoeDownProblem(1, 97, 1280, 4, 2, 4, shared=1, has_map=1, bias="fp32"),
            MoeDownProblem(3, 32, 1408, 3, 2, 5, shared=1, has_map=1, bias="fp16"),
            MoeDownProblem(9, 32, 1280, 4, 2, 4, shared=1, has_map=1, bias="fp32"),
            MoeDownProblem(3, 32, 1280, 4, 2, 4, shared=1, has_map=1, bias="bf16"),
        ),
        {"rows": 3, "waves": 2, "halves": 1},
    ),
    WorkloadCase(
        "moe_align w2",
        "moe_align",
        "align",
        (
            MoeAlignProblem(70, 3, 5, 16, shared=1, first_shared=5, x_dtype="bf16", K=96),
            MoeAlignProblem(9, 2, 7, 32, expert_map="numbers", drop_absent=1, x_dtype="bf16", K=64),
            MoeAlignProblem(1, 4, 64, 4, expert_map="mask", x_dtype="bf16", K=2080),
            MoeAlignProblem(
                *(99, 4, 9, 16),
                expert_map="numbers",
                drop_absent=1,
                shared=1,
                first_shared=9,
                x_dtype="bf16",
                K=32,
            ),
            MoeAlignProblem(61, 8, 60, 8, expert_map="mask", x_dtype="bf16", K=32),
            MoeAlignProblem(61, 8, 60, 4, expert_map="mask", x_dtype="bf16", K=32),
        ),
        {"waves": 2},
    ),
    WorkloadCase(
        "moe_gemm t2 c1 w2 u1",
        "moe_gemm",
        "mfma",
        (
            MoeGemmProblem(5, 70, 1376, 3, 2, 16, "bf16", bias="bf16", weights="by_t"),
            MoeGemmProblem(3, 37, 96, 3, 2, 16, "bf16", bias="fp32", a_div=2),
            MoeGemmProblem(20, 64, 608, 2, 1, 32, "bf16", ids="aiter", weights="by_place"),
            MoeGemmProblem(2, 43, 608, 3, 2, 64, "bf16", bias="fp16"),
            MoeGemmProblem(56, 37, 96, 40, 1, 32, "bf16", bias="fp16", weights="by_t"),
            MoeGemmProblem(9, 37, 96, 3, 2, 32, "bf16", ids="aiter", weights="by_place"),
            MoeGemmProblem(7, 37, 96, 3, 2, 16, "bf16", bias="fp16"),
            MoeGemmProblem(40, 44, 608, 40, 1, 16, "bf16"),
        ),
        {"row_tiles": 2, "col_tiles": 1, "waves": 2, "unroll": 1},
        other_cu_num={7: 1},
    ),
    WorkloadCase(
        "moe_gemm activated t4 c1 w2 u1",
        "moe_gemm",
        "mfma",
        (
            MoeGemmProblem(5, 192, 1344, 3, 2, 16, "mxfp8", "silu", bias="bf16", a_div=2),
            MoeGemmProblem(3, 64, 128, 3, 2, 16, "mxfp8", "silu", bias="fp32", a_div=2),
            MoeGemmProblem(20, 128, 640, 2, 1, 32, "mxfp8", "silu"),
            MoeGemmProblem(2, 128, 640, 3, 2, 64, "mxfp8", "silu", bias="fp16", a_div=2),
            MoeGemmProblem(56, 64, 128, 40, 1, 32, "mxfp8", "silu", bias="bf16"),
            MoeGemmProblem(9, 128, 128, 3, 3, 32, "mxfp8", "silu", ids="aiter", a_div=3),
            MoeGemmProblem(7, 64, 128, 3, 2, 16, "mxfp8", "silu", bias="bf16", a_div=2),
            MoeGemmProblem(16, 512, 1344, 3, 2, 16, "mxfp8", "silu", bias="bf16", a_div=2),
            MoeGemmProblem(40, 64, 640, 40, 1, 16, "mxfp8", "silu"),
        ),
        {"row_tiles": 4, "col_tiles": 1, "waves": 2, "unroll": 1},
        with_nans=(0, 2, 4, 7),
        other_cu_num={8: 1},
    ),
    WorkloadCase(
        "moe_combine k3",
        "moe_combine",
        "combine",
        (
            MoeCombineProblem(3, 260, 3, 5, shared=1),
            MoeCombineProblem(2, 1028, 3, 2, shared=1),
            MoeCombineProblem(40, 12, 3, 4, shared=1),
            MoeCombineProblem(65540, 4, 3, 4, shared=1),
        ),
    ),
    WorkloadCase(
        "moe_combine k3 sorted",
        "moe_combine",
        "combine",
        (
            MoeCombineProblem(3, 260, 3, 5, shared=1, sorted_y=True),
            MoeCombineProblem(2, 1028, 3, 2, shared=1, sorted_y=True),
            MoeCombineProblem(40, 12, 3, 4, shared=1, sorted_y=True),
            MoeCombineProblem(65540, 4, 3, 4, shared=1, sorted_y=True),
        ),
    ),
    WorkloadCase(
        "quantize rows",
        "quantize",
        "rows",
        (QuantizeProblem(11, 2080), QuantizeProblem(17, 96), QuantizeProblem(1, 4128)),
    ),
    WorkloadCase(
        "quantize tiles",
        "quantize",
        "tiles",
        (
            QuantizeProblem(224, 416, to="both", matrices=2),
            QuantizeProblem(32, 64, to="both"),
            QuantizeProblem(160, 1056, to="both"),
            QuantizeProblem(416, 320, to="both"),
            QuantizeProblem(256, 2144, to="both"),
            QuantizeProblem(256, 512, to="both"),
            QuantizeProblem(96, 192, to="both"),
        ),
        {"rows": 128, "resident": 2, "steps": 8, "cluster": 1},
        past=QuantizeProblem((1 << 27) + 128, 32, to="both"),
    ),
    WorkloadCase(
        "group_runs",
        "group_runs",
        "scan",
        (
            GroupRunsProblem(77, 1, 5, 8, "fp32"),
            GroupRunsProblem(300, 9, 3, 16),
            GroupRunsProblem(8500, 8, 300, 32),
            GroupRunsProblem(333, 301, 4, 16, "fp16"),
            GroupRunsProblem(150, 1100, 70, 1, "fp32"),
            GroupRunsProblem(8333, 600, 90, 128, "fp16"),
            GroupRunsProblem(57, 1, 2, 4, "fp32"),
            GroupRunsProblem(47, 1, 2, 5, "fp32"),
            GroupRunsProblem(43, 3, 2, 3),
            GroupRunsProblem(43, 1, 2, 4, "fp32"),
            GroupRunsProblem(57, 5, 2, 5),
            GroupRunsProblem(20, 33161, 2, 3, "fp16"),
            GroupRunsProblem(42, 1, 2, 5, "fp32"),
            GroupRunsProblem(48, 1, 2, 5, "fp32"),
        ),
    ),
    WorkloadCase(
        "grouped m32 n128",
        "grouped_gemm",
        "persistent",
        (
            GroupedGemmProblem(100, 192, 480, 3, bias="bf16"),
            GroupedGemmProblem(132, 288, 1376, 2, bias="bf16", index="i64"),
            GroupedGemmProblem(280, 160, 2016, 70, bias="bf16", layout="masked"),
            GroupedGemmProblem(516, 96, 96, 70, bias="bf16", index="i64"),
            GroupedGemmProblem(516, 96, 96, 70, bias="bf16"),
            GroupedGemmProblem(516, 96, 96, 70, bias="bf16"),
            GroupedGemmProblem(280, 160, 608, 70, bias="bf16", layout="masked", index="i64"),
            GroupedGemmProblem(516, 96, 96, 70, bias="bf16", index="i64"),
            GroupedGemmProblem(300, 96, 352, 2, bias="bf16", index="i64"),
            GroupedGemmProblem(516, 96, 96, 70, bias="bf16"),
            GroupedGemmProblem(516, 96, 96, 70, bias="bf16", index="i64"),
            GroupedGemmProblem(516, 96, 96, 70, bias="bf16", index="i64"),
            GroupedGemmProblem(516, 96, 96, 70, bias="bf16", index="i64"),
            GroupedGemmProblem(516, 96, 96, 70, bias="bf16"),
            GroupedGemmProblem(516, 96, 96, 70, bias="bf16"),
            GroupedGemmProblem(280, 96, 96, 70, bias="bf16", layout="masked"),
            GroupedGemmProblem(280, 96, 96, 3, bias="bf16", layout="runs", run_rows=4),
            GroupedGemmProblem(280, 96, 96, 3, bias="bf16", layout="runs", run_rows=4),
            GroupedGemmProblem(100, 192, 96, 3, bias="bf16"),
            GroupedGemmProblem(100, 192, 608, 3, bias="bf16"),
            GroupedGemmProblem(2800, 96, 96, 70, bias="bf16"),
        ),
        {"tile_m": 32, "tile_n": 128, "swath": 4, "xcds": 8},
        cu_num=16,
        with_nans=(0, 18, 19),
        other_cu_num={20: 12},
    ),
    WorkloadCase(
        "grouped m160 n128",
        "grouped_gemm",
        "persistent",
        (
            GroupedGemmProblem(167, 160, 640, 1, "fp32"),
            GroupedGemmProblem(323, 96, 256, 1, "fp32"),
            GroupedGemmProblem(305, 288, 384, 2, "fp32", index="i64"),
            GroupedGemmProblem(516, 96, 256, 70, "fp32", index="i64"),
            GroupedGemmProblem(340, 96, 512, 2, "fp32", layout="masked"),
            GroupedGemmProblem(516, 96, 256, 70, "fp32"),
            GroupedGemmProblem(280, 96, 256, 3, "fp32", layout="runs", run_rows=4),
            GroupedGemmProblem(516, 288, 256, 70, "fp32"),
            GroupedGemmProblem(280, 288, 256, 70, "fp32", layout="masked", index="i64"),
            GroupedGemmProblem(516, 288, 256, 70, "fp32", index="i64"),
            GroupedGemmProblem(516, 288, 256, 70, "fp32"),
            GroupedGemmProblem(516, 288, 256, 70, "fp32", index="i64"),
            GroupedGemmProblem(516, 96, 256, 70, "fp32", index="i64"),
            GroupedGemmProblem(280, 96, 256, 3, "fp32", layout="runs", run_rows=4),
            GroupedGemmProblem(323, 160, 512, 1, "fp32"),
            GroupedGemmProblem(516, 96, 256, 70, "fp32"),
            GroupedGemmProblem(305, 160, 256, 3, "fp32"),
            GroupedGemmProblem(280, 160, 768, 3, "fp32"),
        ),
        {"tile_m": 160, "tile_n": 128, "swath": 8, "xcds": 8},
        cu_num=3,
        with_nans=(0, 14, 17),
        other_cu_num={16: 8},
    ),
    WorkloadCase(
        "dgrad m64 n256 e5m2",
        "grouped_gemm",
        "persistent",
        (
            _dgrad(150, 288, 640, 3),
            _dgrad(70, 288, 896, 66, index="i64"),
            _dgrad(132, 96, 256, 66),
            _dgrad(140, 96, 256, 70, index="i64"),
            _dgrad(132, 96, 256, 66, index="i64"),
            _dgrad(132, 96, 256, 66),
            _dgrad(300, 544, 256, 4, layout="masked"),
            _dgrad(140, 96, 256, 70),
            _dgrad(140, 96, 256, 70, layout="masked"),
            _dgrad(140, 96, 256, 70),
            _dgrad(132, 96, 256, 66),
            _dgrad(132, 96, 256, 66, index="i64"),
            _dgrad(140, 96, 256, 70, index="i64"),
            _dgrad(140, 96, 256, 70, index="i64"),
            _dgrad(150, 96, 768, 3),
            _dgrad(140, 96, 256, 70, layout="masked", index="i64"),
            _dgrad(140, 96, 256, 3, layout="runs", run_rows=2),
            _dgrad(140, 288, 256, 70),
            _dgrad(140, 288, 256, 70, index="i64"),
            _dgrad(140, 288, 256, 70, layout="masked"),
            _dgrad(1540, 288, 256, 70),
            _dgrad(1540, 288, 256, 70, index="i64"),
            _dgrad(140, 96, 256, 70, layout="masked"),
            _dgrad(140, 96, 256, 3, layout="runs", run_rows=2),
        ),
        {"tile_m": 64, "tile_n": 256, "swath": 1, "xcds": 1},
        cu_num=2,
        other_cu_num={23: 8},
    ),
    WorkloadCase(
        "wgrad m64 n128",
        "grouped_wgrad",
        "persistent",
        (
            GroupedWgradProblem(512, 96, 224, 3, "fp32"),
            GroupedWgradProblem(1920, 160, 32, 2, "fp32", index="i64"),
            GroupedWgradProblem(26880, 32, 64, 70, "fp32"),
            GroupedWgradProblem(26880, 32, 64, 70, "fp32", index="i64"),
            GroupedWgradProblem(2560, 64, 192, 9, "fp32"),
            GroupedWgradProblem(1536, 160, 32, 6, "fp32", index="i64"),
            GroupedWgradProblem(26880, 96, 64, 70, "fp32", index="i64"),
            GroupedWgradProblem(8960, 96, 64, 70, "fp32"),
            GroupedWgradProblem(8960, 32, 64, 70, "fp32"),
            GroupedWgradProblem(8960, 32, 64, 70, "fp32", index="i64"),
            GroupedWgradProblem(8960, 32, 64, 70, "fp32"),
            GroupedWgradProblem(8960, 32, 64, 70, "fp32", index="i64"),
            GroupedWgradProblem(512, 320, 32, 2, "fp32"),
            GroupedWgradProblem(1024, 64, 64, 1, "fp32"),
        ),
        {"tile_m": 64, "tile_n": 128, "swath": 4, "xcds": 1},
        cu_num=2,
        other_cu_num={12: 5},
    ),
)
