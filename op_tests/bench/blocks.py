"""Both GEMMs of expert layers over lists in blocks of 64, beside blocks as ``fused_moe`` has them.

    python -m op_tests.bench.moe --blocks [NAME ...] [--M 8 64] [--routing skewed]

vLLM and aiter bring lists in blocks of 64 ids whatever the number of tokens. Each cell is one GEMM:
the first one activated, the second one with fp32 results and routing weights. Weights are cold,
routings differ from call to call, and the replays of both take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

import aiter_mx
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.jit.build import build_all
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.plan import build_requests
from aiter_mx.target import Target, target_of
from aiter_mx.timing import GraphedCalls
from op_tests.bench import expert_layers, gpus
from op_tests.bench.common import DEVICE, alternated_us, normal_mx, saved_on_gpu
from op_tests.bench.expert_layers import LAYERS, Cell, Sizes, make_cell
from op_tests.bench.layers import make_layer

ROWS = (1, 8, 64, 256, 1024, 4096)
PARTS = ("first", "second")
BLOCK = 64
CELL = ("M", "layer", "routing", "part")
WINDOW_MS = 20.0


def problem_of(sizes: Sizes, M: int, part: str, block_m: int) -> MoeGemmProblem:
    """A GEMM over lists in blocks of that many ids, as dispatch sees it."""
    if part == "first":
        shape = (M, 2 * sizes.intermediate, sizes.H, sizes.E, sizes.top_k, block_m)
        return MoeGemmProblem(*shape, "mxfp8", activation="silu", a_div=sizes.top_k)
    shape = (M, sizes.H, sizes.intermediate, sizes.E, sizes.top_k, block_m)
    return MoeGemmProblem(*shape, "fp32", weights="by_t")


def build_ahead(sizes: Sizes, rows: Sequence[int], target: Target) -> None:
    """Compile in parallel what the GEMMs take at these numbers of tokens."""
    problems = [
        problem_of(sizes, M, part, block_m)
        for M in rows
        for block_m in (expert_layers.problem_of(sizes, M).block_m, BLOCK)
        for part in PARTS
    ]
    chosen = [route("moe_gemm", target, problem) for problem in problems]
    build_all(build_requests(target, problems, chosen))


def calls_of(cell: Cell, part: str, block_m: int) -> list[Callable[[], object]]:
    """The GEMM over each routing in blocks of that many ids."""
    sizes, M, device = cell.sizes, len(cell.x), cell.x.device
    routed, top_k = M * sizes.top_k, sizes.top_k
    lists = [aiter_mx.moe_align(each, block_m, sizes.E) for each in cell.experts]
    if part == "first":
        x = aiter_mx.quantize(cell.x)
        call = partial(aiter_mx.moe_gemm_activated, *x, *cell.layer.w1)
        return [partial(call, *each, routed, top_k, block_m, a_div=top_k) for each in lists]
    _, x = normal_mx(routed, sizes.intermediate, device=device)
    out = torch.empty(routed, sizes.H, device=device)
    given = {"topk_weights": cell.weights, "out_dtype": torch.float32, "out": out}
    call = partial(aiter_mx.moe_gemm, *x, *cell.layer.w2)
    return [partial(call, *each, routed, top_k, block_m, **given) for each in lists]


def row_of(
    name: str, cell: Cell, routing: str, part: str, times: Mapping[str, float]
) -> dict[str, object]:
    """A cell as it is saved."""
    own, target = cell.problem.block_m, target_of(cell.x.device)
    row: dict[str, object] = {"layer": name, "routing": routing, "part": part, "M": len(cell.x)}
    row["own_block"] = own
    for column, block_m in (("own_kernel", own), ("kernel", BLOCK)):
        row[column] = route(
            "moe_gemm", target, problem_of(cell.sizes, len(cell.x), part, block_m)
        ).kernel
    return {**row, **times, "over_own": times["blocks_us"] / times["own_us"]}


def cells_of(
    is_done: Callable[..., bool],
    routings: Sequence[str],
    rows: Sequence[int],
    name: str,
    device: torch.device = DEVICE,
) -> Iterator[dict[str, object]]:
    """A layer's cells that are not done, one after the other; where its own blocks are of 64 ids
    there is nothing to measure."""
    sizes = LAYERS[name]
    left = {
        (routing, M): [part for part in PARTS if not is_done(M, name, routing, part)]
        for routing in routings
        for M in rows
        if expert_layers.problem_of(sizes, M).block_m != BLOCK
    }
    if not any(left.values()):
        return
    torch.manual_seed(0)
    build_ahead(sizes, rows, target_of(device))
    layer = make_layer(sizes.E, sizes.top_k, sizes.H, sizes.intermediate)
    for (routing, M), parts in left.items():
        cell = make_cell(sizes, layer, M, routing)
        for part in parts:
            blocks = {"own_us": cell.problem.block_m, "blocks_us": BLOCK}
            calls = {column: calls_of(cell, part, block) for column, block in blocks.items()}
            for each in calls.values():
                each[0]()
            graphs = {column: GraphedCalls(each) for column, each in calls.items()}
            yield row_of(name, cell, routing, part, alternated_us(graphs, WINDOW_MS))


def main(arguments: argparse.Namespace) -> None:
    """Measure what is not done yet."""
    saved = saved_on_gpu("moe_blocks", CELL)
    names = arguments.blocks or [name for name, s in LAYERS.items() if s.num_experts == s.E]
    work = partial(cells_of, saved.has, arguments.routing, arguments.M or ROWS)
    gpus.spread(work, names, saved.report, arguments.seconds)
