"""quantize against a scalar definition in exact arithmetic, dequantize against all byte pairs."""

from __future__ import annotations

import math
from bisect import bisect_left

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import aiter_mx
from aiter_mx.codec import round_once
from aiter_mx.ops.quantize_call import MODES
from op_tests import mx_reference as mx

E4M3 = mx.E4M3_VALUES[:127].tolist()
E4M3_NAN = 0x7F


def scale_byte_by_definition(block: list[float], mode: str) -> int:
    """Python floats hold every power of two and quotient that occurs here exactly."""
    if not all(map(math.isfinite, block)):
        return mx.NAN_SCALE
    amax = max(map(abs, block))
    if amax == 0:
        return 0
    exponent = math.frexp(amax)[1] - 1 - 8
    of_largest = amax / 2.0**exponent / 448
    if (mode == "rceil" and of_largest > 1) or (mode == "even" and of_largest >= 1):
        exponent += 1
    return min(max(exponent, -127), 127) + 127


def payload_byte_by_definition(value: float, scale_byte: int) -> int:
    if scale_byte == mx.NAN_SCALE:
        return E4M3_NAN
    sign = 0x80 if math.copysign(1, value) < 0 else 0
    target = abs(value) / 2.0 ** (scale_byte - 127)
    above = bisect_left(E4M3, target)
    if above in (0, len(E4M3)):
        return sign | min(above, len(E4M3) - 1)
    to_below, to_above = target - E4M3[above - 1], E4M3[above] - target
    nearest = (
        above if to_above < to_below or (to_above == to_below and above % 2 == 0) else above - 1
    )
    return sign | nearest


def assert_as_defined(x: Tensor, mode: str) -> None:
    payload, scale = aiter_mx.quantize(x, mode=mode)
    blocks = x.double().reshape(-1, 32).tolist()
    scales = [scale_byte_by_definition(block, mode) for block in blocks]
    assert scale.flatten().tolist() == scales
    got = payload.view(torch.uint8).reshape(-1, 32).tolist()
    for block, byte, payload_bytes in zip(blocks, scales, got, strict=True):
        assert payload_bytes == [payload_byte_by_definition(v, byte) for v in block], (block, byte)


def every_value(dtype: torch.dtype) -> Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_is_quantised_as_defined(dtype, mode):
    values = every_value(dtype)
    by_magnitude = values[values.isfinite()].sort().values
    assert_as_defined(by_magnitude.view(-1, 32), mode)
    shuffled = values[torch.randperm(2**16, generator=torch.Generator().manual_seed(1))]
    assert_as_defined(shuffled.view(64, 1024), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_gives_a_block_its_scale(dtype, mode):
    values = every_value(dtype)
    x = torch.zeros(2**16, 32, dtype=dtype)
    x[torch.arange(2**16), torch.arange(2**16) % 32] = values
    _, scale = aiter_mx.quantize(x, mode=mode)
    expected = [scale_byte_by_definition([v], mode) for v in values.double().tolist()]
    assert scale.flatten().tolist() == expected


_near_448 = st.builds(
    lambda exponent, ulps, sign: sign * math.ldexp(448 + ulps * 2.0**-15, exponent),
    st.integers(-150, 118),
    st.integers(-2, 2),
    st.sampled_from((-1.0, 1.0)),
)
_float32 = st.floats(width=32) | st.floats(-(2.0**-120), 2.0**-120, width=32) | _near_448


@settings(max_examples=300, deadline=None)
@given(block=st.lists(_float32, min_size=32, max_size=32), mode=st.sampled_from(MODES))
def test_random_float32_blocks_are_quantised_as_defined(block, mode):
    assert_as_defined(torch.tensor(block, dtype=torch.float32), mode)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-149, 127), mode=st.sampled_from(MODES))
def test_blocks_of_like_magnitudes_are_quantised_as_defined(seed, exponent, mode):
    draw = torch.Generator().manual_seed(seed)
    block = torch.randn(32, generator=draw, dtype=torch.float64) * 2.0**exponent
    assert_as_defined(block.float(), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_makes_its_block_nan_and_no_other(bad, mode):
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(2))
    good_payload, good_scale = aiter_mx.quantize(x, mode=mode)
    x[2, 40] = bad
    payload, scale = aiter_mx.quantize(x, mode=mode)
    assert scale[2, 1] == mx.NAN_SCALE
    assert aiter_mx.dequantize(payload, scale)[2, 32:64].isnan().all()
    others = torch.ones(4, 3, dtype=torch.bool)
    others[2, 1] = False
    assert torch.equal(scale[others], good_scale[others])
    kept = others.repeat_interleave(32, dim=1)
    assert torch.equal(payload.view(torch.uint8)[kept], good_payload.view(torch.uint8)[kept])


def test_zeros_keep_their_signs():
    x = torch.zeros(1, 32)
    x[0, 5] = -0.0
    payload, scale = aiter_mx.quantize(x)
    assert scale.item() == 0
    assert payload.view(torch.uint8).tolist() == [[0] * 5 + [0x80] + [0] * 26]


def test_rceil_never_saturates_and_floor_may():
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(3)) * 100
    error = {mode: aiter_mx.dequantize(*aiter_mx.quantize(x, mode=mode)) - x for mode in MODES}
    amax = x.view(-1, 32).abs().amax(-1, keepdim=True)
    assert (error["rceil"].view(-1, 32).abs() <= amax / 16).all()  # half a unit at 256
    assert (error["floor"].view(-1, 32).abs() > amax / 16).any()


@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 96), (0, 64), (4, 0)])
def test_leading_dimensions_are_kept(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    payload, scale = aiter_mx.quantize(x)
    assert payload.shape == shape and payload.dtype == torch.float8_e4m3fn
    assert scale.shape == (*shape[:-1], shape[-1] // 32) and scale.dtype == torch.uint8
    assert aiter_mx.dequantize(payload, scale).shape == shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_inputs_give_contiguous_results_and_stay_unchanged(dtype):
    x = torch.randn(64, 6, 4, generator=torch.Generator().manual_seed(5)).to(dtype)
    strided = x.permute(2, 1, 0)
    before = x.clone()
    payload, scale = aiter_mx.quantize(strided)
    expected_payload, expected_scale = aiter_mx.quantize(strided.contiguous())
    assert payload.is_contiguous() and scale.is_contiguous()
    assert torch.equal(payload.view(torch.uint8), expected_payload.view(torch.uint8))
    assert torch.equal(scale, expected_scale)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale_dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_every_payload_times_every_scale_is_dequantised_with_one_rounding(dtype, scale_dtype):
    payload = torch.arange(256).to(torch.uint8).repeat(256, 1)
    scale = torch.arange(256).to(torch.uint8)[:, None].repeat(1, 8)
    fp8 = payload.view(torch.float8_e4m3fn)
    got = aiter_mx.dequantize(fp8, scale.view(scale_dtype), dtype)
    most = torch.finfo(dtype).max
    expected = mx.round_once(mx.dequantize64(fp8, scale).clamp(-most, most), dtype)
    assert got.dtype == dtype and not got.isinf().any()
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_round_once_is_the_reference_rounding(dtype):
    draw = torch.Generator().manual_seed(6)
    values = torch.randn(20000, generator=draw, dtype=torch.float64)
    values *= 2.0 ** torch.randint(-150, 150, (20000,), generator=draw).double()
    ties = torch.randn(20000, generator=draw).to(dtype).double() * (1 + torch.finfo(dtype).eps / 2)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan], dtype=torch.float64)
    values = torch.cat([values, ties, ties * (1 + 2.0**-40), special])
    torch.testing.assert_close(
        round_once(values, dtype), mx.round_once(values, dtype), rtol=0, atol=0, equal_nan=True
    )


def test_torch_compile_takes_both_without_a_graph_break():
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(7), dtype=torch.bfloat16)

    def round_trip(x: Tensor) -> Tensor:
        return aiter_mx.dequantize(*aiter_mx.quantize(x, mode="floor"))

    compiled = torch.compile(round_trip, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), round_trip(x))


@pytest.mark.parametrize("mode", MODES)
def test_quantize_passes_opcheck(mode):
    x = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(8)).transpose(0, 1)
    torch.library.opcheck(torch.ops.aiter_mx.quantize.default, (x, mode))


@pytest.mark.parametrize(
    ("x", "mode", "error", "message"),
    [
        (torch.randn(4, 100), "rceil", ValueError, r"multiple of 32, got x of shape \[4, 100\]"),
        (torch.tensor(1.0), "rceil", ValueError, "multiple of 32"),
        (torch.randn(4, 64), "ceil", ValueError, "rceil, floor, even, got 'ceil'"),
        (torch.randn(4, 64).double(), "rceil", TypeError, "got torch.float64"),
        (torch.ones(4, 64, dtype=torch.int32), "floor", TypeError, "got torch.int32"),
    ],
)
def test_quantize_refuses_what_it_cannot_do(x, mode, error, message):
    with pytest.raises(error, match=message):
        aiter_mx.quantize(x, mode=mode)


def test_dequantize_refuses_what_it_cannot_do():
    payload, scale = aiter_mx.quantize(torch.randn(4, 64))
    with pytest.raises(TypeError, match="payload must be float8_e4m3fn"):
        aiter_mx.dequantize(payload.float(), scale)
    with pytest.raises(TypeError, match="uint8 or float8_e8m0fnu, got"):
        aiter_mx.dequantize(payload, scale.view(torch.int8))
    with pytest.raises(TypeError, match=r"got torch\.int32"):
        aiter_mx.dequantize(payload, scale, torch.int32)
    with pytest.raises(ValueError, match=r"scale \[4, 1\]"):
        aiter_mx.dequantize(payload, scale[:, :1])
    with pytest.raises(ValueError, match="scale is on meta, but payload is on cpu"):
        aiter_mx.dequantize(payload, scale.to("meta"))
    with pytest.raises(ValueError, match=r"scale_layout must be one of .*, got \['16x4'\]"):
        aiter_mx.dequantize(payload, scale, scale_layout=["16x4"])


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpu_gives_the_same_bits_as_the_cpu(dtype, mode):
    draw = torch.Generator().manual_seed(9)
    if dtype == torch.float32:
        x = torch.randint(-(2**31), 2**31, (512, 512), generator=draw).to(torch.int32).view(dtype)
    else:
        x = every_value(dtype)[torch.randperm(2**16, generator=draw)].view(64, 1024)
    on_cpu = aiter_mx.quantize(x, mode=mode)
    on_gpu = aiter_mx.quantize(x.cuda(), mode=mode)
    for cpu, gpu in zip(on_cpu, on_gpu, strict=True):
        assert torch.equal(cpu.view(torch.uint8), gpu.cpu().view(torch.uint8))
    for out_dtype in (torch.float32, torch.float64):
        torch.testing.assert_close(
            aiter_mx.dequantize(*on_gpu, out_dtype).cpu(),
            aiter_mx.dequantize(*on_cpu, out_dtype),
            rtol=0,
            atol=0,
            equal_nan=True,
        )


@pytest.mark.gpu
def test_quantize_can_be_captured_into_a_graph():
    x = torch.randn(8, 256, device="cuda", dtype=torch.bfloat16)
    aiter_mx.quantize(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        payload, scale = aiter_mx.quantize(x)
    x.copy_(torch.randn_like(x) * 100)
    graph.replay()
    expected_payload, expected_scale = aiter_mx.quantize(x)
    assert torch.equal(payload.view(torch.uint8), expected_payload.view(torch.uint8))
    assert torch.equal(scale, expected_scale)
