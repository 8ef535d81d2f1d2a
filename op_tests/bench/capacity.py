"""Expert layers over buffers with room for more tokens, beside ``fused_moe`` on the same rows.

    python -m op_tests.bench.capacity [--save] [--M 1 8 64] [--capacity 16]

All in one run on one GPU, replays of graphs in turns, medians; each call routes its tokens to other
experts than the one before, so that weights are cold. ``num_tokens_us`` is the layer over as many
times more tokens than are expected and counted, beside ``fused_moe_us`` of those that count.
``masked_us`` is ``fused_moe_masked`` with room for as many times more rows of each expert than it
has in the mean, beside ``rows_us``, which is ``fused_moe`` of the same rows, an expert each.
``quantised_us`` is the layer of tokens that come quantised.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import aiter_mx
from aiter_mx.timing import GraphedCalls
from op_tests.bench.common import alternated_us, refuse_no_gpu, report
from op_tests.bench.layers import MOST_CALLS, Layer, make_layer, route_tokens

WINDOW_MS = 300.0
Call = Callable[[], Tensor]


def calls_of(layer: Layer, experts: Tensor, capacity: int) -> dict[str, Call]:
    """What is compared, for tokens with these experts ``[M, top_k]``. What does not count is NaN,
    and of experts that there are not."""
    M, top_k = experts.shape
    device, weights = experts.device, (*layer.w1, *layer.w2)
    x = torch.randn(M, layer.H, device=device).bfloat16()
    topk = torch.rand(M, top_k, device=device)

    def roomy(tensor: Tensor, filler: float) -> Tensor:
        room = (capacity * M, *tensor.shape[1:])
        made = torch.full(room, filler, dtype=tensor.dtype, device=device)
        made[:M] = tensor
        return made

    flat, rows = experts.flatten(), x.repeat_interleave(top_k, 0)
    counts = torch.bincount(flat, minlength=layer.E)
    mean = -(-len(flat) // layer.E)
    most = max(capacity * mean, int(counts.max()))
    order = flat.argsort(stable=True)
    place = torch.arange(len(flat), device=device) - (counts.cumsum(0) - counts)[flat[order]]
    masked = torch.full((layer.E, most, layer.H), float("nan"), dtype=torch.bfloat16, device=device)
    masked[flat[order], place] = rows[order]
    ones = torch.ones(len(flat), 1, device=device)
    count = torch.tensor([M], dtype=torch.int32, device=device)
    wide = (roomy(x, float("nan")), *weights, roomy(experts, -1 - layer.E), roomy(topk, 0))
    xq, xs = aiter_mx.quantize(x)
    return {
        "fused_moe": partial(aiter_mx.fused_moe, x, *weights, experts, topk),
        "num_tokens": partial(aiter_mx.fused_moe, *wide, num_tokens=count, expected_tokens=M),
        "quantised": partial(aiter_mx.fused_moe, xq, *weights, experts, topk, x_scale=xs),
        "rows": partial(aiter_mx.fused_moe, rows, *weights, experts.view(-1, 1), ones),
        "masked": partial(aiter_mx.fused_moe_masked, masked, *weights, counts.int(), mean),
    }


def measure(layer: Layer, M: int, capacity: int) -> dict[str, object]:
    """One row of the table."""
    copies = max(3, min(MOST_CALLS, 2 * layer.E // (M * layer.top_k)))
    calls = [
        calls_of(layer, each, capacity)
        for each in route_tokens(layer.E, layer.top_k, M, "uniform", copies)
    ]
    graphs = {name: GraphedCalls([each[name] for each in calls]) for name in calls[0]}
    us = alternated_us(graphs, WINDOW_MS)
    row: dict[str, object] = {"M": M, "capacity": capacity, "E": layer.E, "top_k": layer.top_k}
    row |= {"H": layer.H, "I": layer.intermediate} | {f"{k}_us": v for k, v in us.items()}
    row["num_tokens_over"] = us["num_tokens"] / us["fused_moe"]
    row["quantised_over"] = us["quantised"] / us["fused_moe"]
    row["masked_over"] = us["masked"] / us["rows"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--save", action="store_true", help="write docs/measured/<gpu>/capacity.csv"
    )
    parser.add_argument("--M", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--capacity", type=int, default=16)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768)
    arguments = parser.parse_args()
    refuse_no_gpu()
    torch.manual_seed(0)
    layer = make_layer(arguments.experts, arguments.top_k, arguments.hidden, arguments.intermediate)
    rows = []
    for M in arguments.M:
        rows.append(measure(layer, M, arguments.capacity))
        print(rows[-1], flush=True)
    report("Expert layers with room for more", rows, "capacity" if arguments.save else None)


if __name__ == "__main__":
    main()
