"""Compiles Triton's candidates ahead of their races, in processes that need no GPU.

Triton compiles under the interpreter's lock, so threads would not do. A process calls the fallback
on tensors that have no memory, with a launch that ends when the kernel is compiled: that fills the
cache on disk in which the process that races finds it. What fails to compile fails there again.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from typing import Any

from aiter_mx.kernels.spec import Problem
from aiter_mx.plan import runner
from aiter_mx.target import Target
from aiter_mx.tuning.candidates import Candidate
from aiter_mx.tuning.forked import forked_pool
from aiter_mx.workloads.workload import workload_of

_MOST_PROCESSES = 6


class TritonAhead:
    """Processes that fill Triton's cache."""

    def __init__(self, target: Target, jobs: int) -> None:
        """Have so many processes at a time, but few."""
        import_module("triton")
        with suppress(ImportError, AttributeError):  # hashes all of Triton, once for all of them
            import_module("triton.runtime.cache").triton_key()

        workers = max(1, min(jobs // 2, _MOST_PROCESSES))
        self._pool = forked_pool(workers, stand_in_for_a_gpu, target)
        self._calls: dict[tuple[Problem, Candidate], Future[None]] = {}

    def add(self, problem: Problem, candidates: Iterable[Candidate]) -> None:
        for candidate in candidates:
            if candidate.backend == "triton" and (problem, candidate) not in self._calls:
                call = self._pool.submit(compile_without_gpu, problem, candidate)
                self._calls[problem, candidate] = call

    def wait(self, problem: Problem, candidates: Iterable[Candidate]) -> None:
        self.add(problem, candidates)
        for candidate in candidates:
            if candidate.backend == "triton":
                self._calls[problem, candidate].result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def compile_without_gpu(problem: Problem, candidate: Candidate) -> None:
    """Have Triton compile a candidate, in a process in which something stands in for a GPU."""
    import torch

    workload = workload_of(candidate.op)
    operands = workload.operands(problem, torch.device("meta"))
    with suppress(Exception):  # as of what follows the launch, which has nothing to work on
        runner(candidate.spec)(problem, operands, candidate.config)


def stand_in_for_a_gpu(target: Target) -> None:
    """Make this process, which is for nothing else, compile for a target what it would launch."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    torch.set_num_threads(1)  # those of the process that was forked are not here
    if target.arch == "sm_90a":
        gpu = GPUTarget("cuda", 90, 32)
    else:
        gpu = GPUTarget("hip", target.arch, target.wave_size)
    driver.set_active(_NoGpu(gpu))
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only


class _NoGpu:
    """What Triton asks of a driver before it launches."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0
