"""``aiter_mx.warmup``: build and load ahead of the first call, as stream capture demands."""

from __future__ import annotations

from collections.abc import Callable

import torch

from aiter_mx.dispatch.dispatcher import route
from aiter_mx.dispatch.explain import make_problems
from aiter_mx.dispatch.route import Route
from aiter_mx.jit.build import BuildRequest, CodeObject, build_all
from aiter_mx.kernels.registry import launches_of
from aiter_mx.launch import call
from aiter_mx.plan import Function, bind, functions_of
from aiter_mx.target import target_of
from aiter_mx.workloads import workload_of

OnBuilt = Callable[[BuildRequest, CodeObject], None]


def warmup(
    op: str,
    *,
    device: torch.device | str | None = None,
    jobs: int | None = None,
    on_built: OnBuilt | None = None,
    exact_sums: bool | None = None,
    **shape: object,
) -> list[Route]:
    """Make every kernel that these shapes route to ready to launch, building in parallel.

    Each op call of one of the shapes then builds nothing and loads nothing, so that it may be
    captured into a graph.

    Args:
        op: name of the op, such as ``"linear"``.
        device: where the calls will be; by default torch's current GPU, else the CPU.
        jobs: compilers at a time; by default one for each core.
        on_built: called after each build with its request and code object, for progress.
        exact_sums: as in the calls.
        shape: the op's problem; each field is a value or an iterable of values, and every
            combination is made ready: ``M=range(1, 17), N=2304, K=6144``.

    Returns:
        The route of each combination.

    Raises:
        ValueError: an unknown op or field, a field left out, a value that it cannot have, or less
            than one job.
        ToolchainError: no compiler for the device's architecture.
        BuildError: a kernel failed to compile.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    target = target_of(device, exact_sums)
    problems = make_problems(op, shape)
    launches = [each for problem in problems for each in launches_of(op, problem, target.arch)]
    routes = [route(name, target, problem) for name, problem in launches]
    each = list(zip(launches, routes, strict=True))
    needed = [functions_of(target, problem, chosen) for (_, problem), chosen in each]
    requests = dict.fromkeys(one.request for functions in needed for one in functions)
    build_all(list(requests), jobs=jobs, on_done=on_built)
    loaded: set[Function] = set()
    for ((name, problem), chosen), functions in zip(each, needed, strict=True):
        if functions and loaded.issuperset(functions):
            continue
        loaded.update(functions)
        run = bind(name, target, problem, device)
        if chosen.backend == "triton":  # Triton compiles when it is called
            for tensors in workload_of(name).calls(problem, device):
                call(run, *tensors)
    return routes
