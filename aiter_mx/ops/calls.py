"""What the calls of all ops have in common: whether torch must see them, and plans of the rest."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

import torch

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of tensors with which a call may go straight to a launch."""
PLAIN_OR_NONE = PLAIN | {type(None)}
MOST_PLANS = 1 << 14
"""Plans of an op that a thread keeps, at some 5 KB each: a server may see any number of shapes."""

Plan = TypeVar("Plan")


class Plans(threading.local, Generic[Plan]):
    """What computes a call, by everything about it that the checks and the route depend on.

    A thread has plans of its own, as a launch is bound to the thread that made it.
    """

    def __init__(self) -> None:
        self.by_call: dict[Hashable, Plan] = {}

    def keep(self, call: Hashable, plan: Plan) -> Plan:
        """``plan``, which the next such call finds; where there are too many, all others go."""
        if len(self.by_call) >= MOST_PLANS:
            self.by_call.clear()
        self.by_call[call] = plan
        return plan


def is_traced(tensors: Sequence[object]) -> bool:
    """Whether torch compiles the caller, a dispatch mode is on, or a tensor is of a subclass."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or any(type(t) not in PLAIN_OR_NONE and isinstance(t, torch.Tensor) for t in tensors)
    )


def wants_gradient(*tensors: object) -> bool:
    """Whether torch would record what is computed from these, for a gradient that no op has.

    Such calls go through torch's dispatcher, whose backward pass then raises instead of stopping
    there in silence.
    """
    return torch.is_grad_enabled() and any(
        isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors
    )
