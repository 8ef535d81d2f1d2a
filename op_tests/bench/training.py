"""Gradients of a grouped GEMM, and whole steps: ours and torch's bf16, for even and uneven groups.

    python -m op_tests.bench.training [--save] [--shapes 16x2048x4096x7168 ...] [--modes mild ...]
                                      [--window MS] [--again N]

Shapes and modes are those of op_tests.bench.grouped. ``dgrad`` and ``wgrad`` are each alone, of
operands that were quantised before; ``main_grad`` is a wgrad that is added to a tensor in fp32.
``step`` is forward and backward with all quantisation, weights included, and ``step_reused`` with
weights that were quantised before: ``reused`` is this one against bf16, and ``batches_4`` four
micro-batches that quantise the weights once. ``quantize`` is all the quantisation of a step, and
``copy`` a device copy of as many bytes. torch multiplies in bf16 by its grouped products, the
tensors as they were drawn, or the values that MX stands for; ``step_fp8`` is its three products in
fp8 with a scale for each row, without any quantisation, where groups are even, which it demands.
``step_torchao`` is torchao's MX-FP8 step, of its own quantisation, where torchao is installed and
groups are even: it fails on the device where their rows are no multiples of 32; ``torchao`` says by
which of its ways, or why it does not. All write gradients in bf16. Memory is the most that a step
allocates beyond what is there before.

Each contender runs alone for a window of time, in turns with the others, after half a window that
does not count. Products draw all the power that a GPU has, so its clock follows what they
multiply, within tens of milliseconds: short mantissas leave it higher. A training step runs by
itself for hours, at the clock of its own power; contenders that replace each other every few
milliseconds would share a clock that none of them has in use. Several windows each, in turns,
spread over all what else moves the clock. Times are medians over these rounds, and a ratio is the
median of each round's. With ``--again N``, where a ratio is within 3 % of its bar, below or above,
N times as many rounds more count too; ``dgrad_rounds``, ``wgrad_rounds`` and ``step_rounds`` have
the ratio of each round.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median

import pandas as pd
import torch
from torch import Tensor

import aiter_mx
from aiter_mx.ops.quantize import Dual
from aiter_mx.timing import GraphedCalls, copies_to_stay_cold
from aiter_mx.tuning.origin import commit, today
from op_tests.bench.common import MEASURED, gpu_name, quantize_rows, refuse_no_gpu, report
from op_tests.bench.grouped import DEVICE, MODES, PEAK_TFLOPS, SHAPES, dequantized, group_ends

Call = Callable[[], Tensor]
CELL = ("G", "mode", "M", "N", "K")
WINDOW_MS = 80.0
ROUNDS = 3
NEAR = 0.03
LEAST_REPLAYS = 3


class Operands:
    """One copy of a layer's tensors: x ``[T, K]``, w ``[G, N, K]``, dy ``[T, N]``."""

    def __init__(
        self, ends: Sequence[int], N: int, K: int, device: torch.device, seed: int = 0
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        G, T = len(ends), ends[-1]

        def randn(*shape: int) -> Tensor:
            drawn = torch.randn(shape, device=device, generator=generator)
            return drawn.to(torch.bfloat16)

        self.offs = torch.tensor([0, *ends], dtype=torch.int32, device=device)
        self.x, self.dy = randn(T, K).requires_grad_(), randn(T, N)
        self.w = (randn(G, N, K) * K**-0.5).requires_grad_()
        with torch.no_grad():
            self.dual = aiter_mx.quantize_dual_batched(self.w)
            self.dy_rows = aiter_mx.quantize(self.dy)
            self.x_columns, self.dy_columns = (
                aiter_mx.quantize_grouped(each, self.offs, -2) for each in (self.x, self.dy)
            )
            self.x_of_mx, self.dy_of_mx = (
                dequantized(*aiter_mx.quantize(each)) for each in (self.x, self.dy)
            )
            self.w_of_mx = dequantized(*self.dual[:2])
        self.main_grad = torch.zeros(self.w.shape, device=device)

    def quantize(self) -> list[Tensor]:
        """All that a step quantises."""
        w, x, dy = self.w.detach(), self.x.detach(), self.dy
        duals = [aiter_mx.quantize_dual_batched(w)]
        duals += [aiter_mx.quantize_dual_grouped(t, self.offs, pad_rows=False) for t in (x, dy)]
        return [tensor for dual in duals for tensor in dual]

    def quantized_bytes(self) -> int:
        """What that reads and writes."""
        return sum(t.nbytes for t in (self.w, self.x, self.dy, *self.quantize()))

    def products_in_fp8(self) -> Call:
        """The three products of a step by torch in fp8, with a scale for each row; even groups."""
        G, ends = len(self.w), self.offs[1:]
        w = self.w.detach()
        x, dy = quantize_rows(self.x.detach()), quantize_rows(self.dy)
        w_rows, w_columns = (_in_fp8(each) for each in (w, w.mT))
        # Scales are of a group's part of a row.
        of_x, of_dy = (
            _in_fp8(t.detach().unflatten(0, (G, -1)).mT) for t in (self.x, self.dy)
        )  # fmt: skip
        x_columns, dy_columns = (t[0].transpose(0, 1).flatten(1) for t in (of_x, of_dy))
        multiply = partial(
            torch._scaled_grouped_mm, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
        )

        def step() -> Tensor:
            y = multiply(x[0], w_rows[0].mT, x[1], w_rows[1])
            multiply(dy[0], w_columns[0].mT, dy[1], w_columns[1])
            multiply(dy_columns, x_columns.mT, of_dy[1].flatten(), of_x[1].flatten())
            return y

        return step


def _in_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """``quantize_rows`` of each matrix."""
    payload = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(x.shape[:-1], device=x.device)
    for g, matrix in enumerate(x):
        payload[g], scale[g] = quantize_rows(matrix)
    return payload, scale


def calls_of(data: Operands) -> dict[str, Call]:
    """What is compared, by product and by who computes it: ``dgrad``, ``dgrad_bf16``, ..."""
    offs, ends = data.offs, data.offs[1:]
    grad, x = data.dy_columns, data.x_columns
    of_wgrad = (grad.rows, grad.row_scales, x.rows, x.row_scales, x.group_offs, offs)

    def step(quantized_w: Dual | None = None) -> Tensor:
        data.x.grad = data.w.grad = None
        y = aiter_mx.grouped_linear(data.x, data.w, offs, quantized_w=quantized_w)
        y.backward(data.dy)
        return y.detach()

    def step_bf16(x: Tensor, w: Tensor, dy: Tensor) -> Tensor:
        y = torch._grouped_mm(x, w.mT, offs=ends)
        torch._grouped_mm(dy, w, offs=ends)
        torch._grouped_mm(dy.T, x, offs=ends)
        return y

    drawn = (data.x.detach(), data.w.detach(), data.dy)
    of_mx = (data.x_of_mx, data.w_of_mx, data.dy_of_mx)
    return {
        "dgrad": lambda: aiter_mx.grouped_gemm_dgrad(
            *data.dy_rows, data.dual.columns, data.dual.column_scales, offs
        ),
        "dgrad_bf16": lambda: torch._grouped_mm(data.dy, drawn[1], offs=ends),
        "dgrad_bf16_of_mx": lambda: torch._grouped_mm(data.dy_of_mx, data.w_of_mx, offs=ends),
        "wgrad": lambda: aiter_mx.grouped_gemm_wgrad(*of_wgrad),
        "wgrad_bf16": lambda: torch._grouped_mm(data.dy.T, drawn[0], offs=ends),
        "wgrad_bf16_of_mx": lambda: torch._grouped_mm(data.dy_of_mx.T, data.x_of_mx, offs=ends),
        "main_grad": lambda: aiter_mx.grouped_gemm_wgrad(
            *of_wgrad, data.main_grad, torch.float32, accumulate=True
        ),
        "quantize": lambda: data.quantize()[0],
        "copy": _copy_of(data.quantized_bytes(), data.x.device),
        "step": step,
        "step_reused": partial(step, data.dual),
        "step_bf16": partial(step_bf16, *drawn),
        "step_bf16_of_mx": partial(step_bf16, *of_mx),
    }


def _copy_of(size_bytes: int, device: torch.device) -> Call:
    """A copy that reads and writes so many bytes in all, in pieces, with which it is fastest."""
    pieces = -(-size_bytes // (256 << 20))
    part = size_bytes // 2 // pieces // 512 * 512  # at other sizes it is slower
    to, source = torch.empty(2, pieces, part, dtype=torch.uint8, device=device)

    def copy() -> Tensor:
        for piece in range(pieces):
            to[piece].copy_(source[piece])
        return to

    return copy


def most_bytes(call: Call) -> int:
    """What a call allocates at most, beyond what is there before."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def settled_us(
    graphs: Mapping[str, GraphedCalls], window_ms: float, rounds: int
) -> list[dict[str, float]]:
    """Times of a call of each at the clock that its own load leaves the GPU: in each round the
    means of windows in turns, in random order, after half a window that is not timed."""
    draw, order = random.Random(0), list(graphs)
    replays = {
        name: max(LEAST_REPLAYS, math.ceil(window_ms * 1e3 / (graph.time_us(1, 1) * graph.calls)))
        for name, graph in graphs.items()
    }
    timed = []
    for _ in range(rounds):
        draw.shuffle(order)
        timed.append(
            {
                name: graphs[name].time_us(replays[name], -(-replays[name] // 2), fmean)
                for name in order
            }
        )
    return timed


def over(rounds: Sequence[Mapping[str, float]], peer: str, *calls: str) -> list[float]:
    """How many times as fast these calls are as as many of the peer, in each round."""
    return [len(calls) * each[peer] / sum(each[name] for name in calls) for each in rounds]


def bar_of(name: str, mode: str) -> float:
    """The least that bf16's time over that of a call shall be."""
    if name == "step":
        return 0.92
    return 1.05 if mode == "extreme" else 1.0


def judged_us(
    name: str, mode: str, graphs: Mapping[str, GraphedCalls], window_ms: float, again: int
) -> list[dict[str, float]]:
    """Rounds of a call and its peers, more of them where it is near its bar."""
    rounds, peer = settled_us(graphs, window_ms, ROUNDS), f"{name}_bf16"
    if peer in graphs and again:
        ratio = median(over(rounds, peer, name))
        if abs(ratio / bar_of(name, mode) - 1) < NEAR:
            rounds += settled_us(graphs, window_ms, again * ROUNDS)
    return rounds


def figures_of(name: str, rounds: Sequence[Mapping[str, float]], flops: float) -> dict[str, object]:
    """What a row says of a call and its peers."""
    us = {each: median(times[each] for times in rounds) for each in sorted(rounds[0])}
    row: dict[str, object] = {f"{each}_us": value for each, value in us.items()}
    if name == "quantize":
        return row | {"quantize_over_copy": median(over(rounds, "copy", name))}
    row[f"{name}_tflops"] = flops / us[name] / 1e6
    for peer in ("bf16", "bf16_of_mx"):
        row[f"{name}_over_{peer}"] = median(over(rounds, f"{name}_{peer}", name))
    row[f"{name}_rounds"] = " ".join(f"{each:.3f}" for each in over(rounds, f"{name}_bf16", name))
    if name == "step":
        reused = ["step_reused"] * 3
        row["reused_over_bf16"] = median(over(rounds, "step_bf16", "step_reused"))
        row["batches_4_over_bf16"] = median(over(rounds, "step_bf16", name, *reused))
    return row


def step_of_torchao(data: Operands, preference: str) -> Call:
    """Forward and backward by torchao, with the kernels that it prefers so."""
    from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
    from torchao.quantization.quantize_.common import KernelPreference

    x, w = data.x.detach().requires_grad_(), data.w.detach().requires_grad_()

    def step() -> Tensor:
        x.grad = w.grad = None
        y: Tensor = _to_mxfp8_then_scaled_grouped_mm(
            x, w.mT, data.offs[1:], kernel_preference=KernelPreference[preference]
        )
        y.backward(data.dy)
        return y.detach()

    return step


def time_of_torchao(data: Operands) -> dict[str, object]:
    """Time of a step of the first of its ways that takes these operands, or how each refuses."""
    refusals = []
    for preference in ("AUTO", "EMULATED"):
        try:
            step = step_of_torchao(data, preference)
            step()
        except (
            ImportError,
            AttributeError,
            AssertionError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            words = " ".join(str(error).split())
            refusals.append(f"{preference}: {type(error).__name__}: {words[:80]}")
        else:
            us = median(_eager_us(step) for _ in range(3))
            return {"step_torchao_us": us, "torchao": "; ".join([*refusals, f"{preference} runs"])}
    return {"step_torchao_us": math.nan, "torchao": "; ".join(refusals)}


def _eager_us(call: Call) -> float:
    """Of a call that may wait for the GPU, which no graph captures."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


COMPARED = (
    ("dgrad", "dgrad_bf16", "dgrad_bf16_of_mx"),
    ("wgrad", "wgrad_bf16", "wgrad_bf16_of_mx", "main_grad"),
    ("step", "step_reused", "step_bf16", "step_bf16_of_mx", "step_fp8"),
    ("quantize", "copy"),
)
"""What takes turns."""


def measure(
    shape: tuple[int, int, int, int], mode: str, window_ms: float = WINDOW_MS, again: int = 0
) -> dict[str, object]:
    """One row of the table."""
    groups, rows, N, K = shape
    ends = group_ends(mode, groups, rows)
    copies = copies_to_stay_cold(groups * (rows * (N + K) + N * K))
    operands = [Operands(ends, N, K, DEVICE, seed) for seed in range(copies)]
    compared = [calls_of(each) for each in operands]
    graphs = {name: GraphedCalls([each[name] for each in compared]) for name in compared[0]}
    if mode == "balanced":
        graphs["step_fp8"] = GraphedCalls([each.products_in_fp8() for each in operands])
    flops = 2 * groups * rows * N * K
    row: dict[str, object] = {"G": groups, "mode": mode, "M": groups * rows, "N": N, "K": K}
    row |= {"step_fp8_us": math.nan, "floor_us": flops / PEAK_TFLOPS / 1e6}
    for name, *peers in COMPARED:
        in_turns = {each: graphs[each] for each in (name, *peers) if each in graphs}
        rounds = judged_us(name, mode, in_turns, window_ms, again)
        row |= figures_of(name, rounds, flops * (3 if name == "step" else 1))
    if mode == "balanced":
        row |= time_of_torchao(operands[0])
    for name in ("step", "step_bf16"):
        row[f"{name}_mib"] = most_bytes(compared[0][name]) / 2**20
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--save",
        action="store_true",
        help="put into docs/measured/<gpu>/training.csv, row by row, what it lacks of this commit",
    )
    parser.add_argument("--shapes", nargs="+", default=["x".join(map(str, s)) for s in SHAPES])
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--window", type=float, default=WINDOW_MS, metavar="MS")
    parser.add_argument(
        "--again",
        type=int,
        default=0,
        metavar="N",
        help="time what is within 3 %% of its bar for N times as many rounds more",
    )
    arguments = parser.parse_args()
    refuse_no_gpu()
    path = MEASURED / gpu_name() / "training.csv"
    saved = _saved(path) if arguments.save else {}
    facts = {"commit": commit(), "date": today()}
    for mode, text in itertools.product(arguments.modes, arguments.shapes):
        groups, rows_each, N, K = map(int, text.split("x"))
        cell = (groups, mode, groups * rows_each, N, K)
        if saved.get(cell, {}).get("commit") == facts["commit"]:
            continue
        row = measure((groups, rows_each, N, K), mode, arguments.window, arguments.again)
        saved[cell] = row | facts
        print(saved[cell], flush=True)
        if arguments.save:
            frame = pd.DataFrame([saved[each] for each in sorted(saved)])
            frame.to_csv(path, index=False, float_format="%.5g")
        torch.cuda.empty_cache()
    report("Training", [*saved.values()], None)


def _saved(path: Path) -> dict[tuple[object, ...], dict[str, object]]:
    """The rows of runs before, by their cells."""
    if not path.is_file():
        return {}
    frame = pd.read_csv(path, dtype={"commit": str})
    rows = [{str(k): v for k, v in row.items()} for row in frame.to_dict("records")]
    return {tuple(row[name] for name in CELL): row for row in rows}


if __name__ == "__main__":
    main()
