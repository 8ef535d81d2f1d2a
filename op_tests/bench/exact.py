"""What exact sums cost, and how inexact the sums of 14 bits are.

    python -m op_tests.bench.exact [--save] [--draws 10000]

The linear with ``exact_sums`` beside the linear without, over cold weights, by graph replay; only
shapes whose usual kernel adds with fewer bits than fp32. Then the error of that kernel, and of
the one for scales of 128 k, over so many adversarial draws of two blocks, each of one's with each
of the other's, as a share of the error that is stated to be the most.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch

import aiter_mx
from aiter_mx.kernels.linear.wgmma_fp8_sm90 import MOST_ACCUMULATION_ERROR
from aiter_mx.kernels.promoted_gemm import wgmma_fp8_sm90 as of_128
from aiter_mx.ops.promoted_gemm import promoted_gemm
from aiter_mx.timing import copies_to_stay_cold, random_mx, time_graph_us
from op_tests.bench.common import DEVICE, refuse_no_gpu, report
from op_tests.dispatch.products import KINDS, draws

WEIGHTS = ((2304, 6144), (6144, 2048), (9216, 6144), (4096, 4096), (7168, 2048))
ROWS = (17, 32, 64)
TOKENS, DEPTH = 32, 4096  # of the products whose sums are judged
SHIFT = 8  # results are 2^-8 of the sums, so that fp16 holds them
SHIFT_OF_128 = 10  # likewise of sums of 128


def costs(N: int, K: int) -> list[dict[str, object]]:
    """A row for each number of tokens."""
    weights = [random_mx(N, K, DEVICE) for _ in range(copies_to_stay_cold(N * K))]
    rows: list[dict[str, object]] = []
    for M in ROWS:
        chosen = [aiter_mx.explain("linear", M=M, N=N, K=K, exact_sums=e) for e in (False, True)]
        if chosen[0].kernel == chosen[1].kernel:
            continue
        x = random_mx(M, K, DEVICE)
        times = [
            time_graph_us([partial(aiter_mx.linear, *x, *w, exact_sums=exact) for w in weights])
            for exact in (False, True)
        ]
        row: dict[str, object] = {"M": M, "N": N, "K": K}
        row |= {"usual": chosen[0].kernel, "exact": chosen[1].kernel}
        row |= {"usual_us": times[0], "exact_us": times[1], "ratio": times[1] / times[0]}
        rows.append(row)
        print(*row.values(), flush=True)
    return rows


def worst(kind: str, count: int) -> dict[str, object]:
    """The largest error of sums of 32 products, of the sum of their magnitudes."""
    count = -(-count // TOKENS) * TOKENS
    a, b = (t.to(DEVICE) for t in draws(kind, count))
    w = torch.zeros(count, DEPTH, device=DEVICE)
    w[:, :32] = b
    w = w.to(torch.float8_e4m3fn)
    ones = torch.full((TOKENS, DEPTH // 32), 127, dtype=torch.uint8, device=DEVICE)
    small = torch.full((count, DEPTH // 32), 127 - SHIFT, dtype=torch.uint8, device=DEVICE)
    most = 0.0
    for first in range(0, count, TOKENS):
        rows = a[first : first + TOKENS]
        x = torch.zeros(TOKENS, DEPTH, device=DEVICE)
        x[:, :32] = rows
        y = aiter_mx.linear(
            x.to(torch.float8_e4m3fn), ones, w, small, out_dtype=torch.float16, exact_sums=False
        )
        exact, magnitude = rows @ b.T, rows.abs() @ b.abs().T
        rounding = torch.clamp(2.0**-11 * exact.abs(), min=2.0 ** (SHIFT - 25))
        error = (y.double() * 2.0**SHIFT - exact).abs() - rounding
        most = max(most, float((error / magnitude).max()))
    return row_of("linear", kind, count, most, MOST_ACCUMULATION_ERROR)


def worst_of_128(kind: str, count: int) -> dict[str, object]:
    """Of sums of 128 products, by the kernel for scales of 128 k."""
    count = -(-count // 128) * 128
    a, b = (t.to(DEVICE) for t in draws(kind, count, 128))
    x, w = (t.float().to(torch.float8_e4m3fn) for t in (a, b[None]))
    ones = torch.ones(count, 1, device=DEVICE)
    small = torch.full((1, count // 128, 1), 2.0**-SHIFT_OF_128, device=DEVICE)
    ends = torch.tensor([count], dtype=torch.int32, device=DEVICE)
    y = torch.empty(count, count, dtype=torch.float16, device=DEVICE)
    if not promoted_gemm(x, ones, w, small, None, ends, y):
        raise SystemExit("no kernel for scales of 128 k")
    most = 0.0
    for rows, of_rows in zip(a.split(1024), y.split(1024), strict=True):
        exact, magnitude = rows @ b.T, rows.abs() @ b.abs().T
        rounding = torch.clamp(2.0**-11 * exact.abs(), min=2.0 ** (SHIFT_OF_128 - 25))
        error = (of_rows.double() * 2.0**SHIFT_OF_128 - exact).abs() - rounding
        most = max(most, float((error / magnitude).max()))
    return row_of("promoted_gemm", kind, count, most, of_128.MOST_ACCUMULATION_ERROR)


def row_of(op: str, kind: str, count: int, error: float, bound: float) -> dict[str, object]:
    """An error beside its bound."""
    row: dict[str, object] = {"op": op, "kind": kind, "draws": count, "sums": count * count}
    return row | {"error": error, "of_bound": error / bound}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="keep the tables in docs/measured")
    parser.add_argument("--draws", type=int, default=10_000, help="blocks of each kind")
    asked = parser.parse_args()
    refuse_no_gpu()
    rows = [row for shape in WEIGHTS for row in costs(*shape)]
    report("Exact sums, cold weights", rows, "exact_sums" if asked.save else None)
    usual = aiter_mx.explain("linear", M=TOKENS, N=asked.draws // TOKENS * TOKENS, K=DEPTH)
    if usual.kernel != "wgmma_fp8":
        raise SystemExit(f"these draws are of {usual.kernel}, whose sums are fp32")
    rows = [of(kind, asked.draws) for of in (worst, worst_of_128) for kind in KINDS]
    report("Sums of 14 bits", rows, "sums_of_14_bits" if asked.save else None)


if __name__ == "__main__":
    main()
