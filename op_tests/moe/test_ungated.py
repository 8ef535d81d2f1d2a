"""``aiter_mx.fused_moe_ungated`` beside float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import aiter_mx
from op_tests.moe.operands import mx
from op_tests.mx_reference import dequantize64
from op_tests.places import device_in

M, H, I, E, TOP_K = 7, 96, 64, 5, 3

ACTIVATIONS = {
    "relu2": lambda x: x.clamp(min=0) ** 2,
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: x * torch.special.ndtr(x),
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


device = device_in("torch", "sim", "cuda")


def drawn(experts: int = E) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(11)
    w1, w2 = mx(experts, I, H, generator=g), mx(experts, H, I, generator=g)
    return {
        "x": torch.randn(M, H, generator=g),
        **dict(zip(("w1q", "w1s", "w2q", "w2s"), (*w1, *w2), strict=True)),
        "topk_ids": torch.randint(-1, E + 1, (M, TOP_K), generator=g, dtype=torch.int32),
        "topk_weights": torch.rand(M, TOP_K, generator=g),
        "bias1": torch.randn(experts, I, generator=g),
        "bias2": torch.randn(experts, H, generator=g),
    }


def float64(call: dict[str, Tensor], activation: str, numbers: list[int]) -> Tensor:
    """Unweighted results of each slot; zeros where the expert is not here."""
    bits = {name: call[name].view(torch.uint8) for name in ("w1q", "w2q")}
    w1, w2 = dequantize64(bits["w1q"], call["w1s"]), dequantize64(bits["w2q"], call["w2s"])
    xq, xs = aiter_mx.quantize(call["x"])
    x = dequantize64(xq.view(torch.uint8), xs)
    out = torch.zeros(M, TOP_K, H, dtype=torch.float64)
    for token in range(M):
        for slot in range(TOP_K):
            expert = int(call["topk_ids"][token, slot])
            number = numbers[expert] if 0 <= expert < len(numbers) else -1
            if number < 0:
                continue
            h = ACTIVATIONS[activation](w1[number] @ x[token] + call["bias1"][number])
            hq, hs = aiter_mx.quantize(h.float().unsqueeze(0))
            h = dequantize64(hq.view(torch.uint8), hs)[0]
            out[token, slot] = w2[number] @ h + call["bias2"][number]
    return out


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_map", [False, True])
def test_layer_matches_float64(device: torch.device, activation: str, has_map: bool) -> None:
    numbers = [-1, 2, 0, -1, 1] if has_map else list(range(E))
    call = drawn(3 if has_map else E)
    ref = float64(call, activation, numbers)
    options: dict[str, Any] = {"activation": activation}
    if has_map:
        options["expert_map"] = torch.tensor(numbers, dtype=torch.int32, device=device)
    here = {name: tensor.to(device) for name, tensor in call.items()}
    apart = aiter_mx.fused_moe_ungated(**here, **options, reduce=False).cpu().double()
    # A value between two steps of e4m3 may go either way: one of I, by an eighth of its size.
    size = ref.abs().amax(2, keepdim=True)
    assert ((apart - ref).abs() <= 0.02 * size).all()
    assert not apart[ref.abs().amax(2) == 0].any()
    summed = aiter_mx.fused_moe_ungated(**here, **options).cpu().double()
    weighted = (apart * call["topk_weights"].unsqueeze(2)).sum(1)
    torch.testing.assert_close(summed, weighted, rtol=1e-5, atol=1e-4 * size.max().item())


def test_quantised_tokens_and_another_dtype(device: torch.device) -> None:
    call = {name: tensor.to(device) for name, tensor in drawn().items()}
    call["x"] = call["x"].bfloat16()
    expected = aiter_mx.fused_moe_ungated(**call)
    xq, xs = aiter_mx.quantize(call.pop("x"))
    assert torch.equal(aiter_mx.fused_moe_ungated(xq, **call, x_scale=xs), expected)
    other = aiter_mx.fused_moe_ungated(xq, **call, x_scale=xs, out_dtype=torch.float16)
    assert other.dtype == torch.float16


def test_what_does_not_fit_is_refused() -> None:
    call = drawn()
    for change, error, message in [
        ({"activation": "swiglu_oai"}, ValueError, "activation must be one of silu, gelu"),
        ({"w1q": call["w1q"][0]}, ValueError, r"w1q must be \[E, I, H\], got \[64, 96\]"),
        ({"out_dtype": torch.int8}, TypeError, "out_dtype must be torch.bfloat16"),
        ({"w2q": call["w2q"][:2]}, ValueError, r"w2q must be \[\d+, 96, 64\], got \[2, "),
        ({"x": call["x"].numpy()}, TypeError, "x must be a tensor, got ndarray"),
        ({"topk_ids": None}, TypeError, "topk_ids must be a tensor, got NoneType"),
        ({"topk_weights": call["topk_weights"][:1]}, ValueError, "topk_weights must be"),
        ({"expert_map": call["topk_ids"]}, ValueError, r"expert_map must be \[num_experts\]"),
    ]:
        with pytest.raises(error, match=message):
            aiter_mx.fused_moe_ungated(**(call | change))
