"""Writes the tables of figures in README.md and docs/ from the CSVs in docs/measured/.

    python tune/figures.py           # writes them
    python tune/figures.py --check   # exits with 1 where one is not what the CSVs say

A table stands between ``<!-- figures: NAME -->`` and ``<!-- end -->``. Every figure in prose
belongs in such a table, so that no document can say what no benchmark wrote.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ROOT / "docs" / "measured" / "nvidia_h200"
_BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


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
    return _table(["N x K", "reading", *(f"M={m}" for m in batches)], rows) + _origin(run)


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
            rows.append(["by Triton", *(_us(at.triton_us.get(m)) for m in tokens)])
        if routing == "uniform" and at.bf16_us.notna().any():
            rows.append(["by torch in bf16", *(_us(at.bf16_us.get(m)) for m in tokens)])
    return _table(["", *(f"M={m}" for m in tokens)], rows) + _origin(run)


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
    means = (f"{_geometric(at.over_bf16):.2f} ({_geometric(at.over_gemms):.2f})" for at in each)
    rows.append(["geometric mean", *means])
    if "over_humming" in run:
        theirs = (at.over_humming.dropna() for at in each)
        least = (f"{_geometric(of):.2f} ({of.min():.2f})" if len(of) else "" for of in theirs)
        rows.append(["Humming's two products over our layer, and least", *least])
    launches = (f"{_geometric(at.over_launches):.2f} ({at.over_launches.max():.2f})" for at in each)
    rows.append(["our time over our launches', and worst", *launches])
    return _table(["", *(f"M={m}" for m in tokens)], rows) + _origin(run)


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
    return _table(heads, rows) + _origin(pd.concat([whole, few]))


def warmup() -> str:
    """Seconds of warming up for 1 to 32,768 rows, compilers included, and what a row compiles."""
    run = pd.read_csv(MEASURED / "warmup.csv", dtype={"commit": str, "shape": str})
    rows = [
        [f"`{r.op}` {r.shape}", f"{r.warmup_s:.0f}", str(r.objects), str(r.compiled_after)]
        for r in run.itertuples()
    ]
    heads = ["", f"s, {run.cores.iloc[0]} cores", "code objects", "compiled afterwards"]
    return _table(heads, rows) + _origin(run, "empty caches")


def hand_overs() -> str:
    """Steps of the linear's time from M to M + 1 rows, where it launches something else."""
    run = pd.read_csv(MEASURED / "linear_hand_overs.csv", dtype={"commit": str})
    rows = []
    for before, last in pairwise((0, 16, 64, 128, 256, 1024, 2048, 4096, 32768)):
        cells = run[run.M.between(before + 1, last)]
        if len(cells):
            steps = f"{_geometric(cells.step):.3f}", f"{_geometric(cells.bf16_step):.3f}"
            worst = f"{cells.step.max():.2f}", f"{cells.step.min():.2f}"
            counts = (cells.over_bar > 1).sum(), (cells.step < 1 / 1.05).sum()
            rows.append(
                [f"{before + 1} to {last}", str(len(cells)), *steps, *worst, *map(str, counts)]
            )
    columns = ["M", "cells", "step", "bf16's", "largest", "least", "above its bar"]
    columns += ["below 1 / 1.05"]
    return _table(columns, rows) + _origin(run, "both sides in turns, cold weights, medians")


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
        rows.append([name, str(len(times)), f"{_geometric(times):.3f}", f"{times.max():.2f}"])
    return _table(["", "cells", "geometric mean", "worst"], rows) + _origin(run)


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
    return _table([*columns, "fp8 by row, no MX", "Triton"], rows) + _origin(run)


def few_rows() -> str:
    """Few rows a group: how many times our time bf16 takes, over all shapes, and the least."""
    run = pd.read_csv(MEASURED / "grouped_few_rows.csv", dtype={"commit": str})
    forms = {"": "over_bf16", ", masked": "masked_over_bf16"}
    lines = {
        f"{spread}{form}": cells.groupby("rows")[column]
        for spread, cells in run.groupby("spread", sort=False)
        for form, column in forms.items()
    }
    return _by_column("rows a group", lines, min) + _origin(run)


def blocks() -> str:
    """Lists in blocks of 64: their time over that of our own blocks, over layers, and worst."""
    run = pd.read_csv(MEASURED / "moe_blocks.csv", dtype={"commit": str})
    lines = {
        f"{part} GEMM, {routing}": cells.groupby("M").over_own
        for (part, routing), cells in run.groupby(["part", "routing"], sort=False)
    }
    return _by_column("tokens", lines, max) + _origin(run)


def values() -> str:
    """One extreme row: the time with it over that without, over rows and shapes, and worst."""
    run = pd.read_csv(MEASURED / "values.csv", dtype={"commit": str})
    lines = {
        f"`{op}`, in {place}": cells.groupby("kind", sort=False).ratio
        for (op, place), cells in run.groupby(["op", "place"], sort=False)
    }
    return _by_column("a row of", lines, max) + _origin(run)


def training() -> str:
    """Training: a step's TFLOPS, and times over torch's bf16 of its products and of steps."""
    run = pd.read_csv(MEASURED / "training.csv")
    over = ("dgrad", "wgrad", "step", "batches_4")
    rows = [
        [f"{r.G} x {r.N} x {r.K}, {r['mode']}", f"{r.step_tflops:.0f}"]
        + [f"{r[f'{name}_over_bf16']:.2f}" for name in over]
        + [f"{r.step_mib:.0f}", f"{r.step_bf16_mib:.0f}"]
        for _, r in run.iterrows()
    ]
    means = [f"{_geometric(run[f'{name}_over_bf16']):.2f}" for name in over]
    rows.append(["geometric mean", "", *means, "", ""])
    columns = ["groups x N x K, rows", "TFLOPS of a step", "dgrad", "wgrad", "step"]
    columns += ["4 micro-batches", "MiB", "MiB in bf16"]
    how = "each at the clock of its own load, cold operands, graph replay, medians of windows"
    return _table(columns, rows) + _origin(run, how)


def quantize() -> str:
    """Quantisation: us, and the share of a device copy's speed."""
    run = pd.read_csv(MEASURED / "quantize.csv")
    rows = [
        [f"{r.case}, {r['dtype']}", f"{r.mb:.0f}", f"{r.ours_us:.1f}", f"{r.of_copy_speed:.2f}"]
        for _, r in run.iterrows()
    ]
    return _table(["case", "MB of x", "us", "of a copy's speed"], rows) + _origin(run)


def host() -> str:
    """Host time of one eager call, us."""
    run = pd.read_csv(MEASURED / "host.csv")
    rows = [[r.call, f"{r.host_us:.1f}"] for _, r in run.iterrows()]
    how = "eager calls in turns, each the least of its rounds"
    return _table(["call", "us on the host"], rows) + _origin(run, how)


def routes() -> str:
    """CPU time of a problem that no table has, us, and of reading tables, ms."""
    run = pd.read_csv(MEASURED.parent / "amd_epyc" / "routes.csv")
    named = ["median_us", "p99_us", "call_median_us", "call_p99_us", "tables_ms"]
    rows = [
        [r.op, r.arch, *("" if pd.isna(r[name]) else f"{r[name]:.0f}" for name in named)]
        for _, r in run.iterrows()
    ]
    columns = ["op", "for", "route", "p99", "route and launch", "p99", "its tables, ms"]
    return _table(columns, rows) + "\nOne core of an AMD EPYC.\n"


def perplexity() -> str:
    """Small language models, trained on the spot: perplexity of bytes in both formats."""
    run = pd.read_csv(MEASURED.parent / "amd_epyc" / "perplexity.csv", dtype={"commit": str})
    rows = [
        [
            r.model,
            f"{r.parameters / 1e6:.2f}",
            str(r.layers_in_mxfp8),
            f"{r.bf16:.3f}",
            f"{r.mxfp8:.3f}",
            f"{r.ratio:.4f}",
        ]
        for _, r in run.iterrows()
    ]
    columns = ["model", "million parameters", "layers in MX-FP8", "bf16", "MX-FP8", "ratio"]
    return _table(columns, rows) + f"\nOn a CPU; commit {', '.join(sorted(set(run.commit)))}.\n"


def model() -> str:
    """Whole models: ms of a step on each side, and GiB while it runs."""
    run = pd.read_csv(MEASURED / "model.csv", dtype={"commit": str})
    keys, rows = ["model", "phase", "batch", "tokens"], []
    peers = [name for name in ("torchao",) if name in set(run.side)]
    for (name, phase, batch, tokens), cells in run.groupby(keys, sort=False):
        at = cells.set_index("side")
        if not {"ours", "bf16"} <= set(at.index):
            continue
        decode = f"decode, batch {batch}, context {tokens}"
        times = f"{at.ms['ours']:.2f}", f"{at.ms['bf16']:.2f}"
        row = [name, decode if phase == "decode" else f"prefill of {tokens}", *times]
        row += [f"{at.ms['bf16'] / at.ms['ours']:.2f}"]
        row += [f"{at.ms[name]:.2f}" if name in at.index else "" for name in peers]
        rows.append([*row, *(f"{at.memory_gib[side]:.1f}" for side in ("ours", "bf16"))])
    columns = ["model", "step", "ms", "bf16", "times faster"]
    columns += [*(f"{name} fp8" for name in peers), "GiB", "of bf16"]
    return _table(columns, rows) + _origin(run)


def capacity() -> str:
    """Expert layers over buffers with room for more tokens: us, and times of those that count."""
    run = pd.read_csv(MEASURED / "capacity.csv", dtype={"commit": str})
    rows = [
        [
            str(r.M),
            f"{r.fused_moe_us:.1f}",
            f"{r.num_tokens_us:.1f} ({r.num_tokens_over:.2f})",
            f"{r.quantised_us:.1f} ({r.quantised_over:.2f})",
            f"{r.masked_us:.1f} ({r.masked_over:.2f})",
        ]
        for _, r in run.astype({"M": object}).iterrows()
    ]
    room = f"{run.capacity.iloc[0]} times the room"
    columns = ["tokens", "us", f"`num_tokens`, {room}", "quantised", f"masked, {room}"]
    return _table(columns, rows) + _origin(run)


def invariance() -> str:
    """Times that a call takes within ``batch_invariant()`` over what it takes else."""
    run = pd.read_csv(MEASURED / "invariance.csv", dtype={"commit": str})
    batches = sorted(run.M.unique())
    rows = []
    for (op, n, k), cells in run.groupby(["op", "N", "K"], sort=False):
        at = cells.set_index("M").ratio
        rows.append([f"`{op}` {n} x {k}", *(f"{at[m]:.2f}" for m in batches)])
    return _table(["N x K", *(f"M={m}" for m in batches)], rows) + _origin(run)


def distributed() -> str:
    """Experts on several ranks: bytes of a token there and back, and us where GPUs carried them."""
    folders = MEASURED.parent
    found = sorted(folders.glob("nvidia_*/distributed.csv"))
    path = found[-1] if found else folders / "amd_epyc" / "distributed.csv"
    run = pd.read_csv(path, dtype={"commit": str})
    timed = "layer_us" in run.columns
    columns = ["experts, of a token, H x I", "tokens of a rank", "bytes there", "in bf16", "back"]
    if timed:
        columns += ["dispatch, us", "in bf16", "experts", "combine", "layer", "in bf16", "one rank"]
    rows = []
    for _, r in run.iterrows():
        row = [f"{r.E}, {r.top_k}, {r.H} x {r.I}", str(r.M)]
        row += [f"{r[name]:.0f}" for name in ("bytes", "bf16_bytes", "back_bytes")]
        if timed:
            row += [_us(r[f"{name}_us"]) for name in ("dispatch", "bf16_dispatch", "experts")]
            row += [_us(r[f"{name}_us"]) for name in ("combine", "layer", "bf16_layer", "one_rank")]
        rows.append(row)
    first = run.iloc[0]
    how = f"{first.ranks} ranks over {first.backend}, {first.hardware}"
    if timed:
        how += ", eager calls, the slowest rank, medians"
    commits = ", ".join(sorted(set(run.commit)))
    return _table(columns, rows) + f"\n{how}; commit {commits}.\n"


def zoo() -> str:
    """What each kernel's absence costs over the cells where it was raced."""
    run = pd.read_csv(MEASURED / "zoo.csv").dropna(subset=["ratio"])
    rows = [
        [
            op,
            f"`{kernel}`",
            why,
            str(len(cells)),
            f"{_geometric(cells.ratio):.3f}",
            f"{cells.ratio.max():.3f}",
        ]
        for (op, kernel, why), cells in run.groupby(["op", "kernel", "why"], sort=True)
    ]
    return _table(["op", "kernel", "cells", "of them", "geometric mean", "worst"], rows)


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
        shown = [f"{_geometric(r):.2f} ({r.min():.2f})" if len(r) else "" for r in ratios]
        rows.append([f"{before + 1} to {last}", str(len(cells)), *shown])
    table = _table(["M", "cells", *of_run, *of_humming], rows)
    return table + _origin(pd.concat([run, humming]))


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
    decode = _table(["", "M = 1", "M = 16", "M = 64"], rows)
    return f"{decode}\n{means(*runs[1:])}{_origin(pd.concat(runs))}"


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
            shown.append(f"{_geometric(ratios):.2f}" if len(ratios) else "")
        rows.append(shown)
    heads = ("`linear` over bf16", "over fp8", "over Humming", "layer over bf16", "skewed")
    return _table(["rows", *heads], rows)


FIGURES: dict[str, Callable[[], str]] = {
    each.__name__: each
    for each in (
        *(linear, moe, grouped, training, quantize, host, routes, perplexity, model, capacity),
        *(invariance, distributed, zoo, every_m, summary, moe_layers, hand_overs, variants),
        *(few_rows, blocks, values, warmup, promoted),
    )
}


def _us(value: float | None) -> str:
    return "" if value is None or pd.isna(value) else f"{value:.1f}"


def _geometric(ratios: Iterable[float]) -> float:
    logs = pd.Series(ratios, dtype=float)
    return float(logs.prod() ** (1 / len(logs)))


def _by_column(head: str, lines: Mapping[str, Any], extreme: Callable[..., float]) -> str:
    """A line for each name: the geometric mean of each of its groups, and the extreme."""
    columns = list(dict.fromkeys(name for groups in lines.values() for name, _ in groups))
    rows = []
    for name, groups in lines.items():
        of = dict(iter(groups))
        shown = (
            f"{_geometric(of[c]):.2f} ({extreme(of[c]):.2f})" if c in of else "" for c in columns
        )
        rows.append([name, *shown])
    return _table([head, *map(str, columns)], rows)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _origin(run: pd.DataFrame, how: str = "cold operands, graph replay, medians") -> str:
    commits = ", ".join(sorted(set(run.commit.astype(str))))
    return f"\nOne H200, {how}; commit {commits}.\n"


def filled(text: str) -> str:
    """``text`` with every table of figures made anew.

    Raises:
        KeyError: a marker names no table.
    """
    return _BLOCK.sub(lambda found: f"{found[1]}\n{FIGURES[found[2]]()}\n{found[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if stale")
    check = parser.parse_args().check
    stale = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        before = page.read_text(encoding="utf-8")
        after = filled(before)
        if after != before:
            stale.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(after, encoding="utf-8")
    if stale:
        print(f"{'stale' if check else 'written'}: {', '.join(stale)}")
    sys.exit(bool(check and stale))


if __name__ == "__main__":
    main()
