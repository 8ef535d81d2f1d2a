"""How DeepGEMM lays out scales and rows of groups, under its own names.

Nothing in this package needs scales to lie so: they may have any strides. Callers that prepare
them once, or hand them over packed, change one import.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aiter_mx.checks import BLOCK, checking, refuse_no_tensor, shape_text
from aiter_mx.codec import as_scale_bytes
from aiter_mx.compat.promoted import COARSE, of_rows
from aiter_mx.numerics import NAN_SCALE

_TMA_BYTES = 16
_MANTISSA_BITS = 23
_MANTISSA = (1 << _MANTISSA_BITS) - 1
_LEAST_BITS = 1 << (_MANTISSA_BITS - 1)  # 2^-127, which fp32 has as a subnormal
_USUAL_ALIGNMENT = 128
_PACKED = 4  # e8m0 bytes of an int32
_alignment = {"rows": _USUAL_ALIGNMENT}
"""What ``set_mk_alignment_for_contiguous_layout`` set."""


def get_mk_alignment_for_contiguous_layout() -> int:
    """The multiple of rows at which groups begin with ``use_psum_layout``.

    Returns:
        What ``set_mk_alignment_for_contiguous_layout`` was told, or 128.
    """
    return _alignment["rows"]


def set_mk_alignment_for_contiguous_layout(value: int) -> None:
    """Have groups begin at multiples of ``value`` rows, in calls from here on.

    Args:
        value: rows, at least 1.

    Raises:
        ValueError: it is below 1.
    """
    if value < 1:
        raise ValueError(f"groups begin at multiples of 1 row or more, got {value}")
    _alignment["rows"] = int(value)


def get_theoretical_mk_alignment_for_contiguous_layout(expected_m: int | None = None) -> int:
    """A multiple that suits the kernels. Any other is right too.

    Args:
        expected_m: not needed.

    Returns:
        128, as DeepGEMM has on Hopper.
    """
    return _USUAL_ALIGNMENT


def get_tma_aligned_size(mn: int, element_size: int) -> int:
    """``mn`` elements, rounded up to what TMA takes as a stride.

    Args:
        mn: elements of a column.
        element_size: bytes of one.

    Returns:
        Elements, a multiple of 16 bytes.
    """
    each = _TMA_BYTES // element_size
    return -(-mn // each) * each


def get_mn_major_tma_aligned_tensor(sf: Tensor) -> Tensor:
    """Scales of which a column lies together, columns at multiples of 16 bytes.

    Args:
        sf: fp32 ``[mn, n]`` or ``[G, mn, n]``.

    Returns:
        The same values and shape, with a stride of 1 along ``mn``.

    Raises:
        TypeError: scales that are not fp32.
        ValueError: neither two nor three dimensions.
    """
    _check(sf)
    return _by_columns(sf)


def get_mn_major_tma_aligned_packed_ue8m0_tensor(
    sf: Tensor, psum_layout: Tensor | None = None
) -> Tensor:
    """fp32 scales, powers of two, as e8m0 bytes, four of a row in an int32: ``[..., mn, n / 4]``.

    Laid out as ``get_mn_major_tma_aligned_tensor`` has it; past n bytes are 0.

    Args:
        sf: fp32 ``[mn, n]`` or ``[G, mn, n]``.
        psum_layout: not needed: rows of no group are packed as all are.

    Returns:
        int32 ``[..., mn, n / 4]``, rounded up.

    Raises:
        TypeError, ValueError: likewise.
    """
    _check(sf)
    bits = sf.contiguous().view(torch.int32)
    byte = (bits >> _MANTISSA_BITS).to(torch.uint8)
    *outer, n = byte.shape
    words = bits.new_zeros(*outer, -(-n // _PACKED))
    words.view(torch.uint8)[..., :n] = byte
    return _by_columns(words)


def get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(
    sf: Tensor,
    grouped_layout: Tensor,
    ks_cpu: Sequence[int],
    gran_k: int,
    k_alignment: int,
    use_psum_layout: bool = False,
) -> Tensor:
    """The same of scales ``[n of all groups, mn]``: each group's are packed apart, one after the
    other, to ``[n / 4 of each, rounded up, mn]``.

    Args:
        sf: fp32, powers of two.
        grouped_layout: not needed: ks_cpu says the same.
        ks_cpu: k of each group.
        gran_k: k that a scale is for.
        k_alignment: not needed.
        use_psum_layout: not needed.

    Returns:
        int32, the groups' words one behind the other.

    Raises:
        TypeError, ValueError: likewise; scales of more or fewer k than ks_cpu has.
    """
    _check(sf)
    counts = [-(-k // gran_k) for k in ks_cpu]
    if sf.ndim != 2 or sf.shape[0] != sum(counts):
        raise ValueError(f"sf must be [{sum(counts)}, mn], as ks_cpu says, got {shape_text(sf)}")
    packed = [
        get_mn_major_tma_aligned_packed_ue8m0_tensor(part.t()).t() for part in sf.split(counts)
    ]
    return torch.cat(packed)


def transform_sf_into_required_layout(
    sf: Tensor,
    mn: int,
    k: int,
    recipe: tuple[int, ...],
    num_groups: int | None = None,
    is_sfa: bool | None = None,
    disable_ue8m0_cast: bool = False,
    psum_layout: Tensor | None = None,
) -> Tensor:
    """Scales as products take them fastest, which is how DeepGEMM has them on Hopper.

    Args:
        sf: fp32 ``[..., mn / a, k / b]``, both rounded up, for a recipe (a, b).
        mn: rows of the payload.
        k: its columns.
        recipe: (rows of a's scale, rows of b's, k) or (rows, k) that a scale is for.
        num_groups: the first dimension, or None where there are two.
        is_sfa: with a recipe of three, whether these are a's scales.
        disable_ue8m0_cast: not needed: values stay as they are.
        psum_layout: not needed.

    Returns:
        fp32: ``sf`` itself where a scale is for several rows, else with a column lying together.

    Raises:
        TypeError, ValueError: as above; another shape than told.
    """
    _check(sf)
    rows = recipe[-2] if len(recipe) == 2 else recipe[0 if is_sfa else 1]
    expected = (-(-mn // rows), -(-k // recipe[-1]))
    if num_groups is not None:
        expected = (num_groups, *expected)  # type: ignore[assignment]
    if tuple(sf.shape) != expected:
        raise ValueError(f"sf must be {list(expected)}, as the recipe says, got {shape_text(sf)}")
    return sf if rows > 1 else _by_columns(sf)


def expand_scales(payload: Tensor, scale: Tensor) -> Tensor:
    """The scales of ``payload [..., rows, K]`` as e8m0 bytes ``[..., rows, K // 32]``.

    Args:
        payload: float8_e4m3fn; K a multiple of 32.
        scale: fp32, uint8 or float8_e8m0fnu: ``[..., rows, K // 32]``, ``[..., rows, K / 128]`` or
            ``[..., rows / 128, K / 128]``, rounded up. Of fp32, powers of two; NaN for all else.

    Returns:
        uint8, contiguous.

    Raises:
        TypeError: no tensor, or of another dtype.
        ValueError: another shape, or scales on another device than the payload.
    """
    refuse_no_tensor(payload=payload, scale=scale)
    scale = in_order(payload, scale)
    if scale.dtype == torch.float32:
        scale = power_of_two_bytes(scale)
    scale = as_scale_bytes(scale)
    *_, rows, K = payload.shape
    coarse = -(-K // COARSE)
    if scale.shape[-2] != rows:
        scale = of_rows(scale, rows)
    if scale.shape[-1] == coarse != K // BLOCK:
        scale = scale.repeat_interleave(COARSE // BLOCK, -1, output_size=coarse * 4)
        scale = scale[..., : K // BLOCK]
    return scale.contiguous()


def in_order(payload: Tensor, scale: Tensor) -> Tensor:
    """Scales with a payload's last dimensions in the payload's order; raises for other shapes."""
    if payload.device != scale.device:
        raise ValueError(
            f"scales of a payload on {payload.device} must be there too, got {scale.device}"
        )
    if payload.ndim < 2 or payload.shape[-1] == 0 or payload.shape[-1] % BLOCK:
        raise ValueError(
            f"a payload must be [..., rows, K], K a multiple of {BLOCK}, got {shape_text(payload)}"
        )
    if scale.dtype not in (torch.float32, torch.uint8, torch.float8_e8m0fnu):
        raise TypeError(
            f"scales must be torch.float32, torch.uint8 or torch.float8_e8m0fnu, got {scale.dtype}"
        )
    *outer, rows, K = payload.shape
    coarse = -(-K // COARSE)
    tiles = (*outer, -(-rows // COARSE), coarse)
    known = [(*outer, rows, K // BLOCK), (*outer, rows, coarse), tiles]
    if tuple(scale.shape) in known:
        return scale
    if scale.dtype == torch.float32 and tuple(scale.shape) == (*outer, coarse, rows):
        return scale.transpose(-1, -2)
    raise ValueError(
        f"scales of {shape_text(payload)} must be {', '.join(str(list(s)) for s in known[:2])} or "
        f"{list(known[2])}, got {shape_text(scale)}"
    )


def power_of_two_bytes(scale: Tensor) -> Tensor:
    """e8m0 bytes of fp32 powers of two; NaN for all else."""
    bits = scale.contiguous().view(torch.int32)
    byte = bits >> _MANTISSA_BITS  # above 255 or negative with a sign bit: not exact, see below
    is_exact = (bits > _MANTISSA) & ((bits & _MANTISSA) == 0) | (bits == _LEAST_BITS)
    return torch.where(is_exact, byte, NAN_SCALE).to(torch.uint8)


def unpacked(payload: Tensor, scale: Tensor) -> Tensor:
    """e8m0 bytes of scales ``[..., rows, n / 4]`` in int32, for 128 k or else for 32 k each; of
    another shape, the scales as they are."""
    for each in (-(-payload.shape[-1] // COARSE), payload.shape[-1] // BLOCK):
        if scale.shape[-1] == -(-each // _PACKED):
            words = scale.clone(memory_format=torch.contiguous_format)
            return words.view(torch.uint8)[..., :each]
    return scale


def refuse_unknown(grouped_layout: Tensor, groups: int) -> None:
    """With ``AITER_MX_CHECK=1`` raise ValueError where a row has a group that is not there."""
    if not checking():
        return
    wrong = (grouped_layout < -1) | (grouped_layout >= groups)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"grouped_layout must be within -1 to {groups - 1}, as b has {groups} groups; "
            f"grouped_layout[{row}] is {int(grouped_layout[row])}"
        )


def taken(payload: Tensor, order: Tensor) -> Tensor:
    """Rows of a payload in an order."""
    return payload.view(torch.uint8)[order].view(payload.dtype)


def owners(starts: Tensor, ends: Tensor, rows: int) -> Tensor:
    """Each row's group, -1 for none, where groups begin and end so, in their order."""
    row = torch.arange(rows, dtype=ends.dtype, device=ends.device)
    group = torch.searchsorted(ends, row, right=True, out_int32=True)
    known = group.clamp(max=len(ends) - 1).long()
    return torch.where((group < len(ends)) & (row >= starts[known]), group, -1)


def _check(sf: Tensor) -> None:
    if sf.dtype != torch.float32:
        raise TypeError(f"sf must be torch.float32, got {sf.dtype}")
    if sf.ndim not in (2, 3):
        raise ValueError(f"sf must be [mn, n] or [G, mn, n], got {shape_text(sf)}")


def _by_columns(values: Tensor) -> Tensor:
    *outer, mn, n = values.shape
    aligned = get_tma_aligned_size(mn, values.element_size())
    memory = values.new_empty(*outer, n, aligned)
    result = memory.transpose(-1, -2)[..., :mn, :]
    return result.copy_(values)
