"""What it costs that a row has the same bits in every batch: ``batch_invariant`` over plain calls.

    python -m op_tests.bench.invariance [--save] [--M 1 8 64 512 2048 8192]

All in one run on one GPU, cold weights, graph replay, medians: ``linear`` of several shapes,
``grouped_gemm`` of eight groups and ``fused_moe``, each as dispatch routes it (``plain_us``) and
within ``aiter_mx.batch_invariant()`` (``invariant_us``).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from statistics import geometric_mean

import torch
from torch import Tensor

import aiter_mx
from aiter_mx.timing import copies_to_stay_cold, random_mx
from op_tests.bench.common import DEVICE, graph_us, refuse_no_gpu, report
from op_tests.bench.layers import Layer, make_layer, route_tokens

LINEARS = ((2304, 6144), (6144, 2048), (9216, 6144))
GROUPS, GROUPED = 8, (4096, 2048)
Call = Callable[[], Tensor]


def linear_calls(M: int, N: int, K: int, device: torch.device) -> list[Call]:
    """A call for each copy of the weights."""
    x = random_mx(M, K, device)
    copies = min(16, copies_to_stay_cold(N * K))
    return [partial(aiter_mx.linear, *x, *random_mx(N, K, device)) for _ in range(copies)]


def grouped_calls(M: int, groups: int, N: int, K: int, device: torch.device) -> list[Call]:
    """Likewise; rows are divided as evenly as they can be."""
    x = random_mx(M, K, device)
    offs = (torch.arange(groups + 1, device=device) * M // groups).int()
    calls: list[Call] = []
    for _ in range(min(16, copies_to_stay_cold(groups * N * K))):
        wq, ws = random_mx(groups * N, K, device)
        w = (wq.view(groups, N, K), ws.view(groups, N, -1))
        calls.append(partial(aiter_mx.grouped_gemm, *x, *w, offs))
    return calls


def layer_calls(layer: Layer, M: int) -> list[Call]:
    """A call for each of several routings."""
    x = torch.randn(M, layer.H, device=layer.w1[0].device).bfloat16()
    weights = torch.rand(M, layer.top_k, device=x.device)
    copies = max(3, min(16, 2 * layer.E // (M * layer.top_k)))
    return [
        partial(aiter_mx.fused_moe, x, *layer.w1, *layer.w2, experts, weights)
        for experts in route_tokens(layer.E, layer.top_k, M, "uniform", copies)
    ]


def measure(
    op: str, M: int, N: int, K: int, calls: Sequence[Call],
    time_us: Callable[[Sequence[Call]], float] = graph_us,
) -> dict[str, object]:  # fmt: skip
    """One row of the table."""
    plain_us = time_us(calls)
    with aiter_mx.batch_invariant():
        invariant_us = time_us(calls)
    row: dict[str, object] = {"op": op, "M": M, "N": N, "K": K, "plain_us": plain_us}
    return row | {"invariant_us": invariant_us, "ratio": invariant_us / plain_us}


def summary(rows: Sequence[dict[str, object]]) -> str:
    """Geometric mean and worst of the ratios, for each op."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        ratios.setdefault(str(row["op"]), []).append(float(str(row["ratio"])))
    return "; ".join(
        f"{op}: mean {geometric_mean(found):.2f}, worst {max(found):.2f}"
        for op, found in ratios.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--save", action="store_true", help="write docs/measured/<gpu>/invariance.csv"
    )
    parser.add_argument("--M", type=int, nargs="+", default=[1, 8, 17, 64, 65, 512, 2048, 8192])
    arguments = parser.parse_args()
    refuse_no_gpu()
    torch.manual_seed(0)
    layer = make_layer(128, 8, 2048, 768)
    rows = []
    for M in arguments.M:
        for N, K in LINEARS:
            rows.append(measure("linear", M, N, K, linear_calls(M, N, K, DEVICE)))
        calls = grouped_calls(M, GROUPS, *GROUPED, DEVICE)
        rows.append(measure("grouped_gemm", M, *GROUPED, calls))
        rows.append(measure("fused_moe", M, 2 * 768, 2048, layer_calls(layer, M)))
        print(*rows[-5:], sep="\n", flush=True)
        torch.cuda.empty_cache()
    print(summary(rows))
    report("Batch invariance", rows, "invariance" if arguments.save else None)


if __name__ == "__main__":
    main()
