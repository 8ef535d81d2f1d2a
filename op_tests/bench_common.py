"""What the benchmarks share: cold-weight timing by graph replay, host timing, saved tables."""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "docs" / "measured"
COLD_BYTES = 512 << 20
"""Buffers are rotated through this much memory: several times the last-level cache, which is
60 MB on an H200 and 256 MB on an MI355X."""


def copies_to_stay_cold(size_bytes: int) -> int:
    """How many copies of a buffer to rotate through so that none is still cached when reused."""
    return max(2, -(-COLD_BYTES // max(size_bytes, 1 << 20)))


def time_graph_us(calls: Sequence[Callable[[], object]], replays: int = 15) -> float:
    """Time of one call in microseconds: all captured into one graph, median over its replays.

    Args:
        calls: one for each copy of the buffers, so that weights are cold.
        replays: timed replays, after three that are not.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * (replays + 3))]
        for start, end in zip(events[::2], events[1::2], strict=True):
            start.record()
            graph.replay()
            end.record()
        stream.synchronize()
    times = [s.elapsed_time(e) for s, e in zip(events[::2], events[1::2], strict=True)]
    return median(times[3:]) * 1e3 / len(calls)


def time_host_us(call: Callable[[], object], calls: int = 200, rounds: int = 50) -> float:
    """Host time of one call in microseconds, the GPU's queue never full: median over rounds."""
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
        torch.cuda.synchronize()
    return median(times)


def gpu_name() -> str:
    """The GPU's name as a folder name, such as ``nvidia_h200``."""
    return re.sub(r"\W+", "_", torch.cuda.get_device_name().lower()).strip("_")


def commit() -> str:
    """The commit that is being measured; ``AITER_MX_COMMIT`` names it where git cannot."""
    named = os.environ.get("AITER_MX_COMMIT")
    if named:
        return named
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


def report(title: str, rows: Sequence[dict[str, object]], save_as: str | None) -> None:
    """Print the rows as a table and, given a name, save them under ``docs/measured/<gpu>/``."""
    table = Table(title=f"{title}, {torch.cuda.get_device_name()}, {commit()}")
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=200).print(table)
    if save_as is not None:
        folder = MEASURED / gpu_name()
        folder.mkdir(parents=True, exist_ok=True)
        frame = pd.DataFrame(rows).assign(commit=commit(), date=datetime.date.today().isoformat())
        frame.to_csv(folder / f"{save_as}.csv", index=False, float_format="%.5g")
