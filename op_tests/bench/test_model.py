"""Whole models as steps: what is timed is what transformers computes, and rows add up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import LlamaConfig, PretrainedConfig, Qwen3MoeConfig

import aiter_mx
from op_tests.bench import model as bench
from op_tests.bench.decoder import Cell, Parts, Step, build, convert
from op_tests.forked import FORKED
from op_tests.threads import in_threads

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 128,
}
TINY: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
}
CELLS = bench.cells_of([1, 3], [16], [20])


@pytest.fixture(params=TINY)
def config(request: pytest.FixtureRequest) -> PretrainedConfig:
    return TINY[request.param]


def tokens_of(model: Any, step: Any) -> Tensor:
    """What a step looks up."""
    found: list[Tensor] = []
    hook = model.model.embed_tokens.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    step()
    hook.remove()
    return found[0]


@torch.no_grad()
@pytest.mark.parametrize("side", ["bf16", "ours"])
def test_prefill_is_the_model_s_own_forward(config: PretrainedConfig, side: str) -> None:
    model = build(config, CPU)
    convert(model, side)
    step = Step(model, Cell("prefill", 2, 20), Parts())
    ids = tokens_of(model, step)
    assert ids.shape == (2, 20) and len(ids.unique()) > 20
    assert torch.equal(step(), model(ids, use_cache=False).logits[:, -1])


def test_decode_goes_on_from_a_prefill(config: PretrainedConfig) -> None:
    """The last token's logits, its cache filled by the tokens before, are those of all at once."""
    model = build(config, CPU)
    whole = Step(model, Cell("prefill", 2, 16), Parts())
    ids = tokens_of(model, whole)
    decode = Step(model, Cell("decode", 2, 16), Parts())
    for of_decode, of_whole in zip(decode.caches, whole.caches, strict=True):
        for name in ("keys", "values"):
            filled = getattr(of_whole.layers[0], name).clone()
            filled[:, :, -1] = float("nan")  # its own token is written by the step
            getattr(of_decode.layers[0], name).copy_(filled)
    decode.ids.copy_(ids[:, -1:])
    expected = whole()
    for _ in range(2):  # a replay begins at the same place
        assert (decode() - expected).float().norm() < 0.02 * expected.float().norm()


def test_layers_share_what_was_compiled_for_a_shape(config: PretrainedConfig) -> None:
    model = build(config, CPU)
    convert(model, "ours")
    torch._dynamo.reset()
    counters.clear()
    parts, cell = Parts.compiled("eager"), Cell("decode", 3, 16)
    found = Step(model, cell, parts, layers=1)()
    assert counters["stats"]["unique_graphs"] == 3, "before, a layer, after"
    found = Step(model, cell, parts)()
    assert counters["stats"]["unique_graphs"] == 3
    assert torch.equal(found, Step(model, cell, Parts())())


@torch.no_grad()
def test_rows_of_both_sides_stand_beside_each_other(
    config: PretrainedConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "new" / "model.csv"
    monkeypatch.setattr(bench, "CONFIGS", {"tiny": config})
    monkeypatch.setattr(Parts, "compiled", lambda backend: Parts())
    sides = bench.sides_of(["tiny"], ["ours", "bf16"], CELLS, 2, bench.saved(table))
    assert [side.place for side in sides] == [0, 1]
    for side in sides:
        for row in bench.measure(replace(side, place=0), CPU, bench.Together(1)):
            bench.write(row, table)
        wide = bench.beside(bench.saved(table))
    assert wide[["phase", "batch", "tokens"]].to_numpy().tolist() == [
        ["decode", 1, 16],
        ["decode", 3, 16],
        ["prefill", 1, 20],
    ]
    assert set(wide.layers) == {2} and set(wide.of_layers) == {3}
    assert (wide.over_bf16 - wide.bf16_ms / wide.ours_ms).abs().max() < 1e-12
    assert (wide.ours_weights_gib < 0.75 * wide.bf16_weights_gib).all()
    frame = bench.saved(table)
    assert 0.98 < frame[frame.side == "ours"].cosine.min() < 0.99999
    assert not bench.sides_of(["tiny"], ["ours", "bf16"], CELLS, 2, frame), "all is saved"
    left = bench.sides_of(["tiny"], ["ours"], [*CELLS, Cell("decode", 7, 16)], 2, frame)
    assert left[0].cells == [Cell("decode", 7, 16)]


def test_a_side_that_is_measured_keeps_no_rows_of_other_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "model.csv"
    for of in ("before", "now"):
        monkeypatch.setattr(bench, "commit", lambda of=of: of)
        for model, side in (("a", "ours"), ("a", "torchao"), ("b", "torchao")):
            bench.write(dict(zip(bench.KEYS, (model, 2, "decode", 1, 8, side), strict=True)), table)
    monkeypatch.setattr(bench, "commit", lambda: "now")
    bench.forget(table, ["a"], ["torchao"])
    kept = bench.saved(table)[["model", "side", "commit"]].to_numpy().tolist()
    assert kept == [
        ["a", "ours", "before"],
        ["b", "torchao", "before"],
        ["a", "ours", "now"],
        ["a", "torchao", "now"],
        ["b", "torchao", "now"],
    ]


def test_steps_of_simulated_kernels_are_those_of_the_reference(config: PretrainedConfig) -> None:
    model = build(config, CPU)
    convert(model, "ours")
    step = Step(model, Cell("decode", 3, 16), Parts())
    expected = step()
    with aiter_mx.simulate("gfx950"):
        found = step()
    assert bench.cosine(found, expected) > 0.9999


def test_a_side_that_is_not_covered_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("op_tests.bench.decoder.find_spec", lambda name: object())
    nothing = pd.DataFrame(columns=[*bench.KEYS, "commit"])
    sides = bench.sides_of(list(bench.CONFIGS), ["torchao"], CELLS, None, nothing)
    assert [side.model for side in sides] == ["llama-3.1-8b"]
    assert "qwen3-30b-a3b, torchao: left out, as its experts" in capsys.readouterr().out


@pytest.mark.slow
def test_sides_run_as_processes_whether_or_not_another_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "PROCESSES", FORKED)
    table, config = tmp_path / "model.csv", TINY["llama"]
    cells = [Cell("decode", 2, 8)]
    names = ("none such", "ours")
    sides = [bench.Side("tiny", config, 3, name, cells, at) for at, name in enumerate(names)]
    assert not bench.run_all(sides, table, float("inf"), "cpu", "eager"), "one has failed"
    assert list(bench.saved(table).side) == ["ours"]


def test_processes_build_in_turn_and_measure_without_one_that_failed() -> None:
    together, order = bench.Together(2), []

    def fails() -> None:
        with together.building(0):
            order.append("first")
        together.fail(0)

    def measures() -> None:
        with together.building(1):
            order.append("second")
        with together.measuring(1):
            order.append("measured")

    in_threads(lambda index: (measures, fails)[index](), 2)
    assert order == ["first", "second", "measured"]
