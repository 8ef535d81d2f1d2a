"""What the benchmark of few rows a group compares is the same product over the same rows."""

from __future__ import annotations

import pytest
import torch

from aiter_mx.target import hardware
from op_tests.bench import few_rows


@pytest.mark.parametrize("spread", few_rows.SPREADS)
@pytest.mark.parametrize("rows", [1, 8, 65])
def test_groups_have_as_many_rows_in_all_however_they_are_spread(spread: str, rows: int) -> None:
    counts = few_rows.counts_of(spread, 16, rows)
    assert len(counts) == 16 and sum(counts) == 16 * rows
    most = {"balanced": rows, "half empty": 2 * rows}
    assert max(counts) == most.get(spread, max(counts))
    if spread == "skewed":
        assert max(counts) > 4 * rows and sorted(counts) != counts
    assert (0 in counts) == (spread == "half empty" or (spread, rows) == ("skewed", 1))


def test_all_contenders_multiply_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "copies_to_stay_cold", lambda size: 2)
    torch.manual_seed(0)
    weights = few_rows.Weights(3, 64, 96, torch.device("cpu"))
    assert not torch.equal(weights.dense[0], weights.dense[1])
    counts = [2, 0, 5]
    calls = few_rows.calls_of(weights, counts)
    assert {name: len(each) for name, each in calls.items()} == dict.fromkeys(calls, 2)
    offs, masked = calls["offs_us"][1]().clone(), calls["masked_us"][1]()
    packed = torch.cat([of[:count] for of, count in zip(masked, counts, strict=True)])
    assert torch.equal(packed, offs)
    dense, w = calls["bf16_us"][1].args
    ends = calls["bf16_us"][1].keywords["offs"].tolist()
    assert ends == [2, 2, 7]
    bf16 = torch.cat(
        [dense[at : at + n] @ w[g] for g, (at, n) in enumerate(zip((0, 2, 2), counts, strict=True))]
    )
    error = (offs.float() - bf16.float()).norm() / bf16.float().norm()
    assert 0.005 < error < 0.08


def test_a_cell_has_both_forms_over_bf16() -> None:
    times = {"offs_us": 10.0, "masked_us": 20.0, "bf16_us": 15.0}
    counts = few_rows.counts_of("skewed", 16, 8)
    row = few_rows.row_of(hardware("sm_90a"), (16, 4096, 7168), "skewed", counts, times)
    assert (row["over_bf16"], row["masked_over_bf16"]) == (1.5, 0.75)
    assert (row["rows"], row["most_rows"], row["kernel"]) == (8, max(counts), "persistent")


def test_cells_that_are_done_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "copies_to_stay_cold", lambda size: 1)
    monkeypatch.setattr(few_rows, "GraphedCalls", list)
    monkeypatch.setattr(few_rows, "alternated_us", lambda graphs, _: dict.fromkeys(graphs, 2.0))
    monkeypatch.setattr(few_rows, "target_of", lambda _: hardware("sm_90a"))
    shape, cpu = (4, 64, 96), torch.device("cpu")

    def is_done(rows: int, *cell: object) -> bool:
        return rows not in (1, 8) or cell[0] == "skewed"

    found = [(row["spread"], row["rows"]) for row in few_rows.cells_of(is_done, shape, cpu)]
    assert found == [(spread, rows) for spread in ("balanced", "half empty") for rows in (1, 8)]
    assert not list(few_rows.cells_of(lambda *cell: True, shape, cpu))
