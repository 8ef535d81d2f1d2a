"""The last launch of an expert layer: adds up the routed rows of each token."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from aiter_mx.kernels.moe_combine import MoeCombineProblem
from aiter_mx.launch import Tensors
from aiter_mx.ops.checks import DTYPES, INDICES


def operands_of(problem: MoeCombineProblem, device: torch.device) -> Iterator[Tensors]:
    """Tensors of calls that pose ``problem``, with and without what may be None."""
    p = problem

    def new(*shape: int, of: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=of, device=device)

    maps, counts = (None, new(p.E, of=torch.int32)), (None, new(1, of=torch.int32))
    for expert_map, num_tokens in product(maps, counts):
        if p.M * p.N:
            yield (
                new(p.M * (p.top_k + p.shared), p.N, of=DTYPES[p.y_dtype]),
                new(p.M, p.top_k, of=INDICES[p.id_dtype]),
                new(p.M, p.top_k, of=torch.float32),
                expert_map,
                num_tokens,
                new(p.M, p.N, of=DTYPES[p.out_dtype]),
            )
