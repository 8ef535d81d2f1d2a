"""The MX-FP8 linear in plain torch: float64 inside, for any shape on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from aiter_mx import invariance
from aiter_mx.codec import as_scale_bytes, dequantize_block_scaled, round_once
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.spec import Config
from aiter_mx.launch import Tensors

_CHUNK_BYTES = 2**28
_FLOAT64_BYTES = 8


def _chunk_rows(K: int) -> int:
    """Rows whose float64 values, and whose square of products, take at most 256 MiB each."""
    side = int((_CHUNK_BYTES // _FLOAT64_BYTES) ** 0.5)
    return max(1, min(side, _CHUNK_BYTES // (_FLOAT64_BYTES * max(K, 1))))


def run(problem: LinearProblem, tensors: Tensors, config: Config) -> None:
    """Compute a linear."""
    linear_torch(*tensors)


def linear_torch(
    xq: Tensor, xs: Tensor, wq: Tensor, ws: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """``out = dequantised(xq) @ dequantised(wq).T + bias``, rounded once to out's dtype.

    Values, products and sums are float64, which no scale can overflow: a NaN payload, or a scale
    byte of 255, is the only source of NaN. Memory beyond the arguments stays below 2 GiB whatever
    the shape; nothing synchronises with the host, and a graph can capture it.

    Args:
        xq: float8_e4m3fn ``[M, K]``.
        xs: uint8 or float8_e8m0fnu ``[M, K // 32]``.
        wq: float8_e4m3fn ``[N, K]``.
        ws: uint8 or float8_e8m0fnu ``[N, K // 32]``.
        bias: ``[N]`` of a floating-point dtype, or None.
        out: ``[M, N]``, bfloat16, float16 or float32, written.
    """
    xs, ws = as_scale_bytes(xs), as_scale_bytes(ws)
    rows = _chunk_rows(xq.shape[1])
    for n in range(0, wq.shape[0], rows):
        features = slice(n, n + rows)
        w = dequantize_block_scaled(wq[features], ws[features], torch.float64)
        for m in range(0, xq.shape[0], rows):
            tokens = slice(m, m + rows)
            x = dequantize_block_scaled(xq[tokens], xs[tokens], torch.float64)
            product = product_of_rows(x, w)
            if bias is not None:
                product += bias[features]
            out[tokens, features] = round_once(product, out.dtype)


def product_of_rows(x: Tensor, w: Tensor) -> Tensor:
    """``x @ w.T``; row by row where results may not depend on the batch, as BLAS adds in an order
    that depends on how many rows there are."""
    if not invariance.is_on() or len(x) < 2:
        return x @ w.T
    return torch.cat([x[row : row + 1].clone() @ w.T for row in range(len(x))])
