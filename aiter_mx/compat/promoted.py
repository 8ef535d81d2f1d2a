"""Products of fp8 operands whose scales are fp32, one for each 128 k: DeepGEMM's own recipe.

A scale that is no power of two cannot go into an MX product. So the payloads of 128 k at a time
are multiplied by this package's kernels under scales of 1, exactly but for fp32 sums, and what
comes out is added up in fp32 times the product of its scales. Operands are never dequantised to
memory, and nothing is read on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial as partial_of

import torch
from torch import Tensor

from aiter_mx.numerics import BLOCK

COARSE = 128
_ONE = 127  # 2^0 as an e8m0 byte

Partial = Callable[[Tensor, Tensor, Tensor], None]
"""Writes the product of two payloads under scales of 1 to its third argument."""


def ones_of(payload: Tensor) -> Tensor:
    """MX scales of 1 of a payload ``[..., K]``."""
    shape = (*payload.shape[:-1], payload.shape[-1] // BLOCK)
    return torch.full(shape, _ONE, dtype=torch.uint8, device=payload.device)


def of_rows(scale: Tensor, rows: int, whole_tiles: bool = False) -> Tensor:
    """Scales ``[..., rows, n]`` from those of each row, or of each 128 rows.

    Where ``whole_tiles`` will do, the latter stay as they are if all are for 128 rows.
    """
    if scale.shape[-2] == rows or (whole_tiles and rows % COARSE == 0):
        return scale
    whole = scale.shape[-2] * COARSE
    return scale.repeat_interleave(COARSE, -2, output_size=whole)[..., :rows, :]


def multiply(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    owner: Tensor,
    d: Tensor,
    partial: Partial,
) -> None:
    """Write rows of ``d`` that have a group.

    Args:
        a: payload ``[..., M, K]``.
        a_scale: fp32, one for each 128 k, ``[..., M, K / 128]`` rounded up; or bytes for each 32 k.
        b: payload ``[G, N, K]``.
        b_scale: fp32 ``[G, n, K / 128]``, n such that each is for as many rows of b; or bytes for
            each 32 k.
        owner: each row's group, -1 for none, integers ``[..., M]``.
        d: ``[..., M, N]``.
        partial: see ``Partial``.
    """
    K, groups = a.shape[-1], owner.clamp(min=0).long()
    known = (owner >= 0).unsqueeze(-1)
    of_a, of_b = _steps(a_scale, K), _steps(b_scale, K)
    length = min(of_a[1], of_b[1])
    total = torch.zeros(d.shape, dtype=torch.float32, device=d.device)
    product = torch.empty_like(total)
    in_tiles = partial_of(Tensor.unflatten, dim=-1, sizes=(b_scale.shape[-2], -1))
    for first in range(0, K, length):
        x, w = (t[..., first : first + length].contiguous() for t in (a, b))
        partial(x, w, product)
        row_factors = of_a[0][..., first // of_a[1]].double().unsqueeze(-1)
        of_columns = of_b[0][..., first // of_b[1]].double()[groups]
        factors = (row_factors * of_columns).float().unsqueeze(-1)
        in_tiles(total).addcmul_(in_tiles(product), factors)
    d.copy_(torch.where(known, total.to(d.dtype), d))


def _steps(scale: Tensor, K: int) -> tuple[Tensor, int]:
    """Values of scales, and the elements of K that each of them is for."""
    if scale.dtype == torch.float32:
        return scale, COARSE if scale.shape[-1] == -(-K // COARSE) else BLOCK
    byte = scale.double() - _ONE
    return torch.exp2(byte).masked_fill(scale == 255, torch.nan), BLOCK
