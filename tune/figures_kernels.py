"""Tables of what single ops and expert layers take, and their peers."""

from __future__ import annotations

from itertools import pairwise

import pandas as pd

from aiter_mx.kernels.registry import by_backend
from tune.figures_shared import MEASURED, by_column, geometric, origin, shown_us, table


def linear() -> str:
    """Decode linear: us, and in brackets times over a kernel that only reads the weights."""
    run = pd.read_csv(MEASURED / "linear.csv")
    batches = sorted(run.M.unique())
    rows = []
    for (n, k), shape in run.groupby(["N", "K"], sort=True):
        at = shape.set_index("M")
        reading = f"{at.floor_us.iloc[0]:.1f}"
        rows += [
            [
                f"{n} x {k}",
                reading,
                *(f"{at.ours_us[m]:.1f} ({at.ours_over_floor[m]:.2f})" for m in batches),
            ],
            [
                "`pdl=True`",
                "",
                *(f"{at.pdl_us[m]:.1f} ({at.pdl_over_floor[m]:.2f})" for m in batches),
            ],
            ["bf16 cuBLAS", "", *(f"{at.bf16_us[m]:.1f}" for m in batches)],
            ["Triton `dot_scaled`", "", *(f"{at.triton_us[m]:.1f}" for m in batches)],
        ]
    return table(["N x K", "reading", *(f"M={m}" for m in batches)], rows) + origin(run)


def moe() -> str:
    """Expert layer: us, and in brackets times over reading the weights of the experts touched."""
    run = pd.read_csv(MEASURED / "moe.csv")
    names = {
        "gemm1": "first GEMM, bf16 results",
        "gemm1_activated": "first GEMM, activated",
        "gemm2": "second GEMM, fp32 results",
        "layer": "layer",
    }
    tokens = [m for m in (1, 4, 8, 64, 256, 512, 1024, 2048) if m in set(run.M)]
    rows = []
    for (routing, part), cells in run.groupby(["routing", "part"], sort=False):
        if part not in names:
            continue
        at = cells.set_index("M")
        rows.append(
            [
                f"{names[part]}, {routing}",
                *(f"{at.ours_us[m]:.1f} ({at.ours_over_floor[m]:.2f})" for m in tokens),
            ]
        )
        if routing == "uniform" and at.triton_us.notna().any():
            rows.append(["by Triton", *(shown_us(at.triton_us.get(m)) for m in tokens)])
        if routing == "uniform" and at.bf16_us.notna().any():
            rows.append(["by torch in bf16", *(shown_us(at.bf16_us.get(m)) for m in tokens)])
    return table(["", *(f"M={m}" for m in tokens)], rows) + origin(run)


def moe_layers() -> str:
    """Layers of models: how many times ours bf16's layer takes, and its two GEMMs alone."""
    run = pd.read_csv(MEASURED / "moe_layers.csv", dtype={"commit": str})
    tokens = sorted(run.M.unique())
    rows = []
    for (name, routing), cells in run.groupby(["layer", "routing"], sort=False):
        at = cells.set_index("M")
        shown = (
            f"{at.over_bf16[m]:.2f} ({at.over_gemms[m]:.2f})" if m in at.index else ""
            for m in tokens
        )
        rows.append([f"{name}, {routing}", *shown])
    each = [run[m == run.M] for m in tokens]
    means = (f"{geometric(at.over_bf16):.2f} ({geometric(at.over_gemms):.2f})" for at in each)
    rows.append(["geometric mean", *means])
    if "over_humming" in run:
        theirs = (at.over_humming.dropna() for at in each)
        least = (f"{geometric(of):.2f} ({of.min():.2f})" if len(of) else "" for of in theirs)
        rows.append(["Humming's two products over our layer, and least", *least])
    launches = (f"{geometric(at.over_launches):.2f} ({at.over_launches.max():.2f})" for at in each)
    rows.append(["our time over our launches', and worst", *launches])
    return table(["", *(f"M={m}" for m in tokens)], rows) + origin(run)


def promoted() -> str:
    """Scales for 128 k: how often others' times are ours, whole groups and a few rows of each."""
    whole, few = (pd.read_csv(MEASURED / f"{n}.csv") for n in ("promoted", "promoted_masked"))
    rows = [
        [f"{r.shape}, whole groups", f"{r.over_deep_gemm:.2f}", f"{r.over_torch_fp8:.2f}", ""]
        for r in whole.itertuples()
    ]
    rows += [
        [
            f"{r.weights}, {r.rows} rows of each",
            f"{r.over_deep_gemm:.2f}",
            "",
            f"{r.over_reading:.2f}",
        ]
        for r in few.itertuples()
    ]
    heads = ["", "over DeepGEMM", "over torch's fp8 by rows", "our time over reading"]
    return table(heads, rows) + origin(pd.concat([whole, few]))


def hand_overs() -> str:
    """Steps of the linear's time from M to M + 1 rows, where it launches something else."""
    run = pd.read_csv(MEASURED / "linear_hand_overs.csv", dtype={"commit": str})
    rows = []
    for before, last in pairwise((0, 16, 64, 128, 256, 1024, 2048, 4096, 32768)):
        cells = run[run.M.between(before + 1, last)]
        if len(cells):
            steps = f"{geometric(cells.step):.3f}", f"{geometric(cells.bf16_step):.3f}"
            worst = f"{cells.step.max():.2f}", f"{cells.step.min():.2f}"
            counts = (cells.over_bar > 1).sum(), (cells.step < 1 / 1.05).sum()
            rows.append(
                [f"{before + 1} to {last}", str(len(cells)), *steps, *worst, *map(str, counts)]
            )
    columns = ["M", "cells", "step", "bf16's", "largest", "least", "above its bar"]
    columns += ["below 1 / 1.05"]
    return table(columns, rows) + origin(run, "both sides in turns, cold weights, medians")


def variants() -> str:
    """The linear's time in other dtypes, with a bias and without a table, over its usual one."""
    run = pd.read_csv(MEASURED / "linear_variants.csv", dtype={"commit": str})
    names = {
        "fp16_over_usual": "fp16 results",
        "bias_over_usual": "a bias",
        "fp32_over_usual": "fp32 results",
        "fp16_x_over_bf16_x": "fp16 x, over bf16 x",
        "no_table_over_usual": "no table",
        "other_cus_over_usual": "a table of a GPU with other SMs",
    }
    rows = []
    for column, name in names.items():
        times = run[column].dropna()
        rows.append([name, str(len(times)), f"{geometric(times):.3f}", f"{times.max():.2f}"])
    return table(["", "cells", "geometric mean", "worst"], rows) + origin(run)


def grouped() -> str:
    """Grouped GEMM: TFLOPS, and times over torch's bf16, its fp8 without MX, and Triton."""
    run = pd.read_csv(MEASURED / "grouped.csv")
    rows = [
        [
            f"{r.G} x {r.N} x {r.K}, {r['mode']}",
            f"{r.ours_tflops:.0f}",
            f"{r.over_bf16:.2f}",
            f"{r.over_bf16_of_mx:.2f}",
            f"{r.torch_fp8_us / r.ours_us:.2f}",
            f"{r.over_triton:.2f}",
        ]
        for _, r in run.iterrows()
    ]
    columns = ["groups x N x K, rows", "TFLOPS", "torch bf16", "bf16 on MX values"]
    return table([*columns, "fp8 by row, no MX", "Triton"], rows) + origin(run)


def few_rows() -> str:
    """Few rows a group: how many times our time bf16 takes, over all shapes, and the least."""
    run = pd.read_csv(MEASURED / "grouped_few_rows.csv", dtype={"commit": str})
    forms = {"": "over_bf16", ", masked": "masked_over_bf16"}
    lines = {
        f"{spread}{form}": cells.groupby("rows")[column]
        for spread, cells in run.groupby("spread", sort=False)
        for form, column in forms.items()
    }
    return by_column("rows a group", lines, min) + origin(run)


def blocks() -> str:
    """Lists in blocks of 64: their time over that of our own blocks, over layers, and worst."""
    run = pd.read_csv(MEASURED / "moe_blocks.csv", dtype={"commit": str})
    lines = {
        f"{part} GEMM, {routing}": cells.groupby("M").over_own
        for (part, routing), cells in run.groupby(["part", "routing"], sort=False)
    }
    return by_column("tokens", lines, max) + origin(run)


def values() -> str:
    """One extreme row: the time with it over that without, over rows and shapes, and worst."""
    run = pd.read_csv(MEASURED / "values.csv", dtype={"commit": str})
    run = run[run.place != "everywhere"]
    lines = {
        f"`{op}`, in {place}": cells.groupby("kind", sort=False).ratio
        for (op, place), cells in run.groupby(["op", "place"], sort=False)
    }
    return by_column("a row of", lines, max) + origin(run)


def quantize() -> str:
    """Quantisation: us, and the share of a device copy's speed."""
    run = pd.read_csv(MEASURED / "quantize.csv")
    rows = [
        [f"{r.case}, {r['dtype']}", f"{r.mb:.0f}", f"{r.ours_us:.1f}", f"{r.of_copy_speed:.2f}"]
        for _, r in run.iterrows()
    ]
    return table(["case", "MB of x", "us", "of a copy's speed"], rows) + origin(run)


def zoo() -> str:
    """What the absence of each kernel that there is costs over the cells where it was raced."""
    run = pd.read_csv(MEASURED / "zoo.csv").dropna(subset=["ratio"])
    groups = {op: by_backend(op, "sm_90a") for op in run.op.unique()}
    ours = {(op, spec.name) for op, found in groups.items() for group in found for spec in group}
    run = run[[cell in ours for cell in zip(run.op, run.kernel, strict=True)]]
    rows = [
        [
            op,
            f"`{kernel}`",
            why.partition(", without")[0],  # a kernel that there was
            str(len(cells)),
            f"{geometric(cells.ratio):.3f}",
            f"{cells.ratio.max():.3f}",
        ]
        for (op, kernel, why), cells in run.groupby(["op", "kernel", "why"], sort=True)
    ]
    return table(["op", "kernel", "cells", "of them", "geometric mean", "worst"], rows)


def every_m() -> str:
    """How often peers' times are ours, by numbers of rows: with x quantised and in bf16."""
    run, humming = pd.read_csv(MEASURED / "linear_every_m.csv"), beside_humming()
    ends = (0, 16, 64, 128, 256, 1024, 2048, 4096, 32768)
    of_run = {"over bf16": "over_bf16", "with bf16 x": "bf16_x_over_bf16"}
    of_run |= {"over fp8 by rows": "over_fp8"}
    of_humming = {"over Humming": "over_humming", "it with bf16 x": "bf16_x_over_humming"}
    rows = []
    for before, last in pairwise(ends):
        cells, theirs = (of[of.M.between(before + 1, last)] for of in (run, humming))
        ratios = [cells[column].dropna() for column in of_run.values()]
        ratios += [theirs[column] for column in of_humming.values()]
        shown = [f"{geometric(r):.2f} ({r.min():.2f})" if len(r) else "" for r in ratios]
        rows.append([f"{before + 1} to {last}", str(len(cells)), *shown])
    found = table(["M", "cells", *of_run, *of_humming], rows)
    return found + origin(pd.concat([run, humming]))


def beside_humming() -> pd.DataFrame:
    """The cells in which Humming was timed last: some of older commits, where it was not since."""
    return pd.read_csv(MEASURED / "linear_humming.csv", dtype={"commit": str})


def summary() -> str:
    """The README's tables: decode of some weights, and geometric means at all numbers of rows."""
    names = ("linear", "linear_every_m", "linear_humming", "moe_layers")
    runs = [pd.read_csv(MEASURED / f"{name}.csv", dtype={"commit": str}) for name in names]
    run, rows = runs[0], []
    for N, K in ((2304, 6144), (9216, 6144)):
        shown = [f"`linear` {N} x {K}"]
        for M in (1, 16, 64):
            (r,) = run[(M == run.M) & (N == run.N) & (K == run.K)].itertuples()
            over = f"{r.ours_over_floor:.2f}; {r.over_bf16:.1f}; {r.over_triton:.1f}"
            shown.append(f"{r.ours_us:.1f} us ({over})")
        rows.append(shown)
    decode = table(["", "M = 1", "M = 16", "M = 64"], rows)
    return f"{decode}\n{means(*runs[1:])}{origin(pd.concat(runs))}"


def means(linears: pd.DataFrame, humming: pd.DataFrame, layers: pd.DataFrame) -> str:
    """How often peers' times are ours, geometric means by rows."""
    columns = [(linears, "over_bf16"), (linears, "over_fp8"), (humming, "over_humming")]
    columns += [(layers[layers.routing == of], "over_bf16") for of in ("uniform", "skewed")]
    rows = []
    for before, last in pairwise((0, 64, 256, 2048, 32768)):
        shown = [f"{before + 1} to {last}"]
        for run, column in columns:
            of = run[run.M.between(before + 1, last)]
            ratios = of[column].dropna() if column in of else ()
            shown.append(f"{geometric(ratios):.2f}" if len(ratios) else "")
        rows.append(shown)
    heads = ("`linear` over bf16", "over fp8", "over Humming", "layer over bf16", "skewed")
    return table(["rows", *heads], rows)
