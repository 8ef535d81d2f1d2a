"""Whole expert layers of models at 1 to 32,768 tokens, beside bf16.

    python -m op_tests.bench.moe --layers [NAME ...] [--M 1024 8192] [--routing skewed]

Contenders' replays take turns: ours, a layer in bf16 as ``op_tests.bench.bf16_layer`` has it, whose
rows are sorted ahead, its two grouped GEMMs alone, and Humming's two alone, with bf16 and with fp8
activations, where it is installed and takes the layer. ``launches_us`` is the sum of our
launches, each timed by itself, and ``difference`` how far our result is from bf16's, relative to
it. Calls route their tokens to other experts than the ones before, and weights are cold. Each cell
is saved as it is measured: a run that ends early goes on where it ended, and what was measured at
another commit is measured again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from types import MappingProxyType

import torch

import aiter_mx
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels.fused_moe import FusedMoeProblem
from aiter_mx.launch import call
from aiter_mx.ops.fused_moe_call import arguments_of, tensors_between
from aiter_mx.plan import bind
from aiter_mx.target import target_of
from aiter_mx.timing import GraphedCalls
from aiter_mx.workloads.models import model_of
from op_tests.bench import every_m
from op_tests.bench.common import DEVICE, Saved, alternated_us, graph_us, saved_on_gpu
from op_tests.bench.gpus import spread
from op_tests.bench.layers import MOST_CALLS, Layer, is_few, make_layer, route_tokens

ROWS = (1, 8, 64, 256, 1024, 2048, 4096, 8192, 32768)
CELL = ("M", "layer", "routing")
WINDOW_MS = 60.0
"""Of the replays of one cell that count."""
Calls = list[Callable[[], object]]


@dataclass(frozen=True)
class Sizes:
    """Of a layer on one GPU: ``E`` experts are here, of ``num_experts`` that tokens go to."""

    E: int
    num_experts: int
    top_k: int
    H: int
    intermediate: int


def of_model(name: str, gpus: int = 1, here: int | None = None, ids: int | None = None) -> Sizes:
    """A model's layer, whose experts several GPUs share, or of which so many experts are here."""
    model = model_of(name)
    assert model.experts is not None
    E = here or model.experts.count
    width = model.experts.intermediate // gpus
    return Sizes(E, ids or E, model.experts.top_k, model.hidden, width)


LAYERS = {
    "wide-6144, TP 4": of_model("wide-6144", gpus=4),
    "deepseek-v3, 32 of 32": of_model("deepseek-v3", here=32),
    "deepseek-v3, 32 of 256": of_model("deepseek-v3", here=32, ids=256),
    "qwen3-30b-a3b": of_model("qwen3-30b-a3b"),
    "gpt-oss-120b": of_model("gpt-oss-120b"),
    "mixtral-8x7b": of_model("mixtral-8x7b"),
}


@dataclass(frozen=True)
class Cell:
    """What a layer is given at one number of tokens, a routing for each call."""

    sizes: Sizes
    layer: Layer
    x: torch.Tensor
    weights: torch.Tensor
    experts: list[torch.Tensor]
    expert_map: torch.Tensor | None

    @property
    def problem(self) -> FusedMoeProblem:
        return problem_of(self.sizes, len(self.x))


def problem_of(sizes: Sizes, M: int) -> FusedMoeProblem:
    """The layer as dispatch sees it."""
    has_map = int(sizes.num_experts != sizes.E)
    shape = M, sizes.H, sizes.intermediate, sizes.E, sizes.top_k
    return FusedMoeProblem(*shape, sizes.num_experts, has_map=has_map)


def make_cell(sizes: Sizes, layer: Layer, M: int, routing: str) -> Cell:
    """A cell with tokens, routing weights and experts drawn."""
    device = layer.w1[0].device
    local = max(1, M * sizes.top_k * sizes.E // sizes.num_experts)
    calls = max(3, min(MOST_CALLS, 2 * sizes.E // local))
    experts = route_tokens(sizes.num_experts, sizes.top_k, M, routing, calls)
    expert_map = None
    if sizes.num_experts != sizes.E:
        expert_map = torch.full((sizes.num_experts,), -1, dtype=torch.int32)
        here = torch.randperm(sizes.num_experts)[: sizes.E].sort().values
        expert_map[here] = torch.arange(sizes.E, dtype=torch.int32)
        expert_map = expert_map.to(device)
    x = torch.randn(M, sizes.H, device=device).bfloat16()
    weights = torch.rand(M, sizes.top_k, device=device)
    return Cell(sizes, layer, x, weights, experts, expert_map)


Humming = Mapping[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]]
"""By name of its time: its product by both weights of a layer."""
CONTIGUOUS = {"gemm_type": "grouped_contiguous"}


def humming_of(layer: Layer) -> Humming:
    """What Humming makes of a layer, with bf16 and with fp8 activations."""
    found: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {}
    for name, x_dtype in (("humming_us", None), ("humming_fp8_us", "float8e4m3")):
        if every_m.HUMMING is not None:
            try:
                first, second = (
                    every_m.humming(*w[0].shape[1:], *w, x_dtype, layer.E)
                    for w in (layer.w1, layer.w2)
                )
                found[name] = first, second
            except every_m.REFUSALS as error:
                print(f"{name} is left out: {error!r}", flush=True)
    return found


def humming_calls(
    cell: Cell, humming: Humming, operands: Sequence[torch.Tensor], ends: Sequence[torch.Tensor]
) -> dict[str, Calls]:
    """Humming's two products of each routing, over rows that are sorted ahead."""

    def both(
        first: Callable[..., torch.Tensor],
        second: Callable[..., torch.Tensor],
        n: int,
        layout: torch.Tensor,
    ) -> None:
        for product, x in ((first, operands[0]), (second, operands[1])):
            product(x[:n], expert_layout=layout, compute_config=CONTIGUOUS)

    layouts = [torch.cat([each.new_zeros(1), each]).long() for each in ends]
    counts = [int(each[-1]) for each in ends]
    found: dict[str, Calls] = {}
    for name, products in humming.items() if all(counts) else ():
        for product, x, w in zip(products, operands, cell.layer.dense, strict=True):
            rows = x[: counts[0]]
            call = partial(product, rows, expert_layout=layouts[0], compute_config=CONTIGUOUS)
            why_not = every_m.refusal(call, partial(torch._grouped_mm, rows, w, offs=ends[0]))
            if why_not:
                print(f"{name} is left out at {len(cell.x)} tokens: {why_not}", flush=True)
                break
        else:
            found[name] = [
                partial(both, *products, n, layout)
                for n, layout in zip(counts, layouts, strict=True)
            ]
    return found


def whole_layers(
    cell: Cell, humming: Humming = MappingProxyType({})
) -> tuple[dict[str, Calls], list[torch.Tensor]]:
    """The contenders' calls, and where our layer and bf16's write their results."""
    from op_tests.bench import bf16_layer  # Triton, which not every machine has

    ours, bf16, gemms = Calls(), Calls(), Calls()
    outs = [torch.empty_like(cell.x) for _ in range(2)]
    w1, w2 = cell.layer.dense
    for experts in cell.experts:
        given = (cell.x, *cell.layer.w1, *cell.layer.w2, experts, cell.weights)
        ours.append(partial(aiter_mx.fused_moe, *given, expert_map=cell.expert_map, out=outs[0]))
        local = experts if cell.expert_map is None else cell.expert_map[experts.long()]
        routing = bf16_layer.routing_of(local, cell.sizes.E)
        bf16.append(partial(bf16_layer.layer, cell.x, w1, w2, routing, cell.weights, outs[1]))
        rows = len(routing.tokens)
        gemms.append(partial(bf16_layer.gemms, rows, w1, w2, routing.ends))
    most = max(each.args[0] for each in gemms)
    operands = [
        torch.randn(most, width, device=cell.x.device, dtype=torch.bfloat16)
        for width in (cell.sizes.H, cell.sizes.intermediate)
    ]
    alone: Calls = [
        partial(each.func, *(of[: each.args[0]] for of in operands), *each.args[1:])
        for each in gemms
    ]
    found = {"ours_us": ours, "bf16_us": bf16, "gemms_us": alone}
    found |= humming_calls(cell, humming, operands, [each.args[-1] for each in gemms])
    return found, outs


def launches(cell: Cell) -> dict[str, Calls]:
    """Our launches of the layer, each with what the ones ahead of it leave for every routing."""
    device, problem = cell.x.device, cell.problem
    parts = problem.parts(target_of(device).arch)
    names = arguments_of(parts)
    given = dict(zip(("w1q", "w1s", "w2q", "w2s"), (*cell.layer.w1, *cell.layer.w2), strict=True))
    given |= {"x": cell.x, "topk_weights": cell.weights, "out": torch.empty_like(cell.x)}
    if cell.expert_map is not None:
        given["expert_map"] = cell.expert_map
    between = tensors_between(problem, parts)
    of_routing = {*names[0]} | {"places"}  # lists, of each routing; what is large is shared
    shared = {
        name: torch.empty(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in between.items()
        if name not in of_routing or name in ("xq", "xs")
    }
    found: dict[str, Calls] = {op + str(place): [] for place, (op, _) in enumerate(parts)}
    runs = [bind(op, target_of(device), part, device) for op, part in parts]
    for experts in cell.experts:
        lists = {
            name: torch.empty(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in between.items()
            if name not in shared
        }
        tensors = {**given, **shared, **lists, "topk_ids": experts}
        for calls, run, of_launch in zip(found.values(), runs, names, strict=True):
            calls.append(partial(call, run, *(tensors.get(name) for name in of_launch)))
            calls[-1]()
    return found


def measured(cell: Cell, humming: Humming = MappingProxyType({})) -> dict[str, float]:
    """Times of the contenders and of our launches, and how far the results are apart."""
    calls, (ours, bf16) = whole_layers(cell, humming)
    for each in calls.values():
        each[0]()
    difference = float((ours.float() - bf16.float()).norm() / bf16.float().norm())
    graphs = {name: GraphedCalls(each) for name, each in calls.items()}
    times = alternated_us(graphs, WINDOW_MS)
    del graphs, calls
    torch.cuda.empty_cache()
    times["launches_us"] = sum(graph_us(each) for each in launches(cell).values())
    return times | {"difference": difference}


def row_of(name: str, cell: Cell, routing: str, found: Mapping[str, float]) -> dict[str, object]:
    """A cell as it is saved."""
    sizes, target, M = cell.sizes, target_of(cell.x.device), len(cell.x)
    row: dict[str, object] = {"layer": name, "routing": routing, "M": M, **vars(sizes)}
    local = [
        each if cell.expert_map is None else cell.expert_map[each.long()] for each in cell.experts
    ]
    counts = [each[each >= 0].bincount(minlength=sizes.E) for each in local]
    row["rows"] = sum(int(each.sum()) for each in counts) / len(counts)
    row["most_rows"] = max(int(each.max()) for each in counts)
    chosen = [
        route(op, target, part) for op, part in cell.problem.parts(target.arch) if op == "moe_gemm"
    ]
    row["kernels"] = " ".join("/".join([c.kernel, *map(str, c.config.values())]) for c in chosen)
    row |= found
    row["over_bf16"] = found["bf16_us"] / found["ours_us"]
    row["over_gemms"] = found["gemms_us"] / found["ours_us"]
    if theirs := [us for contender, us in found.items() if contender.startswith("humming")]:
        row |= {
            "over_humming": min(theirs) / found["ours_us"],
            "humming": version("humming-kernels"),
        }
    row["over_launches"] = found["ours_us"] / found["launches_us"]
    return row


def cells(
    layers: Sequence[str], routings: Sequence[str], rows: Sequence[int], saved: Saved
) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Of each layer, the routings and numbers of tokens that are not done.

    Where tokens are so few that each has experts of its own, all routings are one.
    """
    for name in layers:
        few = partial(is_few, LAYERS[name].num_experts, LAYERS[name].top_k)
        left = [
            (routing, M)
            for M in rows
            for routing in (routings[:1] if few(M) else routings)
            if not saved.has(M, name, routing)
        ]
        if left:
            yield name, left


def cells_of(of: tuple[str, list[tuple[str, int]]]) -> Iterator[dict[str, object]]:
    """A layer's cells, one after the other."""
    name, left = of
    torch.manual_seed(0)
    sizes = LAYERS[name]
    layer = make_layer(sizes.E, sizes.top_k, sizes.H, sizes.intermediate)
    shape = {"hidden": sizes.H, "intermediate": sizes.intermediate, "E": sizes.E}
    shape |= {"top_k": sizes.top_k, "num_experts": sizes.num_experts}
    shape |= {"has_map": int(sizes.num_experts != sizes.E)}
    humming, rows = humming_of(layer), [M for _, M in left]
    aiter_mx.warmup("fused_moe", device=DEVICE, M=rows, **shape)
    for routing, M in left:
        cell = make_cell(sizes, layer, M, routing)
        yield row_of(name, cell, routing, measured(cell, humming))
        del cell
        torch.cuda.empty_cache()


def main(arguments: argparse.Namespace) -> None:
    """Measure what is not done yet."""
    saved = saved_on_gpu("moe_layers", CELL)
    names, rows = arguments.layers or list(LAYERS), arguments.M or ROWS
    left = cells(names, arguments.routing, rows, saved)
    spread(cells_of, left, saved.report, arguments.seconds)
