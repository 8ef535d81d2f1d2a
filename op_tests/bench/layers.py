"""Expert layers that benchmarks time: their weights, and where tokens go."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from op_tests.bench.common import DEVICE, normal_mx

ROUTINGS = ("uniform", "skewed")
MOST_CALLS = 24
"""Of a graph: enough routings that no expert's weights are still cached when it comes again."""


@dataclass(frozen=True)
class Layer:
    """Weights of an expert layer: MX-FP8 ``[E, 2 * I, H]`` and ``[E, H, I]``, and both in bf16."""

    E: int
    top_k: int
    H: int
    intermediate: int
    w1: tuple[torch.Tensor, torch.Tensor]
    w2: tuple[torch.Tensor, torch.Tensor]
    dense: tuple[torch.Tensor, torch.Tensor]

    def shape(self, part: str) -> tuple[int, int]:
        """N and K of a part's GEMM."""
        return (self.H, self.intermediate) if part == "gemm2" else (2 * self.intermediate, self.H)


def make_layer(E: int, top_k: int, H: int, intermediate: int) -> Layer:
    """A layer whose intermediate is of the size of a trained one's: sums near one."""
    (dense1, w1), (dense2, w2) = (
        normal_mx(E, N, K, device=DEVICE, deviation=K**-0.5)
        for N, K in ((2 * intermediate, H), (H, intermediate))
    )
    dense = dense1.transpose(1, 2), dense2.transpose(1, 2)
    return Layer(E, top_k, H, intermediate, w1, w2, dense)


def route_tokens(E: int, top_k: int, M: int, routing: str, calls: int) -> list[torch.Tensor]:
    """Experts ``[M, top_k]`` of each call: any with the same chance, or some of them often.

    Where few experts are touched, calls one after the other take different ones.
    """
    order, found = torch.randperm(E), []
    for call in range(calls):
        if is_few(E, top_k, M):
            first = call * M * top_k
            found.append(order[(first + torch.arange(M * top_k)) % E].view(M, top_k))
            continue
        weights = torch.ones(E)
        if routing == "skewed":
            weights = 1.0 / (1 + torch.arange(E))[torch.randperm(E)]
        found.append(torch.multinomial(weights.expand(M, -1), top_k))
    return [experts.int().to(DEVICE) for experts in found]


def is_few(E: int, top_k: int, M: int) -> bool:
    """Whether every token has experts of its own, whatever the routing is called."""
    return M * top_k * 4 <= E
