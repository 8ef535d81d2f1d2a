"""What gfx950's tables name, with the caches of each XCD apart: each once, and what was found."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from aiter_mx.cli.explain import describe_config
from aiter_mx.trial import Trial
from op_tests import tabled
from op_tests.bench.common import MEASURED


def test_each_configuration_is_named_once_by_a_row_that_a_seed_draws() -> None:
    first, again, other = (list(tabled.named(seed)) for seed in (0, 0, 1))
    names = [(op, row.spec.name, describe_config(row.config)) for op, row in first]
    assert len(set(names)) == len(names) > 150
    assert [row.where for _, row in first] == [row.where for _, row in again]
    assert [row.where for _, row in first] != [row.where for _, row in other]


def test_a_launch_is_right_and_one_of_another_result_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    op, row = next((op, row) for op, row in tabled.named(0) if row.spec.name == "mfma_split")
    assert tabled.ran(op, row) == ""
    launch = tabled.try_out

    def spoiled(*arguments: Any) -> Trial:
        trial = launch(*arguments)
        out = trial.operands[-1]
        assert out is not None
        out[0, 3] *= -2
        return trial

    monkeypatch.setattr(tabled, "try_out", spoiled)
    assert tabled.ran(op, row).startswith("another result")


def test_none_of_those_that_were_run_is_wrong() -> None:
    saved = pd.read_csv(MEASURED / "gfx950_simulated" / "tabled.csv")
    assert {"linear", "moe_gemm", "grouped_gemm"} <= set(saved.op)
    assert saved.configurations.sum() > 150 and not saved.wrong.any()
