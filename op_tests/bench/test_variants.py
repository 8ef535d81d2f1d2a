"""What the linear's other dtypes are compared with, and what stands for a missing table."""

from __future__ import annotations

import pytest
import torch

import aiter_mx
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.target import hardware
from op_tests.bench import every_m, variants

SM90 = hardware("sm_90a")


def test_each_call_is_the_product_in_its_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (every_m, variants):
        monkeypatch.setattr(module, "copies_to_stay_cold", lambda size: 2)
    torch.manual_seed(0)
    weights = every_m.Weights(64, 96, torch.device("cpu"), with_peers=False)
    calls = variants.calls_of(weights, 5, {})
    assert {*calls} == {*variants.OF_DTYPES, "cublas"}
    results = {name: of[1]() for name, of in calls.items()}
    assert all(result.shape == (5, 64) for result in results.values())
    dtypes = {name: result.dtype for name, result in results.items()}
    bf16, fp16 = torch.bfloat16, torch.float16
    assert dtypes == {"usual": bf16, "fp16": fp16, "bias": bf16, "fp32": torch.float32} | {
        "bf16_x": bf16,
        "fp16_x": fp16,
        "cublas": bf16,
    }
    usual = results["fp32"]
    assert torch.equal(results["usual"], usual.bfloat16())
    bias = calls["bias"][1].args[4]
    assert torch.allclose(results["bias"].float(), usual + bias.float(), rtol=2**-8, atol=1e-3)
    x, _, *w = calls["bf16_x"][1].args[:4]
    assert torch.equal(results["bf16_x"], aiter_mx.linear(x, None, *w))
    held = results["fp16_x"].isfinite()  # what is drawn for w goes beyond fp16
    of_bf16, of_fp16 = (results[name][held].float() for name in ("bf16_x", "fp16_x"))
    assert held.float().mean() > 0.5 and (of_fp16 - of_bf16).norm() < 0.05 * of_bf16.norm()


def test_without_a_table_and_with_one_of_another_gpu_other_kernels_may_be_taken() -> None:
    found = {M: variants.untabled(SM90, LinearProblem(M, 2304, 6144)) for M in (1, 16, 1024)}
    assert all(
        target == SM90
        for each in found.values()
        for target, _ in [each.get("no_table", (SM90, None))]
    )
    assert any("no_table" in each for each in found.values())
    assert "no_table" not in found[1024], "no row has so many"
    target, chosen = found[1024]["other_cus"]
    assert target.cu_num == SM90.cu_num - variants.OTHER_CUS and chosen.source == "envelope"


def test_a_cell_has_the_ratios_of_what_was_timed() -> None:
    times = {"usual": 10.0, "fp16": 10.5, "bias": 11.0, "fp32": 12.0, "bf16_x": 16.0}
    times |= {"fp16_x": 8.0, "cublas": 15.0, "no_table": 20.0}
    row = variants.row_of(SM90, LinearProblem(64, 5120, 2880), times)
    assert (row["fp16_over_usual"], row["fp32_over_usual"]) == (1.05, 1.2)
    assert (row["fp16_x_over_bf16_x"], row["no_table_over_usual"]) == (0.5, 2.0)
    assert (row["cublas_over_usual"], row["cublas_over_no_table"]) == (1.5, 0.75)
    assert row["other_cus_us"] is None and row["cublas_over_other_cus"] is None
    assert row["usual_kernel"] and row["fp32_kernel"]
