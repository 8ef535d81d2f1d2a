"""Speed of the gfx950 simulator on one core, translation apart, with checks and without.

    python -m op_tests.bench.sim [--only products] [--save]

Seconds are processor time of the launch, of all threads together, in the best of a few runs.
"""

from __future__ import annotations

import argparse
import datetime
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch

import aiter_mx
from aiter_mx.runtimes import sim
from aiter_mx.sim.program import SimOptions
from aiter_mx.sim.report import LaunchReport
from aiter_mx.tuning.origin import commit
from op_tests.bench.common import MEASURED, cpu_name, folder_name, show
from op_tests.mx_reference import random_mx
from op_tests.sim.tools import Array, launch, program

RUNS = 5
CHAINS = """
KERNEL(256) chains(const float* in, float* out) {
    float x = in[lane_id()], sums[8] = {};
    for (int i = 0; i < 500; ++i)
        for (int j = 0; j < 8; ++j)
            sums[j] = __builtin_fmaf(x, sums[j] + j, (float)i);
    for (int j = 0; j < 8; ++j)
        x += sums[j];
    out[group_id() * 256 + lane_id()] = x;
}
"""
PRODUCTS = """
typedef __bf16 bf16x8 __attribute__((ext_vector_type(8)));
KERNEL(64) bf16(const u32x4* in, f32x4* out, int count) {
    bf16x8 a = __builtin_bit_cast(bf16x8, in[lane_id()]);
    f32x4 sums = {};
    for (int i = 0; i < count; ++i)
        sums = __builtin_amdgcn_mfma_f32_16x16x32_bf16(a, a, sums, 0, 0, 0);
    out[group_id() * 64 + lane_id()] = sums;
}
KERNEL(64) fp8(const u32x4* in, f32x4* out, int count) {
    u32x4 x = in[lane_id()];
    i32x8 a = {(int)x.x, (int)x.y, (int)x.z, (int)x.w, (int)x.w, (int)x.z, (int)x.y, (int)x.x};
    f32x4 sums = {};
    for (int i = 0; i < count; ++i)
        sums = __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(a, a, sums, 0, 0, 0, 127, 0, 127);
    out[group_id() * 64 + lane_id()] = sums;
}
"""
Launch = Callable[[SimOptions], LaunchReport]


def chains(options: SimOptions) -> LaunchReport:
    """Vector arithmetic and nothing else."""
    data, out = np.ones(256, np.float32), np.zeros(16 * 256, np.float32)
    return launch(program(CHAINS), "chains", 16, 256, [data, out], options=options)


def gemm() -> Launch:
    """A scaled fp8 GEMM of 256 x 512 x 2048 through LDS."""
    rng = np.random.default_rng(0)
    M, N, K = 256, 512, 2048
    tensors: list[Array | int | float] = []
    for rows in (M, N):
        tensors.append(rng.integers(0, 126, (rows, K), dtype=np.uint8))
        tensors.append(rng.integers(120, 134, (rows, K // 32), dtype=np.uint8))
    arguments = [*tensors, np.zeros((M, N), np.float32), M, N, K]
    return lambda options: launch(
        program("matrix.cu"), "gemm", (M // 64, N // 64, 1), 256, arguments, options=options
    )


def products(kind: str) -> Launch:
    """Matrix products of one type, each of them added to the last."""
    data = np.random.default_rng(0).integers(0, 1 << 32, 256, dtype=np.uint32) & 0x3F3F3F3F
    out, count = np.zeros(8 * 256, np.float32), 16_000 // (4 if kind == "fp8" else 1)
    return lambda options: launch(
        program(PRODUCTS), kind, 8, 64, [data, out, count], options=options
    )


def linear(M: int) -> Launch:
    """The package's op at 2304 x 6144."""
    generator = torch.Generator().manual_seed(0)
    operands = [t for rows in (M, 2304) for t in random_mx(rows, 6144, generator)]

    def run(options: SimOptions) -> LaunchReport:
        os.environ["AITER_MX_SIM_STRICT"] = str(int(options.strict))
        with aiter_mx.simulate("gfx950"):
            aiter_mx.linear(*operands)
        report = sim.last_report()
        assert report is not None
        return report

    return run


def seconds(run: Launch, options: SimOptions) -> tuple[float, LaunchReport]:
    """Processor time of the fastest run."""
    report = run(options)  # translates
    best = float("inf")
    for _ in range(RUNS):
        begin = time.process_time()
        report = run(options)
        best = min(best, time.process_time() - begin)
    return best, report


def draw(frame: pd.DataFrame, path: Path) -> None:
    """A picture of the seconds, where matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed (pip install 'aiter-mx[report]')")
        return
    matplotlib.use("agg")
    wide = frame.pivot(index="launch", columns="checks", values="seconds") * 1e3
    axes = wide.plot.barh(figsize=(8, 3), title=f"Simulated launches, one core of {cpu_name()}")
    axes.set(xlabel="processor time, ms", ylabel="")
    axes.figure.tight_layout()
    axes.figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--save", action="store_true", help="write docs/measured/<cpu>/simulator")
    parser.add_argument("--only", default="", help="launches that have this in their names")
    options = parser.parse_args()
    launches: dict[str, Launch] = {
        "vector arithmetic": chains,
        "bf16 products 16x16x32": products("bf16"),
        "scaled fp8 products 16x16x128": products("fp8"),
        "scaled-MFMA GEMM 256x512x2048": gemm(),
        "linear 2304x6144, M=1": linear(1),
        "linear 2304x6144, M=16": linear(16),
    }
    rows = []
    for name, run in launches.items():
        if options.only not in name:
            continue
        for strict in (False, True):
            time_s, report = seconds(run, SimOptions(strict=strict, threads=1))
            rows.append({
                "launch": name,
                "checks": "strict" if strict else "off",
                "seconds": time_s,
                "million_wave_instructions_per_s": report.instructions / time_s / 1e6,
                "gmac_per_s": report.mfma_macs / time_s / 1e9,
            })  # fmt: skip
    show(f"One core of {cpu_name()}", rows)
    if options.save:
        folder = MEASURED / folder_name(cpu_name())
        folder.mkdir(parents=True, exist_ok=True)
        frame = pd.DataFrame(rows).assign(commit=commit(), date=datetime.date.today().isoformat())
        saved = folder / "simulator.csv"
        if options.only and saved.exists():  # what was not run stays as it was
            others = pd.read_csv(saved)
            frame = pd.concat([others[~others["launch"].isin(frame["launch"])], frame])
        frame.to_csv(saved, index=False, float_format="%.4g")
        draw(frame, folder / "simulator.png")


if __name__ == "__main__":
    main()
