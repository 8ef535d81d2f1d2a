"""Runs a variant of one of our kernels in the simulator, and bounds its time on an MI355X."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aiter_mx.code_object import occupancy
from aiter_mx.jit.build import build
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.spec import Config, KernelSpec, Problem
from aiter_mx.launch import build_request
from aiter_mx.runtimes.base import PackedArgs, Region
from aiter_mx.sim.program import Program, SimOptions
from aiter_mx.sim.report import LaunchReport
from aiter_mx.sim.roofline import Bounds, bounds
from aiter_mx.target import hardware
from aiter_mx.timing import random_mx

_CPU = torch.device("cpu")
_OUT = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Trial:
    """A simulated launch.

    Attributes:
        report: what it did.
        bounds: on its time on an MI355X.
        minimal_bytes: the bytes of its operands and results, each moved once.
    """

    report: LaunchReport
    bounds: Bounds
    minimal_bytes: int


def try_out(
    spec: KernelSpec, problem: Problem, config: Config, options: SimOptions | None = None
) -> Trial:
    """Run a gfx950 kernel once. Raises SimulatorError when it does what it must not."""
    assert spec.module is not None
    target, module = hardware("gfx950"), spec.module
    program = Program.from_image(build(build_request(spec, target, problem, config)).image)
    tensors = _operands(problem)
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
    minimal_bytes = sum(region.size_bytes for region in regions)
    groups = launch.grid[0] * launch.grid[1] * launch.grid[2]
    lanes = launch.block[0] * launch.block[1] * launch.block[2]
    waves_a_simd = occupancy(program.kernel(module.symbol), lanes, launch.shared_bytes)
    return Trial(report, bounds(report, minimal_bytes, groups, waves_a_simd), minimal_bytes)


def _operands(problem: Problem) -> list[torch.Tensor | None]:
    """Random operands and an empty result, in the order of a kernel's pointers."""
    if not isinstance(problem, LinearProblem):
        raise ValueError(f"no random operands are known for {type(problem).__name__}")
    M, N, K = problem.M, problem.N, problem.K
    bias = None if problem.bias == "none" else torch.randn(N, dtype=_OUT[problem.bias])
    out = torch.empty(M, N, dtype=_OUT[problem.out_dtype])
    return [*random_mx(M, K, _CPU), *random_mx(N, K, _CPU), bias, out]
