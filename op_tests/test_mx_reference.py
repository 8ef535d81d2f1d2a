"""The yardstick itself: it must pass honest fp32 results and catch every planted fault."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from op_tests import mx_reference as mx

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def problem(seed: int, M: int = 5, N: int = 48, K: int = 416, **options):
    draw = generator(seed)
    xq, xs = mx.random_mx(M, K, draw, **options)
    wq, ws = mx.random_mx(N, K, draw, **options)
    return xq, xs, wq, ws, torch.randn(N, generator=draw)


def nearest_even(value: Fraction, bits: int, min_exponent: int, max_exponent: int) -> float:
    """``value`` with ``bits`` significant bits, in exact integers."""
    if value == 0:
        return 0.0
    magnitude, exponent = abs(value), 0
    while Fraction(2) ** (exponent + 1) <= magnitude:
        exponent += 1
    while Fraction(2) ** exponent > magnitude:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, min_exponent) - bits + 1)
    rounded = round(magnitude / unit) * unit
    if rounded >= Fraction(2) ** (max_exponent + 1):
        return float("inf") if value > 0 else float("-inf")
    return float(rounded if value > 0 else -rounded)


@pytest.mark.parametrize(
    ("dtype", "bits", "low", "high"),
    [(torch.bfloat16, 8, -126, 127), (torch.float16, 11, -14, 15), (torch.float32, 24, -126, 127)],
)
def test_round_once_rounds_once(dtype, bits, low, high):
    draw = generator(1)
    mantissa = torch.randint(0, 2**bits, (400,), generator=draw).double() + 2**bits
    half = torch.randint(0, 2, (400,), generator=draw) * 0.5
    nudge = (torch.randint(-1, 2, (400,), generator=draw)) * 2.0 ** -(44 - bits)
    exponent = torch.randint(low - bits - 3, high + 2, (400,), generator=draw).double()
    sign = torch.randint(0, 2, (400,), generator=draw) * 2.0 - 1
    values = sign * (mantissa + half + nudge) * 2.0 ** (exponent - bits)
    expected = [nearest_even(Fraction(v), bits, low, high) for v in values.tolist()]
    assert mx.round_once(values, dtype).double().tolist() == expected


def test_round_once_beats_a_cast_that_rounds_twice():
    value = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
    assert mx.round_once(value, torch.bfloat16).item() == 1 + 2.0**-7


def test_random_data_covers_the_format():
    payload, scale = mx.random_mx(64, 512, generator(2))
    assert set(payload.view(torch.uint8).unique().tolist()) == set(range(256)) - {0x7F, 0xFF}
    assert scale.unique().tolist() == list(range(107, 148))
    payload, scale = mx.random_mx(64, 512, generator(3), nan_payload=0.1, nan_scale=0.1)
    assert 0.05 < payload.float().isnan().double().mean() < 0.15
    assert 0.05 < (scale == mx.NAN_SCALE).double().mean() < 0.15


def test_decoding_agrees_with_torch():
    every_byte = torch.arange(256, dtype=torch.uint8).view(8, 32)
    scale = torch.full((8, 1), 127, dtype=torch.uint8)
    ours = mx.dequantize64(every_byte.view(torch.float8_e4m3fn), scale)
    torch.testing.assert_close(
        ours.float(), every_byte.view(torch.float8_e4m3fn).float(), rtol=0, atol=0, equal_nan=True
    )
    torch.testing.assert_close(
        mx.E8M0_VALUES.float(),
        torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).float(),
        rtol=0,
        atol=0,
        equal_nan=True,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponents", [(-20, 20), (-4, 3)])
def test_honest_results_pass(dtype, exponents):
    xq, xs, wq, ws, bias = problem(4, scale_exponents=exponents, nan_payload=1e-3, nan_scale=1e-2)
    x, w = mx.dequantize64(xq, xs).float(), mx.dequantize64(wq, ws).float()
    out = torch.zeros(x.shape[0], w.shape[0])
    for k in range(x.shape[1]):  # the least accurate order there is
        out += x[:, k, None] * w[None, :, k]
    mx.assert_close_to_reference((out + bias).to(dtype), xq, xs, wq, ws, bias)
    exact = mx.linear_reference(xq, xs, wq, ws, bias, dtype)
    mx.assert_close_to_reference(exact, xq, xs, wq, ws, bias, accumulation_error=0.0, underflow=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", ["scale", "block", "swap", "row", "bias", "nan", "no nan"])
def test_planted_faults_are_caught(dtype, fault):
    exponents = (-12, -6) if dtype == torch.float16 else (-6, 6)
    xq, xs, wq, ws, bias = problem(5, scale_exponents=exponents)
    bias = bias * (1e4 if dtype == torch.float16 else 1e7)
    bad_q, bad_s = xq.view(torch.uint8).clone(), xs.clone()
    good = (xq, xs, wq, ws, bias)
    bad_bias = bias
    if fault == "scale":
        bad_s[2, 7] += 1
    elif fault == "block":
        bad_q[:, 64:96] = 0
    elif fault == "swap":
        bad_q[1, 96:128] = bad_q[1, 96:128].roll(16)
    elif fault == "row":
        bad_q[[3, 4]] = bad_q[[4, 3]]
    elif fault == "bias":
        bad_bias = bias.roll(1)
    elif fault == "nan":
        bad_s[0, 3] = mx.NAN_SCALE
    else:
        nan_scale = xs.clone()
        nan_scale[0, 3] = mx.NAN_SCALE
        good = (xq, nan_scale, wq, ws, bias)
    out = mx.linear_reference(bad_q.view(torch.float8_e4m3fn), bad_s, wq, ws, bad_bias, dtype)
    with pytest.raises(AssertionError, match="elements are wrong"):
        mx.assert_close_to_reference(out, *good)


def test_overflow_must_be_infinite_and_only_there():
    xq, xs, wq, ws, bias = problem(6, scale_exponents=(-3, 3))
    out = mx.linear_reference(xq, xs, wq, ws, bias, torch.float16)
    assert out.isinf().any() and not out.isinf().all()
    mx.assert_close_to_reference(out, xq, xs, wq, ws, bias)
    with pytest.raises(AssertionError):
        mx.assert_close_to_reference(out.clamp(-65504, 65504), xq, xs, wq, ws, bias)
    with pytest.raises(AssertionError):
        mx.assert_close_to_reference(out.sign() * torch.inf, xq, xs, wq, ws, bias)
