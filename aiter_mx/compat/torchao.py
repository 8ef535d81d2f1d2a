"""What torchao's training does around grouped products: rows of groups padded and unpadded, scales
that are given put into the order of a GEMM, group by group.

Groups are given by ``[G + 1]`` offsets, as ``aiter_mx.quantize_grouped`` takes them, and padded to
multiples of 128 rows. Nothing is read on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aiter_mx.checks import check_groups, check_tensor
from aiter_mx.fallbacks.quantize_torch import padded_rows
from aiter_mx.kernels.quantize.problem import GROUP_ROWS
from aiter_mx.layouts import layout_of, shuffle_scales

_OFFSETS = (torch.int32, torch.int64)


def pad_token_groups(x: Tensor, group_offs: Tensor) -> tuple[Tensor, Tensor]:
    """Each group's rows, followed by zeros up to a multiple of 128 rows.

    Args:
        x: ``[T, N]`` of any dtype.
        group_offs: int32 or int64 ``[G + 1]``: group g is rows ``group_offs[g]`` to
            ``group_offs[g + 1] - 1``.

    Returns:
        ``[P, N]`` with P = (T + 127 G) // 128 * 128, zeros behind the last group, and the offsets
        of padded groups, of group_offs's dtype.

    Raises:
        TypeError, ValueError: arguments other than those above.
    """
    _check(x, group_offs, x.shape[0] if x.ndim else 0)
    groups = len(group_offs) - 1
    rows = (x.shape[0] + groups * (GROUP_ROWS - 1)) // GROUP_ROWS * GROUP_ROWS
    padded_offs = torch.empty_like(group_offs)
    same_bytes = x.view(torch.uint8) if x.element_size() == 1 else x
    return padded_rows(same_bytes, group_offs, padded_offs, rows).view(x.dtype), padded_offs


def unpad_token_groups(
    padded: Tensor, group_offs: Tensor, padded_offs: Tensor, rows: int
) -> Tensor:
    """The rows that ``pad_token_groups`` was given, or what was computed of them.

    Args:
        padded: ``[P, N]``.
        group_offs: of the rows without padding, ``[G + 1]``.
        padded_offs: of those with padding, ``[G + 1]``.
        rows: T.

    Returns:
        ``[T, N]``; zeros for rows of no group.

    Raises:
        TypeError, ValueError: arguments other than those above.
    """
    _check(padded, group_offs, rows)
    check_tensor("padded_offs", padded_offs, _OFFSETS, (len(group_offs),), padded.device)
    row = torch.arange(rows, device=padded.device)
    ends = group_offs[1:].long().contiguous()
    group = torch.searchsorted(ends, row, right=True)
    there = (group < len(ends)) & (row >= group_offs[:1])
    group = group.clamp(max=len(ends) - 1)
    source = padded_offs.long()[group] + row - group_offs.long()[group]
    same_bytes = padded.view(torch.uint8) if padded.element_size() == 1 else padded
    found = same_bytes[torch.where(there, source, 0)] if len(padded) else same_bytes[:0]
    return torch.where(there.unsqueeze(1), found, 0).to(same_bytes.dtype).view(padded.dtype)


def rearrange_group_scales(
    scale: Tensor, group_offs: Tensor, scale_layout: str = "32_4_4"
) -> tuple[Tensor, Tensor]:
    """Scales of rows in groups, padded as the rows are and in the order that a GEMM reads.

    Args:
        scale: uint8 or float8_e8m0fnu ``[T, N / 32]``, row-major.
        group_offs: ``[G + 1]``, as for ``pad_token_groups``.
        scale_layout: one of ``aiter_mx.layouts``, whose tiles never have rows of two groups.

    Returns:
        what ``aiter_mx.quantize_grouped`` gives with this layout, and the padded offsets.

    Raises:
        TypeError, ValueError: arguments other than those above.
    """
    layout_of(scale_layout, "scale_layout")
    padded, padded_offs = pad_token_groups(scale, group_offs)
    return shuffle_scales(padded, scale_layout), padded_offs


def _check(x: Tensor, group_offs: Tensor, rows: int) -> None:
    check_tensor("x", x, (x.dtype,), ("rows", "N"))
    check_tensor("group_offs", group_offs, _OFFSETS, ("groups + 1",), x.device)
    if len(group_offs) < 2:
        raise ValueError(f"group_offs must have at least one group, got {list(group_offs.shape)}")
    check_groups("group_offs", len(group_offs) - 1, None, group_offs, rows)
