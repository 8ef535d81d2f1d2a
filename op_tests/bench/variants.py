"""The linear with other dtypes, with a bias and without a table, beside its usual call.

    python -m op_tests.bench.linear --variants [--seconds 60]

The usual call has x in e4m3, bf16 results and no bias. The replays of all take turns, weights are
cold, and cells are saved and resumed as those of ``--every-m``. ``no_table_us`` is what is taken
where no table has a row, ``other_cus_us`` what a table for this GPU with ``OTHER_CUS`` fewer SMs
would leave, and both are empty where that is what the usual call takes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch

import aiter_mx
from aiter_mx.dispatch.dispatcher import _from_envelope, route
from aiter_mx.dispatch.route import Route
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.launch import call
from aiter_mx.plan import bind_route
from aiter_mx.target import Target, target_of
from aiter_mx.timing import GraphedCalls, copies_to_stay_cold
from op_tests.bench.common import DEVICE, alternated_us, normal_mx, saved_on_gpu
from op_tests.bench.every_m import CELL, Shape, Weights, cells
from op_tests.bench.gpus import spread

SHAPES = (
    *((2304, 6144), (6144, 2048), (9216, 6144), (768, 3584), (4096, 4096), (2560, 2048)),
    *((28672, 4096), (5120, 2880), (2304, 2368), (1536, 7392)),
)
"""(N, K); the K of the last three are no multiples of 128."""
ROWS = (1, 8, 64, 65, 128, 512, 2048)
OTHER_CUS = 12
WINDOW_MS = 40.0
RATIOS = (
    *((name, "usual") for name in ("fp16", "bias", "fp32", "no_table", "other_cus")),
    ("fp16_x", "bf16_x"),
    *(("cublas", name) for name in ("usual", "no_table", "other_cus")),
)
"""Which times are divided by which."""
OF_DTYPES: Mapping[str, Mapping[str, str]] = {
    "usual": {},
    "fp16": {"out_dtype": "fp16"},
    "bias": {"bias": "bf16"},
    "fp32": {"out_dtype": "fp32"},
    "bf16_x": {"x_dtype": "bf16"},
    "fp16_x": {"x_dtype": "fp16", "out_dtype": "fp16"},
}
"""Fields of the problem of each that a call asks for."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def untabled(target: Target, problem: LinearProblem) -> dict[str, tuple[Target, Route]]:
    """What is taken without a row, by a GPU's number of SMs, where that is something else."""
    usual, found = route("linear", target, problem), {}
    fewer = replace(target, cu_num=target.cu_num - OTHER_CUS)
    for name, of in (("no_table", target), ("other_cus", fewer)):
        chosen = _from_envelope("linear", of, problem, frozenset(), [])
        if (chosen.kernel, chosen.config) != (usual.kernel, usual.config):
            found[name] = (of, chosen)
    return found


def calls_of(
    weights: Weights, M: int, untabled: Mapping[str, tuple[Target, Route]]
) -> dict[str, list[Callable[[], object]]]:
    """What each contender captures."""
    N, K, device = weights.N, weights.K, weights.device
    few, dense = (copies_to_stay_cold(N * (each * K + 2 * M)) for each in (1, 2))
    values, quantised = normal_mx(M, K, device=device)
    given = {"e4m3": quantised, "bf16": (values, None), "fp16": (values.half(), None)}
    bias = torch.randn(N, device=device).bfloat16()
    found: dict[str, list[Callable[[], object]]] = {}
    for name, fields in OF_DTYPES.items():
        x = given[fields.get("x_dtype", "e4m3")]
        dtype = DTYPES[fields.get("out_dtype", "bf16")]
        behind = (bias if "bias" in fields else None, dtype)
        out = torch.empty(M, N, device=device, dtype=dtype)
        found[name] = [partial(aiter_mx.linear, *x, *w, *behind, out) for w in weights.mx[:few]]
    out = torch.empty(M, N, device=device, dtype=torch.bfloat16)
    for name, (of, chosen) in untabled.items():
        run = bind_route(chosen, of, LinearProblem(M, N, K), device)
        found[name] = [partial(call, run, *given["e4m3"], *w, None, out) for w in weights.mx[:few]]
    x = given["bf16"][0]
    found["cublas"] = [partial(torch.mm, x, w.t(), out=out) for w in weights.dense[:dense]]
    return found


def row_of(target: Target, problem: LinearProblem, times: Mapping[str, float]) -> dict[str, object]:
    """A cell: kernels, times, and how often each is what it is compared with."""
    row: dict[str, object] = {"M": problem.M, "N": problem.N, "K": problem.K}
    for name, fields in OF_DTYPES.items():
        row[f"{name}_kernel"] = route("linear", target, replace(problem, **fields)).kernel
    names = dict.fromkeys((*OF_DTYPES, "no_table", "other_cus", "cublas"))
    row |= {f"{name}_us": times.get(name) for name in names}
    for name, of in RATIOS:
        both = name in times and of in times
        row[f"{name}_over_{of}"] = times[name] / times[of] if both else None
    return row


def cells_of(of: tuple[Shape, list[int]]) -> Iterator[dict[str, object]]:
    """A shape's cells, one after the other."""
    (N, K), rows = of
    target = target_of(DEVICE)
    for fields in OF_DTYPES.values():
        aiter_mx.warmup("linear", device=DEVICE, M=rows, N=N, K=K, **fields)
    weights = Weights(N, K, DEVICE, with_peers=False)
    for M in rows:
        problem = LinearProblem(M, N, K)
        calls = calls_of(weights, M, untabled(target, problem))
        times = alternated_us({n: GraphedCalls(each) for n, each in calls.items()}, WINDOW_MS)
        yield row_of(target, problem, times)


def main(arguments: argparse.Namespace) -> None:
    """Measure what is not done yet."""
    saved = saved_on_gpu("linear_variants", CELL)
    left = cells([(shape, ROWS) for shape in SHAPES], saved)
    spread(cells_of, left, saved.report, arguments.seconds)
