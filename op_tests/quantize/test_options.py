"""What peers' quantisers are asked for besides: where to write, zeros, padding, e5m2."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import aiter_mx


@pytest.fixture(params=["torch", "sim"], autouse=True)
def computing(request: pytest.FixtureRequest) -> Iterator[None]:
    with aiter_mx.simulate("gfx950") if request.param == "sim" else nullcontext():
        yield


def draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator) * 2.0 ** torch.randint(
        -20, 20, (*shape[:-1], 1), generator=generator
    )


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("format", ["e4m3", "e2m1", "e5m2"])
def test_results_go_where_the_caller_says(axis: int, format: str) -> None:
    x = draw(64, 96)
    payload, scale = aiter_mx.quantize(x, axis, format=format)
    out = torch.full_like(payload.view(torch.uint8), 0x55).view(payload.dtype)
    out_scale = torch.full_like(scale, 0x55)
    found = aiter_mx.quantize(x, axis, format=format, out=out, out_scale=out_scale)
    assert found[0] is out and found[1] is out_scale
    assert same(out, payload) and same(out_scale, scale)
    out_scale.fill_(0x55)
    only = aiter_mx.quantize(x, axis, format=format, out_scale=out_scale)
    assert same(only[0], payload) and only[1] is out_scale and same(out_scale, scale)


def test_what_cannot_take_a_result_is_refused() -> None:
    x = draw(32, 64)
    payload, scale = aiter_mx.quantize(x)
    for options, error, message in [
        ({"out": payload.view(torch.uint8)}, TypeError, r"out must be torch\.float8_e4m3fn"),
        ({"out": payload[:3]}, ValueError, r"out must be \[32, 64\], got \[3, 64\]"),
        ({"out_scale": scale.t().contiguous().t()}, ValueError, "out_scale must be contiguous"),
        ({"out": x.view(torch.float8_e4m3fn)[:, :64].contiguous()[:, :0]}, ValueError, "out must"),
        ({"zero_scale": 1}, ValueError, "zero_scale must be 0, or 127 with row-major"),
        ({"zero_scale": 127, "scale_layout": "32_8"}, ValueError, "zero_scale must be 0"),
        ({"multiple": 64}, ValueError, "multiple must be 32 or 128, got 64"),
    ]:
        with pytest.raises(error, match=message):
            aiter_mx.quantize(x, **options)
    whole = torch.zeros(4096, dtype=torch.uint8)
    overlapping = whole[:2048].view(torch.float8_e4m3fn).view(32, 64)
    with pytest.raises(ValueError, match="out overlaps x"):
        aiter_mx.quantize(whole.view(torch.float16).view(32, 64), out=overlapping)
    with pytest.raises(ValueError, match="out_scale overlaps out;"):
        aiter_mx.quantize(x, out=overlapping, out_scale=whole[1024:1088].view(32, 2))
    meta = torch.empty(32, 64, device="meta")
    with pytest.raises(TypeError, match=r"out must be torch\.float8_e4m3fn"):
        aiter_mx.quantize(meta, out=torch.empty_like(meta))
    with pytest.raises(ValueError, match=r"out_scale must be \[32, 2\]"):
        aiter_mx.quantize(meta, out_scale=torch.empty(1, 2, dtype=torch.uint8, device="meta"))


@pytest.mark.parametrize("format", ["e4m3", "e2m1", "e5m2"])
def test_zero_blocks_have_the_scale_that_is_asked_for(format: str) -> None:
    x = draw(4, 128)
    x[0, :32], x[1, 32:64], x[2, 64:96] = 0.0, -0.0, 2.0**-140
    usual, usual_scale = aiter_mx.quantize(x, format=format)
    payload, scale = aiter_mx.quantize(x, format=format, zero_scale=127)
    assert same(payload, usual)
    changed = (scale != usual_scale).nonzero().tolist()
    assert [0, 0] in changed and [1, 1] in changed
    assert all(usual_scale[r, b] == 0 and scale[r, b] == 127 for r, b in changed)
    assert torch.equal(aiter_mx.dequantize(payload, scale), aiter_mx.dequantize(usual, usual_scale))


@pytest.mark.parametrize(("shape", "axis"), [((3, 96), -1), ((3, 100), -1), ((96, 64), -2)])
def test_padding_to_128_is_zeros(shape: tuple[int, int], axis: int) -> None:
    x = draw(*shape)
    missing = -shape[axis] % 128
    padded = torch.nn.functional.pad(x, (0, missing) if axis == -1 else (0, 0, 0, missing))
    for found, wanted in zip(
        aiter_mx.quantize(x, axis, multiple=128), aiter_mx.quantize(padded, axis), strict=True
    ):
        assert same(found, wanted)


@pytest.mark.parametrize("mode", ["rceil", "floor", "even"])
def test_e5m2_is_as_the_specification_has_it(mode: str) -> None:
    x = draw(16, 64)
    payload, scale = aiter_mx.quantize(x, mode=mode, format="e5m2")
    assert payload.dtype == torch.float8_e5m2
    for row in range(16):
        for block in range(2):
            values = x[row, 32 * block : 32 * block + 32].double()
            amax = float(values.abs().max())
            exponent = math.frexp(amax)[1] - 1 - 15
            largest = amax / 2.0**exponent / 57344
            exponent += (mode == "rceil" and largest > 1) or (mode == "even" and largest >= 1)
            assert int(scale[row, block]) == min(max(exponent, -127), 127) + 127
            scaled = (values / 2.0**exponent).clamp(-57344, 57344).float().to(torch.float8_e5m2)
            assert same(payload[row, 32 * block : 32 * block + 32], scaled)
    again = aiter_mx.dequantize(payload, scale)
    assert ((again - x).abs() <= x.abs() / 8 + scale.float().max()).all()
    x[3, 40] = math.inf
    payload, scale = aiter_mx.quantize(x, format="e5m2")
    values = aiter_mx.dequantize(payload, scale)
    assert scale[3, 1] == 255 and values[3, 32:].isnan().all() and values[3, :32].isfinite().all()


def test_values_beyond_a_dtypes_end_become_its_largest() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        most = torch.finfo(dtype).max
        x = torch.full((1, 64), most, dtype=dtype)
        x[0, ::2] *= -1
        found = aiter_mx.dequantize(*aiter_mx.quantize(x), dtype)
        assert found.isfinite().all() and torch.equal(found.sign(), x.sign())
    infinite = torch.full((1, 32), math.inf).to(torch.float8_e5m2)
    byte = torch.full((1, 1), 127, dtype=torch.uint8)
    assert aiter_mx.dequantize(infinite, byte).isinf().all()
    assert aiter_mx.dequantize(infinite, byte + 128).isnan().all()


@pytest.mark.parametrize("format", ["e4m3", "e2m1", "e5m2"])
@pytest.mark.parametrize(("shape", "axis"), [((4, 0), -1), ((0, 64), -1), ((0, 64), -2)])
def test_nothing_has_no_blocks_of_zeros(format: str, shape: tuple[int, int], axis: int) -> None:
    plain = aiter_mx.quantize(torch.empty(shape), axis, format=format)
    found = aiter_mx.quantize(torch.empty(shape), axis, format=format, zero_scale=127)
    assert [t.shape for t in found] == [t.shape for t in plain]


def test_an_out_with_gaps_is_refused_without_advice_that_is_none() -> None:
    out = torch.empty(64, 4, dtype=torch.float8_e4m3fn).T
    with pytest.raises(ValueError, match=r"out must be contiguous, got strides .* \[4, 64\]$"):
        aiter_mx.quantize(torch.randn(4, 64), out=out)
