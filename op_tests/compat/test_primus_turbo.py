"""Primus-Turbo's functions: gradients for both ways that weights lie, quantisation, refusals."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import aiter_mx
from aiter_mx.compat import primus_turbo as turbo
from aiter_mx.compat.primus_turbo import Float8QuantConfig, ScalingGranularity, ScalingRecipe

MX = ScalingGranularity.MX_BLOCKWISE
E4M3 = torch.float8_e4m3fn


def decibels(found: Tensor, exact: Tensor) -> float:
    found, exact = found.detach(), exact.detach()
    noise = (found.double() - exact.double()).norm()
    return float(20 * torch.log10(exact.double().norm() / noise))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("trans_b", [True, False])
@pytest.mark.parametrize("K", [160, 48])
def test_grouped_products_and_their_gradients(trans_b: bool, dtype: torch.dtype, K: int) -> None:
    lens = torch.tensor([33, 0, 128, 71])
    T, N, G = int(lens.sum()), 96, len(lens)
    a = torch.randn(T, K).to(dtype).requires_grad_()
    b = torch.randn(*((G, N, K) if trans_b else (G, K, N))).to(dtype).requires_grad_()
    y = turbo.grouped_gemm_fp8(a, b, lens, trans_b=trans_b, config=Float8QuantConfig())
    dy = torch.randn(T, N).to(dtype)
    y.backward(dy)
    exact_a, exact_b = (each.detach().double().requires_grad_() for each in (a, b))
    products = [
        part @ (w.T if trans_b else w)
        for part, w in zip(exact_a.split(lens.tolist()), exact_b, strict=True)
    ]
    exact = torch.cat(products)
    exact.backward(dy.double())
    assert y.dtype == dtype and b.grad.shape == b.shape
    assert decibels(y, exact) >= 25
    assert decibels(a.grad, exact_a.grad) >= 20 and decibels(b.grad, exact_b.grad) >= 20
    offs = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
    again = turbo.grouped_gemm_fp8(a, b, lens, offs, trans_b, config=Float8QuantConfig())
    assert torch.equal(again, y)
    single = turbo.grouped_gemm_fp8(
        a, b, lens, trans_b=trans_b, out_dtype=torch.float32, config=Float8QuantConfig()
    )
    assert single.dtype == torch.float32 and torch.equal(single.to(dtype), y)


@pytest.mark.parametrize("trans_a", [True, False])
@pytest.mark.parametrize("trans_b", [True, False])
def test_plain_products_and_their_gradients(trans_a: bool, trans_b: bool) -> None:
    a = torch.randn(*((64, 100) if trans_a else (100, 64)), requires_grad=True)
    b = torch.randn(*((96, 64) if trans_b else (64, 96)), requires_grad=True)
    y = turbo.gemm_fp8(a, b, trans_a, trans_b, torch.bfloat16, Float8QuantConfig())
    y.float().sum().backward()
    grads = a.grad, b.grad
    a.grad = b.grad = None
    exact = (a.T if trans_a else a) @ (b.T if trans_b else b)
    exact.sum().backward()
    assert y.dtype == torch.bfloat16 and decibels(y, exact) >= 25
    for found, right in zip(grads, (a.grad, b.grad), strict=True):
        assert decibels(found, right) >= 20


def test_hybrid_quantises_gradients_to_e5m2() -> None:
    a, b = torch.randn(60, 64, requires_grad=True), torch.randn(2, 32, 64, requires_grad=True)
    lens, dy = torch.tensor([23, 37]), torch.randn(60, 32)
    config = turbo.Float8QuantConfig(turbo.Format.HYBRID)
    turbo.grouped_gemm_fp8(a, b, lens, config=config).backward(dy)
    found, a.grad, b.grad = (a.grad, b.grad), None, None
    aiter_mx.grouped_linear(a, b, group_lens=lens, grad_format="e5m2").backward(dy)
    assert torch.equal(found[0], a.grad) and torch.equal(found[1], b.grad)


@pytest.mark.parametrize("groups", [False, True], ids=["gemm", "grouped"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_main_gradient_is_added_to_as_megatron_has_it(dtype: torch.dtype, groups: bool) -> None:
    a, dy = torch.randn(60, 64).bfloat16(), torch.randn(60, 32).bfloat16()
    drawn = torch.randn(2, 32, 64) if groups else torch.randn(32, 64)
    lens = torch.tensor([23, 37])

    def call(b: Tensor, **options: str) -> Tensor:
        if groups:
            return turbo.grouped_gemm_fp8(a, b, lens, config=Float8QuantConfig(), **options)
        return turbo.gemm_fp8(a, b, trans_b=True, config=Float8QuantConfig(), **options)

    plain, fused = (drawn.bfloat16().requires_grad_() for _ in range(2))
    previous = torch.randn(drawn.shape).to(dtype)
    fused.main_grad, fused.grad_added_to_main_grad = previous.clone(), False
    expected, y = call(plain), call(fused, fuse_bgrad_accum_pattern="megatron")
    assert torch.equal(y, expected) and fused.grad_added_to_main_grad
    for each in (expected, y):
        each.backward(dy)
    assert fused.grad is not None and not fused.grad.any()
    assert (fused.grad.shape, fused.grad.dtype) == (fused.shape, fused.dtype)
    found = fused.main_grad.float() - previous.float()
    assert (found - plain.grad.float()).norm() <= 0.01 * plain.grad.float().norm()
    with pytest.raises(ValueError, match="must be None or 'megatron', got 'other'"):
        call(fused, fuse_bgrad_accum_pattern="other")
    with pytest.raises(ValueError, match=r"adds to b.main_grad, which must be a tensor of b's"):
        call(plain, fuse_bgrad_accum_pattern="megatron")


def test_quantisation_pads_and_takes_recipes() -> None:
    x = torch.randn(40, 160)
    payload, scale = turbo.quantize_fp8(x, E4M3, MX, block_size=32, axis=1)
    assert payload.shape == (40, 256) and scale.shape == (40, 8)
    values = turbo.dequantize_fp8(
        payload, torch.float32, MX, block_size=32, axis=1, scale_inv=scale
    )
    assert torch.equal(values[:, :160], aiter_mx.dequantize(*aiter_mx.quantize(x)))
    assert not values[:, 160:].any()
    both = turbo.quantize_fp8_with_trans(x, E4M3, MX, block_size=32)
    assert torch.equal(both[0].view(torch.uint8), payload.view(torch.uint8))
    back = turbo.dequantize_fp8(
        both[2], torch.float32, MX, block_size=32, axis=0, scale_inv=both[3]
    )
    assert back.shape == (128, 160) and decibels(back[:40], x) >= 25 and not back[40:].any()
    groups = torch.randn(3, 40, 64)
    stored, scale = turbo.quantize_fp8(groups, E4M3, MX, block_size=32, axis=1)
    back = turbo.dequantize_fp8(stored, torch.float32, MX, block_size=32, axis=1, scale_inv=scale)
    assert back.shape == (3, 64, 128) and decibels(back[..., :40].mT, groups) >= 25
    square = turbo.quantize_fp8(
        torch.randn(64, 128), E4M3, MX, block_size=32, axis=1,
        scaling_recipe=ScalingRecipe(use_2d_block=True),
    )  # fmt: skip
    assert torch.equal(square[1][0], square[1][31])


def test_each_way_along_a_matrix_takes_a_recipe_of_its_own() -> None:
    x = torch.randn(128, 256)
    plain = turbo.quantize_fp8_with_trans(x, E4M3, MX, block_size=32)
    recipe = ScalingRecipe(shuffle_scale=True)
    for name, places in (("scaling_recipe", (0, 1)), ("scaling_recipe_for_trans", (2, 3))):
        made = turbo.quantize_fp8_with_trans(x, E4M3, MX, block_size=32, **{name: recipe})
        for at, (found, without) in enumerate(zip(made, plain, strict=True)):
            is_same = torch.equal(found.view(torch.uint8), without.view(torch.uint8))
            assert is_same == (at != places[1])
        shuffled = aiter_mx.shuffle_scales(plain[places[1]], "16x4")
        assert torch.equal(made[places[1]].flatten(), shuffled.flatten())
    found = turbo.quantize_fp8(x, E4M3, MX, block_size=32, axis=1, scaling_recipe=recipe)
    values = turbo.dequantize_fp8(
        found[0], torch.float32, MX, block_size=32, axis=1, scale_inv=found[1],
        scaling_recipe=recipe,
    )  # fmt: skip
    assert torch.equal(values, aiter_mx.dequantize(plain[0], plain[1]))


def test_groups_are_padded_on_the_device() -> None:
    x, offs = torch.randn(70, 64), torch.tensor([0, 33, 70])
    made = turbo.grouped_quantize_fp8(x, E4M3, MX, offs.diff(), offs, block_size=32, axis=0)
    expected = aiter_mx.quantize_grouped(x, offs, -2)
    assert torch.equal(made[0].view(torch.uint8), expected.rows.view(torch.uint8))
    assert made[2].tolist() == [128, 128] and made[3].tolist() == [0, 128, 256]
    shuffled = turbo.grouped_quantize_fp8(
        x, E4M3, MX, offs.diff(), offs, block_size=32, axis=0,
        scaling_recipe=ScalingRecipe(shuffle_scale=True),
    )  # fmt: skip
    expected = aiter_mx.quantize_grouped(x, offs, -2, scale_layout="16x4")
    assert torch.equal(shuffled[1], expected.row_scales)
    assert not torch.equal(shuffled[1], made[1])


def test_primus_turbos_own_configuration_is_known_by_its_names() -> None:
    def member(name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name)

    config = SimpleNamespace(
        granularity=member("MX_BLOCKWISE"), format=member("E4M3"), block_size=32
    )
    a, b, lens = torch.randn(10, 64), torch.randn(1, 32, 64), torch.tensor([10])
    assert turbo.grouped_gemm_fp8(a, b, lens, config=config).shape == (10, 32)
    for name, value, expected in (
        ("granularity", member("ROWWISE"), "MX_BLOCKWISE here, got ROWWISE"),
        ("format", member("E5M2"), "E4M3 or HYBRID here, .* got Format.E5M2"),
        ("block_size", 128, "block_size must be 32 for MX_BLOCKWISE, got 128"),
    ):
        changed = SimpleNamespace(**(vars(config) | {name: value}))
        with pytest.raises(ValueError, match=expected):
            turbo.grouped_gemm_fp8(a, b, lens, config=changed)
    with pytest.raises(ValueError, match="one scale a tensor; give Float8QuantConfig"):
        turbo.grouped_gemm_fp8(a, b, lens)
    with pytest.raises(ValueError, match=r"N must be a multiple of 32, got N=33 \(b: \[64, 33\]\)"):
        turbo.gemm_fp8(a, torch.randn(64, 33), config=config)
    with pytest.raises(TypeError, match="config must be a Float8QuantConfig, got str"):
        turbo.grouped_gemm_fp8(a, b, lens, config="mx")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"axis": 2}, "axis must be 0 or 1 for 2 dimensions, got 2"),
        ({"axis": 1, "pad_align_last": 128}, "TENSORWISE alone"),
        ({"axis": 1, "scaling_recipe": ScalingRecipe(use_sr=True)}, "use_sr is not there"),
    ],
)
def test_other_options_are_refused(options: dict[str, object], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        turbo.quantize_fp8(torch.randn(32, 32), E4M3, MX, block_size=32, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="out_dtype must be float8_e4m3fn or float8_e5m2"):
        turbo.quantize_fp8(torch.randn(32, 32), torch.uint8, MX, block_size=32, axis=1)
