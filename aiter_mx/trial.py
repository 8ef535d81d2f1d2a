"""Runs a variant of one of our kernels in the simulator, and models its time on an MI355X."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from aiter_mx.code_object import KernelInfo, occupancy
from aiter_mx.jit.build import build
from aiter_mx.kernels.spec import Config, KernelSpec, Problem
from aiter_mx.launch import build_request
from aiter_mx.region import Region
from aiter_mx.runtimes.base import PackedArgs
from aiter_mx.sim.program import Program, SimOptions
from aiter_mx.sim.report import LaunchReport
from aiter_mx.sim.roofline import CUS, Bounds, bounds
from aiter_mx.sim.timing.model import Prediction, predict, traced
from aiter_mx.target import hardware
from aiter_mx.workloads import workload_of

if TYPE_CHECKING:
    from aiter_mx.workloads.workload import Operands

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Trial:
    """A simulated launch.

    Attributes:
        report: what it did.
        bounds: on its time on an MI355X.
        minimal_bytes: the bytes of its operands and results, each moved once.
        operands: what it ran on; its results are among them.
        kernel: what the code object says of it.
        waves_a_simd: waves that a SIMD holds at once.
        prediction: of its time on an MI355X, where the options ask for a trace.
        texts: the kernel's instructions, with the prediction.
    """

    report: LaunchReport
    bounds: Bounds
    minimal_bytes: int
    operands: Operands
    kernel: KernelInfo
    waves_a_simd: int
    prediction: Prediction | None = field(default=None, repr=False)
    texts: Sequence[str] = ()


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
    assert spec.module is not None
    if len(spec.modules) > 1:
        raise ValueError(f"{spec.op}/{spec.name} takes several launches, and one alone is nothing")
    target, module = replace(hardware("gfx950"), cu_num=cu_num), spec.module
    program = Program.from_image(build(build_request(spec, target, problem, config)).image)
    operands = workload_of(spec.op).operands(problem, _CPU, number)
    tensors = [*operands, *[None] * spec.nulls]
    if size := spec.workspace_bytes(target, problem, config):
        tensors.append(torch.empty(size, dtype=torch.uint8))
    args = PackedArgs(module.args, module.scalars(target, problem, config))
    args.set_pointers(*(0 if tensor is None else tensor.data_ptr() for tensor in tensors))
    regions = [
        Region(arg.name, tensor.data_ptr(), tensor.nbytes, arg.access)
        for arg, tensor in zip(module.args, tensors, strict=False)
        if tensor is not None
    ]
    launch = module.geometry(target, problem, config)
    report = program.launch(
        module.symbol,
        launch.grid,
        launch.block,
        args.to_bytes(),
        launch.shared_bytes,
        regions,
        options,
    )
    minimal_bytes = sum(tensor.nbytes for tensor in operands if tensor is not None)
    kernel = program.kernel(module.symbol)
    groups = launch.grid[0] * launch.grid[1] * launch.grid[2]
    lanes = launch.block[0] * launch.block[1] * launch.block[2]
    waves_a_simd = occupancy(kernel, lanes, launch.shared_bytes)
    limits = bounds(report, minimal_bytes, groups, waves_a_simd)
    trial = Trial(report, limits, minimal_bytes, operands, kernel, waves_a_simd)
    if report.trace is None:
        return trial
    prediction = predict(traced(report, kernel, groups, lanes, launch.shared_bytes))
    return replace(
        trial,
        report=replace(report, trace=None),
        prediction=prediction,
        texts=report.trace.texts,
    )
