"""DeepGEMM's FP8 GEMMs, grouped and dense, under their own names.

Tensors come in pairs (payload, scale). Scales may be

- fp32 or e8m0 (uint8, float8_e8m0fnu), one for each 128 k of a row of activations, and one for each
  128 k of 128 rows of weights, or of one;
- either of them one for each 32 k of a row, as MX has it;
- e8m0, four of a row in an int32 (``get_mn_major_tma_aligned_packed_ue8m0_tensor``);

with any strides, fp32 ones also as ``[K / 128, rows]``. All are used as they are. Scales of e8m0
are MX's, and so are fp32 ones that are known to be powers of two, which is seen on the CPU alone:
sums are then as exact as ``aiter_mx.linear`` and ``aiter_mx.grouped_gemm`` have them. With other
fp32 scales the products of 128 k at a time are added up in fp32, each under its scales: by one
kernel where ``aiter_mx/ops/promoted_gemm.py`` finds one (CDNA4; Hopper for 16-bit results), else by
``aiter_mx/compat/promoted.py``, as many launches as K has 128. Hopper's, ``wgmma_fp8``, adds the
128 products with some 14 bits: within 2^-6 of the sum of their magnitudes, for random payloads
within 2^-9. ``AITER_MX_EXACT_SUMS=1`` passes it over, and what the ops have like it.
"""

from __future__ import annotations

import torch

from aiter_mx.checks import (
    INDEX_NAMES,
    check_groups,
    check_tensor,
    checking,
    refuse_no_tensor,
    refuse_no_whole_number,
    shape_text,
)
from aiter_mx.compat import deep_gemm_layout as layout
from aiter_mx.compat import k_grouped, promoted
from aiter_mx.compat.names import payload_of, renamed
from aiter_mx.compat.promoted import COARSE
from aiter_mx.numerics import NAN_SCALE
from aiter_mx.ops.group_runs import group_runs
from aiter_mx.ops.grouped_gemm import grouped_gemm_ranges
from aiter_mx.ops.linear import linear
from aiter_mx.ops.promoted_gemm import promoted_gemm

Pair = tuple[torch.Tensor, torch.Tensor]
Recipe = tuple[int, int, int] | None
HalfRecipe = tuple[int, int] | None


def m_grouped_fp8_fp4_gemm_nt_contiguous(
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    recipe: Recipe = None,
    recipe_a: HalfRecipe = None,
    recipe_b: HalfRecipe = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
) -> None:
    """``d[m] = a[m] @ b[group of m].T`` for rows of groups that lie one after the other.

    Args:
        a: float8_e4m3fn ``[M, K]`` and its scales.
        b: float8_e4m3fn ``[G, N, K]``, of any strides, and its scales.
        d: ``[M, N]``, bf16, fp16 or fp32, written.
        grouped_layout: int32 ``[M]``: a row's group, or -1 for padding. A group may have several
            runs of rows with others or padding between them, in any order, which all begin at
            multiples of what ``set_mk_alignment_for_contiguous_layout`` set, 128 at first. Runs may
            begin anywhere where they are no more than groups, and where the layout is read: on the
            CPU, or where ``AITER_MX_CHECK=1`` asks for it; elsewhere those beyond become NaN.
            With use_psum_layout ``[G]``: the row after each group's last, and a group begins at
            the next multiple of the same from there.
        recipe: not needed: shapes tell what a scale stands for; likewise recipe_a and recipe_b.
        recipe_a: not needed.
        recipe_b: not needed.
        compiled_dims: not needed.
        disable_ue8m0_cast: not needed: scales are used as they are.
        use_psum_layout: see grouped_layout.
        ensure_zero_padding: whether rows of no group become 0 with use_psum_layout; otherwise they
            are left as they are. Without, they become 0.
        expected_m_for_psum_layout: not needed.

    Raises:
        TypeError, ValueError: as ``aiter_mx.grouped_gemm``; scales of another shape or dtype; with
            ``AITER_MX_CHECK=1`` a group that is not there.
    """
    payload, scale = _operand("a", a)
    weights, weight_scale = _operand("b", b)
    refuse_no_tensor(d=d, grouped_layout=grouped_layout)
    if grouped_layout.dtype != torch.int32:
        raise TypeError(f"grouped_layout must be torch.int32, got {grouped_layout.dtype}")
    if payload.ndim != 2 or weights.ndim != 3:
        raise ValueError(
            f"a must be [M, K] and b [G, N, K], got {shape_text(payload)} and {shape_text(weights)}"
        )
    M, G = payload.shape[0], weights.shape[0]
    expected, form = ((G,), "[G]") if use_psum_layout else ((M,), "[M]")
    if tuple(grouped_layout.shape) != expected:
        raise ValueError(
            f"a must be [M, K] and grouped_layout {form}, got "
            f"{shape_text(payload)} and {shape_text(grouped_layout)}"
        )
    if grouped_layout.device != payload.device:
        raise ValueError(
            f"grouped_layout is on {grouped_layout.device}, but a is on {payload.device}"
        )
    _refuse_other_d(d, (M, weights.shape[1]), payload)
    run_rows = each = layout.get_mk_alignment_for_contiguous_layout()
    owner, lost = grouped_layout.contiguous(), None
    if use_psum_layout:
        ends = grouped_layout
        starts = torch.nn.functional.pad(-(-ends[:-1] // each) * each, (1, 0))
        check_groups("grouped_layout", G, starts, ends, M)
        owner = layout.owners(starts, ends, M)
    if use_psum_layout and not ensure_zero_padding:
        run_rows = 0
    else:
        starts, ends, lost = group_runs(owner, G, run_rows, d)
        if not use_psum_layout and (owner.device.type == "cpu" or checking()):
            layout.refuse_unknown(owner, G)
            if int(lost) < M:
                owner = torch.where(owner < G, owner, -1)
                order, by_group = owner.argsort(stable=True), torch.empty_like(d)
                rows = layout.taken(payload, order), promoted.of_rows(scale, M)[order]
                m_grouped_fp8_fp4_gemm_nt_contiguous(rows, b, by_group, owner[order])
                d[order] = by_group
                return
    bounds = (starts, ends, d, 0, run_rows)
    if _is_fine(scale) and _is_fine(weight_scale):
        _multiply(payload, scale, weights, weight_scale, *bounds)
    elif not _promoted(payload, scale, weights, weight_scale, *bounds):

        def partial(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
            ones = promoted.ones_of(x), promoted.ones_of(w)
            _multiply(x, ones[0], w, ones[1], starts, ends, out, 0, run_rows)

        scales = promoted.of_rows(scale, M), promoted.of_rows(weight_scale, weights.shape[1], True)
        if lost is not None:
            row = torch.arange(M, device=owner.device)
            owner = torch.where((owner < G) & (row < lost), owner, -1)
        promoted.multiply(payload, scales[0], weights, scales[1], owner, d, partial)


def m_grouped_fp8_fp4_gemm_nt_masked(
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    recipe: Recipe = None,
    recipe_a: HalfRecipe = None,
    recipe_b: HalfRecipe = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """``d[g, m] = a[g, m] @ b[g].T`` for the first ``masked_m[g]`` rows m of each group g.

    Args:
        a: float8_e4m3fn ``[G, M, K]`` and its scales.
        b: float8_e4m3fn ``[G, N, K]``, of any strides, and its scales.
        d: ``[G, M, N]``, bf16, fp16 or fp32; other rows are left as they are.
        masked_m: int32 ``[G]``, on the device.
        expected_m: a likely value of masked_m, which chooses tiles.
        recipe: not needed: shapes tell what a scale stands for; likewise recipe_a and recipe_b.
        recipe_a: not needed.
        recipe_b: not needed.
        compiled_dims: not needed.
        disable_ue8m0_cast: not needed: scales are used as they are.

    Raises:
        TypeError, ValueError: as ``aiter_mx.grouped_gemm``; scales of another shape or dtype.
    """
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
    if _is_fine(scale) and _is_fine(weight_scale):
        _multiply(payload, scale, weights, weight_scale, None, masked_m, d, expected)
        return
    if _promoted(payload, scale, weights, weight_scale, None, masked_m, d, expected):
        return

    def partial(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        ones = promoted.ones_of(x), promoted.ones_of(w)
        _multiply(x, ones[0], w, ones[1], None, masked_m, out, expected)

    G, M, _ = payload.shape
    _refuse_other_d(d, (G, M, weights.shape[-2]), payload)
    group = torch.arange(G, device=payload.device).unsqueeze(1)
    row = torch.arange(M, device=payload.device)
    owner = torch.where(row < masked_m.unsqueeze(1), group, -1)
    scales = promoted.of_rows(scale, M), promoted.of_rows(weight_scale, weights.shape[-2], True)
    promoted.multiply(payload, scales[0], weights, scales[1], owner, d, partial)


def fp8_fp4_gemm_nt(
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Recipe = None,
    recipe_a: HalfRecipe = None,
    recipe_b: HalfRecipe = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    alpha: float | None = None,
) -> None:
    """``d = alpha * a @ b.T + c``.

    Args:
        a: float8_e4m3fn ``[M, K]``, of any strides, and its scales.
        b: float8_e4m3fn ``[N, K]``, likewise.
        d: ``[M, N]``, bf16, fp16 or fp32, written.
        c: ``[M, N]`` of d's dtype, d itself for example, or None.
        recipe: not needed: shapes tell what a scale stands for; likewise recipe_a and recipe_b.
        recipe_a: not needed.
        recipe_b: not needed.
        compiled_dims: not needed.
        disable_ue8m0_cast: not needed: scales are used as they are.
        alpha: a factor, or None for 1.

    Raises:
        TypeError, ValueError: as ``aiter_mx.linear``; scales of another shape or dtype.
    """
    payload, scale = _operand("a", a)
    weights, weight_scale = _operand("b", b)
    refuse_no_tensor(("c",), d=d, c=c)
    if not isinstance(alpha, (int, float, torch.Tensor, type(None))):
        raise TypeError(f"alpha must be a number or None, got {alpha!r}")
    M, N = payload.shape[0], weights.shape[0]
    _refuse_other_d(d, (M, N), payload)
    adds = c is not None or alpha is not None
    target = torch.empty(M, N, dtype=torch.float32, device=payload.device) if adds else d
    if _is_fine(scale) and _is_fine(weight_scale):
        linear(payload, scale, weights, weight_scale, out_dtype=target.dtype, out=target)
    elif not _promoted_dense(payload, scale, weights, weight_scale, target):

        def partial(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
            ones = promoted.ones_of(x), promoted.ones_of(w[0])
            linear(x, ones[0], w[0], ones[1], out_dtype=out.dtype, out=out)

        owner = torch.zeros(M, dtype=torch.int64, device=payload.device)
        scales = promoted.of_rows(scale, M), promoted.of_rows(weight_scale, N, True)
        one_group = weights.unsqueeze(0), scales[1].unsqueeze(0)
        promoted.multiply(payload, scales[0], *one_group, owner, target, partial)
    if adds:
        result = target if alpha is None else target * alpha
        d.copy_(result if c is None else result + c)


def fp8_fp4_gemm_nn(a: Pair, b: Pair, *others: object, **options: object) -> None:
    """``fp8_fp4_gemm_nt`` of b as ``[K, N]``, its scales likewise.

    Args:
        a: float8_e4m3fn ``[M, K]``, and its scales.
        b: float8_e4m3fn ``[K, N]``, and its scales, turned as it is.
        others: d, c and what else ``fp8_fp4_gemm_nt`` takes, in its order.
        options: likewise, by name.

    Raises:
        TypeError, ValueError: as ``fp8_fp4_gemm_nt``.
    """
    fp8_fp4_gemm_nt(a, _turned("b", b), *others, **options)  # type: ignore[arg-type]


def fp8_fp4_gemm_tn(a: Pair, b: Pair, *others: object, **options: object) -> None:
    """``fp8_fp4_gemm_nt`` of a as ``[K, M]`` and b as ``[K, N]``, their scales likewise.

    Args:
        a: float8_e4m3fn ``[K, M]``, and its scales, turned as it is.
        b: float8_e4m3fn ``[K, N]``, and its scales, turned as it is.
        others: d, c and what else ``fp8_fp4_gemm_nt`` takes, in its order.
        options: likewise, by name.

    Raises:
        TypeError, ValueError: as ``fp8_fp4_gemm_nt``.
    """
    fp8_fp4_gemm_nt(_turned("a", a), _turned("b", b), *others, **options)  # type: ignore[arg-type]


def fp8_fp4_gemm_tt(a: Pair, b: Pair, *others: object, **options: object) -> None:
    """``fp8_fp4_gemm_nt`` of a as ``[K, M]``, its scales likewise.

    Args:
        a: float8_e4m3fn ``[K, M]``, and its scales, turned as it is.
        b: float8_e4m3fn ``[N, K]``, and its scales.
        others: d, c and what else ``fp8_fp4_gemm_nt`` takes, in its order.
        options: likewise, by name.

    Raises:
        TypeError, ValueError: as ``fp8_fp4_gemm_nt``.
    """
    fp8_fp4_gemm_nt(_turned("a", a), b, *others, **options)  # type: ignore[arg-type]


def m_grouped_fp8_fp4_gemm_nn_contiguous(
    a: Pair, b: Pair, d: torch.Tensor, grouped_layout: torch.Tensor, **options: object
) -> None:
    """``m_grouped_fp8_fp4_gemm_nt_contiguous`` of b as ``[G, K, N]``, its scales likewise.

    Args:
        a: as for ``m_grouped_fp8_fp4_gemm_nt_contiguous``.
        b: float8_e4m3fn ``[G, K, N]``, and its scales, turned as it is.
        d: as for ``m_grouped_fp8_fp4_gemm_nt_contiguous``.
        grouped_layout: likewise.
        options: what else it takes, by name.

    Raises:
        TypeError, ValueError: likewise.
    """
    turned = _turned("b", b)
    m_grouped_fp8_fp4_gemm_nt_contiguous(a, turned, d, grouped_layout, **options)  # type: ignore[arg-type]


fp8_gemm_nt, fp8_gemm_nn = fp8_fp4_gemm_nt, fp8_fp4_gemm_nn
fp8_gemm_tn, fp8_gemm_tt = fp8_fp4_gemm_tn, fp8_fp4_gemm_tt
m_grouped_fp8_gemm_nt_contiguous = m_grouped_fp8_fp4_gemm_nt_contiguous
m_grouped_fp8_gemm_nn_contiguous = m_grouped_fp8_fp4_gemm_nn_contiguous
fp8_m_grouped_gemm_nt_masked = m_grouped_fp8_fp4_gemm_nt_masked
m_grouped_fp8_gemm_nt_masked = m_grouped_fp8_fp4_gemm_nt_masked
k_grouped_fp8_gemm_tn_contiguous = k_grouped.k_grouped_fp8_gemm_tn_contiguous
k_grouped_fp8_gemm_nt_contiguous = k_grouped.k_grouped_fp8_gemm_nt_contiguous
get_mk_alignment_for_contiguous_layout = layout.get_mk_alignment_for_contiguous_layout
set_mk_alignment_for_contiguous_layout = layout.set_mk_alignment_for_contiguous_layout
get_m_alignment_for_contiguous_layout = layout.get_mk_alignment_for_contiguous_layout
get_k_alignment_for_contiguous_layout = layout.get_mk_alignment_for_contiguous_layout
get_theoretical_mk_alignment_for_contiguous_layout = (
    layout.get_theoretical_mk_alignment_for_contiguous_layout
)
get_tma_aligned_size = layout.get_tma_aligned_size
get_mn_major_tma_aligned_tensor = layout.get_mn_major_tma_aligned_tensor
get_mn_major_tma_aligned_packed_ue8m0_tensor = layout.get_mn_major_tma_aligned_packed_ue8m0_tensor
get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor = (
    layout.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor
)
transform_sf_into_required_layout = layout.transform_sf_into_required_layout
expand_scales = layout.expand_scales


def _operand(name: str, pair: Pair) -> Pair:
    """A pair whose payload is contiguous, and whose scales are bytes for 32 k where MX has them."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TypeError(f"{name} must be a pair (payload, scale), got {type(pair).__name__}")
    payload, scale = pair
    refuse_no_tensor(**{f"{name}'s payload": payload, f"{name}'s scale": scale})
    payload = payload_of(payload)
    if scale.dtype == torch.int32:
        scale = layout.unpacked(payload, scale)
    if scale.dtype == torch.float32:
        scale = layout.in_order(payload, scale)
        if scale.device.type != "cpu" or not bool(
            (layout.power_of_two_bytes(scale) != NAN_SCALE).all()
        ):
            return payload.contiguous(), scale
    return payload.contiguous(), expand_scales(payload, scale)


def _is_fine(scale: torch.Tensor) -> bool:
    """Whether scales are MX's."""
    return scale.dtype == torch.uint8


def _turned(name: str, pair: Pair) -> Pair:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TypeError(f"{name} must be a pair (payload, scale), got {type(pair).__name__}")
    refuse_no_tensor(**{f"{name}'s payload": pair[0], f"{name}'s scale": pair[1]})
    return pair[0].transpose(-1, -2), pair[1].transpose(-1, -2)


def _refuse_other_d(d: torch.Tensor, shape: tuple[int, ...], a: torch.Tensor) -> None:
    if tuple(d.shape) != shape:
        raise ValueError(f"d must be {list(shape)}, got {shape_text(d)}")
    if d.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(
            f"d's dtype must be torch.bfloat16 or torch.float16 or torch.float32, got {d.dtype}"
        )
    if d.device != a.device:
        raise ValueError(f"d is on {d.device}, but a is on {a.device}")


def _multiply(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    starts: torch.Tensor | None,
    ends: torch.Tensor,
    d: torch.Tensor,
    expected: int = 0,
    run_rows: int = 0,
) -> None:
    try:
        grouped_gemm_ranges(
            a, a_scale, b, b_scale, starts, ends, d, d.dtype, None, expected, run_rows=run_rows
        )
    except (TypeError, ValueError) as error:
        raise renamed(error, {"out": "d", "out_dtype": "d's dtype"}) from error


def _promoted(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    starts: torch.Tensor | None,
    ends: torch.Tensor,
    d: torch.Tensor,
    expected: int = 0,
    run_rows: int = 0,
) -> bool:
    """Whether a kernel has written the product of operands with fp32 scales for 128 k."""
    if b.ndim != 3 or (a.ndim == 3 and b.shape[0] != a.shape[0]) or a.shape[-1] != b.shape[-1]:
        return False  # what multiplies step by step says why
    _refuse_other_d(d, (*a.shape[:-1], b.shape[1]), a)
    if a.ndim == 3:
        check_tensor("masked_m", ends, tuple(INDEX_NAMES), (b.shape[0],), a.device)
        check_groups("masked_m", b.shape[0], None, ends, a.shape[1], True)
    if a_scale.shape != (*a.shape[:-1], -(-a.shape[-1] // COARSE)):
        return False
    return promoted_gemm(a, a_scale, b, b_scale, starts, ends, d, expected, run_rows)


def _promoted_dense(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    d: torch.Tensor,
) -> bool:
    """``_promoted`` of one group that has all rows."""
    if a.ndim != 2 or b.ndim != 2:
        return False
    end = torch.full((1,), a.shape[0], dtype=torch.int32, device=a.device)
    return _promoted(a, a_scale, b.unsqueeze(0), b_scale.unsqueeze(0), None, end, d)
