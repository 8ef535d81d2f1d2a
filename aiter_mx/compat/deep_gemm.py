"""DeepGEMM's grouped FP8 GEMMs under their own names.

Tensors come in pairs (payload, scale). Scales may be

- fp32 or e8m0 (uint8, float8_e8m0fnu), one for each 128 k of a row of activations, and one for each
  128 k of 128 rows of weights;
- either of them one for each 32 k of a row, as MX has it.

Both are used exactly: fp32 scales must be powers of two, as DeepGEMM's quantisers make them for
UE8M0. One that is none becomes NaN, and so do the results that it bears on: telling it by an
exception would have to wait for the GPU. Scales at 128 are expanded to 32 by each call; to save
that for weights, do it once with ``expand_scales`` and pass what it returns.
"""

from __future__ import annotations

import torch

from aiter_mx.compat.names import renamed
from aiter_mx.numerics import NAN_SCALE, as_scale_bytes
from aiter_mx.ops.checks import BLOCK, refuse_no_tensor, refuse_no_whole_number, shape_text
from aiter_mx.ops.grouped_gemm import grouped_gemm_ranges

Pair = tuple[torch.Tensor, torch.Tensor]

_COARSE = 128
_MANTISSA_BITS = 23
_MANTISSA = (1 << _MANTISSA_BITS) - 1
_LEAST_BITS = 1 << (_MANTISSA_BITS - 1)  # 2^-127, which fp32 has as a subnormal


def m_grouped_fp8_gemm_nt_contiguous(
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    recipe: tuple[int, int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    *,
    zero_padding: bool = False,
) -> None:
    """``d[m] = a[m] @ b[grouped_layout[m]].T`` for rows of groups that lie one after the other.

    Args:
        a: float8_e4m3fn ``[M, K]`` and its scales.
        b: float8_e4m3fn ``[G, N, K]`` and its scales.
        d: ``[M, N]``, bf16, fp16 or fp32, written.
        grouped_layout: int32 ``[M]``: a row's group, or -1 for padding. The rows of a group must be
            next to each other; they need not be padded to any multiple.
        recipe: not needed: shapes tell what a scale stands for.
        compiled_dims: not needed.
        disable_ue8m0_cast: must be False.
        zero_padding: whether rows of padding become 0; otherwise they are left as they are.

    Raises:
        TypeError, ValueError: as ``aiter_mx.grouped_gemm``; scales of another shape or dtype.
    """
    _refuse_uncast(disable_ue8m0_cast)
    payload, scale = _operand("a", a)
    weights, weight_scale = _operand("b", b)
    refuse_no_tensor(d=d, grouped_layout=grouped_layout)
    if grouped_layout.dtype != torch.int32:
        raise TypeError(f"grouped_layout must be torch.int32, got {grouped_layout.dtype}")
    if payload.ndim != 2 or tuple(grouped_layout.shape) != (payload.shape[0],):
        raise ValueError(
            "a must be [M, K] and grouped_layout [M], got "
            f"{shape_text(payload)} and {shape_text(grouped_layout)}"
        )
    if grouped_layout.device != payload.device:
        raise ValueError(
            f"grouped_layout is on {grouped_layout.device}, but a is on {payload.device}"
        )
    starts, ends = _ranges(grouped_layout, weights.shape[0])
    _multiply(payload, scale, weights, weight_scale, starts, ends, d)
    if zero_padding:
        d.masked_fill_((grouped_layout < 0).unsqueeze(1), 0)


def m_grouped_fp8_gemm_nt_masked(
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    recipe: tuple[int, int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """``d[g, m] = a[g, m] @ b[g].T`` for the first ``masked_m[g]`` rows m of each group g.

    Args:
        a: float8_e4m3fn ``[G, M, K]`` and its scales.
        b: float8_e4m3fn ``[G, N, K]`` and its scales.
        d: ``[G, M, N]``, bf16, fp16 or fp32; other rows are left as they are.
        masked_m: int32 ``[G]``, on the device.
        expected_m: a likely value of masked_m, which chooses tiles.
        recipe: not needed: shapes tell what a scale stands for.
        compiled_dims: not needed.
        disable_ue8m0_cast: must be False.

    Raises:
        TypeError, ValueError: as ``aiter_mx.grouped_gemm``; scales of another shape or dtype.
    """
    _refuse_uncast(disable_ue8m0_cast)
    payload, scale = _operand("a", a)
    weights, weight_scale = _operand("b", b)
    refuse_no_tensor(d=d, masked_m=masked_m)
    refuse_no_whole_number(expected_m=expected_m)
    if payload.ndim != 3:
        raise ValueError(f"a must be [G, M, K], got {shape_text(payload)}")
    if expected_m < 0:
        raise ValueError(f"expected_m must not be negative, got {expected_m}")
    # A plan is made for each value: a few will do.
    rounded = 1 << (expected_m - 1).bit_length() if expected_m else 0
    expected = min(rounded, payload.shape[1])
    _multiply(payload, scale, weights, weight_scale, None, masked_m, d, expected)


def expand_scales(payload: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The scales of ``payload [..., rows, K]`` as e8m0 bytes ``[..., rows, K // 32]``.

    Args:
        payload: float8_e4m3fn; K a multiple of 32.
        scale: fp32, uint8 or float8_e8m0fnu: ``[..., rows, K // 32]``, ``[..., rows, K / 128]`` or
            ``[..., rows / 128, K / 128]``, rounded up.

    Raises:
        TypeError: no tensor, or of another dtype.
        ValueError: another shape, or scales on another device than the payload.
    """
    refuse_no_tensor(payload=payload, scale=scale)
    if payload.device != scale.device:
        raise ValueError(
            f"scales of a payload on {payload.device} must be there too, got {scale.device}"
        )
    if payload.ndim < 2 or payload.shape[-1] == 0 or payload.shape[-1] % BLOCK:
        raise ValueError(
            f"a payload must be [..., rows, K], K a multiple of {BLOCK}, got {shape_text(payload)}"
        )
    *outer, rows, K = payload.shape
    blocks, coarse = K // BLOCK, -(-K // _COARSE)
    found = tuple(scale.shape)
    fine_shape = (*outer, rows, blocks)
    row_shape, tile_shape = (*outer, rows, coarse), (*outer, -(-rows // _COARSE), coarse)
    if found not in (fine_shape, row_shape, tile_shape):
        raise ValueError(
            f"scales of {shape_text(payload)} must be {list(fine_shape)}, {list(row_shape)} or "
            f"{list(tile_shape)}, got {shape_text(scale)}"
        )
    if scale.dtype == torch.float32:
        scale = _power_of_two_bytes(scale)
    elif scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise TypeError(
            f"scales must be torch.float32, torch.uint8 or torch.float8_e8m0fnu, got {scale.dtype}"
        )
    scale = as_scale_bytes(scale)
    if found not in (fine_shape, row_shape):
        scale = scale.repeat_interleave(_COARSE, -2, output_size=-(-rows // _COARSE) * _COARSE)
        scale = scale[..., :rows, :]
    if found != fine_shape:
        scale = scale.repeat_interleave(_COARSE // BLOCK, -1, output_size=coarse * 4)
        scale = scale[..., :blocks]
    return scale.contiguous()


def _operand(name: str, pair: Pair) -> Pair:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TypeError(f"{name} must be a pair (payload, scale), got {type(pair).__name__}")
    payload, scale = pair
    refuse_no_tensor(**{f"{name}'s payload": payload, f"{name}'s scale": scale})
    return payload, expand_scales(payload, scale)


def _multiply(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    starts: torch.Tensor | None,
    ends: torch.Tensor,
    d: torch.Tensor,
    expected: int = 0,
) -> None:
    try:
        grouped_gemm_ranges(
            a, a_scale, b, b_scale, starts, ends, d, d.dtype, expected_rows=expected
        )
    except (TypeError, ValueError) as error:
        raise renamed(error, {"out": "d", "out_dtype": "d's dtype"}) from error


def _refuse_uncast(disable_ue8m0_cast: bool) -> None:
    if disable_ue8m0_cast:
        raise ValueError(
            "disable_ue8m0_cast=True asks for scales that are no powers of two; MX has none"
        )


def _power_of_two_bytes(scale: torch.Tensor) -> torch.Tensor:
    """e8m0 bytes of fp32 powers of two; NaN for all else."""
    bits = scale.view(torch.int32)
    byte = bits >> _MANTISSA_BITS  # above 255 or negative with a sign bit: not exact, see below
    is_exact = (bits > _MANTISSA) & ((bits & _MANTISSA) == 0) | (bits == _LEAST_BITS)
    return torch.where(is_exact, byte, NAN_SCALE).to(torch.uint8)


def _ranges(grouped_layout: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First row of each group, and the row after its last; both 0 rows where it has none."""
    M, device = len(grouped_layout), grouped_layout.device
    row = torch.arange(M, dtype=torch.int32, device=device)
    known = (grouped_layout >= 0) & (grouped_layout < groups)
    owner = torch.where(known, grouped_layout, groups).long()  # one place more for no group
    starts = torch.full((groups + 1,), M, dtype=torch.int32, device=device)
    ends = torch.zeros(groups + 1, dtype=torch.int32, device=device)
    starts.scatter_reduce_(0, owner, row, "amin")
    ends.scatter_reduce_(0, owner, row + 1, "amax")
    return starts[:groups], ends[:groups]
