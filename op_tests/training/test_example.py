"""The example that trains: it learns as bf16 does, and its judge sees a tail that is left out."""

from __future__ import annotations

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch

FILE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "train_moe.py"
CPU = torch.device("cpu")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = spec_from_file_location("train_moe", FILE)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_it_learns_as_bf16_does_and_repeats(
    example: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "LEARNING_RATE", 3e-3)  # learns in fewer steps
    monkeypatch.setattr(example, "WARM_UP", 1)
    size = example.Size(32, 1, 2, 4, 2, 16, 4)
    rows = example.train(0, 31, size, CPU)
    first, last = rows[0], rows[-1]
    assert last["mx"] < first["mx"] - 1.0
    for row in rows:
        assert abs(row["mx"] - row["bf16"]) <= 0.05 * row["bf16"]
        assert row["least_cosine"] >= 0.97
        assert row["same_forward_cosine"] >= 0.99
    printed = capsys.readouterr().out
    assert "'grouped_gemm': 4" in printed and "'grouped_gemm_wgrad': 2" in printed
    assert example.train(0, 11, size, CPU, say=False, end=31) == rows[:2]
    assert example.verdict(rows)
    apart = [row | {"mx": row["mx"] * 1.02} for row in rows]
    assert not example.verdict(apart)
    told = re.search(r"losses PART: they differ by up to ([\d.]+)%", capsys.readouterr().out)
    assert told and 1.8 < float(told[1]) < 2.2


def test_a_tail_that_is_left_out_shows_in_the_cosine_of_every_seed(example: ModuleType) -> None:
    size = example.Size(32, 1, 2, 4, 2, 16, 8)
    for seed in range(2):
        rows = example.train_seed(seed, 1, size, CPU, wrong_tail=True)
        assert rows[0]["least_cosine"] <= 0.95
        assert not example.verdict(rows)
    assert example.train_seed(0, 1, size, CPU, wrong_tail=False)[0]["least_cosine"] >= 0.97
