"""Fits the numbers by which gfx950's mfma chooses configurations to the model of time.

    python tune/fit_mfma.py [--count 300] [--seed 0]
    python tune/fit_mfma.py --persistent

Configurations that fit shapes of the table are drawn and traced as the tuner does it. Those of
``FITTED`` that the cost is linear in are fitted to the predicted times by non-negative least
squares of relative errors. With ``--persistent`` it is told by how much the cycles of the kernel
with large tiles are off, for each tile: the median over shapes, by how many tiles there are.
Nothing is written: numbers are taken over by hand into
aiter_mx/kernels/linear/mfma_choice_gfx950.py and persistent_choice_gfx950.py.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from itertools import product
from math import inf

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from aiter_mx.errors import AiterMxError
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear.mfma_choice_gfx950 import FITTED, SEARCHES
from aiter_mx.kernels.linear.persistent_choice_gfx950 import LARGE, Large, cycles_of
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.kernels.search import Costed, Least
from aiter_mx.kernels.spec import Config
from aiter_mx.paths import configs_dir
from aiter_mx.target import hardware
from aiter_mx.tuning.candidates import Candidate
from aiter_mx.tuning.modelled import ModelBench

LINEAR = ("memory", "lines", "round", "step", "sum", "split")
ROWS = (4, 16, 32, 64, 80, 128, 144, 256, 512, 768)
MOST_WEIGHTS = 1 << 26  # of a shape: larger ones take long to trace, and say the same
PERSISTENT_SHAPES = ((2304, 6144), (6144, 2048), (8192, 4096), (14336, 4096), (28672, 4096))
WITHIN = 1.6
"""Of the least cost: what costs more would never be chosen."""
GFX950 = hardware("gfx950")
CYCLES_A_US = 2400
MOST_TILES = 1 << 20


def costs(kernel: str, problem: LinearProblem) -> list[Costed]:
    """All configurations of a kernel for a problem, with what they cost."""
    return list(SEARCHES[kernel].costs(GFX950, problem, Least()))


def features(kernel: str, problem: LinearProblem, values: tuple[int, ...]) -> list[float]:
    """By what each number of ``LINEAR`` counts in the cost of a configuration."""
    kept, counts = dict(FITTED), []
    try:
        for name in LINEAR:
            FITTED.update({other: float(other == name) for other in LINEAR})
            counts += [cost for cost, _, found in costs(kernel, problem) if found == values]
    finally:
        FITTED.update(kept)
    return counts


def drawn(count: int, seed: int) -> Iterator[tuple[str, LinearProblem, tuple[int, ...]]]:
    """Configurations that might be chosen, of shapes of the table."""
    draw = random.Random(seed)
    table = pd.read_csv(configs_dir() / "gfx950" / "linear.csv")
    shapes = table[["N", "K"]].drop_duplicates().to_numpy().tolist()
    shapes = [(N, K) for N, K in shapes if N * K <= MOST_WEIGHTS]
    for _ in range(count):
        problem = LinearProblem(draw.choice(ROWS), *draw.choice(shapes))
        kernel = draw.choice(list(SEARCHES))
        found = costs(kernel, problem)
        if not found:  # K is not split for any number of rows
            continue
        least = min(cost for cost, *_ in found)
        near = [values for cost, _, values in found if cost <= WITHIN * least]
        yield kernel, problem, draw.choice(near)


def predicted_us(kernel: str, problem: LinearProblem, config: Config) -> float:
    """Floor 2 of the model. Raises AiterMxError where the configuration cannot be traced."""
    candidate = Candidate("linear", "gfx950", "hip", kernel, tuple(config.items()))
    bench = ModelBench("linear", problem)
    bench.admit(candidate)
    return bench.sample_us(candidate)


def large_tiles(large: Large) -> Iterator[tuple[int, float]]:
    """Of a kernel with large tiles, by shape: tiles, and cycles for each that is expected."""
    spec = find_kernel("linear", "gfx950", "hip", large.kernel)
    for (N, K), many in product(PERSISTENT_SHAPES, (1, 2, 4, 8, 16)):
        problem = LinearProblem(many * large.tile[0], N, K)
        if (cycles := cycles_of(GFX950, large, problem)) == inf:  # others are faster there
            continue
        config = next(
            config
            for config in spec.candidates(GFX950, problem)
            if (config["tile_m"], config["tile_n"]) == large.tile
        )
        found = predicted_us(large.kernel, problem, config) * CYCLES_A_US
        yield many * -(-N // large.tile[1]), found / cycles


def fit_persistent() -> None:
    cus = GFX950.cu_num
    bounds = {"few": (0, cus // 2), "many": (cus // 2, cus), "rounds": (cus, MOST_TILES)}
    for large in LARGE:
        found = list(large_tiles(large))
        for what, (above, most) in bounds.items():
            of_these = [ratio for tiles, ratio in found if above < tiles <= most]
            if of_these:
                low, middle, high = np.quantile(of_these, (0.1, 0.5, 0.9))
                print(
                    f"{large.kernel} {large.tile} {what}: {middle:.2f} of now"
                    f" ({low:.2f} to {high:.2f})",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=300, help="configurations to trace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--persistent", action="store_true", help="its steps instead")
    options = parser.parse_args()
    if options.persistent:
        fit_persistent()
        return
    counts, cycles, splits = [], [], []
    for kernel, problem, values in drawn(options.count, options.seed):
        try:
            names = (param.name for param in SEARCHES[kernel].params)
            us = predicted_us(kernel, problem, dict(zip(names, values, strict=True)))
        except AiterMxError as error:
            print(f"{problem} {values}: {error}")
            continue
        counts.append(features(kernel, problem, values))
        cycles.append(us * CYCLES_A_US - FITTED["launch"])
        splits.append(kernel == "mfma_split")
    A, y, is_split = np.array(counts), np.array(cycles), np.array(splits)
    fitted, _ = nnls(A / y[:, None], np.ones(len(y)))
    for name, before, number in zip(LINEAR, map(FITTED.get, LINEAR), fitted, strict=True):
        print(f"{name:8} {before:8g} -> {number:8.4g}")
    for numbers, what in ((np.array([FITTED[name] for name in LINEAR]), "now"), (fitted, "fitted")):
        launch = FITTED["launch"]
        error = abs((A @ numbers + launch) / (y + launch) - 1)
        for kind, rows in (("mfma", ~is_split), ("mfma_split", is_split)):
            if rows.any():
                middle, most = np.quantile(error[rows], (0.5, 0.9))
                print(f"{what} {kind}: median error {middle:.1%}, 90 % {most:.1%}")


if __name__ == "__main__":
    main()
