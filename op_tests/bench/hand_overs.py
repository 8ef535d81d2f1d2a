"""The linear on both sides of every hand-over: numbers of rows at which it launches something else.

    python -m op_tests.bench.linear --hand-overs [--share 10] [--seed 22] [--seconds 200]

Wherever M + 1 takes another kernel, configuration or code object than M, and at ``ALWAYS``, both
are timed in turns, with bf16 cuBLAS at both beside them. ``step`` is the time at M + 1 over that at
M and ``bf16_step`` bf16's; ``over_bar`` is the step over the larger of ``LEAST_BAR`` and bf16's
step with ``ROOM``. Shapes are those of ``--every-m``, and cells are saved and resumed alike.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from multiprocessing import get_context

import torch

import aiter_mx
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.jit.build import BuildRequest
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.plan import functions_of
from aiter_mx.target import Target, target_of
from aiter_mx.timing import GraphedCalls, copies_to_stay_cold
from op_tests.bench.common import DEVICE, alternated_us, normal_mx, saved_on_gpu
from op_tests.bench.every_m import CELL, Shape, Weights, drawn, shapes
from op_tests.bench.gpus import spread

ALWAYS = (64, 128, 192, 256, 384, 512, 1024, 2048)
"""Numbers of rows at which both sides are timed whatever they launch."""
MOST_ROWS = 32768
LEAST_BAR, ROOM = 1.10, 1.05
WINDOW_MS = 40.0
"""Of the replays of one cell that count."""
_PROCESSES = min(16, max(4, (os.cpu_count() or 1) // 4))
"""They find where in seconds a shape, and each takes seconds to begin."""
Launched = tuple[str, tuple[tuple[str, int], ...], tuple[BuildRequest, ...]]
"""A kernel, its configuration and the code objects of its launches."""


def launched(target: Target, problem: LinearProblem) -> Launched:
    """What a linear takes."""
    chosen = route("linear", target, problem)
    functions = functions_of(target, problem, chosen)
    return chosen.kernel, tuple(chosen.config.items()), tuple(f.request for f in functions)


def hand_overs(target: Target, shape: Shape, most: int = MOST_ROWS) -> list[int]:
    """The M below ``most`` whose next one launches something else, and ``ALWAYS``."""
    each = ((M, launched(target, LinearProblem(M, *shape))) for M in range(1, most + 1))
    found = {M for (M, before), (_, then) in pairwise(each) if before != then}
    return sorted(found.union(M for M in ALWAYS if most > M))


def row_of(target: Target, M: int, shape: Shape, times: Mapping[str, float]) -> dict[str, object]:
    """A cell: what is launched on both sides, their times, and the step over its bar."""
    row: dict[str, object] = {"M": M, "N": shape[0], "K": shape[1]}
    for name, rows in (("kernel", M), ("next_kernel", M + 1)):
        kernel, config, _ = launched(target, LinearProblem(rows, *shape))
        row[name] = "/".join([kernel, *(str(value) for _, value in config)])
    step, bf16_step = (times[f"{of}_next_us"] / times[f"{of}_us"] for of in ("ours", "bf16"))
    bar = max(LEAST_BAR, bf16_step * ROOM)
    return row | dict(times) | {"step": step, "bf16_step": bf16_step, "over_bar": step / bar}


def calls_of(weights: Weights, M: int) -> dict[str, list[Callable[[], object]]]:
    """What each contender captures: ours and bf16's, at M and at M + 1 rows."""
    N, K, device = weights.N, weights.K, weights.device
    # What a call writes keeps weights cold too; both sides of a cell rotate alike.
    few, dense = (copies_to_stay_cold(N * (each * K + 2 * M)) for each in (1, 2))
    found: dict[str, list[Callable[[], object]]] = {}
    for end, rows in (("us", M), ("next_us", M + 1)):
        x, q = normal_mx(rows, K, device=device)
        out = torch.empty(rows, N, device=device, dtype=torch.bfloat16)
        found[f"ours_{end}"] = [partial(aiter_mx.linear, *q, *w, out=out) for w in weights.mx[:few]]
        found[f"bf16_{end}"] = [partial(torch.mm, x, w.t(), out=out) for w in weights.dense[:dense]]
    return found


def is_gone(shape: Shape, rows: Sequence[int], row: Mapping[str, object]) -> bool:
    """Whether a saved cell is one of this shape, which hands over elsewhere now."""
    return (row["N"], row["K"]) == shape and row["M"] not in rows


def timed(weights: Weights, M: int) -> dict[str, float]:
    """Microseconds of each, whose replays take turns."""
    graphs = {name: GraphedCalls(calls) for name, calls in calls_of(weights, M).items()}
    return alternated_us(graphs, WINDOW_MS)


def steps_of(of: tuple[Shape, list[int]]) -> Iterator[dict[str, object]]:
    """A shape's cells, one after the other."""
    (N, K), rows = of
    target = target_of(DEVICE)
    both_sides = sorted({*rows, *(M + 1 for M in rows)})
    aiter_mx.warmup("linear", device=DEVICE, M=both_sides, N=N, K=K)
    weights = Weights(N, K, DEVICE, with_peers=False)
    for M in rows:
        yield row_of(target, M, (N, K), timed(weights, M))
        torch.cuda.empty_cache()  # or what graphs held stays reserved


def main(arguments: argparse.Namespace) -> None:
    """Measure what is not done yet; other processes find where, while GPUs are timed."""
    saved = saved_on_gpu("linear_hand_overs", CELL)
    target = target_of(DEVICE)
    chosen = shapes() if arguments.share == 1 else drawn(shapes(), arguments.share, arguments.seed)

    def left(found: Iterable[list[int]]) -> Iterator[tuple[Shape, list[int]]]:
        for shape, rows in zip(chosen, found, strict=True):
            saved.forget(partial(is_gone, shape, rows))
            if of_shape := [M for M in rows if not saved.has(M, *shape)]:
                yield shape, of_shape

    with ProcessPoolExecutor(_PROCESSES, get_context("spawn")) as pool:
        found = pool.map(partial(hand_overs, target), chosen)
        spread(steps_of, left(found), saved.report, arguments.seconds)
        pool.shutdown(cancel_futures=True)
