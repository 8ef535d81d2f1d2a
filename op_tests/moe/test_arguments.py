"""What ``moe_gemm`` and ``moe_gemm_activated`` say of arguments that are not right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import aiter_mx
from op_tests.moe.operands import gemm_call


@pytest.fixture
def call() -> dict[str, Any]:
    return gemm_call()


BAD = [
    ("xq", lambda t: t.float(), TypeError, "xq must be torch.float8_e4m3fn, got torch.float32"),
    ("wq", lambda t: t.view(torch.uint8), TypeError, "wq must be torch.float8_e4m3fn"),
    ("wq", lambda t: t[0], ValueError, r"wq must be \[E, N, 64\], got \[20, 64\]"),
    ("ws", lambda t: t[:2], ValueError, r"ws must be \[3, 20, 2\], got \[2, 20, 2\]"),
    ("xs", lambda t: t.to(torch.int32), TypeError, "xs must be torch.uint8 or"),
    ("sorted_token_ids", lambda t: t.long(), TypeError, "sorted_token_ids must be torch.int32"),
    ("block_m", lambda n: 16, ValueError, "was the routing made for another block_m"),
    ("block_m", lambda n: 16, ValueError, "12 ids, which are 0 whole blocks of block_m=16, but"),
    ("expert_ids", lambda t: t[:2], ValueError, "are 3 whole blocks of block_m=4, but expert_ids"),
    ("block_m", lambda n: 6, ValueError, "block_m must be a multiple of 4, got 6"),
    ("num_valid_tokens", lambda n: 5, ValueError, "must be a multiple of top_k, got 5"),
    ("num_valid_tokens", lambda n: -2, ValueError, "num_valid_tokens must be at least 0, got -2"),
    ("top_k", lambda n: 0, ValueError, "top_k must be at least 1, got 0"),
    ("a_div", lambda n: 1 << 40, ValueError, r"a_div must be below 2\^31, got 1099511627776"),
    ("a_div", lambda n: 0, ValueError, "a_div must be at least 1, got 0"),
    ("wq", lambda t: t[:0], ValueError, r"wq must have at least one expert, got \[0, 20, 64\]"),
    ("a_div", lambda n: "2", TypeError, "a_div must be a whole number, an int, got str"),
    ("out", lambda n: [], TypeError, "out must be a tensor, got list"),
    ("a_div", lambda n: 1, ValueError, "xq must have a row for each 1 of 6 routed rows"),
    ("expert_ids", lambda t: None, TypeError, "expert_ids must be a tensor, got NoneType"),
    ("xq", lambda t: t.T.contiguous().T, ValueError, "xq must be contiguous"),
    ("topk_weights", lambda t: torch.rand(2, 3).T, ValueError, "topk_weights must be contiguous"),
    ("topk_weights", lambda t: torch.rand(5), ValueError, r"topk_weights must be \[6\], got \[5\]"),
]


@pytest.mark.parametrize(("name", "spoil", "error", "message"), BAD, ids=[bad[3] for bad in BAD])
def test_bad_arguments_are_refused(
    call: dict[str, Any], name: str, spoil: Any, error: type[Exception], message: str
) -> None:
    with aiter_mx.simulate("gfx950"), pytest.raises(error, match=message):
        aiter_mx.moe_gemm(**{**call, name: spoil(call.get(name))})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"activation": "none"}, ValueError, "activation must be one of .* relu2, got 'none'"),
        ({"activation": "tanh"}, ValueError, "activation must be one of .* relu2, got 'tanh'"),
        ({"layout": "thirds"}, ValueError, "layout must be one of halves, interleaved, got 'thir"),
        ({"alpha": "1"}, TypeError, "alpha must be a number, a float, got str"),
        ({"beta": None}, TypeError, "beta must be a number, a float, got NoneType"),
        ({"limit": torch.tensor(7.0)}, TypeError, "limit must be a number, a float, got Tensor"),
        ({"limit": -1}, ValueError, "limit must be at least 0, or None for no limit, got -1"),
        ({"limit": float("nan")}, ValueError, "limit must be at least 0, .* got nan"),
        ({}, ValueError, "N must be a multiple of 64 with an activation, got N=20"),
    ],
    ids=str,
)
def test_bad_activations_are_refused(
    call: dict[str, Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        aiter_mx.moe_gemm_activated(**call, **{"activation": "swiglu_oai", **options})


def test_misaligned_payload_and_overlap_are_refused(call: dict[str, Any]) -> None:
    shifted = torch.empty(3 * 64 + 1, dtype=torch.float8_e4m3fn)[1:].view(3, 64)
    with aiter_mx.simulate("gfx950"):
        with pytest.raises(ValueError, match="xq must start at a multiple of 16 bytes"):
            aiter_mx.moe_gemm(**{**call, "xq": shifted})
        for dtype, moved, name in ((torch.bfloat16, 2, "8"), (torch.float32, 1, "16")):
            view = torch.empty(6 * 20 + moved, dtype=dtype)[moved:].view(6, 20)
            with pytest.raises(ValueError, match=f"out must start at a multiple of {name} bytes"):
                aiter_mx.moe_gemm(**call, out_dtype=dtype, out=view)
        out = call["wq"].view(-1)[: 6 * 20 * 4].view(torch.float32).view(6, 20)
        with pytest.raises(ValueError, match="out overlaps wq"):
            aiter_mx.moe_gemm(**call, out_dtype=torch.float32, out=out)


def test_check_mode_reports_what_kernels_pass_over(
    call: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(name: str, at: int, value: int) -> dict[str, Any]:
        tensor = call[name].clone()
        tensor[at] = value
        return {**call, name: tensor}

    wrong = [
        (spoilt("sorted_token_ids", 1, 7), r"sorted_token_ids\[1\] = 7"),
        (spoilt("sorted_token_ids", 0, -2), r"sorted_token_ids\[0\] = -2"),
        (spoilt("expert_ids", 0, 3), r"expert_ids\[0\] is 3"),
        (spoilt("sorted_token_ids", 3, 0), r"row 0 is listed twice, as sorted_token_ids\[0\] and"),
        (spoilt("expert_ids", 2, 0), r"expert 0 has blocks from both expert_ids\[0\] and expert_i"),
        (spoilt("num_tokens_post_padded", 0, 6), "must be a multiple of block_m=4 up to 12, got 6"),
    ]
    with aiter_mx.simulate("gfx950"):
        for arguments, _ in wrong:
            aiter_mx.moe_gemm(**arguments)
        monkeypatch.setenv("AITER_MX_CHECK", "1")
        aiter_mx.moe_gemm(**call)
        for arguments, message in wrong:
            with pytest.raises(ValueError, match=message):
                aiter_mx.moe_gemm(**arguments)


def test_one_block_of_another_size_is_refused_and_lists_that_end_within_a_block_are_not() -> None:
    topk_ids = torch.zeros(1, 1, dtype=torch.int32)
    sorted_ids, expert_ids, used = aiter_mx.moe_align(topk_ids, 64, 1)
    x, w = aiter_mx.quantize(torch.randn(1, 32)), aiter_mx.quantize(torch.randn(8, 32))
    operands = (*x, w[0].view(1, 8, 32), w[1].view(1, 8, 1))
    with pytest.raises(ValueError, match="64 ids, which are 0 whole blocks of block_m=128, but"):
        aiter_mx.moe_gemm(*operands, sorted_ids, expert_ids, used, 1, 1, 128)
    expected = aiter_mx.moe_gemm(*operands, sorted_ids, expert_ids, used, 1, 1, 64)
    longer = torch.cat((sorted_ids, sorted_ids[:63]))
    for experts in (expert_ids, torch.cat((expert_ids, expert_ids))):
        out = aiter_mx.moe_gemm(*operands, longer, experts, used, 1, 1, 64)
        assert torch.equal(out, expected)
    none = torch.zeros(1, dtype=torch.int32)
    lists = (sorted_ids[:63], expert_ids, none)  # as some engines have them of no tokens
    assert aiter_mx.moe_gemm(*operands, *lists, 0, 1, 64).shape == (0, 8)
