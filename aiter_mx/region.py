"""Memory that a kernel may touch: launches name it, the simulator holds kernels to it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Region:
    """A range of memory that a kernel may touch.

    Attributes:
        name: the argument it came from, for messages.
        address: first byte.
        size_bytes: its length.
        access: ``r``, ``w`` or ``rw``.
    """

    name: str
    address: int
    size_bytes: int
    access: str
