"""``aiter_mx.warmup``: build and load ahead of the first call, as stream capture demands."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING

from aiter_mx.dispatch.dispatcher import route
from aiter_mx.dispatch.explain import described
from aiter_mx.dispatch.route import Route
from aiter_mx.jit.build import BuildRequest, CodeObject, build_all
from aiter_mx.kernels.registry import find_kernel, ops, problem_type
from aiter_mx.kernels.spec import Problem
from aiter_mx.launch import module_request
from aiter_mx.target import Target, target_of

if TYPE_CHECKING:
    import torch

_MADE_OF = {"fused_moe": ("aiter_mx.ops.moe_layer", "FusedMoeProblem")}
"""Ops that are several launches of others: where their problems are, which name those launches."""

OnBuilt = Callable[[BuildRequest, CodeObject], None]


def warmup(
    op: str,
    *,
    device: torch.device | str | None = None,
    jobs: int | None = None,
    on_built: OnBuilt | None = None,
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
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    target = target_of(device)
    if op in _MADE_OF:
        return [
            made
            for layer in combinations(op, shape)
            for name, part in launches_of(op, layer)
            for made in warmup(name, device=device, jobs=jobs, on_built=on_built, **vars(part))
        ]
    problems = combinations(op, shape)
    routes = [route(op, target, problem) for problem in problems]
    build_all(build_requests(target, problems, routes), jobs=jobs, on_done=on_built)
    run = import_module(f"aiter_mx.ops.{op}").warm
    for problem in problems:
        run(problem, device)
    return routes


def problem_type_of(op: str) -> type[Problem]:
    """The dataclass that holds a problem of ``op``, which may be several launches of others."""
    if op not in _MADE_OF:
        if op not in ops():
            raise ValueError(
                f"unknown op {op!r}; there are {', '.join(sorted((*ops(), *_MADE_OF)))}"
            )
        return problem_type(op)
    module, name = _MADE_OF[op]
    layer: type[Problem] = getattr(import_module(module), name)
    return layer


def refuse_layers(op: str) -> None:
    """Raise ValueError for an op that is several launches, none of which has its name."""
    if op in _MADE_OF:
        raise ValueError(
            f"{op} is several launches, with a route each: aiter_mx.warmup({op!r}, ...) returns "
            f"them, and aiter-mx explain {op} shows them"
        )


def launches_of(op: str, problem: Problem) -> list[tuple[str, Problem]]:
    """The ops and problems that a problem of ``op`` is made of, most often itself alone."""
    return list(problem.parts()) if op in _MADE_OF else [(op, problem)]


def combinations(op: str, shape: dict[str, object]) -> list[Problem]:
    """Every problem of ``op`` with one value of each field.

    Raises:
        ValueError: an unknown op or field, a field left out, or a value that it cannot have.
    """
    axes = [
        list(values) if isinstance(values, Iterable) and not isinstance(values, str) else [values]
        for values in shape.values()
    ]
    each = [dict(zip(shape, values, strict=True)) for values in product(*axes)]
    return [described(op, problem_type_of(op), fields) for fields in each]


def build_requests(
    target: Target, problems: Iterable[Problem], routes: Iterable[Route]
) -> list[BuildRequest]:
    """The builds that these routes need, each once."""
    requests: dict[BuildRequest, None] = {}
    for problem, chosen in zip(problems, routes, strict=True):
        spec = find_kernel(chosen.op, target.arch, chosen.backend, chosen.kernel)
        if parts := spec.parts(target, problem, chosen.config):
            of_parts = [
                chosen if op == chosen.op else route(op, target, part) for op, part in parts
            ]
            requests |= dict.fromkeys(build_requests(target, [part for _, part in parts], of_parts))
        for module in spec.around if parts else spec.modules:
            requests[module_request(module, target, problem, chosen.config)] = None
    return list(requests)
