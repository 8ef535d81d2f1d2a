"""aiter's two names: its signatures, and None where the caller is to fall back."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import aiter_mx
from aiter_mx.compat.aiter import (
    grouped_gemm_mxfp8,
    mxfp8_gemv,
    smallm_mxfp8_gemv,
    smallm_mxfp8_mfma,
    smallm_mxfp8_moe_grouped_gemm,
)
from op_tests.launches import poisoned
from op_tests.moe.operands import random_weights
from op_tests.moe.reference import Layer, assert_rows
from op_tests.mx_reference import assert_close_to_reference, random_mx


def test_signatures_are_aiters() -> None:
    gemv = inspect.signature(mxfp8_gemv).parameters
    assert list(gemv) == ["xq", "x_scale", "wq", "w_scale", "out_dtype"]
    assert gemv["out_dtype"].default is torch.bfloat16
    grouped = inspect.signature(grouped_gemm_mxfp8).parameters
    assert list(grouped) == [
        *("a_q", "a_scale", "w", "w_scale", "sorted_token_ids", "expert_ids"),
        *("num_tokens_post_padded", "num_valid_tokens", "top_k", "block_m", "out_dtype", "a_div"),
        *("mul_weight_by", "topk_ids"),
    ]
    assert [grouped[name].default for name in ("mul_weight_by", "topk_ids")] == [None, None]


def test_gemv_is_the_linear_or_none() -> None:
    generator = torch.Generator().manual_seed(0)
    case = (
        *random_mx(3, 96, generator, scale_exponents=(-6, 6)),
        *random_mx(40, 96, generator, scale_exponents=(-6, 6)),
    )
    assert mxfp8_gemv(*case) is None  # on a CPU
    with aiter_mx.simulate("gfx950"):
        out = mxfp8_gemv(*case)
        assert out is not None and out.dtype == torch.bfloat16
        assert_close_to_reference(out, *case)
        assert mxfp8_gemv(case[0][:, :80].contiguous(), *case[1:]) is None


@pytest.mark.parametrize("simulated", [False, True])
def test_gemv_names_bad_arguments_as_aiter_does_whether_or_not_it_would_fall_back(
    simulated: bool,
) -> None:
    generator = torch.Generator().manual_seed(0)
    names = ("xq", "x_scale", "wq", "w_scale")
    payloads = (random_mx(3, 96, generator), random_mx(40, 96, generator))
    case = dict(zip(names, (*payloads[0], *payloads[1]), strict=True))
    wrong: list[tuple[str, Any, type[Exception], str]] = [
        ("xq", case["xq"].float(), TypeError, "xq must be torch.float8_e4m3fn, got torch.float32"),
        ("xq", case["xq"].bfloat16(), TypeError, "xq must be torch.float8_e4m3fn, got torch.bf"),
        ("xq", case["xq"].T.contiguous().T, ValueError, "xq must be contiguous, got strides"),
        ("xq", case["xq"][0], ValueError, r"xq must have two dimensions, \[rows, K\], got \[96\]"),
        ("x_scale", None, TypeError, "x_scale must be a tensor, got NoneType"),
        ("x_scale", case["x_scale"][:2], ValueError, r"x_scale must be \[3, 3\], got \[2, 3\]"),
        ("w_scale", case["w_scale"].int(), TypeError, "w_scale must be torch.uint8 or"),
        ("out_dtype", torch.float64, TypeError, "out_dtype must be torch.bfloat16 or"),
    ]
    with aiter_mx.simulate("gfx950") if simulated else nullcontext():
        for name, value, error, message in wrong:
            with pytest.raises(error, match=f"^{message}"):
                mxfp8_gemv(**{**case, name: value})


def grouped_case() -> tuple[dict[str, Any], list[int]]:
    generator = torch.Generator().manual_seed(1)
    topk_ids = torch.tensor([[0, 2], [1, 1], [2, 0]], dtype=torch.int32)
    expert_map = torch.tensor([0, -1, 1], dtype=torch.int32)
    lists = aiter_mx.moe_align(topk_ids, 64, 3, expert_map)
    a_q, a_scale = random_mx(3, 64, generator, scale_exponents=(-6, 6))
    w, w_scale = random_weights(2, 32, 64, generator, scale_exponents=(-6, 6))
    names = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
    case = {
        "a_q": a_q,
        "a_scale": a_scale,
        "w": w,
        "w_scale": w_scale,
        **dict(zip(names, lists, strict=True)),
        "num_valid_tokens": 6,
        "top_k": 2,
        "block_m": 64,
        "out_dtype": torch.float32,
        "a_div": 2,
        "topk_ids": topk_ids,
    }
    return case, [0, 1, 2, 2, 1, 0]  # 2: of an expert that is not here


def test_grouped_gemm_is_the_moe_gemm_or_none() -> None:
    case, experts = grouped_case()
    weights = torch.rand(3, 2)
    operands = [case[name] for name in ("a_q", "a_scale", "w", "w_scale")]
    assert grouped_gemm_mxfp8(**case) is None  # on a CPU
    with aiter_mx.simulate("gfx950"):
        out = grouped_gemm_mxfp8(**case)
        assert out is not None
        assert_rows(out, Layer(*operands, None, experts, 2))
        out = grouped_gemm_mxfp8(**case, mul_weight_by=weights)
        assert out is not None
        assert_rows(out, Layer(*operands, None, experts, 2, weights.flatten()))
        assert grouped_gemm_mxfp8(**{**case, "a_q": case["a_q"][:, :48].contiguous()}) is None
        with pytest.raises(TypeError, match="a_q must be a tensor, got NoneType"):
            grouped_gemm_mxfp8(**{**case, "a_q": None})
        with pytest.raises(TypeError, match="mul_weight_by must be a tensor, got list"):
            grouped_gemm_mxfp8(**case, mul_weight_by=weights.tolist())
        with pytest.raises(ValueError, match="mul_weight_by must be"):
            grouped_gemm_mxfp8(**case, mul_weight_by=weights[:2])


@pytest.mark.parametrize("simulated", [False, True])
def test_grouped_gemm_names_bad_arguments_as_aiter_does(simulated: bool) -> None:
    case, _ = grouped_case()
    wrong: list[tuple[str, Any, type[Exception], str]] = [
        ("w", case["w"].view(torch.int8), TypeError, "w must be torch.float8_e4m3fn, got torch.i"),
        ("w", case["w"][0], ValueError, r"w must be \[E, N, 64\], got \[32, 64\]"),
        ("w_scale", case["w_scale"][:1], ValueError, r"w_scale must be \[2, 32, 2\], got \[1, 32"),
        ("a_scale", None, TypeError, "a_scale must be a tensor, got NoneType"),
        ("a_q", case["a_q"].bfloat16(), TypeError, "a_q must be torch.float8_e4m3fn, got"),
        ("a_div", 1, ValueError, r"a_q must have a row for each 1 of 6 routed rows \(a_div=1\)"),
        ("block_m", 6, ValueError, "block_m must be a multiple of 4, got 6"),
        ("num_valid_tokens", "6", TypeError, "num_valid_tokens must be a whole number, an int"),
    ]
    with aiter_mx.simulate("gfx950") if simulated else nullcontext():
        for name, value, error, message in wrong:
            with pytest.raises(error, match=f"^{message}"):
                grouped_gemm_mxfp8(**{**case, name: value})


def test_payloads_may_come_as_their_bytes() -> None:
    x, w = aiter_mx.quantize(torch.randn(3, 64)), aiter_mx.quantize(torch.randn(4, 32, 64))
    lists = aiter_mx.moe_align(torch.tensor([[0, 1], [2, 3], [3, 0]]), 16, 4)
    more = (*lists, 6, 2, 16, torch.bfloat16, 2)
    with aiter_mx.simulate("gfx950"):
        plain = mxfp8_gemv(*x, w[0][0], w[1][0]), grouped_gemm_mxfp8(*x, *w, *more)
        of_bytes = (
            mxfp8_gemv(x[0].view(torch.uint8), x[1], w[0][0].view(torch.uint8), w[1][0]),
            grouped_gemm_mxfp8(x[0].view(torch.uint8), x[1], w[0].view(torch.uint8), w[1], *more),
        )
    for one, other in zip(plain, of_bytes, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


def test_raw_launchers_take_any_tuning_and_write_into_out() -> None:
    generator = torch.Generator().manual_seed(3)
    case = (
        *random_mx(20, 96, generator, scale_exponents=(-6, 6)),
        *random_mx(40, 96, generator, scale_exponents=(-6, 6)),
    )
    out = smallm_mxfp8_gemv(case[0].view(torch.uint8), *case[1:], torch.float32, 8)
    assert_close_to_reference(out, *case)
    assert torch.equal(smallm_mxfp8_mfma(*case, torch.float32, n_sub=2, k_splits=8), out)
    with pytest.raises(ValueError, match=r"^Xs must be \[20, 3\], got \[2, 3\]"):
        smallm_mxfp8_gemv(case[0], case[1][:2], *case[2:], torch.float32)
    with pytest.raises(TypeError, match="Wq must be a tensor, got NoneType"):
        smallm_mxfp8_mfma(case[0], case[1], None, case[3], torch.float32)  # type: ignore[arg-type]


@pytest.mark.parametrize("shared_by", [1, 2])
def test_raw_grouped_launcher_is_the_moe_gemm(shared_by: int) -> None:
    case, experts = grouped_case()
    operands = [case[name] for name in ("a_q", "a_scale", "w", "w_scale")]
    if shared_by == 1:
        operands[:2] = [tensor.repeat_interleave(2, 0) for tensor in operands[:2]]
    lists = [case[f] for f in ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")]
    weights, out = torch.rand(6), poisoned((6, 32), torch.float16)
    sizes = (2, 32, 64, 6, len(operands[0]), shared_by, case["block_m"])
    found = smallm_mxfp8_moe_grouped_gemm(*operands, *lists, out, *sizes, weights, 16)
    assert found.data_ptr() == out.data_ptr()
    assert_rows(out, Layer(*operands, None, experts, shared_by, weights))
    for at, name in ((0, "w must be"), (4, "a_q must be")):
        wrong = [*sizes[:at], sizes[at] + 1, *sizes[at + 1 :]]
        with pytest.raises(ValueError, match=name):
            smallm_mxfp8_moe_grouped_gemm(*operands, *lists, out, *wrong)
    with pytest.raises(TypeError, match="out must be torch"):
        smallm_mxfp8_moe_grouped_gemm(*operands, *lists, out.double(), *sizes)
