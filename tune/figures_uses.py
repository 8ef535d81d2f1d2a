"""Tables of what is built of ops: training, models, ranks, hosts."""

from __future__ import annotations

import pandas as pd

from tune.figures_shared import MEASURED, geometric, origin, shown_us, table


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
    means = [f"{geometric(run[f'{name}_over_bf16']):.2f}" for name in over]
    rows.append(["geometric mean", "", *means, "", ""])
    columns = ["groups x N x K, rows", "TFLOPS of a step", "dgrad", "wgrad", "step"]
    columns += ["4 micro-batches", "MiB", "MiB in bf16"]
    how = "each at the clock of its own load, cold operands, graph replay, medians of windows"
    return table(columns, rows) + origin(run, how)


def host() -> str:
    """Host time of one eager call, us."""
    run = pd.read_csv(MEASURED / "host.csv")
    rows = [[r.call, f"{r.host_us:.1f}"] for _, r in run.iterrows()]
    how = "eager calls in turns, each the least of its rounds"
    return table(["call", "us on the host"], rows) + origin(run, how)


def routes() -> str:
    """CPU time of a problem that no table has, us, and of reading tables, ms."""
    run = pd.read_csv(MEASURED.parent / "amd_epyc" / "routes.csv")
    named = ["median_us", "p99_us", "call_median_us", "call_p99_us", "tables_ms"]
    rows = [
        [r.op, r.arch, *("" if pd.isna(r[name]) else f"{r[name]:.0f}" for name in named)]
        for _, r in run.iterrows()
    ]
    columns = ["op", "for", "route", "p99", "route and launch", "p99", "its tables, ms"]
    return table(columns, rows) + "\nOne core of an AMD EPYC.\n"


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
    return table(columns, rows) + f"\nOn a CPU; commit {', '.join(sorted(set(run.commit)))}.\n"


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
    return table(columns, rows) + origin(run)


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
    return table(columns, rows) + origin(run)


def invariance() -> str:
    """Times that a call takes within ``batch_invariant()`` over what it takes else."""
    run = pd.read_csv(MEASURED / "invariance.csv", dtype={"commit": str})
    batches = sorted(run.M.unique())
    rows = []
    for (op, n, k), cells in run.groupby(["op", "N", "K"], sort=False):
        at = cells.set_index("M").ratio
        rows.append([f"`{op}` {n} x {k}", *(f"{at[m]:.2f}" for m in batches)])
    return table(["N x K", *(f"M={m}" for m in batches)], rows) + origin(run)


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
            row += [shown_us(r[f"{name}_us"]) for name in ("dispatch", "bf16_dispatch", "experts")]
            row += [
                shown_us(r[f"{name}_us"]) for name in ("combine", "layer", "bf16_layer", "one_rank")
            ]
        rows.append(row)
    first = run.iloc[0]
    how = f"{first.ranks} ranks over {first.backend}, {first.hardware}"
    if timed:
        how += ", eager calls, the slowest rank, medians"
    commits = ", ".join(sorted(set(run.commit)))
    return table(columns, rows) + f"\n{how}; commit {commits}.\n"


def warmup() -> str:
    """Seconds of warming up for 1 to 32,768 rows, compilers included, and what a row compiles."""
    run = pd.read_csv(MEASURED / "warmup.csv", dtype={"commit": str, "shape": str})
    rows = [
        [f"`{r.op}` {r.shape}", f"{r.warmup_s:.0f}", str(r.objects), str(r.compiled_after)]
        for r in run.itertuples()
    ]
    heads = ["", f"s, {run.cores.iloc[0]} cores", "code objects", "compiled afterwards"]
    return table(heads, rows) + origin(run, "empty caches")
