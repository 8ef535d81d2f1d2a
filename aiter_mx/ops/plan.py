"""Binds a route to something callable: a launch of ours, or a fallback."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

from aiter_mx import launch
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.dispatch.route import Route
from aiter_mx.errors import BuildError, CacheError, CaptureError, LaunchError, ToolchainError
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.kernels.spec import Config, Parts, Problem
from aiter_mx.launch import Run, Tensors, not_warm
from aiter_mx.target import Target

Fallback: TypeAlias = Callable[[Tensors, Config], None]
InParts: TypeAlias = Callable[[Route, Target, Parts, torch.device], Run]
"""Binds the problems that are solved in place of one, ``KernelSpec.parts``. What the route of that
one names computes the part that is of the same op."""

_FAILURES = (ToolchainError, BuildError, CacheError, LaunchError)

_warm_triton: set[tuple[Target, Problem]] = set()
_warned: set[tuple[str, str]] = set()
_warned_lock = threading.Lock()


def bind(
    op: str,
    target: Target,
    problem: Problem,
    device: torch.device,
    fallbacks: Mapping[str, Fallback],
    in_parts: InParts | None = None,
) -> Run:
    """What computes ``problem`` on ``device``, for the calling thread.

    Args:
        op: name of the op.
        target: what ``device`` is.
        problem: shape and dtypes.
        device: where the tensors are.
        fallbacks: what runs each backend other than ``hip``.
        in_parts: what runs a problem that takes several launches, for an op that has such.

    Raises:
        CaptureError: something would have to be built while the current stream is captured.
        ToolchainError, BuildError, CacheError, LaunchError: the kernel of the route cannot be
            used. With ``AITER_MX_ON_ERROR=fallback`` the next kernel in line is taken instead,
            with one warning for each kernel.
        ValueError: that variable is something else, or nothing computes the problem.
    """
    if falls_back():
        return _bind_or_fall_back(op, target, problem, device, fallbacks, in_parts)
    return bind_route(route(op, target, problem), target, problem, device, fallbacks, in_parts)


def falls_back() -> bool:
    """Whether ``AITER_MX_ON_ERROR=fallback`` asks for the next kernel where one fails.

    Raises:
        ValueError: the variable is neither ``fallback`` nor ``raise``.
    """
    text = os.environ.get("AITER_MX_ON_ERROR") or "raise"
    if text not in ("raise", "fallback"):
        raise ValueError(f"AITER_MX_ON_ERROR must be raise or fallback, got {text!r}")
    return text == "fallback"


def bind_route(
    chosen: Route,
    target: Target,
    problem: Problem,
    device: torch.device,
    fallbacks: Mapping[str, Fallback],
    in_parts: InParts | None = None,
) -> Run:
    """``bind`` for a route that is given."""
    spec = find_kernel(chosen.op, target.arch, chosen.backend, chosen.kernel)
    if in_parts and (parts := spec.parts(target, problem, chosen.config)):
        try:
            return in_parts(chosen, target, parts, device)
        except CaptureError as error:  # of a part: what the caller can warm is the whole
            raise not_warm(f"{spec.backend}/{spec.name}", spec.op, problem) from error
    if spec.module is not None:
        return launch.bind(spec, target, problem, chosen.config, device.index or 0)
    if chosen.backend == "triton" and (target, problem) not in _warm_triton:
        if torch.cuda.is_current_stream_capturing():
            raise not_warm(f"{spec.backend}/{spec.name}", spec.op, problem)
        _warm_triton.add((target, problem))
    fallback, config = fallbacks[chosen.backend], chosen.config

    @torch.no_grad()  # no op has a gradient, whoever computes it
    def run(tensors: Tensors, addresses: Sequence[int]) -> None:
        fallback(tensors, config)

    return run


def _bind_or_fall_back(
    op: str,
    target: Target,
    problem: Problem,
    device: torch.device,
    fallbacks: Mapping[str, Fallback],
    in_parts: InParts | None,
) -> Run:
    skip: set[tuple[str, str]] = set()

    def next_in_line() -> tuple[Route, Run]:
        while True:
            chosen = route(op, target, problem, frozenset(skip))
            try:
                bound = bind_route(chosen, target, problem, device, fallbacks, in_parts)
                return chosen, bound
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
