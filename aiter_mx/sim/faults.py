"""What a simulated kernel can be found guilty of."""

from __future__ import annotations

from aiter_mx.errors import SimulatorError


class UnknownInstruction(SimulatorError):
    """The code has an instruction, operand or modifier whose meaning the simulator lacks."""


class MemoryFault(SimulatorError):
    """An address outside every region, or a region used against its access."""


class UninitializedRead(SimulatorError):
    """A register or LDS byte was read that nothing has written."""


class PendingAccess(SimulatorError):
    """A register or LDS byte was used before the ``s_waitcnt`` that makes it valid."""


class RaceError(SimulatorError):
    """Two waves touched one LDS byte with no barrier between."""


class StaleRead(SimulatorError):
    """A cache may hide what another wave wrote, or no order brings it there before the read."""


class DeadlockError(SimulatorError):
    """All workgroups that a GPU has room for wait for others."""


class HazardError(SimulatorError):
    """An instruction follows another with fewer wait states between than software must leave."""


class IdleInstruction(SimulatorError):
    """An instruction that does nothing: the kernel would be right without it."""


class StuckError(SimulatorError):
    """The kernel took more steps than the launch allows, or jumped to where no code is."""


class TrapError(SimulatorError):
    """The kernel executed ``s_trap``, as a failed assertion does."""
