"""Primus-Turbo's functions over MX-FP8: ``primus_turbo.pytorch.ops`` of these names.

Granularity is ``MX_BLOCKWISE``, blocks of 32 under e8m0 scales, and products are of e4m3, or, of
gradients where the format is ``HYBRID``, of e5m2 and e4m3. What else Primus-Turbo has is refused
with a sentence that says so. Enumerations and configurations are those below or Primus-Turbo's own,
which are known by the names of their members.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from aiter_mx.autograd import grouped_linear, linear_autograd, offsets_of_groups
from aiter_mx.numerics import BLOCK
from aiter_mx.ops.quantize import (
    Dual,
    dequantize,
    quantize,
    quantize_dual,
    quantize_grouped,
)

PADDING = 128
"""Quantised dimensions are padded with zeros to a multiple of this, as Primus-Turbo does."""


class Format(Enum):
    """Formats of operands."""

    E4M3 = auto()
    E5M2 = auto()
    HYBRID = auto()


class ScaleDtype(Enum):
    """Dtypes of scales."""

    FP32 = auto()
    E8M0 = auto()


class ScalingGranularity(Enum):
    """What shares a scale."""

    TENSORWISE = auto()
    ROWWISE = auto()
    BLOCKWISE = auto()
    MX_BLOCKWISE = auto()


class ScalingRecipe(NamedTuple):
    """Options of a quantisation.

    Attributes:
        use_2d_block: blocks of 32 x 32 in place of 1 x 32.
        use_sr: stochastic rounding, which is not there.
        use_rht: a rotation before it, likewise.
        shuffle_scale: scales in tiles of 16 x 4.
        shuffle_out: a shuffled payload, which is not there.
    """

    use_2d_block: bool = False
    use_sr: bool = False
    use_rht: bool = False
    shuffle_scale: bool = False
    shuffle_out: bool = False


@dataclass(frozen=True)
class Float8QuantConfig:
    """How products are quantised.

    Attributes:
        format: ``E4M3``, or ``HYBRID`` for gradients of e5m2.
        granularity: ``MX_BLOCKWISE``.
        scale_dtype: ``E8M0``.
        block_size: 32.
    """

    format: Format = Format.E4M3
    granularity: ScalingGranularity = ScalingGranularity.MX_BLOCKWISE
    scale_dtype: ScaleDtype = ScaleDtype.E8M0
    block_size: int | None = BLOCK


def grouped_gemm_fp8(
    a: Tensor,
    b: Tensor,
    group_lens: Tensor,
    group_offs: Tensor | None = None,
    trans_b: bool = True,
    out_dtype: torch.dtype | None = None,
    config: Any = None,
    num_cu: int | None = None,
    fuse_bgrad_accum_pattern: str | None = None,
) -> Tensor:
    """``grouped_linear`` as Primus-Turbo's ``grouped_gemm_fp8``, with gradients of a and b.

    Args:
        a: bf16 or fp16 ``[T, K]``.
        b: ``[G, N, K]``, or ``[G, K, N]`` where ``trans_b`` is false. N is a multiple of 32.
        group_lens: rows of each group, ``[G]``, on the device or on the CPU.
        group_offs: ``[G + 1]``, in place of them, or None.
        trans_b: how b lies.
        out_dtype: of the result; None: what torch makes of the dtypes of a and b.
        config: ``Float8QuantConfig``, with ``MX_BLOCKWISE`` and ``E4M3`` or ``HYBRID``.
        num_cu: ignored: kernels take all compute units.
        fuse_bgrad_accum_pattern: ``"megatron"`` adds the gradient of b to ``b.main_grad``, bf16 or
            fp32, says so in ``b.grad_added_to_main_grad``, and gives b a gradient of zeros; None
            returns it as any other.

    Returns:
        ``[T, N]``.

    Raises:
        TypeError, ValueError: as ``grouped_linear``, another granularity or format, operands that
            are quantised already, or a main gradient where ``trans_b`` is false.
    """
    _refuse_quantized(a=a, b=b)
    grad_format = _grad_format(config)
    b, main_grad = _main_grad(b, fuse_bgrad_accum_pattern, trans_b)
    G = b.shape[0]
    if group_offs is None:
        offs = offsets_of_groups(None, group_lens, G, a)
    else:
        offs = offsets_of_groups(group_offs, None, G, a)
    a, w, quantized_w = _operands(a, b, trans_b)
    y = grouped_linear(
        a, w, offs, quantized_w=quantized_w, main_grad=main_grad, grad_format=grad_format
    )
    return y.to(out_dtype or torch.promote_types(a.dtype, b.dtype))


def gemm_fp8(
    a: Tensor,
    b: Tensor,
    trans_a: bool = False,
    trans_b: bool = False,
    out_dtype: torch.dtype | None = None,
    config: Any = None,
    fuse_bgrad_accum_pattern: str | None = None,
) -> Tensor:
    """``linear_autograd`` as Primus-Turbo's ``gemm_fp8``, with gradients of a and b.

    Args:
        a: bf16 or fp16 ``[M, K]``, or ``[K, M]`` where ``trans_a``.
        b: ``[K, N]``, or ``[N, K]`` where ``trans_b``. N is a multiple of 32.
        trans_a, trans_b: how they lie.
        out_dtype: of the result; None: what torch makes of the dtypes of a and b.
        config: as of ``grouped_gemm_fp8``.
        fuse_bgrad_accum_pattern: likewise.

    Returns:
        ``[M, N]``.

    Raises:
        TypeError, ValueError: as ``grouped_gemm_fp8``.
    """
    _refuse_quantized(a=a, b=b)
    grad_format = _grad_format(config)
    b, main_grad = _main_grad(b, fuse_bgrad_accum_pattern, trans_b)
    a, w, quantized_w = _operands(a.mT if trans_a else a, b, trans_b)
    y = linear_autograd(a, w, quantized_w=quantized_w, main_grad=main_grad, grad_format=grad_format)
    return y.to(out_dtype or torch.promote_types(a.dtype, b.dtype))


def _refuse_quantized(**operands: object) -> None:
    for name, value in operands.items():
        if not isinstance(value, Tensor) or hasattr(value, "qdata"):
            raise TypeError(
                f"{name} must be a tensor that is not quantised yet, got {type(value).__name__}; "
                "share quantised weights by aiter_mx.grouped_linear(quantized_w=...)"
            )


def _main_grad(b: Tensor, pattern: str | None, trans_b: bool) -> tuple[Tensor, Tensor | None]:
    """b, and the main gradient that its own is added to, if there is one."""
    if pattern is None:
        return b, None
    if pattern != "megatron":
        raise ValueError(f"fuse_bgrad_accum_pattern must be None or 'megatron', got {pattern!r}")
    if not trans_b:
        raise ValueError("a main gradient is that of b as [..., N, K]: trans_b must be true")
    main_grad = getattr(b, "main_grad", None)
    if not isinstance(main_grad, Tensor) or main_grad.shape != b.shape:
        raise ValueError(
            "fuse_bgrad_accum_pattern='megatron' adds to b.main_grad, which must be a tensor of "
            f"b's shape, {list(b.shape)}"
        )
    if b.shape[-1] % BLOCK:
        raise ValueError(f"with a main gradient K must be a multiple of {BLOCK}, got {b.shape[-1]}")
    b.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    flagged: Tensor = _Flagged.apply(b)  # type: ignore[no-untyped-call]
    return flagged, main_grad


class _Flagged(torch.autograd.Function):
    """A weight whose gradient is kept elsewhere: it gets zeros, so that its hooks are called."""

    @staticmethod
    def forward(ctx: Any, b: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.zero = b.new_zeros(()).expand(b.shape)
        return b.view_as(b)

    @staticmethod
    def backward(ctx: Any, grad: None) -> Tensor:
        zero: Tensor = ctx.zero
        return zero


def _operands(a: Tensor, b: Tensor, trans_b: bool) -> tuple[Tensor, Tensor, Dual | None]:
    """a, b as ``[..., N, K]``, K padded to whole blocks, and its quantisation where b is stored
    the other way, whose rows are then columns."""
    missing = -a.shape[-1] % BLOCK
    if missing:
        a = pad(a, (0, missing))
        b = pad(b, (0, missing) if trans_b else (0, 0, 0, missing))
    if trans_b:
        return a, b, None
    if b.shape[-1] % BLOCK:
        raise ValueError(
            f"N must be a multiple of {BLOCK}, got N={b.shape[-1]} (b: {list(b.shape)})"
        )
    with torch.no_grad():
        stored = quantize_dual(b)
    return a, b.mT, Dual(*stored[2:], *stored[:2])


def quantize_fp8(
    x: Tensor,
    out_dtype: torch.dtype,
    granularity: Any,
    *,
    block_size: int | None = None,
    axis: int | None = None,
    scaling_recipe: Any = None,
    pad_align_last: int = 0,
    pad_align_penultimate: int = 0,
) -> tuple[Tensor, Tensor]:
    """``aiter_mx.quantize`` as Primus-Turbo's ``quantize_fp8``.

    Args:
        x: ``[M, N]`` or ``[G, M, N]``.
        out_dtype: float8_e4m3fn or float8_e5m2.
        granularity: ``MX_BLOCKWISE``.
        block_size: 32.
        axis: the last dimension, for blocks along rows; or that before it, for blocks along
            columns, which are stored transposed. It is padded to a multiple of 128.
        scaling_recipe: ``use_2d_block`` and ``shuffle_scale`` are known.
        pad_align_last, pad_align_penultimate: 0, as they are for another granularity.

    Returns:
        payload and scales.

    Raises:
        ValueError: an option that is none of these.
    """
    _refuse_granularity(granularity, block_size)
    if pad_align_last or pad_align_penultimate:
        raise ValueError("pad_align_last and pad_align_penultimate are for TENSORWISE alone")
    along = _axis(x, axis)
    options = _options(scaling_recipe)
    return quantize(x, along, format=_format(out_dtype), multiple=PADDING, **options)


def quantize_fp8_with_trans(
    x: Tensor,
    out_dtype: torch.dtype,
    granularity: Any,
    *,
    block_size: int | None = None,
    scaling_recipe: Any = None,
    scaling_recipe_for_trans: Any = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both of ``quantize_fp8``: along rows, then along columns.

    Args:
        x: as for ``quantize_fp8``.
        out_dtype: likewise.
        granularity: likewise.
        block_size: likewise.
        scaling_recipe: likewise, along rows.
        scaling_recipe_for_trans: likewise, along columns.

    Returns:
        payload and scales along rows, payload and scales along columns.

    Raises:
        ValueError: as ``quantize_fp8``.
    """
    of_rows, of_columns = (
        quantize_fp8(
            x, out_dtype, granularity, block_size=block_size, axis=axis, scaling_recipe=recipe
        )
        for axis, recipe in ((-1, scaling_recipe), (-2, scaling_recipe_for_trans))
    )
    return (*of_rows, *of_columns)


def grouped_quantize_fp8(
    x: Tensor,
    out_dtype: torch.dtype,
    granularity: Any,
    group_lens: Tensor,
    group_offs: Tensor,
    *,
    block_size: int | None = None,
    axis: int | None = None,
    scaling_recipe: Any = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``aiter_mx.quantize_grouped`` as Primus-Turbo's: groups padded to multiples of 128 rows.

    Args:
        x: bf16, fp16 or fp32 ``[T, N]``.
        out_dtype: as for ``quantize_fp8``.
        granularity: likewise.
        group_lens: rows of each group, ``[G]``.
        group_offs: where groups begin and end, ``[G + 1]``.
        block_size: as for ``quantize_fp8``.
        axis: likewise.
        scaling_recipe: ``shuffle_scale`` is known.

    Returns:
        payload, scales, and the padded groups' lengths and offsets.

    Raises:
        ValueError: as ``quantize_fp8``, or blocks of 32 x 32.
    """
    _refuse_granularity(granularity, block_size)
    options = _options(scaling_recipe)
    if options.pop("block") != BLOCK:
        raise ValueError("groups have blocks of 1 x 32: use_2d_block must be false")
    offs = offsets_of_groups(group_offs, None, group_lens.shape[0], x)
    made = quantize_grouped(x, offs, _axis(x, axis), format=_format(out_dtype), **options)
    return made.rows, made.row_scales, made.group_offs.diff(), made.group_offs


def dequantize_fp8(
    x: Tensor,
    out_dtype: torch.dtype,
    granularity: Any,
    *,
    block_size: int | None = None,
    axis: int | None = None,
    scale_inv: Tensor,
    scaling_recipe: Any = None,
) -> Tensor:
    """The values of what ``quantize_fp8`` gives, padding included, along the same axis.

    Args:
        x: the payload.
        out_dtype: bf16, fp16 or fp32.
        granularity: as for ``quantize_fp8``.
        block_size: likewise.
        axis: likewise.
        scale_inv: the scales.
        scaling_recipe: as for ``quantize_fp8``.

    Returns:
        as x was stored before: along columns of a matrix it is transposed back, while groups of
        matrices stay transposed.

    Raises:
        ValueError: as ``quantize_fp8``.
    """
    _refuse_granularity(granularity, block_size)
    layout = _options(scaling_recipe)["scale_layout"]
    values = dequantize(x, scale_inv, out_dtype, scale_layout=layout)
    return values.mT.contiguous() if _axis(x, axis) == -2 and x.ndim == 2 else values


def _name(member: Any) -> str:
    return getattr(member, "name", str(member))


def _grad_format(config: Any) -> str:
    """What gradients are quantised to; raises for what this package does not have."""
    if config is None:
        raise ValueError(
            "config=None asks Primus-Turbo for one scale a tensor; give "
            "Float8QuantConfig(granularity=ScalingGranularity.MX_BLOCKWISE, block_size=32, "
            "scale_dtype=ScaleDtype.E8M0)"
        )
    missing = [n for n in ("granularity", "block_size", "format") if not hasattr(config, n)]
    if missing:
        raise TypeError(
            f"config must be a Float8QuantConfig, got {type(config).__name__}, which has no "
            f"{missing[0]}"
        )
    _refuse_granularity(config.granularity, config.block_size)
    formats = {"E4M3": "e4m3", "HYBRID": "e5m2"}
    if _name(config.format) not in formats:
        raise ValueError(
            f"format must be E4M3 or HYBRID here, as activations and weights are of e4m3, got "
            f"Format.{_name(config.format)}"
        )
    return formats[_name(config.format)]


def _refuse_granularity(granularity: Any, block_size: int | None) -> None:
    if _name(granularity) != "MX_BLOCKWISE":
        raise ValueError(f"granularity must be MX_BLOCKWISE here, got {_name(granularity)}")
    if block_size != BLOCK:
        raise ValueError(f"block_size must be {BLOCK} for MX_BLOCKWISE, got {block_size}")


def _axis(x: Tensor, axis: int | None) -> int:
    if axis in (-1, x.ndim - 1):
        return -1
    if axis in (-2, x.ndim - 2):
        return -2
    raise ValueError(
        f"axis must be {x.ndim - 2} or {x.ndim - 1} for {x.ndim} dimensions, got {axis}"
    )


def _format(dtype: torch.dtype) -> str:
    known = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
    if dtype not in known:
        raise ValueError(f"out_dtype must be float8_e4m3fn or float8_e5m2, got {dtype}")
    return known[dtype]


def _options(recipe: Any) -> dict[str, Any]:
    """What ``quantize`` calls the options of a recipe."""
    given = recipe or ScalingRecipe()
    for name in ("use_sr", "use_rht", "shuffle_out"):
        if getattr(given, name):
            raise ValueError(f"{name} is not there for MX-FP8")
    layout = "16x4" if given.shuffle_scale else "row_major"
    return {"block": (BLOCK, BLOCK) if given.use_2d_block else BLOCK, "scale_layout": layout}
