"""The demo's story, told on a console."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from rich.console import Console

import aiter_mx
from aiter_mx.cli.fields import DECODE_LINEARS
from aiter_mx.cli.screen import heading, make_progress, make_table, print_fields
from aiter_mx.demo.compare import compare_rankings
from aiter_mx.demo.decode import run_decode
from aiter_mx.demo.model import Embedder, MxLinear, quantize_linears
from aiter_mx.demo.sentences import SENTENCES
from aiter_mx.dispatch.explain import explain
from aiter_mx.target import ARCHS, SIMULATED_GFX950, Target, gpu_target, simulate

LOWEST_SIMILARITY = 0.99
MOST_TOKENS = 16
EXPECTED_BACKEND = "hip"  # our kernels, whichever the table prefers
DTYPE = "fp32"  # of the model's biases and of what its linears give


def run_demo(console: Console, on_simulator: bool = False) -> bool:
    """Run the demo on this machine's GPU, or on the simulated gfx950 without a supported one.

    Args:
        console: what to print on.
        on_simulator: leave a GPU alone.

    Returns:
        Whether everything was as it must be.
    """
    os.environ.pop("AITER_MX_ON_ERROR", None)  # a kernel that fails has to fail the demo
    device, target, context = _place(on_simulator)
    with context:
        heading(console, "Target")
        print_fields(console, {"name": target.name, "arch": target.arch, "runtime": target.runtime})
        passed = _show_model(console, device)
        return _show_decode(console, device) and passed


def _place(
    on_simulator: bool,
) -> tuple[torch.device, Target, AbstractContextManager[object]]:
    if torch.cuda.is_available() and not on_simulator:
        target = gpu_target(torch.cuda.current_device())
        if target.arch in ARCHS:
            return torch.device("cuda"), target, nullcontext()
    return torch.device("cpu"), SIMULATED_GFX950, simulate(SIMULATED_GFX950.arch)


def _show_model(console: Console, device: torch.device) -> bool:
    heading(console, f"all-MiniLM-L6-v2, {len(SENTENCES)} sentences, one a call")
    embedder = Embedder(device)
    counts = embedder.token_counts(SENTENCES)
    if max(counts) > MOST_TOKENS:
        raise ValueError(f"a sentence has {max(counts)} tokens; at most {MOST_TOKENS} are allowed")
    embedder.embed(SENTENCES[0])
    started = time.perf_counter()
    expected = torch.stack([embedder.embed(sentence) for sentence in SENTENCES])
    full_seconds = time.perf_counter() - started

    layers = quantize_linears(embedder.model)
    warm_seconds = _warm_up(embedder, layers, counts)

    vectors, seconds = [], []
    with make_progress() as progress:
        for sentence in progress.track(SENTENCES, description="embedding"):
            started = time.perf_counter()
            vectors.append(embedder.embed(sentence))
            seconds.append(time.perf_counter() - started)
    got = torch.stack(vectors)

    routed = _show_routes(console, layers)
    similarity = (expected * got).sum(dim=1).tolist()
    ranking = compare_rankings(expected, got)
    heading(console, "Sentences: MX-FP8 against fp32")
    table = make_table(
        "tokens", "cosine", "nearest", "rank corr.", "ms", "sentence",
        numbers=("tokens", "cosine", "rank corr.", "ms"),
    )  # fmt: skip
    for i, sentence in enumerate(SENTENCES):
        nearest = "kept" if ranking.nearest_kept[i] else "moved"
        figures = f"{similarity[i]:.5f}", nearest, f"{ranking.correlation[i]:.3f}"
        table.add_row(str(counts[i]), *figures, f"{seconds[i] * 1e3:.1f}", sentence)
    console.print(table)
    on_gpu = device.type == "cuda"
    similar = all(cosine >= LOWEST_SIMILARITY for cosine in similarity)  # NaN is not
    kept = sum(ranking.nearest_kept)
    print_fields(
        console,
        {
            "lowest cosine": f"{min(similarity):.5f}, {_at_least(similar)} {LOWEST_SIMILARITY}",
            "nearest kept": f"{kept} of {len(SENTENCES)} sentences keep their nearest neighbour",
            "ranking": f"lowest rank correlation {min(ranking.correlation):.3f}",
            "timings": f"{warm_seconds:.1f} s to compile and warm up, {sum(seconds):.2f} s to embed"
            f"{'' if on_gpu else ' on the simulator'}, {full_seconds:.2f} s in fp32",
        },
    )
    return similar and routed


def _warm_up(embedder: Embedder, layers: dict[str, MxLinear], counts: Sequence[int]) -> float:
    """Make every first use happen now; returns how long that took."""
    started = time.perf_counter()
    rows = sorted({*counts, 1})  # the pooler sees one row
    one_of_each = dict(zip(counts, SENTENCES, strict=True))
    with make_progress() as progress:
        task = progress.add_task("compiling", total=None)
        for N, K in sorted({(layer.N, layer.K) for layer in layers.values()}):
            aiter_mx.warmup(
                "linear",
                device=embedder.device,
                on_built=lambda *_: progress.advance(task),
                M=rows,
                N=N,
                K=K,
                out_dtype=DTYPE,
                bias=DTYPE,
            )
        progress.remove_task(task)
        for sentence in progress.track(one_of_each.values(), description="warming up"):
            embedder.embed(sentence)
    for layer in layers.values():
        layer.calls.clear()
    return time.perf_counter() - started


def _show_routes(console: Console, layers: dict[str, MxLinear]) -> bool:
    heading(console, "Routes of the linear layers")
    reasons: dict[str, int] = {}
    table = make_table("layer", "N x K", "calls", "M", "route", "why", numbers=("calls",))
    routes = set()
    for name, layer in layers.items():
        found = [
            explain("linear", M=M, N=layer.N, K=layer.K, out_dtype=DTYPE, bias=DTYPE)
            for M in sorted(layer.calls)
        ]
        of_layer = {f"{route.backend}/{route.kernel}" for route in found}
        routes |= of_layer
        whys = {reasons.setdefault(route.reason, len(reasons) + 1) for route in found}
        table.add_row(
            name,
            f"{layer.N} x {layer.K}",
            str(sum(layer.calls.values())),
            " ".join(map(str, sorted(layer.calls))),
            " ".join(sorted(of_layer)),
            " ".join(f"({why})" for why in sorted(whys)),
        )
    console.print(table)
    for reason, number in reasons.items():
        console.print(f"({number}) {reason}")
    ours = all(route.split("/")[0] == EXPECTED_BACKEND for route in routes)
    if not ours:
        console.print("FAILED: every layer must run on a kernel of ours", style="bold red")
    return ours


def _show_decode(console: Console, device: torch.device) -> bool:
    heading(console, "Decode shapes of a large model, against float64")
    shapes = [(name, 1, N, K) for name, (N, K) in DECODE_LINEARS.items()]
    shapes.append(("qkv", 16, *DECODE_LINEARS["qkv"]))
    on_gpu = device.type == "cuda"
    table = make_table(
        "linear", "M", "N", "K", "relative error", "worst / allowed",
        "us in a graph, weights cached" if on_gpu else "simulated in",
        "route", numbers=("M", "N", "K", "relative error", "worst / allowed"),
    )  # fmt: skip
    passed = True
    with make_progress() as progress:
        for seed, (name, M, N, K) in enumerate(progress.track(shapes, description="decode")):
            checked = run_decode(M, N, K, device, seed)
            route = explain("linear", M=M, N=N, K=K)
            taken = f"{route.backend}/{route.kernel}"
            passed = passed and checked.worst <= 1 and route.backend == "hip"
            shown_time = f"{checked.seconds * 1e6:.1f}" if on_gpu else f"{checked.seconds:.2f} s"
            table.add_row(
                name, str(M), str(N), str(K), f"{checked.relative_error:.1e}",
                f"{checked.worst:.2f}", shown_time, taken,
            )  # fmt: skip
    console.print(table)
    if not passed:
        text = "FAILED: every shape must run on a kernel of ours, within what rounding allows"
        console.print(text, style="bold red")
    return passed


def _at_least(similar: bool) -> str:
    return "at least" if similar else "FAILED: below"
