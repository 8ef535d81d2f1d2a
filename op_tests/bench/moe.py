"""An expert layer at decode: ours, Triton and torch's bf16 grouped GEMM beside reading the weights.

    python -m op_tests.bench.moe [--save] [--M 1 8 64] [--routing uniform skewed]
    python -m op_tests.bench.moe --layers   # op_tests/bench/expert_layers.py: prefill, other models
    python -m op_tests.bench.moe --blocks   # op_tests/bench/blocks.py: lists in blocks of 64
    python -m op_tests.bench.pictures       # the picture of what is saved

All in one run on one GPU, graph replay, medians. Each call routes its tokens to other experts than
the one before, so that weights are cold. A cell is a part of the layer: ``gemm1`` with bf16 out,
``gemm1_activated`` as the layer runs it, ``gemm2`` with fp32 out, and the whole ``layer`` from bf16
to bf16, routing and quantisation included. ``floor_us`` reads the weights of the experts that are
touched, and does nothing else; the layer's is the sum of both GEMMs'. ``triton_us`` of a GEMM is
that of the fastest of Triton's tiles in the fastest size of blocks, which ``triton`` names, and of
the layer that of its four launches with these; ``bf16_us`` is that of its two GEMMs alone. Weights
and tokens are normal values, which bf16 multiplies as they are.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch

import aiter_mx
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.jit.build import build_all
from aiter_mx.kernels.fused_moe import FusedMoeProblem
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.kernels.registry import find_kernel, kernels_of
from aiter_mx.kernels.spec import Config
from aiter_mx.launch import Tensors, build_request
from aiter_mx.ops.fused_moe_call import ARGUMENTS, tensors_between
from aiter_mx.plan import runner
from aiter_mx.target import target_of
from aiter_mx.timing import COLD_BYTES
from op_tests.bench import blocks, expert_layers
from op_tests.bench.common import DEVICE, graph_us, normal_mx, refuse_no_gpu, report
from op_tests.bench.layers import MOST_CALLS, ROUTINGS, Layer, make_layer, route_tokens
from op_tests.bench.linear import reader
from op_tests.mx_reference import dequantize64

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PARTS = ("gemm1", "gemm1_activated", "gemm2", "layer")
Tile = tuple[int, tuple[tuple[str, int], ...]]
"""Ids of a block, and Triton's configuration."""
TRITON_BLOCKS = (16, 32, 64)


@dataclass(frozen=True)
class Cell:
    """One part at one number of tokens: what each contender calls, for each routing."""

    part: str
    problem: MoeGemmProblem | None
    ours: list[Callable[[], object]]
    triton: dict[Tile, list[Callable[[], object]]]
    bf16: list[Callable[[], object]]


def gemm_cell(layer: Layer, part: str, M: int, block_m: int, experts: list[torch.Tensor]) -> Cell:
    N, K = layer.shape(part)
    routed, top_k = M * layer.top_k, layer.top_k
    second, activated = part == "gemm2", part == "gemm1_activated"
    _, x = normal_mx(routed if second else M, K, device=DEVICE)
    w = layer.w2 if second else layer.w1
    out_dtype = torch.float32 if second else torch.bfloat16
    weights = torch.rand(M, top_k, device=DEVICE)
    a_div = 1 if second else top_k
    problem = MoeGemmProblem(
        M=M,
        N=N,
        K=K,
        E=layer.E,
        top_k=top_k,
        block_m=block_m,
        out_dtype="mxfp8" if activated else "fp32" if second else "bf16",
        activation="silu" if activated else "none",
        weights="by_t" if second else "none",
        a_div=a_div,
    )
    ours: list[Callable[[], object]] = []
    triton: dict[Tile, list[Callable[[], object]]] = {}
    bf16: list[Callable[[], object]] = []
    out = torch.empty(routed, N, dtype=out_dtype, device=DEVICE)
    for chosen in experts:
        lists = aiter_mx.moe_align(chosen, block_m, layer.E)
        if activated:
            call = partial(
                aiter_mx.moe_gemm_activated, *x, *w, *lists, routed, top_k, block_m, a_div=a_div
            )
        else:
            call = partial(
                aiter_mx.moe_gemm,
                *(*x, *w, *lists, routed, top_k, block_m),
                a_div=a_div,
                topk_weights=weights if second else None,
                out_dtype=out_dtype,
                out=out,
            )
        ours.append(call)
        results = (out, None)
        if activated:
            payload = torch.empty(routed, N // 2, dtype=torch.float8_e4m3fn, device=DEVICE)
            results = (payload, torch.empty(routed, N // 64, dtype=torch.uint8, device=DEVICE))
        behind = (weights if second else None, None, *results)
        for tile, of_tile in tiles_of(problem).items():
            in_blocks = aiter_mx.moe_align(chosen, tile[0], layer.E)
            call = partial(of_tile, (*x, *w, *in_blocks, *behind))
            triton.setdefault(tile, []).append(call)
        rows = torch.bincount(chosen.flatten(), minlength=layer.E)
        ends = rows.cumsum(0).int()
        dense_x = torch.randn(routed, K, device=DEVICE, dtype=torch.bfloat16)
        dense_w = layer.dense[1] if second else layer.dense[0]
        bf16.append(partial(torch._grouped_mm, dense_x, dense_w, offs=ends))
    return Cell(part, problem, ours, triton, bf16)


def tiles_of(problem: MoeGemmProblem) -> dict[Tile, Callable[..., object]]:
    """What runs Triton over a GEMM's tensors, in each size of blocks and with each of its tiles."""
    target, found = target_of(DEVICE), {}
    spec = next((k for k in kernels_of("moe_gemm") if k.backend == "triton"), None)
    for block_m in TRITON_BLOCKS if spec else ():
        in_blocks = replace(problem, block_m=block_m)
        if spec.refusal(target, in_blocks) is None:
            for config in spec.candidates(target, in_blocks):
                run = partial(_run_triton, runner(spec), in_blocks, config)
                found[block_m, tuple(config.items())] = run
    return found


def _run_triton(
    run: Callable[..., object], problem: MoeGemmProblem, config: Config, tensors: Tensors
) -> None:
    run(problem, tensors, config)


Fastest = dict[int, tuple[float, Tile]]
"""By size of blocks: microseconds, and the tile that takes them."""


def fastest(tiles: dict[Tile, list[Callable[[], object]]]) -> Fastest:
    """The fastest tile in each size of blocks."""
    found: Fastest = {}
    for tile, calls in tiles.items():
        timed = graph_us(calls), tile
        found[tile[0]] = min(found.get(tile[0], timed), timed)
    return found


def layer_cell(
    layer: Layer, M: int, experts: list[torch.Tensor], gemms: list[Cell], by_triton: list[Fastest]
) -> Cell:
    """The layer; Triton's with what is the fastest for its first and its second GEMM."""
    x = torch.randn(M, layer.H, device=DEVICE, dtype=torch.bfloat16)
    weights = torch.rand(M, layer.top_k, device=DEVICE)
    out = torch.empty_like(x)
    ours: list[Callable[[], object]] = [
        partial(aiter_mx.fused_moe, x, *layer.w1, *layer.w2, chosen, weights, out=out)
        for chosen in experts
    ]

    def both(first: Callable[[], object], second: Callable[[], object]) -> None:
        first()
        second()

    pairs = zip(gemms[0].bf16, gemms[2].bf16, strict=True)
    bf16: list[Callable[[], object]] = [partial(both, *pair) for pair in pairs]
    first, second = by_triton
    triton = {
        (block_m, ()): layer_by_triton(
            layer, x, weights, experts, block_m, (first[block_m][1], second[block_m][1])
        )
        for block_m in first.keys() & second.keys()
    }
    return Cell("layer", None, ours, triton, bf16)


def layer_by_triton(
    layer: Layer,
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: list[torch.Tensor],
    block_m: int,
    of_gemms: tuple[Tile, Tile],
) -> list[Callable[[], object]]:
    """The layer's four launches by Triton, its GEMMs with these tiles."""
    M, target, tiles = len(x), target_of(DEVICE), iter(of_gemms)
    shape = M, layer.H, layer.intermediate, layer.E, layer.top_k
    problem = FusedMoeProblem(*shape, block_m=block_m)
    runs = []
    for op, part in problem.parts():
        spec = next(kernel for kernel in kernels_of(op) if kernel.backend == "triton")
        config = dict(next(tiles)[1]) if op == "moe_gemm" else spec.configure(target, part)
        runs.append(partial(runner(spec), part, config=config))
    given = {
        name: torch.empty(shape, dtype=dtype, device=DEVICE)
        for name, (shape, dtype) in tensors_between(problem, problem.parts()).items()
    }
    given |= {"x": x, "topk_weights": weights, "out": torch.empty_like(x)}
    given |= dict(zip(("w1q", "w1s", "w2q", "w2s"), (*layer.w1, *layer.w2), strict=True))

    def call(chosen: torch.Tensor) -> None:
        tensors = {**given, "topk_ids": chosen}
        for run, names in zip(runs, ARGUMENTS, strict=True):
            run([tensors.get(name) for name in names])  # no expert map, no biases

    return [partial(call, chosen) for chosen in experts]


def error_of(layer: Layer, cell: Cell, chosen: torch.Tensor) -> float | None:
    """Relative error (Frobenius norm) of a plain GEMM's first call, as it is timed, against
    float64, over the rows of a few experts; None for other parts, which the tests check."""
    if cell.part not in ("gemm1", "gemm2"):
        return None
    call = cell.ours[0]
    assert isinstance(call, partial) and cell.problem is not None
    keywords = {**call.keywords, "out": None}
    out = aiter_mx.moe_gemm(*call.args, **keywords).double()
    xq, xs, wq, ws = call.args[:4]
    x = dequantize64(xq, xs)
    flat, reference = chosen.flatten(), torch.zeros_like(out)
    for expert in flat.unique()[:8].tolist():
        rows = (flat == expert).nonzero().flatten()
        w = dequantize64(wq[expert], ws[expert])
        reference[rows] = x[rows // cell.problem.a_div] @ w.T
    if call.keywords["topk_weights"] is not None:
        reference *= call.keywords["topk_weights"].double().flatten()[:, None]
    out[reference.abs().amax(1) == 0] = 0  # rows of other experts
    return float((out - reference).norm() / reference.norm())


def floor_of(
    read_us: Callable[[list[torch.Tensor]], float], wq: torch.Tensor, touched: float
) -> tuple[float, float]:
    """Time of reading that many experts' weights and scales, and their bytes."""
    size = round(touched * wq[0].numel() * 33 / 32) // 16 * 16
    flat = wq.view(torch.uint8).flatten()
    if size > flat.numel():
        return read_us([flat, flat]) * size / flat.numel(), size
    starts = [i * size % (flat.numel() - size + 1) // 16 * 16 for i in range(MOST_CALLS)]
    copies = max(2, min(MOST_CALLS, -(-COLD_BYTES // size)))
    return read_us([flat[start:][:size] for start in starts[:copies]]), size


def bench(layer: Layer, M: int, routing: str, read_us: Callable[..., float]) -> list[dict]:
    calls = max(3, min(MOST_CALLS, 2 * layer.E // (M * layer.top_k)))
    experts = route_tokens(layer.E, layer.top_k, M, routing, calls)
    touched = sum(chosen.unique().numel() for chosen in experts) / calls
    most = max(int(chosen.flatten().bincount().max()) for chosen in experts)
    block_m = FusedMoeProblem(M, layer.H, layer.intermediate, layer.E, layer.top_k).block_m
    floors = [floor_of(read_us, wq, touched) for wq in (layer.w1[0], layer.w2[0])]
    gemms = [gemm_cell(layer, part, M, block_m, experts) for part in PARTS[:3]]
    rows, by_triton = [], {cell.part: fastest(cell.triton) for cell in gemms}
    of_layer = [by_triton["gemm1_activated"], by_triton["gemm2"]]
    whole = layer_cell(layer, M, experts, gemms, of_layer)
    by_triton["layer"] = fastest(whole.triton)
    for cell in [*gemms, whole]:
        second = cell.part == "gemm2"
        floor_us, size = floors[second]
        if cell.part == "layer":
            floor_us, size = floors[0][0] + floors[1][0], floors[0][1] + floors[1][1]
        ours_us = graph_us(cell.ours)
        row: dict[str, object] = {"part": cell.part, "routing": routing, "M": M}
        row |= {"E": layer.E, "top_k": layer.top_k, "block_m": block_m}
        row |= dict(zip(("N", "K"), layer.shape(cell.part), strict=True))
        row |= {"touched": touched, "most_rows": most, "kernel": "", "ours_us": ours_us}
        if cell.problem is not None:
            chosen = route("moe_gemm", target_of(DEVICE), cell.problem)
            row["kernel"] = "/".join([chosen.kernel, *map(str, chosen.config.values())])
        triton_us, tile = min(by_triton[cell.part].values(), default=(None, None))
        row["triton_us"] = triton_us
        row["triton"] = tile and "x".join(map(str, (tile[0], *dict(tile[1]).values())))
        row["bf16_us"] = graph_us(cell.bf16)
        row |= {"floor_us": floor_us, "ours_over_floor": ours_us / floor_us}
        row |= {"tb_per_s": size / ours_us / 1e6, "rel_err": error_of(layer, cell, experts[0])}
        rows.append(row)
        shown = {name: row[name] for name in ("part", "routing", "M", "kernel", "touched")}
        times = [row["ours_us"], row["floor_us"], row["triton_us"], row["bf16_us"]]
        print(*shown.values(), times, f"{ours_us / floor_us:.3f}", row["rel_err"], flush=True)
    return rows


def build_ahead(layer: Layer, rows: Sequence[int]) -> None:
    """Compile in parallel what the layer takes at these numbers of tokens."""
    target, requests = target_of(DEVICE), []
    for M in rows:
        whole = FusedMoeProblem(M, layer.H, layer.intermediate, layer.E, layer.top_k)
        parts = dict.fromkeys(whole.parts())
        for part in PARTS[:3]:
            N, K = layer.shape(part)
            second, activated = part == "gemm2", part == "gemm1_activated"
            dtype = "mxfp8" if activated else "fp32" if second else "bf16"
            activation = "silu" if activated else "none"
            block_m = whole.block_m
            problem = MoeGemmProblem(
                M, N, K, layer.E, layer.top_k, block_m, dtype, activation=activation
            )
            parts["moe_gemm", problem] = None
        for op, problem in parts:
            chosen = route(op, target, problem)
            if chosen.backend == "hip":
                spec = find_kernel(op, target.arch, chosen.backend, chosen.kernel)
                if spec.module is not None:
                    requests.append(build_request(spec, target, problem, chosen.config))
    build_all(list(dict.fromkeys(requests)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write docs/measured/<gpu>/moe.csv")
    parser.add_argument("--layers", nargs="*", help="see op_tests/bench/expert_layers.py")
    parser.add_argument("--blocks", nargs="*", help="see op_tests/bench/blocks.py")
    parser.add_argument("--M", type=int, nargs="+")
    parser.add_argument("--routing", nargs="+", choices=ROUTINGS, default=ROUTINGS)
    parser.add_argument("--seconds", type=float, default=600, help="begin no cell after these")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=6144)
    parser.add_argument("--intermediate", type=int, default=768)
    arguments = parser.parse_args()
    if arguments.layers is not None:
        expert_layers.main(arguments)
        return
    if arguments.blocks is not None:
        blocks.main(arguments)
        return
    refuse_no_gpu()
    torch.manual_seed(0)
    tokens = arguments.M or ROWS
    layer = make_layer(arguments.experts, arguments.top_k, arguments.hidden, arguments.intermediate)
    read_us = reader(target_of(DEVICE))
    rows: list[dict] = []
    build_ahead(layer, tokens)
    began = time.monotonic()
    for routing, M in product(arguments.routing, tokens):
        if time.monotonic() - began < arguments.seconds:
            rows += bench(layer, M, routing, read_us)
        else:
            print(f"no time left for {routing} M={M}")
    report("An expert layer, cold weights", rows, "moe" if arguments.save else None)


if __name__ == "__main__":
    main()
