"""What the benchmarks of expert layers and of batch invariance compare is the same product."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

import aiter_mx
from op_tests.bench import capacity, invariance, layers
from op_tests.bench.layers import Layer

CPU = torch.device("cpu")


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> Layer:
    monkeypatch.setattr(layers, "DEVICE", CPU)
    torch.manual_seed(0)
    return layers.make_layer(6, 2, 64, 32)


@pytest.fixture(params=["cpu", "sim"])
def _computed(request: pytest.FixtureRequest) -> Iterator[None]:
    with aiter_mx.simulate("gfx950") if request.param == "sim" else nullcontext():
        yield


@pytest.mark.usefixtures("_computed")
def test_layers_with_room_give_the_bits_of_those_without(layer: Layer) -> None:
    (experts,) = layers.route_tokens(layer.E, layer.top_k, 5, "uniform", 1)
    found = {name: call() for name, call in capacity.calls_of(layer, experts, 4).items()}
    assert found["num_tokens"].shape == (20, 64)
    assert torch.equal(found["num_tokens"][:5], found["fused_moe"])
    assert torch.equal(found["quantised"], found["fused_moe"])
    assert found["masked"].shape[:2] == (6, 8), "4 times 2 rows of an expert, in the mean"
    flat = experts.flatten()
    for expert in range(6):
        rows = found["rows"][flat == expert]
        assert torch.equal(found["masked"][expert, : len(rows)], rows)


def test_what_is_timed_is_invariant_the_second_time(layer: Layer) -> None:
    calls = [
        *invariance.linear_calls(3, 32, 64, CPU)[:1],
        *invariance.grouped_calls(5, 2, 32, 64, CPU)[:1],
        *invariance.layer_calls(layer, 3)[:1],
    ]
    seen = []

    def time_us(calls: object) -> float:
        seen.append(aiter_mx.invariance.is_on())
        return float(len(seen))

    row = invariance.measure("linear", 3, 32, 64, calls, time_us)
    assert seen == [False, True]
    assert (row["plain_us"], row["invariant_us"], row["ratio"]) == (1, 2, 2)
    for call in calls:
        plain = call()
        with aiter_mx.batch_invariant():
            assert torch.allclose(call().float(), plain.float(), rtol=0.02, atol=0.02)
    other = row | {"ratio": 8.0}
    assert invariance.summary([row, other]) == "linear: mean 4.00, worst 8.00"
