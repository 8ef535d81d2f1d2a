"""Where Triton computes at all, and its kernels without tiles. Triton itself is not imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec

from aiter_mx.kernels.spec import Config, KernelSpec, Param, Problem
from aiter_mx.target import ARCHS, Target

OPTIONS = {"enable_fp_fusion": False}
"""Of every launch: Triton's versions disagree on the default, and references do not fuse."""


def unavailable(target: Target) -> str | None:
    """Why Triton computes nothing on ``target``, or None when it does."""
    if target.runtime not in ("hip", "cuda"):
        return f"Triton needs a GPU, and this is {target.name}"
    if target.arch not in ARCHS:
        return f"the Triton kernels are for {' and '.join(ARCHS)}, not for {target.arch}"
    return None if _is_installed() else "Triton is not installed"


@cache
def _is_installed() -> bool:
    return find_spec("triton") is not None


def tiles(params: Sequence[Param], *rows: tuple[int, ...]) -> tuple[Config, ...]:
    """Configurations from the values of the parameters, in their order."""
    return tuple(dict(zip((param.name for param in params), row, strict=True)) for row in rows)


def with_tiles(
    op: str,
    params: tuple[Param, ...],
    configure: Callable[[Target, Problem], Config],
    candidates: Callable[[Target, Problem], Sequence[Config]],
    refusal: Callable[[Problem], str | None] = lambda problem: None,
    name: str = "dot_scaled",
) -> KernelSpec:
    """A Triton kernel of an op.

    Args:
        op: name of the op.
        params: of its tiles.
        configure, candidates: as of ``KernelSpec``.
        refusal: why it does not cover a problem, or None when it does.
        name: the kernel's name in tables.
    """
    return KernelSpec(
        op=op,
        backend="triton",
        name=name,
        params=params,
        refusal=lambda target, problem: unavailable(target) or refusal(problem),
        configure=configure,
        candidates=candidates,
        runner=f"aiter_mx.fallbacks.{op}_triton:run",
    )


def without_tiles(
    op: str, name: str, refusal: Callable[[Problem], str | None] = lambda problem: None
) -> KernelSpec:
    """A Triton kernel that has no parameters: ``with_tiles`` has the arguments."""
    return with_tiles(
        op, (), lambda target, problem: {}, lambda target, problem: ({},), refusal, name
    )
