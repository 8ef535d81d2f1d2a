"""Layers of the same x: computed together, and to the bit as they are alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aiter_mx
from aiter_mx.integrations import siblings
from aiter_mx.integrations.layers import MxLinear

K, SIZES = 96, (64, 32, 48)


class Attention(nn.Module):
    """Three layers of one x, or, ``across``, of two."""

    def __init__(self, across: bool = False, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.across = across
        for name, size in zip(siblings.TOGETHER[0], SIZES, strict=True):
            made = nn.Linear(K, size, bias, dtype=torch.bfloat16)
            setattr(self, name, MxLinear.of(made))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        other = x.flip(0) if self.across else x
        return self.q_proj(x), self.k_proj(other), self.v_proj(other)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The features of each product that is asked for."""
    found: list[int] = []
    linear = siblings.linear

    def counting(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
        found.append(len(weight))
        return linear(x, weight, *others)

    monkeypatch.setattr(siblings, "linear", counting)
    return found


def tokens(rows: int, seed: int = 1) -> Tensor:
    return torch.randn(2, rows, K, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert [each.shape for each in found] == [each.shape for each in expected]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def joined(**options: Any) -> tuple[Attention, Attention]:
    """A module whose layers compute together, and one like it whose layers do not."""
    alone = Attention(**options)
    together = copy.deepcopy(alone)
    siblings.join(together)
    return together, alone


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("simulated", [False, True])
def test_one_product_serves_all(bias: bool, simulated: bool, products: list[int]) -> None:
    together, alone = joined(bias=bias)
    for rows in (1, 5):
        x = tokens(rows)
        expected = alone(x)
        if simulated:
            with aiter_mx.simulate("gfx950"):
                found = together(x)
        else:
            found = together(x)
        assert_same(found, expected)
    assert products == [sum(SIZES)] * 2


@pytest.mark.gpu
def test_captured_on_a_gpu() -> None:
    together, alone = (module.cuda() for module in joined())
    x = tokens(3).cuda()
    together(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = together(x)
    for each in found:
        each.fill_(torch.nan)
    x.copy_(tokens(3, seed=4))
    graph.replay()
    for one, other in zip(found, alone(x), strict=True):  # N chooses the order of addition
        torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-7)


def test_names_and_values_stay_and_new_ones_in_place_are_used(products: list[int]) -> None:
    together, alone = joined()
    before, after = alone.state_dict(), together.state_dict()
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(after[key].view(torch.uint8), tensor.view(torch.uint8))
    torch.manual_seed(3)
    for module in (together, alone):
        other = aiter_mx.quantize(torch.randn(32, K, generator=torch.Generator().manual_seed(3)))
        module.k_proj.weight.data.copy_(other[0])
        module.k_proj.weight_scale_inv.data.copy_(other[1])
    assert_same(together(tokens(3)), alone(tokens(3)))
    assert products == [sum(SIZES)]


def test_layers_stay_together_when_they_are_moved(products: list[int]) -> None:
    together, alone = joined()
    assert_same(together._apply(lambda tensor: tensor.clone())(tokens(3)), alone(tokens(3)))
    assert products == [sum(SIZES)]


def test_layers_that_are_apart_are_computed_all_the_same(products: list[int]) -> None:
    together, alone = joined()
    apart = copy.deepcopy(together)
    with torch.no_grad():
        apart.k_proj.weight_scale_inv += 1
        alone.k_proj.weight_scale_inv += 1
    assert_same(apart(tokens(3)), alone(tokens(3)))
    assert products == list(SIZES)


def test_layers_of_different_x_are_told_apart(products: list[int]) -> None:
    together, alone = joined(across=True)
    for seed in range(3):
        x = tokens(4, seed)
        assert_same(together(x), alone(x))
    assert products == [sum(SIZES)], "the first call alone takes them for siblings"


def test_x_that_is_changed_in_between_is_another(products: list[int]) -> None:
    together, alone = joined()
    for seed in range(3):
        x = tokens(4, seed)
        assert torch.equal(together.q_proj(x), alone.q_proj(x))
        x += 1
        assert torch.equal(together.k_proj(x), alone.k_proj(x))
        assert torch.equal(together.v_proj(x), alone.v_proj(x))
    assert products == [sum(SIZES)], "the first call alone takes it for the same"


def test_a_call_of_one_layer_leaves_nothing_behind_for_the_next(products: list[int]) -> None:
    together, alone = joined()
    x = tokens(2)
    together.q_proj(x)
    x.copy_(tokens(2, seed=9))
    assert_same(together(x), alone(x))
    assert torch.equal(together.v_proj(x), alone.v_proj(x))


def test_unlike_layers_stay_apart() -> None:
    module = Attention()
    module.v_proj = MxLinear.of(nn.Linear(64, 48, dtype=torch.bfloat16))
    siblings.join(module)
    assert module.q_proj.together is None


@torch.no_grad()
def test_compiled_whole(products: list[int]) -> None:
    together, alone = joined()
    torch._dynamo.reset()
    compiled = torch.compile(together, fullgraph=True, backend="aot_eager")
    for seed in range(2):  # the second call finds nothing that the first left
        assert_same(compiled(tokens(3, seed)), alone(tokens(3, seed)))
    assert products == [sum(SIZES)] * 2
