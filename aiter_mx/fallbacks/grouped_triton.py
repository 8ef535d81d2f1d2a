"""The MX-FP8 grouped GEMM in Triton: ``tl.dot_scaled`` over tiles of whatever groups there are.

Its limits on Hopper are those of ``linear_triton``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from aiter_mx.fallbacks.triton_target import OPTIONS
from aiter_mx.numerics import as_scale_bytes


@triton.jit(do_not_specialize=["M", "G"])
def grouped_tile_kernel(
    a_ptr,
    as_ptr,
    b_ptr,
    bs_ptr,
    bias_ptr,
    out_ptr,
    starts_ptr,
    ends_ptr,
    M,
    N,
    K,
    G,
    GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WHOLE_STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile, of the group that it falls into; none where there are not so many tiles."""
    SCALES: tl.constexpr = BLOCK_K // 32
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile_m = tl.program_id(0) // tiles_n
    tile_n = tl.program_id(0) % tiles_n

    g = tl.arange(0, GROUPS)
    starts = tl.load(starts_ptr + g, mask=g < G, other=0).to(tl.int64)
    ends = tl.load(ends_ptr + g, mask=g < G, other=0).to(tl.int64)
    starts = tl.minimum(tl.maximum(starts, 0), M)
    ends = tl.minimum(tl.maximum(ends, starts), M)
    tiles = (ends - starts + BLOCK_M - 1) // BLOCK_M
    through = tl.cumsum(tiles, 0)
    group = tl.sum((through <= tile_m).to(tl.int32), 0)
    if group >= G:
        return
    mine = g == group
    first = tl.sum(tl.where(mine, starts, 0), 0)
    end = tl.sum(tl.where(mine, ends, 0), 0)
    first += (tile_m - tl.sum(tl.where(mine, through - tiles, 0), 0)) * BLOCK_M

    # Rows past the end read the last row instead, and are not stored.
    m = first + tl.arange(0, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_m = tl.minimum(m, end - 1)
    row_n = group.to(tl.int64) * N + tl.minimum(n, N - 1)
    k = tl.arange(0, BLOCK_K)
    s = tl.arange(0, SCALES)
    a_ptrs = a_ptr + row_m[:, None] * K + k[None, :]
    b_ptrs = b_ptr + row_n[:, None] * K + k[None, :]
    as_ptrs = as_ptr + row_m[:, None] * (K // 32) + s[None, :]
    bs_ptrs = bs_ptr + row_n[:, None] * (K // 32) + s[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(tl.cdiv(K, BLOCK_K)):
        if WHOLE_STEPS:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
            a_scale = tl.load(as_ptrs)
            b_scale = tl.load(bs_ptrs)
        else:
            left = K - step * BLOCK_K
            a = tl.load(a_ptrs, mask=k[None, :] < left, other=0.0)
            b = tl.load(b_ptrs, mask=k[None, :] < left, other=0.0)
            a_scale = tl.load(as_ptrs, mask=s[None, :] < left // 32, other=127)
            b_scale = tl.load(bs_ptrs, mask=s[None, :] < left // 32, other=127)
        acc = tl.dot_scaled(a, a_scale, "e4m3", b.T, b_scale, "e4m3", acc)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K
        as_ptrs += SCALES
        bs_ptrs += SCALES
    if HAS_BIAS:
        acc += tl.load(bias_ptr + row_n).to(tl.float32)[None, :]
    inside = (m[:, None] < end) & (n[None, :] < N)
    out_ptrs = out_ptr + m[:, None] * N + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside)


def grouped_triton(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
    starts: Tensor,
    ends: Tensor,
    most_tiles: int,
    config: Mapping[str, int],
) -> None:
    """``out[m] = a[m] @ b[g].T + bias[g]``, accumulated in fp32 and rounded once.

    The first call with a configuration compiles it, which takes about a second; later ones
    neither synchronise nor compile.

    Args:
        a: float8_e4m3fn ``[M, K]``, contiguous as everything else; K a multiple of 32.
        a_scale: uint8 or float8_e8m0fnu ``[M, K // 32]``.
        b: float8_e4m3fn ``[G, N, K]``.
        b_scale: uint8 or float8_e8m0fnu ``[G, N, K // 32]``.
        bias: ``[G, N]`` of bfloat16, float16 or float32, or None.
        out: ``[M, N]``, bfloat16, float16 or float32; rows in no group are left as they are.
        starts: ``[G]``, first row of each group.
        ends: ``[G]``, the row after its last.
        most_tiles: tiles of BLOCK_M rows that the groups can have together.
        config: a value for each of ``grouped_tiles.PARAMS``.
    """
    (M, K), (G, N, _) = a.shape, b.shape
    grid = (most_tiles * triton.cdiv(N, config["BLOCK_N"]),)
    with torch.cuda.device_of(out):
        grouped_tile_kernel[grid](
            a,
            as_scale_bytes(a_scale),
            b,
            as_scale_bytes(b_scale),
            bias,
            out,
            starts,
            ends,
            M,
            N,
            K,
            G,
            GROUPS=triton.next_power_of_2(G),
            HAS_BIAS=bias is not None,
            WHOLE_STEPS=K % config["BLOCK_K"] == 0,
            **config,
            **OPTIONS,
        )
