"""Kernels give the very bits that were recorded, on the simulator, and on a GPU beside a base."""

from __future__ import annotations

import csv

import pandas as pd
import pytest

from aiter_mx.dispatch.cells import parse_config
from aiter_mx.kernels.registry import field_value, kernels_of, ops, problem_type
from aiter_mx.paths import configs_dir
from op_tests.recorded import ARCH, FILE, digest

MEASURED = configs_dir().parent / "docs" / "measured" / "nvidia_h200"
RENAMED = {"direct": "mma_registers", "mma": "mma_ring", "outer": "wgmma_fp8"}
with FILE.open(newline="") as _file:
    RECORDED = list(csv.DictReader(_file))


@pytest.mark.parametrize("row", RECORDED, ids=lambda row: f"{row['kernel']} {row['problem']}")
def test_the_simulated_kernel_gives_the_recorded_bits(row: dict[str, str]) -> None:
    of_type = problem_type(row["kernel"].partition("/")[0])
    fields = dict(pair.split("=") for pair in row["problem"].split())
    problem = of_type(**{name: field_value(of_type, name, text) for name, text in fields.items()})
    assert digest(row["kernel"], problem, parse_config(row["config"])) == row["digest"]


def test_every_kernel_is_recorded() -> None:
    known = {
        f"{op}/{kernel.name}"
        for op in ops()
        for kernel in kernels_of(op)
        if kernel.modules and kernel.is_for(ARCH)
    }
    assert known == {row["kernel"] for row in RECORDED}


def test_on_a_gpu_the_same_kernel_and_configuration_gave_the_bits_of_the_base() -> None:
    cells = pd.read_csv(MEASURED / "compare.csv")
    chosen = cells.dropna(subset=["base_kernel", "new_kernel"])

    def variant(text: str) -> tuple[str, ...]:
        name, *config = text.split()
        return RENAMED.get(name, name), *sorted(config)

    alike = chosen[chosen.base_kernel.map(variant) == chosen.new_kernel.map(variant)]
    assert len(alike) > 300 and alike.same_bits.all()
    others = cells[cells.op.isin(["grouped_gemm", "quantize"])]
    assert len(others) > 10 and others.same_bits.all()
