"""The benchmark of extreme rows has them where it says, and sees a result that is wrong."""

from __future__ import annotations

import pytest
import torch

import aiter_mx
from op_tests.bench import layers, values
from op_tests.bench.common import normal_mx
from op_tests.bench.expert_layers import Sizes

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "DEVICE", CPU)
    monkeypatch.setattr(values, "copies_to_stay_cold", lambda size: 2)
    monkeypatch.setattr(values, "LAYERS", {values.LAYER: Sizes(6, 6, 2, 64, 64)})
    torch.manual_seed(0)


@pytest.mark.parametrize("kind", values.KINDS)
def test_one_row_becomes_extreme_and_the_others_stay(kind: str) -> None:
    x = normal_mx(7, 64, device=CPU)[1]
    found = aiter_mx.dequantize(*values.spoiled(x, 3, kind))
    usual = aiter_mx.dequantize(*x)
    others = torch.arange(7) != 3
    assert torch.equal(found[others], usual[others])
    own = found[3]
    if kind in values.KINDS[:2]:
        assert own.isnan().all() or own.isinf().all()
    else:
        assert bool((own.abs() < 2.0**-100).all()) == (kind == "2^-127")
        assert bool(own.abs().amax() > 2.0**100) == (kind == "2^127")
    tokens = values.spoiled_tokens(torch.randn(9, 64).bfloat16(), kind)
    assert int((~tokens.isfinite()).any(1).sum()) == (kind in values.KINDS[:2])


@pytest.mark.parametrize("kind", values.EVERYWHERE)
def test_rows_or_blocks_become_of_many_sizes(kind: str) -> None:
    payload, scale = normal_mx(300, 256, device=CPU)[1]
    found, moved = values.of_many_sizes((payload, scale), kind, torch.Generator().manual_seed(0))
    by = moved.int() - scale.view(torch.uint8).int()
    assert found is payload and int(by.amax() - by.amin()) >= 6
    assert bool((by == by[:, :1]).all()) == (kind == "rows of w")


def test_results_are_right_and_a_wrong_one_is_seen() -> None:
    seen = set()
    cases = [
        *values.linear_cases(9, 64, 96, CPU),
        *values.grouped_cases(6, 3, 64, 96, CPU),
        *values.layer_cases(12, CPU),
    ]
    for case in cases:
        assert case.is_right(), case.cell
        seen.add(case.cell[1:2] + case.cell[4:])
    places = {"linear": ("x", "w"), "grouped_gemm": ("x", "w"), "fused_moe": ("x", "w1", "w2")}
    every = {(op, p, kind) for op, of in places.items() for p in of for kind in values.KINDS}
    assert seen == every | {("linear", "everywhere", kind) for kind in values.EVERYWHERE}
    x, w = (normal_mx(rows, 96, device=CPU)[1] for rows in (9, 64))
    out = aiter_mx.linear(*x, *w)
    assert values.judged(out, x, w, 3)
    out[3, 5] = torch.nan
    assert not values.judged(out, x, w, 3)


def test_cells_that_are_done_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "GraphedCalls", list)
    monkeypatch.setattr(
        values, "alternated_us", lambda graphs, _: dict(zip(graphs, (2.0, 3.0), strict=True))
    )
    sizes = {"linear": (9, 64, 96), "grouped_gemm": (6, 3, 64, 96), "fused_moe": (12,)}
    assert {op for op, _ in values.every_size()} == set(sizes)
    for op, of in sizes.items():
        every = list(values.cells_of(lambda *cell: False, (op, of), CPU))
        assert all(row["is_right"] and row["ratio"] == 1.5 for row in every)
        done = {tuple(row[name] for name in values.CELL) for row in every[1:]}
        left = list(values.cells_of(lambda *cell, done=done: cell in done, (op, of), CPU))
        assert [[row[name] for name in values.CELL] for row in left] == [
            [every[0][name] for name in values.CELL]
        ]
