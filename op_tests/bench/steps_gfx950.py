"""What one row more takes on gfx950, by the model of time, wherever the linear launches another.

    python -m op_tests.bench.steps_gfx950 [--every 10] [--save] [--changed]

Of shapes of the catalogue that a seed draws, those of ``bench.linear --hand-overs``, from 64 rows
to 8192. The bar is a tenth more. With ``--changed`` the file's rows stay where kernels and
configurations on both sides are those that it has.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping

import pandas as pd

from aiter_mx.cli.explain import describe_config
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels.linear import LinearProblem
from op_tests.bench.common import MEASURED
from op_tests.bench.decode_gfx950 import GFX950, row_of
from op_tests.bench.every_m import Shape, drawn, shapes
from op_tests.bench.hand_overs import hand_overs

LEAST_ROWS, MOST_ROWS = 64, 8192
EVERY, SEED = 10, 22
BAR = 1.1
ENDS = (65, 129, 257, 513, 1025, 2049, 4097, MOST_ROWS + 1)
"""Rows by which steps are counted together."""


def steps_of(
    shape: Shape, most: int = MOST_ROWS, known: Collection[Mapping[str, object]] = ()
) -> list[dict[str, object]]:
    """What M rows and one more take, for each M; ``known`` rows of the same launches are kept."""
    found: list[dict[str, object]] = []
    for M in (M for M in hand_overs(GFX950, shape, most) if M >= LEAST_ROWS):
        if row := next((row for row in known if is_of(row, M, shape)), None):
            found.append(dict(row))
            continue
        one, more = (row_of(LinearProblem(rows, *shape)) for rows in (M, M + 1))
        us, next_us = (float(str(row["predicted_us"])) for row in (one, more))
        row: dict[str, object] = {"M": M, "N": shape[0], "K": shape[1]}
        for which, of in (("", one), ("next_", more)):
            row |= {f"{which}kernel": of["kernel"], f"{which}config": of["config"]}
        found.append({**row, "us": us, "next_us": next_us, "step": next_us / us})
    return found


def is_of(row: Mapping[str, object], M: int, shape: Shape) -> bool:
    """Whether a row is of these rows and launches."""
    if (row["M"], row["N"], row["K"]) != (M, *shape):
        return False
    both = [route("linear", GFX950, LinearProblem(rows, *shape)) for rows in (M, M + 1)]
    told = [(row[f"{which}kernel"], row[f"{which}config"]) for which in ("", "next_")]
    return told == [(chosen.kernel, describe_config(chosen.config)) for chosen in both]


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """Steps by rows: how many, how large, and how many are within the bar."""
    of = pd.cut(frame.M, [LEAST_ROWS, *ENDS], right=False)
    steps = frame.assign(met=frame.step <= BAR).groupby(of, observed=True)
    return steps.agg(cells=("step", "size"), median=("step", "median"), largest=("step", "max"),
                     met=("met", "mean"))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--every", type=int, default=EVERY, help="of so many shapes, one")
    parser.add_argument("--save", action="store_true", help="write gfx950_simulated/steps.csv")
    parser.add_argument("--changed", action="store_true", help="keep the file's other rows")
    options = parser.parse_args()
    path, found = MEASURED / "gfx950_simulated" / "steps.csv", list[dict[str, object]]()
    known = pd.read_csv(path).to_dict("records") if options.changed else []
    for shape in drawn(shapes(), options.every, SEED):
        found += (rows := steps_of(shape, known=known))
        print(*shape, *(f"{row['M']}:{row['step']:.2f}" for row in rows), flush=True)
    frame = pd.DataFrame(found)
    print(summary(frame).to_string())
    if options.save:
        frame.to_csv(path, index=False, float_format="%.4g")


if __name__ == "__main__":
    main()
