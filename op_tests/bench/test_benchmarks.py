"""The benchmarks where there is nothing to measure."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import aiter_mx
from aiter_mx.codec import dequantize_block_scaled
from aiter_mx.kernels.moe_gemm import MoeGemmProblem, triton
from aiter_mx.kernels.spec import Config
from aiter_mx.target import Target, hardware
from op_tests.bench import common, layers, linear, moe, pictures, training, warmup
from op_tests.bench.common import MEASURED, normal_mx


@pytest.mark.parametrize(
    "name",
    [
        *("capacity", "grouped", "host", "invariance", "linear"),
        *("model", "moe", "quantize", "rmsnorm", "training", "warmup"),
    ],
)
def test_without_a_gpu_a_benchmark_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit, match="measures a GPU, and torch finds none here"):
        import_module(f"op_tests.bench.{name}").main()


def test_what_numbers_of_rows_compile_after_a_warm_up_is_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bound = []

    def warm_up(op: str, *, M: range, **_: object) -> None:
        assert op == "linear" and list(M) == [1, 2, 3, 4, 5, 6]
        for name in ("a.cubin", "b.cubin", "b.about"):
            (tmp_path / name).touch()

    def bind(op: str, target: object, problem: Any, device: torch.device) -> None:
        bound.append(problem.M)
        if problem.M == 5:
            (tmp_path / "c.cubin").touch()

    monkeypatch.setenv("AITER_MX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("aiter_mx.warmup", warm_up)
    monkeypatch.setattr("aiter_mx.plan.bind", bind)
    found = warmup.warm("linear", most=6, N=64, K=128)
    assert (found["objects"], found["compiled_after"]) == (2, 1)
    assert bound == [1, 2, 3, 4, 5, 6] and 0 <= float(str(found["warmup_s"])) < 1


@pytest.mark.parametrize("sweep", [False, True])
def test_the_linears_table_is_of_what_was_timed(
    sweep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, tables = [], {}

    def clock(calls: list[Any], *_: object) -> float:
        graphs.append(calls)
        return float(len(graphs))

    def report(title: str, rows: list[dict[str, Any]], name: str) -> None:
        tables[name] = rows

    nothing = {"refuse_no_gpu": None, "compile_all": None, "time_vendor": None}
    for name, value in nothing.items():
        monkeypatch.setattr(linear, name, lambda *_, value=value: value)
    monkeypatch.setattr(linear, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(linear, "copies_to_stay_cold", lambda size: 3)
    read: list[int] = []

    def reader(_: Target, overlaps: bool = False) -> Callable[[list[torch.Tensor]], float]:
        return lambda tensors: read.extend(map(len, tensors)) or (1.25 if overlaps else 1.5)

    monkeypatch.setattr(linear, "reader", reader)
    monkeypatch.setattr(common, "build_all", lambda _: None)
    for module in (linear, common):
        monkeypatch.setattr(module, "target_of", lambda _: hardware("sm_90a"))
        monkeypatch.setattr(module, "time_graph_us", clock)
        monkeypatch.setattr(module, "bind", lambda *_: aiter_mx.linear)
        monkeypatch.setattr(module, "call", lambda run, *some: run(*some[:5], out=some[5]))
    monkeypatch.setattr(linear, "report", report)
    arguments = ["linear", "--save", "--M", "5", "--shapes", "64x256"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--sweep"] if sweep else arguments)
    linear.main()
    assert list(tables) == ["linear_sweep" if sweep else "linear"]
    (row,) = tables.popitem()[1]
    assert 5e-4 < row["rel_err"] < 4e-3  # of bf16
    assert row["pdl_kernel"] and row["pdl_config"] and row["over_bf16"] > 0
    assert all(len(calls) == 3 for calls in graphs)
    assert read == [64 * 256 * 33 // 32] * 6, "the floor reads scales too"
    assert (row["ours_over_floor"], row["pdl_over_floor"]) == (
        row["ours_us"] / 1.5,
        row["pdl_us"] / 1.25,
    )
    for name in ("quantised_us", "quantised_pdl_us", "normed_us", "normed_pdl_us"):
        first = graphs[int(row[name]) - 1][0]
        x, norm, w, out, pdl = first.args
        first()
        given = x if norm is None else torch.nn.functional.rms_norm(x.float(), (256,)).bfloat16()
        expected = aiter_mx.linear(given, None, *w)
        assert (out - expected).norm() <= 0.03 * expected.norm()
        assert pdl is name.endswith("_pdl_us") and (norm is None) == name.startswith("quantised")


def test_triton_gets_its_best_tile_in_its_best_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def clock(calls: Sequence[Any], seconds: float = 0.1) -> float:
        call = calls[0]
        if call.func is moe._run_triton:  # the largest in blocks of 32 is the fastest
            _, problem, config, tensors = call.args
            assert len(tensors[4]) % problem.block_m == 0  # routed in such blocks
            return 10.0 - 2 * (problem.block_m == 32) - size(config) / 1e5
        return 20.0 + len(calls)

    def size(config: Config) -> int:
        return config["BLOCK_N"] * config["BLOCK_K"]

    for module in (layers, moe):
        monkeypatch.setattr(module, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(moe, "target_of", lambda _: hardware("sm_90a"))
    monkeypatch.setattr(moe, "graph_us", clock)
    torch.manual_seed(0)
    layer = layers.make_layer(4, 2, 128, 64)
    assert layer.w1[0].shape == (4, 128, 128) and layer.dense[0].shape == (4, 128, 128)
    rows = {row["part"]: row for row in moe.bench(layer, 5, "uniform", lambda tensors: 1.0)}
    assert list(rows) == list(moe.PARTS)
    in_blocks = MoeGemmProblem(5, 128, 128, 4, 2, 32)
    best = max(triton.candidates(hardware("sm_90a"), in_blocks), key=size)
    for part in moe.PARTS[:3]:
        assert rows[part]["triton"] == "x".join(map(str, (32, *best.values())))
        assert rows[part]["triton_us"] == 8.0 - size(best) / 1e5
    assert rows["layer"]["triton"] in {str(block) for block in moe.TRITON_BLOCKS}
    assert rows["layer"]["triton_us"] > 20
    assert 5e-4 < rows["gemm1"]["rel_err"] < 4e-3  # of bf16, as it is timed
    assert 0 <= rows["gemm2"]["rel_err"] < 1e-5  # of fp32


@pytest.mark.parametrize(("touched", "copies"), [(1.5, 24), (5.0, 2)])
def test_a_layers_floor_reads_weights_and_scales_of_the_experts_touched(
    touched: float, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wq = torch.randint(0, 255, (4, 64, 64), dtype=torch.uint8).view(torch.float8_e4m3fn)
    given: list[torch.Tensor] = []

    def read_us(tensors: list[torch.Tensor]) -> float:
        given[:] = tensors
        return 2.0

    us, size = moe.floor_of(read_us, wq, touched)
    assert size == touched * 64 * 64 * 33 / 32 and len(given) == copies
    lengths = {len(each) for each in given}
    if touched < 4:  # other bytes for each call, so that none is cached
        assert (us, lengths) == (2.0, {size})
        assert len({each.data_ptr() for each in given}) > copies // 2
    else:  # scales and all do not fit the weights' own bytes
        assert lengths == {wq.numel()} and us == 2.0 * size / wq.numel()


def test_operands_are_normal_values_and_what_they_are_in_mx() -> None:
    torch.manual_seed(1)
    values, (payload, scale) = normal_mx(3, 40, 256, device=torch.device("cpu"), deviation=0.02)
    assert (payload.shape, scale.shape) == ((3, 40, 256), (3, 40, 8))
    assert 0.019 < values.float().std() < 0.021
    back = dequantize_block_scaled(payload.flatten(0, 1), scale.flatten(0, 1), torch.float32)
    assert 0 < (back - values.flatten(0, 1).float()).norm() / values.float().norm() < 0.04


def a_model_s_rows(table: Path) -> None:
    """As op_tests.bench.model writes them, with times made up."""
    cells = [("decode", 1, 128), ("decode", 64, 128), ("prefill", 1, 2048)]
    rows = [
        {"model": "llama", "layers": 4, "of_layers": 32, "phase": phase, "batch": batch}
        | {"tokens": tokens, "side": side, "ms": ms, "commit": "abc", "date": "2026-01-01"}
        for phase, batch, tokens in cells
        for side, ms in (("ours", 1.0), ("bf16", 2.0), ("torchao", 1.5))
    ]
    pd.DataFrame(rows).to_csv(table, index=False)


@pytest.mark.parametrize("name", pictures.DRAWN)
def test_saved_tables_are_drawn_without_a_gpu(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    table = tmp_path / f"{name}.csv"
    saved = MEASURED / "nvidia_h200" / table.name
    if name == "model" and not saved.is_file():
        a_model_s_rows(table)
    else:
        shutil.copy(saved, table)
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


class Clock:
    """A graph whose calls take one time in each window, after the one that tells how many."""

    calls = 1

    def __init__(self, *us: float) -> None:
        self.us = list(us)

    def time_us(self, replays: int = 1, warm: int = 1, of: object = None) -> float:
        return 1.0 if (replays, warm) == (1, 1) else self.us.pop(0)


@pytest.mark.parametrize(
    ("mode", "ours", "again", "windows"),
    [
        ("balanced", 99.0, 2, 9),  # 1.01 of a bar of 1
        ("extreme", 98.0, 2, 9),  # 0.972 of a bar of 1.05
        ("balanced", 98.0, 0, 3),
        ("extreme", 99.5, 2, 3),
        ("balanced", 95.0, 2, 3),
    ],
)
def test_what_is_near_its_bar_is_timed_for_more_rounds(
    mode: str, ours: float, again: int, windows: int
) -> None:
    graphs: dict[str, Any] = {
        "dgrad": Clock(*[ours] * 3, *[80.0] * 6),
        "dgrad_bf16": Clock(*[100.0] * 9),
        "dgrad_bf16_of_mx": Clock(*[90.0] * 9),
    }
    rounds = training.judged_us("dgrad", mode, graphs, 1.0, again)
    assert len(rounds) == windows
    row = training.figures_of("dgrad", rounds, 1e6)
    expected = 80.0 if windows == 9 else ours
    assert row["dgrad_us"] == expected and row["dgrad_over_bf16"] == 100 / expected
    each = [f"{100 / us:.3f}" for us in [ours] * 3 + [80.0] * (windows - 3)]
    assert row["dgrad_rounds"] == " ".join(each)


def test_ratios_are_medians_of_what_each_round_gives() -> None:
    """A clock that changes between rounds changes both sides of a ratio alike."""
    rounds = [
        {"step": 2 * us, "step_reused": us, "step_bf16": us, "step_bf16_of_mx": 4 * us}
        for us in (1.0, 10.0, 3.0)
    ]
    rounds[1]["step_bf16"] = 30.0
    row = training.figures_of("step", rounds, 6e6)
    assert (row["step_us"], row["step_bf16_us"], row["step_tflops"]) == (6.0, 3.0, 1.0)
    assert (row["step_over_bf16"], row["step_rounds"]) == (0.5, "0.500 1.500 0.500")
    assert (row["reused_over_bf16"], row["batches_4_over_bf16"]) == (1.0, 0.8)
    assert row["step_over_bf16_of_mx"] == 2.0
