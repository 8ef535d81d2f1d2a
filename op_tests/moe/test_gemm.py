"""``moe_gemm`` as its callers see it: results, empty ones, replays with other routings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import aiter_mx
from op_tests.conformance import DTYPES
from op_tests.launches import POISON, on
from op_tests.moe.operands import SWIGLU, gemm_call, random_weights
from op_tests.moe.reference import Layer, assert_activated, assert_rows


@pytest.fixture
def call() -> dict[str, Any]:
    return gemm_call()


def layer_of(call: dict[str, Any], **more: Any) -> Layer:
    return Layer(
        *(call[name].cpu() for name in ("xq", "xs", "wq", "ws")),
        more.get("bias"),
        [0, 1, 2, 1, 1, 1],
        2,
        more.get("weights"),
    )


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_op_matches_float64(device: torch.device, call: dict[str, Any], dtype: torch.dtype) -> None:
    if dtype == torch.float16:
        call["xs"] -= 12
    here = on(device, call)
    bias, weights = torch.randn(3, 20), torch.rand(3, 2)
    assert_rows(aiter_mx.moe_gemm(**here, out_dtype=dtype).cpu(), layer_of(call))
    out = torch.full((6, 20), torch.nan, dtype=dtype, device=device)
    options = {"bias": bias.to(device), "topk_weights": weights.to(device)}
    same = aiter_mx.moe_gemm(**here, **options, out_dtype=dtype, out=out)
    assert same is out
    assert_rows(out.cpu(), layer_of(call, bias=bias, weights=weights.flatten()))


def test_e8m0_scales_are_taken_as_bytes(device: torch.device, call: dict[str, Any]) -> None:
    here = on(device, call)
    first = aiter_mx.moe_gemm(**here)
    for name in ("xs", "ws"):
        here[name] = here[name].view(torch.float8_e8m0fnu)
    assert torch.equal(aiter_mx.moe_gemm(**here), first)


def test_no_rows_or_features_are_an_empty_result(
    device: torch.device, call: dict[str, Any]
) -> None:
    here = on(device, call)
    none = aiter_mx.moe_gemm(**{**here, "wq": here["wq"][:, :0], "ws": here["ws"][:, :0]})
    assert none.shape == (6, 0)
    lists = aiter_mx.moe_align(torch.empty(0, 2, dtype=torch.int32, device=device), 4, 3)
    names = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
    empty = {**here, **dict(zip(names, lists, strict=True)), "num_valid_tokens": 0}
    assert aiter_mx.moe_gemm(**empty).shape == (0, 20)


@pytest.mark.gpu
@pytest.mark.parametrize("is_activated", [False, True])
@pytest.mark.parametrize("M", [1, 6, 200])
def test_replays_with_other_tokens_and_routings_in_the_same_buffers(
    M: int, is_activated: bool
) -> None:
    generator = torch.Generator().manual_seed(M)
    N, K, E, top_k = 256, 512, 8, 2
    block_m = 64 if M == 200 else 16
    w = [t.cuda() for t in random_weights(E, N, K, generator, scale_exponents=(-11, -8))]
    tokens = torch.zeros(M, K, dtype=torch.bfloat16, device="cuda")
    ids = torch.zeros(M, top_k, dtype=torch.int32, device="cuda")

    def layer() -> tuple[Tensor, ...]:  # launches that may each begin before the one ahead ends
        x = aiter_mx.quantize(tokens)
        lists = aiter_mx.moe_align(ids, block_m, E)
        arguments = (*x, *w, *lists, M * top_k, top_k, block_m)
        if is_activated:
            return (*x, *aiter_mx.moe_gemm_activated(*arguments, a_div=top_k))
        return (*x, aiter_mx.moe_gemm(*arguments, a_div=top_k))

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        xq, xs, *results = layer()
    for _ in range(20):
        chosen = torch.randint(0, E, (M, top_k), generator=generator, dtype=torch.int32)
        spread = torch.exp2(torch.randint(-4, 5, (M, K // 32, 1), generator=generator))
        drawn = (torch.randn(M, K // 32, 32, generator=generator) * spread).view(M, K).bfloat16()
        ids.copy_(chosen)
        tokens.copy_(drawn)
        for result in results:
            result.view(torch.uint8).fill_(POISON)
        graph.replay()
        for got, expected in zip((xq, xs), aiter_mx.quantize(drawn.cuda()), strict=True):
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
        cpu = [t.cpu() for t in (xq, xs, *w)]
        reference = Layer(*cpu, None, chosen.flatten().tolist(), top_k)  # type: ignore[arg-type]
        if is_activated:
            payload, scales = (t.cpu() for t in results)
            assert_activated(payload, scales, reference, "silu", False, SWIGLU)
        else:
            assert_rows(results[0].cpu(), reference)
