"""Grouped GEMM with few rows a group, as groups in a row and masked, beside torch's in bf16.

    python -m op_tests.bench.grouped --few-rows [--seconds 120]

``offs_us`` is ``grouped_gemm`` over the rows of all groups, ``masked_us`` the same over groups that
have room for as many rows as the largest one. bf16 multiplies the values that were quantised, group
after group. Weights are cold, the replays of all take turns, and cells are saved as they are
measured: a run that ends early goes on where it ended.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

import aiter_mx
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from aiter_mx.ops.grouped_gemm import grouped_gemm_ranges
from aiter_mx.target import Target, target_of
from aiter_mx.timing import GraphedCalls, copies_to_stay_cold
from op_tests.bench import gpus
from op_tests.bench.common import DEVICE, alternated_us, normal_mx, saved_on_gpu

SHAPES = ((16, 4096, 7168), (16, 7168, 2048), (32, 5760, 2880), (128, 1536, 2048))
"""Groups, N, K: of DeepSeek-V3 at EP16, gpt-oss at EP4 and Qwen3."""
ROWS = (1, 8, 32, 64, 65, 128, 512)
SPREADS = ("balanced", "skewed", "half empty")
CELL = ("rows", "spread", "G", "N", "K")
WINDOW_MS = 25.0
Calls = list[Callable[[], object]]


def counts_of(spread: str, groups: int, rows: int) -> list[int]:
    """Rows of each group, ``groups * rows`` in all: even, by 1, 1/2, 1/3 .. in random order, or
    none in every other group."""
    if spread == "half empty":
        return [2 * rows * (g % 2) for g in range(groups)]
    shares = torch.ones(groups, dtype=torch.float64)
    if spread == "skewed":
        order = torch.randperm(groups, generator=torch.Generator().manual_seed(groups))
        shares = 1.0 / (1 + order.double())
    ends = (shares.cumsum(0) / shares.sum() * groups * rows).round().long()
    return ends.diff(prepend=ends.new_zeros(1)).tolist()


class Weights:
    """Weights of all groups, so many copies that none stays cached, and in bf16."""

    def __init__(self, G: int, N: int, K: int, device: torch.device) -> None:
        copies = range(copies_to_stay_cold(G * N * K))
        drawn = [normal_mx(G, N, K, device=device, deviation=K**-0.5) for _ in copies]
        self.shape, self.device = (G, N, K), device
        self.dense = [dense.transpose(1, 2) for dense, _ in drawn]
        self.mx = [mx for _, mx in drawn]


def calls_of(weights: Weights, counts: Sequence[int]) -> dict[str, Calls]:
    """What each contender captures."""
    (G, N, K), device = weights.shape, weights.device
    rows, most = sum(counts), max(counts)
    ends = torch.tensor(counts, device=device).cumsum(0).int()
    dense, x = normal_mx(rows, K, device=device)
    out = torch.empty(rows, N, dtype=torch.bfloat16, device=device)
    room = [torch.empty(G, most, *each.shape[1:], dtype=each.dtype, device=device) for each in x]
    at = [
        torch.repeat_interleave(torch.arange(G), torch.tensor(counts)),
        torch.cat([torch.arange(count) for count in counts]),
    ]
    for roomy, packed in zip(room, x, strict=True):
        roomy.view(torch.uint8)[tuple(at)] = packed.view(torch.uint8)
    counted = torch.tensor(counts, dtype=torch.int32, device=device)
    masked_out = torch.empty(G, most, N, dtype=torch.bfloat16, device=device)

    def masked(w: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        likely = -(-rows // G)
        return grouped_gemm_ranges(*room, *w, None, counted, masked_out, expected_rows=likely)

    return {
        "offs_us": [partial(aiter_mx.grouped_gemm, *x, *w, ends, out) for w in weights.mx],
        "masked_us": [partial(masked, w) for w in weights.mx],
        "bf16_us": [partial(torch._grouped_mm, dense, w, offs=ends) for w in weights.dense],
    }


def row_of(
    target: Target,
    shape: tuple[int, int, int],
    spread: str,
    counts: Sequence[int],
    times: Mapping[str, float],
) -> dict[str, object]:
    """A cell as it is saved."""
    (G, N, K), M = shape, sum(counts)
    problem = GroupedGemmProblem(M=M, N=N, K=K, G=G)
    return {
        "rows": M // G,
        "spread": spread,
        "G": G,
        "N": N,
        "K": K,
        "most_rows": max(counts),
        "kernel": route("grouped_gemm", target, problem).kernel,
        **times,
        "over_bf16": times["bf16_us"] / times["offs_us"],
        "masked_over_bf16": times["bf16_us"] / times["masked_us"],
    }


def cells_of(
    is_done: Callable[..., bool], shape: tuple[int, int, int], device: torch.device = DEVICE
) -> Iterator[dict[str, object]]:
    """A shape's cells that are not done, one after the other."""
    left = [
        (spread, rows) for spread in SPREADS for rows in ROWS if not is_done(rows, spread, *shape)
    ]
    if not left:
        return
    torch.manual_seed(0)
    weights = Weights(*shape, device)
    for spread, rows in left:
        counts = counts_of(spread, shape[0], rows)
        calls = calls_of(weights, counts)
        for each in calls.values():
            each[0]()
        graphs = {name: GraphedCalls(each) for name, each in calls.items()}
        times = alternated_us(graphs, WINDOW_MS)
        yield row_of(target_of(device), shape, spread, counts, times)


def main(arguments: argparse.Namespace) -> None:
    """Measure what is not done yet."""
    saved = saved_on_gpu("grouped_few_rows", CELL)
    gpus.spread(partial(cells_of, saved.has), SHAPES, saved.report, arguments.seconds)
