"""vLLM's layers, filled through their own loaders, and what our ops make of them."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import FusedMoEFactory, RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import (
    MoEActivation,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8Config

import aiter_mx
from aiter_mx.integrations.layers import Gate

H, I, E, TOP_K = 64, 96, 4, 2
BF16 = torch.bfloat16


def compressed() -> CompressedTensorsConfig:
    weights = {
        "num_bits": 8,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
    }
    return CompressedTensorsConfig.from_config(
        {
            "quant_method": "compressed-tensors",
            "format": "mxfp8-quantized",
            "ignore": [],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": weights,
                    "input_activations": weights | {"dynamic": True},
                }
            },
        }
    )


FORMATS = {
    "mxfp8": lambda: ModelOptMxFp8Config.from_config({"quant_method": "mxfp8"}),
    "modelopt": lambda: ModelOptMxFp8Config.from_config(
        {
            "quant_method": "modelopt",
            "quantization": {
                "quant_algo": "MXFP8",
                "kv_cache_quant_algo": None,
                "exclude_modules": [],
            },
        }
    ),
    "compressed-tensors": compressed,
}


def mx(*shape: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return aiter_mx.quantize(x * torch.randn(*shape[:-1], 1, generator=generator).exp2())


def fill(layer: torch.nn.Module, shards: dict[Any, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Load weights through the layer's own loaders."""
    for shard, (payload, scale) in shards.items():
        for parameter, value in ((layer.weight, payload), (layer.weight_scale, scale)):
            if shard is None:
                parameter.weight_loader(parameter, value)
            else:
                parameter.weight_loader(parameter, value, shard)


def ready(layer: torch.nn.Module) -> torch.nn.Module:
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def experts_layer(prefix: str, **options: Any) -> tuple[Any, RoutedExperts]:
    runner = FusedMoEFactory(
        num_experts=E,
        top_k=TOP_K,
        hidden_size=H,
        intermediate_size=I,
        params_dtype=BF16,
        quant_config=FORMATS["mxfp8"](),
        prefix=prefix,
        **options,
    )
    (experts,) = (m for m in runner.modules() if isinstance(m, RoutedExperts))
    return runner, experts


def fill_experts(experts: RoutedExperts, seed: int) -> None:
    for expert in range(E):
        for at, (shard, name, shape) in enumerate(
            [("w1", "w13", (I, H)), ("w3", "w13", (I, H)), ("w2", "w2", (H, I))]
        ):
            payload, scale = mx(*shape, seed=seed + 10 * expert + at)
            for end, value in (("weight", payload), ("weight_scale", scale)):
                parameter = getattr(experts, f"{name}_{end}")
                parameter.weight_loader(parameter, value, f"{expert}.{name}_{end}", shard, expert)


def by_our_op(experts: RoutedExperts, x: torch.Tensor, routed: Any, gate: Gate) -> torch.Tensor:
    weights, ids = routed
    return aiter_mx.fused_moe(
        x,
        experts.w13_weight,
        experts.w13_weight_scale,
        experts.w2_weight,
        experts.w2_weight_scale,
        ids,
        weights,
        **gate.options(),
    )


def through_kernel(
    kernel: Any, experts: RoutedExperts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
    **options: Any,
) -> torch.Tensor:  # fmt: skip
    usual = {"global_num_experts": E, "expert_map": None, "apply_router_weight_on_input": False}
    found: torch.Tensor = kernel.apply(
        x.clone(),
        experts.w13_weight,
        experts.w2_weight,
        weights,
        ids,
        activation=MoEActivation.SILU,
        shared_experts=None,
        shared_experts_input=None,
        **(usual | options),
    )
    return found
