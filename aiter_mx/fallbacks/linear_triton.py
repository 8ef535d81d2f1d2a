"""The MX-FP8 linear in Triton: ``tl.dot_scaled`` over tiles, K split over workgroups if asked.

gfx950 multiplies with its scaled matrix instruction. Hopper has none: there Triton multiplies each
payload by its scale in bf16, and then the results. That is exact while every single value stays
within bf16, which scales from 2^-117 to 2^119 guarantee for any payload; beyond, large values
become infinite and tiny ones lose bits, even where the product would have been ordinary (and
Triton 3.6 reads scale byte 0 as zero).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from aiter_mx.codec import as_scale_bytes
from aiter_mx.fallbacks.triton_step import add_step
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.spec import Config
from aiter_mx.kernels.triton import OPTIONS
from aiter_mx.launch import Tensors

_REDUCE_BLOCK = 512


@triton.jit(do_not_specialize=["M"])
def linear_tile_kernel(
    x_ptr,
    xs_ptr,
    w_ptr,
    ws_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    SWAP: tl.constexpr,
    WHOLE_STEPS: tl.constexpr,
):
    """One tile of ``out[SPLIT_K, M, N]``; with SPLIT_K above 1, fp32 partial sums without bias."""
    SCALES: tl.constexpr = BLOCK_K // 32
    GROUP_M: tl.constexpr = 8  # tiles in M that follow each other, so that w is read from cache
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    group = tile // (GROUP_M * tiles_n)
    group_rows = min(tiles_m - group * GROUP_M, GROUP_M)
    tile_m = group * GROUP_M + (tile % (GROUP_M * tiles_n)) % group_rows
    tile_n = (tile % (GROUP_M * tiles_n)) // group_rows

    # Rows past the end read the last row instead, and are not stored.
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_m = tl.minimum(m, M - 1)
    row_n = tl.minimum(n, N - 1)

    split = tl.program_id(1)
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K)
    first_k = split * steps * BLOCK_K
    k = tl.arange(0, BLOCK_K)
    s = tl.arange(0, SCALES)
    x_ptrs = x_ptr + row_m[:, None] * K + first_k + k[None, :]
    w_ptrs = w_ptr + row_n[:, None] * K + first_k + k[None, :]
    xs_ptrs = xs_ptr + row_m[:, None] * (K // 32) + first_k // 32 + s[None, :]
    ws_ptrs = ws_ptr + row_n[:, None] * (K // 32) + first_k // 32 + s[None, :]

    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(steps):
        left = K - first_k - step * BLOCK_K
        acc = add_step(acc, x_ptrs, w_ptrs, xs_ptrs, ws_ptrs, k, s, left, "e4m3", SWAP, WHOLE_STEPS)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
        xs_ptrs += SCALES
        ws_ptrs += SCALES

    if SWAP:
        acc = acc.T
    if HAS_BIAS:
        acc += tl.load(bias_ptr + row_n).to(tl.float32)[None, :]
    out_ptrs = out_ptr + (split.to(tl.int64) * M + m[:, None]) * N + n[None, :]
    inside = (m[:, None] < M) & (n[None, :] < N)
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["MN"])
def add_splits_kernel(
    partial_ptr,
    bias_ptr,
    out_ptr,
    MN,
    N,
    HAS_BIAS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``out[M, N]`` from ``partial[SPLIT_K, M, N]``, added in the order of the splits."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < MN
    partial_ptrs = partial_ptr + at
    total = tl.load(partial_ptrs, mask=inside)
    for _ in tl.static_range(1, SPLIT_K):
        partial_ptrs += MN
        total += tl.load(partial_ptrs, mask=inside)
    if HAS_BIAS:
        total += tl.load(bias_ptr + at % N, mask=inside).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


def run(problem: LinearProblem, tensors: Tensors, config: Config) -> None:
    """Compute a linear, accumulated in fp32 and rounded once.

    The first call with a configuration compiles it, which takes about a second; later ones
    neither synchronise nor compile. With SPLIT_K above 1 the partial sums take SPLIT_K * M * N
    floats from torch's allocator, and are always added in the same order.
    """
    xq, xs, wq, ws, bias, out = tensors
    M, N, K, split_k = problem.M, problem.N, problem.K, config["SPLIT_K"]
    partial = out
    if split_k > 1:
        partial = torch.empty((split_k, M, N), dtype=torch.float32, device=out.device)
    grid = (triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(N, config["BLOCK_N"]), split_k)
    with torch.cuda.device_of(out):
        linear_tile_kernel[grid](
            xq,
            as_scale_bytes(xs),
            wq,
            as_scale_bytes(ws),
            bias,
            partial,
            M,
            N,
            K,
            HAS_BIAS=bias is not None and split_k == 1,
            WHOLE_STEPS=K % (config["BLOCK_K"] * split_k) == 0,
            **config,
            **OPTIONS,
        )
        if split_k > 1:
            add_splits_kernel[(triton.cdiv(M * N, _REDUCE_BLOCK),)](
                partial,
                bias,
                out,
                M * N,
                N,
                HAS_BIAS=bias is not None,
                SPLIT_K=split_k,
                BLOCK=_REDUCE_BLOCK,
                **OPTIONS,
            )
