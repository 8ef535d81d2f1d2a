"""Operands of the MoE ops that are views: results do not depend on where they begin."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import aiter_mx
from op_tests.launches import moved, on
from op_tests.moe.layers import random_call, variants
from op_tests.moe.operands import random_weights
from op_tests.mx_reference import random_mx

SCALES = 4  # bytes: the least that scales may begin at


def all_moved(tensors: dict[str, Any]) -> dict[str, Any]:
    """All of them moved but payloads, tokens and what is no tensor."""
    wide = (torch.float8_e4m3fn, torch.bfloat16)
    return {
        name: moved(t, SCALES if t.dtype == torch.uint8 else 1)
        if isinstance(t, Tensor) and (t.dtype not in wide or name.startswith("bias"))
        else t
        for name, t in tensors.items()
    }


@pytest.mark.parametrize("M", [5, 300])  # which takes another route
def test_gemm_takes_views(device: torch.device, M: int) -> None:
    generator = torch.Generator().manual_seed(M)
    E, N, K = 2, 64, 160
    topk_ids = torch.randint(0, E, (M, 2), generator=generator, dtype=torch.int32, device="cpu")
    x, w = random_mx(M, K, generator), random_weights(E, N, K, generator)
    ids = topk_ids.to(device)
    weights = torch.rand(M, 2, generator=generator).to(device)
    lists = aiter_mx.moe_align(ids, 16, E)
    call = dict(zip(("xq", "xs", "wq", "ws"), (*x, *w), strict=True))
    call |= {"topk_weights": weights, "bias": torch.randn(E, N, generator=generator).half()}
    names = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
    call = on(device, call | dict(zip(names, lists, strict=True)))
    options = {"num_valid_tokens": 2 * M, "top_k": 2, "block_m": 16, "a_div": 2}
    expected = aiter_mx.moe_gemm(**call, **options)
    assert torch.equal(aiter_mx.moe_gemm(**all_moved(call), **options), expected)


def test_layer_takes_views(device: torch.device) -> None:
    fixed = variants()[1] | {"M": 5, "experts": 8, "top_k": 2, "shared": 1, "has_map": True}
    fixed |= {"dtype": torch.bfloat16, "biased": True}
    for id_dtype in (torch.int32, torch.int64):
        call = on(device, random_call(random.Random(7), 7, id_dtype=id_dtype, **fixed))
        expected = aiter_mx.fused_moe(**call)
        out = moved(torch.zeros_like(expected))
        assert torch.equal(aiter_mx.fused_moe(**all_moved(call), out=out), expected)
