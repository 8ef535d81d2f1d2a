"""The benchmarks where there is nothing to measure."""

from __future__ import annotations

import shutil
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from op_tests.bench import pictures
from op_tests.bench.common import MEASURED


@pytest.mark.parametrize("name", ["grouped", "host", "linear", "moe", "quantize"])
def test_without_a_gpu_a_benchmark_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit, match="measures a GPU, and torch finds none here"):
        import_module(f"op_tests.bench.{name}").main()


@pytest.mark.parametrize("name", pictures.DRAWN)
def test_saved_tables_are_drawn_without_a_gpu(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    table = tmp_path / f"{name}.csv"
    shutil.copy(MEASURED / "nvidia_h200" / table.name, table)
    assert pictures.draw(table).read_bytes().startswith(b"\x89PNG")
