"""An expert layer on two ranks beside one: what its benchmark times, counts and compares."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from op_tests.bench import distributed as bench
from op_tests.forked import start_ranks
from tune import figures_uses

SHAPE = bench.Shape(E=8, top_k=3, H=96, intermediate=64)


def test_rows_have_the_bytes_of_both_formats_and_every_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench.mp, "spawn", start_ranks)
    rows = bench.run_all("gloo", 2, [SHAPE], [5, 9], rounds=1)
    assert [row["M"] for row in rows] == [5, 9]
    names = [f"{prefix}{stage}_us" for prefix in bench.FORMATS for stage in bench.STAGES]
    for row in rows:
        assert (row["backend"], row["ranks"], row["E"], row["I"]) == ("gloo", 2, 8, 64)
        assert (row["bytes"], row["bf16_bytes"]) == (96 + 3 + 8 * 3, 2 * 96 + 8 * 3)
        assert row["back_bytes"] == 2 * 96
        assert all(row[name] > 0 for name in (*names, "one_rank_us"))
        parts = sum(row[f"{stage}_us"] for stage in bench.STAGES[:3])
        assert row["dispatch_us"] < parts
        assert 0 < row["difference"] < bench.MOST_DIFFERENCE


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_the_table_says_which_machine_carried_the_rows(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures_uses, "MEASURED", tmp_path / "nvidia_h200")
    row = {"backend": backend, "hardware": "a machine", "ranks": 2, "M": 8, "E": 16, "top_k": 4}
    row |= {"H": 64, "I": 32, "bytes": 98.0, "bf16_bytes": 160.0, "back_bytes": 128}
    saved = {"amd_epyc": row}
    if backend == "nccl":
        names = [f"{prefix}{stage}_us" for prefix in bench.FORMATS for stage in bench.STAGES]
        times = {name: 10.25 + at for at, name in enumerate((*names, "one_rank_us"))}
        saved["nvidia_h100_80gb_hbm3"] = row | times
    for folder, each in saved.items():
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "distributed.csv"
        pd.DataFrame([each | {"commit": folder}]).to_csv(path, index=False)
    table = figures_uses.distributed()
    assert "| 16, 4, 64 x 32 | 8 | 98 | 160 | 128 |" in table
    assert ("us" in table.splitlines()[0]) == (backend == "nccl")
    last = table.splitlines()[-1]
    if backend == "nccl":
        assert "| 10.2 | 14.2 | 11.2 | 12.2 | 13.2 | 17.2 | 18.2 |" in table
        assert last.startswith("2 ranks over nccl, a machine, eager calls")
        assert last.endswith("commit nvidia_h100_80gb_hbm3.")
    else:
        assert last == "2 ranks over gloo, a machine; commit amd_epyc."
