"""Prefill grouped GEMM: ours, torch's bf16 and fp8 and Triton's, for even and uneven groups.

    python -m op_tests.bench.grouped [--save] [--shapes 16x2048x4096x7168 ...] [--modes mild ...]
                                     [--settle MS]
    python -m op_tests.bench.grouped --few-rows   # op_tests/bench/few_rows.py

Shapes are groups x rows of each x N x K. All in one run on one GPU, graph replay over buffers
rotated past the last-level cache; what is compared is timed in turn, several rounds, each in an
order of its own, medians. Before it is timed, each runs for a while untimed: prefill is a steady
load, under which a GPU at its power limit lowers its clock, and what ran before must not count.
Operands are normal random values, quantised for those that want it. ``torch_bf16`` multiplies them
as they were drawn, what an engine without MX holds; ``torch_bf16_of_mx`` what the MX tensors stand
for, whose short mantissas take less power. ``torch_fp8`` is torch._scaled_grouped_mm with one scale
a row, which is no MX; Triton has the best of its tiles.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median

import torch

import aiter_mx
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.fallbacks import grouped_gemm_triton
from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from aiter_mx.kernels.grouped_gemm.triton import candidates
from aiter_mx.kernels.spec import Config
from aiter_mx.target import target_of
from aiter_mx.timing import GraphedCalls, copies_to_stay_cold
from op_tests.bench.common import DEVICE, quantize_rows, refuse_no_gpu, report
from op_tests.mx_reference import linear_reference64

SHAPES = (
    (16, 2048, 4096, 7168),
    (16, 2048, 7168, 2048),
    (4, 2048, 5760, 2880),
    (32, 2048, 5760, 2880),
    (4, 2048, 2880, 2880),
    (32, 2048, 2880, 2880),
)
"""DeepSeek-V3's two layers of an expert at EP16, and gpt-oss's at EP8 and whole."""
MODES = ("balanced", "mild", "extreme")
ROUNDS = 5
SETTLE_MS = 60.0
"""What is timed has run so long before, so that the clock is that of its own power."""
# NVIDIA H200 data sheet, dense bf16, which is what the kernel multiplies in.
PEAK_TFLOPS = 989.4
Call = Callable[[], object]


def group_ends(mode: str, groups: int, rows: int) -> list[int]:
    """Where groups end: ``groups * rows`` rows, split evenly; at random; or over an eighth of the
    groups, the others empty."""
    total = groups * rows
    if mode == "balanced":
        return [rows * (g + 1) for g in range(groups)]
    generator = torch.Generator().manual_seed(groups)
    if mode == "mild":
        shares = torch.rand(groups, generator=generator, dtype=torch.float64) + 0.5
    else:
        shares = torch.zeros(groups, dtype=torch.float64)
        busy = torch.randperm(groups, generator=generator)[: max(1, groups // 8)]
        shares[busy] = torch.rand(len(busy), generator=generator, dtype=torch.float64) + 0.5
    ends = (shares.cumsum(0) / shares.sum() * total).long()
    ends[-1] = total
    return [int(end) for end in ends]


class Operands:
    """One copy of what is multiplied, as each of the compared wants it."""

    def __init__(self, groups: int, rows: int, N: int, K: int) -> None:
        self.x = torch.randn(groups * rows, K, device=DEVICE).bfloat16()
        self.w = torch.empty(groups, N, K, dtype=torch.bfloat16, device=DEVICE)
        self.w_of_mx = torch.empty_like(self.w)
        self.w8 = torch.empty(groups, N, K, dtype=torch.float8_e4m3fn, device=DEVICE)
        self.wq = torch.empty_like(self.w8)
        self.ws = torch.empty(groups, N, K // 32, dtype=torch.uint8, device=DEVICE)
        self.w_scale = torch.empty(groups, N, device=DEVICE)
        for g in range(groups):
            self.w[g] = torch.randn(N, K, device=DEVICE).bfloat16() * K**-0.5
            self.w8[g], self.w_scale[g] = quantize_rows(self.w[g])
            payload, scale = aiter_mx.quantize(self.w[g])
            self.wq[g], self.ws[g] = payload, scale.view(torch.uint8)
            self.w_of_mx[g] = dequantized(self.wq[g], self.ws[g])
        self.xq, self.xs = aiter_mx.quantize(self.x)
        self.x_of_mx = dequantized(self.xq, self.xs.view(torch.uint8))
        self.x8, self.x_scale = quantize_rows(self.x)


def dequantized(payload: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """MX as bf16, which holds these values exactly."""
    blocks = payload.bfloat16().unflatten(-1, (-1, 32))
    return torch.ldexp(blocks, scale[..., None].int() - 127).bfloat16().flatten(-2)


def triton_calls(
    operands: Sequence[Operands], offs: torch.Tensor, out: torch.Tensor, problem: GroupedGemmProblem
) -> list[Call]:
    """The calls of our Triton kernel with the fastest of its tiles."""
    starts = torch.nn.functional.pad(offs[:-1], (1, 0))

    def launch(data: Operands, tiles: Config) -> None:
        tensors = (data.xq, data.xs, data.wq, data.ws, None, out, starts, offs)
        grouped_gemm_triton.run(problem, tensors, tiles)

    def time_us(tiles: Config) -> float:
        return GraphedCalls([partial(launch, operands[0], tiles)] * 2).time_us(3, 1)

    best = min(candidates(target_of(DEVICE), problem), key=time_us)
    return [partial(launch, data, best) for data in operands]


def error_of(data: Operands, ends: list[int], out: torch.Tensor) -> float:
    """Relative error (Frobenius norm) of the first and last rows of each group against float64."""
    difference = reference = 0.0
    for g, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        for first, last in ((start, min(start + 16, end)), (max(start, end - 16), end)):
            if last > first:
                x, xs = data.xq[first:last], data.xs[first:last]
                right = linear_reference64(x, xs, data.wq[g], data.ws[g])
                difference += float((out[first:last].double() - right).square().sum())
                reference += float(right.square().sum())
    return (difference / reference) ** 0.5


def settled_us(
    graphs: Mapping[str, GraphedCalls], settle_ms: float, count: int = ROUNDS
) -> dict[str, float]:
    """Time of a call of each, in turns, each with the clock that its own load leaves the GPU."""
    warm = {
        name: 1 + math.ceil(settle_ms * 1e3 / (graph.time_us(1, 1) * graph.calls))
        for name, graph in graphs.items()
    }
    rounds, order, draw = [], list(graphs), random.Random(0)
    for _ in range(count):
        draw.shuffle(order)
        rounds.append({name: graphs[name].time_us(3, warm[name]) for name in order})
    return {name: median(each[name] for each in rounds) for name in graphs}


def measure(
    shape: tuple[int, int, int, int],
    mode: str,
    operands: Sequence[Operands],
    settle_ms: float = SETTLE_MS,
) -> dict[str, object]:
    """One row of the table."""
    groups, rows, N, K = shape
    ends = group_ends(mode, groups, rows)
    offs = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    out = torch.empty(groups * rows, N, dtype=torch.bfloat16, device=DEVICE)

    problem = GroupedGemmProblem(M=groups * rows, N=N, K=K, G=groups)

    def ours(data: Operands) -> None:
        aiter_mx.grouped_gemm(data.xq, data.xs, data.wq, data.ws, offs, out)

    def with_quantize(data: Operands) -> None:
        aiter_mx.grouped_gemm(*aiter_mx.quantize(data.x), data.wq, data.ws, offs, out)

    def torch_bf16(data: Operands) -> None:
        torch._grouped_mm(data.x, data.w.transpose(1, 2), offs=offs)

    def torch_bf16_of_mx(data: Operands) -> None:
        torch._grouped_mm(data.x_of_mx, data.w_of_mx.transpose(1, 2), offs=offs)

    def torch_fp8(data: Operands) -> None:
        torch._scaled_grouped_mm(
            data.x8,
            data.w8.transpose(1, 2),
            data.x_scale,
            data.w_scale,
            offs=offs,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    compared: dict[str, list[Call]] = {
        "ours": [partial(ours, data) for data in operands],
        "ours_with_quantize": [partial(with_quantize, data) for data in operands],
        "torch_bf16": [partial(torch_bf16, data) for data in operands],
        "torch_bf16_of_mx": [partial(torch_bf16_of_mx, data) for data in operands],
        "torch_fp8": [partial(torch_fp8, data) for data in operands],
        "triton": triton_calls(operands, offs, out, problem),
    }
    graphs = {name: GraphedCalls(calls) for name, calls in compared.items()}
    us = settled_us(graphs, settle_ms)
    flops = 2 * groups * rows * N * K
    chosen = route("grouped_gemm", target_of(DEVICE), problem)
    ours(operands[0])
    return {
        "G": groups,
        "mode": mode,
        "M": groups * rows,
        "N": N,
        "K": K,
        "kernel": f"{chosen.backend}/{chosen.kernel}",
        **{f"{name}_us": value for name, value in us.items()},
        "floor_us": flops / PEAK_TFLOPS / 1e6,
        "ours_tflops": flops / us["ours"] / 1e6,
        "torch_bf16_tflops": flops / us["torch_bf16"] / 1e6,
        "over_bf16": us["torch_bf16"] / us["ours"],
        "over_bf16_of_mx": us["torch_bf16_of_mx"] / us["ours"],
        "over_triton": us["triton"] / us["ours"],
        "rel_err": error_of(operands[0], ends, out),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write docs/measured/<gpu>/grouped.csv")
    parser.add_argument("--shapes", nargs="+", default=["x".join(map(str, s)) for s in SHAPES])
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--settle", type=float, default=SETTLE_MS, metavar="MS")
    parser.add_argument("--few-rows", action="store_true", help="see op_tests/bench/few_rows.py")
    parser.add_argument("--seconds", type=float, default=120, help="begin no cell after these")
    arguments = parser.parse_args()
    if arguments.few_rows:
        from op_tests.bench import few_rows

        few_rows.main(arguments)
        return
    refuse_no_gpu()
    rows = []
    for text in arguments.shapes:
        groups, rows_each, N, K = map(int, text.split("x"))
        size = groups * (rows_each + N) * K
        operands = [Operands(groups, rows_each, N, K) for _ in range(copies_to_stay_cold(size))]
        for mode in arguments.modes:
            rows.append(measure((groups, rows_each, N, K), mode, operands, arguments.settle))
            print(rows[-1], flush=True)
        del operands
        torch.cuda.empty_cache()
    report("Grouped GEMM", rows, "grouped" if arguments.save else None)


if __name__ == "__main__":
    main()
