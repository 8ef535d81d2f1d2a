"""An expert layer in bf16: torch's grouped GEMM twice, and a fused Triton kernel for each of three:
rows in the order of their experts, SiLU of the gate times up, and a token's weighted sum.

Run as a script, this file checks it in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_FEATURES = 1024  # of a program


@triton.jit
def permute_kernel(x_ptr, tokens_ptr, out_ptr, N, FEATURES: tl.constexpr):
    """FEATURES features of a routed row."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    token = tl.load(tokens_ptr + row).to(tl.int64)
    tl.store(out_ptr + row * N + n, tl.load(x_ptr + token * N + n, mask=n < N), mask=n < N)


@triton.jit
def activate_kernel(h_ptr, out_ptr, N, FEATURES: tl.constexpr):
    """FEATURES features of a routed row, from the halves that are its gate and up."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    gate = tl.load(h_ptr + row * 2 * N + n, mask=n < N, other=0.0).to(tl.float32)
    up = tl.load(h_ptr + row * 2 * N + N + n, mask=n < N, other=0.0).to(tl.float32)
    activated = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * N + n, activated.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def combine_kernel(
    y_ptr, places_ptr, weights_ptr, out_ptr, N, TOP_K: tl.constexpr, FEATURES: tl.constexpr
):
    """FEATURES features of a token."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    total = tl.zeros((FEATURES,), dtype=tl.float32)
    for slot in tl.static_range(TOP_K):
        row = tl.load(places_ptr + token * TOP_K + slot).to(tl.int64)
        weight = tl.load(weights_ptr + token * TOP_K + slot)
        y = tl.load(y_ptr + row * N + n, mask=n < tl.where(row >= 0, N, 0), other=0.0)
        total += weight * y.to(tl.float32)
    tl.store(out_ptr + token * N + n, total.to(out_ptr.dtype.element_ty), mask=n < N)


@dataclass(frozen=True)
class Routing:
    """Which rows are whose, worked out ahead: what sorts is no part of what is timed.

    Attributes:
        tokens: int32 ``[rows]``, of each routed row, experts one after the other.
        places: int32 ``[M, top_k]``, the row of each slot, -1 where its expert is not here.
        ends: int32 ``[E]``, behind each expert's last row.
    """

    tokens: torch.Tensor
    places: torch.Tensor
    ends: torch.Tensor


def routing_of(experts: torch.Tensor, E: int) -> Routing:
    """From the experts of each slot ``[M, top_k]``, negative where they are not here."""
    flat = experts.flatten().long()
    here = (flat >= 0).nonzero().flatten()
    order = here[flat[here].argsort(stable=True)]
    places = torch.full_like(flat, -1)
    places[order] = torch.arange(len(order), device=flat.device)
    ends = flat[here].bincount(minlength=E).cumsum(0)
    tokens = order // experts.shape[1]
    return Routing(tokens.int(), places.view(experts.shape).int(), ends.int())


def gemms(
    rows: torch.Tensor,
    activated: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    ends: torch.Tensor,
) -> None:
    """The two grouped GEMMs alone."""
    if len(rows):
        torch._grouped_mm(rows, w1, offs=ends)
        torch._grouped_mm(activated, w2, offs=ends)


def layer(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    routing: Routing,
    weights: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """The layer over ``x`` ``[M, H]``, with ``w1`` ``[E, H, 2 * I]`` and ``w2`` ``[E, I, H]``."""
    (M, H), rows, I = x.shape, len(routing.tokens), w2.shape[1]
    if rows == 0:
        return out.zero_()
    sorted_x, activated = x.new_empty(rows, H), x.new_empty(rows, I)
    permute_kernel[rows, triton.cdiv(H, _FEATURES)](x, routing.tokens, sorted_x, H, _FEATURES)
    h = torch._grouped_mm(sorted_x, w1, offs=routing.ends)
    activate_kernel[rows, triton.cdiv(I, _FEATURES)](h, activated, I, _FEATURES)
    y = torch._grouped_mm(activated, w2, offs=routing.ends)
    top_k = routing.places.shape[1]
    combine_kernel[M, triton.cdiv(H, _FEATURES)](
        y, routing.places, weights, out, H, top_k, _FEATURES
    )
    return out


def check() -> None:
    """The layer beside float64, some slots' experts elsewhere and one expert without rows."""
    torch.manual_seed(0)
    M, top_k, E, H, I = 13, 3, 5, 96, 1056
    experts = torch.rand(M, E + 2).argsort(1)[:, :top_k].int()
    experts[(experts >= E) | (experts == 3)] = -1
    x = torch.randn(M, H).bfloat16()
    w1, w2 = (torch.randn(E, K, N).bfloat16() * K**-0.5 for K, N in ((H, 2 * I), (I, H)))
    weights = torch.rand(M, top_k)
    out = layer(x, w1, w2, routing_of(experts, E), weights, torch.full_like(x, torch.nan))
    expected = torch.zeros(M, H, dtype=torch.float64)
    for token, slot in (experts >= 0).nonzero().tolist():
        expert = experts[token, slot]
        gate, up = (x[token].double() @ w1[expert].double()).chunk(2)
        y = (torch.nn.functional.silu(gate) * up) @ w2[expert].double()
        expected[token] += weights[token, slot] * y
    error = float((out.double() - expected).norm() / expected.norm())
    assert 0 < error < 1e-2, error


if __name__ == "__main__":
    check()
