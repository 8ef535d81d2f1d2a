"""The grouped GEMM in plain torch: float64 inside, for any shape on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from aiter_mx.fallbacks.linear_torch import linear_torch


def grouped_torch(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
    starts: Tensor,
    ends: Tensor,
) -> None:
    """``out[m] = a[m] @ b[g].T + bias[g]`` of the dequantised operands, for the rows m of group g.

    On a GPU, where bounds cannot be read without waiting, each group is computed for all rows and
    kept for its own: it is a reference, not a fast path.

    Args:
        a: float8_e4m3fn ``[M, K]``.
        a_scale: uint8 or float8_e8m0fnu ``[M, K // 32]``.
        b: float8_e4m3fn ``[G, N, K]``.
        b_scale: uint8 or float8_e8m0fnu ``[G, N, K // 32]``.
        bias: ``[G, N]`` of a floating-point dtype, or None.
        out: ``[M, N]``, bfloat16, float16 or float32; rows in no group are left as they are.
        starts: ``[G]``, first row of each group.
        ends: ``[G]``, the row after its last.
    """
    M, N = out.shape
    if out.device.type == "cpu":
        for g, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            rows = slice(min(max(start, 0), M), min(max(end, 0), M))
            linear_torch(
                a[rows],
                a_scale[rows],
                b[g],
                b_scale[g],
                None if bias is None else bias[g],
                out[rows],
            )
        return
    row = torch.arange(M, device=out.device).unsqueeze(1)
    product = torch.empty((M, N), dtype=out.dtype, device=out.device)
    for g in range(b.shape[0]):
        linear_torch(a, a_scale, b[g], b_scale[g], None if bias is None else bias[g], product)
        mine = (row >= starts[g]) & (row < ends[g])
        torch.where(mine, product, out, out=out)
