"""The fuzzer itself: it passes what is right, and finds what is not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import aiter_mx
from op_tests.fuzz import __main__ as fuzz
from op_tests.fuzz.__main__ import main
from op_tests.fuzz.trials import TRIALS


def test_calls_of_every_op_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "1", "--calls", "150"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"150 calls by seed 1, 0 wrong", text)
    assert all(re.search(rf"\d {op}\n", text) for op in (*TRIALS, "moe_gemm_activated"))


def test_counts_of_runs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "MEASURED", tmp_path)
    for seed, calls in (("5/10", "3"), ("6", "4"), ("5/10", "4")):  # one of them twice
        assert main(["--seed", seed, "--calls", calls, "--ops", "dequantize", "--save"]) == 0
    kept = pd.read_csv(next(tmp_path.glob("*/fuzz.csv")))
    assert sorted(kept[["seed", "first", "calls", "wrong"]].values.tolist()) == [
        [5, 10, 4, 0],
        [6, 0, 4, 0],
    ]


def test_simulated_calls_are_right() -> None:
    ops = ["--ops", "quantize", "moe_align"]  # which compile few variants
    assert main(["--seed", "2", "--calls", "5", "--arch", "gfx950", *ops]) == 0


@pytest.mark.parametrize("op", ["linear", "grouped_gemm", "fused_moe", "quantize"])
def test_a_wrong_result_is_found_and_can_be_drawn_again(
    op: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = getattr(aiter_mx, op)

    def wrong(*arguments: Any, **named: Any) -> Any:
        result = right(*arguments, **named)
        first = result[0] if isinstance(result, tuple) else result
        if first.numel():
            raw = first.view(torch.uint8).flatten()
            raw[len(raw) // 2 | 1] ^= 0x24  # of an element in the middle, an exponent's bit too
        return result

    monkeypatch.setattr(aiter_mx, op, wrong)
    assert main(["--seed", "3", "--calls", "6", "--ops", op]) == 1
    seed = re.search(r"--seed (\S+): ", capsys.readouterr().out)
    assert seed is not None
    assert main(["--seed", seed[1], "--calls", "1", "--ops", op]) == 1
    monkeypatch.undo()
    assert main(["--seed", seed[1], "--calls", "1", "--ops", op]) == 0


def test_an_error_that_explains_nothing_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def obscure(**arguments: Any) -> None:
        raise KeyError("x")

    monkeypatch.setattr(aiter_mx, "dequantize", obscure)
    assert main(["--seed", "4", "--calls", "5", "--ops", "dequantize"]) == 1
    assert "KeyError" in capsys.readouterr().out
