"""vLLM's own linear layers, loaders and formats, with our plug-in loaded as vLLM loads it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
)

import aiter_mx
from op_tests.engines.vllm.layers import BF16, FORMATS, H, I, fill, mx, ready


@pytest.mark.parametrize("leading", [(1,), (7,), (2, 3)])
def test_linear_layer_gives_the_bits_of_our_op(quantisation: Any, leading: tuple[int, ...]) -> None:
    layer = MergedColumnParallelLinear(
        H, [I, I], bias=True, quant_config=quantisation, params_dtype=BF16, prefix="mlp.gate_up"
    )
    shards = {0: mx(I, H, seed=0), 1: mx(I, H, seed=1)}
    fill(layer, shards)
    layer.bias.data.normal_()
    ready(layer)
    x = torch.randn(*leading, H, dtype=BF16)
    payload, scale = (torch.cat([shards[at][part] for at in (0, 1)]) for part in (0, 1))
    expected = aiter_mx.linear(x, None, payload, scale, layer.bias)
    found, _ = layer(x)
    assert torch.equal(found, expected)


def test_attention_projection_and_refit_in_place() -> None:
    layer = QKVParallelLinear(
        H, 32, 2, 1, bias=False, quant_config=FORMATS["mxfp8"](), params_dtype=BF16, prefix="qkv"
    )
    x = torch.randn(3, H, dtype=BF16)
    for seed in (0, 10):  # the second time weights of a trainer replace those that served
        shards = {"q": mx(64, H, seed=seed), "k": mx(32, H, seed=seed + 1)}
        shards["v"] = mx(32, H, seed=seed + 2)
        fill(layer, shards)
        if seed == 0:
            ready(layer)
        payload, scale = (torch.cat([shards[at][part] for at in "qkv"]) for part in (0, 1))
        assert torch.equal(layer(x)[0], aiter_mx.linear(x, None, payload, scale))


def test_online_quantisation_gives_the_bits_of_ours() -> None:
    from vllm.model_executor.layers.quantization.online.mxfp8 import Mxfp8OnlineLinearMethod

    layer = torch.nn.Module()
    weight = torch.randn(I, H, dtype=BF16)
    method = Mxfp8OnlineLinearMethod.__new__(Mxfp8OnlineLinearMethod)
    method.kernel = kernels.init_mxfp8_linear_kernel(weight_shape=(I, H))
    method.get_weight_for_quantization = lambda layer: layer.weight
    method.release_requantization_source_weights = lambda layer: None
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.weight_scale = None
    method.process_weights_after_loading(layer)
    x = torch.randn(5, H, dtype=BF16)
    expected = aiter_mx.linear(x, None, *aiter_mx.quantize(weight))
    assert torch.equal(method.apply(layer, x), expected)


def test_simulated_gfx950_gives_the_bits_of_our_op() -> None:
    layer = ColumnParallelLinear(
        H, I, bias=False, quant_config=FORMATS["mxfp8"](), params_dtype=BF16, prefix="simulated"
    )
    payload, scale = mx(I, H, seed=6)
    fill(layer, {None: (payload, scale)})
    ready(layer)
    x = torch.randn(3, H, dtype=BF16)
    with aiter_mx.simulate("gfx950"):
        found = layer(x)[0]
        assert torch.equal(found, aiter_mx.linear(x, None, payload, scale))
