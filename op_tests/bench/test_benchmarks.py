"""The benchmarks where there is nothing to measure."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest
import torch


@pytest.mark.parametrize("name", ["grouped", "host", "linear", "moe", "quantize"])
def test_without_a_gpu_a_benchmark_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit, match="measures a GPU, and torch finds none here"):
        import_module(f"op_tests.bench.{name}").main()
