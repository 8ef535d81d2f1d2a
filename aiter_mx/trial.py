"""Runs a variant of one of our kernels in the simulator, and models its time on an MI355X."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from aiter_mx.code_object import KernelInfo, occupancy
from aiter_mx.jit.build import build
from aiter_mx.kernels.spec import Config, Geometry, KernelSpec, Problem
from aiter_mx.launch import build_request
from aiter_mx.region import Region
from aiter_mx.runtimes.base import PackedArgs
from aiter_mx.sim.program import Program, SimOptions
from aiter_mx.sim.report import LaunchReport, Trace
from aiter_mx.sim.timing.constants import CUS
from aiter_mx.sim.timing.floor import Floor, floor
from aiter_mx.sim.timing.model import SIMDS, Prediction, Traced, predict, traced
from aiter_mx.target import hardware
from aiter_mx.workloads import workload_of

if TYPE_CHECKING:
    from aiter_mx.workloads.workload import Operands

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Prepared:
    """A launch that the simulator can run, any number of times.

    Attributes:
        program: the loaded code object.
        image: the file that it was loaded from.
        symbol: the kernel's name in it.
        geometry: grid, workgroup and LDS.
        scalars: the arguments that are no pointers.
        kernarg: the packed arguments.
        regions: the memory that it may touch.
        operands: what it runs on; its results are among them.
        workspace: further memory that the arguments point to.
        counters: likewise, of words that are zero when a launch begins.
        last: what those are for the last of the workgroups that share a counter.
    """

    program: Program
    image: Path
    symbol: str
    geometry: Geometry
    scalars: Sequence[int | float]
    kernarg: bytes
    regions: Sequence[Region]
    operands: Operands
    workspace: torch.Tensor | None = None
    counters: torch.Tensor | None = None
    last: int = 0

    @property
    def groups(self) -> int:
        """Workgroups of the launch."""
        return self.geometry.grid[0] * self.geometry.grid[1] * self.geometry.grid[2]

    @property
    def lanes(self) -> int:
        """Of a workgroup."""
        return self.geometry.block[0] * self.geometry.block[1] * self.geometry.block[2]

    @property
    def kernel(self) -> KernelInfo:
        """What the code object says of the kernel."""
        return self.program.kernel(self.symbol)

    def run(self, options: SimOptions | None = None) -> LaunchReport:
        """Simulate it, or a part of it. Raises SimulatorError when it does what it must not."""
        grid, block, shared_bytes = (
            self.geometry.grid,
            self.geometry.block,
            self.geometry.shared_bytes,
        )
        if self.counters is not None:  # a lone workgroup is to do what the last one does
            is_lone = options is not None and options.group_count == 1
            self.counters.fill_(self.last if is_lone else 0)
        launched = self.symbol, grid, block, self.kernarg, shared_bytes, self.regions, options
        return self.program.launch(*launched)

    def traced(self, report: LaunchReport) -> Traced:
        """What the model of time takes, of a run with ``SimOptions(trace=True)``."""
        lds = self.geometry.shared_bytes
        return traced(report, self.kernel, self.groups, self.lanes, lds)


@dataclass(frozen=True)
class Trial:
    """A simulated launch.

    Attributes:
        report: what it did.
        launch: what was run.
        waves_a_simd: waves that a SIMD holds at once.
        trace: of its waves, where the options ask for it, as are the next two.
        floor: calibrated sums of its time on an MI355X.
        prediction: of its time on an MI355X.
    """

    report: LaunchReport
    launch: Prepared
    waves_a_simd: int
    trace: Trace | None = field(default=None, repr=False)
    floor: Floor | None = None
    prediction: Prediction | None = field(default=None, repr=False)

    @property
    def operands(self) -> Operands:
        """What it ran on; its results are among them."""
        return self.launch.operands

    @property
    def minimal_bytes(self) -> int:
        """The bytes of its operands and results, each moved once."""
        return sum(tensor.nbytes for tensor in self.operands if tensor is not None)

    @property
    def wave_bytes(self) -> float:
        """Bytes of loads under way for a wave when it waits for memory, on average."""
        return self.report.in_flight_bytes / max(self.report.waits, 1)

    @property
    def cu_bytes(self) -> float:
        """The same for all waves that the busiest compute unit holds."""
        dealt = -(-self.launch.groups // CUS)
        waves = dealt * self.report.waves // self.launch.groups
        return min(self.waves_a_simd * SIMDS, waves) * self.wave_bytes


def prepare(
    spec: KernelSpec,
    problem: Problem,
    config: Config,
    cu_num: int = CUS,
    operands: Operands | None = None,
    with_lines: bool = False,
) -> Prepared:
    """A launch of a gfx950 kernel.

    Args:
        spec: the kernel.
        problem: the shape and dtypes.
        config: the kernel's compile-time parameters.
        cu_num: compute units that the kernel divides the problem among: fewer for a part of one.
        operands: by default the workload's first.
        with_lines: compile it with its source lines; the machine code is the same.
    """
    assert spec.module is not None
    if len(spec.modules) > 1:
        raise ValueError(f"{spec.op}/{spec.name} takes several launches, and one alone is nothing")
    target, module = replace(hardware("gfx950"), cu_num=cu_num), spec.module
    request = replace(build_request(spec, target, problem, config), with_lines=with_lines)
    built = build(request)
    program = _program(built.image)
    if operands is None:
        operands = workload_of(spec.op).operands(problem, _CPU)
    tensors = [*operands, *(None for arg in module.args if arg.access == "null")]
    workspace = counters = None
    if size := spec.workspace_bytes(target, problem, config):
        workspace = torch.empty(size, dtype=torch.uint8)
        tensors.append(workspace)
    if words := spec.counters(target, problem, config):
        counters = torch.zeros(words, dtype=torch.int32)
        tensors.append(counters)
    scalars = module.scalars(target, problem, config)
    args = PackedArgs(module.args, scalars)
    args.set_pointers(*(0 if tensor is None else tensor.data_ptr() for tensor in tensors))
    regions = [
        Region(arg.name, tensor.data_ptr(), tensor.nbytes, arg.access)
        for arg, tensor in zip(module.pointers, tensors, strict=False)
        if tensor is not None
    ]
    geometry = module.geometry(target, problem, config)
    told = program, built.path, module.symbol, geometry, scalars, args.to_bytes()
    last = config.get("splits", 1) - 1
    return Prepared(*told, regions, operands, workspace, counters, last)


@lru_cache(maxsize=64)
def _program(image: bytes) -> Program:
    """A code object's program: shapes that differ in sizes alone have one in common."""
    return Program.from_image(image)


def try_out(
    spec: KernelSpec,
    problem: Problem,
    config: Config,
    options: SimOptions | None = None,
    cu_num: int = CUS,
    number: int = 0,
) -> Trial:
    """Run a gfx950 kernel once. Raises SimulatorError when it does what it must not.

    Args:
        spec: the kernel.
        problem: the shape and dtypes.
        config: the kernel's compile-time parameters.
        options: of the simulator; by default as the environment says.
        cu_num: compute units that the kernel divides the problem among: fewer for a part of one.
        number: of the operands that are drawn.
    """
    operands = workload_of(spec.op).operands(problem, _CPU, number)
    return tried(prepare(spec, problem, config, cu_num, operands), options)


def tried(launch: Prepared, options: SimOptions | None = None) -> Trial:
    """Run a launch once, and model its time where the options ask for a trace."""
    report = launch.run(options)
    waves_a_simd = occupancy(launch.kernel, launch.lanes, launch.geometry.shared_bytes)
    if report.trace is None:
        return Trial(report, launch, waves_a_simd)
    split, trace = launch.traced(report), report.trace
    report = replace(report, trace=None)
    return Trial(report, launch, waves_a_simd, trace, floor(split), predict(split))
