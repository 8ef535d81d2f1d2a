"""What one row of extreme values costs: NaN, infinity, and scales at both ends of their range; and
what the linear takes where rows of w, or all blocks, are of very different size.

    python -m op_tests.bench.values [--seconds 60]

A row is one of x, or one of a weight's. Both calls, with and without it, are captured, and their
replays take turns over weights that are cold; ``ratio`` is the time with such a row over that
without. ``is_right`` compares results with float64, as the tests do, in the row and some others; of
an expert layer it says that tokens without it have what they have else, and that those with NaN
have NaN. An expert layer has the row in x, where it makes the intermediate as extreme, or in the
weights of one expert.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

import aiter_mx
from aiter_mx.ops.fused_moe import fused_moe
from aiter_mx.timing import GraphedCalls, copies_to_stay_cold
from op_tests.bench import gpus
from op_tests.bench.common import DEVICE, alternated_us, normal_mx, saved_on_gpu
from op_tests.bench.expert_layers import LAYERS
from op_tests.bench.layers import make_layer, route_tokens
from op_tests.mx_reference import assert_close_to_reference

EVERYWHERE = ("rows of w", "blocks")
"""What is of many sizes: rows of w, by a deviation of 1.5 powers of two, or blocks, by up to 6."""
KINDS = ("not a number", "infinity", "2^-127", "2^127")
SCALES = {"not a number": 255, "2^-127": 0, "2^127": 254}
LINEARS = ((2304, 6144), (6144, 2048))
LINEAR_ROWS = (64, 512, 4096)
GROUPS = (16, 7168, 2048)
GROUP_ROWS = (8, 128, 512)
LAYER = "qwen3-30b-a3b"
TOKENS = (512, 4096)
CELL = ("M", "op", "N", "K", "place", "kind")
WINDOW_MS = 15.0
JUDGED_ROWS = 16
ACCUMULATION_ERROR = 2.0**-8
"""Of the sum of magnitudes: the most that a kernel states."""
Pair = tuple[torch.Tensor, torch.Tensor]
Calls = list[Callable[[], torch.Tensor]]


def spoiled(mx: Pair, row: int, kind: str) -> Pair:
    """A copy of ``[rows, K]`` in MX with one row of that kind: other scales, or infinity as
    ``quantize`` has it."""
    payload, scale = (each.clone() for each in mx)
    if kind == "infinity":
        values = torch.full((1, payload.shape[-1]), torch.inf, device=payload.device)
        found = aiter_mx.quantize(values.bfloat16())
        payload.view(torch.uint8)[row] = found[0].view(torch.uint8)[0]
        scale.view(torch.uint8)[row] = found[1].view(torch.uint8)[0]
    else:
        scale.view(torch.uint8)[row] = SCALES[kind]
    return payload, scale


def spoiled_tokens(x: torch.Tensor, kind: str) -> torch.Tensor:
    """A copy of bf16 tokens with one row of that kind, which reaches the intermediate."""
    values = {
        "not a number": torch.nan,
        "infinity": torch.inf,
        "2^-127": 2.0**-126,
        "2^127": 2.0**66,
    }
    x = x.clone()
    row = len(x) // 3
    x[row] = values[kind] if kind in KINDS[:2] else x[row] * values[kind]
    return x


@dataclass(frozen=True)
class Case:
    """A call without such a row and with it; what says whether the latter's result is right."""

    cell: tuple[object, ...]
    plain: Calls
    extreme: Calls
    is_right: Callable[[], bool]


def judged(out: torch.Tensor, x: Pair, w: Pair, row: int) -> bool:
    """Whether some rows of a product, this one among them, are those of float64."""
    rows = torch.linspace(0, len(out) - 1, JUDGED_ROWS - 1).long().unique().tolist()
    rows = sorted({*rows, min(row, len(out) - 1)})
    xq, xs = (each.view(torch.uint8)[rows] for each in x)
    try:
        assert_close_to_reference(
            *(out[rows], xq.view(x[0].dtype), xs, *w), accumulation_error=ACCUMULATION_ERROR
        )
    except AssertionError as error:
        print(error)
        return False
    return True


def linear_cases(M: int, N: int, K: int, device: torch.device) -> Iterator[Case]:
    """A row of x, and one of w, of each kind."""
    copies = copies_to_stay_cold(N * K)
    x = normal_mx(M, K, device=device)[1]
    ws = [normal_mx(N, K, device=device, deviation=K**-0.5)[1] for _ in range(copies)]
    out = torch.empty(M, N, dtype=torch.bfloat16, device=device)

    def calls(x: Pair, ws: list[Pair]) -> Calls:
        return [partial(aiter_mx.linear, *x, *w, out=out) for w in ws]

    plain = calls(x, ws)
    for kind in KINDS:
        other_x = spoiled(x, M // 3, kind)
        of_x = calls(other_x, ws)
        right = partial(_is_right, of_x[0], other_x, ws[0], M // 3)
        yield Case((M, "linear", N, K, "x", kind), plain, of_x, right)
        other_ws = [spoiled(w, N // 3, kind) for w in ws]
        of_w = calls(x, other_ws)
        right = partial(_is_right, of_w[0], x, other_ws[0], M // 3)
        yield Case((M, "linear", N, K, "w", kind), plain, of_w, right)

    draw = torch.Generator(device).manual_seed(1)
    for kind in EVERYWHERE:
        moved_x = x if kind == "rows of w" else of_many_sizes(x, kind, draw)
        moved_ws = [of_many_sizes(w, kind, draw) for w in ws]
        given = calls(moved_x, moved_ws)
        right = partial(_is_right, given[0], moved_x, moved_ws[0], M // 3)
        yield Case((M, "linear", N, K, "everywhere", kind), plain, given, right)


def of_many_sizes(mx: Pair, kind: str, draw: torch.Generator) -> Pair:
    """A copy of ``[rows, K]`` in MX under other scales."""
    payload, scale = mx[0], mx[1].view(torch.uint8)
    if kind == "rows of w":
        more = 1.5 * torch.randn(len(scale), 1, generator=draw, device=scale.device)
    else:
        more = torch.rand(scale.shape, generator=draw, device=scale.device) * 12 - 6
    return payload, (scale.int() + more.round().int()).clamp(0, 254).to(torch.uint8)


def _is_right(call: Callable[[], torch.Tensor], x: Pair, w: Pair, row: int) -> bool:
    return judged(call(), x, w, row)


def grouped_cases(rows: int, G: int, N: int, K: int, device: torch.device) -> Iterator[Case]:
    """A row of one group's x, and one of its w, of each kind."""
    x = normal_mx(G * rows, K, device=device)[1]
    ws = [
        normal_mx(G, N, K, device=device, deviation=K**-0.5)[1]
        for _ in range(copies_to_stay_cold(G * N * K))
    ]
    ends = torch.arange(1, G + 1, dtype=torch.int32, device=device) * rows
    out = torch.empty(G * rows, N, dtype=torch.bfloat16, device=device)
    group, row = G // 3, G // 3 * rows + rows // 3

    def calls(x: Pair, ws: list[Pair]) -> Calls:
        return [partial(aiter_mx.grouped_gemm, *x, *w, ends, out) for w in ws]

    def is_right(call: Callable[[], torch.Tensor], x: Pair, w: Pair) -> bool:
        own = slice(group * rows, (group + 1) * rows)
        inside = tuple(each[own] for each in x)
        return judged(call()[own], inside, (w[0][group], w[1][group]), rows // 3)

    plain = calls(x, ws)
    for kind in KINDS:
        other_x = spoiled(x, row, kind)
        of_x = calls(other_x, ws)
        cell = (G * rows, "grouped_gemm", N, K, "x", kind)
        yield Case(cell, plain, of_x, partial(is_right, of_x[0], other_x, ws[0]))
        other_ws = [_spoiled_of_group(w, group, N // 3, kind) for w in ws]
        of_w = calls(x, other_ws)
        cell = (G * rows, "grouped_gemm", N, K, "w", kind)
        yield Case(cell, plain, of_w, partial(is_right, of_w[0], x, other_ws[0]))


def _spoiled_of_group(w: Pair, group: int, row: int, kind: str) -> Pair:
    G, N, _ = w[0].shape
    flat = (w[0].flatten(0, 1), w[1].flatten(0, 1))
    payload, scale = spoiled(flat, group * N + row, kind)
    return payload.unflatten(0, (G, N)), scale.unflatten(0, (G, N))


def layer_cases(M: int, device: torch.device) -> Iterator[Case]:
    """A token's row, and one of an expert's gate, up or down weights, of each kind."""
    sizes = LAYERS[LAYER]
    layer = make_layer(sizes.E, sizes.top_k, sizes.H, sizes.intermediate)
    x = torch.randn(M, sizes.H, device=device).bfloat16()
    weights = torch.rand(M, sizes.top_k, device=device) + 0.1
    experts = route_tokens(sizes.E, sizes.top_k, M, "uniform", 3)
    out = torch.empty_like(x)
    expert = int(experts[0][M // 3, 0])

    def calls(x: torch.Tensor, w1: Pair, w2: Pair) -> Calls:
        return [partial(fused_moe, x, *w1, *w2, each, weights, out=out) for each in experts]

    plain = calls(x, layer.w1, layer.w2)
    usual = plain[0]().clone()
    others = torch.arange(M, device=device) != M // 3
    without = (experts[0] != expert).all(1)

    def is_right(call: Callable[[], torch.Tensor], kind: str, kept: torch.Tensor) -> bool:
        found = call()
        apart = (found[kept].float() - usual[kept].float()).norm()
        is_kept = bool(apart <= 2.0**-7 * usual[kept].float().norm())
        has_nan = found[~kept].isnan().any(1)
        return is_kept and (bool(has_nan.all()) if kind == "not a number" else True)

    for kind in KINDS:
        given = calls(spoiled_tokens(x, kind), layer.w1, layer.w2)
        right = partial(is_right, given[0], kind, others)
        yield Case((M, "fused_moe", sizes.H, sizes.intermediate, "x", kind), plain, given, right)
        w1 = _spoiled_of_group(layer.w1, expert, sizes.intermediate // 3, kind)
        given = calls(x, w1, layer.w2)
        right = partial(is_right, given[0], kind, without)
        yield Case((M, "fused_moe", sizes.H, sizes.intermediate, "w1", kind), plain, given, right)
        w2 = _spoiled_of_group(layer.w2, expert, sizes.H // 3, kind)
        given = calls(x, layer.w1, w2)
        right = partial(is_right, given[0], kind, without)
        yield Case((M, "fused_moe", sizes.H, sizes.intermediate, "w2", kind), plain, given, right)


CASES: dict[str, Callable[..., Iterator[Case]]] = {
    "linear": linear_cases,
    "grouped_gemm": grouped_cases,
    "fused_moe": layer_cases,
}
"""By the op, what is measured of sizes and a device."""


def every_size() -> Iterator[tuple[str, tuple[int, ...]]]:
    """All ops and sizes that are measured."""
    for N, K in LINEARS:
        for M in LINEAR_ROWS:
            yield "linear", (M, N, K)
    for rows in GROUP_ROWS:
        yield "grouped_gemm", (rows, *GROUPS)
    for M in TOKENS:
        yield "fused_moe", (M,)


def cells_of(
    is_done: Callable[..., bool], of: tuple[str, tuple[int, ...]], device: torch.device = DEVICE
) -> Iterator[dict[str, object]]:
    """Cells of an op and sizes that are not done, one after the other."""
    op, sizes = of
    torch.manual_seed(0)
    for case in CASES[op](*sizes, device):
        if is_done(*case.cell):
            continue
        row: dict[str, object] = dict(zip(CELL, case.cell, strict=True))
        row["is_right"] = int(case.is_right())
        graphs = {"plain_us": GraphedCalls(case.plain), "extreme_us": GraphedCalls(case.extreme)}
        times = alternated_us(graphs, WINDOW_MS)
        yield row | times | {"ratio": times["extreme_us"] / times["plain_us"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120, help="save no cell after these")
    arguments = parser.parse_args()
    saved = saved_on_gpu("values", CELL)
    gpus.spread(partial(cells_of, saved.has), every_size(), saved.report, arguments.seconds)


if __name__ == "__main__":
    main()
