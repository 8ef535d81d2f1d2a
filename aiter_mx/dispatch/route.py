"""The dispatcher's answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from aiter_mx.kernels.registry import find_kernel
from aiter_mx.kernels.spec import Config, KernelSpec

Clause: TypeAlias = str | Callable[[], str]
"""Part of a reason, or what writes it when somebody asks; an empty one is left out."""


@dataclass(frozen=True, repr=False)
class Route:
    """Who computes a call, and why.

    Attributes:
        spec: the declaration of the kernel.
        config: the kernel's compile-time parameters.
        source: ``file:line`` of the table row that decided, or ``envelope``.
        clauses: what the reason is made of when somebody asks for it.
    """

    spec: KernelSpec
    config: Config
    source: str
    clauses: tuple[Clause, ...] = field(default=(), compare=False)

    @property
    def op(self) -> str:
        """Name of the op."""
        return self.spec.op

    @property
    def backend(self) -> str:
        """``hip``, ``triton``, ``vendor`` or ``torch``."""
        return self.spec.backend

    @property
    def kernel(self) -> str:
        """Name of the kernel in the registry."""
        return self.spec.name

    @property
    def reason(self) -> str:
        """Which row or rule decided, and who was passed over for what: a sentence for people."""
        written = (clause if isinstance(clause, str) else clause() for clause in self.clauses)
        return "; ".join(dict.fromkeys(filter(None, written)))

    def __reduce__(self) -> tuple[Callable[..., Route], tuple[object, ...]]:
        """Another process has the declaration too, which holds what cannot be sent."""
        spec = self.spec
        arch = next(iter(spec.modules[-1].sources if spec.modules else spec.archs), "cpu")
        named = (self.op, arch, self.backend, self.kernel)
        return _sent, (named, dict(self.config), self.source, self.reason)

    def __repr__(self) -> str:
        config = " ".join(f"{name}={value}" for name, value in self.config.items())
        chosen = f"{self.backend}/{self.kernel}" + (f" {config}" if config else "")
        return f"Route({self.op}: {chosen}, by {self.source})"


def _sent(named: tuple[str, str, str, str], config: Config, source: str, reason: str) -> Route:
    return Route(find_kernel(*named), config, source, (reason,))
