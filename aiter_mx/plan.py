"""From a call to what runs it: a plan for each call key, and the route of a problem bound."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakSet

import torch

from aiter_mx import invariance, launch
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.dispatch.route import Route
from aiter_mx.errors import BuildError, CacheError, CaptureError, LaunchError, ToolchainError
from aiter_mx.forks import Lock
from aiter_mx.jit.build import BuildRequest
from aiter_mx.kernels.spec import Config, KernelSpec, Parts, Problem
from aiter_mx.launch import Run, Tensors, module_request, not_warm
from aiter_mx.target import Target

MOST_PLANS = 1 << 14
"""Plans of an op that a thread keeps, at some 5 KB each: a server may see any number of shapes."""

_FAILURES = (ToolchainError, BuildError, CacheError, LaunchError)

_warm_triton: set[tuple[Target, Problem]] = set()
_warned: set[tuple[str, str]] = set()
_warned_lock = Lock()

Plan = TypeVar("Plan")


_every_plans: WeakSet[Plans[Any]] = WeakSet()


def _forget_plans() -> None:
    """Have a forked child bind anew: what its parent bound launches on GPUs that it cannot use."""
    for plans in list(_every_plans):
        plans.by_call.clear()
        plans.of_other_mode.clear()


os.register_at_fork(after_in_child=_forget_plans)


class Plans(threading.local, Generic[Plan]):
    """What computes a call, by everything about it that the checks and the route depend on.

    A thread has plans of its own, as a launch is bound to the thread that made it.
    """

    def __init__(self) -> None:
        self.by_call: dict[Hashable, Plan] = {}
        self.of_other_mode: dict[Hashable, Plan] = {}
        _every_plans.add(self)

    def keep(self, call: Hashable, plan: Plan) -> Plan:
        """``plan``, which the next such call finds; where there are too many, all others go."""
        if len(self.by_call) >= MOST_PLANS:
            self.by_call.clear()
        self.by_call[call] = plan
        return plan


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Give a row of a result the same bits whatever the batch is, in this thread.

    Inside the ``with`` block, ``linear``, ``grouped_gemm`` and ``fused_moe`` compute a row in one
    order of addition for each N and K, whatever M, the row's place and the other rows are.
    ``AITER_MX_BATCH_INVARIANT=1`` asks for it everywhere. Few rows take longer, as they share the
    order of many; what no kernel covers so, on gfx950 N that is no multiple of 32, is computed in
    plain torch. What is captured inside the block stays so.

    Raises:
        ValueError: that variable is neither 0 nor 1.
    """
    with invariance.asked() as is_first:
        if is_first:
            _exchange_plans()
        try:
            yield
        finally:
            if is_first:
                _exchange_plans()


def _exchange_plans() -> None:
    for plans in list(_every_plans):
        plans.by_call, plans.of_other_mode = plans.of_other_mode, plans.by_call


def bind(op: str, target: Target, problem: Problem, device: torch.device) -> Run:
    """What computes ``problem`` on ``device``, for the calling thread.

    Args:
        op: name of the op.
        target: what ``device`` is.
        problem: shape and dtypes.
        device: where the tensors are.

    Raises:
        CaptureError: something would have to be built while the current stream is captured.
        ToolchainError, BuildError, CacheError, LaunchError: the kernel of the route cannot be
            used. With ``AITER_MX_ON_ERROR=fallback`` the next kernel in line is taken instead,
            with one warning for each kernel.
        ValueError: that variable is something else, or nothing computes the problem.
    """
    if device.type == "cuda" and torch.cuda._is_in_bad_fork():
        raise LaunchError(
            f"{op} was called on {device} in a process forked from one that had used its GPUs, "
            "which such a child cannot: start workers with multiprocessing's 'spawn' or "
            "'forkserver', or fork before the first use of a GPU"
        )
    if falls_back():
        return _bind_or_fall_back(op, target, problem, device)
    return bind_route(route(op, target, problem), target, problem, device)


def falls_back() -> bool:
    """Whether ``AITER_MX_ON_ERROR=fallback`` asks for the next kernel where one fails.

    Raises:
        ValueError: the variable is neither ``fallback`` nor ``raise``.
    """
    text = os.environ.get("AITER_MX_ON_ERROR") or "raise"
    if text not in ("raise", "fallback"):
        raise ValueError(f"AITER_MX_ON_ERROR must be raise or fallback, got {text!r}")
    return text == "fallback"


def bind_route(chosen: Route, target: Target, problem: Problem, device: torch.device) -> Run:
    """``bind`` for a route that is given."""
    spec = chosen.spec
    if parts := spec.parts(target, problem, chosen.config):
        try:
            return _bind_parts(chosen, spec, target, problem, parts, device)
        except CaptureError as error:  # of a part: what the caller can warm is the whole
            raise not_warm(f"{spec.backend}/{spec.name}", spec.op, problem, target) from error
    if spec.module is not None:
        return launch.bind(spec, target, problem, chosen.config, device.index or 0)
    if chosen.backend == "triton" and (target, problem) not in _warm_triton:
        if torch.cuda.is_current_stream_capturing():
            raise not_warm(f"{spec.backend}/{spec.name}", spec.op, problem, target)
        _warm_triton.add((target, problem))
    compute, config = runner(spec), chosen.config

    @torch.no_grad()  # no op has a gradient, whoever computes it
    def run(tensors: Tensors, addresses: object) -> None:
        compute(problem, tensors, config)

    return run


def runner(spec: KernelSpec) -> Callable[[Problem, Tensors, Config], None]:
    """What computes the problems of a kernel that is not of our building."""
    run: Callable[[Problem, Tensors, Config], None] = _imported(spec.runner)
    return run


@cache
def _imported(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


def _bind_parts(
    chosen: Route,
    spec: KernelSpec,
    target: Target,
    problem: Problem,
    parts: Parts,
    device: torch.device,
) -> Run:
    runs = [
        bind_route(chosen, target, part, device)
        if op == spec.op
        else bind(op, target, part, device)
        for op, part in parts
    ]
    composed = spec.composed
    assert composed is not None
    for module in composed.around(problem):
        index = device.index or 0
        runs.append(launch.bind_module(spec, module, target, problem, chosen.config, index))
    run: Run = _imported(composed.joined_by)(problem, parts, runs)
    return run


def _bind_or_fall_back(op: str, target: Target, problem: Problem, device: torch.device) -> Run:
    skip: set[tuple[str, str]] = set()

    def next_in_line() -> tuple[Route, Run]:
        while True:
            chosen = route(op, target, problem, frozenset(skip))
            try:
                return chosen, bind_route(chosen, target, problem, device)
            except _FAILURES as error:
                pass_over(chosen, error)

    def pass_over(chosen: Route, error: Exception) -> None:
        if chosen.backend == "torch":
            raise error
        skip.add((chosen.backend, chosen.kernel))
        _warn_once(chosen, error)

    chosen, run = next_in_line()

    def run_or_fall_back(tensors: Tensors, addresses: Sequence[int]) -> None:
        nonlocal chosen, run
        try:
            run(tensors, addresses)
        except _FAILURES as error:
            pass_over(chosen, error)
            chosen, run = next_in_line()
            run_or_fall_back(tensors, addresses)

    return run_or_fall_back


def _warn_once(chosen: Route, error: Exception) -> None:
    kernel = (chosen.backend, chosen.kernel)
    with _warned_lock:
        if kernel in _warned:
            return
        _warned.add(kernel)
    warnings.warn(
        f"{chosen.backend}/{chosen.kernel} failed and is passed over, "
        f"as AITER_MX_ON_ERROR=fallback asks: {error}",
        RuntimeWarning,
        stacklevel=2,
    )


class Function(NamedTuple):
    """What is loaded once a process and device: a code object's entry, with its shared memory."""

    request: BuildRequest
    symbol: str
    shared_bytes: int


def functions_of(target: Target, problem: Problem, chosen: Route) -> list[Function]:
    """All that a route needs, in the order of its launches."""
    spec, config, found = chosen.spec, chosen.config, list[Function]()
    parts = spec.parts(target, problem, config)
    for op, part in parts:
        of_part = chosen if op == chosen.op else route(op, target, part)
        found += functions_of(target, part, of_part)
    around = spec.composed.around(problem) if spec.composed else ()
    for module in around if parts else spec.modules:
        shared_bytes = module.geometry(target, problem, config).shared_bytes
        request = module_request(module, target, problem, config)
        found.append(Function(request, module.symbol, shared_bytes))
    return found


def build_requests(
    target: Target, problems: Iterable[Problem], routes: Iterable[Route]
) -> list[BuildRequest]:
    """The builds that these routes need, each once."""
    each = zip(problems, routes, strict=True)
    needed = (f.request for problem, chosen in each for f in functions_of(target, problem, chosen))
    return list(dict.fromkeys(needed))
