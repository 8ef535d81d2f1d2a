"""Times GPU work as an engine sees it: cold weights, graph replay, medians; and host time."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch

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
    times: list[float] = [s.elapsed_time(e) for s, e in zip(events[::2], events[1::2], strict=True)]
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


def random_mx(rows: int, K: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Payload ``[rows, K]`` over the whole e4m3 range and scales ``[rows, K // 32]``, all random.

    They are drawn on the device: timing zeros, or one scale, could flatter a kernel.
    """
    payload = torch.randint(0, 127, (rows, K), device=device, dtype=torch.uint8)
    payload |= torch.randint(0, 2, (rows, K), device=device, dtype=torch.uint8) << 7
    scale = torch.randint(121, 134, (rows, K // 32), device=device, dtype=torch.uint8)
    return payload.view(torch.float8_e4m3fn), scale


def commit() -> str:
    """The commit that is being measured; ``AITER_MX_COMMIT`` names it where git cannot."""
    named = os.environ.get("AITER_MX_COMMIT")
    if named:
        return named
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
