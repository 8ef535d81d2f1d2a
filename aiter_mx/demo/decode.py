"""One decode linear on random data, timed and checked against float64."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import aiter_mx

BLOCK = 32
_GPU_CALLS = 50
_ROWS_AT_ONCE = 512  # of weights that are held in float64


@dataclass(frozen=True)
class Checked:
    """How a linear did.

    Attributes:
        relative_error: norm of the error over the norm of the float64 result.
        worst: the largest error of an element over what fp32 accumulation and one rounding to
            bf16 may cost it; above 1 is wrong.
        seconds: one call; on a GPU the mean of many in a graph, with weights that stay cached.
    """

    relative_error: float
    worst: float
    seconds: float


def random_mx(rows: int, K: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Payload ``[rows, K]`` over the whole e4m3 range and a random scale for each block of 32."""
    magnitude = torch.randint(0, 0x7F, (rows, K), generator=generator, dtype=torch.uint8)
    sign = torch.randint(0, 2, (rows, K), generator=generator, dtype=torch.uint8) << 7
    scale = torch.randint(121, 134, (rows, K // BLOCK), generator=generator, dtype=torch.uint8)
    return (magnitude | sign).view(torch.float8_e4m3fn), scale


def run_decode(M: int, N: int, K: int, device: torch.device, seed: int) -> Checked:
    """Run ``aiter_mx.linear`` once at a shape and check every element of the result."""
    generator = torch.Generator().manual_seed(seed)
    x, w = random_mx(M, K, generator), random_mx(N, K, generator)
    xq, xs, wq, ws = (tensor.to(device) for tensor in (*x, *w))
    call = partial(aiter_mx.linear, xq, xs, wq, ws)
    out = call()
    seconds = _time(call, device)

    x64 = _dequantize64(*x)
    expected, total = torch.empty(M, N, dtype=torch.float64), torch.empty(M, N, dtype=torch.float64)
    for first in range(0, N, _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        w64 = _dequantize64(w[0][rows], w[1][rows])
        expected[:, rows], total[:, rows] = x64 @ w64.T, x64.abs() @ w64.abs().T
    error = (out.double().cpu() - expected).abs()
    # Rounding errors of K additions grow as sqrt(K); half a unit in bf16's last place is 2^-8.
    allowed = (8 + math.sqrt(K)) * 2.0**-23 * total + 2.0**-8 * expected.abs()
    return Checked(
        relative_error=float(error.norm() / expected.norm()),
        worst=float((error / allowed).nan_to_num(math.inf).max()),
        seconds=seconds,
    )


def _dequantize64(payload: Tensor, scale: Tensor) -> Tensor:
    blocks = payload.double().view(*scale.shape, BLOCK)
    exponent = (scale.int() - 127).unsqueeze(-1)
    return torch.ldexp(blocks, exponent).view(payload.shape)


def _time(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        return _time_replay(call)
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _time_replay(call: Callable[[], object]) -> float:
    """Seconds of one of many calls in a graph, which leaves the host's time out."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_GPU_CALLS):
            call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # the first replay uploads the graph
        begin.record()
        graph.replay()
        end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3 / _GPU_CALLS
