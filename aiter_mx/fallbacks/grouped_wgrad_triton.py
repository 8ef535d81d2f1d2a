"""The gradient of a grouped GEMM's weights in Triton: ``tl.dot_scaled`` along each group's columns.

Its limits on Hopper are those of ``linear_triton``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from aiter_mx.codec import as_scale_bytes
from aiter_mx.fallbacks.grouped_wgrad_torch import columns_of_groups
from aiter_mx.kernels.grouped_wgrad import GroupedWgradProblem
from aiter_mx.kernels.spec import Config
from aiter_mx.kernels.triton import OPTIONS
from aiter_mx.launch import Tensors


@triton.jit(do_not_specialize=["M"])
def grouped_wgrad_kernel(
    grad_ptr,
    grad_scale_ptr,
    x_ptr,
    x_scale_ptr,
    out_ptr,
    begins_ptr,
    counts_ptr,
    M,
    N,
    K,
    GRAD_FORMAT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """One tile of one group."""
    SCALES: tl.constexpr = BLOCK_M // 32
    tiles_k = tl.cdiv(K, BLOCK_K)
    tiles = tl.cdiv(N, BLOCK_N) * tiles_k
    group = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    begin = tl.load(begins_ptr + group).to(tl.int64)
    count = tl.load(counts_ptr + group).to(tl.int64)

    n = (tile // tiles_k).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = (tile % tiles_k).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    row_n, row_k = tl.minimum(n, N - 1), tl.minimum(k, K - 1)
    m = tl.arange(0, BLOCK_M)
    s = tl.arange(0, SCALES)
    grad_ptrs = grad_ptr + row_n[:, None] * M + begin + m[None, :]
    x_ptrs = x_ptr + row_k[:, None] * M + begin + m[None, :]
    grad_scale_ptrs = grad_scale_ptr + row_n[:, None] * (M // 32) + begin // 32 + s[None, :]
    x_scale_ptrs = x_scale_ptr + row_k[:, None] * (M // 32) + begin // 32 + s[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for step in range(tl.cdiv(count, BLOCK_M)):
        left = count - step * BLOCK_M
        grad = tl.load(grad_ptrs, mask=m[None, :] < left, other=0.0)
        x = tl.load(x_ptrs, mask=m[None, :] < left, other=0.0)
        grad_scale = tl.load(grad_scale_ptrs, mask=s[None, :] * 32 < left, other=127)
        x_scale = tl.load(x_scale_ptrs, mask=s[None, :] * 32 < left, other=127)
        acc = tl.dot_scaled(grad, grad_scale, GRAD_FORMAT, x.T, x_scale, "e4m3", acc)
        grad_ptrs += BLOCK_M
        x_ptrs += BLOCK_M
        grad_scale_ptrs += SCALES
        x_scale_ptrs += SCALES
    inside = (n[:, None] < N) & (k[None, :] < K)
    out_ptrs = out_ptr + (group.to(tl.int64) * N + n[:, None]) * K + k[None, :]
    if ACCUMULATE:
        acc += tl.load(out_ptrs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside)


def run(problem: GroupedWgradProblem, tensors: Tensors, config: Config) -> None:
    """Compute the gradient, accumulated in fp32 and rounded once.

    The first call with a configuration compiles it, which takes about a second; later ones
    neither synchronise nor compile.
    """
    grad, grad_scale, x, x_scale, before, out, starts, through = tensors
    N, K = problem.N, problem.K
    tiles = triton.cdiv(N, config["BLOCK_N"]) * triton.cdiv(K, config["BLOCK_K"])
    with torch.cuda.device_of(out):
        grouped_wgrad_kernel[(problem.G * tiles,)](
            grad,
            as_scale_bytes(grad_scale),
            x,
            as_scale_bytes(x_scale),
            out,
            *columns_of_groups(problem, starts, before, through),
            problem.M,
            N,
            K,
            GRAD_FORMAT=problem.grad_format,
            ACCUMULATE=bool(problem.accumulate),
            **config,
            **OPTIONS,
        )
