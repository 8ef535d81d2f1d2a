"""The modules: parameters, state dicts, gradients of a layer of experts, and its launches."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

import aiter_mx
from aiter_mx import autograd
from aiter_mx.nn import MxExperts, MxGroupedLinear, MxLinear

E, H, I, TOP_K, T = 4, 64, 96, 2, 150


def test_a_linear_takes_over_another_ones_parameters_and_state() -> None:
    plain = nn.Linear(64, 32, dtype=torch.bfloat16)
    layer = MxLinear.from_linear(plain)
    assert layer.weight is plain.weight and layer.bias is plain.bias
    other = MxLinear(64, 32, dtype=torch.bfloat16)
    other.load_state_dict(plain.state_dict())
    x = torch.randn(7, 64, dtype=torch.bfloat16)
    assert torch.equal(other(x), layer(x))
    assert torch.equal(other(x), aiter_mx.linear_autograd(x, plain.weight, plain.bias))
    assert list(MxLinear(64, 32, bias=False).state_dict()) == ["weight"]
    assert "in_features=64, out_features=32, bias=True" in repr(other)


def test_master_weights_may_have_more_bits_than_activations() -> None:
    layer = MxLinear(64, 32)
    x = torch.randn(40, 64, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    assert layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32
    exact = x.detach().float().sum(0).expand(32, -1)
    assert (layer.weight.grad - exact).norm() <= 0.1 * exact.norm()


def test_a_quantised_weight_is_reused_until_the_weight_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Tensor] = []
    quantize_dual = aiter_mx.quantize_dual

    def counted(w: Tensor, **options: Any) -> Any:
        made.append(w)
        return quantize_dual(w, **options)

    monkeypatch.setattr("aiter_mx.nn.linear.quantize_dual", counted)
    layer = MxLinear(64, 32, reuse_quantized=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    x = torch.randn(32, 64)
    for step in range(3):
        for _ in range(2):
            y = layer(x)
            assert torch.equal(y, aiter_mx.linear_autograd(x, layer.weight, layer.bias))
            y.sum().backward()
        assert len(made) == step + 1
        optimizer.step()


class _Unseen(torch.optim.Optimizer):
    """Writes parameters as fused optimizers of other packages do, by what torch does not count."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad)


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.SGD, fused=True),
        partial(torch.optim.AdamW, fused=True),
        partial(torch.optim.SGD, foreach=True),
        _Unseen,
    ],
    ids=["sgd", "adamw", "foreach", "unseen"],
)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_steps_of_fused_optimizers_have_the_weight_quantised_again(
    optimizer: Any, is_compiled: bool
) -> None:
    torch.compiler.reset()
    layer, x = MxLinear(64, 32, reuse_quantized=True), torch.randn(5, 64)
    made = optimizer(layer.parameters())
    step = torch.compile(made.step, backend="aot_eager") if is_compiled else made.step
    for _ in range(3):
        made.zero_grad()
        y = layer(x)
        assert torch.equal(y, aiter_mx.linear_autograd(x, layer.weight, layer.bias))
        y.square().sum().backward()
        step()


def test_a_weight_quantised_in_inference_mode_trains_afterwards() -> None:
    layer, x = MxLinear(64, 32, reuse_quantized=True), torch.randn(5, 64, requires_grad=True)
    with torch.inference_mode():
        expected = layer(x)
    y = layer(x)
    y.sum().backward()
    assert torch.equal(y, expected) and x.grad is not None and x.grad.shape == x.shape


@torch.no_grad()
def test_another_weight_in_the_memory_of_one_that_is_gone_is_quantised() -> None:
    layer, x = MxLinear(256, 256, bias=False, reuse_quantized=True), torch.randn(5, 256)
    expected = [aiter_mx.linear_autograd(x, layer.weight * 2**at) for at in range(20)]
    memory, places = np.empty((256, 256), np.float32), set()
    for at, y in enumerate(expected):
        memory[:] = layer.weight.numpy() * 2**at
        weight = torch.from_numpy(memory)
        places.add(weight.data_ptr())
        assert torch.equal(functional_call(layer, {"weight": weight}, (x,)), y)
        del weight
    assert len(places) == 1


def test_copies_of_a_layer_quantise_their_own_weight() -> None:
    layer, x = MxLinear(64, 32, reuse_quantized=True), torch.randn(5, 64)
    layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x))
        with torch.no_grad():
            other.weight.mul_(3.0)
        assert torch.equal(other(x), aiter_mx.linear_autograd(x, other.weight, other.bias))


@torch.inference_mode()
def test_a_weight_of_inference_mode_is_quantised_each_time() -> None:
    layer, x = MxLinear(64, 32, reuse_quantized=True), torch.randn(5, 64)
    for _ in range(2):
        assert torch.equal(layer(x), aiter_mx.linear_autograd(x, layer.weight, layer.bias))
        layer.weight.mul_(3.0)


@pytest.mark.parametrize("reuse", [False, True])
def test_function_transforms_of_a_layer_are_refused_by_name(reuse: bool) -> None:
    layer, x = MxLinear(64, 32, reuse_quantized=reuse), torch.randn(3, 5, 64)
    for transformed in (torch.vmap(layer), torch.func.grad(lambda x: layer(x).sum())):
        with pytest.raises(NotImplementedError, match=r"linear_autograd has no rule for torch\.fu"):
            transformed(x)
    gradient = torch.func.grad(lambda w: functional_call(layer, {"weight": w}, (x,)).sum())
    with pytest.raises(NotImplementedError, match=r"linear_autograd has no rule for torch\.func"):
        gradient(layer.weight.detach())


def test_no_rows_have_no_part_in_gradients() -> None:
    linear, experts = MxLinear(64, 64), MxExperts(4, 64, 32)
    x = torch.randn(0, 64, requires_grad=True)
    y = experts(linear(x), torch.zeros(0, 2, dtype=torch.int64), torch.rand(0, 2))
    y.sum().backward()
    assert y.shape == (0, 64) and x.grad is not None
    for weight in (*linear.parameters(), *experts.parameters()):
        assert weight.grad is not None and not weight.grad.any()


def reference(layer: MxExperts, x: Tensor, ids: Tensor, weights: Tensor, activation: str) -> Tensor:
    """Each expert of each token in float64."""
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for slot in range(ids.shape[1]):
            e = int(ids[token, slot])
            gate, up = (layer.gate_up.weight[e] @ x[token] + layer.gate_up.bias[e]).chunk(2)
            if activation == "silu":
                active = nn.functional.silu(gate) * up
            else:
                gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
                active = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            result = layer.down.weight[e] @ active + layer.down.bias[e]
            out[token] = out[token] + weights[token, slot] * result
    return out


@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
def test_experts_match_float64_forward_and_backward(activation: str) -> None:
    torch.manual_seed(0)
    layer = MxExperts(E, H, I, activation, bias=True)
    ids = torch.randint(0, E - 1, (T, TOP_K))  # the last expert has no token
    leaves = [torch.randn(T, H), torch.rand(T, TOP_K)]
    x, weights = (each.requires_grad_() for each in leaves)
    y, dy = layer(x, ids, weights), torch.randn(T, H)
    y.backward(dy)
    exact_layer = MxExperts(E, H, I, activation, bias=True).double()
    exact_layer.load_state_dict(layer.state_dict())
    exact = [each.detach().double().requires_grad_() for each in leaves]
    exact_y = reference(exact_layer, exact[0], ids, exact[1], activation)
    exact_y.backward(dy.double())
    pairs = [(y, exact_y), (x.grad, exact[0].grad), (weights.grad, exact[1].grad)]
    pairs += [
        (one.grad, other.grad)
        for one, other in zip(layer.parameters(), exact_layer.parameters(), strict=True)
    ]
    for found, right in pairs:
        noise = (found.double() - right).norm()
        assert noise <= 0.1 * right.norm()  # 20 dB
    assert not layer.gate_up.weight.grad[-1].any()


class Launched(TorchDispatchMode):
    """Notes the names of all ops, and the types of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.types: list[list[torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        self.types.append([each.dtype for each in args if isinstance(each, Tensor)])
        return func(*args, **(kwargs or {}))


TORCHS = ("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "matmul")
TORCHS += ("linear", "einsum", "inner", "tensordot", "convolution", "_grouped_mm", "_scaled")


@pytest.mark.parametrize("reuse", [False, True])
def test_no_product_of_experts_is_torchs(reuse: bool) -> None:
    layer = MxExperts(E, H, I, bias=True, dtype=torch.bfloat16, reuse_quantized=reuse)
    x = torch.randn(T, H, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.rand(T, TOP_K, requires_grad=True)
    launched = Launched()
    with launched:
        layer(x, torch.randint(0, E, (T, TOP_K)), weights).sum().backward()
    counts = {
        name: sum(f"aiter_mx.{name}.default" == each for each in launched.names)
        for name in ("grouped_gemm", "grouped_gemm_wgrad", "quantize_dual")
    }
    assert counts == {"grouped_gemm": 4, "grouped_gemm_wgrad": 2, "quantize_dual": 2}
    for name, types in zip(launched.names, launched.types, strict=True):
        assert not name.startswith(tuple(f"aten.{each}" for each in TORCHS)), name
        assert "_local_scalar_dense" not in name
        if name.startswith("aiter_mx.grouped_gemm"):
            assert types[:4] == [torch.float8_e4m3fn, torch.uint8] * 2


@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
def test_gradients_beside_the_products_are_those_of_float64(activation: str) -> None:
    """Of the activation and of routing weights, by what the products gave."""
    torch.manual_seed(0)
    layer = MxExperts(E, H, I, activation, bias=True)
    x, ids, weights = torch.randn(T, H) * 4, torch.randint(0, E, (T, TOP_K)), torch.rand(T, TOP_K)
    kept: dict[str, Tensor] = {}

    def keep(name: str, tensor: Tensor) -> None:
        if tensor.requires_grad:
            tensor.retain_grad()
            kept[name] = tensor

    layer.gate_up.register_forward_hook(lambda *call: keep("gate_up", call[2]))
    layer.down.register_forward_pre_hook(lambda *call: keep("active", call[1][0]))
    dy = torch.randn(T, H)
    layer(x, ids, weights.requires_grad_()).backward(dy)
    gate_up = kept["gate_up"].detach().double().requires_grad_()
    gate, up = gate_up.chunk(2, -1)
    if activation == "silu":
        active = gate * torch.sigmoid(gate) * up
    else:
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        assert gate.eq(7).any() and up.abs().eq(7).any()
        active = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    active.backward(kept["active"].grad.double())
    error = (kept["gate_up"].grad.double() - gate_up.grad).abs()
    assert (error <= 1e-5 * gate_up.grad.abs().amax(1, keepdim=True)).all()
    with torch.no_grad():
        ones = torch.ones(T, 1)
        each = torch.stack([layer(x, ids[:, k : k + 1], ones) for k in range(TOP_K)], 1).double()
    products = each * dy[:, None].double()
    assert weights.grad is not None
    error = (weights.grad.double() - products.sum(2)).abs()
    assert (error <= 1e-5 * products.abs().sum(2)).all()


def test_experts_are_repeatable_and_take_the_same_compiled() -> None:
    layer = MxExperts(E, H, I, dtype=torch.bfloat16)
    ids, weights = torch.randint(0, E, (T, TOP_K)), torch.rand(T, TOP_K)
    x = torch.randn(T, H, dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    results = []
    for call in (layer, layer, compiled):
        own = x.clone().requires_grad_()
        y = call(own, ids, weights)
        y.sum().backward()
        results.append((y.detach(), own.grad))
    for found in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found, results[0], strict=True))


def test_grouped_linears_take_lengths_and_wrong_arguments_are_told() -> None:
    layer = MxGroupedLinear(3, 64, 32, bias=True)
    x, lens = torch.randn(10, 64), torch.tensor([3, 0, 7])
    offs = torch.tensor([0, 3, 3, 10])
    assert torch.equal(layer(x, group_lens=lens), layer(x, offs))
    with pytest.raises(ValueError, match="activation must be one of silu, swiglu_oai, got 'relu'"):
        MxExperts(E, H, I, "relu")
    experts = MxExperts(E, H, I)
    with pytest.raises(ValueError, match=r"topk_weights must be \[5, 2\]"):
        experts(torch.randn(5, H), torch.zeros(5, 2, dtype=torch.int64), torch.rand(5, 1))
    with pytest.raises(ValueError, match=r"topk_ids \[T, top_k\], got \[5, 64\] and \[4, 2\]"):
        experts(torch.randn(5, H), torch.zeros(4, 2, dtype=torch.int64), torch.rand(4, 2))
    weights, ids = torch.rand(5, 2), torch.zeros(5, 2, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"topk_ids must be .*int64, got torch.float32"):
        experts(torch.randn(5, H), weights, ids)
    with pytest.raises(TypeError, match=r"topk_weights must be of a floating.*got torch.int64"):
        experts(torch.randn(5, H), ids, ids)
    ids[3, 1] = E
    with pytest.raises(ValueError, match=rf"within 0 to {E - 1}; the first is topk_ids\[3, 1\]"):
        experts(torch.randn(5, H), ids, weights)
    with pytest.raises(TypeError, match=r"linear must be a torch.nn.Linear, got Conv2d"):
        MxLinear.from_linear(torch.nn.Conv2d(1, 1, 1))  # type: ignore[arg-type]


def test_modules_quantise_gradients_as_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    formats = set()

    def spied(own: Any, grad: Tensor, *more: Any, **named: Any) -> Tensor:
        formats.add((grad.dtype, more[1].dtype))
        result: Tensor = own(grad, *more, **named)
        return result

    for name in ("grouped_gemm_dgrad", "grouped_gemm_wgrad"):
        monkeypatch.setattr(autograd, name, partial(spied, getattr(autograd, name)))
    experts = MxExperts(2, 64, 32, grad_format="e5m2")
    x, ids = torch.randn(40, 64, requires_grad=True), torch.randint(0, 2, (40, 1))
    experts(x, ids, torch.ones(40, 1)).sum().backward()
    made = MxLinear.from_linear(torch.nn.Linear(64, 32), grad_format="e5m2")
    made(x).sum().backward()
    assert formats == {(torch.float8_e5m2, torch.float8_e4m3fn)}
    with pytest.raises(ValueError, match="grad_format must be 'e4m3' or 'e5m2', got 'e3m4'"):
        MxLinear(64, 32, grad_format="e3m4")
    with pytest.raises(ValueError, match="in_features must be a multiple of 32, got 33"):
        MxLinear(33, 32)
