"""The package's own errors; wrong arguments are plain ValueError and TypeError."""

from __future__ import annotations


class AiterMxError(RuntimeError):
    """Base of the errors below."""


class ToolchainError(AiterMxError):
    """No compiler for an architecture was found, or the one found cannot be used."""


class BuildError(AiterMxError):
    """A kernel failed to compile; the message carries the compiler's output."""


class CacheError(AiterMxError):
    """The artifact cache cannot be used: lock wait exceeded, no space, not writable."""


class CaptureError(AiterMxError):
    """Something that a stream capture forbids was needed, such as building a kernel."""


class LaunchError(AiterMxError):
    """A runtime refused to load or launch a code object."""


class TableError(AiterMxError):
    """A tuned table has a row that cannot be right; the message names file and line."""


class SimulatorError(AiterMxError):
    """The simulated kernel did what hardware would punish, or what the simulator cannot do.

    Attributes:
        check: the rule of ``aiter_mx.sim.checks`` that it broke, if it is one that can be switched.
        kind: the rule's class.
    """

    check: str = ""
    kind: str = ""
