"""Quantisation beside a device copy of as many bytes, and beside what torch.compile makes of it.

    python -m op_tests.bench.quantize [--save] [--sweep] [--compiled rows dual] [--mb 64 256]
    python -m op_tests.bench.pictures       # draws what is saved

All in one run on one GPU, cold inputs and outputs (buffers rotated past the last-level cache),
graph replay, medians. The copy moves half of an op's bytes from one place to another, so that it
reads and writes as much as the op does. Sizes are those of x. With --sweep, each configuration of
our kernels is timed and the fastest is reported; without it, the one that dispatch routes to.
"""

from __future__ import annotations

import argparse
import math
from functools import partial

import torch

import aiter_mx
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.fallbacks import quantize_torch
from aiter_mx.kernels.quantize import KERNELS, QuantizeProblem
from aiter_mx.launch import bind, call
from aiter_mx.ops.quantize_call import Options, check, empty_outputs
from aiter_mx.target import target_of
from aiter_mx.timing import copies_to_stay_cold, time_graph_us
from op_tests.bench.common import DEVICE, refuse_no_gpu, report, swept_us

COLUMNS = 4096
MATRICES, GROUPS = 8, 32
Outputs = list[torch.Tensor | None]
CASES: dict[str, tuple[Options, torch.dtype, bool]] = {
    "rows": (Options("rows"), torch.bfloat16, False),
    "rows_floor": (Options("rows", mode="floor"), torch.bfloat16, False),
    "rows_fp32": (Options("rows"), torch.float32, False),
    "rows_e2m1": (Options("rows", format="e2m1"), torch.bfloat16, False),
    "rows_16x4": (Options("rows", layout="16x4"), torch.bfloat16, False),
    "rows_32x32": (Options("rows", square=True), torch.bfloat16, False),
    "columns": (Options("columns"), torch.bfloat16, False),
    "dual": (Options("both"), torch.bfloat16, False),
    "dual_fp32": (Options("both"), torch.float32, False),
    "dual_e2m1": (Options("both", format="e2m1"), torch.bfloat16, False),
    "dual_16x4": (Options("both", layout="16x4"), torch.bfloat16, False),
    "dual_32x32": (Options("both", square=True), torch.bfloat16, False),
    "dual_batched": (Options("both"), torch.bfloat16, False),
    "grouped": (Options("rows"), torch.bfloat16, True),
    "dual_grouped": (Options("both"), torch.bfloat16, True),
    "dual_grouped_columns": (Options("both", padded="columns"), torch.bfloat16, True),
}


def draw(name: str, size_mb: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x of so many MB, random in magnitude and value, and the groups' offsets."""
    _, dtype, grouped = CASES[name]
    rows = (size_mb << 20) // (COLUMNS * dtype.itemsize)
    x = torch.randn(rows, COLUMNS, device=DEVICE)
    x *= 2.0 ** torch.randint(-20, 20, (rows, COLUMNS // 32), device=DEVICE).repeat_interleave(
        32, dim=1
    )
    x = x.to(dtype)
    if name == "dual_batched":
        x = x.view(MATRICES, -1, COLUMNS)
    if not grouped:
        return x, None
    cuts = torch.randint(0, rows + 1, (GROUPS - 1,), device=DEVICE).sort().values
    return x, torch.nn.functional.pad(torch.nn.functional.pad(cuts, (1, 0)), (0, 1), value=rows)


def sweep_us(
    problem: QuantizeProblem, tensors: list[tuple[torch.Tensor | None, ...]]
) -> tuple[float, str]:
    """The fastest configuration of our kernels, and its time; prints the others."""
    timed = [
        (us, f"{name} {config}") for us, name, config in swept_us("quantize", problem, tensors, 7)
    ]
    for us, what in timed[:8]:
        print(f"    {us:8.2f} us  {what}")
    return timed[0]


def compiled_us(problem: QuantizeProblem, tensors: list[tuple[torch.Tensor | None, ...]]) -> float:
    """Time of the torch reference after torch.compile."""
    torch.compiler.reset()
    compiled = torch.compile(
        partial(quantize_torch.run, problem, config={}), fullgraph=True, dynamic=False
    )
    try:
        return time_graph_us([partial(compiled, some) for some in tensors], replays=7)
    except Exception as error:  # the rest of the table is worth having all the same
        print(f"torch.compile: {error}"[:300])
        return math.nan


def copy_us(size_bytes: int) -> float:
    """Time of a device copy that reads and writes so many bytes in all."""
    half = size_bytes // 2 // 512 * 512  # at other sizes the copy is slower
    pairs = [
        torch.empty(2, half, dtype=torch.uint8, device=DEVICE)
        for _ in range(copies_to_stay_cold(size_bytes))
    ]
    return time_graph_us([partial(pair[0].copy_, pair[1]) for pair in pairs])


def error_of(name: str, outputs: Outputs, x: torch.Tensor) -> float:
    """Relative error (Frobenius norm) of the dequantised rows, or columns, against x."""
    payload, scales = outputs[:2] if outputs[0] is not None else outputs[2:4]
    layout = CASES[name][0].layout
    values = aiter_mx.dequantize(payload, scales, scale_layout=layout)
    reference = (x if outputs[0] is not None else x.mT).float()
    return float((values - reference).norm() / reference.norm())


def measure(name: str, size_mb: int, arguments: argparse.Namespace) -> dict[str, object]:
    options, _, grouped = CASES[name]
    x, offsets = draw(name, size_mb)
    problem, shapes = check(x, offsets, options)
    total = x.nbytes + sum(
        0 if t is None else t.nbytes for t in empty_outputs(x, offsets, shapes, options)
    )
    copies = copies_to_stay_cold(total)
    tensors: list[tuple[torch.Tensor | None, ...]] = []
    for _ in range(copies):
        outputs = empty_outputs(x, offsets, shapes, options)
        tensors.append((x.clone(), offsets, *outputs))
    target = target_of(DEVICE)
    chosen = route("quantize", target, problem)
    if arguments.sweep:
        ours_us, what = sweep_us(problem, tensors)
    else:
        kernel = next(k for k in KERNELS if k.name == chosen.kernel)
        launch = bind(kernel, target, problem, chosen.config, 0)
        calls = [partial(call, launch, *some) for some in tensors]
        ours_us, what = time_graph_us(calls), f"{chosen.kernel} {dict(chosen.config)}"
    row: dict[str, object] = {"case": name, "M": problem.M, "N": problem.N}
    row |= {"matrices": problem.matrices, "groups": problem.groups, "dtype": problem.dtype}
    row |= {"mb": size_mb, "total_mb": total / 2**20, "ours_us": ours_us}
    in_torch = name in arguments.compiled and size_mb == min(arguments.mb)
    row["compiled_us"] = compiled_us(problem, tensors) if in_torch else math.nan
    row["copy_us"] = row["floor_us"] = copy_us(total)
    row["of_copy_speed"] = row["copy_us"] / ours_us
    row["tb_per_s"] = total / ours_us / 1e6
    row["rel_err"] = math.nan if grouped else error_of(name, list(tensors[0][2:]), x)
    row["kernel"] = what
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write docs/measured/<gpu>/quantize.*")
    parser.add_argument("--sweep", action="store_true", help="time every configuration of ours")
    parser.add_argument("--compiled", nargs="*", default=[], help="cases to compile by torch too")
    parser.add_argument("--mb", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    refuse_no_gpu()
    rows = []
    for name in arguments.only:
        for size_mb in arguments.mb:
            row = measure(name, size_mb, arguments)
            print(name, size_mb, f"{row['ours_us']:.2f} us, {row['of_copy_speed']:.3f} of copy",
                  row["kernel"], flush=True)  # fmt: skip
            rows.append(row)
            torch.cuda.empty_cache()
    report("Quantisation, cold", rows, "quantize" if arguments.save else None)


if __name__ == "__main__":
    main()
