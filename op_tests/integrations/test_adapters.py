"""Adapters over stand-ins of what they import from vLLM, SGLang and torchao, so that they run where
these do not fit: on a GPU captured into a graph, and to the bit as our ops."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import aiter_mx
from aiter_mx.integrations.layers import Gate, MxExperts, MxLinear
from op_tests.places import device_in

H, I, E, TOP_K = 96, 64, 6, 3


class _Base:
    """What the adapters inherit from, without what vLLM's classes do at start-up."""

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)


class _Activation(Enum):
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    SWIGLUOAI = "swigluoai"
    SWIGLUOAI_UNINTERLEAVE = "swigluoai_uninterleave"
    SILU_NO_MUL = "silu_no_mul"
    GELU_NO_MUL = "gelu_no_mul"
    GELU_TANH_NO_MUL = "gelu_tanh_no_mul"
    RELU2_NO_MUL = "relu2_no_mul"


def _modules() -> Iterator[tuple[str, dict[str, Any]]]:
    log = logging.getLogger("op_tests.vllm")
    log.info_once = log.info  # type: ignore[attr-defined]
    layers, fused = "vllm.model_executor.layers", "vllm.model_executor.layers.fused_moe"
    linear = "vllm.model_executor.kernels.linear"
    base = type("FusedMoEExpertsModular", (_Base,), {})
    kernel = type("Mxfp8LinearKernel", (_Base,), {})
    yield "vllm.logger", {"init_logger": lambda name: log}
    yield "vllm.platforms", {"current_platform": None}
    yield (
        f"{fused}.modular_kernel",
        {
            "FusedMoEExpertsModular": base,
            "FusedMoEPrepareAndFinalizeModular": base,
            "FusedMoEActivationFormat": SimpleNamespace(Standard=0, BatchedExperts=1),
            "TopKWeightAndReduce": object,
        },
    )
    yield f"{fused}.activation", {"MoEActivation": _Activation}
    yield f"{fused}.config", {"FusedMoEConfig": object}
    yield f"{fused}.topk_weight_and_reduce", {"TopKWeightAndReduceNoOP": object}
    quant = {"kMxfp8Dynamic": "dynamic", "kMxfp8Static": "static"}
    yield f"{layers}.quantization.utils.quant_utils", quant
    yield (
        f"{linear}.mxfp8.Mxfp8LinearKernel",
        {
            "Mxfp8LinearKernel": kernel,
            "Mxfp8LinearLayerConfig": object,
        },
    )


def _sglang_modules() -> Iterator[tuple[str, dict[str, Any]]]:
    layers = "sglang.srt.layers"
    yield f"{layers}.moe.token_dispatcher.standard", {"StandardCombineInput": SimpleNamespace}
    yield f"{layers}.moe.utils", {"get_moe_a2a_backend": None}
    yield f"{layers}.quantization.fp8_utils", {}


class _Wrapper(torch.Tensor):
    """What torchao's tensors inherit from: functions that a class implements are called in place
    of torch's."""

    table: ClassVar[dict[Any, Any]] = {}

    @classmethod
    def implements(cls, functions: Any) -> Callable[[Any], Any]:
        def keep(function: Any) -> Any:
            cls.table |= dict.fromkeys(functions, function)
            return function

        return keep

    implements_torch_function = implements

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in cls.table:
            return cls.table[func](func, types, args, kwargs)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:  # as nn.Parameter asks for
            return args[0]
        raise NotImplementedError(f"{func} of a tensor of ours")


def _torchao_modules() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "torchao.core.config", {"AOBaseConfig": object}
    register = {"register_quantize_module_handler": lambda _: lambda function: function}
    yield "torchao.quantization.transform_module", register
    yield "torchao.utils", {"TorchAOBaseTensor": _Wrapper}


def _over(
    stand_ins: Iterable[tuple[str, dict[str, Any]]], module: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """A module of adapters, imported over stand-ins for what it imports."""
    for name, members in stand_ins:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if end == len(parts) or not isinstance(sys.modules.get(path), _Stub):
                monkeypatch.setitem(sys.modules, path, _Stub(path))
            if end > 1:
                setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[path])
        vars(sys.modules[name]).update(members)
    monkeypatch.delitem(sys.modules, module, raising=False)
    yield import_module(module)
    sys.modules.pop(module, None)


def vllm_adapters(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM's, once."""
    yield from _over(_modules(), "aiter_mx.integrations.vllm_layers", monkeypatch)


adapters = pytest.fixture(vllm_adapters, name="adapters")


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SGLang's."""
    yield from _over(_sglang_modules(), "aiter_mx.integrations.sglang_layers", monkeypatch)


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """torchao's."""
    monkeypatch.setattr(torch.serialization, "add_safe_globals", lambda _: None)
    yield from _over(_torchao_modules(), "aiter_mx.integrations.torchao", monkeypatch)


class _Stub(ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - a package, as imports look at it


device = device_in("torch", "cuda")


def replayed(compute: Callable[[], Tensor], device: torch.device) -> Tensor:
    """What a captured call writes when it is replayed; on a CPU, what the call returns."""
    out = compute()  # builds and loads
    if device.type == "cpu":
        return out
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()
    out.fill_(torch.nan)
    graph.replay()
    return out


def mx(*shape: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    payload, scale = aiter_mx.quantize(torch.randn(shape, generator=g))
    return payload.to(device), scale.to(device)


@pytest.mark.parametrize("leading", [(1,), (5,), (2, 40)])
def test_linear_kernel(adapters: Any, device: torch.device, leading: tuple[int, ...]) -> None:
    payload, scale = mx(I, H, seed=0, device=device)
    bias = torch.randn(I, device=device)
    layer = SimpleNamespace(weight=payload, weight_scale=scale)
    x = torch.randn(*leading, H, device=device, dtype=torch.bfloat16)
    kernel = adapters.AiterMxLinearKernel()
    kernel.process_weights_after_loading(layer)
    found = replayed(lambda: kernel.apply_weights(layer, x, bias), device)
    assert torch.equal(found, aiter_mx.linear(x, None, payload, scale, bias))


def experts_output(
    adapters: Any,
    layer: tuple[Tensor, ...],
    x: Tensor,
    scale: Tensor | None,
    weights: Tensor,
    ids: Tensor,
    num_experts: int,
    expert_map: Tensor | None,
    limit: float | None = None,
) -> Tensor:
    """What vLLM's experts of ours make of tokens, called as vLLM does, over poison."""
    w1, s1, w2, s2 = layer
    config = SimpleNamespace(clamp_limit=limit, alpha=1.0, beta=0.0)
    experts = adapters.AiterMxExperts(
        w1_scale=s1, w2_scale=s2, w1_bias=None, w2_bias=None, activation_config=config
    )
    out = torch.full((len(x), H), torch.nan, device=x.device, dtype=torch.bfloat16)
    experts.apply(
        output=out,
        hidden_states=x,
        w1=w1,
        w2=w2,
        topk_weights=weights,
        topk_ids=ids,
        activation=_Activation.SILU,
        global_num_experts=num_experts,
        expert_map=expert_map,
        a1q_scale=scale,
        a2_scale=None,
        workspace13=None,
        workspace2=None,
        expert_tokens_meta=None,
        apply_router_weight_on_input=False,
    )
    return out


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("limit", [None, 0.5])
def test_experts(adapters: Any, device: torch.device, quantised: bool, limit: float | None) -> None:
    (w1, s1), (w2, s2) = mx(E, 2 * I, H, seed=1, device=device), mx(E, H, I, seed=2, device=device)
    tokens = 7
    x = torch.randn(tokens, H, device=device, dtype=torch.bfloat16)
    ids = torch.randint(0, 2 * E, (tokens, TOP_K), device=device, dtype=torch.int32)
    weights = torch.rand(tokens, TOP_K, device=device)
    expert_map = torch.full((2 * E,), -1, dtype=torch.int32, device=device)
    expert_map[1::2] = torch.arange(E, dtype=torch.int32, device=device)
    given, scale = aiter_mx.quantize(x) if quantised else (x, None)
    routing = weights, ids, 2 * E, expert_map

    def compute() -> Tensor:
        return experts_output(adapters, (w1, s1, w2, s2), given, scale, *routing, limit=limit)

    options: dict[str, Any] = {"num_experts": 2 * E, "expert_map": expert_map}
    if limit is not None:
        options |= {"activation": "swiglu_oai", "alpha": 1.0, "beta": 0.0, "limit": limit}
    expected = aiter_mx.fused_moe(x, w1, s1, w2, s2, ids, weights, **options)
    assert torch.equal(replayed(compute, device), expected)


@pytest.mark.parametrize("quantised", [False, True])
def test_linear_function_of_sglang(sglang: Any, device: torch.device, quantised: bool) -> None:
    payload, scale = mx(I, H, seed=0, device=device)
    bias = torch.randn(I, device=device, dtype=torch.bfloat16)
    x = torch.randn(5, H, device=device, dtype=torch.bfloat16)
    given = aiter_mx.quantize(x) if quantised else (x, None)
    found = replayed(lambda: sglang.mxfp8_linear(given[0], payload, scale, given[1], bias), device)
    assert torch.equal(found, aiter_mx.linear(x, None, payload, scale, bias))


@pytest.mark.parametrize("factor", [None, 2.5])
def test_experts_of_sglang(sglang: Any, device: torch.device, factor: float | None) -> None:
    (w1, s1), (w2, s2) = mx(E, 2 * I, H, seed=1, device=device), mx(E, H, I, seed=2, device=device)
    x = torch.randn(7, H, device=device, dtype=torch.bfloat16)
    ids = torch.randint(-1, E, (7, TOP_K), device=device, dtype=torch.int32)
    weights = torch.rand(7, TOP_K, device=device)
    config = SimpleNamespace(
        activation="silu",
        is_gated=True,
        hidden_size=H,
        intermediate_size_per_partition=I,
        apply_router_weight_on_input=False,
        routed_scaling_factor=factor,
        no_combine=False,
        gemm1_alpha=None,
        gemm1_clamp_limit=None,
        swiglu_limit=None,
    )
    runner = SimpleNamespace(config=config, lora_enabled=False)
    info = SimpleNamespace(w13_weight=w1, w13_scale=s1, w2_weight=w2, w2_scale=s2)
    dispatched = SimpleNamespace(
        hidden_states=x,
        topk_output=SimpleNamespace(topk_ids=ids, topk_weights=weights),
        format=SimpleNamespace(is_standard=lambda: True),
    )

    def theirs(*_: Any) -> None:
        raise AssertionError("the engine's own path was taken")

    def compute() -> Tensor:
        out: Tensor = sglang.run_experts(theirs, runner, dispatched, info).hidden_states
        return out

    expected = aiter_mx.fused_moe(x, w1, s1, w2, s2, ids, weights * (factor or 1.0))
    assert torch.equal(replayed(compute, device), expected)


@torch.no_grad()
def test_weight_of_torchao(torchao: Any, device: torch.device) -> None:
    layer = torch.nn.Linear(H, I, device=device, dtype=torch.bfloat16)
    payload, scale = aiter_mx.quantize(layer.weight)
    layer = torchao._quantise_module(layer, torchao.AiterMxConfig())
    x = torch.randn(2, 5, H, device=device, dtype=torch.bfloat16)
    expected = aiter_mx.linear(x, None, payload, scale, layer.bias)
    assert torch.equal(replayed(lambda: layer(x), device), expected)


def test_torchao_quantises_a_layer_once_and_for_inference(torchao: Any) -> None:
    layer, x = torch.nn.Linear(H, I, dtype=torch.bfloat16), torch.randn(3, H).bfloat16()
    for _ in range(2):
        layer = torchao._quantise_module(layer, torchao.AiterMxConfig())
    assert not layer(x).requires_grad
    assert not torch.compile(layer, backend="aot_eager", fullgraph=True)(x).requires_grad


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_layers_take_x_of_any_strides(batch: int, dtype: torch.dtype) -> None:
    layer = MxLinear.of(torch.nn.Linear(H, I, dtype=dtype))
    x = torch.randn(batch, H, 5).to(dtype).mT
    assert torch.equal(layer(x), layer(x.clone(memory_format=torch.contiguous_format)))


@torch.no_grad()
def test_layers_of_transformers(device: torch.device) -> None:
    experts = MxExperts(E, H, I, Gate("gelu"), torch.bfloat16, device)
    for name, shape in (("gate_up_proj", (E, 2 * I, H)), ("down_proj", (E, H, I))):
        tensors = mx(*shape, seed=len(name), device=device)
        for end, tensor in zip(("", "_scale_inv"), tensors, strict=True):
            getattr(experts, name + end).copy_(tensor)
        getattr(experts, f"{name}_bias").normal_()
    linear = MxLinear.of(torch.nn.Linear(H, H, device=device, dtype=torch.bfloat16))
    x = torch.randn(2, 4, H, device=device, dtype=torch.bfloat16)
    ids = torch.randint(0, E, (8, TOP_K), device=device)
    weights = torch.rand(8, TOP_K, device=device)
    found = replayed(lambda: experts(linear(x), ids, weights), device)
    hidden = aiter_mx.linear(x, None, linear.weight, linear.weight_scale_inv, linear.bias)
    expected = aiter_mx.fused_moe(
        hidden.view(8, H),
        experts.gate_up_proj,
        experts.gate_up_proj_scale_inv,
        experts.down_proj,
        experts.down_proj_scale_inv,
        ids,
        weights,
        activation="gelu",
        bias1=experts.gate_up_proj_bias,
        bias2=experts.down_proj_bias,
    )
    assert torch.equal(found.view(8, H), expected)
