"""What the benchmark of expert layers compares is the same layer; run as a script, beside Triton's.

Triton's kernels of the layer in bf16 run in its interpreter.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

import aiter_mx
from aiter_mx.target import hardware
from op_tests.bench import expert_layers, layers
from op_tests.bench.common import Saved
from op_tests.bench.expert_layers import LAYERS, Sizes
from op_tests.interpreted import assert_passes_in_the_interpreter

CPU = torch.device("cpu")
SIZES = {"all here": Sizes(6, 6, 2, 64, 32), "some elsewhere": Sizes(3, 8, 2, 64, 32)}


def cell_of(sizes: Sizes, M: int) -> expert_layers.Cell:
    layers.DEVICE = CPU
    torch.manual_seed(0)
    layer = layers.make_layer(sizes.E, sizes.top_k, sizes.H, sizes.intermediate)
    return expert_layers.make_cell(sizes, layer, M, "skewed")


@pytest.fixture
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sizes:
    monkeypatch.setattr(layers, "DEVICE", CPU)  # and back, after cell_of
    return SIZES[request.param]


@pytest.mark.parametrize("sizes", SIZES, indirect=True)
def test_launches_one_by_one_end_in_the_layers_result(sizes: Sizes) -> None:
    cell = cell_of(sizes, 9)
    calls = expert_layers.launches(cell)
    assert [name[:-1] for name in calls] == ["moe_align", "moe_gemm", "moe_gemm", "moe_combine"]
    last = list(calls.values())[-1]
    out = last[0].args[-1]
    assert len(last) == len(cell.experts) >= 3
    assert not torch.equal(cell.experts[0], cell.experts[1])
    w = (*cell.layer.w1, *cell.layer.w2)
    expected = aiter_mx.fused_moe(
        cell.x, *w, cell.experts[-1], cell.weights, expert_map=cell.expert_map
    )
    assert torch.equal(out, expected)


def test_layers_have_their_models_sizes_and_some_have_experts_elsewhere() -> None:
    assert LAYERS["wide-6144, TP 4"] == Sizes(128, 128, 4, 6144, 768)
    assert LAYERS["deepseek-v3, 32 of 256"] == Sizes(32, 256, 8, 7168, 2048)
    problem = expert_layers.problem_of(LAYERS["deepseek-v3, 32 of 256"], 64)
    assert (problem.has_map, problem.num_experts, problem.E) == (1, 256, 32)
    assert expert_layers.problem_of(LAYERS["mixtral-8x7b"], 64).has_map == 0


def test_few_tokens_have_one_routing_and_what_is_saved_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, facts = tmp_path / "moe_layers.csv", {"gpu": "a GPU", "commit": "0123456"}
    names, routings = ["qwen3-30b-a3b", "mixtral-8x7b"], ["uniform", "skewed"]

    def left() -> dict[str, list[tuple[str, int]]]:
        saved = Saved(path, expert_layers.CELL, facts)
        return dict(expert_layers.cells(names, routings, (4, 64), saved))

    assert left() == {
        "qwen3-30b-a3b": [("uniform", 4), ("uniform", 64), ("skewed", 64)],
        "mixtral-8x7b": [("uniform", 4), ("skewed", 4), ("uniform", 64), ("skewed", 64)],
    }
    monkeypatch.setattr(expert_layers, "target_of", lambda _: hardware("sm_90a"))
    saved, found = Saved(path, expert_layers.CELL, facts), {"ours_us": 10.0, "bf16_us": 15.0}
    found |= {"gemms_us": 12.0, "launches_us": 8.0, "difference": 0.04}
    monkeypatch.setattr(layers, "DEVICE", CPU)
    cell = cell_of(SIZES["some elsewhere"], 64)
    row = expert_layers.row_of("qwen3-30b-a3b", cell, "uniform", found)
    assert (row["over_bf16"], row["over_gemms"], row["over_launches"]) == (1.5, 1.2, 1.25)
    assert len(str(row["kernels"]).split()) == 2
    local = [cell.expert_map[each.long()] for each in cell.experts]
    assert row["rows"] == sum(int((each >= 0).sum()) for each in local) / len(local)
    saved.add(row)
    assert left()["qwen3-30b-a3b"] == [("uniform", 4), ("skewed", 64)]


def test_the_layer_in_bf16_is_ours_in_tritons_interpreter() -> None:
    assert_passes_in_the_interpreter(__name__)


def multiply(
    w: torch.Tensor, x: torch.Tensor, *, expert_layout: torch.Tensor, compute_config: object
) -> torch.Tensor:
    """A peer's product over rows that are sorted by their experts."""
    assert compute_config == {"gemm_type": "grouped_contiguous"}
    assert (expert_layout[0], expert_layout[-1]) == (0, len(x))
    return torch._grouped_mm(x, w, offs=expert_layout[1:].int())


def compare_layers() -> None:
    from op_tests.bench import bf16_layer

    bf16_layer.check()
    for sizes in SIZES.values():
        cell = cell_of(sizes, 9)
        w1 = cell.layer.dense[0]
        calls, (ours, bf16) = expert_layers.whole_layers(cell)
        assert {len(each) for each in calls.values()} == {len(cell.experts)}
        for of_ours, of_bf16 in zip(calls["ours_us"], calls["bf16_us"], strict=True):
            of_ours(), of_bf16()
            error = (ours - bf16).float().norm() / bf16.float().norm()
            assert 0.005 < error < 0.08, error
        calls["gemms_us"][0]()
        first, second = (partial(multiply, dense) for dense in cell.layer.dense)
        peers = {"humming_us": (first, second), "humming_fp8_us": (partial(multiply, -w1), second)}
        found, _ = expert_layers.whole_layers(cell, peers)
        assert {*found} == {*calls, "humming_us"}, "what is wrong is left out"
        assert len(found["humming_us"]) == len(cell.experts)
        found["humming_us"][-1]()


if __name__ == "__main__":
    compare_layers()
