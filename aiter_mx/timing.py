"""Times GPU work as an engine sees it: cold weights, graph replay, medians; and host time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TypeAlias

import torch

__all__ = [
    "COLD_BYTES",
    "GraphedCalls",
    "copies_to_stay_cold",
    "random_mx",
    "time_graph_us",
    "time_hosts_us",
]

Statistic: TypeAlias = Callable[[Sequence[float]], float]

COLD_BYTES = 512 << 20
"""Buffers are rotated through this much memory: several times the last-level cache, which is
60 MB on an H200 and 256 MB on an MI355X."""


def copies_to_stay_cold(size_bytes: int) -> int:
    """How many copies of a buffer to rotate through so that none is still cached when reused."""
    return max(2, -(-COLD_BYTES // max(size_bytes, 1 << 20)))


class GraphedCalls:
    """Calls captured into one graph, to be replayed and timed as often as wanted.

    Attributes:
        calls: how many they are.
    """

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        """Run the first two calls, so that nothing is built in the capture, and capture all.

        Args:
            calls: one for each copy of the buffers, so that weights are cold.
        """
        self.calls = len(calls)
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())  # which may still draw operands
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            for call in calls[:2]:
                call()
            self._stream.synchronize()
            # torch.cuda.graph would also collect garbage and empty the allocator's cache.
            self._graph.capture_begin()
            try:
                for call in calls:
                    call()
            finally:
                self._graph.capture_end()

    def time_us(self, replays: int = 15, warm: int = 3, of: Statistic = median) -> float:
        """Time of one call in microseconds: median over the replays, or another statistic, after
        some that are not timed."""
        with torch.cuda.stream(self._stream):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * (replays + warm))]
            for start, end in zip(events[::2], events[1::2], strict=True):
                start.record()
                self._graph.replay()
                end.record()
            self._stream.synchronize()
        pairs = zip(events[::2], events[1::2], strict=True)
        times: list[float] = [start.elapsed_time(end) for start, end in pairs]
        return of(times[warm:]) * 1e3 / self.calls


def time_graph_us(calls: Sequence[Callable[[], object]], replays: int = 15) -> float:
    """Time of one call in microseconds: all captured into one graph, median over its replays.

    Args:
        calls: one for each copy of the buffers, so that weights are cold.
        replays: timed replays, after three that are not.
    """
    return GraphedCalls(calls).time_us(replays)


def time_hosts_us(
    calls: Sequence[Callable[[], object]], repeats: int = 200, rounds: int = 50
) -> list[float]:
    """Host time of one call of each in microseconds, the GPU's queue never full.

    The calls take turns, and the least of a call's rounds is its time: whatever disturbs a host
    makes it slower.
    """
    for call in calls:
        for _ in range(repeats):
            call()
    torch.cuda.synchronize()
    least = [math.inf] * len(calls)
    for _ in range(rounds):
        for at, call in enumerate(calls):
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            least[at] = min(least[at], (time.perf_counter() - start) / repeats * 1e6)
            torch.cuda.synchronize()
    return least


def random_mx(rows: int, K: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Payload ``[rows, K]`` over the whole e4m3 range and scales ``[rows, K // 32]``, all random.

    They are drawn on the device: timing zeros, or one scale, could flatter a kernel.
    """
    if device.type == "meta":  # drawing there imports a compiler of torch's, for seconds
        payload = torch.empty((rows, K), device=device, dtype=torch.float8_e4m3fn)
        return payload, torch.empty((rows, K // 32), device=device, dtype=torch.uint8)
    payload = torch.randint(0, 127, (rows, K), device=device, dtype=torch.uint8)
    payload |= torch.randint(0, 2, (rows, K), device=device, dtype=torch.uint8) << 7
    scale = torch.randint(121, 134, (rows, K // 32), device=device, dtype=torch.uint8)
    return payload.view(torch.float8_e4m3fn), scale
