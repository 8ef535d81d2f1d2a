"""``torchao.quantize_`` with our configuration, by torchao's own code."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torchao.quantization import quantize_

import aiter_mx
from aiter_mx.integrations.engine import say_once
from aiter_mx.integrations.torchao import AiterMxConfig, AiterMxTensor


def model(dtype: torch.dtype, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 40, bias=False)).to(dtype)


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float32], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def by_our_ops(plain: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    for layer in plain:
        if isinstance(layer, nn.Linear):
            operands = (*aiter_mx.quantize(x), *aiter_mx.quantize(layer.weight.detach()))
            x = aiter_mx.linear(*operands, layer.bias, x.dtype)
        else:
            x = layer(x)
    return x


@torch.no_grad()
def test_layers_give_what_our_ops_give(dtype: torch.dtype) -> None:
    plain, quantised = model(dtype), model(dtype)
    quantize_(quantised, AiterMxConfig())
    assert all(isinstance(quantised[at].weight, AiterMxTensor) for at in (0, 2))
    x = torch.randn(2, 5, 96, dtype=dtype)
    assert torch.equal(quantised(x), by_our_ops(plain, x.view(10, 96)).view(2, 5, 40))
    weight = plain[0].weight
    torch.testing.assert_close(quantised[0].weight.dequantize(), weight, rtol=0.07, atol=1e-3)


@torch.no_grad()
def test_compiled_whole_gives_the_same_bits(dtype: torch.dtype) -> None:
    quantised = model(dtype)
    quantize_(quantised, AiterMxConfig())
    x = torch.randn(3, 96, dtype=dtype)
    torch._dynamo.reset()
    compiled = torch.compile(quantised, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), quantised(x))


@torch.no_grad()
def test_state_dict_brings_the_same_bits_back(tmp_path: Path) -> None:
    quantised, other = model(torch.bfloat16), model(torch.bfloat16, seed=1)
    quantize_(quantised, AiterMxConfig())
    torch.save(quantised.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True), assign=True)
    x = torch.randn(3, 96, dtype=torch.bfloat16)
    assert isinstance(other[0].weight, AiterMxTensor)
    assert torch.equal(other(x), quantised(x))
    third = model(torch.bfloat16, seed=2)
    quantize_(third, AiterMxConfig())
    third.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(third(x), quantised(x))


@torch.no_grad()
def test_layer_that_is_not_covered_stays_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    say_once.cache_clear()
    plain = nn.Sequential(nn.Linear(40, 64), nn.Linear(64, 64), nn.Linear(64, 32))
    with caplog.at_level(logging.INFO):
        quantize_(plain, AiterMxConfig())
    assert caplog.messages.count("Using aiter_mx.linear for linear layers in MX-FP8") == 1
    assert type(plain[0].weight) is nn.Parameter and not isinstance(plain[0].weight, AiterMxTensor)
    assert "K=40 is no multiple of 32" in caplog.text
