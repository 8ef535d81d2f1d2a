"""SGLang's own layers, loaders and runner, with our plug-in loaded as SGLang loads it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import plugins
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang.srt.layers.moe.moe_runner.runner import MoeRunner
from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.moe.utils import MoeA2ABackend, MoeRunnerBackend
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_context, get_parallel

import aiter_mx
from aiter_mx.integrations import sglang as plugin
from aiter_mx.integrations.engine import say_once
from aiter_mx.integrations.layers import Gate
from op_tests.engines.checkpoints import converted_experts, load_experts

H, I, E, TOP_K = 64, 96, 4, 2
BF16 = torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def engine() -> Iterator[None]:
    plugins._plugins_loaded = False
    plugins.load_plugins()
    assert len([each for each in HookRegistry._patched if "mxfp8" in each]) == 3
    yield


def config() -> Fp8Config:
    return Fp8Config.from_config({"quant_method": "mxfp8", "activation_scheme": "dynamic"})


def mx(*shape: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return aiter_mx.quantize(x * torch.randn(*shape[:-1], 1, generator=generator).exp2())


@pytest.mark.parametrize("leading", [(1,), (7,), (2, 3)])
def test_linear_layer_gives_the_bits_of_our_op_also_after_a_refit(leading: tuple[int, ...]) -> None:
    layer = ReplicatedLinear(
        H, I, bias=True, quant_config=config(), params_dtype=BF16, prefix="mlp.up"
    )
    layer.bias.data.normal_()
    x = torch.randn(*leading, H, dtype=BF16)
    for seed in (0, 1):
        payload, scale = mx(I, H, seed=seed)
        layer.weight.weight_loader(layer.weight, payload)
        layer.weight_scale_inv.weight_loader(layer.weight_scale_inv, scale)
        if seed == 0:
            layer.quant_method.process_weights_after_loading(layer)
        expected = aiter_mx.linear(x, None, payload, scale, layer.bias)
        assert torch.equal(layer(x)[0], expected)


def linear_of(payload: torch.Tensor, scale: torch.Tensor) -> ReplicatedLinear:
    """A layer with these weights, ready."""
    N, K = payload.shape
    options = {"quant_config": config(), "params_dtype": BF16, "prefix": "mlp.up"}
    layer = ReplicatedLinear(K, N, bias=False, **options)
    layer.weight.weight_loader(layer.weight, payload)
    layer.weight_scale_inv.weight_loader(layer.weight_scale_inv, scale)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def test_quantised_activations_are_taken_as_they_are() -> None:
    payload, scale = mx(I, H, seed=3)
    layer = linear_of(payload, scale)
    xq, xs = mx(5, H, seed=4)
    found = layer.quant_method.apply(layer, (xq, xs))
    assert torch.equal(found, aiter_mx.linear(xq, xs, payload, scale))


def experts(seed: int) -> dict[str, torch.Tensor]:
    w13, s13 = mx(E, 2 * I, H, seed=seed)
    w2, s2 = mx(E, H, I, seed=seed + 1)
    return {"w13_weight": w13, "w13_scale": s13, "w2_weight": w2, "w2_scale": s2}


def by_our_op(
    w: dict[str, torch.Tensor], x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
    gate: Gate,
) -> torch.Tensor:  # fmt: skip
    order = ("w13_weight", "w13_scale", "w2_weight", "w2_scale")
    return aiter_mx.fused_moe(x, *(w[each] for each in order), ids, weights, **gate.options())


def runner_of(**options: Any) -> MoeRunner:
    sizes = {"num_experts": E, "num_local_experts": E, "hidden_size": H, "top_k": TOP_K}
    sizes["intermediate_size_per_partition"] = I
    return MoeRunner(MoeRunnerBackend.TRITON, MoeRunnerConfig(**(sizes | options)))


@pytest.mark.parametrize(
    ("options", "gate", "factor"),
    [
        ({}, Gate("silu"), 1.0),
        ({"activation": "gelu"}, Gate("gelu"), 1.0),
        ({"routed_scaling_factor": 2.5}, Gate("silu"), 2.5),
        ({"swiglu_limit": 0.75}, Gate("swiglu_oai", "halves", 1.0, 0.0, 0.75), 1.0),
        ({"gemm1_clamp_limit": 0.5}, Gate("swiglu_oai", "halves", 1.0, 0.0, 0.5), 1.0),
        (
            {"gemm1_alpha": 1.7, "gemm1_clamp_limit": 7.0},
            Gate("swiglu_oai", "interleaved", 1.7, 1.0, 7.0),
            1.0,
        ),
        (
            {"gemm1_alpha": 1.7, "gemm1_clamp_limit": 7.0, "gate_up_interleaved": False},
            Gate("swiglu_oai", "halves", 1.7, 1.0, 7.0),
            1.0,
        ),
    ],
)
def test_runner_gives_the_bits_of_our_op(
    options: dict[str, Any], gate: Gate, factor: float
) -> None:
    w, x = experts(0), torch.randn(9, H, dtype=BF16)
    ids = torch.randint(-1, E, (9, TOP_K), dtype=torch.int32)  # -1: an expert of another rank
    weights = torch.rand(9, TOP_K)
    routed = StandardTopKOutput(weights, ids, torch.empty(9, E))
    for use_mxfp8 in (True, False):  # SGLang has the flag on gfx950 alone
        info = TritonMoeQuantInfo(**w, use_mxfp8=use_mxfp8, block_shape=[1, 32])
        found = runner_of(**options).run(StandardDispatchOutput(x, None, routed), info)
        expected = by_our_op(w, x, ids, weights * factor, gate)
        assert torch.equal(found.hidden_states, expected)


def test_weights_may_be_applied_to_the_input() -> None:
    w, x, weights = experts(2), torch.randn(5, H, dtype=BF16), torch.rand(5, 1)
    ids = torch.randint(0, E, (5, 1), dtype=torch.int32)
    info = TritonMoeQuantInfo(**w, block_shape=[1, 32])
    routed = StandardTopKOutput(weights, ids, torch.empty(5, E))
    runner = runner_of(apply_router_weight_on_input=True, top_k=1)
    found = runner.run(StandardDispatchOutput(x, None, routed), info).hidden_states
    scaled = (x * weights).to(BF16)
    assert torch.equal(found, by_our_op(w, scaled, ids, torch.ones(5, 1), Gate("silu")))


@pytest.mark.parametrize("activation", ["relu2", "silu", "gelu"])
def test_experts_without_a_gate(activation: str) -> None:
    (w1, s1), (w2, s2) = mx(E, I, H, seed=8), mx(E, H, I, seed=9)
    w = {"w13_weight": w1, "w13_scale": s1, "w2_weight": w2, "w2_scale": s2}
    x, weights = torch.randn(5, H, dtype=BF16), torch.rand(5, TOP_K)
    ids = torch.randint(-1, E, (5, TOP_K), dtype=torch.int32)
    info = TritonMoeQuantInfo(**w, block_shape=[1, 32])
    routed = StandardTopKOutput(weights, ids, torch.empty(5, E))
    runner = runner_of(is_gated=False, activation=activation)
    found = runner.run(StandardDispatchOutput(x, None, routed), info).hidden_states
    expected = aiter_mx.fused_moe_ungated(x, w1, s1, w2, s2, ids, weights, activation=activation)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("weighted", [False, True])
def test_slots_may_stay_apart(weighted: bool) -> None:
    w, x, weights = experts(2), torch.randn(5, H, dtype=BF16), torch.rand(5, TOP_K)
    ids = torch.randint(-1, E, (5, TOP_K), dtype=torch.int32)
    info = TritonMoeQuantInfo(**w, block_shape=[1, 32])
    routed = StandardTopKOutput(weights, ids, torch.empty(5, E))
    asked = {"no_combine_keep_router_weight": True} if weighted else {}
    if not asked.keys() <= MoeRunnerConfig.__dataclass_fields__.keys():
        pytest.skip("SGLang 0.5.22 has no such option")
    runner = runner_of(no_combine=True, **asked)
    found = runner.run(StandardDispatchOutput(x, None, routed), info).hidden_states
    order = ("w13_weight", "w13_scale", "w2_weight", "w2_scale")
    apart = aiter_mx.fused_moe(x, *(w[each] for each in order), ids, weights, reduce=False)
    factor = weights.unsqueeze(-1) if weighted else 1.0
    assert torch.equal(found, (apart * factor).to(BF16))


@torch.no_grad()
def test_layers_trace_whole_under_compile() -> None:
    linear = linear_of(*mx(H, H, seed=7))
    info, runner = TritonMoeQuantInfo(**experts(8), block_shape=[1, 32]), runner_of()
    ids = torch.randint(-1, E, (5, TOP_K), dtype=torch.int32)
    weights, logits = torch.rand(5, TOP_K), torch.empty(5, E)

    def layers(x: torch.Tensor) -> torch.Tensor:
        routed = StandardTopKOutput(weights, ids, logits)
        x = linear.quant_method.apply(linear, x)
        return runner.run(StandardDispatchOutput(x, None, routed), info).hidden_states

    x = torch.randn(5, H, dtype=BF16)
    torch._dynamo.reset()
    compiled = torch.compile(layers, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layers(x))


class _Runner(SimpleNamespace):
    """A runner of the engine's, which notes that it was asked."""

    def run(self, *arguments: Any) -> str:
        return "theirs"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"activation": "situ"}, "activation situ"),
        ({"is_gated": False, "activation": "situ"}, "no gate"),
        ({"intermediate_size_per_partition": 4304}, "K=4304 is no multiple of 32"),
    ],
)
def test_layers_that_ours_declines_take_the_engines_path(
    options: dict[str, Any],
    reason: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from aiter_mx.integrations import sglang_layers

    runner = runner_of(**options)
    method = SimpleNamespace(runner=runner, moe_runner_config=runner.config)
    asked: list[Any] = []
    say_once.cache_clear()
    with caplog.at_level(logging.INFO):
        sglang_layers.process_experts(lambda *a, **k: asked.append(k), method, torch.nn.Module())
    assert asked == [{"quantize": True}]
    assert "aiter_mx declines an expert layer" in caplog.text and reason in caplog.text
    info = TritonMoeQuantInfo(**experts(0), block_shape=[1, 32])
    topk = StandardTopKOutput(torch.rand(1, 1), torch.zeros(1, 1).int(), torch.empty(1, E))
    dispatched = StandardDispatchOutput(torch.zeros(1, H, dtype=BF16), None, topk)
    assert sglang_layers.run_experts(_Runner.run, runner, dispatched, info) == "theirs"


def test_the_user_s_choice_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.quantization import fp8_utils

    from aiter_mx.integrations import sglang_layers

    def theirs() -> str:
        return "theirs"

    assert sglang_layers.resolve_backend(theirs) != "theirs"
    chosen = next(each for each in fp8_utils.Fp8GemmRunnerBackend if not each.is_auto())
    monkeypatch.setattr(fp8_utils, "FP8_GEMM_RUNNER_BACKEND", chosen)
    assert sglang_layers.resolve_backend(theirs) == "theirs"
    assert sglang_layers.dispatch_linear(theirs) == "theirs"
    runner = runner_of()
    runner.runner_backend = MoeRunnerBackend.CUTLASS
    method = SimpleNamespace(runner=runner, moe_runner_config=runner.config)
    asked: list[Any] = []
    sglang_layers.process_experts(lambda *a, **k: asked.append(k), method, torch.nn.Module())
    assert asked == [{"quantize": True}]


@pytest.mark.parametrize(
    ("dispatch", "lora", "reason"),
    [("deepep", False, "tokens are dispatched by deepep"), ("none", True, "adapters (LoRA)")],
)
def test_weights_are_left_to_the_engine_where_its_path_will_be_taken(
    dispatch: str,
    lora: bool,
    reason: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from aiter_mx.integrations import sglang_layers

    runner = runner_of()
    runner.lora_enabled = lora
    monkeypatch.setattr(sglang_layers, "get_moe_a2a_backend", lambda: MoeA2ABackend(dispatch))
    asked: list[Any] = []
    say_once.cache_clear()
    method = SimpleNamespace(runner=runner, moe_runner_config=runner.config)
    with caplog.at_level(logging.INFO):
        sglang_layers.process_experts(lambda *a, **k: asked.append(k), method, torch.nn.Module())
    assert asked == [{"quantize": True}]
    assert f"aiter_mx declines an expert layer: {reason}" in caplog.text


def test_linear_layer_that_ours_declines_takes_the_engines_path(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layer = ReplicatedLinear(
        4304, 64, bias=False, quant_config=config(), params_dtype=BF16, prefix="mlp.up"
    )
    say_once.cache_clear()
    with (
        caplog.at_level(logging.INFO, logger="sglang.aiter_mx"),
        pytest.raises(RuntimeError, match="No MXFP8 dense GEMM kernel is available"),
    ):
        layer(torch.randn(2, 4304, dtype=BF16))
    assert caplog.messages == [
        "aiter_mx declines a linear layer [64, 4304]: K=4304 is no multiple of 32"
    ]


@pytest.mark.parametrize("online", [False, True])
def test_experts_stay_as_loaded_or_are_quantised_by_ours(online: bool) -> None:
    runner = runner_of()
    method = Fp8MoEMethod.__new__(Fp8MoEMethod)
    method.runner, method.moe_runner_config = runner, runner.config
    layer, w = torch.nn.Module(), experts(5)
    given = {"w13_weight": w["w13_weight"], "w2_weight": w["w2_weight"]}
    if online:
        given = {name: torch.randn(weight.shape, dtype=BF16) for name, weight in given.items()}
    for name, weight in given.items():
        setattr(layer, name, torch.nn.Parameter(weight, requires_grad=False))
    method._process_mxfp8_moe_weights(layer, quantize=online)
    for name, weight in given.items():
        expected = aiter_mx.quantize(weight)[0] if online else weight
        assert torch.equal(getattr(layer, name).view(torch.uint8), expected.view(torch.uint8))
    assert hasattr(layer, "w13_weight_scale_inv") == online


def test_chosen_kernels_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    say_once.cache_clear()
    method = Fp8MoEMethod.__new__(Fp8MoEMethod)
    method.runner = runner_of()
    method.moe_runner_config = method.runner.config
    with caplog.at_level(logging.INFO, logger="sglang.aiter_mx"):
        plugin.register()
        for _ in range(2):
            ReplicatedLinear(H, I, quant_config=config(), params_dtype=BF16, prefix="mlp.up")
            method._process_mxfp8_moe_weights(torch.nn.Module(), quantize=False)
    assert caplog.messages == [
        "aiter_mx computes MX-FP8 layers: linear and fused_moe",
        "Using aiter_mx.linear for MXFP8 GEMM",
        "Using aiter_mx.fused_moe for MXFP8 MoE",
    ]


def test_simulated_gfx950_gives_the_bits_of_our_ops() -> None:
    payload, scale = mx(I, H, seed=3)
    layer = linear_of(payload, scale)
    w, x, weights = experts(4), torch.randn(3, H, dtype=BF16), torch.rand(3, TOP_K)
    ids = torch.randint(-1, E, (3, TOP_K), dtype=torch.int32)
    info = TritonMoeQuantInfo(**w, block_shape=[1, 32])
    dispatched = StandardDispatchOutput(
        x, None, StandardTopKOutput(weights, ids, torch.empty(3, E))
    )
    with aiter_mx.simulate("gfx950"):
        assert torch.equal(layer(x)[0], aiter_mx.linear(x, None, payload, scale))
        found = runner_of().run(dispatched, info).hidden_states
        assert torch.equal(found, by_our_op(w, x, ids, weights, Gate("silu")))


def test_converted_checkpoint_loads_into_the_engine_s_own_layer(tmp_path: Path) -> None:
    plain = converted_experts(tmp_path, "sglang", E, H, I)
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    with (
        get_context().override_server_args(device="cpu"),
        get_parallel().override(tp_rank=0, moe_ep_rank=0, moe_tp_rank=0),
    ):
        layer = FusedMoE(
            *(E, H, I),
            layer_id=0,
            top_k=TOP_K,
            params_dtype=BF16,
            quant_config=Fp8Config.from_config(written),
            prefix="mlp.experts",
        )
        mapping = FusedMoE.make_expert_params_mapping("gate_proj", "down_proj", "up_proj", E)
        assert load_experts(tmp_path / "out", dict(layer.named_parameters()), mapping) == 6 * E
        layer.quant_method.process_weights_after_loading(layer)
        x, ids = torch.randn(5, H, dtype=BF16), torch.randint(0, E, (5, TOP_K), dtype=torch.int32)
        routed = StandardTopKOutput(torch.rand(5, TOP_K), ids, torch.empty(5, E))
        found = layer.quant_method.apply(layer, StandardDispatchOutput(x, None, routed))
    first = torch.stack([torch.cat(each[:2]) for each in plain])
    second = torch.stack([each[2] for each in plain])
    weights = (*aiter_mx.quantize(first), *aiter_mx.quantize(second))
    expected = aiter_mx.fused_moe(x, *weights, ids, routed.topk_weights)
    assert torch.equal(found.hidden_states, expected)


def test_hopper_may_load_mxfp8(monkeypatch: pytest.MonkeyPatch) -> None:
    from aiter_mx.integrations import sglang_layers

    assert config().get_min_capability() == 90
    monkeypatch.setattr(sglang_layers, "unsupported_device", lambda: "another GPU")
    assert config().get_min_capability() == 100


def test_loading_twice_changes_nothing() -> None:
    before = {target: len(hooks) for target, hooks in HookRegistry._hooks.items()}
    plugin.register()
    assert {target: len(hooks) for target, hooks in HookRegistry._hooks.items()} == before
