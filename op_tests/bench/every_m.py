"""The linear at every number of rows, beside what engines would run in its place.

    python -m op_tests.bench.linear --every-m [--share 10] [--seed 22] [--seconds 500]

The shapes are the dense ones of the catalogue's models on 1 to 8 GPUs, or one in ``--share`` of
them, drawn by a seed. Contenders are bf16 cuBLAS over the normal values that ours are quantised
from, ``torch._scaled_mm`` over fp8 without MX, a scale a row, and Humming, with bf16 and with fp8
activations; weights are cold, and graphs are replayed in turns, as a GPU's clock falls under load.
Humming takes x in bf16 with both, and is left out where it is not installed and, with its error
printed, where it refuses a shape. All visible GPUs measure, a shape each at a time. Each cell is
saved as it is measured: a run that ends early, or after ``--seconds``, goes on where it ended, and
what was measured at another commit is measured again.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from statistics import median

import torch

import aiter_mx
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.target import Target, target_of
from aiter_mx.timing import GraphedCalls, copies_to_stay_cold
from aiter_mx.workloads.models import MODELS
from op_tests.bench.common import (
    DEVICE,
    Saved,
    alternated_us,
    normal_mx,
    quantize_rows,
    saved_on_gpu,
)
from op_tests.bench.gpus import spread

GRID = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 63, 64, 65, 96, 97, 127, 128, 129, 192, 193, 256, 257, 384, 512),
    *(513, 768, 1024, 1025, 1536, 2048, 3072, 4096, 8192, 16384, 32768),
)
DRAWN = 5
"""Numbers of rows beside these, drawn for each shape."""
NEAR = 0.03
"""A cell that misses its bar by less is timed three times more, and the median counts."""
CELL = ("M", "N", "K")
BESIDE_HUMMING = (
    *("M", "N", "K", "ours_us", "ours_bf16_x_us", "humming_us", "humming_fp8_us"),
    *("over_humming", "bf16_x_over_humming", "humming"),
)
"""Columns of what is kept of the last run that had Humming."""
Shape = tuple[int, int]
Clock = Callable[[], dict[str, float]]
"""Microseconds of each contender's call, timed together."""
WINDOW_MS, LEAST_ROUNDS = 15.0, 5
"""Of the turns of one cell that count."""


def shapes() -> list[Shape]:
    """(N, K) of the catalogue's dense layers on 1, 2, 4 and 8 GPUs, each once."""
    dense = (pair for m in MODELS.values() for gpus in (1, 2, 4, 8) for pair in m.linears(gpus))
    return sorted({(N, K) for N, K in dense if K % 32 == 0})


def drawn(every: list[Shape], share: int, seed: int) -> list[Shape]:
    """One in ``share`` of the shapes, in an order that favours none, as a run may end early.

    A smaller share is the beginning of a larger one, so that what was measured of it counts.
    """
    draw, found = random.Random(seed), dict[Shape, None]()
    while len(found) < -(-len(every) // share):
        found[draw.choice(every)] = None
    return list(found)


def rows_of(N: int, K: int) -> list[int]:
    """The grid and what is drawn for this shape, always alike."""
    others = sorted(set(range(1, GRID[-1])) - set(GRID))
    # As many small ones as large ones: exponents are drawn, and the nearest that is left is taken.
    draw, more = random.Random(f"{N}x{K}"), set[int]()
    while len(more) < DRAWN:
        wanted = round(2 ** draw.uniform(0, 15))
        more.add(min(others, key=lambda M: abs(M - wanted)))
    return sorted({*GRID, *more})


def bar(M: int) -> float:
    """The least that bf16's time over ours shall be."""
    return 1.0 if M <= 160 else 0.95


def measured(clock: Clock, M: int) -> dict[str, float]:
    """Each contender's time; those of a cell that just misses are medians of four."""
    times = clock()
    if bar(M) * (1 - NEAR) <= times["bf16_us"] / times["ours_us"] < bar(M):
        again = [clock() for _ in range(3)]
        times = {name: median([us, *(each[name] for each in again)]) for name, us in times.items()}
        times["rounds"] = 4
    return times


def multiply_fp8(
    xq: torch.Tensor, xs: torch.Tensor, wq: torch.Tensor, ws: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """torch's product of what ``quantize_rows`` gives."""
    found: torch.Tensor = torch._scaled_mm(
        xq, wq.t(), xs[:, None], ws[None], out_dtype=out.dtype, use_fast_accum=True, out=out
    )
    return found


class Weights:
    """A shape's weights, as often as they must be to stay cold, for each contender."""

    def __init__(self, N: int, K: int, device: torch.device, with_peers: bool = True) -> None:
        self.N, self.K, self.device = N, K, device
        few = copies_to_stay_cold(2 * N * K)
        self.mx: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.dense: list[torch.Tensor] = []
        self.fp8: list[tuple[torch.Tensor, torch.Tensor]] = []
        for i in range(copies_to_stay_cold(N * K)):
            values, quantised = normal_mx(N, K, device=device, deviation=K**-0.5)
            self.mx.append(quantised)
            if i < few:
                self.dense.append(values)
            if with_peers:
                self.fp8.append(quantize_rows(values))
        self.humming: dict[str, list[Callable[[torch.Tensor], torch.Tensor]]] = {}
        for name, dtype in (("humming_us", None), ("humming_fp8_us", "float8e4m3")):
            if HUMMING is None or not with_peers:
                continue
            try:
                self.humming[name] = [humming(N, K, *w, dtype) for w in self.mx]
            except REFUSALS as error:
                print(f"{name} is left out at {N}x{K}: {error!r}", flush=True)

    def calls(self, M: int) -> dict[str, list[Callable[[], object]]]:
        """What each contender captures with so many rows."""
        x, q = normal_mx(M, self.K, device=self.device)
        out = torch.empty(M, self.N, device=self.device, dtype=torch.bfloat16)
        # What a call writes keeps weights cold too.
        few, dense = (
            copies_to_stay_cold(self.N * (element * self.K + 2 * M)) for element in (1, 2)
        )
        found: dict[str, list[Callable[[], object]]] = {
            "ours_us": [partial(aiter_mx.linear, *q, *w, out=out) for w in self.mx[:few]],
            "ours_bf16_x_us": [
                partial(aiter_mx.linear, x, None, *w, out=out) for w in self.mx[:few]
            ],
            "bf16_us": [partial(torch.mm, x, w.t(), out=out) for w in self.dense[:dense]],
        }
        if self.fp8:
            xq, xs = quantize_rows(x)
            found["fp8_us"] = [partial(multiply_fp8, xq, xs, *w, out) for w in self.fp8[:few]]
        for name, layers in self.humming.items():
            first = partial(layers[0], x)
            if why_not := refusal(first, partial(torch.mm, x, self.dense[0].t())):
                print(f"{name} is left out at {M}x{self.N}x{self.K}: {why_not}", flush=True)
            else:
                found[name] = [partial(layer, x) for layer in layers[:few]]
        return found


try:
    from humming.layer import HummingLayer as HUMMING  # type: ignore[import-not-found]
except ImportError as error:
    HUMMING, WITHOUT_HUMMING = None, f"pip install humming-kernels==0.1.19: {error}"


REFUSALS = (RuntimeError, ValueError, AssertionError)
"""What Humming raises where it does not take a product."""


def refusal(product: Callable[[], torch.Tensor], in_bf16: Callable[[], torch.Tensor]) -> str | None:
    """Why a peer's product is not timed: what it raises, or that it is another one than bf16's."""
    try:
        found, expected = product().float(), in_bf16().float()
    except REFUSALS as error:
        return repr(error)
    off = float((found - expected).norm() / expected.norm())
    return None if off < 0.1 else f"its result is off by {off:.2f}"


def humming(
    N: int, K: int, wq: torch.Tensor, ws: torch.Tensor, x_dtype: str | None, E: int | None = None
) -> Callable[..., torch.Tensor]:
    """Humming's product by a weight or, given their number, by experts' weights."""
    layer = HUMMING(
        shape_n=N,
        shape_k=K,
        num_experts=E,
        weight_config={"quant_method": "modelopt", "quant_algo": "mxfp8"},
        input_config={"dtype": x_dtype} if x_dtype else None,
        torch_dtype=torch.bfloat16,
    ).cuda()
    layer.load_from_tensors({"weight": wq, "weight_scale": ws})
    layer.transform()
    found: Callable[..., torch.Tensor] = layer
    return found


def row_of(target: Target, problem: LinearProblem, times: Mapping[str, float]) -> dict[str, object]:
    """A cell: what ran, its times, what peers take in its place, and its workspace."""
    chosen = route("linear", target, problem)
    row: dict[str, object] = {"M": problem.M, "N": problem.N, "K": problem.K}
    row |= {"kernel": chosen.kernel, "config": "x".join(map(str, chosen.config.values()))}
    kernel = find_kernel("linear", target.arch, chosen.backend, chosen.kernel)
    row |= {"workspace_mb": kernel.workspace_bytes(target, problem, chosen.config) / 1e6}
    row |= {"rounds": 1, **times}
    row |= {"over_bf16": times["bf16_us"] / times["ours_us"]}
    row |= {"bf16_x_over_bf16": times["bf16_us"] / times["ours_bf16_x_us"]}
    if "fp8_us" in times:
        row |= {"over_fp8": times["fp8_us"] / times["ours_us"]}
    if theirs := [times[name] for name in ("humming_us", "humming_fp8_us") if name in times]:
        row |= {"over_humming": min(theirs) / times["ours_us"]}
        row |= {"bf16_x_over_humming": min(theirs) / times["ours_bf16_x_us"]}
        row |= {"humming": version("humming-kernels")}
    return row


def keep(saved: Saved, beside_humming: Saved, row: Mapping[str, object]) -> None:
    """Save a cell, and what it says of Humming where a later run without it replaces nothing."""
    saved.report(row)
    if "over_humming" in row:
        beside_humming.add({name: row.get(name) for name in BESIDE_HUMMING})


def cells(
    of: Iterable[tuple[Shape, Sequence[int]]], saved: Saved
) -> Iterator[tuple[Shape, list[int]]]:
    """The shapes and numbers of rows that are not done."""
    for (N, K), rows in of:
        if left := [M for M in rows if not saved.has(M, N, K)]:
            yield (N, K), left


def cells_of(of: tuple[Shape, list[int]]) -> Iterator[dict[str, object]]:
    """A shape's cells, one after the other."""
    (N, K), rows = of
    target = target_of(DEVICE)
    for x_dtype in ("e4m3", "bf16"):
        aiter_mx.warmup("linear", device=DEVICE, M=rows, N=N, K=K, x_dtype=x_dtype)
    weights = Weights(N, K, DEVICE)
    for M in rows:
        graphs = {name: GraphedCalls(calls) for name, calls in weights.calls(M).items()}
        times = measured(partial(alternated_us, graphs, WINDOW_MS, LEAST_ROUNDS), M)
        yield row_of(target, LinearProblem(M, N, K), times)
        graphs.clear()  # or what they hold stays reserved, and large cells find no memory
        torch.cuda.empty_cache()


def main(arguments: argparse.Namespace) -> None:
    """Measure what is not done yet."""
    saved, beside_humming = (
        saved_on_gpu(name, CELL) for name in ("linear_every_m", "linear_humming")
    )
    if HUMMING is None:
        print(f"Humming is left out; tried: {WITHOUT_HUMMING}")
    chosen = shapes() if arguments.share == 1 else drawn(shapes(), arguments.share, arguments.seed)
    wanted = [(shape, rows_of(*shape)) for shape in chosen]
    save = partial(keep, saved, beside_humming)
    spread(cells_of, cells(wanted, saved), save, arguments.seconds)
