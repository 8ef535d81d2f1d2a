"""The MX-FP8 grouped GEMM in Triton: ``tl.dot_scaled`` over tiles of whatever groups there are.

Its limits on Hopper are those of ``linear_triton``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from aiter_mx.codec import as_scale_bytes
from aiter_mx.fallbacks.grouped_gemm_torch import (
    first_rows_of_out,
    groups_of_ranges,
    ranges,
)
from aiter_mx.fallbacks.triton_step import add_step
from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from aiter_mx.kernels.spec import Config
from aiter_mx.kernels.triton import OPTIONS
from aiter_mx.launch import Tensors


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
    of_out_ptr,
    owners_ptr,
    M,
    N,
    K,
    G,
    GROUPS: tl.constexpr,
    A_FORMAT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UNPADS: tl.constexpr,
    RUNS: tl.constexpr,
    WHOLE_STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile, of the group that it falls into; none where there are not so many tiles.

    With RUNS G is how many ranges of rows there may be, and each has its group.
    """
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
    owner = tl.load(owners_ptr + group) if RUNS else group
    row_n = owner.to(tl.int64) * N + tl.minimum(n, N - 1)
    k = tl.arange(0, BLOCK_K)
    s = tl.arange(0, SCALES)
    a_ptrs = a_ptr + row_m[:, None] * K + k[None, :]
    b_ptrs = b_ptr + row_n[:, None] * K + k[None, :]
    as_ptrs = as_ptr + row_m[:, None] * (K // 32) + s[None, :]
    bs_ptrs = bs_ptr + row_n[:, None] * (K // 32) + s[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(tl.cdiv(K, BLOCK_K)):
        left = K - step * BLOCK_K
        acc = add_step(
            acc, a_ptrs, b_ptrs, as_ptrs, bs_ptrs, k, s, left, A_FORMAT, False, WHOLE_STEPS
        )
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K
        as_ptrs += SCALES
        bs_ptrs += SCALES
    if HAS_BIAS:
        acc += tl.load(bias_ptr + row_n).to(tl.float32)[None, :]
    inside = (m[:, None] < end) & (n[None, :] < N)
    if UNPADS:
        m += tl.load(of_out_ptr + group).to(tl.int64) - tl.sum(tl.where(mine, starts, 0), 0)
    out_ptrs = out_ptr + m[:, None] * N + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside)


def run(problem: GroupedGemmProblem, tensors: Tensors, config: Config) -> None:
    """Compute a grouped GEMM, accumulated in fp32 and rounded once.

    The first call with a configuration compiles it, which takes about a second; later ones
    neither synchronise nor compile. Rows in no group are left as they are.
    """
    a, a_scale, b, b_scale, bias, out, starts, ends = tensors
    M, N, K, G = problem.M, problem.N, problem.K, problem.most_runs or problem.G
    grid = (problem.most_tiles(config["BLOCK_M"]) * triton.cdiv(N, config["BLOCK_N"]),)
    with torch.cuda.device_of(out):
        grouped_tile_kernel[grid](
            a,
            as_scale_bytes(a_scale),
            b,
            as_scale_bytes(b_scale),
            bias,
            out,
            *ranges(problem, starts, ends),
            first_rows_of_out(problem, starts, ends) if problem.unpads else None,
            groups_of_ranges(problem, ends) if problem.most_runs else None,
            M,
            N,
            K,
            G,
            GROUPS=triton.next_power_of_2(G),
            A_FORMAT=problem.a_format,
            HAS_BIAS=bias is not None,
            UNPADS=problem.unpads,
            RUNS=problem.most_runs > 0,
            WHOLE_STEPS=K % config["BLOCK_K"] == 0,
            **config,
            **OPTIONS,
        )
