"""Lists in blocks of 64 and those of a layer's own give the benchmark the same rows."""

from __future__ import annotations

import pytest
import torch

from aiter_mx.target import hardware
from op_tests.bench import blocks, expert_layers, layers
from op_tests.bench.expert_layers import Sizes


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> expert_layers.Cell:
    monkeypatch.setattr(layers, "DEVICE", torch.device("cpu"))
    torch.manual_seed(0)
    sizes = Sizes(6, 6, 2, 64, 32)
    layer = layers.make_layer(sizes.E, sizes.top_k, sizes.H, sizes.intermediate)
    return expert_layers.make_cell(sizes, layer, 9, "skewed")


def test_both_compute_the_same(cell: expert_layers.Cell) -> None:
    assert cell.problem.block_m != blocks.BLOCK
    for part, width in (("first", 32), ("second", 64)):
        torch.manual_seed(1)
        own = blocks.calls_of(cell, part, cell.problem.block_m)
        torch.manual_seed(1)
        wide = blocks.calls_of(cell, part, blocks.BLOCK)
        assert len(own) == len(wide) == len(cell.experts)
        found = [call[1]() for call in (own, wide)]
        payloads = [each[0] if part == "first" else each for each in found]
        assert payloads[0].shape == (18, width)
        assert torch.equal(*(each.float() for each in payloads))


def test_a_cell_names_the_kernels_of_both(
    cell: expert_layers.Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "target_of", lambda _: hardware("sm_90a"))
    row = blocks.row_of("a", cell, "skewed", "second", {"own_us": 8.0, "blocks_us": 10.0})
    assert row["over_own"] == 1.25 and row["own_block"] == cell.problem.block_m
    assert row["own_kernel"] and row["kernel"]
    problem = blocks.problem_of(cell.sizes, 9, "first", 64)
    assert (problem.block_m, problem.activation, problem.a_div) == (64, "silu", 2)


def test_cells_that_are_done_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "DEVICE", cpu := torch.device("cpu"))
    monkeypatch.setattr(blocks, "LAYERS", {"a": Sizes(6, 6, 2, 64, 32)})
    monkeypatch.setattr(blocks, "GraphedCalls", list)
    monkeypatch.setattr(blocks, "alternated_us", lambda graphs, _: dict.fromkeys(graphs, 2.0))
    monkeypatch.setattr(blocks, "target_of", lambda _: hardware("sm_90a"))
    monkeypatch.setattr(blocks, "build_ahead", lambda *_: None)

    def is_done(*cell: object) -> bool:
        return cell == (9, "a", "skewed", "first")

    found = blocks.cells_of(is_done, ("uniform", "skewed"), (9,), "a", cpu)
    assert [(row["routing"], row["part"]) for row in found] == [
        ("uniform", "first"),
        ("uniform", "second"),
        ("skewed", "second"),
    ]
    assert not list(blocks.cells_of(lambda *cell: True, ("uniform",), (9,), "a", cpu))
