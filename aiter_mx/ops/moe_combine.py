"""The last launch of an expert layer: adds up the routed rows of each token."""

from __future__ import annotations

import torch

from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels.moe_combine import MoeCombineProblem
from aiter_mx.ops.checks import DTYPES, INDICES
from aiter_mx.plan import bind
from aiter_mx.target import target_of


def warm(problem: MoeCombineProblem, device: torch.device) -> None:
    """Load what computes ``problem`` on ``device``, so that its next call builds nothing."""
    target, p = target_of(device), problem
    run = bind("moe_combine", target, p, device)
    if route("moe_combine", target, p).backend != "triton" or p.M * p.N == 0:
        return

    # Triton compiles when it is called, so it is called, with an expert map and without.
    def new(*shape: int, of: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=of, device=device)

    for expert_map in (None, new(p.E, of=torch.int32)):
        tensors = (
            new(p.M * (p.top_k + p.shared), p.N, of=DTYPES[p.y_dtype]),
            new(p.M, p.top_k, of=INDICES[p.id_dtype]),
            new(p.M, p.top_k, of=torch.float32),
            expert_map,
            new(p.M, p.N, of=DTYPES[p.out_dtype]),
        )
        run(tensors, [0 if tensor is None else tensor.data_ptr() for tensor in tensors])
