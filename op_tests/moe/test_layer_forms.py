"""Forms in which engines hand tokens to ``aiter_mx.fused_moe``, and take results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import aiter_mx
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels.fused_moe import FusedMoeProblem
from aiter_mx.target import hardware
from op_tests.moe.operands import mx
from op_tests.places import device_in

M, H, I, E, TOP_K, SHARED = 7, 96, 64, 5, 3, 1


device = device_in("torch", "sim", "cuda")


def layer(device: torch.device, tokens: int = M, dtype: torch.dtype = torch.bfloat16) -> Any:
    """x, and all else that a layer takes; slots of experts that are elsewhere or of none."""
    g = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, H, generator=g).to(device, dtype)
    w1, w2 = mx(E + SHARED, 2 * I, H, generator=g), mx(E + SHARED, H, I, generator=g)
    ids = torch.randint(-1, E + 2, (tokens, TOP_K), generator=g, dtype=torch.int32)
    rest = (*w1, *w2, ids, torch.rand(tokens, TOP_K, generator=g))
    return x, [each.to(device) for each in rest], {"shared_experts": SHARED, "block_m": 16}


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_quantised_tokens_give_the_same_bits(device: torch.device, out_dtype: torch.dtype) -> None:
    x, rest, options = layer(device, dtype=out_dtype)
    expected = aiter_mx.fused_moe(x, *rest, **options)
    xq, xs = aiter_mx.quantize(x)
    found = aiter_mx.fused_moe(xq, *rest, x_scale=xs, out_dtype=out_dtype, **options)
    assert found.dtype == out_dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("count", [0, 1, 4, M, M + 9, -1])
@pytest.mark.parametrize("quantised", [False, True])
def test_tokens_behind_the_count_are_neither_read_nor_written(
    device: torch.device, count: int, quantised: bool
) -> None:
    x, rest, options = layer(device)
    expected = aiter_mx.fused_moe(x, *rest, **options)
    used = min(max(count, 0), M)
    *weights, ids, topk_weights = rest
    x[used:], topk_weights[used:] = torch.nan, torch.nan
    ids[used:] = torch.arange(len(ids[used:]) * TOP_K, device=device).view(-1, TOP_K) % E
    tokens = {"x": x, "x_scale": None}
    if quantised:
        tokens["x"], tokens["x_scale"] = aiter_mx.quantize(x)
    out = torch.full_like(expected, 7)
    number = torch.tensor([count], dtype=torch.int32, device=device)
    x = tokens.pop("x")
    aiter_mx.fused_moe(
        x, *weights, ids, topk_weights, **tokens, num_tokens=number, out=out, **options
    )
    assert torch.equal(out[:used], expected[:used])
    assert (out[used:] == 7).all()


@pytest.mark.parametrize("expected", [0, 1, 3, 100])
def test_more_tokens_than_expected_are_computed_all_the_same(
    device: torch.device, expected: int
) -> None:
    x, rest, options = layer(device)
    options["block_m"] = None
    *weights, ids, topk_weights = rest
    room = [torch.cat((each, each.flip(0))) for each in (x, ids, topk_weights)]
    whole = aiter_mx.fused_moe(room[0], *weights, *room[1:], **options)
    number = torch.tensor([M], dtype=torch.int32, device=device)
    forms = {"num_tokens": number, "expected_tokens": expected, "out": torch.full_like(whole, 7)}
    found = aiter_mx.fused_moe(room[0], *weights, *room[1:], **forms, **options)
    torch.testing.assert_close(found[:M], whole[:M], rtol=2**-7, atol=0)
    assert (found[M:] == 7).all()


def explain_layer(arch: str, **shape: int) -> list[tuple[str, Any]]:
    """The kernel and the configuration of each GEMM of a layer."""
    return [
        (chosen.kernel, chosen.config)
        for op, part in FusedMoeProblem(**shape).parts(arch)
        if op == "moe_gemm"
        for chosen in [route(op, hardware(arch), part)]
    ]


@pytest.mark.parametrize("arch", ["gfx950", "sm_90a"])
def test_kernels_are_chosen_for_what_is_expected(arch: str) -> None:
    shape = {"hidden": 2048, "intermediate": 768, "E": 128, "top_k": 8}
    few = explain_layer(arch, M=64, **shape)
    assert explain_layer(arch, M=1024, expected=64, **shape) == few
    assert explain_layer(arch, M=1024, **shape) != few


def test_slots_may_stay_apart(device: torch.device) -> None:
    x, rest, options = layer(device, dtype=torch.float32)
    summed = aiter_mx.fused_moe(x, *rest, **options)
    apart = aiter_mx.fused_moe(x, *rest, reduce=False, **options)
    assert apart.shape == (M, TOP_K + SHARED, H)
    ids, weights = rest[-2:]
    is_here = (ids >= 0) & (ids < E)
    assert not apart[:, :TOP_K][~is_here].any()
    assert (apart[:, :TOP_K][is_here] != 0).any(-1).all()
    weights = torch.cat((weights, weights.new_ones(M, SHARED)), 1).unsqueeze(2)
    torch.testing.assert_close((apart * weights).sum(1), summed, rtol=1e-5, atol=1e-5)


def test_apart_and_counted_together(device: torch.device) -> None:
    x, rest, options = layer(device)
    number = torch.tensor([3], dtype=torch.int32, device=device)
    whole = aiter_mx.fused_moe(x, *rest, reduce=False, **options)
    out = torch.full_like(whole, 7)
    aiter_mx.fused_moe(x, *rest, reduce=False, num_tokens=number, out=out, **options)
    assert torch.equal(out[:3], whole[:3])
    assert (out[3:] == 7).all()


@pytest.mark.parametrize("tokens", [M, 40])  # those of few tokens, and of more
def test_an_infinite_weight_spoils_its_own_token_alone(device: torch.device, tokens: int) -> None:
    x, rest, options = layer(device, tokens)
    *weights, ids, topk_weights = rest
    expected = aiter_mx.fused_moe(x, *rest, **options)
    ids[2, 1], ids[4, 0] = 3, -1
    topk_weights[2, 1] = topk_weights[4, 0] = torch.inf  # the other one's slot is left out
    found = aiter_mx.fused_moe(x, *weights, ids, topk_weights, **options)
    others = [m for m in range(tokens) if m not in (2, 4)]
    assert torch.equal(found[others], expected[others])
    assert not found[2].isfinite().any() and found[4].isfinite().all()


def test_no_limit_is_infinity() -> None:
    x, rest, options = layer(torch.device("cpu"))
    options |= {"activation": "swiglu_oai", "alpha": 1.0, "beta": 0.0}
    found = aiter_mx.fused_moe(x, *rest, limit=None, **options)
    assert torch.equal(found, aiter_mx.fused_moe(x, *rest, limit=float("inf"), **options))


def test_compiled_whole_with_every_form() -> None:
    x, rest, options = layer(torch.device("cpu"))
    xq, xs = aiter_mx.quantize(x)
    number = torch.tensor([5], dtype=torch.int32)

    def call(xq: Tensor, xs: Tensor, number: Tensor) -> Tensor:
        forms = {"x_scale": xs, "num_tokens": number, "out_dtype": torch.float16}
        return aiter_mx.fused_moe(xq, *rest, **forms, reduce=False, **options)[:5]

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(xq, xs, number), call(xq, xs, number))


def test_what_does_not_fit_is_refused() -> None:
    x, rest, options = layer(torch.device("cpu"))
    xq, xs = aiter_mx.quantize(x)
    for tokens, forms, error, message in [
        (x, {"x_scale": xs}, TypeError, "x must be torch.float8_e4m3fn, got torch.bfloat16"),
        (xq, {}, TypeError, "x must be torch.bfloat16 or"),
        (xq, {"x_scale": xs[:, :1]}, ValueError, r"x_scale must be \[7, 3\], got \[7, 1\]"),
        (xq, {"x_scale": xs, "out_dtype": torch.int8}, TypeError, "out_dtype must be torch.bfl"),
        (x, {"out_dtype": torch.float16}, TypeError, "out_dtype must be x's, torch.bfloat16"),
        (x, {"num_tokens": torch.tensor([3])}, TypeError, "num_tokens must be torch.int32"),
        (x, {"num_tokens": 3}, TypeError, "num_tokens must be a tensor, got int"),
    ]:
        with pytest.raises(error, match=message):
            aiter_mx.fused_moe(tokens, *rest, **forms, **options)


@pytest.mark.parametrize("quantised", [False, True])
def test_masked_layer_computes_the_rows_that_count_alone(
    device: torch.device, quantised: bool
) -> None:
    g = torch.Generator().manual_seed(9)
    rows, counts = 20, torch.tensor([0, 20, 7, 1, 3], dtype=torch.int32)
    w1, w2 = mx(E, 2 * I, H, generator=g), mx(E, H, I, generator=g)
    weights = [each.to(device) for each in (*w1, *w2)]
    x = torch.randn(E, rows, H, generator=g, dtype=torch.bfloat16).to(device)
    counted = (torch.arange(rows) < counts.unsqueeze(1)).to(device)
    ids = torch.arange(E, dtype=torch.int32, device=device).repeat_interleave(rows).unsqueeze(1)
    ones = torch.ones(E * rows, 1, device=device)
    flat = x.view(E * rows, H)
    expected = aiter_mx.fused_moe(flat, *weights, ids, ones, block_m=32).view(E, rows, H)
    x[~counted] = torch.nan
    scale = None
    if quantised:
        x, scale = aiter_mx.quantize(x)
    out = torch.full((E, rows, H), 7, dtype=torch.bfloat16, device=device)
    found = aiter_mx.fused_moe_masked(x, *weights, counts.to(device), x_scale=scale, out=out)
    assert found is out
    assert (out[~counted] == 7).all()
    torch.testing.assert_close(out[counted], expected[counted], rtol=2**-7, atol=0)
    few = aiter_mx.fused_moe_masked(x, *weights, counts.to(device), 4, x_scale=scale)
    torch.testing.assert_close(few[counted], expected[counted], rtol=2**-7, atol=0)


def test_masked_layer_says_what_does_not_fit() -> None:
    g = torch.Generator().manual_seed(9)
    w = (*mx(E, 2 * I, H, generator=g), *mx(E, H, I, generator=g))
    x, counts = torch.zeros(E, 4, H), torch.zeros(E, dtype=torch.int32)
    for arguments, forms, error, message in [
        ((x[0], *w, counts), {}, ValueError, r"x must be \[E, max_tokens, H\], got \[4, 96\]"),
        ((x, *w, counts[:2]), {}, ValueError, r"masked_m must be \[5\], got \[2\]"),
        ((x, *w, counts.long()), {}, TypeError, "masked_m must be torch.int32"),
        ((x, *w, counts), {"expected_m": -1}, ValueError, "expected_m must be at least 0"),
        ((x, *w, counts), {"out": x[0]}, ValueError, r"out must be \[5, 4, 96\]"),
    ]:
        with pytest.raises(error, match=message):
            aiter_mx.fused_moe_masked(*arguments, **forms)
