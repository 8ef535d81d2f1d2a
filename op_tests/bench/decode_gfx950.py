"""What the model of time says of gfx950's decode shapes, beside what their bytes alone would take.

    python -m op_tests.bench.decode_gfx950 [--every 1] [--save]

Shapes are those of the shipped table, each kernel and configuration that which dispatch takes. The
bar is 1.2 times a launch and the bytes of operands and result up to M = 16, 1.4 times above.
"""

from __future__ import annotations

import argparse

import pandas as pd

from aiter_mx.cli.explain import describe_config
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.numerics import BLOCK
from aiter_mx.paths import configs_dir
from aiter_mx.target import hardware
from aiter_mx.tuning.candidates import Candidate
from aiter_mx.tuning.modelled import ModelBench
from aiter_mx.workloads.linear import ROWS
from op_tests.bench.common import MEASURED

LAUNCH_US, BYTES_A_US = 2.6, 6.5e6
FEW_ROWS, BAR_OF_FEW, BAR = 16, 1.2, 1.4
GFX950 = hardware("gfx950")


def ideal_us(problem: LinearProblem) -> float:
    """A launch, and all bytes once."""
    scaled = (problem.M + problem.N) * problem.K * (BLOCK + 1) / BLOCK
    return LAUNCH_US + (scaled + 2 * problem.M * problem.N) / BYTES_A_US


def row_of(problem: LinearProblem) -> dict[str, object]:
    """Its prediction in what dispatch takes."""
    chosen = route("linear", GFX950, problem)
    values = tuple(chosen.config.items())
    candidate = Candidate("linear", "gfx950", chosen.backend, chosen.kernel, values)
    bench = ModelBench("linear", problem)
    bench.admit(candidate)
    us, ideal = bench.sample_us(candidate), ideal_us(problem)
    return {
        **{name: getattr(problem, name) for name in "MNK"},
        "kernel": chosen.kernel,
        "config": describe_config(chosen.config),
        "predicted_us": us,
        "ideal_us": ideal,
        "ratio": us / ideal,
        "is_met": us <= ideal * (BAR_OF_FEW if problem.M <= FEW_ROWS else BAR),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--every", type=int, default=1, help="of so many shapes, the first")
    parser.add_argument("--save", action="store_true", help="write gfx950_simulated/decode.csv")
    options = parser.parse_args()
    table = pd.read_csv(configs_dir() / "gfx950" / "linear.csv")
    shapes = table[["N", "K"]].drop_duplicates().to_numpy().tolist()
    rows = []
    for N, K in shapes[:: options.every]:
        rows += [row_of(LinearProblem(M, N, K)) for M in ROWS]
        print(*(f"{row['ratio']:.2f}" for row in rows[-len(ROWS) :]), f"N={N} K={K}", flush=True)
    frame = pd.DataFrame(rows)
    print(frame.groupby("M")[["ratio", "is_met"]].agg({"ratio": "median", "is_met": "mean"}))
    if options.save:
        path = MEASURED / "gfx950_simulated" / "decode.csv"
        frame.to_csv(path, index=False, float_format="%.4g")


if __name__ == "__main__":
    main()
