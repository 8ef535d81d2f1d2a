"""DeepGEMM's products over groups of k, gradients of weights: ``d[g] = c[g] + a_g.T @ b_g``.

Scales that are bytes are MX's, and one launch of ``grouped_gemm_wgrad`` computes all groups. With
fp32 scales each 128 k of every group are a launch, under scales of 1, and their products are added
up in fp32 under their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from aiter_mx.checks import BLOCK, check_tensor, refuse_no_tensor, shape_text
from aiter_mx.codec import as_scale_bytes
from aiter_mx.compat.names import payload_of
from aiter_mx.compat.promoted import COARSE, ones_of
from aiter_mx.ops.grouped_wgrad import grouped_gemm_wgrad

Pair = tuple[Tensor, Tensor]
_BYTES = (torch.uint8, torch.float8_e8m0fnu)


def k_grouped_fp8_gemm_tn_contiguous(
    a: Pair,
    b: Pair,
    d: Tensor,
    ks: Sequence[int] | None,
    ks_tensor: Tensor,
    c: Tensor | None = None,
    recipe: tuple[int, int, int] = (1, 1, 128),
    compiled_dims: str = "mn",
    use_psum_layout: bool = False,
) -> None:
    """``d[g] = c[g] + a[rows of g].T @ b[rows of g]``, groups of rows one after the other.

    Args:
        a: float8_e4m3fn ``[K, M]`` and its scales, fp32 or e8m0 ``[K / 128, M]``, or e8m0
            ``[K / 32, M]``; M a multiple of 32.
        b: likewise ``[K, N]``.
        d: ``[G, M, N]``, fp32, bf16 or fp16, written.
        ks: rows of each group, multiples of 128, or None: then the device is asked.
        ks_tensor: the same, int32 ``[G]``.
        c: ``[G, M, N]`` of d's dtype, d itself for example, or None.
        recipe: not needed: shapes tell what a scale stands for.
        compiled_dims: not needed.
        use_psum_layout: False: groups follow one another.

    Raises:
        NotImplementedError: use_psum_layout.
        TypeError, ValueError: arguments of another dtype, shape or device; groups that are no
            multiples of 128, or are more rows than there are.
    """
    _refuse_psum(use_psum_layout)
    sides = [_operand(name, *pair) for name, pair in (("a", a), ("b", b))]
    _multiply(sides, d, ks, ks_tensor, c)


def k_grouped_fp8_gemm_nt_contiguous(
    a: Pair,
    b: Pair,
    d: Tensor,
    ks: Sequence[int] | None,
    ks_tensor: Tensor,
    c: Tensor | None = None,
    recipe: tuple[int, int, int] = (1, 1, 128),
    compiled_dims: str = "mn",
    use_psum_layout: bool = False,
) -> None:
    """The same product of groups that lie apart: ``d[g] = c[g] + a_g @ b_g.T``.

    Args:
        a: float8_e4m3fn, flat: ``[M, ks[g]]`` of each group after the other; its scales ``[M, n]``
            of K / 128 or K / 32 columns.
        b: likewise, with N rows.
        d, ks, ks_tensor, c, recipe, compiled_dims, use_psum_layout: as of
            ``k_grouped_fp8_gemm_tn_contiguous``.

    Raises:
        TypeError, ValueError: likewise.
    """
    _refuse_psum(use_psum_layout)
    refuse_no_tensor(d=d, ks_tensor=ks_tensor)
    lengths = _lengths(ks, ks_tensor)
    if d.ndim != 3:
        raise ValueError(f"d must be [G, M, N], got {shape_text(d)}")
    sides = []
    for name, (payload, scale), rows in (("a", a, d.shape[1]), ("b", b, d.shape[2])):
        refuse_no_tensor(**{f"{name}'s payload": payload, f"{name}'s scale": scale})
        if payload.numel() != rows * sum(lengths):
            raise ValueError(
                f"{name} must have {rows} x {sum(lengths)} elements, as d and ks say, got "
                f"{shape_text(payload)}"
            )
        parts = payload_of(payload).flatten().split([rows * k for k in lengths])
        whole = torch.cat([part.view(rows, -1) for part in parts], 1)
        sides.append(_operand(name, whole.t(), scale.t()))
    _multiply(sides, d, lengths, ks_tensor, c)


def _lengths(ks: Sequence[int] | None, ks_tensor: Tensor) -> list[int]:
    """Rows of each group."""
    if ks is None:
        lengths: list[int] = ks_tensor.tolist()
        return lengths
    if not isinstance(ks, (Sequence, Tensor)) or isinstance(ks, str):
        raise TypeError(f"ks must be a list of each group's rows, or None, got {ks!r}")
    return [int(k) for k in ks]


def _refuse_psum(use_psum_layout: bool) -> None:
    if use_psum_layout:
        raise NotImplementedError(
            "use_psum_layout=True has gaps between groups of k: copy them together, and pass ks"
        )


def _operand(name: str, payload: Tensor, scale: Tensor) -> Pair:
    """A payload as ``[rows, K]``, contiguous, and its scales as ``[rows, n]``."""
    refuse_no_tensor(**{f"{name}'s payload": payload, f"{name}'s scale": scale})
    payload = payload_of(payload)
    if payload.ndim != 2 or payload.shape[0] % COARSE or payload.shape[1] % BLOCK:
        raise ValueError(
            f"{name} must be [K, rows], K a multiple of {COARSE} and rows of {BLOCK}, got "
            f"{shape_text(payload)}"
        )
    K, rows = payload.shape
    coarse = (K // COARSE, rows)
    known = [coarse] if scale.dtype == torch.float32 else [coarse, (K // BLOCK, rows)]
    if scale.dtype not in (torch.float32, *_BYTES):
        raise TypeError(
            f"scales of {name} must be torch.float32, torch.uint8 or torch.float8_e8m0fnu, got "
            f"{scale.dtype}"
        )
    if tuple(scale.shape) not in known:
        raise ValueError(
            f"scales of {name} must be {' or '.join(str(list(s)) for s in known)}, got "
            f"{shape_text(scale)} ({name}: {shape_text(payload)})"
        )
    return payload.t().contiguous(), scale.t()


def _multiply(
    sides: list[Pair], d: Tensor, ks: Sequence[int] | None, ks_tensor: Tensor, c: Tensor | None
) -> None:
    (a, a_scale), (b, b_scale) = sides
    (M, K), N = a.shape, b.shape[0]
    refuse_no_tensor(("c",), d=d, ks_tensor=ks_tensor, c=c)
    G = len(ks_tensor)
    check_tensor("ks_tensor", ks_tensor, (torch.int32, torch.int64), ("G",), a.device)
    check_tensor("d", d, (torch.float32, torch.bfloat16, torch.float16), (G, M, N), a.device)
    if b.shape[1] != K:
        raise ValueError(f"a and b must have as many rows, got {K} and {b.shape[1]}")
    if c is not None:
        check_tensor("c", c, (d.dtype,), (G, M, N), a.device)
    lengths = _lengths(ks, ks_tensor)
    if len(lengths) != G or any(k % COARSE or k < 0 for k in lengths) or sum(lengths) > K:
        raise ValueError(
            f"ks must be {G} multiples of {COARSE} that come to at most K={K}, got {lengths}"
        )
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=a.device)
    total = torch.zeros(d.shape, dtype=torch.float32, device=d.device)
    if c is not None:
        total.copy_(c)
    if a_scale.dtype in _BYTES and b_scale.dtype in _BYTES:
        bytes_of = [_fine(scale, K) for scale in (a_scale, b_scale)]
        grouped_gemm_wgrad(a, bytes_of[0], b, bytes_of[1], offsets, None, total,
                           torch.float32, accumulate=True)  # fmt: skip
    else:
        for name, (_, scale) in zip("ab", sides, strict=True):
            if scale.shape[1] != K // COARSE:
                raise ValueError(
                    f"scales of {name} must be for {COARSE} k each where the others are fp32, got "
                    f"{shape_text(scale.t())}"
                )
        _step_by_step(sides, offsets, max(lengths, default=0) // COARSE, total)
    d.copy_(total)


def _step_by_step(sides: list[Pair], offsets: Tensor, steps: int, total: Tensor) -> None:
    """Add each group's products of 128 k at a time, under their scales."""
    (a, a_scale), (b, b_scale) = sides
    begins, ends = offsets[:-1], offsets[1:]
    product = torch.empty_like(total)
    ones = ones_of(a), ones_of(b)
    factors = [_values(scale) for scale in (a_scale, b_scale)]
    for step in range(steps):
        here = torch.minimum(begins + step * COARSE, ends)
        lengths = (ends - here).clamp(max=COARSE)
        starts = torch.cat([here, ends[-1:]])
        grouped_gemm_wgrad(a, ones[0], b, ones[1], starts, lengths, product, torch.float32)
        at = (here // COARSE).clamp(max=a_scale.shape[1] - 1).long()
        of_a, of_b = (factor[:, at].t() for factor in factors)
        scaled = product.double() * (of_a.unsqueeze(2) * of_b.unsqueeze(1))
        total += torch.where((lengths > 0).view(-1, 1, 1), scaled, 0.0).float()


def _fine(scale: Tensor, K: int) -> Tensor:
    """Bytes for each 32 k."""
    scale = as_scale_bytes(scale)
    each = K // BLOCK // scale.shape[1]
    return scale.repeat_interleave(each, 1).contiguous() if each > 1 else scale.contiguous()


def _values(scale: Tensor) -> Tensor:
    """In float64."""
    if scale.dtype == torch.float32:
        return scale.double()
    byte = as_scale_bytes(scale)
    return torch.exp2(byte.double() - 127).masked_fill(byte == 255, torch.nan)
