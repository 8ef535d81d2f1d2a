"""The dispatcher's answer."""

from __future__ import annotations

from dataclasses import dataclass

from aiter_mx.kernels.spec import Config


@dataclass(frozen=True)
class Route:
    """Who computes a call, and why.

    Attributes:
        op: name of the op.
        backend: ``hip``, ``triton``, ``vendor`` or ``torch``.
        kernel: name of the kernel in the registry.
        config: the kernel's compile-time parameters.
        reason: a sentence for people.
        source: ``file:line`` of the table row that decided, or ``envelope``.
    """

    op: str
    backend: str
    kernel: str
    config: Config
    reason: str
    source: str
