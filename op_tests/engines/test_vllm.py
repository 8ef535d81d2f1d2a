"""vLLM's own layers, loaders and choosers, with our plug-in loaded as vLLM loads it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import plugins
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.forward_context import set_forward_context
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.layers.fused_moe import FusedMoEFactory, RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import (
    ApplyMoEActivationConfig,
    MoEActivation,
)
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8Config
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability, PlatformEnum

import aiter_mx
from aiter_mx.integrations import vllm as plugin
from aiter_mx.integrations.layers import Gate

H, I, E, TOP_K = 64, 96, 4, 2
BF16 = torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmConfig]:
    """A process of vLLM's with plug-ins loaded and groups of one rank."""
    plugins.plugins_loaded = False
    plugins.load_general_plugins()
    config = VllmConfig()
    with set_current_vllm_config(config):
        where = tmp_path_factory.mktemp("vllm") / "store"
        init_distributed_environment(1, 0, f"file://{where}", 0, backend="gloo")
        initialize_model_parallel()
        yield config


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


@pytest.fixture(params=FORMATS)
def quantisation(request: pytest.FixtureRequest) -> Any:
    return FORMATS[request.param]()


def mx(*shape: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return aiter_mx.quantize(x * torch.randn(shape[0], 1, generator=generator).exp2())


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


@pytest.mark.parametrize("leading", [(1,), (7,), (2, 3)])
def test_linear_layer_gives_the_bits_of_our_op(
    quantisation: Any, leading: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
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


@pytest.mark.parametrize(
    ("options", "gate"),
    [
        ({}, Gate("silu")),
        ({"activation": "gelu"}, Gate("gelu")),
        ({"activation": "gelu_tanh"}, Gate("gelu_tanh")),
        ({"swiglu_limit": 0.75}, Gate("swiglu_oai", alpha=1.0, beta=0.0, limit=0.75)),
        (
            {
                "activation": "swigluoai_uninterleave",
                "swiglu_limit": 5.0,
                "swiglu_alpha": 1.5,
                "swiglu_beta": 1.0,
            },
            Gate("swiglu_oai", alpha=1.5, beta=1.0, limit=5.0),
        ),
    ],
    ids=["silu", "gelu", "gelu_tanh", "silu clamped", "swiglu_oai"],
)
def test_expert_layer_gives_the_bits_of_our_op(
    engine: VllmConfig, options: dict[str, Any], gate: Gate
) -> None:
    runner, experts = experts_layer(f"layers.{gate}.experts", **options)
    assert experts.quant_method.experts_cls.__name__ == "AiterMxExperts"
    x, logits = torch.randn(9, H, dtype=BF16), torch.randn(9, E, dtype=BF16)
    for seed in (0, 1000):  # the second time in place, as a trainer refits an engine
        fill_experts(experts, seed)
        experts.quant_method.process_weights_after_loading(experts)
        with set_forward_context(None, engine):
            found = runner(x, logits)
        routed = runner.router.select_experts(x, logits)
        assert torch.equal(found, by_our_op(experts, x, routed[:2], gate))
    plain = by_our_op(experts, x, routed[:2], Gate("silu"))
    assert torch.equal(found, plain) == (gate == Gate("silu"))  # a clamp that were lost would show


def test_experts_of_another_rank_are_left_out() -> None:
    _, experts = experts_layer("layers.map.experts")
    fill_experts(experts, 3)
    experts.quant_method.process_weights_after_loading(experts)
    x, ids = torch.randn(6, H, dtype=BF16), torch.randint(0, 2 * E, (6, TOP_K), dtype=torch.int32)
    weights = torch.rand(6, TOP_K)
    expert_map = torch.tensor([-1, 0, -1, 2, 1, -1, 3, -1], dtype=torch.int32)
    found = experts.quant_method.moe_kernel.apply(
        x.clone(),
        experts.w13_weight,
        experts.w2_weight,
        weights,
        ids,
        activation=MoEActivation.SILU,
        global_num_experts=2 * E,
        expert_map=expert_map,
        apply_router_weight_on_input=False,
        shared_experts=None,
        shared_experts_input=None,
    )
    local = expert_map[ids.long()]
    expected = by_our_op(experts, x, (torch.where(local < 0, 0.0, weights), local), Gate())
    assert torch.equal(found, expected)


def test_dispatched_tokens_come_quantised() -> None:
    _, experts = experts_layer("layers.quantised.experts")
    fill_experts(experts, 4)
    experts.quant_method.process_weights_after_loading(experts)
    x, ids = torch.randn(6, H, dtype=BF16), torch.randint(0, E, (6, TOP_K), dtype=torch.int32)
    weights, out = torch.rand(6, TOP_K), torch.full((6, H), torch.nan, dtype=BF16)
    xq, xs = aiter_mx.quantize(x)
    apply = experts.quant_method.moe_kernel.fused_experts.apply
    apply(out, xq, experts.w13_weight, experts.w2_weight, weights, ids, MoEActivation.SILU, E,
          None, xs, None, None, None, None, False)  # fmt: skip
    assert torch.equal(out, by_our_op(experts, x, (weights, ids), Gate()))


def test_converted_checkpoint_loads(tmp_path: Path) -> None:
    """Names and shapes that ``aiter-mx convert`` writes, by the mapping and loaders of vLLM."""
    from safetensors.torch import load_file, save_file
    from vllm.model_executor.layers.fused_moe import fused_moe_make_expert_params_mapping

    from aiter_mx.integrations.convert import convert

    shapes = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
    plain = {
        f"mlp.experts.{expert}.{name}.weight": torch.randn(shape, dtype=BF16)
        for expert in range(E)
        for name, shape in shapes.items()
    }
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text("{}")
    save_file(plain, tmp_path / "plain" / "model.safetensors")
    convert(tmp_path / "plain", tmp_path / "out", "vllm")
    runner, experts = experts_layer("layers.converted.experts")
    parameters = {f"mlp.experts.{n}": p for n, p in runner.named_parameters()}
    mapping = fused_moe_make_expert_params_mapping(runner, "gate_proj", "down_proj", "up_proj", E)
    loaded = set()
    for name, value in load_file(tmp_path / "out" / "model.safetensors").items():
        for parameter_name, weight_name, expert, shard in mapping:
            if weight_name in name:
                mapped = name.replace(weight_name, parameter_name)
                parameters[mapped].weight_loader(parameters[mapped], value, mapped, shard, expert)
                loaded.add(name)
    assert len(loaded) == 2 * len(plain)
    experts.quant_method.process_weights_after_loading(experts)
    first = torch.cat([plain[f"mlp.experts.2.{name}.weight"] for name in ("gate_proj", "up_proj")])
    payload, scale = aiter_mx.quantize(first)
    found = experts.w13_weight[2].view(torch.uint8)
    assert torch.equal(found, payload.view(torch.uint8))
    assert torch.equal(experts.w13_weight_scale[2], scale)


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


def test_weights_on_the_input_are_applied_once() -> None:
    _, experts = experts_layer("layers.input.experts")
    fill_experts(experts, 5)
    experts.quant_method.process_weights_after_loading(experts)
    x, weights = torch.randn(3, H, dtype=BF16), torch.rand(3, 1)
    ids = torch.tensor([[2], [0], [3]], dtype=torch.int32)
    kernel = experts.quant_method.moe_kernel
    options = {"apply_router_weight_on_input": True}
    found = through_kernel(kernel, experts, x, ids, weights, **options)
    scaled = x * weights.to(BF16)
    assert torch.equal(found, by_our_op(experts, scaled, (torch.ones(3, 1), ids), Gate()))


def test_experts_without_a_gate() -> None:
    _, experts = experts_layer("layers.ungated.experts")
    fill_experts(experts, 5)
    experts.quant_method.process_weights_after_loading(experts)
    apply = experts.quant_method.moe_kernel.fused_experts
    x, weights = torch.randn(5, H, dtype=BF16), torch.rand(5, TOP_K)
    ids = torch.randint(0, E, (5, TOP_K), dtype=torch.int32)
    w1, s1 = (t[:, :I].contiguous() for t in (experts.w13_weight, experts.w13_weight_scale))
    apply.quant_config._w1.scale = s1
    out = torch.full((5, H), torch.nan, dtype=BF16)
    apply.apply(out, x, w1, experts.w2_weight, weights, ids, MoEActivation.RELU2_NO_MUL, E,
                None, None, None, None, None, None, False)  # fmt: skip
    rest = (experts.w2_weight, experts.w2_weight_scale, ids, weights)
    assert torch.equal(out, aiter_mx.fused_moe_ungated(x, w1, s1, *rest))


@pytest.mark.parametrize("has_map", [False, True])
def test_dispatch_of_ours_under_the_modular_kernel(has_map: bool) -> None:
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel

    from aiter_mx.integrations.vllm_layers import AiterMxPrepareAndFinalize

    _, experts = experts_layer(f"layers.dispatch.{has_map}.experts")
    fill_experts(experts, 6)
    experts.quant_method.process_weights_after_loading(experts)
    of_layer = experts.quant_method.moe_kernel.fused_experts
    kernel = FusedMoEKernel(AiterMxPrepareAndFinalize(), of_layer)
    x, ids = torch.randn(6, H, dtype=BF16), torch.randint(-1, E, (6, TOP_K), dtype=torch.int32)
    weights = torch.rand(6, TOP_K)
    expert_map = torch.arange(E, dtype=torch.int32) if has_map else None
    found = through_kernel(kernel, experts, x, ids, weights, expert_map=expert_map)
    assert torch.equal(found, by_our_op(experts, x, (weights, ids), Gate()))


@pytest.mark.parametrize("limit", [None, 7.0])
def test_activations_of_vllm_are_mapped(limit: float | None) -> None:
    from aiter_mx.integrations.vllm_layers import gate_of

    config = ApplyMoEActivationConfig(clamp_limit=limit, alpha=1.25, beta=0.5)
    clamped = Gate("swiglu_oai", "halves", 1.0, 0.0, 7.0)
    assert gate_of(MoEActivation.SILU, config) == (Gate("silu") if limit is None else clamped)
    assert gate_of(MoEActivation.SWIGLUOAI, config) == Gate("swiglu_oai", "interleaved")
    assert gate_of(MoEActivation.SWIGLUOAI_UNINTERLEAVE, config) == Gate(
        "swiglu_oai", "halves", 1.25, 0.5, float("inf") if limit is None else limit
    )


@pytest.fixture(params=["CUDA", "ROCM"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """vLLM's platform as on a Hopper, or on a gfx950."""
    platform = type(current_platform)
    monkeypatch.setattr(platform, "_enum", PlatformEnum[request.param])
    capability = DeviceCapability(9, 0) if request.param == "CUDA" else DeviceCapability(9, 5)
    monkeypatch.setattr(platform, "get_device_capability", lambda *_, **__: capability)
    monkeypatch.setattr(platform, "supports_mx", lambda *_: request.param == "ROCM")
    return str(request.param)


def test_choosers_take_ours_on_both_gpus(gpu: str) -> None:
    kernel = kernels.init_mxfp8_linear_kernel(weight_shape=(2304, 6144))
    assert type(kernel).__name__ == "AiterMxLinearKernel"
    _, experts = experts_layer(f"layers.{gpu}.experts")
    assert experts.quant_method.experts_cls.__name__ == "AiterMxExperts"


def test_choosers_take_another_where_ours_declines(
    gpu: str, caplog: pytest.LogCaptureFixture
) -> None:
    from aiter_mx.integrations import vllm_layers

    logging.getLogger("vllm").propagate = True
    N, activation = {"CUDA": (64, "swiglustep"), "ROCM": (72, "situ")}[gpu]  # each is logged once
    with caplog.at_level(logging.INFO, logger="vllm.plugins.aiter_mx"):
        kernel = kernels.init_mxfp8_linear_kernel(weight_shape=(N, 4304))
        assert type(kernel).__name__ != "AiterMxLinearKernel"
        _, experts = experts_layer(f"layers.declined.{gpu}.experts", activation=activation)
        assert experts.quant_method.experts_cls is not vllm_layers.AiterMxExperts
    assert f"declines a linear layer [{N}, 4304]: K=4304 is no multiple of 32" in caplog.text
    name = f"MoEActivation.{activation.upper()} activation"
    assert f"declines an expert layer: kernel does not support {name}" in caplog.text


def test_other_gpus_are_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    from aiter_mx.integrations.vllm_layers import AiterMxLinearKernel

    monkeypatch.setattr(type(current_platform), "_enum", PlatformEnum.CUDA)
    for capability in ((8, 0), (10, 0)):
        monkeypatch.setattr(
            type(current_platform),
            "get_device_capability",
            lambda *_, of=capability, **__: DeviceCapability(*of),
        )
        assert not AiterMxLinearKernel.is_supported()[0]
    assert AiterMxLinearKernel.is_supported(90)[0]


def test_loading_twice_changes_nothing() -> None:
    before = [list(each) for each in kernels._POSSIBLE_MXFP8_KERNELS.values()]
    plugin.register()
    assert [list(each) for each in kernels._POSSIBLE_MXFP8_KERNELS.values()] == before


def test_traces_whole_under_compile() -> None:
    layer = ColumnParallelLinear(
        H, I, bias=False, quant_config=FORMATS["mxfp8"](), params_dtype=BF16, prefix="compiled"
    )
    fill(layer, {None: mx(I, H, seed=4)})
    ready(layer)
    _, experts = experts_layer("layers.compiled.experts")
    fill_experts(experts, 7)
    experts.quant_method.process_weights_after_loading(experts)
    apply = experts.quant_method.moe_kernel.fused_experts.apply

    def both(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
        out = torch.empty_like(x)
        apply(out, x, experts.w13_weight, experts.w2_weight, weights, ids, MoEActivation.SILU, E,
              None, None, None, None, None, None, False)  # fmt: skip
        return layer.quant_method.apply(layer, x), out

    x, ids = torch.randn(4, H, dtype=BF16), torch.randint(0, E, (4, TOP_K), dtype=torch.int32)
    arguments = (x, ids, torch.rand(4, TOP_K))
    torch._dynamo.reset()
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for found, expected in zip(compiled(*arguments), both(*arguments), strict=True):
        assert torch.equal(found, expected)


def test_simulated_gfx950_gives_the_bits_of_our_op(tmp_path: Path) -> None:
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
