"""vLLM's own expert layers, loaders and kernels, with our plug-in loaded as vLLM loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import (
    ApplyMoEActivationConfig,
    MoEActivation,
)
from vllm.model_executor.layers.linear import ColumnParallelLinear

import aiter_mx
from aiter_mx.integrations.layers import Gate
from op_tests.engines.checkpoints import converted_experts, load_experts
from op_tests.engines.vllm.layers import (
    BF16,
    FORMATS,
    TOP_K,
    E,
    H,
    I,
    by_our_op,
    experts_layer,
    fill,
    fill_experts,
    mx,
    ready,
    through_kernel,
)


def filled(name: str, seed: int) -> RoutedExperts:
    """A layer of this name whose weights are ready."""
    _, experts = experts_layer(f"layers.{name}.experts")
    fill_experts(experts, seed)
    experts.quant_method.process_weights_after_loading(experts)
    return experts


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


def test_online_quantisation_of_experts_gives_the_bits_of_ours() -> None:
    from vllm.model_executor.layers.quantization.online.mxfp8 import Mxfp8OnlineMoEMethod

    _, experts = experts_layer("layers.online.experts")
    method = Mxfp8OnlineMoEMethod(moe=experts.moe_config)
    assert method.experts_cls.__name__ == "AiterMxExperts"
    plain = {"w13": torch.randn(E, 2 * I, H, dtype=BF16), "w2": torch.randn(E, H, I, dtype=BF16)}
    for name, weight in plain.items():
        setattr(experts, f"{name}_weight", torch.nn.Parameter(weight, requires_grad=False))
    method.process_weights_after_loading(experts)
    for name, weight in plain.items():
        payload, scale = aiter_mx.quantize(weight)
        found = getattr(experts, f"{name}_weight").view(torch.uint8)
        assert torch.equal(found, payload.view(torch.uint8))
        assert torch.equal(getattr(experts, f"{name}_weight_scale"), scale)
    x, ids = torch.randn(6, H, dtype=BF16), torch.randint(0, E, (6, TOP_K), dtype=torch.int32)
    weights = torch.rand(6, TOP_K)
    found = through_kernel(method.moe_kernel, experts, x, ids, weights)
    assert torch.equal(found, by_our_op(experts, x, (weights, ids), Gate()))


def test_simulated_gfx950_gives_the_bits_of_our_op() -> None:
    experts = filled("simulated", 9)
    x, ids = torch.randn(3, H, dtype=BF16), torch.randint(0, E, (3, TOP_K), dtype=torch.int32)
    weights = torch.rand(3, TOP_K)
    with aiter_mx.simulate("gfx950"):
        found = through_kernel(experts.quant_method.moe_kernel, experts, x, ids, weights)
        assert torch.equal(found, by_our_op(experts, x, (weights, ids), Gate()))


def test_experts_of_another_rank_are_left_out() -> None:
    experts = filled("map", 3)
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


def test_result_may_be_wanted_where_the_tokens_are() -> None:
    experts = filled("inplace", 8)
    x, ids = torch.randn(40, H, dtype=BF16), torch.randint(0, E, (40, TOP_K), dtype=torch.int32)
    weights = torch.rand(40, TOP_K)
    expected = by_our_op(experts, x, (weights, ids), Gate())
    apply = experts.quant_method.moe_kernel.fused_experts.apply
    wide = torch.full((40, 2 * H), torch.nan, dtype=BF16)
    same = x.clone()
    for tokens, out in ((same, same), (x, torch.full_like(x, torch.nan)), (x, wide[:, :H])):
        apply(out, tokens, experts.w13_weight, experts.w2_weight, weights, ids, MoEActivation.SILU,
              E, None, None, None, None, None, None, False)  # fmt: skip
        assert torch.equal(out, expected)
    assert wide[:, H:].isnan().all()


def test_dispatched_tokens_come_quantised() -> None:
    experts = filled("quantised", 4)
    x, ids = torch.randn(6, H, dtype=BF16), torch.randint(0, E, (6, TOP_K), dtype=torch.int32)
    weights, out = torch.rand(6, TOP_K), torch.full((6, H), torch.nan, dtype=BF16)
    xq, xs = aiter_mx.quantize(x)
    apply = experts.quant_method.moe_kernel.fused_experts.apply
    apply(out, xq, experts.w13_weight, experts.w2_weight, weights, ids, MoEActivation.SILU, E,
          None, xs, None, None, None, None, False)  # fmt: skip
    assert torch.equal(out, by_our_op(experts, x, (weights, ids), Gate()))


def test_converted_checkpoint_loads(tmp_path: Path) -> None:
    """Names and shapes that ``aiter-mx convert`` writes, by the mapping and loaders of vLLM."""
    from vllm.model_executor.layers.fused_moe import fused_moe_make_expert_params_mapping

    plain = converted_experts(tmp_path, "vllm", E, H, I)
    runner, experts = experts_layer("layers.converted.experts")
    mapping = fused_moe_make_expert_params_mapping(runner, "gate_proj", "down_proj", "up_proj", E)
    assert load_experts(tmp_path / "out", dict(runner.named_parameters()), mapping) == 6 * E
    experts.quant_method.process_weights_after_loading(experts)
    first = torch.cat(plain[2][:2])
    payload, scale = aiter_mx.quantize(first)
    found = experts.w13_weight[2].view(torch.uint8)
    assert torch.equal(found, payload.view(torch.uint8))
    assert torch.equal(experts.w13_weight_scale[2], scale)


def test_weights_on_the_input_are_applied_once() -> None:
    experts = filled("input", 5)
    x, weights = torch.randn(3, H, dtype=BF16), torch.rand(3, 1)
    ids = torch.tensor([[2], [0], [3]], dtype=torch.int32)
    kernel = experts.quant_method.moe_kernel
    options = {"apply_router_weight_on_input": True}
    found = through_kernel(kernel, experts, x, ids, weights, **options)
    scaled = x * weights.to(BF16)
    assert torch.equal(found, by_our_op(experts, scaled, (torch.ones(3, 1), ids), Gate()))


def test_experts_without_a_gate() -> None:
    experts = filled("ungated", 5)
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

    experts = filled(f"dispatch.{has_map}", 6)
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


def test_traces_whole_under_compile() -> None:
    layer = ColumnParallelLinear(
        H, I, bias=False, quant_config=FORMATS["mxfp8"](), params_dtype=BF16, prefix="compiled"
    )
    fill(layer, {None: mx(I, H, seed=4)})
    ready(layer)
    experts = filled("compiled", 7)
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
