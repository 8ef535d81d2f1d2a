"""Grouped GEMMs with fp32 scales for 128 k, DeepGEMM's recipe, beside the other ways to have them.

    python -m op_tests.bench.promoted [--save] [--configs] [--masked]

Prefill: groups x rows of each x N x K, in TFLOP/s, beside MX (``aiter_mx.grouped_gemm``), torch's
fp8 with a scale a row, and DeepGEMM where it is installed. Masked: few rows of each group, in
microseconds, beside reading the weights alone, and DeepGEMM. Graph replay over weights that are
cold; what is compared is timed in turn. DeepGEMM has its scales as its kernels read them.
``--configs`` times each of the kernel's configurations in place of the one that it takes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch

import aiter_mx
from aiter_mx.dispatch.route import Route
from aiter_mx.kernels.promoted_gemm import PromotedGemmProblem
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.kernels.spec import KernelSpec
from aiter_mx.plan import bind_route
from aiter_mx.target import target_of
from aiter_mx.timing import GraphedCalls, copies_to_stay_cold
from op_tests.bench.common import DEVICE, refuse_no_gpu, report
from op_tests.bench.grouped import settled_us
from op_tests.bench.linear import reader

PREFILL = ((16, 2048, 4096, 7168), (16, 2048, 7168, 2048))
MASKED = ((16, 8), (16, 16), (16, 32), (16, 64))  # groups, rows of each that count
MASKED_ROWS = 128  # that each has room for
MASKED_WEIGHTS = ((4096, 7168), (7168, 2048))


try:
    import deep_gemm as DEEP_GEMM  # type: ignore[import-not-found]
except ImportError as error:
    DEEP_GEMM, WITHOUT_DEEP_GEMM = None, f"a build of github.com/deepseek-ai/DeepGEMM: {error}"


def the_kernel() -> KernelSpec:
    """Hopper's."""
    return find_kernel("promoted_gemm", "sm_90a", "hip", "wgmma_fp8")


def draw(G: int, rows: int, N: int, K: int) -> dict[str, torch.Tensor]:
    """Payloads of normal values, and scales such as 448 over the largest of 128 gives."""
    x = torch.randn(G * rows, K, device=DEVICE).clamp(-4, 4) * 100
    w = torch.randn(G * N, K, device=DEVICE, dtype=torch.bfloat16).clamp(-4, 4) * 100
    return {
        "a": x.to(torch.float8_e4m3fn),
        "a_scale": torch.rand(G * rows, K // 128, device=DEVICE) * 0.01 + 1e-3,
        "b": w.to(torch.float8_e4m3fn).view(G, N, K),
        "b_scale": torch.rand(G, N // 128, K // 128, device=DEVICE) * 0.01 + 1e-3,
        "a_bytes": torch.randint(120, 130, (G * rows, K // 32), device=DEVICE, dtype=torch.uint8),
        "b_bytes": torch.randint(120, 130, (G, N, K // 32), device=DEVICE, dtype=torch.uint8),
        "a_row": torch.rand(G * rows, device=DEVICE),
        "b_row": torch.rand(G, N, device=DEVICE),
    }


def ours(problem: PromotedGemmProblem, config: dict[str, int] | None) -> Callable[..., None]:
    """A launch of the kernel over drawn operands, ends of groups and a result."""
    target, kernel = target_of(DEVICE), the_kernel()
    config = config or dict(kernel.configure(target, problem))
    run = bind_route(Route(kernel, config, "timed"), target, problem, DEVICE)

    def call(data: dict[str, torch.Tensor], ends: torch.Tensor, out: torch.Tensor) -> None:
        given = (data["a"], data["a_scale"], data["b"], data["b_scale"], out, None, ends)
        run(given, [0 if t is None else t.data_ptr() for t in given])

    return call


def by_deep_gemm(
    d: dict[str, torch.Tensor], G: int, rows: int, out: torch.Tensor, counts: torch.Tensor | None
) -> Callable[[], object]:
    """DeepGEMM's product of whole groups of so many rows or, given counts, of about so many."""
    b = d["b"], d["b_scale"]
    if counts is None:
        of_groups = torch.arange(G, device=DEVICE, dtype=torch.int32).repeat_interleave(rows)
        a = d["a"], DEEP_GEMM.get_mn_major_tma_aligned_tensor(d["a_scale"])
        return partial(DEEP_GEMM.m_grouped_fp8_gemm_nt_contiguous, a, b, out, of_groups)
    xq, xs, out = (t.view(G, -1, t.shape[-1]) for t in (d["a"], d["a_scale"], out))
    a = xq, DEEP_GEMM.get_mn_major_tma_aligned_tensor(xs)
    return partial(DEEP_GEMM.m_grouped_fp8_gemm_nt_masked, a, b, out, counts, rows)


def difference(
    theirs: Callable[[], object], ours: Callable[[], object], out: torch.Tensor, rows: slice
) -> float:
    """How far these rows of the results are apart, relative to ours."""
    results = []
    for call in (theirs, ours):
        call()
        results.append(out[rows].double())
    return float((results[0] - results[1]).norm() / results[1].norm())


def prefill(shape: tuple[int, int, int, int], configs: bool) -> dict[str, object]:
    """A row of times of whole groups."""
    G, rows, N, K = shape
    problem = PromotedGemmProblem(G * rows, N, K, G)
    data = [draw(G, rows, N, K) for _ in range(2)]
    ends = (torch.arange(G, device=DEVICE, dtype=torch.int32) + 1) * rows
    out = torch.empty(G * rows, N, dtype=torch.bfloat16, device=DEVICE)

    def mx(d: dict[str, torch.Tensor]) -> None:
        aiter_mx.grouped_gemm(d["a"], d["a_bytes"], d["b"], d["b_bytes"], ends, out)

    def torch_fp8(d: dict[str, torch.Tensor]) -> None:
        torch._scaled_grouped_mm(
            d["a"], d["b"].transpose(1, 2), d["a_row"], d["b_row"],
            offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True,
        )  # fmt: skip

    compared: dict[str, list[Callable[[], object]]] = {
        "mx": [partial(mx, d) for d in data],
        "torch_fp8": [partial(torch_fp8, d) for d in data],
    }
    for name, config in tried(problem, configs).items():
        call = ours(problem, config)
        compared[name] = [partial(call, d, ends, out) for d in data]
    row: dict[str, object] = {"shape": "x".join(map(str, shape))}
    if DEEP_GEMM is not None:
        compared["deep_gemm"] = [by_deep_gemm(d, G, rows, out, None) for d in data]
        first = [compared[name][0] for name in ("deep_gemm", next(iter(tried(problem, configs))))]
        row["deep_gemm_difference"] = difference(*first, out, slice(None))
    times = settled_us({name: GraphedCalls(calls) for name, calls in compared.items()}, 40.0)
    work = 2 * G * rows * N * K
    row |= {f"{name}_tflops": work / us / 1e6 for name, us in times.items()}
    best = min(us for name, us in times.items() if name.startswith("ours"))
    return row | {f"over_{n}": us / best for n, us in times.items() if not n.startswith("ours")}


def tried(problem: PromotedGemmProblem, configs: bool) -> dict[str, dict[str, int] | None]:
    """Names of configurations; None is the kernel's own."""
    if not configs:
        return {"ours": None}
    every = the_kernel().candidates(target_of(DEVICE), problem)
    legal = [c for c in every if the_kernel().misfit(target_of(DEVICE), problem, c) is None]
    return {"ours_" + "_".join(map(str, c.values())): dict(c) for c in legal}


def masked(weights: tuple[int, int], groups: int, rows: int, configs: bool) -> dict[str, object]:
    """A row of times of a few rows of each group."""
    N, K = weights
    problem = PromotedGemmProblem(
        groups * MASKED_ROWS, N, K, groups, layout="masked", expected=rows
    )
    copies = copies_to_stay_cold(groups * N * K)
    data = [draw(groups, MASKED_ROWS, N, K) for _ in range(copies)]
    counts = torch.full((groups,), rows, dtype=torch.int32, device=DEVICE)
    out = torch.empty(groups * MASKED_ROWS, N, dtype=torch.bfloat16, device=DEVICE)
    times = {}
    for name, config in tried(problem, configs).items():
        if config is not None and not rows <= config["tile_m"] <= 64:
            continue
        call = ours(problem, config)
        calls = [partial(call, d, counts, out) for d in data]
        times[name] = GraphedCalls(calls).time_us(9)
    reading = reader(target_of(DEVICE))([d["b"] for d in data])
    row: dict[str, object] = {"weights": f"{groups}x{N}x{K}", "rows": rows, "reading_us": reading}
    best = min(times.values())
    row |= times | {"over_reading": best / reading}
    if DEEP_GEMM is not None:
        theirs: list[Callable[[], object]]
        theirs = [by_deep_gemm(d, groups, rows, out, counts) for d in data]
        us = GraphedCalls(theirs).time_us(9)
        row |= {"deep_gemm": us, "over_deep_gemm": us / best}
        row["deep_gemm_difference"] = difference(theirs[0], calls[0], out, slice(rows))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="keep the tables in docs/measured")
    parser.add_argument("--configs", action="store_true", help="time every configuration")
    parser.add_argument("--masked", action="store_true", help="masked groups alone")
    asked = parser.parse_args()
    refuse_no_gpu()
    if DEEP_GEMM is None:
        print(f"DeepGEMM is left out; tried: {WITHOUT_DEEP_GEMM}")
    if not asked.masked:
        rows = [prefill(shape, asked.configs) for shape in PREFILL]
        report("Scales for 128 k, prefill", rows, "promoted" if asked.save else None)
    rows = [masked(w, *of, asked.configs) for w in MASKED_WEIGHTS for of in MASKED]
    report("Scales for 128 k, masked", rows, "promoted_masked" if asked.save else None)


if __name__ == "__main__":
    main()
