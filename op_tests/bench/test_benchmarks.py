"""The benchmarks where there is nothing to measure."""

from __future__ import annotations

import shutil
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from op_tests.bench import pictures, training
from op_tests.bench.common import MEASURED


@pytest.mark.parametrize(
    "name",
    [
        *("capacity", "grouped", "host", "invariance", "linear"),
        *("model", "moe", "quantize", "rmsnorm", "training"),
    ],
)
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


def test_what_training_compares_is_the_same_product() -> None:
    data = training.Operands([33, 33, 100], 64, 96, torch.device("cpu"))
    calls = training.calls_of(data)
    results = {name: call().detach().double() for name, call in calls.items()}
    for name in ("dgrad", "wgrad", "step"):
        for peer in ("bf16", "bf16_of_mx"):
            difference = (results[name] - results[f"{name}_{peer}"]).norm()
            assert difference <= 0.07 * results[name].norm(), f"{name} and {peer}"
    assert torch.equal(results["step_reused"], results["step"])
    assert (results["main_grad"] - results["wgrad"]).norm() <= 0.01 * results["wgrad"].norm()
    assert data.x.grad is not None and data.w.grad is not None
    assert torch.equal(data.x.grad.double(), results["dgrad"])
    assert torch.equal(data.w.grad.double(), results["wgrad"])
