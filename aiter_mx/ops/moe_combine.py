"""The last launch of an expert layer: adds up the routed rows of each token."""

from __future__ import annotations

from typing import Any

import torch

from aiter_mx.kernels.moe_combine import MoeCombineProblem
from aiter_mx.kernels.spec import Config
from aiter_mx.launch import Tensors
from aiter_mx.ops.plan import bind
from aiter_mx.target import target_of


def fallbacks(problem: MoeCombineProblem) -> dict[str, Any]:
    """What runs each backend other than ours."""

    def run_torch(tensors: Tensors, config: Config) -> None:
        from aiter_mx.fallbacks.moe_combine_torch import moe_combine_torch

        moe_combine_torch(problem, *tensors)

    return {"torch": run_torch}


def warm(problem: MoeCombineProblem, device: torch.device) -> None:
    """Load what computes ``problem`` on ``device``, so that its next call builds nothing."""
    bind("moe_combine", target_of(device), problem, device, fallbacks(problem))
